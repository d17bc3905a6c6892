"""For a terminal: findings first, one line each with the fix below, then what is not known, then the nodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hermetic.check.output import words
from hermetic.check.result import Report, Told, Verdict
from hermetic.check.rules import RULES

MOST = 4  # names in a list, before it says how many more
_COLOURS = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}


def show(console: Console, report: Report, strict: bool = False, verbose: bool = False) -> None:
    """`verbose`: also what passed."""
    for verdict in report.of("finding"):
        _finding(console, verdict)
    _unknown(console, report, strict)
    for verdict in report.of("attested"):
        console.print(Text.assemble((f"{verdict.code} ", "bold"), "attested  ", words.message(verdict)), soft_wrap=True)  # fmt: skip
    if verbose:
        for verdict in report.of("passed"):
            console.print(Text(f"{verdict.code} passed  {verdict.subject}: {words.plain(verdict.message) or f'not found: {words.title(verdict.code)}'}", style="dim"), soft_wrap=True)  # fmt: skip
    if left_out := [one.source for one in report.unread if one.left_out]:
        named = left_out if verbose else [_some([Path(one).name for one in left_out])]
        told = f"{words.counted(len(left_out), 'file')} that are no output or configuration of an engine: {', '.join(named)}"
        console.print(Text.assemble(("left out  ", "bold"), words.plain(told, 10_000)), soft_wrap=True)
    for one in report.unread:
        if one.left_out:
            continue
        part = "read only in part" if one.part else "not read"
        console.print(Text.assemble((f"{part}  ", "bold"), f"{words.plain(one.source, 200)}: {words.plain(one.why)}"), soft_wrap=True)  # fmt: skip
    if report.nodes:
        console.print(_nodes(report.nodes))
    for note in report.notes:
        console.print(Text(words.plain(note), style="dim"), soft_wrap=True)
    bad = report.of("finding") or (strict and report.of("unknown"))
    console.print(Text(words.headline(report, strict), style="bold red" if bad else "bold"), soft_wrap=True)


def _finding(console: Console, verdict: Verdict) -> None:
    """The line that says what is wrong comes first and whole: it may be all that somebody reads."""
    colour = _COLOURS[verdict.severity]
    line = Text.assemble((f"{verdict.code} {verdict.severity}  ", colour), words.message(verdict))
    console.print(line, soft_wrap=True)
    console.print(Text(f"    {RULES[verdict.code].fix}", style="dim"), soft_wrap=True)


def _unknown(console: Console, report: Report, strict: bool) -> None:
    """By what is missing, not by rule or node: one missing fact keeps many rules from being answered, and is missing at many nodes."""
    nodes = sorted((node.name for node in report.nodes), key=len, reverse=True)
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for verdict in report.of("unknown"):
        whose = next((name for name in nodes if verdict.message.startswith(f"{name}: ")), "")
        reason = verdict.message.removeprefix(f"{whose}: ") if whose else verdict.message
        codes, names = found.setdefault(reason, ({}, {}))
        codes[verdict.code] = None
        names |= {whose: None} if whose else {}
    for reason, (codes, names) in found.items():
        style = "bold red" if strict else "bold magenta"
        whose = f"{_some(list(names))}: " if names else ""
        console.print(Text.assemble(("unknown  ", style), words.plain(f"{whose}{reason}"), (f" ({', '.join(codes)})", "dim")), soft_wrap=True)  # fmt: skip


def _some(names: Sequence[str]) -> str:
    """The first few of many, and how many more."""
    return ", ".join(names[:MOST]) + (f" and {len(names) - MOST} more" if len(names) > MOST else "")


def _nodes(nodes: Sequence[Told]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("node", "role", "engine", "version", "pool", "context", "read from"):
        table.add_column(
            column, overflow="fold", justify="right" if column in ("pool", "context") else "left"
        )
    for node in nodes:
        cells = [
            node.name,
            node.role,
            node.engine,
            node.version,
            _number(node, "pool"),
            _number(node, "context"),
        ]
        sources = _some([source if "://" in source else Path(source).name for source in node.sources])
        table.add_row(*(Text(words.plain(cell, 200)) for cell in (*cells, sources)))
    return table


def _number(node: Told, fact: str) -> str:
    values = dict.fromkeys(str(seen["value"]) for seen in node.facts.get(fact, ()))
    return " or ".join(f"{int(value):,}" if value.isdigit() else value for value in values) or "?"


__all__ = ["show"]
