"""What a report says, to a person, a program and a pipeline; and that nothing a server sent can do more than be read."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from audit_reports import NASTY, answered, clean, covered, differs, full, hang, leak, samples
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from hermetic.audit.exchange import Answer, Ask, Usage
from hermetic.audit.report import chart, html, json_file, junit, terminal, words
from hermetic.audit.report.redact import without_keys
from hermetic.audit.result import EVIDENCE, Coverage, Finding, Highlight, Played, Report, Sample
from hermetic.audit.scenarios import SCENARIOS

DOCS = Path(__file__).parents[2] / "docs"
VOID = {"meta", "br", "hr", "img", "link", "input"}
KNOWN_TAGS = {
    "html", "head", "meta", "title", "style", "body", "main", "header", "footer", "section", "article", "figure", "figcaption", "h1",
    "h2", "h3", "h4", "p", "span", "b", "a", "ol", "ul", "li", "dl", "dt", "dd", "div", "table", "thead", "tbody", "tfoot", "tr", "th",
    "td", "pre", "mark", "details", "summary", "svg", "g", "path", "circle", "text",
}  # fmt: skip


class Page(HTMLParser):
    """A page as a browser's parser sees it: its tags, its attributes, its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.marked: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"closes {tag}, which is not open"
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("style", "script"):
            self.texts.append(data)
        if self._open and self._open[-1] == "mark":
            self.marked.append(data)


def shown(report: Report, width: int = 110) -> str:
    """What a terminal without colours prints."""
    out = io.StringIO()
    terminal.summary(Console(file=out, width=width, highlight=False), report)
    return out.getvalue()


