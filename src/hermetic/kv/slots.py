"""Landing slots: the only memory that a remote writer may address, one set per peer.

A slot is free, granted (to one ticket, under a *use* number that never repeats), or granted and in quarantine. A grant
ends in one of two ways: the slot's content was copied out (`consume`), or the sender is known to be unable to write any
more (`release`, after *drained*; `fence`). What neither covers stays in quarantine, counted. Time alone frees nothing.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol


class SlotError(RuntimeError):
    """A slot was named that is not granted like this; the message says what is known."""


class SlotUse(NamedTuple):
    """One use of one slot. A message about another use of the same slot is stale."""

    slot: int
    use: int


class SlotCounts(NamedTuple):
    """Every slot is in exactly one of these (I5)."""

    free: int
    granted: int
    quarantined: int


class SlotObserver(Protocol):
    """Sees every change of every peer's slots in this process; changes nothing."""

    def slots_changed(self, slots: Slots, what: str, uses: tuple[SlotUse, ...], key: object) -> None:
        """`what` is grant, quarantine, or how the slots came back: consume, release or fence (whose key is None)."""
        ...


class Slots:
    """`count` slots of one peer. Keys of grants are opaque (the handoff uses ticket and attempt)."""

    observer: ClassVar[SlotObserver | None] = None

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError("a peer needs at least one landing slot")
        self.count = count
        self._uses = [0] * count
        self._free = list(range(count - 1, -1, -1))
        self._granted: dict[int, object] = {}
        self._quarantined: set[int] = set()  # of the granted ones

    @property
    def free(self) -> int:
        return len(self._free)

    def counts(self) -> SlotCounts:
        quarantined = len(self._quarantined)
        return SlotCounts(len(self._free), len(self._granted) - quarantined, quarantined)

    def held(self, key: object) -> int:
        """How many slots are granted to `key`, those in quarantine included."""
        return sum(k == key for k in self._granted.values())

    def grant(self, key: object, number: int) -> tuple[SlotUse, ...]:
        """Up to `number` free slots for `key`; fewer, or none, when there are fewer."""
        taken = []
        for _ in range(min(number, len(self._free))):
            slot = self._free.pop()
            self._uses[slot] += 1
            self._granted[slot] = key
            taken.append(SlotUse(slot, self._uses[slot]))
        if self.observer is not None and taken:
            self.observer.slots_changed(self, "grant", tuple(taken), key)
        return tuple(taken)

    def holds(self, key: object, use: SlotUse) -> bool:
        """Whether this very use of the slot is granted to `key`."""
        slot = use.slot
        return 0 <= slot < self.count and self._granted.get(slot) == key and self._uses[slot] == use.use

    def consume(self, key: object, use: SlotUse) -> None:
        """The slot's content was copied out; no write to it is in flight. It is free for the next grant."""
        if not self.holds(key, use):
            raise SlotError(f"slot {use.slot}, use {use.use}, is not granted to {key!r}")
        self._settle([use.slot], "consume", key)

    def release(self, key: object) -> int:
        """All grants of `key`, once its sender has drained or is fenced. Returns how many."""
        return self._settle(self._of(key), "release", key)

    def quarantine(self, key: object) -> int:
        """All grants of `key`, whose sender does not answer: out of use until `release` or `fence`. Returns how many."""
        mine = self._of(key)
        if self.observer is not None and mine:
            self.observer.slots_changed(self, "quarantine", self._named(mine), key)
        self._quarantined.update(mine)
        return len(mine)

    def fence(self) -> int:
        """The peer is proven unable to write (see the transport's `fence`): every grant returns. Returns how many."""
        return self._settle(list(self._granted), "fence", None)

    def check_conservation(self) -> None:
        """I5 for slots."""
        free = set(self._free)
        if len(free) != len(self._free) or len(free) + len(self._granted) != self.count:
            raise SlotError(f"slots do not add up: {self.counts()} of {self.count}")
        if free & self._granted.keys() or not self._quarantined <= self._granted.keys():
            raise SlotError("a slot is in two states at once")

    def _of(self, key: object) -> list[int]:
        return [s for s, k in self._granted.items() if k == key]

    def _named(self, slots: list[int]) -> tuple[SlotUse, ...]:
        return tuple(SlotUse(slot, self._uses[slot]) for slot in slots)

    def _settle(self, slots: list[int], what: str, key: object) -> int:
        if self.observer is not None and slots:
            self.observer.slots_changed(self, what, self._named(slots), key)
        for slot in slots:
            del self._granted[slot]
            self._quarantined.discard(slot)
            self._free.append(slot)
        return len(slots)
