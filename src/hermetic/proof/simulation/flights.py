"""What is on its way between simulated workers: landing memory, its two ends, batches and their pages.

The data only; how bytes travel is in transport.py. The one thing to know: a page on its way is read from its source until
its batch has been reported, and from a copy (`late`) after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from hermetic.handoff.messages import Key
from hermetic.kv.slots import SlotUse
from hermetic.transport.base import Page, Written

if TYPE_CHECKING:
    from hermetic.proof.simulation.transport import Wires


class Owner(Protocol):
    """The process that a transport is in."""

    name: str
    label: str
    alive: bool
    frozen: bool

    def wake(self) -> None: ...


@dataclass(eq=False)
class Landing:
    """Memory that landing slots are in. It belongs to one receiver after another."""

    memory: Page
    holder: Receiver | None = None


@dataclass(eq=False)
class Receiver:
    """Decode's side for one peer, known by the label of its process."""

    wires: Wires
    owner: Owner
    peer: str
    landing: Landing
    number: int
    fenced: bool = False
    asked: int = 0  # times that a fence said "not yet"
    doubted: bool = False  # a batch to it was made to end in doubt

    def __post_init__(self) -> None:
        self.memory = self.landing.memory
        self.landing.holder = self

    def descriptor(self) -> str:
        return f"simulated:{self.number}"

    def fence(self) -> bool:
        return self.wires.fence(self)

    def close(self) -> None:
        self.wires.give_back(self)


@dataclass(eq=False)
class Flying:
    """One page on its way. `late` holds its bytes once its batch has been reported, or its sender is gone."""

    source: Page
    page: int  # of the sender's pool
    slot: int
    use: SlotUse | None  # under which it is granted
    late: Page | None = None
    half: bool = False


@dataclass(eq=False)
class Flight:
    """One batch. `key` is that of the protocol's Write. `reading`: its sources must not change."""

    sender: Sender
    batch: int
    key: Key | None
    pages: list[Flying]
    deadline: float
    doomed: str = ""  # fails or doubt: how it will end
    reading: bool = True
    reported: bool = False

    @property
    def whose(self) -> str:
        return "" if self.key is None else str(self.key)


@dataclass(eq=False)
class Sender:
    """Prefill's side for one peer."""

    wires: Wires
    owner: Owner
    receiver: Receiver
    flights: list[Flight] = field(default_factory=list)
    ended: list[Written] = field(default_factory=list)
    closed: bool = False

    def write(self, batch: int, pages: Sequence[tuple[Page, int]]) -> None:
        self.wires.write(self, batch, pages)

    def poll(self) -> list[Written]:
        now = self.wires.now()
        for flight in list(self.flights):
            if now >= flight.deadline:
                self.wires.doubt(flight)
        ended, self.ended = self.ended, []
        return ended

    def close(self) -> None:
        self.closed = True
        for flight in self.flights:
            self.wires.let_go(flight)
        self.flights.clear()


class Watcher(Protocol):
    """Who checks what moves (checks.py)."""

    def begins(self, owner: Owner, pages: Sequence[tuple[Page, int]]) -> tuple[Key | None, list[Flying]]: ...
    def spoils(self, flight: Flight) -> None: ...
    def byte_arrives(self, flight: Flight, flying: Flying) -> None: ...


__all__ = ["Flight", "Flying", "Landing", "Owner", "Receiver", "Sender", "Watcher"]
