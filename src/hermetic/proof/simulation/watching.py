"""What the product says of itself while it is simulated: steps that are observed, exceptions, and the log's worst.

The one thing to know: an exception that leaves product code is a finding of the run, and never ends the simulator.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from hermetic.handoff.machine import HandoffError, Machine
from hermetic.kv.pool import OwnershipError, Pool
from hermetic.kv.slots import SlotError, Slots
from hermetic.proof.simulation.checks import Checks


def raised(checks: Checks, context: dict[str, object]) -> None:
    """An exception that nobody of the product caught."""
    error = context.get("exception")
    match error:
        case OwnershipError() | SlotError():
            checks.found("I5", f"{type(error).__name__}: {error}")
        case HandoffError() | AssertionError():
            checks.found("handoff", f"{type(error).__name__}: {error}")
        case _:
            checks.found("handoff", f"{context.get('message')}: {error!r}")


def ended(checks: Checks, task: asyncio.Task[None]) -> None:
    """A client or a fault is over: by an exception that is none of its ordinary ends?"""
    if not task.cancelled() and (error := task.exception()) is not None:
        raised(checks, {"message": "a client or an operator met an exception", "exception": error})


class _Critical(logging.Handler):
    """A part of the gateway that has stopped working says so at this level."""

    def __init__(self) -> None:
        super().__init__(logging.CRITICAL)
        self.checks: list[Checks] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and self.checks:
            self.checks[-1].found("handoff", f"{record.getMessage()}: {record.exc_info[1]!r}")


@contextmanager
def quiet_logs() -> Iterator[list[Checks]]:
    """Nothing of the product's log is shown."""
    log, handler = logging.getLogger("hermetic"), _Critical()
    level, propagate = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.CRITICAL)
    log.propagate = False
    try:
        yield handler.checks
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate


@contextmanager
def observed() -> Iterator[Callable[[Checks], None]]:
    """Machines, slots and pools of this process are observed by the checks that are given."""

    behind = Machine.observer  # a recording (--trace)

    def watch(checks: Checks) -> None:
        both = checks if behind is None else _Both(checks, behind)
        Machine.observer = both
        Slots.observer = both
        Pool.observer = both

    kept = [mock.patch.object(cls, "observer", cls.observer) for cls in (Machine, Slots, Pool)]
    for patch in kept:
        patch.start()
    try:
        yield watch
    finally:
        for patch in kept:
            patch.stop()


class _Both:
    """The checks, and whoever observes beside them."""

    def __init__(self, *observers: Any) -> None:
        self._observers = observers

    def stepped(self, *told: Any) -> None:
        for one in self._observers:
            one.stepped(*told)

    def slots_changed(self, *told: Any) -> None:
        for one in self._observers:
            one.slots_changed(*told)

    def pages_changed(self, *told: Any) -> None:
        for one in self._observers:
            one.pages_changed(*told)


__all__ = ["ended", "observed", "quiet_logs", "raised"]
