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
    """The model: the free ones, for each granted slot its key and use, and which of those are in quarantine."""

    @initialize()
    def start(self) -> None:
        self.slots = Slots(COUNT)
        self.free, self.bad = set(range(COUNT)), set[int]()
        self.granted: dict[int, tuple[str, SlotUse]] = {}
        self.ever: set[SlotUse] = set()

    def mine(self, key: str) -> set[int]:
        return {s for s, (k, _) in self.granted.items() if k == key}

    def returned(self, slots: set[int]) -> None:
        for slot in slots:
            del self.granted[slot]
        self.bad -= slots
        self.free |= slots

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
        self.returned({slot})

    @rule(key=keys)
    def consume_one_of_mine(self, key: str) -> None:
        for slot in sorted(self.mine(key))[:1]:
            self.consume(key, slot, self.granted[slot][1].use)

    @rule(key=keys)
    def release(self, key: str) -> None:
        mine = self.mine(key)
        assert self.slots.release(key) == len(mine)
        self.returned(mine)

    @rule(key=keys)
    def quarantine(self, key: str) -> None:
        mine = self.mine(key)
        assert self.slots.quarantine(key) == len(mine)
        self.bad |= mine

    @rule()
    def fence(self) -> None:
        assert self.slots.fence() == len(self.granted)
        self.returned(set(self.granted))

    @invariant()
    def conserved(self) -> None:
        if hasattr(self, "slots"):
            self.slots.check_conservation()
            assert self.slots.counts() == (len(self.free), len(self.granted) - len(self.bad), len(self.bad))
            assert self.slots.free == len(self.free)
            for key in "abc":
                assert self.slots.held(key) == len(self.mine(key))


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_slot_in_quarantine_stays_its_tickets_own_and_is_given_to_nobody() -> None:
    slots = Slots(2)
    (use,) = slots.grant("a", 1)
    assert slots.quarantine("a") == 1
    assert slots.counts() == (1, 0, 1)
    assert slots.holds("a", use)
    assert slots.grant("b", 2) == (SlotUse(1, 1),)
    assert slots.quarantine("a") == 1  # again changes nothing
    assert slots.counts() == (0, 1, 1)


def test_a_slot_leaves_quarantine_when_its_sender_has_drained_when_its_content_is_copied_and_by_a_fence() -> (
    None
):
    for let_go in (
        lambda slots, use: slots.release("a"),
        lambda slots, use: slots.consume("a", use),
        lambda slots, use: slots.fence(),
    ):
        slots = Slots(1)
        (use,) = slots.grant("a", 1)
        slots.quarantine("a")
        let_go(slots, use)
        assert slots.counts() == (1, 0, 0)
        assert slots.grant("b", 1) == (SlotUse(0, 2),)  # granted, and not still in quarantine
        assert slots.counts() == (0, 1, 0)


def test_a_fence_returns_every_grant_of_every_ticket() -> None:
    slots = Slots(3)
    (use,) = slots.grant("a", 1)
    slots.grant("b", 1)
    slots.quarantine("b")
    assert slots.fence() == 2
    assert slots.counts() == (3, 0, 0)
    assert not slots.holds("a", use)


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
