"""What both halves share: a table of every transition, and the one way through it.

A row is (state, event): the states that the event may lead to. An event without a row is ignored and counted as stale:
that is how duplicates, reordered and late messages end. A handler that leaves the machine anywhere else is a fault of
ours and raises; it never passes as a new kind of progress.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from hermetic.handoff.actions import Action
from hermetic.handoff.messages import Key

S = TypeVar("S")


class HandoffError(RuntimeError):
    """A machine made a move that its table does not have."""


def rows(states: Iterable[S], event: str, *to: S) -> dict[tuple[S, str], frozenset[S]]:
    """One row for each of `states`: `event` leads to one of `to`, or, without any, nowhere else."""
    return {(state, event): frozenset(to) or frozenset({state}) for state in states}


class Observer(Protocol):
    """Sees every step of every machine of this process, also those that had no row; changes nothing."""

    def stepped(
        self, machine: Machine[Any], event: str, args: tuple[Any, ...], before: Any, actions: list[Action]
    ) -> None:
        """`machine` has taken `event` with `args` in state `before`; `machine.state` is where it is now."""
        ...


class Machine(Generic[S]):
    """`state` moves by the table only. `stale` counts what was ignored. `key` says whose handoff it is."""

    table: ClassVar[Mapping[tuple[Any, str], frozenset[Any]]]
    observer: ClassVar[Observer | None] = None

    def __init__(self, key: Key, state: S) -> None:
        self.key = key
        self.state = state
        self.stale = 0

    def _on(self, event: str, handle: Callable[[], list[Action]], *args: Any) -> list[Action]:
        allowed, before = self.table.get((self.state, event)), self.state
        actions: list[Action] = []
        if allowed is None:
            self.stale += 1
        else:
            actions = handle()
            if self.state not in allowed:
                raise HandoffError(f"{before} --{event}--> {self.state} is not in the table")
        if self.observer is not None:
            self.observer.stepped(self, event, args, before, actions)
        return actions

    def _ignored(self) -> list[Action]:
        """A message that has a row here and says nothing new."""
        self.stale += 1
        return []
