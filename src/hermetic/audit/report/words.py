"""How a report says things: what servers sent made harmless to look at, and numbers in plain words.

The one thing to know: everything that came from a server passes through `visible` or `pieces` before a person sees it, in
the page as in the terminal. What could reorder, hide or command (controls, bidi marks, lone surrogates) becomes a visible
sign; escaping for HTML, XML or markup is the caller's, and comes after.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hermetic.audit.exchange import Answer, Ask
from hermetic.audit.result import EVIDENCE, Coverage, Evidence, Finding, Highlight, Played, Report

HEAD, AROUND, TAIL = 1200, 160, 240  # characters kept of a long text: its start, around each mark, its end
MARKS = 40  # marked pieces shown of one text at most
_URL = re.compile(r"[a-z][a-z-]*://")
_JOINERS = "\u200c\u200d"  # part of ordinary text: emoji, Persian, Indic scripts

EVIDENCE_SAYS: Mapping[Evidence, str] = {
    "marker": "words planted for one tenant, in another tenant's answer",
    "differential": "the same request alone, and among other traffic",
    "contrast": "one request after different predecessors",
    "semantics": "what an answer claims against what was sent",
    "liveness": "an answer or an error within the bound",
    "timing": "what one key can learn from another's time to first token",
}


def visible(text: str) -> str:
    """The same text with whatever could reorder, hide or command made visible; newlines and tabs stay."""
    return "".join(c if c.isascii() and c.isprintable() else _sign(c) for c in text)


def _sign(c: str) -> str:
    if c in "\n\t" or c in _JOINERS:
        return c
    if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return f"\u27e8U+{ord(c):04X}\u27e9"
    return c


def line(text: str, most: int = 200) -> str:
    """On one line, cut in the middle if it is longer than `most` characters."""
    flat = " ".join(visible(text[: 4 * most] if len(text) > 8 * most else text).split())
    return flat if len(flat) <= most else f"{flat[: most * 2 // 3]} \u2026 {flat[-(most - most * 2 // 3) :]}"


@dataclass(frozen=True)
class Piece:
    """A stretch of a text. `whose`: the tenant it belongs to, if not to the one who got it. `left_out`: how many
    characters are missing here; `text` is empty then."""

    text: str
    whose: str | None = None
    left_out: int = 0


def pieces(text: str, marks: Iterable[Highlight] = ()) -> list[Piece]:
    """A text cut into marked and unmarked stretches, made visible; a long one without what is far from its marks."""
    size = len(text)
    clean: list[tuple[int, int, str]] = []
    for mark in sorted(marks, key=lambda m: (m.start, -m.end))[:MARKS]:
        start, end = max(mark.start, clean[-1][1] if clean else 0), min(mark.end, size)
        if start < end:
            clean.append((start, end, mark.whose))
    kept = _kept(size, clean)
    found: list[Piece] = []
    at = 0
    for start, end in kept:
        if start > at:
            found.append(Piece("", left_out=start - at))
        at = start
        for first, last, whose in clean:
            first, last = max(first, start), min(last, end)
            if first >= last:
                continue
            if first > at:
                found.append(Piece(visible(text[at:first])))
            found.append(Piece(visible(text[first:last]), whose))
            at = last
        if at < end:
            found.append(Piece(visible(text[at:end])))
        at = max(at, end)
    if at < size:
        found.append(Piece("", left_out=size - at))
    return found


def _kept(size: int, marks: Sequence[tuple[int, int, str]]) -> list[tuple[int, int]]:
    """Which stretches of a text of this size to show, in order and apart. Marks are kept whole up to HEAD characters."""
    wanted = [(0, HEAD), (size - TAIL, size)]
    wanted += [
        (start - AROUND, max(start + AROUND, min(end + AROUND, start + HEAD))) for start, end, _ in marks
    ]
    merged: list[tuple[int, int]] = []
    for start, end in sorted((max(0, a), min(size, b)) for a, b in wanted):
        if merged and start <= merged[-1][1] + 20:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif start < end:
            merged.append((start, end))
    return merged


# ---------------------------------------------------------------------------------------------- numbers


def count(number: int, one: str, many: str = "") -> str:
    """'1 request', '2,000 requests'."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def seconds(value: float | None) -> str:
    """A time for people: '850 ms', '2.5 s', '4 min 10 s'."""
    if value is None:
        return "-"
    if 0 < value < 0.9995:
        return f"{value * 1000:.0f} ms"
    if value < 59.95:
        return f"{value:.1f}".removesuffix(".0") + " s"
    whole = round(value)
    return (
        f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
    )


