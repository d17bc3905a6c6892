"""Landing slots against a plain model: every slot in one state, no use number twice, nothing freed by time."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hermetic.kv.slots import SlotError, Slots, SlotUse

COUNT = 5
keys = st.sampled_from(["a", "b", "c"])


class SlotMachine(RuleBasedStateMachine):
    """The model: free and quarantined sets, and for each granted slot its key and use."""

    @initialize()
    def start(self) -> None:
        self.slots = Slots(COUNT)
        self.free, self.bad = set(range(COUNT)), set[int]()
        self.granted: dict[int, tuple[str, SlotUse]] = {}
        self.ever: set[SlotUse] = set()

    def mine(self, key: str) -> set[int]:
        return {s for s, (k, _) in self.granted.items() if k == key}

    @rule(key=keys, number=st.integers(-1, COUNT + 1))
    def grant(self, key: str, number: int) -> None:
        got = self.slots.grant(key, number)
        assert len(got) == max(0, min(number, len(self.free)))
        for use in got:
            assert use.slot in self.free
            assert use not in self.ever  # a use number never repeats
            self.ever.add(use)
            self.free.discard(use.slot)
            self.granted[use.slot] = (key, use)

    @rule(key=keys, slot=st.integers(-1, COUNT), use=st.integers(0, 6))
    def consume(self, key: str, slot: int, use: int) -> None:
        named = SlotUse(slot, use)
        allowed = self.granted.get(slot) == (key, named)
        assert self.slots.holds(key, named) == allowed
        if not allowed:
            with pytest.raises(SlotError):
                self.slots.consume(key, named)
            return
        self.slots.consume(key, named)
        del self.granted[slot]
        self.free.add(slot)

    @rule(key=keys)
    def consume_one_of_mine(self, key: str) -> None:
        for slot in sorted(self.mine(key))[:1]:
            self.consume(key, slot, self.granted[slot][1].use)

    @rule(key=keys)
    def release(self, key: str) -> None:
        mine = self.mine(key)
        assert self.slots.release(key) == len(mine)
        self.free |= mine
        for slot in mine:
            del self.granted[slot]

    @rule(key=keys)
    def quarantine(self, key: str) -> None:
        mine = self.mine(key)
        assert self.slots.quarantine(key) == len(mine)
        self.bad |= mine
        for slot in mine:
            del self.granted[slot]

    @rule()
    def fence(self) -> None:
        assert self.slots.fence() == len(self.bad)
        self.free |= self.bad
        self.bad.clear()

    @invariant()
    def conserved(self) -> None:
        if hasattr(self, "slots"):
            self.slots.check_conservation()
            assert self.slots.counts() == (len(self.free), len(self.granted), len(self.bad))
            assert self.slots.free == len(self.free)


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_nothing_but_a_fence_takes_a_slot_out_of_quarantine() -> None:
    slots = Slots(1)
    (use,) = slots.grant("a", 1)
    assert slots.quarantine("a") == 1
    assert slots.release("a") == 0
    assert slots.grant("b", 1) == ()
    with pytest.raises(SlotError):
        slots.consume("a", use)
    assert slots.fence() == 1
    assert slots.grant("b", 1) == (SlotUse(0, 2),)


def test_a_fence_leaves_granted_slots_granted() -> None:
    slots = Slots(2)
    (use,) = slots.grant("a", 1)
    assert slots.fence() == 0
    assert slots.holds("a", use)


def test_conservation_notices_a_slot_in_two_states_or_in_none() -> None:
    for harm in (
        lambda s: s._free.append(s._free[0]),
        lambda s: s._free.pop(),
        lambda s: s._quarantined.add(s._free[0]),
        lambda s: s._granted.clear(),
    ):
        slots = Slots(3)
        slots.grant("a", 1)
        slots.check_conservation()
        harm(slots)
        with pytest.raises(SlotError):
            slots.check_conservation()


def test_a_peer_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Slots(0)