def attacked() -> Report:
    """Every text that a server or a network could have had a hand in is an attack."""
    bad = answered(
        9,
        "tenant-9",
        NASTY,
        NASTY + "PELICAN-7731",
        error=NASTY,
        finish=NASTY,
        server_id=NASTY,
        excerpt=NASTY,
    )
    bad.prefill = answered(9, "tenant-9", NASTY, "", error=NASTY)
    start = len(NASTY)
    other = answered(3, "tenant-3", "pelican-7731 " + NASTY, NASTY)
    found = Finding(
        evidence="marker", scenario=NASTY, what=NASTY, why=NASTY, answers=[bad, other, answered(4, NASTY, NASTY, NASTY)],
        highlights=[Highlight(9, start, start + 12, "tenant-3")], repeat=NASTY, detail={NASTY: NASTY, "deep": {"list": [NASTY]}},
    )  # fmt: skip
    return clean(
        verdict="findings", target=NASTY, model=NASTY, reason=NASTY, findings=[found], notes=[NASTY], command=NASTY,
        limits={"said": NASTY, "edges": {NASTY: {"accepted": 1, "refused": None, "said": NASTY}}}, noise={NASTY: 1},
        scenarios=[Played(name=NASTY, says=NASTY, state="cut short", reason=NASTY, how={"cut": 2}, coverage=[covered("marker", 9, 1)])],
        samples=[Sample(i, NASTY, float(i), 100 + i, 0.2, 0.3, "answered", wrong=i == 9) for i in range(1, 40)],
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ the page


def test_the_page_leads_with_the_verdict_and_its_bound_in_plain_words() -> None:
    page = Page(html.page(clean(411)))
    assert page.texts[1].strip() == "" or "Nothing found" in page.text[:80]
    # Rule of three by hand: 3 / 411 is 1 / 137.
    assert (
        "0 of 411 answers held anyone else's marker: with 95 % confidence fewer than 1 in 137 requests like these do."
        in page.text
    )


def test_the_page_needs_nothing_else() -> None:
    page = Page(html.page(full()))
    assert set(page.tags) <= KNOWN_TAGS
    assert "script" not in page.tags
    sources = [
        (tag, name) for tag, name, _ in page.attributes if name in ("src", "href", "action", "data", "srcset")
    ]
    assert {tag for tag, _ in sources} <= {"a"}
    assert not re.search(r"url\(|@import", html.page(full()))


def test_a_finding_stands_beside_the_request_it_came_from() -> None:
    page = Page(html.page(full()))
    assert page.marked == ["PELICAN-7731", "pelican-7731"]
    for said in ("The request it belongs to", "tenant-3, request 3", "p = 2.4e-11", "seen 3 times", "--scenario over-capacity",
                 "Looks like a known fault: SGLang pair", "in 0.5.20", "sgl-project/sglang#30233"):  # fmt: skip
        assert said in page.text, said


def test_what_was_not_run_never_looks_like_clean() -> None:
    report = full()
    row = re.search(r'<tr class="missing">.*?</tr>', html.page(report), re.S)
    assert row is not None
    assert "needs --second-key" in row[0]
    assert "0 of" not in row[0]
    never = clean(0, scenarios=[Played(name="soak", says="", reason="no time")], verdict="nothing found")
    for text in (Page(html.page(never)).text, shown(never)):
        assert "Could not run" in text
        assert "Nothing found" not in text


@pytest.mark.parametrize(
    ("how", "coverage"),
    [
        ({"failed": 72}, [covered("liveness", 72), covered("semantics", 72)]),  # nothing but errors
        ({"refused": 72}, [covered("liveness", 72)]),
        ({"answered": 8, "garbled": 9}, [covered("liveness", 17), covered("marker", 8)]),
    ],
)
def test_an_audit_that_hardly_got_an_answer_is_not_nothing_found(
    how: dict[str, int], coverage: list[Coverage]
) -> None:
    played = Played(
        name="mixing", says="", state="done", how=how, requests=sum(how.values()), coverage=coverage
    )
    report = clean(scenarios=[played], verdict="could not run", reason="hardly a request was answered")
    for text in (Page(html.page(report)).text, shown(report)):
        assert "Could not run" in text
        assert "Nothing found" not in text
        assert "Hardly a request was answered." in text
        for kind in how.keys() & {"failed", "garbled"}:
            assert f"{how[kind]} requests ended as {kind}: what they would have shown is not covered." in text


def test_a_scenario_that_compared_nothing_is_told() -> None:
    report = clean(
        scenarios=[*clean().scenarios, Played(name="identical", says="", state="done", requests=4)]
    )
    for text in (Page(html.page(report)).text, shown(report)):
        assert "played, but nothing could be compared" in text
        assert "1 of 2 scenarios compared nothing" in text


def test_what_a_scenario_left_out_stands_beside_what_it_covered() -> None:
    report = clean()
    report.scenarios[0].reason = "lengths above 4,096 take too long here"
    for text in (Page(html.page(report)).text, shown(report), junit.text(report)):
        assert "left out here: lengths above 4,096 take too long here" in text
    assert "Nothing found" in Page(html.page(report)).text


def test_scenarios_with_one_reason_are_told_in_one_line() -> None:
    names = ("lengths", "identical", "soak")
    late = [Played(name=name, says="", reason="no time left in the budget") for name in names]
    told = f"{', '.join(names)}: not run: no time left in the budget"
    report = clean(scenarios=[late[0], *clean().scenarios, *late[1:]])
    report.scenarios[1].reason = "lengths above 4,096 take too long here"
    for text in (Page(html.page(report)).text, shown(report)):
        assert told in text
        assert "mixing: left out here: lengths above 4,096 take too long here" in text
    assert shown(report).count("no time left") == 1


def test_kinds_of_evidence_that_compared_nothing_are_told() -> None:
    report = clean()  # its one scenario has markers, semantics and differential
    for text in (Page(html.page(report)).text, shown(report)):
        for kind in ("contrast", "liveness", "timing"):
            assert f"{kind}: nothing was compared (" in text
        assert "marker: nothing was compared" not in text
    never = clean(0, scenarios=[Played(name="soak", says="", reason="no time")])
    assert "nothing was compared (" not in shown(never)


def test_what_a_page_says_beside_is_not_called_uncovered() -> None:
    text = html.page(clean(notes=["The server told requests to slow down 3 times"]))
    uncovered, _, beside = text.partition("What else is to be known")
    assert "What this does not cover" in uncovered
    assert "slow down 3 times" in beside
    assert "slow down" not in uncovered


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no time left", "No time left."),
        ("http://127.0.0.1:8000 serves no model now; is it still loading?", "http://127.0.0.1:8000 serves no model now; is it still loading?"),
        ("sglang-pd://a:1,b:2: no", "sglang-pd://a:1,b:2: no."),
    ],
)  # fmt: skip
def test_a_sentence_begins_with_a_capital_letter_but_a_url_stays_as_it_is(text: str, said: str) -> None:
    assert words.sentence(text) == said


