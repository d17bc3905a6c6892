"""The audit in a terminal: how it goes while it runs, and what came of it.

The one thing to know: nothing that a server sent reaches the terminal as it came. Control characters, of which a terminal
would obey some, are made visible first (`words.visible`), and nothing is read as rich's markup.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live as RichLive
from rich.table import Table
from rich.text import Text

from hermetic.audit.exchange import Answer
from hermetic.audit.report import words
from hermetic.audit.result import EVIDENCE, Coverage, Evidence, Finding, Played, Report
from hermetic.audit.signatures import BY_NAME

PLAIN = 110  # columns where there is no terminal to ask
SHOWN = 10  # findings in the summary
EVERY = 30.0  # seconds between lines where there is no terminal
BAR = 24
SHORT: dict[Evidence, str] = {
    "marker": "marker", "differential": "differs", "contrast": "contrast", "semantics": "semantic", "liveness": "liveness",
    "timing": "timing",
}  # fmt: skip


class Sheet(Console):
    """Where something is said to people. Raises OSError when it cannot take it, also where nobody reads it any more: rich
    would end the process then, with the exit code of a finding."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class Live:
    """Progress: two lines that are written over on a terminal, a line for each scenario elsewhere. As run.Progress. If nobody reads
    it any more it falls silent, and the audit goes on."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self._console = console or Sheet(stderr=True, highlight=False)
        self._quiet = quiet
        self._live: RichLive | None = None
        self._played: Played | None = None
        self._where = "connecting"
        self._part = 0.0  # of the scenarios
        self._asked = self._findings = self._slowed = 0
        self._left: float | None = None
        self._left_at = self._told_at = time.monotonic()
        self._lost: dict[str, int] = {}

    def __enter__(self) -> Live:
        if not self._quiet and self._console.is_terminal:
            self._live = RichLive(
                console=self._console, get_renderable=self._show, refresh_per_second=4, transient=True
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.stop()
            self._live = None

    # ------------------------------------------------------------------------------ run.Progress

    def learning(self, what: str) -> None:
        """A step before the first scenario."""
        self._where = words.line(what, 120)
        self._say(f"learning: {self._where}")

    def playing(self, played: Played, number: int, of: int, left: float) -> None:
        """A scenario begins: the `number`th `of` so many, with `left` seconds of the budget."""
        self._played, self._part = played, (number - 1) / max(of, 1)
        self._where = f"{number}/{of} {words.line(played.name, 40)}"
        self._time(left)
        self._say(f"{self._where}: {words.line(played.says, 160)}")

    def slowed(self, wait: float) -> None:
        """A request was told to slow down, and waits so many seconds."""
        self._slowed += 1
        if self._slowed == 1 or time.monotonic() - self._told_at > EVERY:
            self._say(
                f"{self._where}: the server tells the audit to slow down, and it waits {words.seconds(wait)}"
            )

    def asked(self, answer: Answer, findings: int, left: float) -> None:
        """A request has ended; `findings` so far."""
        self._asked += 1
        self._time(left)
        if answer.how in ("limited", "unreachable", "silent"):
            self._lost[answer.how] = self._lost.get(answer.how, 0) + 1
        if findings > self._findings:
            self._findings = findings
            self._say(
                f"{words.count(findings, 'finding')} so far, after {words.count(self._asked, 'request')}"
            )
        elif time.monotonic() - self._told_at > EVERY:
            self._say(f"{self._where}: {self._figures()}")

    # ------------------------------------------------------------------------------ showing

    def _time(self, left: float) -> None:
        self._left, self._left_at = left, time.monotonic()

    def _say(self, text: str) -> None:
        """A line where nothing can be written over."""
        if self._quiet or self._console.is_terminal:
            return
        self._told_at = time.monotonic()
        try:
            self._console.print(Text(text), soft_wrap=True)
        except OSError:
            self._quiet = True

    def _figures(self) -> str:
        parts = [words.count(self._asked, "request"), words.count(self._findings, "finding")]
        parts += [f"{number:,} {how}" for how, number in sorted(self._lost.items())]
        parts += [f"told to slow down {words.count(self._slowed, 'time')}"] if self._slowed else []
        if self._left is not None:
            left = self._left - (time.monotonic() - self._left_at)
            parts.append(f"{words.seconds(float(round(left)))} left" if left > 0 else "time is up, ending")
        return ", ".join(parts)

    def _show(self) -> Group:
        full = round(self._part * BAR)
        head = Text.assemble(
            ("\u2501" * full, "green"), ("\u2501" * (BAR - full), "dim"), " ", (self._where, "bold"),
            no_wrap=True, overflow="ellipsis",
        )  # fmt: skip
        figures = Text(f"  {self._figures()}", no_wrap=True, overflow="ellipsis")
        if self._findings:
            figures.stylize("bold red")
        says = self._played.says if self._played is not None else ""
        more = Text(f"  {words.line(says, 200)}", style="dim", no_wrap=True, overflow="ellipsis")
        return Group(head, figures, more) if says else Group(head, figures)


# ---------------------------------------------------------------------------------------------- summary


def summary(console: Console, report: Report) -> None:
    """Verdict, table, each finding in a few lines, and the bound."""
    if not console.is_terminal:
        console.width = max(console.width, PLAIN)
    console.print()
    model = f", model {words.line(report.model, 80)}" if report.model else ""
    about = f"{words.line(report.target, 200)}{model}, profile {report.profile}"
    console.print(Text.assemble(("audit of ", "dim"), about), soft_wrap=True)
    console.print()
    console.print(_table(report, console.width))
    for told, names in words.gaps(report):
        console.print(Text(f"{names}: {told}", style="dim" if told.startswith("left out") else "yellow"))
    for number, finding in enumerate(report.findings[:SHOWN], 1):
        console.print()
        _finding(console, number, finding)
    if len(report.findings) > SHOWN:
        console.print(Text(f"{len(report.findings) - SHOWN:,} more findings: --report FILE or --json FILE"))
    console.print()
    head = words.headline(report)
    style = "bold red" if report.findings else "bold green" if head == "Nothing found" else "bold yellow"
    about = (
        f"  {words.count(report.requests, 'request')} in {words.seconds(report.seconds)}, seed {report.seed}"
    )
    console.print(Text.assemble((head, style), (about, "dim")), soft_wrap=True)
    for told in (words.reason(report), *words.lost(report), words.bound_sentence(report)):
        if told:
            console.print(Text(told))
    for note in [*words.blind(report), *report.notes]:
        console.print(Text(words.line(note, 600), style="dim"))


def _table(report: Report, width: int) -> Table:
    """Scenario by evidence: findings of comparisons, a dash where nothing was looked at. Fits 80 columns."""
    kinds = [e for e in EVIDENCE if words.total(report, e).comparisons or words.total(report, e).findings]
    narrow = width < PLAIN
    table = Table(box=None, pad_edge=False, padding=(0, 1 if narrow else 2, 0, 0), header_style="bold")
    table.add_column("scenario", overflow="fold", min_width=14)
    for kind in kinds:
        table.add_column(SHORT[kind] if narrow else kind, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for played in report.scenarios:
        cells = {c.evidence: c for c in played.coverage}
        row = [_cell(cells.get(kind), narrow) for kind in kinds]
        table.add_row(Text(words.visible(played.name)), *row, Text(_state(played), style="yellow"))
    totals = [words.total(report, kind) for kind in kinds]
    table.add_row(Text("all", style="bold"), *[_cell(t, narrow) for t in totals])
    bounds = [Text("" if t.findings else _bound(t.comparisons, narrow), style="dim") for t in totals]
    table.add_row(Text("at most, 95 %", style="dim"), *bounds)
    return table


def _state(played: Played) -> str:
    return played.state if played.state != "done" else "nothing compared" if words.standing(played) else ""


def _cell(cell: Coverage | None, narrow: bool) -> Text:
    if cell is None or not (cell.comparisons or cell.findings):
        return Text("\u2013", style="dim")
    style = "bold red" if cell.findings else ""
    return Text(f"{cell.findings:,}{'/' if narrow else ' of '}{cell.comparisons:,}", style=style)


def _bound(comparisons: int, narrow: bool) -> str:
    return f"{'1/' if narrow else '1 in '}{comparisons // 3:,}" if comparisons >= 6 else "too few"


def _finding(console: Console, number: int, finding: Finding) -> None:
    """About six lines: what, where and how sure; the wrong answer; whose it is; known cause; how to repeat."""
    rows: list[tuple[str, Text]] = []
    where = (
        f"{finding.evidence} in {words.line(finding.scenario, 60)}, seen {words.count(finding.times, 'time')}"
    )
    rows.append(("seen as", Text(f"{where}; {words.chance(finding.p)}")))
    if finding.answers:
        wrong, other = finding.answers[0], words.victim(finding)
        rows.append(("wrong" if wrong.text else "request", _quoted(finding, wrong)))
        if other is not None:
            rows.append(_other(finding, other))
    known = BY_NAME.get(finding.signature)
    if known is not None:
        rows.append(
            ("looks like", Text(f"{known.title}. Fixed: {known.fixed}" if known.fixed else known.title))
        )
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for label, told in rows:
        table.add_row(f"   {label}", told)
    console.print(Text.assemble((f"{number}. ", "bold red"), (words.sentence(finding.what, 300), "bold")))
    console.print(table)
    if finding.repeat:  # on one line, however long, so that it can be copied
        console.print(
            Text.assemble(("   again       ", "dim"), words.visible(finding.repeat)), soft_wrap=True
        )


def _quoted(finding: Finding, answer: Answer) -> Text:
    """The wrong answer on a line, foreign pieces in reverse; around the first of them if it is long."""
    told = Text.assemble((f"{words.line(answer.ask.tenant, 40)}: ", "dim"))
    if not answer.text:
        return told.append(
            f"{words.how(answer)}{': ' + words.line(answer.error, 200) if answer.error else ''}"
        )
    marks = words.marked_pieces(finding, answer)
    start = max(0, min((m.start for m in marks), default=0) - 60)
    end = start + 240
    told.append("\u2026" if start else "")
    at = start
    for mark in sorted(marks, key=lambda m: m.start):
        first, last = max(mark.start, at), min(mark.end, end)
        if first < last:
            told.append(_flat(answer.text[at:first])).append(
                _flat(answer.text[first:last]), "bold reverse red"
            )
            at = last
    return told.append(_flat(answer.text[at:end])).append("\u2026" if len(answer.text) > end else "")


def _flat(text: str) -> str:
    return words.visible(text).replace("\n", "\u23ce").replace("\t", " ")


def _other(finding: Finding, other: Answer) -> tuple[str, Text]:
    """Whose it is, or what it was compared with."""
    owner = (f"{words.line(other.ask.tenant, 40)}: ", "dim")
    if any(mark.whose == other.ask.tenant for mark in finding.highlights):
        return "belongs to", Text.assemble(owner, words.line(words.asked(other.ask), 200))
    return "beside", Text.assemble(owner, words.line(other.text or other.error or words.how(other), 200))


__all__ = ["Live", "Sheet", "summary"]
