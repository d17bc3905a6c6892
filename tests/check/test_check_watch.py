"""What --watch prints: all of it once, then what is otherwise. Expected lines are derived by hand from two reports."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from hermetic.check.output import text
from hermetic.check.output.changes import changes, said_otherwise
from hermetic.check.result import Report, State, Unread, Verdict

MENDED = "prefill: finding -> passed: CAP001"


def one(code: str, state: State, subject: str = "prefill", message: str = "") -> Verdict:
    return Verdict(code=code, state=state, subject=subject, message=message)


def report(*verdicts: Verdict, unread: tuple[str, ...] = ()) -> Report:
    return Report(
        started="2026-12-01T00:00:00+00:00",
        verdicts=list(verdicts),
        unread=[Unread(source=source, why="silent") for source in unread],
    )


def shown(before: Report | None, now: Report, verbose: bool = False) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    text.show_round(console, 2, before, now, verbose=verbose)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (report(one("CAP001", "finding")), report(one("CAP001", "passed")), [MENDED]),
        (report(one("CAP001", "finding")), report(one("CAP001", "unknown")), ["prefill: finding -> unknown: CAP001"]),
        (report(one("CAP001", "finding")), report(), ["prefill: finding -> not asked: CAP001"]),
        (report(), report(one("CAP001", "finding"), one("DET001", "finding")), ["prefill: not asked -> finding: CAP001, DET001"]),
        (report(one("CAP001", "finding")), report(one("CAP001", "finding", message="another pool")), []),
        (report(), report(unread=("http://p:1",)), ["http://p:1: not read: silent"]),
        (report(unread=("http://p:1",)), report(), ["http://p:1: read, or not there any more"]),
    ],
)  # fmt: skip
def test_a_change_says_from_which_state_to_which(before: Report, now: Report, told: list[str]) -> None:
    assert changes(before, now) == told
    assert changes(now, now) == []


def test_of_two_proxies_with_one_name_each_has_its_place() -> None:
    """The copy has moved from one file to the other: counts alone are as before."""
    one, other = (
        report(*(Verdict(code="PRX005", state=state, subject="nginx location /", where=[f"{file}, line 1"]) for file, state in zip("ab", states, strict=True)))
        for states in (("finding", "passed"), ("passed", "finding"))
    )  # fmt: skip
    assert changes(one, other) == [
        "nginx location / (a, line 1): finding -> passed: PRX005",
        "nginx location / (b, line 1): passed -> finding: PRX005",
    ]


def test_what_is_not_read_for_another_reason_or_in_part_is_told() -> None:
    one, other = (Report(unread=[Unread(source="a", why=why)]) for why in ("is a template", "is no YAML"))
    part = Report(unread=[Unread(source="a", why="an include is not here", part=True)])
    assert changes(one, other) == ["a: not read: is no YAML"]
    assert changes(other, part) == ["a: read only in part: an include is not here"]


def test_of_two_findings_with_one_sentence_a_second_one_is_told() -> None:
    same = one("CAP001", "finding", message="too small")
    assert said_otherwise(report(same), report(same, same)) == [same]


def test_many_rules_that_change_alike_are_one_line() -> None:
    codes = ["CAP001", "CAP002", "CAP003", "DET001", "DET002", "DET003"]
    before = report(*(one(code, "passed") for code in codes))
    now = report(*(one(code, "unknown") for code in codes))
    assert changes(before, now) == ["prefill: passed -> unknown: CAP001, CAP002, CAP003, DET001 and 2 more"]


def test_a_round_like_the_one_before_is_a_line() -> None:
    same = report(one("CAP001", "finding", message="too small"))
    line = "round 2 at 2026-12-01T00:00:00+00:00  as before: Not clean: 1 finding, 0 unknown, 0 passed"
    assert shown(same, same) == [line]
    assert len(shown(None, same)) > 2  # the first round
    assert len(shown(same, same, verbose=True)) > 2


def test_a_finding_with_other_numbers_is_shown_without_the_rest() -> None:
    before = report(one("CAP001", "finding", message="3 of them"), one("DET001", "finding", message="off"))
    now = report(one("CAP001", "finding", message="4 of them"), one("DET001", "finding", message="off"))
    assert [found.message for found in said_otherwise(before, now)] == ["4 of them"]
    lines = shown(before, now)
    assert lines[0].partition(": ")[0].endswith("as before, with other numbers")
    assert lines[1] == "CAP001 error  prefill: 4 of them"
    assert not any("DET001" in line for line in lines)


def test_a_round_with_a_change_says_what_and_then_all_of_it() -> None:
    lines = shown(report(one("CAP001", "finding")), report(one("CAP001", "passed")))
    assert lines[:2] == ["round 2 at 2026-12-01T00:00:00+00:00", f"changed  {MENDED}"]
    assert lines[-1].startswith("Clean: 0 findings, 0 unknown, 1 passed")
