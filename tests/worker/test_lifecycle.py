"""The whole life of a handoff between two real workers, when messages, sessions, peers, writes or clients are lost.

Every test ends with `settled`: both halves have ended, every page and every slot is back, nothing is remembered as open.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from unittest import mock

import msgspec
import numpy as np
import pytest
from held_transport import held_pair

from hermetic.engine.sequence import PagesReady, PromptDone
from hermetic.handoff import messages as h
from hermetic.handoff.decode import State as DecodeState
from hermetic.handoff.messages import Key
from hermetic.handoff.outcome import Aborted, Completed, Failed, Refused
from hermetic.handoff.prefill import State as PrefillState
from hermetic.lab.pair import DECODE, GATEWAY, PREFILL, LabPair, Message
from hermetic.lab.scene import make_pair
from hermetic.worker import messages as m
from hermetic.worker.timers import LOOK_SECONDS

OUTPUTS = 5
UNKNOWN = Key(b"?" * 16, 1)


def tokens(length: int = 70, seed: int = 0) -> list[int]:
    return np.random.default_rng((seed, length)).integers(1, 500, length).tolist()


@functools.cache
def undisturbed(length: int = 70, seed: int = 0) -> tuple[int, ...]:
    return tuple(make_pair("landing").ask(tokens(length, seed), max_tokens=OUTPUTS).tokens)


def submit(pair: LabPair, length: int = 70, seed: int = 0) -> Key:
    return pair.submit(tokens(length, seed), f"tenant {seed}", max_tokens=OUTPUTS)


def wait(pair: LabPair, done: Callable[[], bool], seconds: float = 300.0) -> None:
    """Time passes until it is done."""
    until = pair.now + seconds
    while not done():
        assert pair.now < until, f"not after {seconds} s: {pair.prefill.stats()} {pair.decode.stats()}"
        pair.advance(1.0)


def open_handoffs(pair: LabPair) -> int:
    return len(pair.prefill._records) + len(pair.decode._records)


def settled(pair: LabPair) -> None:
    """Within a bound all is given back."""
    wait(pair, lambda: open_handoffs(pair) == 0)
    pair.check()
    assert pair.idle()
    for worker in (pair.prefill, pair.decode):
        stats = worker.stats()
        assert stats["releases_deferred"] == stats["handoffs_open"] == 0
        assert not worker._asked
    assert pair.decode.stats()["drains_outstanding"] == 0
    assert pair.prefill.stats()["pages_sending"] == pair.prefill.stats()["writes_in_flight"] == 0


def answers_well(pair: LabPair, seed: int = 9) -> None:
    """The pair still serves, with the right tokens."""
    key = submit(pair, 40, seed)
    wait(pair, lambda: pair.answer(key).outcome is not None)
    assert pair.answer(key).tokens == list(undisturbed(40, seed))


class Losing:
    """Loses the first `count` messages of one kind."""

    def __init__(self, pair: LabPair, kind: type, count: int) -> None:
        self.kind, self.left = kind, count
        pair.drop = self

    def __call__(self, message: Message) -> bool:
        hit = isinstance(message[3], self.kind) and GATEWAY not in message[:2] and self.left > 0
        self.left -= hit
        return hit


def machine_states(pair: LabPair, key: Key) -> tuple[PrefillState | None, DecodeState | None]:
    prefill, decode = pair.prefill._records.get(key), pair.decode._records.get(key)
    return (
        prefill.machine.state if prefill else None,
        decode.machine.state if decode and decode.machine else None,
    )


# --------------------------------------------------------------------------------------------- lost messages
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("kind", [h.Grant, h.Started, h.Credit, h.Landed, h.Complete, h.Ack, h.Resend])
def test_a_message_that_is_lost_is_said_again_and_the_answer_is_right(kind: type, count: int) -> None:
    pair, held = held_pair(slots=3)
    held.damaged = kind is h.Resend
    losing = Losing(pair, kind, count)
    key = submit(pair)
    wait(pair, lambda: pair.answer(key).outcome is not None)
    assert pair.answer(key).outcome == Completed()
    assert pair.answer(key).tokens == list(undisturbed())
    settled(pair)
    assert losing.left == 0


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("kind", [h.Abort, h.Drained])
def test_a_lost_abort_or_drain_answer_is_asked_for_again(kind: type, count: int) -> None:
    pair, held = held_pair(hold=True)
    key = submit(pair)
    pair.run()
    assert machine_states(pair, key) == (PrefillState.SENDING, DecodeState.LANDING)
    losing = Losing(pair, kind, count)
    # Decode alone is told: prefill hears of it from decode, or later from the gateway.
    pair._queue.append((GATEWAY, DECODE, key, m.Cancel("deadline", "late")))
    pair.pump()
    assert machine_states(pair, key)[1] is DecodeState.DRAINING
    assert pair.decode.engine.pool.counts().leased == 0  # pages are ours alone and go back at once
    assert pair.decode.stats()["drains_outstanding"] == pair.decode.stats()["releases_deferred"] == 1
    held.hold = False
    held.deliver()
    settled(pair)
    assert losing.left < count
    assert pair.answer(key).failure == Aborted("deadline", "late")
    assert pair.decode.stats()["releases_drained_total"] == 1
    assert pair.decode.stats()["releases_fenced_total"] == 0
    answers_well(pair)


def test_drained_is_said_when_the_last_write_has_ended_and_not_before() -> None:
    pair, held = held_pair(hold=True)
    key = submit(pair)
    pair.run()
    pair.cancel(key)
    pair.run()
    assert machine_states(pair, key) == (PrefillState.DRAINING, DecodeState.DRAINING)
    for _ in range(4):
        pair.advance(5.0)
    assert pair.prefill.stats()["pages_sending"] > 0
    slots = pair.decode.stats()
    assert slots["slots_granted"] > 0
    assert slots["slots_free"] + slots["slots_granted"] == slots["slots_total"]
    held.deliver()
    settled(pair)


# -------------------------------------------------------------------------------------------- client gone
class At:
    """Calls `then` before the message number `at` between the two workers is delivered."""

    def __init__(self, pair: LabPair, at: int, then: Callable[[], None]) -> None:
        self.left, self.then = at, then
        pair.drop = self

    def __call__(self, message: Message) -> bool:
        if message[0] in (PREFILL, DECODE) and message[1] in (PREFILL, DECODE):
            self.left -= 1
            if self.left == 0:
                self.then()
        return False


@pytest.mark.parametrize("drain", [False, True], ids=["cancel", "drain"])
def test_a_client_that_leaves_at_any_moment_costs_nothing_and_leaves_nothing(drain: bool) -> None:
    pair = make_pair("landing", slots=3)
    finished = drained = 0
    for at in range(1, 60):
        states: list[DecodeState | None] = []
        key = Key((len(pair.answers) + 1).to_bytes(16, "little"), 1)

        def leave(key: Key = key, states: list[DecodeState | None] = states) -> None:
            # The next messages that the workers take: before anything that is on its way already.
            states.append(machine_states(pair, key)[1])
            for worker in (pair.decode, pair.prefill):
                worker.handle(GATEWAY, key, m.Cancel("client_gone", "the client left", None, drain))

        moment = At(pair, at, leave)
        assert submit(pair, seed=at) == key
        pair.run()
        answer = pair.answer(key)
        if moment.left > 0:
            finished += 1
            assert answer.outcome == Completed()
        else:
            assert answer.tokens == list(undisturbed(seed=at))[: len(answer.tokens)]
            assert {who for who, *_ in answer.ended} == {PREFILL, DECODE}
            if drain and states == [DecodeState.LANDING]:
                drained += 1
                # The transfer and the first token finish, and the step that says it; no more.
                assert 1 <= len(answer.tokens) <= 2
                assert (PREFILL, key, Completed()) in answer.ended
            elif answer.failure is not None:
                assert answer.failure == Aborted("client_gone", "the client left")
        settled(pair)
        if finished == 1:
            break
    assert finished == 1
    assert at > 8
    assert (drained > 3) == drain


# ---------------------------------------------------------------------------------------------- lost sessions
def lose_session(pair: LabPair) -> None:
    """Both ends notice; what was on its way is gone."""
    between = [x for x in pair._queue if GATEWAY in x[:2]]
    pair._queue.clear()
    pair._queue.extend(between)
    pair.decode.lost(PREFILL, "has been silent for 5 s")
    pair.prefill.lost(DECODE, "has been silent for 5 s")
    pair._queue = type(pair._queue)(x for x in pair._queue if GATEWAY in x[:2])


def greet(pair: LabPair) -> None:
    pair.prefill.dialled(DECODE, "decode", pair.decode.info.incarnation, GATEWAY)


def test_a_session_that_is_lost_at_any_moment_ends_its_requests_and_gives_all_back_when_it_is_made_again() -> (
    None
):
    pair, held = held_pair(slots=3)
    held.fenceable = False
    for at in range(1, 60):
        moment = At(pair, at, lambda: lose_session(pair))
        key = submit(pair, seed=at)
        pair.run()
        pair.drop = lambda _: False
        if moment.left > 0:
            assert pair.answer(key).outcome == Completed()
            break
        assert isinstance(pair.answer(key).outcome, Failed | Completed)
        assert open_handoffs(pair) == 0 or pair.decode.stats()["slots_quarantined"] > 0
        assert not pair.decode.engine.pool.counts().leased
        greet(pair)
        pair.run()
        settled(pair)
        assert pair.decode.stats()["peers_silent"] == 0
    assert at > 8
    assert pair.decode.landing.fences_total == 0
    answers_well(pair)


@pytest.mark.parametrize("fenceable", [True, False])
def test_a_silent_peer_keeps_its_slots_in_quarantine_until_it_drains_or_is_fenced(fenceable: bool) -> None:
    pair, held = held_pair(hold=True)
    held.fenceable = fenceable
    key = submit(pair)
    pair.run()
    lose_session(pair)
    pair.run()
    stats = pair.decode.stats()
    assert pair.decode.engine.pool.counts().leased == 0
    if fenceable:
        assert (stats["releases_fenced_total"], stats["peers_silent"], stats["slots_total"]) == (1, 0, 0)
    else:
        assert stats["slots_quarantined"] > 0
        assert stats["peers_silent"] == stats["releases_deferred"] == stats["releases_quarantined_total"] == 1
        pair.advance(1000.0)  # time alone gives nothing back
        assert pair.decode.stats()["slots_quarantined"] == stats["slots_quarantined"]
    greet(pair)
    pair.run()
    assert pair.decode.stats()["slots_quarantined"] == (0 if fenceable else stats["slots_quarantined"])
    held.hold = False
    held.deliver()
    settled(pair)
    assert pair.decode.stats()["releases_drained_total"] == (0 if fenceable else 1)
    assert isinstance(pair.answer(key).failure, Failed)
    answers_well(pair)


def test_another_incarnation_of_a_silent_peer_gets_slots_of_its_own_and_not_those_in_quarantine() -> None:
    pair, held = held_pair(hold=True)
    held.fenceable = False
    submit(pair)
    pair.run()
    pair.decode.lost(PREFILL)
    quarantined = pair.decode.stats()["slots_quarantined"]
    assert quarantined > 0
    info = msgspec.structs.replace(pair.prefill.info, incarnation=b"another!")
    pair.decode.handle(b"again", None, m.Hello("prefill", info))
    stats = pair.decode.stats()
    assert (stats["slots_quarantined"], stats["peers_silent"]) == (quarantined, 1)
    assert stats["slots_free"] == stats["slots_total"] - quarantined
    held.fenceable = True  # its process is gone for certain now
    pair.now += 1.0
    pair.decode.tick()
    stats = pair.decode.stats()
    assert (stats["slots_quarantined"], stats["peers_silent"], stats["slots_fenced"]) == (0, 0, quarantined)
    assert stats["releases_fenced_total"] == stats["fences_total"] == 1
    assert not pair.decode._records


def test_a_peer_that_greets_again_without_a_goodbye_ends_its_former_session() -> None:
    pair, held = held_pair(hold=True)
    key = submit(pair)
    pair.run()
    pair.decode.handle(b"another connection", None, m.Hello("prefill", pair.prefill.info))
    assert list(pair.decode._peers) == [b"another connection"]
    assert machine_states(pair, key)[1] is None
    assert pair.decode.engine.pool.counts().leased == 0
    assert held.segments[0].fenced


def test_a_late_hello_to_decodes_predecessor_does_not_take_the_pair_from_the_line_that_stands() -> None:
    pair, _ = held_pair()
    info = pair.prefill.info
    pair.decode.handle(b"an earlier line", None, m.Hello("prefill", info, b"formerly"))
    assert list(pair.decode._peers) == [PREFILL]
    assert pair.decode.counters.messages_stale == 1
    pair.decode.handle(b"a new line", None, m.Hello("prefill", info, pair.decode.info.incarnation))
    assert list(pair.decode._peers) == [b"a new line"]


def test_prefill_says_which_incarnation_it_greets() -> None:
    pair, _ = held_pair()
    said: list[m.Body] = []
    pair.prefill.send = lambda to, key, body: said.append(body)
    pair.prefill.dialled(DECODE, "decode", b"restart!", GATEWAY)
    assert said == [m.Hello("prefill", pair.prefill.info, b"restart!")]


def test_what_another_prefill_worker_says_of_a_ticket_is_not_taken_for_its_own_half() -> None:
    pair, _ = held_pair(hold=True)
    key = submit(pair)
    pair.run()
    other = msgspec.structs.replace(pair.prefill.info, worker="prefill-b", incarnation=b"another!")
    pair.decode.handle(b"b", None, m.Hello("prefill-b", other))
    before, stale = machine_states(pair, key), pair.decode.counters.messages_stale
    for body in (h.Started(5), h.Complete(70, 5, 0, b""), h.Abort("cancelled", "not its own")):
        pair.decode.handle(b"b", key, body)
    assert machine_states(pair, key) == before == (PrefillState.SENDING, DecodeState.LANDING)
    assert pair.decode.counters.messages_stale == stale + 3


def test_what_another_decode_worker_says_of_a_ticket_is_not_taken_for_its_own_half() -> None:
    pair, _ = held_pair(hold=True)
    key = submit(pair)
    pair.run()
    other = dataclasses.replace(pair.prefill._records[key].pair)
    before, rejected = machine_states(pair, key), pair.prefill.counters.messages_rejected
    for body in (h.Ack(), h.Abort("cancelled", "not its own")):
        pair.prefill._from_decode(other, key, body)
    assert machine_states(pair, key) == before == (PrefillState.SENDING, DecodeState.LANDING)
    assert pair.prefill.counters.messages_rejected == rejected + 2


def test_rows_of_the_last_page_that_hold_no_token_carry_nobodys_old_bytes() -> None:
    pair, held = held_pair(hold=True)
    pool = pair.prefill.engine.pool
    pool.memory[:] = 0xAA  # what somebody had left there
    submit(pair)  # 70 tokens: the fifth page holds 6
    sent: list[np.ndarray] = []
    pair.run()
    while held.flights:
        sent += [data.copy() for flight in held.flights for data, _ in flight.pages]
        held.deliver()
        pair.run()
    assert len(sent) == 5
    for part in pool.geometry.components:
        rows = pool.geometry.rows(sent[-1][None], part.name)
        assert rows[:, :, :, :6].any()
        assert not rows[:, :, :, 6:].any()


def test_pages_that_failed_their_verification_are_offered_to_no_prefix_cache() -> None:
    pair, held = held_pair()
    held.damaged = 99  # whatever is sent again is damaged again
    with mock.patch.object(pair.prefill.engine, "withhold", wraps=pair.prefill.engine.withhold) as withhold:
        key = submit(pair)
        wait(pair, lambda: pair.answer(key).outcome is not None)
    assert pair.answer(key).failure.code == "kv_integrity"  # type: ignore[union-attr]
    assert [len(call.args[0]) for call in withhold.call_args_list] == [5]
    held.damaged = 0
    answers_well(pair)


def test_when_decode_is_gone_prefill_waits_for_none_of_its_writes() -> None:
    pair, held = held_pair(hold=True)
    key = submit(pair)
    pair.run()
    pair.drop = lambda message: DECODE in message[:2]
    pair.prefill.gone(DECODE)
    pair.pump()
    assert not pair.prefill._records
    assert pair.prefill.engine.pool.counts().leased == 0
    assert isinstance(pair.answer(key).failure, Failed)
    assert pair.answer(key).failure.code == "worker_lost"  # type: ignore[union-attr]
    assert held.flights[0].sender.closed


def test_when_the_gateway_is_lost_both_workers_give_everything_back() -> None:
    pair, held = held_pair(hold=True)
    landing, running = submit(pair), None
    pair.run()
    held.hold = False
    running = submit(pair, 20, 3)
    pair.round()
    pair.drop = lambda message: GATEWAY in message[:2]
    for worker in (pair.prefill, pair.decode):
        worker.lost(GATEWAY)
    pair._queue = type(pair._queue)(x for x in pair._queue if GATEWAY not in x[:2])
    held.deliver()
    settled(pair)
    assert pair.answer(landing).outcome is None
    assert pair.answer(running).outcome is None
    pair.drop = lambda _: False
    answers_well(pair)


# ------------------------------------------------------------------------------------------- drains and fences
def test_a_frozen_peer_costs_slots_and_no_page_and_others_go_on() -> None:
    pair, held = held_pair(hold=True, slots=8, drain_seconds=30.0)
    held.fenceable = False
    key = submit(pair)
    pair.run()
    frozen = pair.decode.stats()["slots_granted"]
    assert 0 < frozen < 8
    pair.cancel(key)
    pair.run()
    pair.advance(29.0)
    assert machine_states(pair, key)[1] is DecodeState.DRAINING
    pair.advance(2.0)
    assert machine_states(pair, key)[1] is DecodeState.QUARANTINED
    stats = pair.decode.stats()
    assert (stats["slots_quarantined"], stats["slots_free"]) == (frozen, 8 - frozen)
    assert (stats["releases_quarantined_total"], stats["drains_outstanding"], stats["pages_leased"]) == (
        1,
        1,
        0,
    )
    stuck = held.flights
    held.flights, held.hold = [], False
    answers_well(pair)  # with the slots that are left
    held.flights = stuck
    held.deliver()
    settled(pair)
    stats = pair.decode.stats()
    assert (stats["releases_drained_total"], stats["releases_fenced_total"]) == (1, 0)
    assert stats["release_seconds_sum"] > 30


@pytest.mark.parametrize("not_yet", [0, 1, 3])
def test_a_write_in_doubt_ends_with_a_fence_and_lands_nowhere(not_yet: int) -> None:
    pair, held = held_pair(hold=True, drain_seconds=30.0)
    held.not_yet = not_yet
    key = submit(pair)
    pair.run()
    held.fail(stopped=False)
    pair.run()
    assert machine_states(pair, key) == (PrefillState.STUCK, DecodeState.DRAINING)
    assert isinstance(pair.answer(key).failure, Failed)
    assert pair.answer(key).failure.code == "transport_error"  # type: ignore[union-attr]
    assert pair.prefill.stats()["writes_in_doubt"] == 1
    assert pair.prefill.stats()["pages_sending"] > 0
    pair.advance(29.0)
    assert machine_states(pair, key) == (PrefillState.STUCK, DecodeState.DRAINING)
    assert len(held.segments) == 1
    held.hold = False
    pair.advance(2.0)
    if not_yet:  # out of use meanwhile, and asked for again
        assert machine_states(pair, key) == (PrefillState.STUCK, DecodeState.QUARANTINED)
    settled(pair)
    assert [s.fenced for s in held.segments] == [True, False]
    assert held.land_late() == 0
    stats = pair.decode.stats()
    assert (stats["fences_total"], stats["releases_fenced_total"], stats["releases_drained_total"]) == (
        1,
        1,
        0,
    )
    assert pair.prefill.stats()["releases_fenced_total"] == 1
    answers_well(pair)
    assert held.land_late() == 0


def test_a_fence_that_was_not_possible_yet_is_asked_for_at_every_look_and_not_with_the_next_nudge() -> None:
    pair, held = held_pair(hold=True, drain_seconds=30.0)
    held.not_yet = looks = 20
    key = submit(pair)
    pair.run()
    held.fail(stopped=False)
    pair.run()
    held.hold = False
    pair.advance(29.0)
    assert held.not_yet == looks
    pair.advance(2.0)
    assert held.not_yet == looks - 1
    for _ in range(looks):  # five seconds; this ticket's nudges are 16 and 30 seconds apart by now
        assert machine_states(pair, key)[1] == DecodeState.QUARANTINED
        pair.advance(LOOK_SECONDS)
    assert machine_states(pair, key) == (None, None)
    settled(pair)


def test_a_write_in_doubt_over_a_session_that_was_lost_meanwhile_is_fenced_as_well() -> None:
    pair, held = held_pair(hold=True, drain_seconds=30.0)
    held.not_yet = 1
    submit(pair)
    pair.run()
    held.fail(stopped=False)
    pair.prefill.tick()
    lose_session(pair)
    greet(pair)
    pair.run()
    assert pair.decode.stats()["slots_quarantined"] > 0
    held.hold = False
    settled(pair)
    assert held.land_late() == 0
    answers_well(pair)


def test_a_fence_takes_along_what_else_was_landing_and_nothing_that_runs() -> None:
    pair, held = held_pair(hold=True, drain_seconds=30.0)
    held.hold = False
    running = pair.submit(tokens(40, 5), "tenant 5", max_tokens=OUTPUTS)
    pair.run(lambda: bool(pair.answer(running).tokens))
    held.hold = True
    first, second = submit(pair), submit(pair, 33, 2)
    pair.run()
    assert pair.answer(running).tokens == list(undisturbed(40, 5))
    held.fail(stopped=False)
    pair.run()
    pair.advance(31.0)
    held.flights.clear()
    held.hold = False
    settled(pair)
    assert isinstance(pair.answer(first).failure, Failed)
    failure = pair.answer(second).failure
    assert isinstance(failure, Failed)
    assert (failure.code, "did not drain within 30 s" in failure.reason) == ("worker_lost", True)
    answers_well(pair)


def test_a_new_segment_that_prefill_cannot_open_ends_its_requests_and_no_process() -> None:
    pair, held = held_pair(hold=True, drain_seconds=30.0)
    submit(pair)
    pair.run()
    held.fail(stopped=False)
    pair.run()
    held.unopenable = True
    pair.advance(31.0)
    assert pair.paired[-1].error == "the segment cannot be opened"
    late = submit(pair, 33, 4)
    pair.run()
    (refusal,) = [o for who, _, o in pair.answer(late).ended if who == PREFILL]
    assert isinstance(refusal, Refused)
    assert refusal.code == "no_pair"
    settled(pair)
    held.unopenable = held.hold = False
    pair.prefill.lost(DECODE)
    pair.decode.lost(PREFILL)
    greet(pair)
    pair.run()
    answers_well(pair)


def test_what_a_step_says_of_a_request_that_ended_while_its_events_were_worked_off_is_for_nobody() -> None:
    """A write that is started polls for all: another ticket's failure can be noticed between two events of one step."""
    pair, held = held_pair(hold=True)
    key = submit(pair)
    pair.run()
    held.fail(stopped=False)
    pair.prefill.tick()
    assert pair.prefill._records[key].machine.state is PrefillState.STUCK
    pair.prefill._relay([PagesReady(key, 5), PromptDone(key, ())])
    assert pair.prefill._records[key].machine.state is PrefillState.STUCK
    pair.run()
    pair.advance(31.0)
    held.hold = False
    settled(pair)


