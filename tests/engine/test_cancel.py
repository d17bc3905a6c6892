"""A cancel in any phase gives everything back, says nothing more, and disturbs nobody."""

from __future__ import annotations

import numpy as np
import pytest
from engine_world import Bench, bench, greedy, lab_pair, prompt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hermetic.engine.sequence import First, JobFailed
from hermetic.handoff.messages import Key


def silent(b: Bench, key: Key, since: int) -> bool:
    return not [e for e in b.events[since:] if e.key == key]


@pytest.mark.parametrize("phase", ["waiting", "prefilling", "running", "preempted"])
def test_a_cancelled_request_gives_back_its_pages_and_says_nothing_more(tiny: str, phase: str) -> None:
    b = bench(tiny, 8, chunk=16)
    other = b.submit(prompt(30), max_tokens=40)
    key = b.submit(prompt(100 if phase == "waiting" else 60), max_tokens=20)
    if phase == "waiting":
        b.step()
    elif phase == "prefilling":
        b.run(
            lambda: b.engine.depth()["prefilling"] == 1 and len(b.engine.pages(key)) > 0 and b.started(other)
        )
    elif phase == "running":
        b.run(lambda: b.started(key))
    else:
        b.run(lambda: b.engine.counters.preemptions > 0)
    assert b.engine.depth()["waiting" if phase == "preempted" else phase] >= 1
    since = len(b.events)
    assert b.engine.cancel(key)
    assert not b.engine.cancel(key)
    b.run()
    assert silent(b, key, since)
    assert key not in b.ended
    assert b.outputs[other][0] == greedy(tiny, prompt(30), 40)
    b.check_idle()


def land(b: Bench, key: Key) -> None:
    """Fill the reserved pages of a prompt with sealed and tagged rows, as a clean landing does."""
    seq, pool, size = b.engine.reserved(key), b.engine.pool, b.engine.size
    count = seq.chain.pages
    pages, words, binds = seq.pages[:count], seq.chain.words[:count], seq.chain.binds[:count]
    fills = np.minimum(len(seq.tokens) - size * np.arange(count), size).astype(np.int32)
    memory = pool.memory[pages]
    pool.geometry.rows(memory, "k")[:] = pool.geometry.rows(memory, "v")[:] = 0.5
    b.engine._key.seal(memory, fills, words, binds)
    pool.memory[pages] = memory
    pool.set_tags(pages, seq.chain.lineages[:count], fills)


@pytest.mark.parametrize("phase", ["waiting", "reserved", "running"])
def test_a_decode_worker_gives_back_what_it_reserved(tiny: str, phase: str) -> None:
    b = bench(tiny, 8, role="decode")
    other = b.submit(prompt(60))
    key = b.submit(prompt(100 if phase == "waiting" else 20), n=2, max_tokens=3)
    b.run()
    if phase == "running":
        land(b, key)
        b.engine.enter(key, (First(5, None, None), First(6, None, None)))
        assert b.engine.depth()["running"] == 2
    assert b.engine.depth()[phase] >= 1
    assert b.engine.cancel(key)
    assert b.engine.cancel(other)
    b.run()
    b.check_idle()


def test_what_a_failed_request_has_not_said_yet_is_never_said(tiny: str) -> None:
    b = bench(tiny, 8, role="decode")
    key = b.submit(prompt(20), max_tokens=3)
    b.run()
    land(b, key)
    b.engine.enter(
        key, (First(5, None, None),)
    )  # its first token is an event now, and waits for the next step
    b.engine.fail(key, "kv_integrity", "found outside")
    assert b.step() == [JobFailed(key, "kv_integrity", "found outside")]
    assert not b.engine.busy
    b.check_idle()


@pytest.mark.parametrize("firsts", [(), (5,), (5, 6, 7), (5, 512), (-1, 5)])
def test_first_tokens_that_cannot_be_ours_fail_the_request(tiny: str, firsts: tuple[int, ...]) -> None:
    """Another number than the choices asked for, or ids outside the vocabulary: prefill is not believed."""
    b = bench(tiny, 8, role="decode")
    key = b.submit(prompt(20), n=2, max_tokens=3)
    b.run()
    land(b, key)
    b.engine.enter(key, tuple(First(t, None, None) for t in firsts))
    b.run()
    assert b.failed[key].code == "kv_integrity"
    assert "first token" in b.failed[key].reason
    assert key not in b.outputs
    b.check_idle()


def test_cancelling_the_last_choice_ends_the_job(tiny: str) -> None:
    b = bench(tiny, 16)
    key = b.submit(prompt(20), n=2, max_tokens=30)
    b.run(lambda: b.started(key))
    assert b.engine.cancel(key, 1)
    assert b.engine.cancel(key, 0)
    b.run()
    assert b.ended == [key]
    assert key not in b.done
    b.check_idle()


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    jobs=st.lists(
        st.tuples(st.integers(1, 70), st.integers(1, 3), st.integers(0, 25)), min_size=2, max_size=6
    ),
    pages=st.integers(6, 12),
)
def test_whoever_is_cancelled_whenever_the_others_answer_as_if_alone(
    tiny: str, jobs: list[tuple[int, int, int]], pages: int
) -> None:
    """(prompt length, choices, step of the cancel; 0 for never)."""
    b = bench(tiny, pages, chunk=24)
    keys = [b.submit(prompt(length), n=n, max_tokens=12) for length, n, _ in jobs]
    for step in range(1, 26):
        b.step()
        for key, (_, _, at) in zip(keys, jobs, strict=True):
            if at == step:
                b.engine.cancel(key)
    b.run()
    for key, (length, n, at) in zip(keys, jobs, strict=True):
        if at == 0:
            assert b.outputs[key] == {i: greedy(tiny, prompt(length), 12) for i in range(n)}
    b.check_idle()


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(jobs=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 12)), min_size=2, max_size=5))
def test_a_pair_gives_everything_back_whoever_leaves_whenever(tiny: str, jobs: list[tuple[int, int]]) -> None:
    pair = lab_pair(tiny, prefill_pages=8, decode_pages=10, chunk=24)
    keys = [pair.submit(prompt(length), max_tokens=10) for length, _ in jobs]
    for step in range(1, 13):
        pair.round()
        for key, (_, at) in zip(keys, jobs, strict=True):
            if at == step:
                pair.cancel(key)
        pair.check()
    pair.run()
    for key, (length, at) in zip(keys, jobs, strict=True):
        if at == 0:
            assert pair.answer(key).tokens == greedy(tiny, prompt(length), 10)
        assert pair.answer(key).outcome is not None
    pair.check()
    assert pair.idle()
