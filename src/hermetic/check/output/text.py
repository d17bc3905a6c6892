"""For a terminal: findings first, one line each with the fix below, then what was not read, then what is not known, then the nodes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from hermetic.check.output import missing, words
from hermetic.check.output.changes import changes, said_otherwise
from hermetic.check.result import Report, Told, Verdict
from hermetic.check.rules import RULES

LONGEST = 10_000  # characters of a line
_COLOURS = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}


def show(console: Console, report: Report, strict: bool = False, verbose: bool = False) -> None:
    """`verbose`: also what passed, and each unknown by itself."""
    findings = report.of("finding")
    for verdict, following in itertools.zip_longest(findings, findings[1:]):
        _finding(console, verdict, following)
    for one in report.unread:
        if not one.left_out and not one.part:
            _line(console, "not read", "bold red", f"{words.plain(one.source, 200)}: {words.plain(one.why)}")
    _attested(console, report, verbose)
    if verbose:
        for verdict in report.of("unknown"):
            _line(console, "unknown", _style(strict), f"{verdict.code} {words.message(verdict)}")
    else:
        _unknown(console, report, strict)
    _beside(console, report, verbose)
    if report.nodes:
        _nodes(console, report.nodes)
    for note in report.notes:
        _line(console, "note", "bold", note)
    _end(console, report, strict, verbose)


def show_round(
    console: Console,
    number: int,
    before: Report | None,
    report: Report,
    strict: bool = False,
    verbose: bool = False,
) -> None:
    """One round of --watch: all of it the first time, with `verbose`, and when another verdict was given than `before`; else a line, and findings that
    have other numbers."""
    changed = [] if before is None else changes(before, report)
    if before is not None and not changed and not verbose:
        others = said_otherwise(before, report)
        told = "as before, with other numbers" if others else "as before"
        _line(console, f"round {number} at {report.started}", "bold", f"{told}: {words.headline(report, strict)}")  # fmt: skip
        for verdict in others:
            _finding(console, verdict, None)
        return
    console.print(Text(words.plain(f"round {number} at {report.started}"), style="bold"), soft_wrap=True)
    for one in changed:
        _line(console, "changed", "bold", one)
    show(console, report, strict, verbose)


def _line(console: Console, label: str, style: str, text: str, after: str = "") -> None:
    """However long, one line: a terminal breaks it, and grep finds it."""
    console.print(Text.assemble((f"{label}  ", style), words.plain(text, LONGEST), (after, "dim")), soft_wrap=True)  # fmt: skip


def _finding(console: Console, verdict: Verdict, following: Verdict | None) -> None:
    """The line that says what is wrong comes first and whole: it may be all that somebody reads. What mends several is said after the last of them."""
    label = f"{verdict.code} {verdict.severity}"
    _line(console, label, _COLOURS[verdict.severity], words.message(verdict))
    fix = RULES[verdict.code].fix
    if following is None or RULES[following.code].fix != fix:
        console.print(Text(f"    {fix}", style="dim"), soft_wrap=True)


def _attested(console: Console, report: Report, verbose: bool) -> None:
    for verdict in report.of("attested"):
        _line(console, f"{verdict.code} attested", "bold", words.message(verdict))
    for verdict in report.of("passed") if verbose else ():
        why = words.plain(verdict.message) or f"not found: {words.title(verdict.code)}"
        console.print(Text(words.plain(f"{verdict.code} passed  {verdict.subject}: {why}"), style="dim"), soft_wrap=True)  # fmt: skip


def _unknown(console: Console, report: Report, strict: bool) -> None:
    """One line for each kind of source that would settle something; then, one by one, what is unknown for another reason."""
    for given in missing.by_source(missing.missing(report)):
        if given.begins:
            told = "; ".join(f"{what}{_codes(codes)}" for what, codes, _ in given.facts())
            _line(console, "unknown", _style(strict), f"{_whose(given.nodes)}{given.begins} {told}")
            continue
        for what, codes, nodes in given.facts():
            _line(console, "unknown", _style(strict), f"{_whose(nodes)}{what}", _codes(codes))


def _style(strict: bool) -> str:
    return "bold red" if strict else "bold magenta"


def _whose(nodes: Sequence[str]) -> str:
    return f"{words.some(nodes)}: " if nodes else ""


def _codes(codes: Sequence[str]) -> str:
    """Of many, the first few, and how many more."""
    return f" ({words.some(codes)})"


def _beside(console: Console, report: Report, verbose: bool) -> None:
    """What was read in part, and what of a folder is of no deployment."""
    for one in report.unread:
        if one.part and not one.left_out:
            _line(console, "read only in part", "bold", f"{words.plain(one.source, 200)}: {words.plain(one.why)}")  # fmt: skip
    if left_out := [one.source for one in report.unread if one.left_out]:
        named = ", ".join(left_out) if verbose else words.some([Path(one).name for one in left_out])
        told = f"{words.counted(len(left_out), 'file')} that are no output or configuration of an engine: {named}"  # fmt: skip
        _line(console, "left out", "bold", told)


def _end(console: Console, report: Report, strict: bool, verbose: bool) -> None:
    """How it ended, and where there is more."""
    bad = report.of("finding") or (strict and report.of("unknown"))
    more = [f"`hermetic check --explain {verdict.code}` says why" for verdict in report.of("finding")[:1]]
    if report.of("unknown") and not verbose:
        more.append("-v tells each unknown by itself")
    after = f"  ({'; '.join(more)})" if more else ""
    console.print(Text.assemble((words.headline(report, strict), "bold red" if bad else "bold"), (after, "dim")), soft_wrap=True)  # fmt: skip


def _nodes(console: Console, nodes: Sequence[Told]) -> None:
    """In columns that are as wide as what stands in them; what was read stands last, where it may be long."""
    rows: list[tuple[str, ...]] = [("node", "role", "engine", "version", "pool", "context", "read from")]
    for node in nodes:
        said = (node.name, node.role or "?", node.engine or "?", node.version or "?")
        sources = words.some([source if "://" in source else Path(source).name for source in node.sources])
        row = (*said, _number(node, "pool"), _number(node, "context"), sources)
        rows.append(tuple(words.plain(cell, 200) for cell in row))
    wide = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    for number, cells in enumerate(rows):
        parts = [_padded(cell, width, at in (4, 5)) for at, (cell, width) in enumerate(zip(cells, wide, strict=True))]  # fmt: skip
        console.print(Text("  ".join(parts).rstrip(), style="dim" if number == 0 else ""), soft_wrap=True)


def _padded(cell: str, width: int, right: bool) -> str:
    fill = " " * (width - cell_len(cell))
    return fill + cell if right else cell + fill


def _number(node: Told, fact: str) -> str:
    values = dict.fromkeys(str(seen["value"]) for seen in node.facts.get(fact, ()))
    return " or ".join(f"{int(value):,}" if value.isdigit() else value for value in values) or "?"


__all__ = ["show", "show_round"]