def test_an_audit_that_was_broken_off_is_not_nothing_found() -> None:
    report = clean(verdict="could not run", reason="interrupted", complete=False)
    for text in (Page(html.page(report)).text, shown(report)):
        assert "Broken off" in text
        assert "Interrupted." in text
        assert "Nothing found" not in text
        assert "fewer than 1 in 137" in text


def test_findings_of_an_audit_that_was_broken_off_are_not_all_there_is_to_say() -> None:
    report = clean(verdict="findings", reason="interrupted", complete=False, findings=[leak()])
    for text in (Page(html.page(report)).text, shown(report)):
        assert "1 finding, but not all was played" in text


def test_with_a_leak_no_bound_is_given() -> None:
    assert "3 of 494 answers held another tenant's marker" in words.bound_sentence(full())
    assert "fewer" not in words.bound_sentence(full())


def test_nothing_of_a_server_is_more_than_text() -> None:
    page = Page(html.page(attacked()))
    assert set(page.tags) <= KNOWN_TAGS
    assert "script" not in page.tags
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert "<script>alert('x')</script>" in page.text
    assert page.marked == ["PELICAN-7731", "pelican-7731"]


@pytest.mark.parametrize("show", [html.page, shown, junit.text])
def test_no_sign_that_reorders_hides_or_commands_is_left(show: object) -> None:
    text = show(attacked())  # type: ignore[operator]
    text.encode("utf-8")
    assert not [c for c in text if (ord(c) < 32 and c not in "\n\t") or c in "\u202e\u202c\u2028\x7f"]


def test_a_text_of_a_megabyte_is_cut_but_not_where_it_is_marked() -> None:
    text = "weather " * 80_000 + "PELICAN-7731" + " weather" * 80_000
    report = full()
    report.findings = [leak(text)]
    page = html.page(report)
    assert len(page) < 300_000
    assert Page(page).marked == ["PELICAN-7731", "pelican-7731"]
    assert "characters left out" in page
    marked = leak("x" * 1_000_000)
    marked.highlights = [Highlight(9, 0, 1_000_000, "tenant-3")]
    report.findings = [marked]
    assert len(html.page(report)) < 300_000


def test_a_thousand_findings_make_a_page_that_can_be_read() -> None:
    report = full()
    report.findings = [leak() for _ in range(1000)]
    page = html.page(report)
    assert len(page) < 2_000_000
    assert "900 more stand in the JSON report" in page


@given(st.text(max_size=3000), st.lists(st.tuples(st.integers(-5, 3100), st.integers(-5, 3100)), max_size=8))
def test_pieces_keep_every_character_or_say_how_many_are_missing(
    text: str, spans: list[tuple[int, int]]
) -> None:
    marks = [Highlight(1, start, end, "b") for start, end in spans]
    got = words.pieces(text, marks)
    assert sum(p.left_out for p in got) == len(text) - sum(len(text[a:b]) for a, b in _plain_kept(text, got))
    rebuilt = "".join("\x00" * p.left_out if p.left_out else p.text for p in got)
    expected = words.visible(text)
    if not any(p.left_out for p in got):
        assert rebuilt == expected
    inside = {i for start, end in spans for i in range(max(0, start), min(end, len(text)))}
    if not any(p.left_out for p in got):
        assert sum(len(p.text) for p in got if p.whose) == len(
            words.visible("".join(text[i] for i in sorted(inside)))
        )


def _plain_kept(text: str, got: list[words.Piece]) -> list[tuple[int, int]]:
    """Where the stretches that are shown lie in the text, found by their lengths when nothing had to be made visible."""
    at, kept = 0, []
    for piece in got:
        size = piece.left_out or _original(text, at, piece.text)
        if not piece.left_out:
            kept.append((at, at + size))
        at += size
    assert at == len(text)
    return kept


def _original(text: str, at: int, shown_as: str) -> int:
    size = made = 0
    while made < len(shown_as):
        made += len(words.visible(text[at + size]))
        size += 1
    assert made == len(shown_as)
    return size


