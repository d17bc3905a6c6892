"""What both halves share: a table of every transition, and the one way through it.

A row is (state, event): the states that the event may lead to. An event without a row is ignored and counted as stale:
that is how duplicates, reordered and late messages end. A handler that leaves the machine anywhere else is a fault of
ours and raises; it never passes as a new kind of progress.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

from hermetic.handoff.actions import Action

S = TypeVar("S")


class HandoffError(RuntimeError):
    """A machine made a move that its table does not have."""


def rows(states: Iterable[S], event: str, *to: S) -> dict[tuple[S, str], frozenset[S]]:
    """One row for each of `states`: `event` leads to one of `to`, or, without any, nowhere else."""
    return {(state, event): frozenset(to) or frozenset({state}) for state in states}


class Machine(Generic[S]):
    """`state` moves by the table only. `stale` counts what was ignored."""

    table: ClassVar[Mapping[tuple[Any, str], frozenset[Any]]]

    def __init__(self, state: S) -> None:
        self.state = state
        self.stale = 0

    def _on(self, event: str, handle: Callable[[], list[Action]]) -> list[Action]:
        allowed = self.table.get((self.state, event))
        if allowed is None:
            self.stale += 1
            return []
        before = self.state
        actions = handle()
        if self.state not in allowed:
            raise HandoffError(f"{before} --{event}--> {self.state} is not in the table")
        return actions

    def _ignored(self) -> list[Action]:
        """A message that has a row here and says nothing new."""
        self.stale += 1
        return []