def chance(p: float | None) -> str:
    """What a finding's p says, as part of a sentence."""
    if p is None:
        return "nothing is left to chance here"
    if p <= 0:
        return "p < 1e-300"
    if p >= 0.01:
        return f"p = {p:.2g}"
    return f"p = {p:.1e}, chance would do this in 1 of {_round(1 / p)} whole audits"


def _round(number: float) -> str:
    """3162277 -> '3,200,000'; beyond 10^15 as a power."""
    if number >= 1e15:
        return f"10^{len(str(int(number))) - 1}" if number < 1e300 else "more than 10^300"
    step = 10 ** max(0, len(str(int(number))) - 2)
    return f"{round(number / step) * step:,}"


def one_in(comparisons: int) -> str:
    """What `comparisons` without a finding bound at 95 %: 'fewer than 1 in 137'. Rule of three: (1 - 3/n)^n < 0.05."""
    return f"fewer than 1 in {comparisons // 3:,}" if comparisons >= 6 else "no bound: too few"


# ---------------------------------------------------------------------------------------------- the report


def total(report: Report, evidence: Evidence) -> Coverage:
    """One kind of evidence over all scenarios."""
    cells = [c for played in report.scenarios for c in played.coverage if c.evidence == evidence]
    compared, found = sum(c.comparisons for c in cells), sum(c.findings for c in cells)
    return Coverage(
        evidence=evidence,
        comparisons=compared,
        findings=found,
        bound=min(1.0, 3 / compared) if compared else None,
    )


def headline(report: Report) -> str:
    """The verdict in a few words. "Nothing found" only where something was compared and it was not broken off."""
    if report.verdict == "findings" or report.findings:
        return count(len(report.findings), "finding") + (", but not all was played" if report.reason else "")
    if not report.compared() or report.mostly_lost():
        return "Could not run"
    if report.verdict == "could not run":
        return "Broken off"
    return "Nothing found" if report.complete else "Nothing found, but not all was played"


def bound_sentence(report: Report) -> str:
    """What the markers say about all requests like these, in one sentence."""
    marker = total(report, "marker")
    if not marker.comparisons:
        return "No answer was looked at for other tenants' markers, so nothing is known about leaks."
    held = "answer held" if marker.comparisons == 1 else "answers held"
    if marker.findings:
        return (
            f"{marker.findings:,} of {marker.comparisons:,} {held} another tenant's marker. That is a leak, so "
            "no bound is given."
        )
    if marker.comparisons < 6:
        return f"0 of {marker.comparisons:,} {held} anyone else's marker: too few to say how rare a leak would have to be."
    return (
        f"0 of {marker.comparisons:,} {held} anyone else's marker: with 95 % confidence {one_in(marker.comparisons)} "
        "requests like these do."
    )


def reason(report: Report) -> str:
    """Why the verdict is not a plain "nothing found"; empty if it is."""
    told = [sentence(report.reason)] if report.reason else []
    if not report.compared():
        told = told or ["Nothing was compared."]
        return " ".join([*told, "This says nothing about the server, neither good nor bad."])
    if report.mostly_lost():
        told.append("This is no clean result.")
    elif report.verdict == "could not run":
        told.append("It did not come to its end, so it is no clean result: this is what was seen until then.")
    missing = [played for played in report.scenarios if played.state != "done"]
    empty = [played for played in report.scenarios if played.state == "done" and not played.compared()]
    scenarios = count(len(report.scenarios), "scenario")
    if missing:
        told.append(f"{len(missing)} of {scenarios} not played to the end: see the table.")
    if empty:
        told.append(f"{len(empty)} of {scenarios} compared nothing: see the table.")
    elif not report.complete and not told:
        told.append("The audit ended before all of the profile was played.")
    return " ".join(told)


def sentence(text: str, most: int = 600) -> str:
    """On one line, as `line`, with a capital letter (but not a URL) and a full stop."""
    text = line(text, most)
    text = text if _URL.match(text) else text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else text + "."


def lost(report: Report) -> list[str]:
    """What was not covered because requests ended as none is meant to, a sentence for each way."""
    return [
        f"{count(number, 'request')} ended as {how}: what they would have shown is not covered."
        for how, number in report.lost().items()
    ]


def standing(played: Played) -> str:
    """Why a scenario is no clean row: 'not run: ...', 'cut short: ...', or empty."""
    if played.state != "done":
        return f"{played.state}: {line(played.reason, 300) or 'no reason was given'}"
    if not played.compared():
        return "played, but nothing could be compared"
    return ""


def left_out(played: Played) -> str:
    """What a scenario that was played to its end says it could not do here; empty if nothing."""
    return line(played.reason, 400) if played.state == "done" else ""


