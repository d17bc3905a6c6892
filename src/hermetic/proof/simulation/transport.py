"""Pages between simulated workers, by the contract of `transport/base.py` and by nothing more than it promises.

The bytes of a batch arrive page by page, some in two halves, and are read from the source at that moment. Batches fail; end
in doubt, with bytes that come later or never; stand still while a cable is pulled or their sender is stopped, and go on
afterwards. What a dead sender left on its way may still come.

The one thing to know: landing memory is used again, as an allocator would, so a fence that is none lets late bytes into
somebody else's slots. Two kinds: one can fence a peer that lives, the other only one that is dead (shared memory).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import numpy as np

from hermetic.proof.simulation.events import Events
from hermetic.proof.simulation.flights import Flight, Flying, Landing, Owner, Receiver, Sender, Watcher
from hermetic.proof.simulation.model import PAGE_SIZE
from hermetic.proof.simulation.options import Rates
from hermetic.proof.simulation.plan import WRITE_TIMEOUT, Shape, dice
from hermetic.transport.base import Page, TransportError, Written, usable

LATEST = 6.0  # seconds after which the bytes of a batch in doubt arrive at most
NAP = 0.05  # seconds between two tries of a page whose way is cut or whose sender is stopped


class Wires:
    """The data network of a deployment."""

    def __init__(
        self,
        seed: int,
        shape: Shape,
        rates: Rates,
        events: Events,
        loop: asyncio.AbstractEventLoop,
        alive: Callable[[str], bool],
    ) -> None:
        self._shape, self._rates, self._events, self._loop, self._alive = shape, rates, events, loop, alive
        self.now = loop.time
        self._seed, self._rng = seed, dice(seed, "data")
        self._batches: Counter[str] = Counter()
        self._free: list[Landing] = []
        self.receivers: dict[int, Receiver] = {}
        self.cuts: Counter[tuple[str, str]] = Counter()
        self.flights: dict[Flight, None] = {}  # with bytes that may still arrive, or sources that may be read
        self.watcher: Watcher | None = None
        self.damage: dict[
            str, list[int]
        ] = {}  # by decode worker: bits that change in the next pages that land there
        self.faulty = True
        self._numbers = 0

    # -------------------------------------------------------------------- receiving

    def receiver(self, owner: Owner, slots: int, stride: int, peer: str) -> Receiver:
        landing = self._free.pop(0) if self._free else Landing(np.zeros((slots, stride), np.uint8))
        self._numbers += 1
        made = self.receivers[self._numbers] = Receiver(self, owner, peer, landing, self._numbers)
        return made

    def fence(self, receiver: Receiver) -> bool:
        if not self._shape.fenceable and self._alive(receiver.peer):
            return False
        if self._shape.fenceable and receiver.asked < 2 and self._rng.random() < 0.2:
            receiver.asked += 1
            return False  # not yet
        self._events.counted("fence")
        self._events.noted(receiver.owner.name, "fences a segment", f"{receiver.number}, of {receiver.peer}")
        receiver.fenced = True
        return True

    def in_doubt(self, receiver: object) -> bool:
        """Whether a batch to it was made to end in doubt: only a fence ends what waits for that."""
        return isinstance(receiver, Receiver) and receiver.doubted

    def give_back(self, receiver: Receiver) -> None:
        if receiver.landing.holder is receiver:
            receiver.landing.holder = None
            receiver.landing.memory[...] = 0
            self._free.append(receiver.landing)

    def abandon(self, owner: Owner) -> None:
        """A process has died: its landing memory is gone with it, and what it sent is on its way or lost."""
        for receiver in self.receivers.values():
            if receiver.owner is owner:
                receiver.fenced = True
        for flight in [f for f in self.flights if f.sender.owner is owner]:
            self.let_go(flight)

    # ---------------------------------------------------------------------- sending

    def sender(self, owner: Owner, descriptor: str, stride: int) -> Sender:
        name, _, number = descriptor.partition(":")
        receiver = self.receivers.get(int(number)) if name == "simulated" else None
        if receiver is None or receiver.memory.shape[1] != stride:
            raise TransportError(f"there is no landing segment {descriptor!r} for pages of {stride} bytes")
        return Sender(self, owner, receiver)

    def write(self, sender: Sender, batch: int, pages: Sequence[tuple[Page, int]]) -> None:
        slots = tuple(slot for _, slot in pages)
        if sender.closed or not usable(slots, len(sender.receiver.memory)):
            sender.ended.append(Written(batch, ok=False, stopped=True))
            return
        assert self.watcher is not None
        key, flying = self.watcher.begins(sender.owner, pages)
        flight = Flight(sender, batch, key, flying, self.now() + WRITE_TIMEOUT)
        # Each ticket has a stream of its own: leaving out another request changes nothing of its fate.
        rng = self._stream(flight)
        fate, rates = rng.random(), self._rates
        if self.faulty and self._shape.fenceable and fate < rates.write_doubt + rates.write_fails:
            flight.doomed = "doubt" if fate < rates.write_doubt else "fails"
        if not self._shape.fenceable:
            flight.deadline = float("inf")  # memory has no time-out
        sender.flights.append(flight)
        self.flights[flight] = None
        # Everything that a peer may have in flight arrives at the rate of --transfer-floor, or faster.
        longest = self._shape.slots * sender.receiver.memory.shape[1] / self._shape.floor
        lasts = 0.9 * longest * rng.random() ** 2
        for one in flying:
            self._loop.call_later(lasts * rng.random(), self._page, flight, one)
        self._loop.call_later(lasts, self._end, flight)
        self._loop.call_later(WRITE_TIMEOUT + 0.001, self._overdue, flight)
        self._events.noted(
            sender.owner.name, "starts a write", _pages(flight), (flight.whose,) if flight.whose else ()
        )

    def _stream(self, flight: Flight) -> Random:
        label = self._events.label(flight.whose)
        self._batches[label] += 1
        return dice(self._seed, "write", label, self._batches[label])

    def doubt(self, flight: Flight) -> None:
        """Its transport gives up: neither ended nor stopped."""
        if flight.reported:
            return
        self._events.counted("write in doubt")
        flight.sender.receiver.doubted |= bool(flight.doomed)
        flight.sender.flights.remove(flight)
        flight.sender.ended.append(Written(flight.batch, ok=False, stopped=False))
        self.let_go(flight)

    def let_go(self, flight: Flight) -> None:
        """No source is read after this. What is on its way may still arrive, or be lost."""
        flight.reading, flight.reported = False, True
        for one in flight.pages:
            one.late = one.source.copy()
        alive = flight.sender.owner.alive
        if not flight.pages or (not self._shape.fenceable and not alive) or self._rng.random() < 0.4:
            self._gone(flight)
            return
        for one in flight.pages:
            self._loop.call_later(self._rng.random() * LATEST, self._page, flight, one)

    # ------------------------------------------------------------------ bytes arrive

    def _page(self, flight: Flight, one: Flying) -> None:
        if one not in flight.pages or (flight.doomed and one.late is None and one is flight.pages[-1]):
            return  # it has arrived already, or comes late
        sender = flight.sender
        stands = one.late is None and sender.owner.frozen and self._rng.random() < 0.7
        if stands or self.cuts[sender.owner.name, sender.receiver.owner.name] > 0:
            self._loop.call_later(NAP, self._page, flight, one)
            return
        if flight.sender.receiver.fenced:
            flight.pages.remove(one)
        elif not one.half and self._rng.random() < 0.3:
            self._bytes(flight, one, one.source.shape[0] // 2)
            one.half = True
            self._loop.call_later(self._rng.random() * 0.02, self._page, flight, one)
        else:
            self._bytes(flight, one, one.source.shape[0])
            flight.pages.remove(one)
        if not flight.pages and flight.reported:
            self._gone(flight)

    def _bytes(self, flight: Flight, one: Flying, upto: int) -> None:
        assert self.watcher is not None
        self.watcher.byte_arrives(flight, one)
        source = one.source if one.late is None else one.late
        flight.sender.receiver.memory[one.slot, :upto] = source[:upto]
        to = flight.sender.receiver.owner.name
        if upto == len(source) and not flight.reported and self.damage.get(to):
            self._spoil(flight, one, self.damage[to].pop(0))
        if flight.reported:
            self._events.counted("late write")
        self._events.noted(
            flight.sender.receiver.owner.name,
            "late bytes arrive" if flight.reported else "bytes arrive",
            f"page {one.page} in slot {one.slot}{'' if upto == len(source) else ', a part of it'}",
            (flight.whose,) if flight.whose else (),
        )

    def _spoil(self, flight: Flight, one: Flying, pick: int) -> None:
        """One bit of what has just landed changes."""
        assert self.watcher is not None
        self.watcher.spoils(flight)
        at = pick % 8 + 8 * PAGE_SIZE * (pick >> 3 & 1)  # in row 0 of K or V: it is always filled
        flight.sender.receiver.memory[one.slot, at] ^= np.uint8(1 << (pick >> 4 & 7))
        to = flight.sender.receiver.owner.name
        self._events.counted("slot damaged")
        self._events.noted(to, f"a bit of slot {one.slot} changes", "", (flight.whose,))

    def _end(self, flight: Flight) -> None:
        """Its time is over: all has arrived, or something stands in the way."""
        sender = flight.sender
        if flight.reported or flight.doomed == "doubt":
            return
        failed = flight.doomed == "fails"
        if sender.owner.frozen or (flight.pages and not failed):
            if sender.receiver.fenced and not sender.owner.frozen:
                self.doubt(flight)  # its target is gone
                sender.owner.wake()
                return
            self._loop.call_later(NAP / 2, self._end, flight)
            return
        if failed:
            self._events.counted("write failed")
        flight.reading, flight.reported = False, True
        flight.pages.clear()
        sender.flights.remove(flight)
        sender.ended.append(Written(flight.batch, ok=not failed, stopped=True))
        self._gone(flight)
        sender.owner.wake()

    def _overdue(self, flight: Flight) -> None:
        if not flight.reported:
            flight.sender.owner.wake()

    def _gone(self, flight: Flight) -> None:
        flight.pages.clear()
        self.flights.pop(flight, None)


class SimTransport:
    """What one process moves pages with. Implements `transport.base.Transport`."""

    name = "simulated"

    def __init__(self, wires: Wires, owner: Owner) -> None:
        self._wires, self._owner = wires, owner

    def receiver(
        self, slots: int, stride: int, peer_pid: int | None, peer_host: str | None = None
    ) -> Receiver:
        assert peer_host is not None, "simulated workers say which process they are"
        return self._wires.receiver(self._owner, slots, stride, peer_host)

    def sender(self, descriptor: str, stride: int) -> Sender:
        return self._wires.sender(self._owner, descriptor, stride)

    def close(self) -> None:
        """Nothing is held."""


def _pages(flight: Flight) -> str:
    return ", ".join(
        f"page {one.page} -> slot {one.slot}{'' if one.use is None else f' use {one.use.use}'}"
        for one in flight.pages
    )


__all__ = ["SimTransport", "Wires"]
