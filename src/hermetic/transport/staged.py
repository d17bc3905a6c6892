"""The sending side that the transfer engines share: a staging copy, a thread that drives the engine, results to poll.

A page is copied into the staging area at the place of its slot, and that is the only place the engine ever reads it
from: the sources are free when `write` returns, the pool is registered nowhere, and bytes that are sent late are bytes
that were meant for that very slot. A slot has one write at a time: while one has not ended well, another is refused.

Engines have calls that block and states that must be polled; both happen in this peer's thread, never in the worker's loop.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np

from hermetic.transport.base import WRITE_TIMEOUT_S, Page, Written, usable

ENTRIES_IN_FLIGHT = 512
"""Pages inside an engine at a time. Beyond 2,048 Mooncake drops the path to that peer for seconds."""

_SHORTEST_NAP_S, _LONGEST_NAP_S = 5e-5, 5e-3
_JOIN_S = 0.5


class State(Enum):
    """Of one batch inside an engine. LOST says only that the engine gave up, not that nothing will arrive."""

    RUNNING = 0
    DONE = 1
    LOST = 2


class Flight(Protocol):
    """One batch inside an engine."""

    def state(self) -> State: ...


class Engine(Protocol):
    """One peer's engine. Only its sender's thread calls it; nothing here raises for what the peer did."""

    def start(self, slots: Sequence[int]) -> Flight: ...

    def close(self) -> None: ...


class _Order(NamedTuple):
    number: int
    slots: tuple[int, ...]


class _Pending(NamedTuple):
    batch: int
    slots: tuple[int, ...]
    deadline: float  # of time.monotonic


class _Air(NamedTuple):
    order: _Order
    flight: Flight


class StagedSender:
    """`stage` uint8 [slots, stride], read by `engine` and kept alive by it."""

    def __init__(self, stage: Page, engine: Engine, name: str, timeout_s: float = WRITE_TIMEOUT_S) -> None:
        self._stage, self._engine, self._timeout_s = stage, engine, timeout_s
        self._numbers = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._settled: list[Written] = []  # what never had to go to the engine
        self._busy: set[int] = set()  # slots whose last write has not ended well
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def write(self, batch: int, pages: Sequence[tuple[Page, int]]) -> None:
        slots = tuple(slot for _, slot in pages)
        if self._closed.is_set() or not usable(slots, len(self._stage)) or not self._busy.isdisjoint(slots):
            self._settled.append(Written(batch, ok=False, stopped=True))
            return
        if not slots:  # engines take that for an error
            self._settled.append(Written(batch, ok=True, stopped=True))
            return
        for source, slot in pages:
            np.copyto(self._stage[slot], source)
        self._busy.update(slots)
        number = next(self._numbers)
        self._pending[number] = _Pending(batch, slots, time.monotonic() + self._timeout_s)
        self._orders.put(_Order(number, slots))

    def poll(self) -> list[Written]:
        ended, self._settled = self._settled, []
        while not self._done.empty():
            number, ok = self._done.get()
            batch = self._pending.pop(number, None)
            if batch is None:  # it was too late, and was reported
                continue
            if ok:
                self._busy.difference_update(batch.slots)
            # An engine that failed may have sent some of it, and may still send the rest.
            ended.append(Written(batch.batch, ok=ok, stopped=ok))
        # The deadlines are kept here and not in the thread, which may be in a call that hangs.
        now, closed = time.monotonic(), self._closed.is_set()
        for number in [n for n, x in self._pending.items() if closed or now >= x.deadline]:
            ended.append(Written(self._pending.pop(number).batch, ok=False, stopped=False))
        return ended

    def close(self) -> None:
        self._closed.set()
        self._orders.put(None)
        self._thread.join(
            _JOIN_S
        )  # if a call into the engine hangs, its thread frees the engine when it returns

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        flights: list[_Air] = []
        try:
            moved = time.monotonic()
            while not self._closed.is_set():
                started = self._start(flights)
                landed = self._land(flights)
                now = time.monotonic()
                if started or landed:
                    moved = now
                elif flights:
                    # Never a tight loop: it would take the core that the transfer itself runs on. An eighth of what
                    # has been waited already costs little of either: time on top, or looks in vain.
                    time.sleep(min(max((now - moved) / 8, _SHORTEST_NAP_S), _LONGEST_NAP_S))
        finally:
            self._closed.set()
            self._engine.close()

    def _start(self, flights: list[_Air]) -> bool:
        """Hand waiting batches to the engine; sleeps until there is one if nothing is in flight."""
        started = False
        load = sum(len(air.order.slots) for air in flights)
        while load < ENTRIES_IN_FLIGHT and (not flights or not self._orders.empty()):
            order = self._orders.get()
            if order is None:
                break
            flights.append(_Air(order, self._engine.start(order.slots)))
            load += len(order.slots)
            started = True
        return started

    def _land(self, flights: list[_Air]) -> bool:
        """Report the batches that have ended, in whatever order they do."""
        left = []
        for air in flights:
            state = air.flight.state()
            if state is State.RUNNING:
                left.append(air)
            else:
                self._done.put((air.order.number, state is State.DONE))
        landed = len(left) < len(flights)
        flights[:] = left
        return landed