@given(st.text())
def test_visible_text_has_nothing_to_obey_and_stays_as_it_is_when_harmless(text: str) -> None:
    seen = words.visible(text)
    seen.encode("utf-8")
    assert all(c.isprintable() or c in "\n\t\u200c\u200d\u3000\u00a0" or c.isspace() for c in seen)
    assert words.visible(seen) == seen


# ------------------------------------------------------------------------------------------------ numbers in words


@pytest.mark.parametrize(
    ("compared", "said"),
    [
        (0, "nothing is known about leaks"),
        (5, "too few"),
        (6, "fewer than 1 in 2 "),
        (3000, "fewer than 1 in 1,000 "),
    ],
)
def test_the_bound_is_the_rule_of_three(compared: int, said: str) -> None:
    assert said in words.bound_sentence(clean(compared, scenarios=[
        Played(name="a", says="", state="done", coverage=[covered("marker", compared)])]))  # fmt: skip


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.0, "0 s"),
        (0.085, "85 ms"),
        (2.46, "2.5 s"),
        (30.0, "30 s"),
        (250, "4 min 10 s"),
        (7260, "2 h 1 min"),
    ],
)
def test_times_are_said_as_people_say_them(value: float, said: str) -> None:
    assert words.seconds(value) == said


def test_a_chance_is_said_as_a_number_of_audits() -> None:
    assert words.chance(2.5e-7) == "p = 2.5e-07, chance would do this in 1 of 4,000,000 whole audits"
    assert words.chance(0.0) == "p < 1e-300"
    assert words.chance(None) == "nothing is left to chance here"


# ------------------------------------------------------------------------------------------------ charts


def test_an_answer_six_times_slower_than_its_like_is_an_outlier() -> None:
    found, _ = chart.points(samples())
    assert {p.sample.number for p in found if p.outlier} == {97, 194, 291, 388, 485, 582}


def test_an_even_server_has_no_outliers() -> None:
    even = [Sample(i, "a", float(i), 100, 0.2 if i % 20 else 0.23, 0.5, "answered") for i in range(200)]
    assert chart.outliers(even) == 0


def test_what_is_wrong_is_drawn_however_many_points_there_are() -> None:
    many = [
        Sample(i, "a", float(i), 10 + i % 900, 0.1, 0.5, "answered", wrong=i == 777) for i in range(20_000)
    ]
    drawn = chart.latency(many)
    assert "request 777" in drawn
    assert drawn.count('class="dot"') <= chart.MOST + 1
    assert drawn.count('class="bad"') == 2  # the point, and its sign in the legend


def test_silence_is_drawn_where_it_was_given_up() -> None:
    assert "no answer" in chart.latency(samples())


@given(
    st.lists(
        st.tuples(
            st.one_of(st.none(), st.integers(0, 10**7)), st.one_of(st.none(), st.floats(0, 1e5)), st.floats(0, 1e6), st.booleans(),
            st.sampled_from(["answered", "silent", "refused"]),
        ),
        max_size=60,
    )
)  # fmt: skip
def test_any_samples_make_a_chart_or_none(
    rows: list[tuple[int | None, float | None, float, bool, str]],
) -> None:
    many = [
        Sample(i, "a", sent, tokens, first, (first or 0.0) + 1.0, how, bad)
        for i, (tokens, first, sent, bad, how) in enumerate(rows)
    ]
    for drawn in (chart.latency(many), chart.drift(many)):
        assert "nan" not in drawn
        assert "inf" not in drawn
        if drawn:
            ElementTree.fromstring(f"<div>{drawn}</div>")


# ------------------------------------------------------------------------------------------------ the terminal


def test_the_terminal_says_the_same_without_colours() -> None:
    text = shown(full())
    assert "\x1b" not in text
    for said in ("audit of http://127.0.0.1:8000, model smollm2, profile standard", "3 findings", "3 of 494", "1 of 474", "key pairs: not run: needs --second-key", "PELICAN-7731",
                 "1. An answer to tenant-9", "--scenario over-capacity", "looks like"):  # fmt: skip
        assert said in text, said


def test_the_terminal_says_what_else_is_to_be_known() -> None:
    text = shown(clean(notes=["The server told requests to slow down 3 times"]))
    assert text.rstrip().endswith("The server told requests to slow down 3 times")


