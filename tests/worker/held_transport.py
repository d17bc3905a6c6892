"""A transport whose writes a test holds in its hand: they land when it says so, late, damaged, or end in doubt.

The one thing to know: it keeps the contract of transport/base.py. Bytes of a write that is in doubt may land at any later
time, in the segment that they were written to, and a segment that was fenced is nobody's memory any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from unittest import mock

import numpy as np

from hermetic.lab.pair import LabPair
from hermetic.lab.scene import make_pair
from hermetic.transport.base import Page, TransportError, Written, usable


@dataclass
class Flight:
    """One batch on its way: the bytes as they were when it began."""

    sender: Sender
    batch: int
    pages: list[tuple[Page, int]]

    def land(self) -> int:
        """Its bytes arrive. Returns how many pages reached memory that is in use."""
        segment = self.sender.segment
        if segment.fenced or segment.closed:
            return 0
        for data, slot in self.pages:
            np.copyto(segment.memory[slot], data)
        return len(self.pages)


@dataclass
class Held:
    """`hold`: writes wait in `flights`; else they land at once. `damaged` so many batches arrive with a flipped bit."""

    name: str = "held"
    hold: bool = False
    damaged: int = 0
    fenceable: bool = True
    not_yet: int = 0  # so many fences say "ask again"
    unopenable: bool = False  # no sender can be opened
    segments: list[Segment] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)
    doubtful: list[Flight] = field(default_factory=list)
    on_write: Callable[[], None] = lambda: None

    def receiver(
        self, slots: int, stride: int, peer_pid: int | None, peer_host: str | None = None
    ) -> Segment:
        self.segments.append(Segment(self, np.zeros((slots, stride), np.uint8), len(self.segments)))
        return self.segments[-1]

    def sender(self, descriptor: str, stride: int) -> Sender:
        if self.unopenable:
            raise TransportError("the segment cannot be opened")
        return Sender(self, self.segments[int(descriptor)])

    def close(self) -> None:
        """Nothing is held beside segments and senders."""

    def deliver(self) -> None:
        """Everything that is held lands, and is reported as written."""
        flights, self.flights = self.flights, []
        for flight in flights:
            flight.land()
            flight.sender.done.append(Written(flight.batch, ok=True, stopped=True))

    def fail(self, number: int = 0, *, stopped: bool) -> None:
        """One held write fails. If it has not stopped, its bytes can still land."""
        flight = self.flights.pop(number)
        flight.sender.done.append(Written(flight.batch, ok=False, stopped=stopped))
        if not stopped:
            self.doubtful.append(flight)

    def land_late(self) -> int:
        """What was in doubt arrives at last. Returns how many pages reached memory that is in use."""
        return sum(flight.land() for flight in self.doubtful)


@dataclass
class Segment:
    """Decode's side."""

    transport: Held
    memory: Page
    number: int
    fenced: bool = False
    closed: bool = False

    def descriptor(self) -> str:
        return str(self.number)

    def fence(self) -> bool:
        if not self.transport.fenceable:
            return False
        if self.transport.not_yet:
            self.transport.not_yet -= 1
            return False
        self.fenced = True
        return True

    def close(self) -> None:
        self.closed = True


@dataclass
class Sender:
    """Prefill's side."""

    transport: Held
    segment: Segment
    done: list[Written] = field(default_factory=list)
    closed: bool = False

    def write(self, batch: int, pages: Sequence[tuple[Page, int]]) -> None:
        assert not self.closed
        if not usable([slot for _, slot in pages], len(self.segment.memory)):
            self.done.append(Written(batch, ok=False, stopped=True))
            return
        flight = Flight(self, batch, [(data.copy(), slot) for data, slot in pages])
        if self.transport.damaged:
            self.transport.damaged -= 1
            flight.pages[0][0][7] ^= 1
        self.transport.flights.append(flight)
        if not self.transport.hold:
            self.transport.deliver()
        self.transport.on_write()

    def poll(self) -> list[Written]:
        done, self.done = self.done, []
        return done

    def close(self) -> None:
        self.closed = True
        self.done.clear()


def held_pair(
    hold: bool = False, on_open: Callable[..., None] = lambda *_: None, **options: object
) -> tuple[LabPair, Held]:
    """A pair of tiny workers over such a transport. `on_open` gets what each would open its transport with."""
    held = Held()

    def opened(*given: object) -> Held:
        on_open(*given)
        return held

    with mock.patch("hermetic.worker.build.open_transport", opened):
        pair = make_pair("landing", **options)
    held.hold = hold
    return pair, held