@pytest.mark.breaks_the_protocol("the other half's messages are made up by the test")
# --------------------------------------------------------------------------------------------- nobody's tickets
@pytest.mark.parametrize("body", [h.Started(1), h.Landed(1, ((0, 0, 1),)), h.Complete(1, 1, 1, b"")])
def test_decode_answers_what_it_does_not_know_with_an_abort_that_says_so(body: h.HandoffMessage) -> None:
    pair = make_pair("landing")
    said: list[Message] = []
    pair.drop = lambda message: said.append(message) or False  # type: ignore[func-returns-value]
    pair._queue.append((PREFILL, DECODE, UNKNOWN, body))
    pair.run()
    answers = [x[3] for x in said if x[0] == DECODE]
    assert [type(a) for a in answers] == [h.Abort]
    assert answers[0].code == "unknown_ticket"  # type: ignore[union-attr]
    assert pair.decode.counters.messages_stale == 2  # prefill's drained, the answer to that, is one as well
    settled(pair)


@pytest.mark.breaks_the_protocol("the other half's messages are made up by the test")
@pytest.mark.parametrize("body", [h.Drained(), h.Abort("x", "y")])
def test_what_asks_for_nothing_is_counted_and_not_answered(body: h.HandoffMessage) -> None:
    pair = make_pair("landing")
    pair._queue.append((PREFILL, DECODE, UNKNOWN, body))
    said: list[Message] = []
    pair.drop = lambda message: said.append(message) or False  # type: ignore[func-returns-value]
    pair.run()
    assert not [x for x in said if x[0] == DECODE]
    assert pair.decode.counters.messages_stale == 1


