"""The handoff between two real workers: tickets that one half does not know, peers that go, bytes that do not arrive whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_world import greedy, lab_pair, prompt

from hermetic.handoff import messages as h
from hermetic.handoff.messages import Key
from hermetic.handoff.outcome import Aborted, Completed, Failed
from hermetic.lab.pair import DECODE, GATEWAY, PREFILL, LabPair
from hermetic.transport.base import Page, Written
from hermetic.worker import messages as m

UNKNOWN = Key(b"?" * 16, 1)


@pytest.fixture
def pair(tiny: str) -> LabPair:
    return lab_pair(tiny, chunk=32)


class Sender:
    """Stands before the real one: may change what is written, or say that it failed."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.corrupt = 0  # so many batches are written with a flipped bit
        self.results: list[tuple[bool, bool]] = []  # (ok, stopped) of the next batches instead of the truth
        self.reports: list[Written] = []

    def write(self, batch: int, pages: list[tuple[Page, int]]) -> None:
        if self.corrupt:
            self.corrupt -= 1
            pages = [(page.copy(), slot) for page, slot in pages]
            pages[0][0][7] ^= 1
        self.real.write(batch, pages)
        self.reports += [
            r._replace(ok=x[0], stopped=x[1]) if (x := self._next()) else r for r in self.real.poll()
        ]

    def _next(self) -> tuple[bool, bool] | None:
        return self.results.pop(0) if self.results else None

    def poll(self) -> list[Written]:
        done, self.reports = self.reports, []
        return done

    def close(self) -> None:
        self.real.close()


def between(pair: LabPair) -> Sender:
    (paired,) = pair.prefill._pairs.values()
    paired.sender = sender = Sender(paired.sender)  # type: ignore[assignment]
    return sender


def slots(pair: LabPair) -> tuple[int, int, int]:
    (peer,) = pair.decode._peers.values()
    peer.slots.check_conservation()
    return tuple(peer.slots.counts())


@pytest.mark.breaks_the_protocol("the other half's messages are made up by the test")
def test_an_abort_for_a_ticket_that_prefill_never_saw_is_answered_with_drained_and_it_never_starts(
    pair: LabPair,
) -> None:
    pair._queue.append((DECODE, PREFILL, UNKNOWN, h.Abort("deadline", "late")))
    sent: list[Any] = []
    pair.drop = lambda message: sent.append(message) or False  # type: ignore[func-returns-value]
    pair.pump()
    assert (PREFILL, DECODE, UNKNOWN, h.Drained()) in sent
    submit = m.Submit(np.array([1, 2], "<i4").tobytes(), 2, _params(), 1, 0, 1, "t", "", 1, "decode")
    pair._queue.append((DECODE, PREFILL, UNKNOWN, h.Grant(2, 1)))
    pair._queue.append((GATEWAY, PREFILL, UNKNOWN, submit))
    pair.answers[UNKNOWN.ticket] = _answer(submit)
    pair.run()
    (ended,) = pair.answers[UNKNOWN.ticket].ended
    assert ended[2] == Aborted("deadline", "late")  # the first cause, though it overtook the request
    assert pair.prefill.engine.counters.requests == 0
    assert pair.idle()


def _params() -> Any:
    from hermetic.model.params import SamplingParams

    return SamplingParams(max_tokens=1, temperature=0.0)


def _answer(submit: m.Submit) -> Any:
    from hermetic.lab.pair import Answer

    return Answer(submit, {0: []}, {0: []})


@pytest.mark.breaks_the_protocol("the other half's messages are made up by the test")
def test_messages_for_tickets_that_decode_does_not_know_are_counted_and_move_nothing(pair: LabPair) -> None:
    before = pair.decode.engine.pool.counts(), slots(pair)
    for body in (
        h.Started(1),
        h.Landed(1, ((0, 0, 1),)),
        h.Complete(1, 1, 1, b""),
        h.Drained(),
        h.Abort("x", "y"),
    ):
        pair._queue.append((PREFILL, DECODE, UNKNOWN, body))
    pair.run()
    # The five, and prefill's answers to the three aborts that say that these attempts are unknown.
    assert pair.decode.counters.messages_stale == 5 + 3
    assert (pair.decode.engine.pool.counts(), slots(pair)) == before


def test_a_page_damaged_on_its_way_is_sent_once_more_and_the_answer_is_right(
    tiny: str, pair: LabPair
) -> None:
    sender = between(pair)
    sender.corrupt = 1
    answer = pair.ask(prompt(70), max_tokens=8)
    assert answer.tokens == greedy(tiny, prompt(70), 8)
    assert pair.decode.landing.resends == 1
    assert pair.decode.landing.pages_refused_landing == 1
    assert pair.decode.landing.pages_landed == 5
    assert pair.decode.landing.tiles_verified_landing == 6 * 3 * 2  # 5 pages and one again: layers x KV heads
    pair.check()
    assert pair.idle()


def test_a_page_damaged_twice_fails_that_request_and_no_other(tiny: str, pair: LabPair) -> None:
    other = pair.submit(prompt(30), max_tokens=8)
    pair.run(lambda: bool(pair.answer(other).outputs[0]))
    between(pair).corrupt = 1000
    answer = pair.ask(prompt(10))
    failures = [o for _, _, o in answer.ended if isinstance(o, Failed)]
    assert [f.code for f in failures] == ["kv_integrity"]
    assert "twice" in failures[0].reason
    assert pair.answer(other).tokens == greedy(tiny, prompt(30), 8)
    pair.check()
    assert pair.idle()