def gaps(report: Report) -> list[tuple[str, str]]:
    """What was not played, and what was left out of what was, each with the names of its scenarios: ('not run: no time
    left in the budget', 'mixing, lengths'). In the order of the table, what was not played first."""
    names: dict[str, list[str]] = {}
    left = [
        (played, f"left out here: {left_out(played)}" if left_out(played) else "")
        for played in report.scenarios
    ]
    for played, told in [*((played, standing(played)) for played in report.scenarios), *left]:
        if told:
            names.setdefault(told, []).append(line(played.name, 80))
    return [(told, ", ".join(some)) for told, some in names.items()]


def blind(report: Report) -> list[str]:
    """The kinds of evidence by which nothing was compared, a sentence for each; none where nothing was compared at all."""
    return [
        f"{kind}: nothing was compared ({EVIDENCE_SAYS[kind]})."
        for kind in (EVIDENCE if report.compared() else ())
        if not total(report, kind).comparisons
    ]


def asked(ask: Ask) -> str:
    """The request's text as it was sent: its prompt, or its ids."""
    if ask.raw is not None:
        return ask.raw.decode("utf-8", "replace")
    if isinstance(ask.prompt, str):
        return f"[system] {ask.system}\n[user] {ask.prompt}" if ask.system else ask.prompt
    ids = ", ".join(str(token) for token in ask.prompt[:400])
    more = f", \u2026 ({len(ask.prompt) - 400:,} more)" if len(ask.prompt) > 400 else ""
    return f"{len(ask.prompt):,} token ids: {ids}{more}"


def how(answer: Answer) -> str:
    """What became of a request, in a few words: 'answered, HTTP 200, finish "stop", 0.4 s'."""
    parts: list[str] = [f"{answer.how} by {line(answer.server, 80)}" if answer.server else answer.how]
    if answer.status is not None:
        parts.append(f"HTTP {answer.status}")
    if answer.finish is not None:
        parts.append(f"finish {line(answer.finish, 40)}")
    if answer.usage.prompt is not None or answer.usage.completion is not None:
        used = f"{_known(answer.usage.prompt)} + {_known(answer.usage.completion)} tokens by its own count"
        parts.append(used + (f", {answer.usage.cached:,} cached" if answer.usage.cached else ""))
    if answer.first is not None:
        parts.append(f"first token {seconds(answer.first)}")
    parts.append(seconds(answer.seconds))
    return ", ".join(parts)


def _known(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


def victim(finding: Finding) -> Answer | None:
    """Whose data it is: the exchange of the tenant of the first highlight, else the second one shown."""
    for mark in finding.highlights:
        for answer in finding.answers[1:]:
            if answer.ask.tenant == mark.whose:
                return answer
    return finding.answers[1] if len(finding.answers) > 1 else None


def marked_pieces(finding: Finding, answer: Answer) -> list[Highlight]:
    """The highlights of one answer's text."""
    return [mark for mark in finding.highlights if mark.answer == answer.number]


def in_request(finding: Finding, wrong: Answer, text: str) -> list[Highlight]:
    """Where the wrong answer's highlighted pieces stand in the request they come from."""
    folded = text.lower()
    folded = folded if len(folded) == len(text) else text
    found: list[Highlight] = []
    for mark in marked_pieces(finding, wrong)[:MARKS]:
        piece = wrong.text[mark.start : mark.end].lower()
        at = folded.find(piece) if len(piece) >= 3 else -1
        if at >= 0:
            found.append(Highlight(answer=0, start=at, end=at + len(piece), whose=mark.whose))
    return found


def facts(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested facts as rows of (name, value); lists and empty values in short."""
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        label = f"{prefix}{line(str(name).replace('_', ' '), 80)}"
        if isinstance(value, Mapping):
            rows += facts(value, f"{label}: ") if value else []
        elif value is None or (isinstance(value, str | list | tuple) and not value):
            continue
        elif isinstance(value, bool):
            rows.append((label, "yes" if value else "no"))
        elif isinstance(value, int):
            rows.append((label, f"{value:,}"))
        elif isinstance(value, float):
            rows.append((label, f"{value:,.4g}" if abs(value) < 1e6 else f"{value:,.0f}"))
        elif isinstance(value, list | tuple):
            rows.append((label, line(", ".join(str(item) for item in value), 300)))
        else:
            rows.append((label, line(str(value), 300)))
    return rows


__all__ = [
    "EVIDENCE_SAYS",
    "Piece",
    "asked",
    "blind",
    "bound_sentence",
    "chance",
    "count",
    "facts",
    "gaps",
    "headline",
    "how",
    "in_request",
    "left_out",
    "line",
    "lost",
    "marked_pieces",
    "one_in",
    "pieces",
    "reason",
    "seconds",
    "sentence",
    "standing",
    "total",
    "victim",
    "visible",
]