def test_a_command_to_repeat_stays_on_one_line_in_a_narrow_terminal() -> None:
    report = full()
    report.findings = [leak()]
    out = io.StringIO()
    terminal.summary(Console(file=out, width=60, force_terminal=True, color_system=None), report)
    assert f"again       {report.findings[0].repeat}\n" in out.getvalue()


def test_reasons_are_not_cut_short_in_a_narrow_terminal() -> None:
    out = io.StringIO()
    terminal.summary(Console(file=out, width=80, force_terminal=True, color_system=None), full())
    assert "did not end 30 s after its share of the time" in out.getvalue()
    assert "not run" in out.getvalue()


def test_markup_of_a_server_is_no_markup() -> None:
    report = clean(
        verdict="findings", findings=[leak("[bold red]x[/bold red] [link=http://evil]y[/link] PELICAN-7731")]
    )
    assert "[bold red]x[/bold red] [link=http://evil]y[/link] PELICAN-7731" in shown(report)


def test_progress_is_plain_lines_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    with terminal.Live(Console(file=out, width=100)) as live:
        live.learning("which models \x1b[31m")
        live.playing(Played(name="mixing", says="different prompts"), 2, 7, 90.0)
        for findings in (0, 0, 1):
            live.asked(answered(1, "a", "x", "y"), findings, 80.0)
    assert out.getvalue().splitlines() == [
        "learning: which models \u27e8U+001B\u27e9[31m", "2/7 mixing: different prompts", "1 finding so far, after 3 requests",
    ]  # fmt: skip


def test_progress_says_why_it_is_slow_where_a_server_asks_for_patience() -> None:
    out = io.StringIO()
    with terminal.Live(Console(file=out, width=100)) as live:
        live.learning("how fast it is")
        for _ in range(3):
            live.slowed(2.5)
    assert out.getvalue().splitlines()[1:] == [
        "how fast it is: the server tells the audit to slow down, and it waits 2.5 s"
    ]
    out = io.StringIO()
    with terminal.Live(Console(file=out, width=100, force_terminal=True, color_system=None)) as live:
        live.slowed(2.5)
        live.slowed(2.5)
    assert "told to slow down 2 times" in out.getvalue()


def test_quiet_says_nothing() -> None:
    out = io.StringIO()
    with terminal.Live(Console(file=out, force_terminal=True), quiet=True) as live:
        live.playing(Played(name="mixing", says=""), 1, 1, 90.0)
        live.asked(answered(1, "a", "x", "y"), 1, 80.0)
    assert out.getvalue() == ""


def test_on_a_terminal_progress_shows_where_it_is_and_what_was_found() -> None:
    out = io.StringIO()
    with terminal.Live(Console(file=out, force_terminal=True, width=100, color_system=None)) as live:
        live.playing(Played(name="mixing", says="different prompts"), 2, 7, 90.0)
        live.asked(hang().answers[0], 1, 80.0)
    last = out.getvalue()
    assert "2/7 mixing" in last
    assert "1 request, 1 finding, 1 silent, 1 min 20 s left" in last


# ------------------------------------------------------------------------------------------------ keys


KEY = "sk-Sehr+geheim/42=="


@pytest.mark.parametrize("show", [html.page, shown, junit.text, lambda r: json_file.dump(r).decode()])
def test_no_key_leaves_with_a_report(show: object) -> None:
    basic = base64.b64encode(KEY.encode()).decode()
    echo = f"Basic {basic}, incorrect API key provided: {KEY}. See http://me:hunter2@host/v1?key=sk-Sehr%2Bgeheim%2F42%3D%3D"
    report = full()
    report.target, report.reason, report.notes = f"http://user:{KEY}@host", echo, [echo]
    report.findings[0].answers[0].error = report.findings[0].answers[0].text = echo
    report.findings[0].detail = {"said": echo, echo: 1, "raw": [echo]}
    report.findings[0].answers[0].ask = Ask(
        tenant="a", prompt="x", headers={"Authorization": "Bearer other-secret"}, raw=echo.encode() + b"\xff"
    )
    text = show(without_keys(report, (KEY, None, "")))  # type: ignore[operator]
    for secret in (KEY, "Sehr", "hunter2", "other-secret", basic):
        assert secret not in text


