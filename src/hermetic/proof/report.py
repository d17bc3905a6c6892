"""What `hermetic prove` prints: figures of a search, of the induction, of a mutant; progress on a terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hermetic.proof.chart import WIDTH, draw, promise
from hermetic.proof.saved import Counterexample, SavedError
from hermetic.proof.scopes import FAULTS, WHAT, Scope

if TYPE_CHECKING:
    from hermetic.proof.search import Exploration
    from hermetic.proof.walks import Walks

CHECKED = "I1-I6 in every state; from every state a good end can be reached by fair delivery (L1, L2)"


class Progress:
    """One line on a terminal, written over and over; nothing where there is no terminal."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._last = 0.0

    def say(self, text: str) -> None:
        if self._shown and time.monotonic() - self._last > 0.1:
            self._last = time.monotonic()
            width = shutil.get_terminal_size((WIDTH, 24)).columns - 1
            print(f"\r{text[:width]:<{width}}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._shown:
            width = shutil.get_terminal_size((WIDTH, 24)).columns - 1
            print(f"\r{'':<{width}}\r", end="", file=sys.stderr, flush=True)


def width() -> int:
    """Of charts: the terminal's, or 100 columns."""
    return min(max(shutil.get_terminal_size((WIDTH, 24)).columns, 72), 140) if sys.stdout.isatty() else WIDTH


def searching(found: Exploration) -> str:
    if found.ending:
        return f"{found.scope.name}: from {found.ending:,} of {found.states:,} states a good end was found so far"
    return (
        f"{found.scope.name}: depth {found.depth}, {found.states:,} states, {found.transitions:,} transitions, "
        f"{_rate(found.states, found.seconds)} states/s, {found.memory / 2**30:.1f} GiB"
    )


def walking(found: Walks) -> str:
    return f"{found.scope.name}: {found.walks:,} walks, {found.steps:,} steps, {found.distinct:,} distinct states"


def covered(scope: Scope) -> list[str]:
    """What a search of this scope covers and what it does not, so that nobody has to guess."""
    missing = [f"{name} ({WHAT[name]})" for name in FAULTS if not scope.faults.get(name)]
    total = sum(scope.faults.values())
    if scope.at_most < total:
        missing.append(f"more than {scope.at_most} of these {total} faults in one run")
    missing.append("anything larger")
    told = (f"  covered: {scope.covered()}", f"  not covered: {'; '.join(missing)}")
    return [scope.name, *(line for text in told for line in wrapped(text))]


def wrapped(text: str) -> list[str]:
    lead = text[: len(text) - len(text.lstrip())]
    return textwrap.wrap(text, width(), subsequent_indent=f"{lead}  ", break_on_hyphens=False)


def explored(found: Exploration) -> list[str]:
    state = "every state seen" if found.complete else "NOT every state was seen"
    return [
        f"  {found.states:,} states, {found.transitions:,} transitions, depth {found.depth}; {state}",
        f"  {found.seconds:.1f} s, {_rate(found.states, found.seconds)} states/s, {found.local_steps:,} different steps run "
        f"on the product's objects, {found.memory / 2**30:.2f} GiB",
        f"  chance that two states were taken for one: below {found.collision:.0e}"
        if found.collision
        else "  states are kept whole: none was taken for another",
    ]


def walked(found: Walks) -> list[str]:
    return [
        f"  {found.walks:,} random walks, {found.steps:,} steps, {found.distinct:,} distinct states, {found.seconds:.0f} s; "
        "NOT every state was seen",
        f"  {found.ended:,} walks led to an end at which everything had come back, from the others one could be reached",
    ]


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:,.0f}" if seconds else "-"


def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Columns of text; numbers to the right."""
    cells = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    numbers = (
        [all(isinstance(row[i], int | float) for row in rows) for i in range(len(titles))] if cells else []
    )
    wide = [max([len(title), *(len(row[i]) for row in cells)]) for i, title in enumerate(titles)]

    def line(row: Sequence[str]) -> str:
        fitted = [
            f"{cell:>{w}}" if i < len(numbers) and numbers[i] else f"{cell:<{w}}"
            for i, (cell, w) in enumerate(zip(row, wide, strict=True))
        ]
        return "  ".join(fitted).rstrip()

    return [line(titles), "  ".join("-" * w for w in wide), *(line(row) for row in cells)]


def markdown(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The same for the docs."""
    lines = [
        titles,
        ["---"] * len(titles),
        *([f"{c:,}" if isinstance(c, int) else str(c) for c in row] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def show(found: Counterexample, path: Path, full: bool) -> None:
    """Print the chart of a counterexample, save it, and say where. Raises SavedError."""
    print("", draw(found, width(), full=full), "", sep="\n", flush=True)
    try:
        found.save(path)
    except SavedError as error:
        raise SavedError(
            f"a counterexample was found ({promise(found.kind)}: {found.text}), and {error}"
        ) from error
    print(
        f"saved in {path}; play it again: hermetic prove --replay {path}; as a test: --replay {path} --as-test"
    )


__all__ = [
    "CHECKED",
    "Progress",
    "covered",
    "explored",
    "markdown",
    "searching",
    "show",
    "table",
    "walked",
    "walking",
    "width",
    "wrapped",
]