def test_a_grant_whose_request_never_comes_holds_nothing_and_ends_with_decodes_abort() -> None:
    pair = make_pair("landing")
    key = Key((1).to_bytes(16, "little"), 1)
    pair.drop = lambda message: message[0] == GATEWAY and message[1] == PREFILL
    submit(pair)
    pair.run()
    assert machine_states(pair, key) == (PrefillState.HAS_GRANT, DecodeState.RESERVED)
    for _ in range(5):
        pair.advance(40.0)
    assert pair.prefill.engine.pool.counts().leased == 0
    pair._queue.append((GATEWAY, DECODE, key, m.Cancel("deadline", "late")))
    settled(pair)


@pytest.mark.breaks_the_protocol("the other half's messages are made up by the test")
def test_a_grant_for_other_pages_than_the_request_needs_fails_it_with_the_numbers() -> None:
    pair = make_pair("landing")
    pair.drop = lambda message: isinstance(message[3], h.Grant) and message[3].pages == 5
    key = submit(pair)
    pair._queue.append((DECODE, PREFILL, key, h.Grant(1 << 40, 1 << 36)))
    pair.run()
    failure = pair.answer(key).failure
    assert isinstance(failure, Failed)
    assert failure.code == "kv_integrity"
    assert f"{1 << 36} pages for {1 << 40} tokens" in failure.reason
    assert pair.prefill.engine.counters.requests == 0
    settled(pair)