def test_highlights_keep_their_places_when_a_key_is_taken_out() -> None:
    report = clean(verdict="findings", findings=[leak(f"{KEY} PELICAN-7731")])
    assert Page(html.page(without_keys(report, (KEY,)))).marked == ["PELICAN-7731", "pelican-7731"]


def test_a_report_without_keys_in_it_stays_as_it_is() -> None:
    assert without_keys(full(), (KEY, "the")) == full()  # "the" is too short to be a secret


def test_a_key_that_is_a_word_of_ours_does_not_make_the_report_unreadable(tmp_path: Path) -> None:
    json_file.write(tmp_path / "r.json", without_keys(full(), ("marker", "findings", "answered")))
    assert json_file.read(tmp_path / "r.json").findings[0].evidence == "marker"


# ------------------------------------------------------------------------------------------------ JSON


def test_a_report_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    json_file.write(tmp_path / "r.json", full())
    assert json_file.read(tmp_path / "r.json") == full()


def test_lone_surrogates_and_endless_numbers_do_not_stop_a_report(tmp_path: Path) -> None:
    report = attacked()
    report.findings[0].detail = {"gap": float("inf"), "lone": "\ud800"}
    json_file.write(tmp_path / "r.json", report)
    back = json_file.read(tmp_path / "r.json")
    assert back.findings[0].answers[0].text == report.findings[0].answers[0].text.replace("\ud800", "\ufffd")
    assert back.findings[0].highlights == report.findings[0].highlights


