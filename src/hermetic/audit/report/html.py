"""The report as one HTML page that needs nothing else: no script, no font, no picture from anywhere.

The one thing to know: two guards stand between a server's text and whoever reads it. Every text passes `words.visible` and
then `escape`; and the page's own policy forbids scripts, frames and every address, should one ever slip through.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from hermetic.audit.exchange import Answer
from hermetic.audit.report import chart, words
from hermetic.audit.report.style import STYLE
from hermetic.audit.result import EVIDENCE, Coverage, Finding, Highlight, Played, Report
from hermetic.audit.signatures import BY_NAME, Signature

FINDINGS = 100  # shown in full
BESIDE = 6  # more exchanges of a finding, folded
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def page(report: Report) -> str:
    """The whole page. Holds no lone surrogates, so it can be written as UTF-8."""
    parts = [
        _verdict(report),
        _table(report),
        _findings(report),
        _charts(report),
        _notes(report),
        _learned(report),
        _end(report),
    ]
    title = f"{words.headline(report)}: audit of {words.line(report.target, 80)}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f"<title>{_t(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def _t(text: str) -> str:
    """Any text, fit to stand in the page."""
    return escape(words.visible(text))


# ---------------------------------------------------------------------------------------------- verdict


def _verdict(report: Report) -> str:
    head = words.headline(report)
    kind = "bad" if report.findings else "good" if head == "Nothing found" else "unsure"
    told = [f"<p class='bound'>{_t(words.bound_sentence(report))}</p>"]
    why = words.reason(report)
    if why:
        told.insert(0, f"<p>{_t(why)}</p>")
    if report.findings:
        told.insert(0, _in_short(report.findings))
    about = [
        ("target", report.target), ("model", report.model or "not known"), ("profile", f"{report.profile}, seed {report.seed}"),
        ("begun", report.started), ("took", words.seconds(report.seconds)), ("asked", words.count(report.requests, "request")),
    ]  # fmt: skip
    facts = "".join(f"<div><dt>{_t(name)}</dt><dd>{_t(value)}</dd></div>" for name, value in about)
    sign = {"bad": "\u2715", "good": "\u2713", "unsure": "?"}[kind]
    return (
        f'<header class="{kind}"><p class="what">hermetic audit</p><h1><span class="sign" aria-hidden="true">{sign}</span>'
        f"{_t(head)}</h1>{''.join(told)}<dl class='about'>{facts}</dl></header>"
    )


def _in_short(findings: Sequence[Finding]) -> str:
    first = "".join(
        f'<li><a href="#f{n}">{_t(words.sentence(f.what, 240))}</a></li>'
        for n, f in enumerate(findings[:5], 1)
    )
    more = f"<li>and {len(findings) - 5:,} more</li>" if len(findings) > 5 else ""
    return f"<ol class='short'>{first}{more}</ol>"


# ---------------------------------------------------------------------------------------------- table


def _table(report: Report) -> str:
    heads = "".join(f'<th scope="col" title="{_t(words.EVIDENCE_SAYS[e])}">{e}</th>' for e in EVIDENCE)
    rows = "".join(_row(played) for played in report.scenarios)
    totals = "".join(_cell(words.total(report, e)) for e in EVIDENCE)
    foot = f'<tr><th scope="row">all</th><td class="num">{report.requests:,}</td>{totals}</tr>'
    return (
        "<section><h2>What was compared</h2><p>Findings of comparisons, and below them how rare a fault can still be, with "
        "95 % confidence. A dash: this was not looked at, so nothing is said about it.</p>"
        f'<div class="wide"><table class="grid"><thead><tr><th scope="col">scenario</th><th scope="col" class="num">requests'
        f"</th>{heads}</tr></thead><tbody>{rows}</tbody><tfoot>{foot}</tfoot></table></div></section>"
    )


def _row(played: Played) -> str:
    standing = words.standing(played)
    says = f'<span class="says">{_t(words.line(played.says, 200))}</span>' if played.says else ""
    note = f'<span class="gap">{_t(standing)}</span>' if standing else ""
    note += (
        f'<span class="says">left out here: {_t(words.left_out(played))}</span>'
        if words.left_out(played)
        else ""
    )
    name = f'<th scope="row"><b>{_t(played.name)}</b>{says}{note}</th>'
    if played.state == "not run":
        return f'<tr class="missing">{name}<td class="num">{played.requests:,}</td><td colspan="{len(EVIDENCE)}">not run</td></tr>'
    by_kind = {c.evidence: c for c in played.coverage}
    cells = "".join(_cell(by_kind.get(e)) for e in EVIDENCE)
    kind = ' class="part"' if standing else ""
    return f'<tr{kind}>{name}<td class="num">{played.requests:,}</td>{cells}</tr>'


def _cell(cell: Coverage | None) -> str:
    if cell is None or not (cell.comparisons or cell.findings):
        return '<td class="none"><span title="not looked at">\u2013</span></td>'
    if cell.findings:
        return f'<td class="hit"><b>{cell.findings:,}</b> of {cell.comparisons:,}</td>'
    bound = words.one_in(cell.comparisons).replace("fewer than", "&lt;")
    return f'<td>0 of {cell.comparisons:,}<span class="sub">{bound}</span></td>'


# ---------------------------------------------------------------------------------------------- findings


def _findings(report: Report) -> str:
    if not report.findings:
        return ""
    shown = "".join(_finding(number, finding) for number, finding in enumerate(report.findings[:FINDINGS], 1))
    left = len(report.findings) - FINDINGS
    more = f"<p>{left:,} more stand in the JSON report (--json).</p>" if left > 0 else ""
    return f"<section><h2>Findings</h2>{shown}{more}</section>"


def _finding(number: int, finding: Finding) -> str:
    seen = f"seen {words.count(finding.times, 'time')}"
    tags = (
        f'<span class="tag">{finding.evidence}</span><span>{_t(finding.scenario)}</span><span>{seen}</span>'
    )
    chance = f'<p class="chance">{_t(_chance(finding))}</p>'
    sides = _sides(finding)
    known = BY_NAME.get(finding.signature)
    return (
        f'<article id="f{number}"><p class="tags">{tags}</p><h3>{number}. {_t(words.sentence(finding.what, 600))}</h3>'
        f"<p>{_t(words.sentence(finding.why, 1000))}</p>{chance}{sides}{_known(known)}{_detail(finding)}{_repeat(finding)}</article>"
    )


def _chance(finding: Finding) -> str:
    if finding.p is None:
        return "Nothing is left to chance here: it either happened or it did not."
    return f"If nothing leaked: {words.chance(finding.p)} (corrected for every comparison of this audit)."


def _sides(finding: Finding) -> str:
    """The wrong answer on the left; on the right the request its content belongs to, or what it should be like."""
    if not finding.answers:
        return ""
    wrong, other = finding.answers[0], words.victim(finding)
    left = _exchange(
        "The answer that is wrong" if wrong.text else "The request",
        wrong,
        words.marked_pieces(finding, wrong),
    )
    if other is None:
        right = ""
    elif any(mark.whose == other.ask.tenant for mark in finding.highlights):
        asked = words.asked(other.ask)
        right = _exchange(
            "The request it belongs to",
            other,
            words.marked_pieces(finding, other),
            words.in_request(finding, wrong, asked),
        )
    else:
        right = _exchange("What it is compared with", other, words.marked_pieces(finding, other))
    rest = [answer for answer in finding.answers[1:] if answer is not other]
    folded = "".join(
        _exchange("Also", answer, words.marked_pieces(finding, answer)) for answer in rest[:BESIDE]
    )
    count = words.count(len(rest), "more exchange")
    more = f'<details><summary>{count}</summary><div class="sides">{folded}</div></details>' if rest else ""
    return f'<div class="sides">{left}{right}</div>{more}'


def _exchange(
    title: str, answer: Answer, marks: Sequence[Highlight], in_prompt: Sequence[Highlight] = ()
) -> str:
    owner = f"{_t(words.line(answer.ask.tenant, 60))}, request {answer.number:,}"
    asked = _text(words.asked(answer.ask), in_prompt)
    told = answer.text or answer.error or answer.excerpt
    answered = _text(told, marks) if told else '<pre class="text empty">(nothing)</pre>'
    first, second = ("asked", asked), ("answered", answered)
    if in_prompt:
        body = f"<p class='cap'>{first[0]}</p>{first[1]}<details><summary>its own answer</summary>{second[1]}</details>"
    else:
        body = f"<p class='cap'>{second[0]}</p>{second[1]}<details open><summary>{first[0]}</summary>{first[1]}</details>"
    half = answer.prefill
    note = f"<p class='how'>prefill half: {_t(words.how(half))}{_error(half)}</p>" if half is not None else ""
    error = _error(answer) if answer.text else ""
    return f"<div class='side'><h4>{title}</h4><p class='owner'>{owner}</p>{body}<p class='how'>{_t(words.how(answer))}{error}</p>{note}</div>"


def _error(answer: Answer) -> str:
    return f"; it says: {_t(words.line(answer.error, 300))}" if answer.error else ""


def _text(text: str, marks: Iterable[Highlight]) -> str:
    """A text with its foreign pieces marked."""
    parts = []
    for piece in words.pieces(text, marks):
        if piece.left_out:
            parts.append(
                f'<span class="cut">\u2026 {words.count(piece.left_out, "character")} left out \u2026</span>'
            )
        elif piece.whose is not None:
            parts.append(
                f'<mark title="planted for {_t(words.line(piece.whose, 60))}">{escape(piece.text)}</mark>'
            )
        else:
            parts.append(escape(piece.text))
    return f'<pre class="text">{"".join(parts)}</pre>'


def _known(known: Signature | None) -> str:
    if known is None:
        return ""
    fixed = f"<dt>fixed</dt><dd>{_t(known.fixed)}</dd>" if known.fixed else ""
    links = " ".join(
        f'<a href="{escape(url)}" rel="noreferrer">{_t(_thread(url))}</a>' for url in known.sources
    )
    seen = f"<dt>seen in</dt><dd>{links}</dd>" if links else ""
    return (
        f'<div class="known"><h4>Looks like a known fault: {_t(known.title)}</h4><dl><dt>likely cause</dt><dd>{_t(known.cause)}'
        f"</dd>{fixed}<dt>what to do</dt><dd>{_t(known.todo)}</dd>{seen}</dl></div>"
    )


def _thread(url: str) -> str:
    """https://github.com/owner/name/issues/1 -> owner/name#1"""
    parts = url.removeprefix("https://github.com/").split("/")
    return f"{parts[0]}/{parts[1]}#{parts[3]}" if len(parts) == 4 else url