def test_an_attempt_that_was_here_is_not_taken_twice() -> None:
    pair, held = held_pair(hold=True)
    key = submit(pair)
    pair.run()
    pair.cancel(key)
    pair.run()
    assert machine_states(pair, key) == (PrefillState.DRAINING, DecodeState.DRAINING)
    before = len(pair.answer(key).ended)
    again = msgspec.structs.replace(pair.answer(key).submit, peer="decode")
    pair._queue.append((GATEWAY, PREFILL, key, again))
    pair._queue.append((GATEWAY, DECODE, key, pair.answer(key).submit))
    pair.run()
    for _, _, outcome in pair.answer(key).ended[before:]:
        assert isinstance(outcome, Refused)
        assert outcome.code == "duplicate_attempt"
    assert len(pair.answer(key).ended) == before + 2
    held.deliver()
    settled(pair)
    pair._queue.append((GATEWAY, DECODE, key, pair.answer(key).submit))  # and not when all of it is over
    pair.run()
    assert [o.code for _, _, o in pair.answer(key).ended[before + 2 :]] == ["duplicate_attempt"]  # type: ignore[union-attr]


@pytest.mark.breaks_the_protocol("the other half's messages are made up by the test")
def test_decodes_abort_that_overtakes_the_request_is_the_cause_that_prefill_reports() -> None:
    pair = make_pair("landing")
    key = Key((1).to_bytes(16, "little"), 1)
    pair._queue.append((DECODE, PREFILL, key, h.Abort("deadline", "late")))
    pair.pump()
    submit(pair)
    pair.run()
    assert (PREFILL, key, Aborted("deadline", "late")) in pair.answer(key).ended
    settled(pair)
