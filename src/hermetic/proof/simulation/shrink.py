"""From a run that breaks a promise to the smallest plan of the same seed that still breaks it.

Delta debugging over three lists: the kinds of faults, the planned faults, the requests. The one thing to know: what stays the
same is the kind of promise that is broken; its words may change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from hermetic.proof.saved import Counterexample
from hermetic.proof.simulation.options import CLASSES, Narrowed
from hermetic.proof.simulation.plan import PLANNED, Asked, make
from hermetic.proof.simulation.world import run

T = TypeVar("T")
RUNS = 200  # tried at most


class _Spent(Exception):
    """As many runs were tried as may be."""


class _Shrinking:
    """Remembers the smallest that was found."""

    def __init__(
        self, found: Counterexample, seed: int, asked: Asked, progress: Callable[[str], None]
    ) -> None:
        self.found, self.asked, self._seed, self._progress = found, asked, seed, progress
        self._left = RUNS

    def holds(self, narrowed: Narrowed) -> bool:
        """Whether this still breaks the same promise; then it is the smallest so far."""
        if self._left == 0:
            raise _Spent
        self._left -= 1
        asked = replace(self.asked, narrowed=narrowed)
        found = run(make(self._seed, asked)).found
        if found is None or found.kind != self.found.kind:
            return False
        self.found, self.asked = found, asked
        plan = make(self._seed, asked)
        self._progress(
            f"still {found.kind} with {len(plan.asks)} requests and {len(plan.faults)} planned faults"
        )
        return True


def shrink(
    found: Counterexample, seed: int, asked: Asked, progress: Callable[[str], None] = lambda _: None
) -> tuple[Counterexample, Asked]:
    """The smallest that was found, and what it was made from. The mutant, if there is one, is applied by the caller."""
    state = _Shrinking(found, seed, asked, progress)
    try:
        for _ in range(2):
            before = state.asked
            _classes(state)
            _list(state, "only", [ask.number for ask in make(seed, state.asked).asks])
            _list(state, "faults", [fault.number for fault in make(seed, state.asked).faults])
            if state.asked == before:
                break
    except _Spent:
        progress(f"{RUNS} runs were tried; this is the smallest of them")
    return state.found, state.asked


def _classes(state: _Shrinking) -> None:
    """Kinds of faults that are not needed: all but those that are planned one by one, at first together."""
    now = state.asked.narrowed
    free = [name for name in CLASSES if name not in PLANNED and name not in now.without]
    for chosen in [tuple(free), *((name,) for name in free)]:
        now = state.asked.narrowed
        more = tuple(name for name in chosen if name not in now.without)
        if more:
            state.holds(replace(now, without=now.without + more))


def _list(state: _Shrinking, name: str, numbers: list[int]) -> None:
    """Fewer and fewer of a list, by halves, quarters and so on (Zeller and Hildebrandt's ddmin)."""

    def holds(chosen: Sequence[int]) -> bool:
        now = state.asked.narrowed
        if name == "only":
            return state.holds(replace(now, only=tuple(chosen)))
        return state.holds(replace(now, faults=tuple(chosen)))

    if not numbers or holds(()):
        return
    parts = 2
    while len(numbers) > 1:
        size = -(-len(numbers) // parts)
        for at in range(0, len(numbers), size):
            rest = numbers[:at] + numbers[at + size :]
            if rest and holds(rest):
                numbers, parts = rest, max(parts - 1, 2)
                break
        else:
            if size == 1:
                return
            parts = min(2 * parts, len(numbers))


__all__ = ["RUNS", "shrink"]
