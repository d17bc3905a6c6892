"""Messages between the processes of a simulated deployment: lost, doubled, delayed, overtaken, cut.

Implements what sessions and gateway ask of a wire (`worker/lines.py`, `gateway/wire.py`). The one thing to know: an address is
whoever listens at it when a message arrives; a line, like a ZeroMQ socket, outlives the process at its other end.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from hermetic.gateway.wire import Door
from hermetic.proof.simulation.events import Events
from hermetic.proof.simulation.options import Rates
from hermetic.proof.simulation.plan import GATEWAY, dice
from hermetic.worker.core import Connection
from hermetic.worker.lines import Line

USUAL = (0.0002, 0.002)  # seconds that a message takes
LATE = 0.6  # seconds that one takes at most that is overtaken


def name_at(address: str) -> str:
    """Addresses of a simulation are tcp://NAME:PORT."""
    return address.removeprefix("tcp://").partition(":")[0]


class End(Protocol):
    """A process that others can reach."""

    name: str
    alive: bool

    def arrive(self, connection: Connection, raw: bytes, answer: Line | None) -> None: ...


class Network:
    """Everybody's. `faulty` turns random faults off; cuts are made and mended by name."""

    def __init__(self, seed: int, rates: Rates, events: Events, loop: asyncio.AbstractEventLoop) -> None:
        self._seed, self._rates, self._events, self._loop = seed, rates, events, loop
        self._streams: dict[tuple[str, str], Random] = {}
        self._cuts: Counter[frozenset[str]] = Counter()
        self._names = itertools.count(1)
        self.ends: dict[str, End] = {}  # by address
        self.faulty = True
        self.trouble: Callable[..., None] = lambda *_: None  # told of pairs that had bad luck

    def new_name(self) -> Connection:
        return b"r%d" % next(self._names)

    def cut(self, a: str, b: str) -> None:
        self._cuts[frozenset((a, b))] += 1

    def mend(self, a: str, b: str) -> None:
        self._cuts[frozenset((a, b))] -= 1

    def is_cut(self, a: str, b: str) -> bool:
        return self._cuts[frozenset((a, b))] > 0

    def carry(self, source: str, to: str, raw: bytes, deliver: Callable[[bytes], None]) -> None:
        """Give `raw` to `deliver` after a while, if at all."""
        rng = self._streams.get((source, to))
        if rng is None:
            rng = self._streams[source, to] = dice(self._seed, "net", source, to)
        fate, lasts, rates = rng.random(), rng.uniform(*USUAL), self._rates
        if self.is_cut(source, to):
            self._events.counted("message cut off")
            self._events.carried(source, to, raw, "lost")
            return
        if not self.faulty:
            fate = 1.0
        if fate < rates.loss:
            self._events.counted("message lost")
            self.trouble(source, to)
            self._events.carried(source, to, raw, "lost")
            return
        note = ""
        if fate < rates.loss + rates.duplicate:
            self._events.counted("message doubled")
            self._after(lasts + rng.random() * LATE, source, to, raw, deliver, "late")
            note = "twice"
        elif fate < rates.loss + rates.duplicate + rates.late:
            self._events.counted("message overtaken")
            lasts += rng.random() * LATE
            note = "late"
        self._after(lasts, source, to, raw, deliver, note)

    def _after(
        self, lasts: float, source: str, to: str, raw: bytes, deliver: Callable[[bytes], None], note: str
    ) -> None:
        def arrives() -> None:
            self._events.carried(source, to, raw, note)
            deliver(raw)

        self._loop.call_later(lasts, arrives)


@dataclass(eq=False)
class DialledLine:
    """A line that somebody opened. `take` gets what comes back over it."""

    net: Network
    owner: End
    address: str
    to: str
    name: Connection
    take: Callable[[bytes], None]
    closed: bool = False

    def put(self, raw: bytes) -> None:
        if not self.closed:
            self.net.carry(self.owner.name, self.to, raw, self._arrives)

    def _arrives(self, raw: bytes) -> None:
        end = self.net.ends.get(self.address)
        if end is not None and end.alive:
            end.arrive(self.name, raw, WayBack(self, end))

    def home(self, raw: bytes) -> None:
        if not self.closed and self.owner.alive:
            self.take(raw)

    def close(self) -> None:
        self.closed = True


@dataclass(eq=False)
class WayBack:
    """What the process at the other end of a line answers over."""

    line: DialledLine
    end: End

    def put(self, raw: bytes) -> None:
        line = self.line
        if self.end.alive:
            line.net.carry(self.end.name, line.owner.name, raw, line.home)

    def close(self) -> None:
        """Theirs to close."""


class GatewayEnd:
    """One gateway process: its wire, and the port at which workers register. `gone`: it has died."""

    name = GATEWAY

    def __init__(self, net: Network, address: str) -> None:
        self._net, self._address = net, address
        self._door: Door | None = None
        self.alive = True

    def die(self) -> None:
        """What was said to it from now on is lost; what it said is on its way."""
        self.alive = False

    def arrive(self, connection: Connection, raw: bytes, answer: Line | None) -> None:
        if self._door is not None and answer is not None:
            said = self._door.knock(raw)
            if said is not None:
                answer.put(said)

    async def listen(self, host: str, port: int, door: Door) -> str:
        self._door = door
        self._net.ends[self._address] = self
        return self._address

    def dial(self, address: str, take: Callable[[bytes], None]) -> DialledLine:
        def take_if_alive(raw: bytes) -> None:
            if self.alive:
                take(raw)

        return DialledLine(self._net, self, address, name_at(address), self._net.new_name(), take_if_alive)

    async def close(self) -> None:
        self.alive = False


__all__ = ["DialledLine", "GatewayEnd", "Network", "WayBack", "name_at"]
