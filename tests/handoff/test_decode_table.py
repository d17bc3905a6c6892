"""Every row of the table in handoff/decode.py, one event at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hermetic.handoff import messages as m
from hermetic.handoff.actions import Action, CloseLeases, Copy, Enter, Report, Send
from hermetic.handoff.decode import WINDOW, DecodeHandoff, State
from hermetic.handoff.outcome import Aborted, Completed, Failed
from hermetic.kv.slots import SlotCounts, Slots, SlotUse

KEY = m.Key(b"t" * 16, 1)
LEFT = Aborted("client_gone", "the client left")
COMPLETE = m.Complete(40, 3, b"state")


def reserved(slots: int = 4) -> DecodeHandoff:
    it = DecodeHandoff(KEY, 40, 3, Slots(slots))
    assert it.reserved() == [Send(m.Grant(40, 3))]
    return it


def landing(slots: int = 4) -> DecodeHandoff:
    it = reserved(slots)
    assert it.received(m.Started(3)) == []
    return it


def give(it: DecodeHandoff, number: int = 16) -> tuple[SlotUse, ...]:
    (action,) = it.credit(number)
    assert isinstance(action, Send)
    assert isinstance(action.message, m.Credit)
    return tuple(SlotUse(*s) for s in action.message.slots)


def landed(*pages: tuple[int, SlotUse]) -> m.Landed:
    return m.Landed(1, tuple((page, use.slot, use.use) for page, use in pages))


def copying() -> DecodeHandoff:
    it = landing()
    use = give(it)[0]
    assert it.received(landed((0, use))) == [Copy(0, use)]
    return it


def draining() -> DecodeHandoff:
    it = landing()
    give(it)
    assert it.abort(LEFT) == [Send(m.Abort("client_gone", "the client left")), Report(LEFT)]
    return it


def entered() -> DecodeHandoff:
    it = landing()
    uses = give(it)
    it.received(landed(*enumerate(uses)))
    for page in range(3):
        it.copied(page, True)
    assert it.received(COMPLETE) == [Send(m.Ack()), Enter(b"state"), Report(Completed())]
    return it


def ended() -> DecodeHandoff:
    it = draining()
    it.received(m.Drained())
    return it


MAKE: dict[State, Callable[[], DecodeHandoff]] = {
    State.RESERVED: reserved,
    State.LANDING: landing,
    State.DRAINING: draining,
    State.ENTERED: entered,
    State.ENDED: ended,
}


def counts(it: DecodeHandoff) -> SlotCounts:
    it._slots.check_conservation()
    return it._slots.counts()


@pytest.mark.parametrize("state", State)
def test_the_builders_above_reach_the_states_they_are_named_after(state: State) -> None:
    assert MAKE[state]().state is state


def test_slots_are_given_only_once_prefill_has_started() -> None:
    it = reserved()
    assert it.wants() == 0
    assert it.credit(4) == []
    assert counts(it) == (4, 0, 0)
    it.received(m.Started(3))
    assert it.wants() == 3
    assert len(give(it)) == 3
    assert it.wants() == 0
    assert counts(it) == (1, 3, 0)


def test_one_ticket_never_holds_more_than_its_window() -> None:
    it = DecodeHandoff(KEY, 10_000, 625, Slots(64))
    it.received(m.Started(625))
    assert it.wants() == WINDOW
    assert len(give(it, 64)) == WINDOW


def test_pages_are_copied_verified_and_only_then_does_the_request_enter() -> None:
    it = landing()
    uses = give(it)
    assert it.received(landed(*enumerate(uses))) == [Copy(i, use) for i, use in enumerate(uses)]
    assert it.copied(1, True) == []
    assert it.received(COMPLETE) == []
    assert it.copied(0, True) == []
    assert it.copied(2, True) == [Send(m.Ack()), Enter(b"state"), Report(Completed())]
    assert it.state is State.ENTERED
    assert counts(it) == (4, 0, 0)


@pytest.mark.parametrize("complete", [m.Complete(39, 3, b""), m.Complete(40, 2, b""), m.Complete(1, 1, b"")])
def test_counts_that_differ_from_what_was_reserved_fail_the_request_with_the_numbers(
    complete: m.Complete,
) -> None:
    it = landing()
    uses = give(it)
    it.received(landed(*enumerate(uses)))
    for page in range(3):
        it.copied(page, True)
    out = it.received(complete)
    match out:
        case [Send(message=m.Abort(code=code)), Report(outcome=Failed(reason=reason))]:
            assert code == "kv_integrity"
            assert f"{complete.tokens} tokens on {complete.pages} pages" in reason
            assert "40 tokens on 3 pages" in reason
        case _:
            raise AssertionError(out)
    assert it.state is State.DRAINING


def test_complete_before_every_page_was_announced_fails_at_once_and_never_waits_for_what_cannot_come() -> (
    None
):
    it = landing()
    use = give(it)[0]
    it.received(landed((0, use)))
    it.copied(0, True)
    match it.received(COMPLETE):
        case [Send(message=m.Abort(code="kv_integrity")), Report(outcome=Failed(reason=reason))]:
            assert "1 of 3 pages" in reason
        case other:
            raise AssertionError(other)


def test_a_page_that_fails_is_asked_for_once_more_into_another_slot() -> None:
    it = landing()
    uses = give(it)
    it.received(landed(*enumerate(uses)))
    match it.copied(1, False):
        case [Send(message=m.Resend(page=1, slot=slot))]:
            again = SlotUse(*slot)
        case other:
            raise AssertionError(other)
    assert again.slot != uses[1].slot
    assert it.resends == 1
    it.copied(0, True)
    it.copied(2, True)
    assert it.received(COMPLETE) == []  # it is on its way, so nothing is missing
    assert it.received(landed((1, again))) == [Copy(1, again)]
    assert it.copied(1, True) == [Send(m.Ack()), Enter(b"state"), Report(Completed())]
    assert counts(it) == (4, 0, 0)


def test_with_no_other_slot_free_a_resend_takes_the_same_slot_under_another_use() -> None:
    it = landing(slots=1)
    (use,) = give(it)
    it.received(landed((0, use)))
    assert it.copied(0, False) == [Send(m.Resend(0, (use.slot, use.use + 1)))]


def test_a_page_that_fails_twice_fails_the_request() -> None:
    it = copying()
    (resend,) = it.copied(0, False)
    assert isinstance(resend, Send)
    assert isinstance(resend.message, m.Resend)
    again = SlotUse(*resend.message.slot)
    it.received(landed((0, again)))
    match it.copied(0, False):
        case [
            Send(message=m.Abort(code="kv_integrity")),
            Report(outcome=Failed(code="kv_integrity", reason=reason)),
        ]:
            assert "page 0" in reason
        case other:
            raise AssertionError(other)
    assert it.state is State.DRAINING


@pytest.mark.parametrize("before", [reserved, landing])
@pytest.mark.parametrize("ours", [True, False])
def test_after_an_abort_slots_are_held_until_prefill_has_drained(
    before: Callable[[], DecodeHandoff], ours: bool
) -> None:
    it = before()
    held = len(give(it)) if before is landing else 0
    if ours:
        assert it.abort(LEFT) == [Send(m.Abort("client_gone", "the client left")), Report(LEFT)]
    else:
        assert it.received(m.Abort("deadline", "late")) == [Report(Aborted("deadline", "late"))]
    assert it.state is State.DRAINING
    assert counts(it).granted == held
    assert it.received(m.Drained()) == [CloseLeases()]
    assert it.state is State.ENDED
    assert counts(it) == (4, 0, 0)


@pytest.mark.parametrize("copy_first", [True, False])
def test_neither_slots_nor_pages_are_given_back_while_a_copy_runs(copy_first: bool) -> None:
    it = copying()
    it.abort(LEFT)
    steps: list[Callable[[], list[Action]]] = [lambda: it.copied(0, True), lambda: it.received(m.Drained())]
    first, second = steps if copy_first else reversed(steps)
    assert first() == []
    assert counts(it).granted == 3
    assert second() == [CloseLeases()]
    assert counts(it) == (4, 0, 0)


@pytest.mark.parametrize("before", [reserved, landing, draining])
def test_a_fence_ends_what_waited_for_the_peer(before: Callable[[], DecodeHandoff]) -> None:
    it = before()
    report = [] if before is draining else [Report(Failed("worker_lost", "it died"))]
    assert it.fenced("it died") == [*report, CloseLeases()]
    assert it.state is State.ENDED
    assert counts(it) == (4, 0, 0)


@pytest.mark.parametrize("before", [reserved, landing, draining])
def test_a_peer_that_is_lost_but_not_fenced_keeps_its_slots_in_quarantine(
    before: Callable[[], DecodeHandoff],
) -> None:
    it = before()
    held = len(give(it)) if before is landing else counts(it).granted
    report = [] if before is draining else [Report(Failed("worker_lost", "silence"))]
    assert it.lost("silence") == [*report, CloseLeases()]
    assert it.state is State.ENDED
    assert counts(it) == (4 - held, 0, held)
    assert it._slots.fence() == held


def test_a_peer_that_ends_after_the_request_entered_changes_nothing() -> None:
    it = entered()
    assert it.fenced("died") == []
    assert it.lost("died") == []
    assert it.abort(LEFT) == []
    assert it.received(m.Abort("x", "y")) == []
    assert it.state is State.ENTERED


@pytest.mark.parametrize("state", [State.RESERVED, State.DRAINING, State.ENTERED, State.ENDED])
def test_pages_are_copied_while_landing_and_in_no_other_state(state: State) -> None:
    it = MAKE[state]()
    assert it.received(m.Landed(1, ((0, 3, 1),))) == []
    assert it.stale == 1


def test_slots_that_were_not_granted_to_this_ticket_are_not_copied() -> None:
    slots = Slots(4)
    (foreign,) = slots.grant("somebody else", 1)
    it = DecodeHandoff(KEY, 40, 3, slots)
    it.received(m.Started(3))
    mine = give(it, 1)[0]
    for use in (
        foreign,
        SlotUse(mine.slot, mine.use + 1),
        SlotUse(mine.slot, mine.use - 1),
        SlotUse(99, 1),
        SlotUse(-1, 1),
    ):
        assert it.received(landed((0, use))) == []
    assert it.stale == 5
    assert it.received(landed((0, mine))) == [Copy(0, mine)]


def test_a_repeated_landed_is_stale_before_during_and_after_its_copy() -> None:
    it = landing()
    uses = give(it)
    message = landed((0, uses[0]))
    it.received(message)
    assert it.received(message) == []
    (resend,) = it.copied(0, False)
    assert isinstance(resend, Send)
    assert isinstance(resend.message, m.Resend)
    assert it.received(message) == []
    again = landed((0, SlotUse(*resend.message.slot)))
    assert it.received(again) == [Copy(0, SlotUse(*resend.message.slot))]
    assert it.received(again) == []
    it.copied(0, True)
    assert it.received(again) == []
    assert (it.stale, it.state) == (4, State.LANDING)


@pytest.mark.parametrize("page", [-1, 3, 0])
def test_a_page_out_of_turn_fails_the_request(page: int) -> None:
    it = landing()
    uses = give(it)
    it.received(landed((0, uses[0])))
    it.copied(0, True)
    match it.received(landed((page, uses[1]))):
        case [Send(message=m.Abort(code="kv_integrity")), Report(outcome=Failed(code="kv_integrity"))]:
            pass
        case other:
            raise AssertionError(other)


def test_a_later_credit_repairs_a_lost_one_and_so_does_repeating_it() -> None:
    it = landing()
    first = give(it, 1)
    (action,) = it.credit(2)
    assert action == Send(m.Credit(0, tuple((s.slot, s.use) for s in (*first, *it._credited[1:]))))
    assert it.repeat_credit() == [action]
    it.received(landed((0, first[0])))
    assert it.repeat_credit() == [Send(m.Credit(1, tuple((s.slot, s.use) for s in it._credited[1:])))]
    it.abort(LEFT)
    assert it.repeat_credit() == []


def test_drained_without_an_abort_is_stale() -> None:
    for state in (State.RESERVED, State.LANDING, State.ENTERED, State.ENDED):
        it = MAKE[state]()
        assert it.received(m.Drained()) == []
        assert it.state is state
        assert it.stale == 1


@pytest.mark.parametrize("message", [m.Grant(1, 1), m.Credit(0, ()), m.Resend(0, (0, 1)), m.Ack()])
def test_messages_of_its_own_kind_are_not_for_decode(message: m.HandoffMessage) -> None:
    it = landing()
    assert it.received(message) == []
    assert it.stale == 1


def test_the_first_cause_is_the_one_reported() -> None:
    it = landing()
    assert it.received(m.Abort("numerical_error", "NaN")) == [Report(Aborted("numerical_error", "NaN"))]
    assert it.abort(LEFT) == []
    assert it.received(m.Abort("deadline", "")) == []
    assert it.fenced("died") == [CloseLeases()]