def _detail(finding: Finding) -> str:
    rows = words.facts(finding.detail)[:40]
    return f"<details><summary>figures</summary>{_rows(rows)}</details>" if rows else ""


def _repeat(finding: Finding) -> str:
    return (
        f'<p class="cap">again</p><pre class="command">{_t(finding.repeat)}</pre>' if finding.repeat else ""
    )


# ---------------------------------------------------------------------------------------------- the rest


def _charts(report: Report) -> str:
    by_length, over_time = chart.latency(report.samples), chart.drift(report.samples)
    if not by_length:
        return ""
    strange = chart.outliers(report.samples)
    first = f"<figure><figcaption>Time by prompt length</figcaption>{by_length}</figure>"
    told = (
        "An answer much faster than others of its length may come from a cache, and one much slower may have waited. Neither "
        "is a finding by itself."
    )
    second = ""
    if over_time:
        second = (
            "<figure><figcaption>Drift over the audit</figcaption>"
            f"{over_time}<p class='legend'><span>The line is the median of each 24th of the time.</span></p></figure>"
        )
    note = f"<p>{told}</p>" if strange else ""
    return f'<section><h2>Times</h2>{note}<div class="charts">{first}{second}</div></section>'


def _notes(report: Report) -> str:
    missing = [f"{names}: {told}" for told, names in words.gaps(report)]
    missing += words.blind(report) + words.lost(report)
    notes = [words.line(note, 600) for note in report.notes]
    return _list("What this does not cover", missing) + _list("What else is to be known", notes)