def test_pages_that_decode_rejected_are_offered_to_no_later_prompt(tiny: str, pair: LabPair) -> None:
    # Frozen by decode's rejection while prefill still holds them for another handoff with the same prefix.
    keeper = pair.submit(prompt(70), max_tokens=2)
    pair.drop = lambda message: message[1] == PREFILL and isinstance(message[3], h.Ack)
    pair.run(lambda: bool(pair.answer(keeper).outputs[0]))
    shared = pair.prefill.engine.counters.prefix_pages_shared
    between(pair).corrupt = 1000
    assert isinstance(pair.ask(prompt(70)).failure, Failed)
    assert pair.prefill.engine.counters.prefix_pages_shared == shared + 4  # (70 - 1) // 16, from the keeper's
    assert isinstance(pair.ask(prompt(70)).failure, Failed)
    assert pair.prefill.engine.counters.prefix_pages_shared == shared + 4


def test_a_write_that_failed_and_stopped_fails_the_request_and_leaks_nothing(
    tiny: str, pair: LabPair
) -> None:
    between(pair).results = [(False, True)]
    answer = pair.ask(prompt(40))
    assert (PREFILL, "transport_error") in [
        (who, o.code) for who, _, o in answer.ended if not isinstance(o, Completed)
    ]
    pair.check()
    assert pair.idle()
    assert pair.ask(prompt(40), max_tokens=8).tokens == greedy(tiny, prompt(40), 8)


def test_slots_of_a_write_that_may_still_run_come_back_only_with_a_fence(pair: LabPair) -> None:
    between(pair).results = [(False, False)]
    answer = pair.ask(prompt(40))
    assert answer.failure is not None
    assert answer.failure.code == "transport_error"
    assert slots(pair)[1] > 0
    (record,) = pair.prefill._records.values()
    assert record.sending[0].open  # its source is not given back either
    pair.decode._peers[PREFILL].receiver.fence = lambda: True  # type: ignore[method-assign]
    pair.decode.lost(PREFILL)
    assert pair.decode.landing.fences_total == 1
    assert pair.decode.stats()["releases_fenced_total"] == 1
    assert not pair.decode._peers
    assert not pair.decode._records
    assert pair.decode.engine.pool.counts().leased == 0


@pytest.mark.parametrize("fenced", [True, False])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_when_prefill_goes_its_landing_requests_fail_and_running_ones_go_on(
    tiny: str, pair: LabPair, rounds: int, fenced: bool
) -> None:
    running = pair.submit(prompt(20), max_tokens=30)
    pair.run(lambda: bool(pair.answer(running).outputs[0]))
    landing = pair.submit(prompt(100))
    for _ in range(rounds):
        pair.round()
    peer = pair.decode._peers[PREFILL]
    peer.receiver.fence = lambda: fenced  # type: ignore[method-assign]
    pair.drop = lambda message: PREFILL in message[:2]
    pair.decode.lost(PREFILL)
    while pair.decode.tick():
        pair.pump()
    pair.pump()
    assert pair.answer(running).tokens == greedy(tiny, prompt(20), 30)
    if pair.answer(landing).outcome != Completed():
        assert pair.answer(landing).ended[0][2] == Failed("worker_lost", "prefill worker prefill is gone")
    peer.slots.check_conservation()
    assert peer.slots.counts().granted == 0
    assert (peer.slots.counts().quarantined == 0) or not fenced
    assert pair.decode.engine.pool.counts().leased == 0


def test_when_decode_goes_prefill_closes_everything_and_reports_worker_lost(pair: LabPair) -> None:
    key = pair.submit(prompt(100))
    pair.round()
    pair.drop = lambda message: DECODE in message[:2]
    pair.prefill.lost(DECODE)
    pair.run()
    assert (PREFILL, key, Failed("worker_lost", "decode worker decode is gone")) in pair.answer(key).ended
    assert pair.prefill.engine.pool.counts().leased == 0
    pair.prefill.engine.pool.check_conservation()


def test_a_lost_credit_is_repaired_by_time(tiny: str, pair: LabPair) -> None:
    pair.drop = lambda message: isinstance(message[3], h.Credit)
    key = pair.submit(prompt(100), max_tokens=8)
    pair.run()
    assert pair.answer(key).outcome is None
    pair.drop = lambda message: False
    pair.advance(2.5)  # prefill says again that it has started
    pair.advance(2.5)  # decode says its credits again
    assert pair.answer(key).tokens == greedy(tiny, prompt(100), 8)
    assert pair.idle()


def test_the_first_cause_is_what_both_halves_report(pair: LabPair) -> None:
    key = pair.submit(prompt(100))
    pair.round()
    pair._queue.append((GATEWAY, DECODE, key, m.Cancel("deadline", "too late")))
    pair.run()
    assert {o for _, _, o in pair.answer(key).ended} == {Aborted("deadline", "too late")}
    assert len(pair.answer(key).ended) == 2
    assert pair.idle()


def test_with_few_slots_long_prompts_still_arrive_whole(tiny: str, pair: LabPair) -> None:
    """A window of 64 slots for three prompts of 45 pages: pages are sent while later chunks are being computed."""
    pair = lab_pair(tiny, chunk=128, prefill_pages=150, decode_pages=150)
    keys = [pair.submit(prompt(700, seed=i), max_tokens=4) for i in range(3)]
    early = False
    for _ in range(1000):
        if not pair.round():
            break
        landed = pair.decode.landing.pages_landed
        early |= landed > 0 and pair.prefill.engine.depth()["prefilling"] > 0
    assert early
    assert [pair.answer(k).tokens for k in keys] == [greedy(tiny, prompt(700, seed=i), 4) for i in range(3)]
    assert pair.idle()
