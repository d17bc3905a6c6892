"""Prefill's half, one event at a time: what comes out of every row of its table, and nothing out of what has no row."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from hermetic.handoff import messages as m
from hermetic.handoff.actions import Action, CloseLeases, Enqueue, Forget, Report, Send, StopComputing, Write
from hermetic.handoff.outcome import Aborted, Completed, Failed, Outcome, Refused
from hermetic.handoff.prefill import ACTIVE, BATCH_PAGES, TABLE, PrefillHandoff, State
from hermetic.kv.slots import SlotUse

LEFT = Aborted("client_gone", "the client left")
LATE = Aborted("deadline", "too late")
DIED = Failed("worker_lost", "it died")
FAILED = Failed("transport_error", "a write to decode failed")
DOUBT = Failed("transport_error", "a write to decode failed and may still be running")
Make = Callable[[], PrefillHandoff]
Fire = Callable[[PrefillHandoff], list[Action]]


def told(cause: Outcome) -> Send:
    assert not isinstance(cause, Completed)
    return Send(m.Abort(cause.code, cause.reason))


# ------------------------------------------------------------------------------------------------- events
def get(message: m.HandoffMessage) -> Fire:
    return lambda it: it.received(message)


def credit(*slots: int, first: int = 0) -> m.Credit:
    return m.Credit(first, tuple((s, 1) for s in slots))


def submit(it: PrefillHandoff) -> list[Action]:
    return it.submitted(40, 3)


def start(it: PrefillHandoff) -> list[Action]:
    return it.started()


def computed(it: PrefillHandoff) -> list[Action]:
    return it.computed(b"state")


def ready(count: int) -> Fire:
    return lambda it: it.pages_ready(count)


def leave(it: PrefillHandoff) -> list[Action]:
    return it.abort(LEFT)


def fence(it: PrefillHandoff) -> list[Action]:
    return it.fenced("it died")


def nudge(it: PrefillHandoff) -> list[Action]:
    return it.nudge()


def ok(batch: int) -> Fire:
    return lambda it: it.wrote(batch, True)


def failed(batch: int) -> Fire:
    return lambda it: it.wrote(batch, False, stopped=True)


def doubtful(batch: int) -> Fire:
    return lambda it: it.wrote(batch, False, stopped=False)


grant, late, ack = get(m.Grant(40, 3)), get(m.Abort("deadline", "too late")), get(m.Ack())
resend = get(m.Resend(1, (9, 4)))

GONE: list[Action] = [CloseLeases(), Send(m.Drained()), Forget()]


def not_sent(page: int) -> list[Action]:
    """Decode wants a page again that was never announced."""
    text = f"decode asks again for page {page}, which was not sent"
    return [Send(m.Abort("kv_integrity", text)), Report(Failed("kv_integrity", text))]


EVENTS: dict[str, Fire] = {
    "submitted": submit,
    "started": start,
    "pages_ready": ready(3),
    "computed": computed,
    "wrote": ok(1),
    "abort": leave,
    "fenced": fence,
    "nudge": nudge,
    "Grant": grant,
    "Credit": get(credit(1, 2)),
    "Resend": resend,
    "Ack": ack,
    "Abort": late,
    "Started": get(m.Started(3)),
    "Landed": get(m.Landed(1, ())),
    "Complete": get(m.Complete(40, 3, 1, b"")),
    "Drained": get(m.Drained()),
}


# ------------------------------------------------------------------------------------ machines in every state
def after(make: Make, *fires: Fire) -> Make:
    def made() -> PrefillHandoff:
        it = make()
        for fire in fires:
            fire(it)
        return it

    return made


KEY = m.Key(b"t" * 16, 1)


def new() -> PrefillHandoff:
    return PrefillHandoff(KEY)


has_request = after(new, submit)
has_grant = after(new, grant)
queued = after(has_request, grant)
sending = after(queued, start)
writing = after(sending, ready(1), get(credit(5)))  # batch 1: page 0 -> slot 5
two_writes = after(writing, ready(2), get(credit(6, first=1)))  # batch 2: page 1 -> slot 6
all_sent = after(sending, ready(3), get(credit(5, 6, 7)), ok(1))  # computed it is not yet
complete = after(all_sent, computed)
again = after(complete, resend)  # batch 2: page 1 -> slot 9, use 4
draining = after(writing, leave)
stuck = after(writing, doubtful(1))

MAKE: dict[State, Make] = {
    State.NEW: new,
    State.HAS_REQUEST: has_request,
    State.HAS_GRANT: has_grant,
    State.QUEUED: queued,
    State.SENDING: sending,
    State.COMPLETE: complete,
    State.DRAINING: draining,
    State.STUCK: stuck,
    State.ENDED: after(complete, ack),
}


class Case(NamedTuple):
    make: Make
    fire: Fire
    actions: list[Action]
    to: State


END: list[Action] = [CloseLeases(), Send(m.Drained()), Forget()]
LANDED = m.Landed(1, ((0, 5, 1), (1, 6, 1), (2, 7, 1)))
COMPLETE = Send(m.Complete(40, 3, 1, b"state"))
STOPS = (State.QUEUED, State.SENDING)


def stop(state: State) -> list[Action]:
    return [StopComputing()] if state in STOPS else []


def mismatch(tokens: int, pages: int) -> Failed:
    text = f"decode granted {pages} pages for {tokens} tokens, the request needs 3 pages for 40 tokens"
    return Failed("kv_integrity", text)


OTHER = mismatch(56, 4)

ROWS: dict[tuple[State, str], list[Case]] = {
    (State.NEW, "submitted"): [Case(new, submit, [], State.HAS_REQUEST)],
    (State.NEW, "Grant"): [Case(new, grant, [], State.HAS_GRANT)],
    (State.HAS_GRANT, "submitted"): [
        Case(has_grant, submit, [Enqueue()], State.QUEUED),
        Case(after(new, get(m.Grant(56, 4))), submit, [told(OTHER), Report(OTHER), *END], State.ENDED),
    ],
    (State.HAS_REQUEST, "Grant"): [
        Case(has_request, grant, [Enqueue()], State.QUEUED),
        Case(has_request, get(m.Grant(56, 4)), [told(OTHER), Report(OTHER), *END], State.ENDED),
    ],
    (State.QUEUED, "started"): [Case(queued, start, [Send(m.Started(3))], State.SENDING)],
    (State.SENDING, "pages_ready"): [
        Case(sending, ready(2), [], State.SENDING),
        Case(after(sending, get(credit(4, 8))), ready(1), [Write(1, ((0, SlotUse(4, 1)),))], State.SENDING),
    ],
    (State.SENDING, "computed"): [
        Case(after(sending, ready(3)), computed, [], State.SENDING),
        Case(all_sent, computed, [COMPLETE], State.COMPLETE),
    ],
    (State.SENDING, "Credit"): [
        Case(sending, get(credit(5)), [], State.SENDING),
        Case(after(sending, ready(1)), get(credit(5, 6)), [Write(1, ((0, SlotUse(5, 1)),))], State.SENDING),
        Case(writing, get(credit(5)), [], State.SENDING),
        Case(writing, get(m.Credit(0, ())), [], State.SENDING),
    ],
    (State.SENDING, "Resend"): [
        Case(all_sent, resend, [Write(2, ((1, SlotUse(9, 4)),))], State.SENDING),
        Case(writing, get(m.Resend(0, (9, 4))), [], State.SENDING),
        Case(writing, resend, [StopComputing(), *not_sent(1)], State.DRAINING),
        Case(all_sent, get(m.Resend(7, (9, 4))), [StopComputing(), *not_sent(7), *GONE], State.ENDED),
    ],
    (State.COMPLETE, "Resend"): [
        Case(complete, resend, [Write(2, ((1, SlotUse(9, 4)),))], State.COMPLETE),
        Case(again, resend, [], State.COMPLETE),
        Case(after(again, ok(2)), resend, [Send(m.Landed(2, ((1, 9, 4),)))], State.COMPLETE),
        Case(complete, get(m.Resend(7, (9, 4))), [*not_sent(7), *GONE], State.ENDED),
        Case(again, get(m.Resend(7, (8, 1))), not_sent(7), State.DRAINING),
    ],
    (State.SENDING, "wrote"): [
        Case(writing, ok(1), [Send(m.Landed(1, ((0, 5, 1),)))], State.SENDING),
        Case(
            after(writing, ready(2), get(credit(5, 6))),
            ok(1),
            [Send(m.Landed(1, ((0, 5, 1),)))],
            State.SENDING,
        ),
        Case(
            after(sending, ready(3), get(credit(5, 6, 7)), computed),
            ok(1),
            [Send(LANDED), COMPLETE],
            State.COMPLETE,
        ),
        Case(writing, failed(1), [StopComputing(), told(FAILED), Report(FAILED), *END], State.ENDED),
        Case(two_writes, failed(1), [StopComputing(), told(FAILED), Report(FAILED)], State.DRAINING),
        Case(two_writes, doubtful(2), [StopComputing(), told(DOUBT), Report(DOUBT)], State.STUCK),
    ],
    (State.COMPLETE, "wrote"): [
        Case(again, ok(2), [Send(m.Landed(2, ((1, 9, 4),)))], State.COMPLETE),
        Case(again, failed(2), [told(FAILED), Report(FAILED), *END], State.ENDED),
        Case(
            after(again, get(m.Resend(0, (8, 4)))),
            failed(2),
            [told(FAILED), Report(FAILED)],
            State.DRAINING,
        ),
        Case(again, doubtful(2), [told(DOUBT), Report(DOUBT)], State.STUCK),
    ],
    (State.COMPLETE, "Ack"): [
        Case(complete, ack, [CloseLeases(), Report(Completed()), Forget()], State.ENDED),
        Case(again, ack, [], State.COMPLETE),
    ],
    (State.SENDING, "nudge"): [
        Case(sending, nudge, [Send(m.Started(3))], State.SENDING),
        Case(all_sent, nudge, [Send(m.Started(3)), Send(LANDED)], State.SENDING),
        Case(
            after(all_sent, get(m.Credit(2, ((7, 1),)))),
            nudge,
            [Send(m.Started(3)), Send(LANDED)],
            State.SENDING,
        ),
        Case(after(all_sent, get(m.Credit(3, ()))), nudge, [Send(m.Started(3))], State.SENDING),
    ],
    (State.COMPLETE, "nudge"): [Case(complete, nudge, [Send(LANDED), COMPLETE], State.COMPLETE)],
    **{
        (state, "abort"): [
            Case(MAKE[state], leave, [*stop(state), told(LEFT), Report(LEFT), *END], State.ENDED)
        ]
        for state in State
        if state in ACTIVE
    },
    **{
        (state, "Abort"): [Case(MAKE[state], late, [*stop(state), Report(LATE), *END], State.ENDED)]
        for state in State
        if state in ACTIVE
    },
    (State.DRAINING, "Abort"): [Case(draining, late, [], State.DRAINING)],
    (State.STUCK, "Abort"): [Case(stuck, late, [], State.STUCK)],
    (State.DRAINING, "wrote"): [
        Case(draining, ok(1), END, State.ENDED),
        Case(draining, failed(1), END, State.ENDED),
        Case(after(two_writes, leave), ok(2), [], State.DRAINING),
        Case(draining, doubtful(1), [], State.STUCK),
    ],
    (State.STUCK, "wrote"): [
        Case(after(two_writes, doubtful(2)), ok(1), [], State.STUCK),
        Case(after(two_writes, doubtful(2)), doubtful(1), [], State.STUCK),
    ],
    **{
        (state, "fenced"): [
            Case(MAKE[state], fence, [*stop(state), told(DIED), Report(DIED), *END], State.ENDED)
        ]
        for state in State
        if state in ACTIVE
    },
    (State.DRAINING, "fenced"): [Case(draining, fence, END, State.ENDED)],
    (State.STUCK, "fenced"): [Case(stuck, fence, END, State.ENDED)],
}
ROWS[State.SENDING, "abort"].append(
    Case(writing, leave, [StopComputing(), told(LEFT), Report(LEFT)], State.DRAINING)
)
ROWS[State.COMPLETE, "abort"].append(Case(again, leave, [told(LEFT), Report(LEFT)], State.DRAINING))
ROWS[State.SENDING, "Abort"].append(Case(writing, late, [StopComputing(), Report(LATE)], State.DRAINING))
ROWS[State.COMPLETE, "Abort"].append(Case(again, late, [Report(LATE)], State.DRAINING))


def test_every_row_of_the_table_has_its_cases_and_they_reach_every_state_that_the_row_names() -> None:
    assert ROWS.keys() == TABLE.keys()
    for row, cases in ROWS.items():
        reached = {case.to for case in cases}
        assert reached <= TABLE[row]
        # Before anything is written an abort has nothing to drain: those rows name an end that needs a write.
        early = row[1] in ("abort", "Abort") and row[0] not in (State.SENDING, State.COMPLETE)
        assert early or reached == TABLE[row], row


@pytest.mark.parametrize(
    ("row", "case"),
    [
        pytest.param(row, case, id=f"{row[0].name} {row[1]} {number}")
        for row, cases in ROWS.items()
        for number, case in enumerate(cases, 1)
    ],
)
def test_a_row_gives_exactly_these_actions_and_leads_there(row: tuple[State, str], case: Case) -> None:
    it = case.make()
    assert it.state is row[0]
    assert case.fire(it) == case.actions
    assert it.state is case.to


@pytest.mark.parametrize(
    ("state", "event"),
    [
        pytest.param(state, event, id=f"{state.name} {event}")
        for state in State
        for event in EVENTS
        if (state, event) not in TABLE
    ],
)
def test_what_has_no_row_is_ignored_and_counted_and_moves_nothing(state: State, event: str) -> None:
    it = MAKE[state]()
    before = it.stale
    assert it.state is state
    assert EVENTS[event](it) == []
    assert it.state is state
    assert it.stale == before + 1


def test_every_event_of_the_table_is_tried_above() -> None:
    assert {event for _, event in TABLE} <= EVENTS.keys()


# ------------------------------------------------------------------------------------------ over several events
@pytest.mark.parametrize("other", [(39, 3), (40, 2), (56, 4)])
@pytest.mark.parametrize("request_first", [True, False])
def test_a_grant_for_other_counts_ends_both_halves_with_the_numbers(
    other: tuple[int, int], request_first: bool
) -> None:
    it = new()
    fires = [submit, get(m.Grant(*other))]
    out = [action for fire in (fires if request_first else reversed(fires)) for action in fire(it)]
    cause = mismatch(*other)
    assert out == [told(cause), Report(cause), *END]


def test_source_pages_stay_leased_until_the_last_write_has_ended() -> None:
    for fire in (ok, failed):
        it = two_writes()
        assert CloseLeases() not in leave(it)
        assert fire(2)(it) == []
        assert fire(1)(it) == END


@pytest.mark.parametrize("make", [writing, draining])
def test_a_write_that_may_still_run_is_never_called_drained_whatever_is_asked(make: Make) -> None:
    it = make()
    out = doubtful(1)(it)
    for fire in (late, leave, ack, nudge, grant, resend):
        out += fire(it)
    assert it.state is State.STUCK
    assert not [a for a in out if a in END]
    assert fence(it) == END


def test_complete_is_said_only_when_all_is_computed_and_all_is_announced() -> None:
    it = after(sending, ready(2), get(credit(1, 2, 3)), ok(1))()
    assert ready(3)(it) == [Write(2, ((2, SlotUse(3, 1)),))]
    assert computed(it) == []
    assert ok(2)(it) == [Send(m.Landed(2, ((2, 3, 1),))), Send(m.Complete(40, 3, 2, b"state"))]


def test_a_page_is_written_only_once_it_is_final_and_only_where_it_was_granted() -> None:
    it = after(sending, get(credit(4, 8)))()
    assert ready(1)(it) == [Write(1, ((0, SlotUse(4, 1)),))]
    assert ready(3)(it) == [Write(2, ((1, SlotUse(8, 1)),))]  # the third waits for a slot
    assert it.received(m.Credit(2, ((4, 2),))) == [Write(3, ((2, SlotUse(4, 2)),))]


def test_repeated_and_late_credits_are_recognised_and_a_cumulative_one_repairs_a_lost_one() -> None:
    it = after(sending, ready(3), get(credit(4)))()
    assert it.received(credit(4)) == []
    # Credit number 1 was lost; the next one holds everything from number 1 on.
    assert it.received(credit(4, 5, 6)) == [Write(2, ((1, SlotUse(5, 1)), (2, SlotUse(6, 1))))]
    assert it.received(credit(5, 6, first=1)) == []
    assert it.received(credit(9, first=7)) == []  # from a gap it takes nothing
    assert it.stale == 3


def test_an_announcement_is_repeated_until_credits_say_that_all_of_it_landed() -> None:
    it = after(all_sent, resend, ok(2))()
    both = [Send(m.Started(3)), Send(LANDED), Send(m.Landed(2, ((1, 9, 4),)))]
    assert nudge(it) == both
    it.received(m.Credit(3, ()))
    assert nudge(it) == [both[0], both[2]]  # of a resend no credit tells


def test_a_batch_has_a_bounded_number_of_pages() -> None:
    it = new()
    it.submitted(1000, 63)
    it.received(m.Grant(1000, 63))
    it.started()
    it.received(credit(*range(63)))
    writes = [len(w.pages) for w in it.pages_ready(63) if isinstance(w, Write)]
    assert writes == [BATCH_PAGES] * 3 + [63 - 3 * BATCH_PAGES]


def test_a_page_asked_for_again_while_others_are_still_to_come_is_waited_for() -> None:
    it = after(sending, ready(3), get(credit(5, 6)), ok(1))()
    assert resend(it) == [Write(2, ((1, SlotUse(9, 4)),))]
    assert computed(it) == []
    assert it.received(m.Credit(2, ((5, 2),))) == [Write(3, ((2, SlotUse(5, 2)),))]
    assert ok(3)(it) == [Send(m.Landed(2, ((2, 5, 2),)))]
    assert ok(2)(it) == [Send(m.Landed(3, ((1, 9, 4),))), Send(m.Complete(40, 3, 3, b"state"))]


def test_the_first_cause_is_the_one_reported() -> None:
    it = writing()
    reports = [a for a in it.abort(Refused("busy", "full")) if isinstance(a, Report)]
    later = [*late(it), *leave(it), *failed(1)(it), *fence(it)]
    assert reports == [Report(Refused("busy", "full"))]
    assert not [a for a in later if isinstance(a, Report)]