def _list(title: str, told: Sequence[str]) -> str:
    items = "".join(f"<li>{_t(one)}</li>" for one in told)
    return f"<section><h2>{title}</h2><ul>{items}</ul></section>" if items else ""


def _learned(report: Report) -> str:
    """What was learned of the server: edges as a table, the rest as rows."""
    limits = {name: value for name, value in report.limits.items() if name not in ("edges", "noise")}
    rows = words.facts(limits)
    noise = words.facts(report.noise)
    parts = []
    edges = report.limits.get("edges")
    if isinstance(edges, dict) and edges:
        parts.append(f"<h3>Real limits</h3>{_edges(edges)}")
    if noise:
        parts.append(f"<h3>How much it varies by itself</h3>{_rows(noise)}")
    if rows:
        parts.append(
            f"<details><summary>everything learned of the server</summary>{_rows(rows[:80])}</details>"
        )
    return f"<section><h2>What was learned of the server</h2>{''.join(parts)}</section>" if parts else ""


def _edges(edges: dict[str, object]) -> str:
    body = ""
    for name, edge in edges.items():
        if not isinstance(edge, dict):
            continue
        taken, refused = edge.get("accepted"), edge.get("refused")
        silent = ", ".join(str(n) for n in edge.get("silent") or ()) or "\u2013"
        taken_s = f"{taken:,}" if isinstance(taken, int) else "?"
        refused_s = f"{refused:,}" if isinstance(refused, int) else "none of those tried"
        said = _t(words.line(str(edge.get("said") or ""), 200)) or "\u2013"
        body += f"<tr><th scope='row'>{_t(words.line(name, 40))}</th><td>{taken_s}</td><td>{refused_s}</td><td>{_t(silent)}</td><td>{said}</td></tr>"
    head = "".join(
        f'<th scope="col">{h}</th>'
        for h in ("endpoint", "longest accepted", "shortest refused", "never answered", "its words")
    )
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _rows(rows: Sequence[tuple[str, str]]) -> str:
    body = "".join(f"<tr><th scope='row'>{_t(name)}</th><td>{_t(value)}</td></tr>" for name, value in rows)
    return f"<div class='wide'><table class='facts'><tbody>{body}</tbody></table></div>"


def _end(report: Report) -> str:
    command = (
        f'<p class="cap">this audit again</p><pre class="command">{_t(report.command)}</pre>'
        if report.command
        else ""
    )
    return (
        f"<footer>{command}<p>Markers are drawn at random for this audit: no data of a real user is needed or shown, and keys are "
        "never written. The figures say how likely a fault would have shown; they do not prove that there is none.</p></footer>"
    )


__all__ = ["page"]
