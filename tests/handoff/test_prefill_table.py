"""Every row of the table in handoff/prefill.py, one event at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hermetic.handoff import messages as m
from hermetic.handoff.actions import Action, CloseLeases, Enqueue, Report, Send, StopComputing, Write
from hermetic.handoff.outcome import Aborted, Completed, Failed, Refused
from hermetic.handoff.prefill import BATCH_PAGES, PrefillHandoff, State
from hermetic.kv.slots import SlotUse

LEFT = Aborted("client_gone", "the client left")
GRANT = m.Grant(40, 3)


def new() -> PrefillHandoff:
    return PrefillHandoff()


def has_request() -> PrefillHandoff:
    it = new()
    assert it.submitted(40, 3) == []
    return it


def has_grant() -> PrefillHandoff:
    it = new()
    assert it.received(GRANT) == []
    return it


def queued() -> PrefillHandoff:
    it = has_request()
    assert it.received(GRANT) == [Enqueue()]
    return it


def sending() -> PrefillHandoff:
    it = queued()
    assert it.started() == [Send(m.Started(3))]
    return it


def credit(*slots: int, first: int = 0) -> m.Credit:
    return m.Credit(first, tuple((s, 1) for s in slots))


def writing() -> PrefillHandoff:
    it = sending()
    assert it.pages_ready(1) == []
    assert it.received(credit(5)) == [Write(1, ((0, SlotUse(5, 1)),))]
    return it


def complete() -> PrefillHandoff:
    it = sending()
    it.pages_ready(3)
    pages = tuple((i, SlotUse(5 + i, 1)) for i in range(3))
    assert it.received(credit(5, 6, 7)) == [Write(1, pages)]
    assert it.wrote(1, True) == [Send(m.Landed(1, ((0, 5, 1), (1, 6, 1), (2, 7, 1))))]
    assert it.computed(b"state") == [Send(m.Complete(40, 3, b"state"))]
    return it


def draining() -> PrefillHandoff:
    it = writing()
    it.abort(LEFT)
    return it


def stuck() -> PrefillHandoff:
    it = writing()
    it.wrote(1, False, stopped=False)
    return it


def ended() -> PrefillHandoff:
    it = complete()
    it.received(m.Ack())
    return it


MAKE: dict[State, Callable[[], PrefillHandoff]] = {
    State.NEW: new,
    State.HAS_REQUEST: has_request,
    State.HAS_GRANT: has_grant,
    State.QUEUED: queued,
    State.SENDING: sending,
    State.COMPLETE: complete,
    State.DRAINING: draining,
    State.STUCK: stuck,
    State.ENDED: ended,
}
IDLE = [State.NEW, State.HAS_REQUEST, State.HAS_GRANT, State.QUEUED, State.SENDING, State.COMPLETE]
COMPUTING = (State.QUEUED, State.SENDING)


def stop(state: State) -> list[Action]:
    return [StopComputing()] if state in COMPUTING else []


@pytest.mark.parametrize("state", State)
def test_the_builders_above_reach_the_states_they_are_named_after(state: State) -> None:
    assert MAKE[state]().state is state


def test_request_and_grant_may_come_in_either_order() -> None:
    assert queued().state is State.QUEUED
    it = has_grant()
    assert it.submitted(40, 3) == [Enqueue()]
    assert it.state is State.QUEUED


@pytest.mark.parametrize("grant", [m.Grant(39, 3), m.Grant(40, 2), m.Grant(56, 4)])
@pytest.mark.parametrize("request_first", [True, False])
def test_a_grant_for_other_counts_ends_both_halves_with_the_numbers(
    grant: m.Grant, request_first: bool
) -> None:
    it = new()
    out = (
        [*it.submitted(40, 3), *it.received(grant)]
        if request_first
        else [*it.received(grant), *it.submitted(40, 3)]
    )
    match out:
        case [
            Send(message=m.Abort(code=code)),
            Report(outcome=Failed(reason=reason)),
            CloseLeases(),
            Send(message=m.Drained()),
        ]:
            assert code == "kv_integrity"
            assert f"{grant.pages} pages for {grant.tokens} tokens" in reason
            assert "3 pages for 40 tokens" in reason
        case _:
            raise AssertionError(out)
    assert it.state is State.ENDED


@pytest.mark.parametrize("state", IDLE)
def test_an_abort_with_nothing_in_flight_ends_at_once_and_says_drained(state: State) -> None:
    it = MAKE[state]()
    rest = [Report(LEFT), CloseLeases(), Send(m.Drained())]
    assert it.abort(LEFT) == [*stop(state), Send(m.Abort("client_gone", "the client left")), *rest]
    assert it.state is State.ENDED


@pytest.mark.parametrize("state", IDLE)
def test_decodes_abort_is_not_echoed_but_answered_with_drained(state: State) -> None:
    it = MAKE[state]()
    cause = Aborted("deadline", "too late")
    assert it.received(m.Abort("deadline", "too late")) == [
        *stop(state), Report(cause), CloseLeases(), Send(m.Drained()),
    ]  # fmt: skip
    assert it.state is State.ENDED


@pytest.mark.parametrize("state", [*IDLE])
def test_when_decode_is_gone_nobody_is_told_and_the_leases_close(state: State) -> None:
    it = MAKE[state]()
    assert it.peer_gone("decode died") == [
        *stop(state), Report(Failed("worker_lost", "decode died")), CloseLeases(),
    ]  # fmt: skip
    assert it.state is State.ENDED


@pytest.mark.parametrize("ok", [True, False])
def test_source_pages_stay_leased_until_the_last_write_has_ended(ok: bool) -> None:
    it = writing()
    it.pages_ready(2)
    assert it.received(credit(6, first=1)) == [Write(2, ((1, SlotUse(6, 1)),))]
    assert it.abort(LEFT) == [StopComputing(), Send(m.Abort("client_gone", "the client left")), Report(LEFT)]
    assert it.state is State.DRAINING
    assert it.wrote(2, ok) == []
    assert it.wrote(1, ok) == [CloseLeases(), Send(m.Drained())]
    assert it.state is State.ENDED


@pytest.mark.parametrize("before", [writing, draining])
def test_source_pages_stay_leased_until_the_last_write_has_ended_also_when_decode_is_gone(
    before: Callable[[], PrefillHandoff],
) -> None:
    it = before()
    first = it.state is State.SENDING
    wanted = [StopComputing(), Report(Failed("worker_lost", "died"))] if first else []
    assert it.peer_gone("died") == wanted
    assert it.state is State.DRAINING
    assert it.wrote(1, True) == [CloseLeases()]
    assert it.state is State.ENDED


def test_a_write_that_failed_but_stopped_ends_the_half_with_transport_error() -> None:
    it = writing()
    cause = Failed("transport_error", "a write to decode failed")
    assert it.wrote(1, False, stopped=True) == [
        StopComputing(), Send(m.Abort(cause.code, cause.reason)), Report(cause), CloseLeases(), Send(m.Drained()),
    ]  # fmt: skip
    assert it.state is State.ENDED


@pytest.mark.parametrize("before", [writing, draining])
def test_a_write_that_may_still_run_is_never_called_drained(before: Callable[[], PrefillHandoff]) -> None:
    it = before()
    out = it.wrote(1, False, stopped=False)
    assert it.state is State.STUCK
    later = [
        *it.received(m.Abort("deadline", "")),
        *it.abort(LEFT),
        *it.peer_gone("died"),
        *it.received(m.Ack()),
    ]
    assert not [a for a in [*out, *later] if isinstance(a, CloseLeases) or a == Send(m.Drained())]
    assert len([a for a in [*out, *later] if isinstance(a, Report)]) == (before is writing)


def test_an_ack_closes_the_send_leases_and_completes() -> None:
    it = complete()
    assert it.received(m.Ack()) == [CloseLeases(), Report(Completed())]
    assert it.state is State.ENDED


@pytest.mark.parametrize("state", [s for s in State if s is not State.COMPLETE])
def test_an_ack_before_complete_is_stale(state: State) -> None:
    it = MAKE[state]()
    assert it.received(m.Ack()) == []
    assert it.state is state
    assert it.stale == 1


def test_an_ack_while_a_write_is_in_flight_does_not_close_its_source() -> None:
    it = complete()
    assert it.received(m.Resend(1, (9, 4))) == [Write(2, ((1, SlotUse(9, 4)),))]
    assert it.received(m.Ack()) == []
    assert it.wrote(2, True) == [Send(m.Landed(2, ((1, 9, 4),)))]
    assert it.received(m.Ack()) == [CloseLeases(), Report(Completed())]


def test_complete_is_said_only_when_all_is_computed_and_all_is_announced() -> None:
    it = sending()
    it.pages_ready(3)
    assert it.computed(b"s") == []
    it.received(credit(1, 2, 3))
    assert it.wrote(1, True)[-1] == Send(m.Complete(40, 3, b"s"))
    it = sending()
    it.pages_ready(2)
    it.received(credit(1, 2, 3))
    it.wrote(1, True)
    assert it.pages_ready(3) == [Write(2, ((2, SlotUse(3, 1)),))]
    assert it.wrote(2, True) == [Send(m.Landed(2, ((2, 3, 1),)))]
    assert it.computed(b"s") == [Send(m.Complete(40, 3, b"s"))]


def test_a_page_is_written_only_once_it_is_final_and_only_where_it_was_granted() -> None:
    it = sending()
    assert it.received(credit(4, 8)) == []
    assert it.pages_ready(1) == [Write(1, ((0, SlotUse(4, 1)),))]
    assert it.pages_ready(3) == [Write(2, ((1, SlotUse(8, 1)),))]  # the third waits for a slot
    assert it.received(m.Credit(2, ((4, 2),))) == [Write(3, ((2, SlotUse(4, 2)),))]


def test_repeated_and_late_credits_are_recognised_and_a_cumulative_one_repairs_a_lost_one() -> None:
    it = sending()
    it.pages_ready(3)
    assert it.received(credit(4)) == [Write(1, ((0, SlotUse(4, 1)),))]
    assert it.received(credit(4)) == []
    assert it.stale == 1
    # Credit number 1 was lost; the next one holds everything from number 1 on.
    assert it.received(credit(4, 5, 6)) == [Write(2, ((1, SlotUse(5, 1)), (2, SlotUse(6, 1))))]
    assert it.received(credit(5, 6, first=1)) == []
    assert it.received(credit(9, first=7)) == []  # from a gap it takes nothing
    assert it.stale == 3


def test_a_batch_has_a_bounded_number_of_pages() -> None:
    it = new()
    it.submitted(1000, 63)
    it.received(m.Grant(1000, 63))
    it.started()
    it.received(credit(*range(63)))
    writes = it.pages_ready(63)
    assert [len(w.pages) for w in writes if isinstance(w, Write)] == [BATCH_PAGES] * 3 + [
        63 - 3 * BATCH_PAGES
    ]


def test_a_resend_writes_that_page_once_more_and_a_repeated_one_does_not() -> None:
    it = complete()
    assert it.received(m.Resend(1, (9, 4))) == [Write(2, ((1, SlotUse(9, 4)),))]
    assert it.received(m.Resend(1, (9, 4))) == []
    assert it.wrote(2, True) == [Send(m.Landed(2, ((1, 9, 4),)))]  # complete is not said twice
    assert it.received(m.Resend(1, (9, 4))) == []  # by now the slot may be somebody else's
    assert it.received(m.Resend(7, (9, 5))) == []
    assert it.stale == 3
    assert it.state is State.COMPLETE


@pytest.mark.parametrize("state", [State.DRAINING, State.STUCK, State.ENDED])
def test_what_comes_after_the_end_starts_nothing(state: State) -> None:
    it = MAKE[state]()
    out = [
        *it.submitted(40, 3),
        *it.received(GRANT),
        *it.received(credit(1)),
        *it.received(m.Resend(0, (1, 1))),
        *it.pages_ready(3),
        *it.computed(b""),
        *it.abort(LEFT),
    ]
    assert out == []
    assert it.state is state
    assert it.stale == 4


def test_decode_asking_again_after_the_end_is_told_drained_again() -> None:
    it = ended()
    assert it.received(m.Abort("x", "y")) == [Send(m.Drained())]
    assert draining().received(m.Abort("x", "y")) == []


@pytest.mark.parametrize("message", [m.Started(3), m.Landed(1, ()), m.Complete(1, 1, b""), m.Drained()])
def test_messages_of_its_own_kind_are_not_for_prefill(message: m.HandoffMessage) -> None:
    it = sending()
    assert it.received(message) == []
    assert it.stale == 1


def test_the_first_cause_is_the_one_reported() -> None:
    it = writing()
    reports = [a for a in it.abort(Refused("busy", "full")) if isinstance(a, Report)]
    later = [*it.received(m.Abort("deadline", "")), *it.abort(LEFT), *it.wrote(1, False)]
    assert reports == [Report(Refused("busy", "full"))]
    assert not [a for a in later if isinstance(a, Report)]