def test_a_report_that_cannot_be_written_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    json_file.write(path, clean())
    before = path.read_bytes()

    def full_disk(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(json_file.ReportFileError, match=r"cannot write .*r\.json: No space left on device"):
        json_file.write(path, full())
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["r.json"]


def test_a_new_report_can_be_read_by_whom_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        json_file.write(tmp_path / "r.json", clean())
    finally:
        os.umask(before)
    assert (tmp_path / "r.json").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{", "not one JSON object"), (b"[]", "not one JSON object"), (b"\xff", "not one JSON object"),
        (b'{"version": 9}', "version 9"), (b'{"version": 1}', "missing required field"),
        (b'{"version":1,"target":"","model":"","profile":"","seed":"x","started":""}', "Expected `int`"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_report_says_so(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "r.json").write_bytes(content)
    with pytest.raises(json_file.ReportFileError, match=re.escape(why)):
        json_file.read(tmp_path / "r.json")


def test_a_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(json_file.ReportFileError, match="cannot read"):
        json_file.read(tmp_path / "none.json")
    with pytest.raises(json_file.ReportFileError, match="cannot write"):
        json_file.write(tmp_path / "no" / "r.json", clean())


def test_the_published_schema_is_that_of_the_code() -> None:
    published = (DOCS / "audit-schema.json").read_bytes()
    assert published == json_file.schema(), (
        "run: python -m hermetic.audit.report.json_file docs/audit-schema.json"
    )


def test_the_schema_is_written_by_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json_file.main([str(tmp_path / "schema.json")]) == 0
    assert (tmp_path / "schema.json").read_bytes() == json_file.schema()
    assert json_file.main([str(tmp_path / "no" / "schema.json")]) == 2
    assert json_file.main(["a", "b"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("error: cannot write")
    assert said[1].startswith("usage: python -m hermetic.audit.report.json_file")


def test_an_axis_does_not_enlarge_what_hardly_varies() -> None:
    even = [Sample(i, "a", float(i), 100 + i % 2, 0.2 + i % 2 * 0.01, 0.5, "answered") for i in range(40)]
    heights = {
        float(y)
        for y in re.findall(
            r'class="dot" cx="[\d.]+" cy="([\d.]+)"', chart.latency(even).split('class="legend"')[0]
        )
    }
    assert max(heights) - min(heights) < 20  # of more than 200


def test_the_docs_name_every_scenario_and_every_kind_of_evidence() -> None:
    text = (DOCS / "audit.md").read_text()
    for name in (*SCENARIOS, *(kind for kind in EVIDENCE)):
        assert f"`{name}`" in text or f"| {name} |" in text, name


def test_a_report_fits_the_published_schema() -> None:
    schema = json.loads((DOCS / "audit-schema.json").read_text())
    for report in (full(), clean(), attacked()):
        _fits(json.loads(json_file.dump(report)), schema, schema["$defs"], "report")


def _fits(value: object, schema: dict[str, object], parts: dict[str, dict[str, object]], where: str) -> None:
    """The part of JSON schema that the published one uses, as the specification has it."""
    if "$ref" in schema:
        _fits(value, parts[str(schema["$ref"]).rsplit("/", 1)[1]], parts, where)
    if "anyOf" in schema:
        failures = []
        for option in schema["anyOf"]:  # type: ignore[attr-defined]
            try:
                _fits(value, option, parts, where)
                break
            except AssertionError as error:
                failures.append(str(error))
        else:
            raise AssertionError(f"{where}: {failures}")
    if "enum" in schema:
        assert value in schema["enum"], where  # type: ignore[operator]
    kinds = {
        "string": str,
        "integer": int,
        "boolean": bool,
        "number": (int, float),
        "array": list,
        "object": dict,
        "null": type(None),
    }
    if "type" in schema:
        assert isinstance(value, kinds[str(schema["type"])]), f"{where}: {value!r} is no {schema['type']}"  # type: ignore[arg-type]
    if isinstance(value, dict):
        assert set(schema.get("required", ())) <= set(value), where  # type: ignore[call-overload]
        properties: dict[str, dict[str, object]] = schema.get("properties", {})  # type: ignore[assignment]
        for name, item in value.items():
            if name in properties:
                _fits(item, properties[name], parts, f"{where}.{name}")
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        for number, item in enumerate(value):
            _fits(item, schema["items"], parts, f"{where}[{number}]")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ JUnit


def cases(report: Report) -> tuple[ElementTree.Element, dict[str, ElementTree.Element]]:
    top = ElementTree.fromstring(junit.text(report))
    suite = top.find("testsuite")
    assert suite is not None
    return suite, {case.get("name", ""): case for case in suite.findall("testcase")}


def test_each_scenario_is_a_test_case_and_each_finding_a_failure() -> None:
    suite, by_name = cases(full())
    assert [suite.get(k) for k in ("tests", "failures", "errors", "skipped")] == ["5", "2", "0", "2"]
    assert len(by_name["over-capacity"].findall("failure")) == 2
    assert by_name["mixing"].find("failure") is None
    skipped = by_name["key pairs"].find("skipped")
    assert skipped is not None
    assert skipped.get("message") == "not run: needs --second-key"


def test_a_scenario_that_was_cut_short_or_compared_nothing_has_not_passed() -> None:
    report = clean(scenarios=[
        Played(name="a", says="", state="cut short", reason="interrupted", coverage=[covered("marker", 50)]),
        Played(name="b", says="", state="done", coverage=[covered("marker", 0)]),
    ])  # fmt: skip
    _, by_name = cases(report)
    assert all(case.find("skipped") is not None for case in by_name.values())


def test_an_audit_that_could_not_run_is_red_in_a_pipeline() -> None:
    suite, by_name = cases(clean(0, verdict="could not run", reason="no connection", scenarios=[]))
    assert suite.get("errors") == "1"
    error = by_name["the audit itself"].find("error")
    assert error is not None
    assert "No connection." in error.get("message", "")


def test_a_finding_outside_of_any_scenario_is_a_failure_as_well() -> None:
    stray = differs()
    stray.scenario = "learning"
    suite, by_name = cases(clean(verdict="findings", findings=[stray]))
    assert suite.get("failures") == "1"
    assert by_name["learning"].find("failure") is not None


def test_nothing_of_a_server_breaks_the_xml() -> None:
    suite, _ = cases(attacked())
    assert suite.get("failures") == "1"


@given(st.text(max_size=200))
def test_any_text_makes_xml_that_can_be_read(text: str) -> None:
    found = differs()
    found.what = found.scenario = text
    found.answers[0] = Answer(
        ask=Ask(tenant=text, prompt=text),
        number=1,
        sent=0.0,
        how="answered",
        text=text,
        usage=Usage(),
        error=text,
    )
    ElementTree.fromstring(junit.text(clean(verdict="findings", findings=[found], target=text)))
    json.loads(json_file.dump(clean(notes=[text])))
    msgspec.json.decode(json_file.dump(clean(notes=[text])), type=Report)
