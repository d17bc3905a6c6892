"""Who is let in, who waits, and for how long at most."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_world import Bench, bench, greedy, lab_pair, prompt

from hermetic.engine.engine import MAX_PASSED
from hermetic.engine.sequence import Started
from hermetic.handoff.messages import Key
from hermetic.handoff.outcome import Completed, Refused


def untouched(b: Bench) -> tuple[Any, ...]:
    pool = b.engine.pool
    return pool.counts(), pool._free.tolist(), pool.tag_fill.tolist(), b.engine.depth(), b.engine.busy


@pytest.mark.parametrize("role", ["unified", "prefill", "decode"])
def test_at_the_edge_of_the_pool_the_last_token_that_fits_is_let_in_and_the_next_is_refused(
    tiny: str, role: str
) -> None:
    b = bench(tiny, 4, role=role)  # 64 tokens
    before = untouched(b)
    for length, most in ((63, 1), (62, 2), (1, 63), (40, 24)):
        assert b.refusal(prompt(length), max_tokens=most) is None
    for length, most in ((64, 1), (65, 1), (63, 2), (1, 64), (40, 25), (1000, 1000)):
        refusal = b.refusal(prompt(length), max_tokens=most)
        assert refusal is not None
        assert refusal.code == "context_length_exceeded"
        for number in (length, most, length + most, 64):
            assert str(number) in refusal.reason
    assert untouched(b) == before


def test_a_window_smaller_than_the_pool_is_the_limit(tiny: str) -> None:
    b = bench(tiny, 64, context_length=50)
    assert b.refusal(prompt(40), max_tokens=10) is None
    refusal = b.refusal(prompt(40), max_tokens=11)
    assert refusal is not None
    assert "50" in refusal.reason


def test_a_request_that_fills_the_whole_pool_is_served(tiny: str) -> None:
    b = bench(tiny, 4)
    for length, most in ((63, 1), (40, 24)):
        assert b.ask([prompt(length)], max_tokens=most) == [greedy(tiny, prompt(length), most)]
    b.check_idle()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"tokens": np.array([], np.int64), "prompt": 0}, "empty_prompt"),
        ({"prompt": 0}, "empty_prompt"),
        ({"prompt": 4}, "invalid_request"),  # more than came
        ({"tokens": np.array([1] * 11), "prompt": 3}, "invalid_request"),  # all 8 outputs are there already
        ({"tokens": np.array([1, 512, 1])}, "invalid_token_id"),
        ({"tokens": np.array([1, -1, 1])}, "invalid_token_id"),
        ({"n": 0}, "invalid_request"),
        ({"n": 65}, "invalid_request"),
    ],
)
def test_what_cannot_be_a_request_is_refused_with_nothing_taken(
    tiny: str, change: dict[str, Any], code: str
) -> None:
    from dataclasses import replace

    b = bench(tiny, 16)
    before = untouched(b)
    refusal = b.engine.admit(replace(b.job([1, 2, 3]), **change))
    assert isinstance(refusal, Refused)
    assert refusal.code == code
    assert untouched(b) == before


def test_an_attempt_that_is_here_already_is_refused_and_its_successor_is_not(tiny: str) -> None:
    from dataclasses import replace

    b = bench(tiny, 16)
    job = b.job(prompt(10))
    b.give(job)
    refusal = b.engine.admit(job)
    assert refusal is not None
    assert refusal.code == "duplicate_attempt"
    assert b.engine.admit(replace(job, key=Key(job.key.ticket, 2))) is None


def test_a_request_that_does_not_fit_now_waits_and_younger_ones_that_fit_go_on(tiny: str) -> None:
    b = bench(tiny, 8)
    first = b.submit(prompt(70), max_tokens=20)
    b.run(lambda: b.started(first))
    big, small = b.submit(prompt(100), max_tokens=8), b.submit(prompt(10), max_tokens=3)
    b.run(lambda: small in b.ended)
    assert not b.started(big)
    assert first not in b.ended
    b.run()
    assert b.ended == [small, first, big]
    b.check_idle()


@pytest.mark.parametrize("burst", [True, False])
def test_a_waiting_request_is_passed_by_a_bounded_number_and_then_served(tiny: str, burst: bool) -> None:
    """Also when all the younger ones are there at once."""
    b = bench(tiny, 58)
    first = b.submit(prompt(320), max_tokens=100)  # 21 pages, for a long time
    b.run(lambda: b.started(first))
    big = b.submit(prompt(600), max_tokens=8)  # 38 pages and headroom: not while the first runs
    b.step()
    assert b.engine.depth()["waiting"] == 1
    young: list[Key] = []
    for _ in range(MAX_PASSED + 9):
        young.append(b.submit(prompt(10), max_tokens=2))
        if not burst:
            b.step()
    b.run(lambda: b.started(big))
    placed = [e.key for e in b.events if isinstance(e, Started)]
    assert placed[: placed.index(big)] == [first, *young[:MAX_PASSED]]
    b.run()
    assert set(b.ended) == {first, big, *young}
    b.check_idle()


def test_a_request_that_takes_the_place_of_a_cancelled_one_is_tried(tiny: str) -> None:
    """The queue is as long as before, and nothing else changed; but there is somebody new in it."""
    b = bench(tiny, 8, role="decode")
    first = b.submit(prompt(60))
    b.run()
    big = b.submit(prompt(100))
    b.run()
    assert b.engine.depth() == {"waiting": 1, "reserved": 1, "prefilling": 0, "running": 0}
    b.engine.cancel(big)
    b.submit(prompt(10))
    assert b.engine.busy
    b.run()
    assert b.engine.depth()["reserved"] == 2
    b.engine.cancel(first)


def test_an_idle_engine_has_nothing_to_do(tiny: str) -> None:
    b = bench(tiny, 8)
    assert not b.engine.busy
    b.ask([prompt(10)])
    assert not b.engine.busy
    assert b.engine.step() == []


def test_a_pair_refuses_on_both_halves_what_cannot_fit_and_moves_nothing(tiny: str) -> None:
    pair = lab_pair(tiny, prefill_pages=8, decode_pages=6)
    for worker, limit in ((pair.prefill, 128), (pair.decode, 96)):
        assert worker.info.max_tokens == limit
    before = [w.engine.pool.counts() for w in (pair.prefill, pair.decode)]
    answer = pair.ask(prompt(100), max_tokens=10)
    assert isinstance(answer.outcome, Refused)
    assert answer.outcome.code == "context_length_exceeded"
    assert "96" in answer.outcome.reason
    assert [w.engine.pool.counts() for w in (pair.prefill, pair.decode)] == before
    assert pair.idle()
    assert pair.ask(prompt(80), max_tokens=16).outcome == Completed()
    pair.check()
    assert pair.idle()
