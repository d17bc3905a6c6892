"""Decode's half, one event at a time: what comes out of every row of its table, and nothing out of what has no row."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from hermetic.handoff import messages as m
from hermetic.handoff.actions import Action, CloseLeases, Copy, Enter, Forget, Report, Send
from hermetic.handoff.decode import OPEN, TABLE, WINDOW, DecodeHandoff, State
from hermetic.handoff.machine import HandoffError
from hermetic.handoff.outcome import Aborted, Completed, Failed, Outcome
from hermetic.kv.slots import SlotCounts, Slots, SlotUse

KEY = m.Key(b"t" * 16, 1)
LEFT = Aborted("client_gone", "the client left")
LATE = Aborted("deadline", "too late")
DIED = Failed("worker_lost", "it died")
Make = Callable[[], DecodeHandoff]
Fire = Callable[[DecodeHandoff], list[Action]]


def told(cause: Outcome) -> Send:
    assert not isinstance(cause, Completed)
    return Send(m.Abort(cause.code, cause.reason))


def bad(reason: str) -> list[Action]:
    cause = Failed("kv_integrity", reason)
    return [told(cause), Report(cause)]


# ------------------------------------------------------------------------------------ machines in every state
def bare(slots: int = 4) -> DecodeHandoff:
    return DecodeHandoff(KEY, 40, 3, Slots(slots))


def reserved(slots: int = 4) -> DecodeHandoff:
    it = bare(slots)
    it.reserved()
    return it


def landing(slots: int = 4) -> DecodeHandoff:
    it = reserved(slots)
    it.received(m.Started(3))
    return it


def granted(number: int = 3, slots: int = 4) -> DecodeHandoff:
    """Slots 0, 1, ... are given, each in its first use."""
    it = landing(slots)
    it.credit(number)
    return it


def copying() -> DecodeHandoff:
    it = granted()
    it.received(landed(1, (0, 0)))
    return it


def verified(pages: int = 3, number: int = 3) -> DecodeHandoff:
    it = granted(number)
    it.received(landed(1, *((page, page) for page in range(pages))))
    for page in range(pages):
        it.copied(page, True)
    return it


def asked_again() -> DecodeHandoff:
    """Page 0 came damaged; it was asked for again into slot 3."""
    it = copying()
    it.copied(0, False)
    return it


def twice() -> DecodeHandoff:
    it = asked_again()
    it.received(landed(2, (0, 3)))
    return it


def draining() -> DecodeHandoff:
    it = granted()
    it.abort(LEFT)
    return it


def draining_copy() -> DecodeHandoff:
    it = copying()
    it.abort(LEFT)
    return it


def quarantined() -> DecodeHandoff:
    it = draining()
    it.overdue()
    return it


def quarantined_copy() -> DecodeHandoff:
    it = draining_copy()
    it.overdue()
    return it


def entered() -> DecodeHandoff:
    it = verified()
    it.received(complete())
    return it


def ended() -> DecodeHandoff:
    it = draining()
    it.received(m.Drained())
    return it


def short() -> DecodeHandoff:
    """Page 0 is verified, no slot is out, and *complete* counts a second batch that has not come."""
    it = verified(pages=1, number=1)
    it.received(complete(batches=2))
    return it


def after(make: Make, fire: Fire) -> Make:
    def made() -> DecodeHandoff:
        it = make()
        fire(it)
        return it

    return made


MAKE: dict[State, Make] = {
    State.RESERVED: reserved,
    State.LANDING: granted,
    State.DRAINING: draining,
    State.QUARANTINED: quarantined,
    State.ENTERED: entered,
    State.ENDED: ended,
}


# ------------------------------------------------------------------------------------------------- events
def landed(sequence: int, *pages: tuple[int, int], use: int = 1) -> m.Landed:
    return m.Landed(sequence, tuple((page, slot, use) for page, slot in pages))


def complete(tokens: int = 40, pages: int = 3, batches: int = 1) -> m.Complete:
    return m.Complete(tokens, pages, batches, b"state")


def get(message: m.HandoffMessage) -> Fire:
    return lambda it: it.received(message)


def begin(it: DecodeHandoff) -> list[Action]:
    return it.reserved()


def nudge(it: DecodeHandoff) -> list[Action]:
    return it.nudge()


def overdue(it: DecodeHandoff) -> list[Action]:
    return it.overdue()


def leave(it: DecodeHandoff) -> list[Action]:
    return it.abort(LEFT)


def fence(it: DecodeHandoff) -> list[Action]:
    return it.fenced("it died")


def good(page: int) -> Fire:
    return lambda it: it.copied(page, True)


def damaged(page: int) -> Fire:
    return lambda it: it.copied(page, False)


EVENTS: dict[str, Fire] = {
    "reserved": begin,
    "credit": lambda it: it.credit(4),
    "copied": good(0),
    "abort": leave,
    "overdue": overdue,
    "fenced": fence,
    "nudge": nudge,
    "Grant": get(m.Grant(40, 3)),
    "Credit": get(m.Credit(0, ())),
    "Resend": get(m.Resend(0, (0, 1))),
    "Ack": get(m.Ack()),
    "Started": get(m.Started(3)),
    "Landed": get(landed(1, (0, 0))),
    "Complete": get(complete()),
    "Drained": get(m.Drained()),
    "Abort": get(m.Abort("deadline", "too late")),
}


class Case(NamedTuple):
    make: Make
    fire: Fire
    actions: list[Action]
    to: State


ENTER: list[Action] = [Send(m.Ack()), Enter(b"state"), Report(Completed()), Forget()]
GIVE_UP: list[Action] = [CloseLeases(), Forget()]
COUNTS = "40 tokens on 3 pages were reserved"
THREE = ((0, 1), (1, 1), (2, 1))
drained, aborted = get(m.Drained()), get(m.Abort("deadline", "too late"))

ROWS: dict[tuple[State, str], list[Case]] = {
    (State.RESERVED, "reserved"): [Case(bare, begin, [Send(m.Grant(40, 3))], State.RESERVED)],
    (State.RESERVED, "Started"): [Case(reserved, get(m.Started(3)), [], State.LANDING)],
    (State.LANDING, "credit"): [
        Case(landing, lambda it: it.credit(2), [Send(m.Credit(0, THREE[:2]))], State.LANDING),
        Case(landing, lambda it: it.credit(99), [Send(m.Credit(0, THREE))], State.LANDING),
        Case(lambda: granted(1), lambda it: it.credit(2), [Send(m.Credit(0, THREE))], State.LANDING),
        Case(granted, lambda it: it.credit(1), [], State.LANDING),
    ],
    (State.LANDING, "Landed"): [
        Case(
            granted,
            get(landed(1, (2, 1), (0, 0))),
            [Copy(2, SlotUse(1, 1)), Copy(0, SlotUse(0, 1))],
            State.LANDING,
        ),
        Case(granted, get(landed(1, (0, 0), use=2)), [], State.LANDING),
        Case(
            granted,
            get(landed(1, (3, 0))),
            [*bad("prefill sent page 3 of 3 out of turn"), CloseLeases()],
            State.DRAINING,
        ),
        Case(
            short,
            get(landed(2)),
            [*bad("prefill says complete after announcing 1 of 3 pages"), *GIVE_UP],
            State.ENDED,
        ),
    ],
    (State.LANDING, "copied"): [
        Case(copying, good(0), [], State.LANDING),
        Case(copying, damaged(0), [Send(m.Resend(0, (3, 1)))], State.LANDING),
        Case(
            twice,
            damaged(0),
            [*bad("page 0 of the prompt failed verification twice"), CloseLeases()],
            State.DRAINING,
        ),
        Case(
            after(
                after(after(lambda: granted(1), get(landed(1, (0, 0)))), damaged(0)), get(landed(2, (0, 1)))
            ),
            damaged(0),
            [*bad("page 0 of the prompt failed verification twice"), *GIVE_UP],
            State.ENDED,
        ),
        Case(
            after(after(lambda: verified(2), get(landed(2, (2, 2)))), get(complete(batches=2))),
            good(2),
            ENTER,
            State.ENTERED,
        ),
    ],
    (State.LANDING, "Complete"): [
        Case(copying, get(complete(batches=2)), [], State.LANDING),
        Case(verified, get(complete()), ENTER, State.ENTERED),
        Case(
            verified,
            get(complete(tokens=39)),
            [*bad(f"prefill says it computed 39 tokens on 3 pages, {COUNTS}"), *GIVE_UP],
            State.ENDED,
        ),
        Case(
            copying,
            get(complete(pages=1)),
            bad(f"prefill says it computed 40 tokens on 1 pages, {COUNTS}"),
            State.DRAINING,
        ),
        Case(
            lambda: verified(1),
            get(complete()),
            [*bad("prefill says complete after announcing 1 of 3 pages"), CloseLeases()],
            State.DRAINING,
        ),
    ],
    (State.RESERVED, "nudge"): [Case(reserved, nudge, [Send(m.Grant(40, 3))], State.RESERVED)],
    (State.LANDING, "nudge"): [
        Case(landing, nudge, [Send(m.Credit(0, ()))], State.LANDING),
        Case(granted, nudge, [Send(m.Credit(0, THREE))], State.LANDING),
        Case(copying, nudge, [Send(m.Credit(1, THREE[1:]))], State.LANDING),
        Case(asked_again, nudge, [Send(m.Credit(1, THREE[1:])), Send(m.Resend(0, (3, 1)))], State.LANDING),
        Case(twice, nudge, [Send(m.Credit(1, THREE[1:]))], State.LANDING),
    ],
    (State.DRAINING, "nudge"): [Case(draining, nudge, [told(LEFT)], State.DRAINING)],
    (State.QUARANTINED, "nudge"): [Case(quarantined, nudge, [told(LEFT)], State.QUARANTINED)],
    (State.RESERVED, "abort"): [Case(reserved, leave, [told(LEFT), Report(LEFT), *GIVE_UP], State.ENDED)],
    (State.LANDING, "abort"): [
        Case(landing, leave, [told(LEFT), Report(LEFT), *GIVE_UP], State.ENDED),
        Case(granted, leave, [told(LEFT), Report(LEFT), CloseLeases()], State.DRAINING),
        Case(copying, leave, [told(LEFT), Report(LEFT)], State.DRAINING),
    ],
    (State.RESERVED, "Abort"): [Case(reserved, aborted, [Report(LATE), *GIVE_UP], State.ENDED)],
    (State.LANDING, "Abort"): [
        Case(landing, aborted, [Report(LATE), *GIVE_UP], State.ENDED),
        Case(granted, aborted, [Report(LATE), CloseLeases()], State.DRAINING),
        Case(copying, aborted, [Report(LATE)], State.DRAINING),
    ],
    (State.DRAINING, "copied"): [
        Case(draining_copy, good(0), [CloseLeases()], State.DRAINING),
        Case(after(draining_copy, drained), damaged(0), GIVE_UP, State.ENDED),
    ],
    (State.QUARANTINED, "copied"): [
        Case(quarantined_copy, good(0), [CloseLeases()], State.QUARANTINED),
        Case(after(quarantined_copy, fence), good(0), GIVE_UP, State.ENDED),
    ],
    (State.DRAINING, "overdue"): [Case(draining, overdue, [], State.QUARANTINED)],
    (State.DRAINING, "Drained"): [
        Case(draining, drained, [Forget()], State.ENDED),
        Case(draining_copy, drained, [], State.DRAINING),
    ],
    (State.QUARANTINED, "Drained"): [
        Case(quarantined, drained, [Forget()], State.ENDED),
        Case(quarantined_copy, drained, [], State.QUARANTINED),
    ],
    (State.RESERVED, "fenced"): [Case(reserved, fence, [told(DIED), Report(DIED), *GIVE_UP], State.ENDED)],
    (State.LANDING, "fenced"): [
        Case(granted, fence, [told(DIED), Report(DIED), *GIVE_UP], State.ENDED),
        Case(copying, fence, [told(DIED), Report(DIED)], State.DRAINING),
    ],
    (State.DRAINING, "fenced"): [
        Case(draining, fence, [Forget()], State.ENDED),
        Case(draining_copy, fence, [], State.DRAINING),
    ],
    (State.QUARANTINED, "fenced"): [
        Case(quarantined, fence, [Forget()], State.ENDED),
        Case(quarantined_copy, fence, [], State.QUARANTINED),
    ],
}


def counts(it: DecodeHandoff) -> SlotCounts:
    it._slots.check_conservation()
    return it._slots.counts()


def test_every_row_of_the_table_has_its_cases_and_they_reach_every_state_that_the_row_names() -> None:
    assert ROWS.keys() == TABLE.keys()
    for row, cases in ROWS.items():
        reached = {case.to for case in cases}
        assert reached <= TABLE[row]
        # A row over two states may name an end that only its other state can come to.
        assert row in LOOSE or reached == TABLE[row], row


# Without a slot out there is nothing to drain: from RESERVED straight to ENDED. And a fence drains by itself.
LOOSE = {(State.RESERVED, "abort"), (State.RESERVED, "Abort"), (State.RESERVED, "fenced")}


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
    if case.to in (State.ENDED, State.ENTERED):
        assert counts(it) == (4, 0, 0)
    counts(it)


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
    before = it.stale, counts(it)
    assert it.state is state
    assert EVENTS[event](it) == []
    assert it.state is state
    assert (it.stale, counts(it)) == (before[0] + 1, before[1])


def test_every_event_of_the_table_is_tried_above() -> None:
    assert {event for _, event in TABLE} <= EVENTS.keys()
    assert {event for _, event in TABLE} >= {t.__name__ for t in (m.Started, m.Landed, m.Complete, m.Drained)}


def test_a_move_that_the_table_does_not_have_is_a_fault_of_ours_and_raises() -> None:
    it = reserved()

    def astray() -> list[Action]:
        it.state = State.ENTERED
        return []

    with pytest.raises(HandoffError, match=r"RESERVED --Started--> State\.ENTERED"):
        it._on("Started", astray)


# ------------------------------------------------------------------------------------------ over several events
def test_slots_are_given_only_once_prefill_has_started() -> None:
    it = reserved()
    assert it.wants() == 0
    assert it.credit(4) == []
    assert counts(it) == (4, 0, 0)
    it.received(m.Started(3))
    assert it.wants() == 3
    it.credit(16)
    assert it.wants() == 0
    assert counts(it) == (1, 3, 0)


def test_one_ticket_never_holds_more_than_its_window() -> None:
    it = DecodeHandoff(KEY, 10_000, 625, Slots(64))
    it.received(m.Started(625))
    assert it.wants() == WINDOW
    it.credit(64)
    assert counts(it) == (64 - WINDOW, WINDOW, 0)
    assert it.wants() == 0


def test_slots_given_beyond_need_return_when_the_request_enters() -> None:
    it = granted(2)
    it.received(landed(1, (0, 0), (1, 1)))
    it.credit(1)
    it.received(landed(2, (2, 2)))
    it.copied(0, False)  # one slot more, for the resend
    assert counts(it).granted == 3
    it.received(landed(3, (0, 3)))
    for page in range(3):
        it.copied(page, True)
    assert it.received(complete(batches=3)) == ENTER
    assert counts(it) == (4, 0, 0)


def test_with_no_other_slot_free_a_resend_takes_the_same_slot_under_another_use() -> None:
    it = granted(1, slots=1)
    it.received(landed(1, (0, 0)))
    assert it.copied(0, False) == [Send(m.Resend(0, (0, 2)))]


def test_a_page_that_was_asked_for_again_is_taken_from_that_slot_and_from_no_other() -> None:
    it = asked_again()
    assert it.received(landed(2, (0, 1))) == [
        *bad("prefill sent page 0 of 3 out of turn"), CloseLeases(),
    ]  # fmt: skip


def test_complete_that_overtakes_an_announcement_waits_for_it() -> None:
    it = verified(2)
    assert it.received(complete(batches=2)) == []
    assert it.received(landed(2, (2, 2))) == [Copy(2, SlotUse(2, 1))]
    assert it.copied(2, True) == ENTER


def test_only_the_first_complete_counts() -> None:
    it = verified(2)
    assert it.received(complete(batches=2)) == []
    assert it.received(complete(tokens=1)) == []
    assert (it.stale, it.state) == (1, State.LANDING)


def test_pages_of_ours_go_back_at_once_and_slots_only_when_drained() -> None:
    it = granted()
    assert CloseLeases() in it.abort(LEFT)
    assert counts(it) == (1, 3, 0)
    it.nudge()
    assert counts(it) == (1, 3, 0)
    it.received(m.Drained())
    assert counts(it) == (4, 0, 0)


def test_time_takes_slots_out_of_use_and_gives_none_back() -> None:
    it = draining()
    it.overdue()
    assert counts(it) == (1, 0, 3)
    assert it._slots.grant("somebody else", 4) == (SlotUse(3, 1),)
    it.nudge()
    assert it.overdue() == []
    assert counts(it) == (0, 1, 3)
    it.received(m.Drained())
    assert counts(it) == (3, 1, 0)


@pytest.mark.parametrize("copy_first", [True, False])
def test_neither_slots_nor_pages_are_given_back_while_a_copy_runs(copy_first: bool) -> None:
    it = draining_copy()
    steps: list[Fire] = [good(0), drained]
    first, second = steps if copy_first else reversed(steps)
    assert Forget() not in first(it)
    assert counts(it).granted >= 2
    assert Forget() in second(it)
    assert counts(it) == (4, 0, 0)


def test_slots_that_were_not_granted_to_this_ticket_are_not_copied() -> None:
    slots = Slots(4)
    (foreign,) = slots.grant("somebody else", 1)
    it = DecodeHandoff(KEY, 40, 3, slots)
    it.received(m.Started(3))
    it.credit(1)
    for number, slot, use in ((1, *foreign), (1, 1, 2), (1, 1, 0), (1, 99, 1), (1, -1, 1)):
        assert it.received(m.Landed(number, ((0, slot, use),))) == []
    assert it.stale == 5
    assert it.received(landed(1, (0, 1))) == [Copy(0, SlotUse(1, 1))]


def test_a_repeated_landed_is_stale_before_during_and_after_its_copy() -> None:
    it = copying()
    assert it.received(landed(1, (0, 0))) == []
    it.copied(0, False)
    assert it.received(landed(1, (0, 0))) == []
    assert it.received(landed(2, (0, 3))) == [Copy(0, SlotUse(3, 1))]
    assert it.received(landed(2, (0, 3))) == []
    it.copied(0, True)
    assert it.received(landed(2, (0, 3))) == []
    assert (it.stale, it.state) == (4, State.LANDING)


@pytest.mark.parametrize("page", [-1, 3, 0])
def test_a_page_out_of_turn_fails_the_request(page: int) -> None:
    it = verified(1)
    out = it.received(landed(2, (page, 1)))
    assert out == [*bad(f"prefill sent page {page} of 3 out of turn"), CloseLeases()]


@pytest.mark.parametrize("make", [m for state, m in MAKE.items() if state in OPEN])
def test_the_first_cause_is_the_one_reported(make: Make) -> None:
    it = make()
    reports = [a for a in it.received(m.Abort("numerical_error", "NaN")) if isinstance(a, Report)]
    assert reports == [Report(Aborted("numerical_error", "NaN"))]
    later = [*it.abort(LEFT), *aborted(it), *fence(it)]
    assert not [a for a in later if isinstance(a, Report)]
