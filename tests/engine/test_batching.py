"""Continuous batching: whatever the batch, the chunk, the page size and the mode, a request's tokens are its own."""

from __future__ import annotations

import numpy as np
import pytest
from engine_world import Bench, bench, greedy, lab_pair, prompt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 70, 120]
NEW = 20


def wanted(tiny: str) -> list[list[int]]:
    return [greedy(tiny, prompt(n), NEW) for n in LENGTHS]


@pytest.mark.parametrize("chunk", [1, 7, 16, 48, 512])
def test_a_mixed_batch_gives_the_tokens_of_a_plain_greedy_loop_with_any_chunk(tiny: str, chunk: int) -> None:
    b = bench(tiny, 128, chunk=chunk)
    assert b.ask([prompt(n) for n in LENGTHS], max_tokens=NEW) == wanted(tiny)
    b.check_idle()


@pytest.mark.parametrize("size", [1, 5, 16, 64])
def test_a_mixed_batch_gives_the_tokens_of_a_plain_greedy_loop_with_any_page_size(
    tiny: str, size: int
) -> None:
    some = [1, 17, 33]
    b = bench(tiny, 160, page_size=size, chunk=13, plain=True)
    assert b.ask([prompt(n) for n in some], max_tokens=9) == [greedy(tiny, prompt(n), NEW)[:9] for n in some]
    b.check_idle()


@pytest.mark.parametrize("chunk", [9, 64])
@pytest.mark.parametrize("verify", ["tags", "read"])
def test_a_disaggregated_pair_gives_the_same_tokens_as_one_engine(tiny: str, chunk: int, verify: str) -> None:
    pair = lab_pair(tiny, chunk=chunk, verify=verify)
    keys = [pair.submit(prompt(n), max_tokens=NEW) for n in LENGTHS]
    pair.run()
    assert [pair.answer(k).tokens for k in keys] == wanted(tiny)
    pair.check()
    assert pair.idle()


@pytest.fixture(scope="module")
def shared(tiny: str) -> Bench:
    return bench(tiny, 128, chunk=24, verify="read")


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arrivals=st.lists(st.tuples(st.sampled_from(LENGTHS), st.integers(0, 6)), min_size=1, max_size=10))
def test_requests_may_arrive_in_the_middle_of_others(
    tiny: str, shared: Bench, arrivals: list[tuple[int, int]]
) -> None:
    keys = []
    for length, steps in arrivals:
        keys.append(shared.submit(prompt(length), max_tokens=NEW))
        for _ in range(steps):
            shared.step()
    shared.run()
    assert [shared.outputs[k][0] for k in keys] == [greedy(tiny, prompt(n), NEW) for n, _ in arrivals]
    shared.check_idle()


def test_in_bf16_too_an_answer_does_not_depend_on_batch_or_chunk(tiny: str) -> None:
    prompts = [prompt(n) for n in LENGTHS]
    alone = [bench(tiny, 64, dtype="bf16").ask([p], max_tokens=NEW)[0] for p in prompts[::3]]
    for chunk in (5, 33, 512):
        assert bench(tiny, 128, dtype="bf16", chunk=chunk).ask(prompts, max_tokens=NEW)[::3] == alone
    pair = lab_pair(tiny, dtype="bf16", chunk=40)
    keys = [pair.submit(p, max_tokens=NEW) for p in prompts]
    pair.run()
    assert [pair.answer(k).tokens for k in keys][::3] == alone


def test_two_tenants_with_one_prompt_get_one_answer_and_no_common_page_name(tiny: str) -> None:
    b = bench(tiny)
    one, two = (b.submit(prompt(40), tenant=t) for t in ("a", "b"))
    b.run(lambda: b.started(one) and b.started(two))
    names = [{tuple(x) for x in b.engine.pool.tag_lineage[b.engine.pages(k)].tolist()} for k in (one, two)]
    assert not names[0] & names[1] - {(0, 0)}
    b.run()
    assert b.outputs[one] == b.outputs[two]


def test_reads_are_counted_as_arithmetic_says(tiny: str) -> None:
    """--verify read: layers x KV heads x pages, for every piece of the prompt and every decode step."""
    b = bench(tiny, 16, verify="read", chunk=20)
    b.ask([prompt(50)], max_tokens=6)
    ends = [20, 40, 50, *range(51, 56)]  # rows read in each step: pieces of 20, 20, 10, then one token each
    assert b.engine.counters.steps == len(ends)
    assert b.engine.counters.tiles_verified_read == 3 * 2 * sum(-(-end // 16) for end in ends)
    assert b.engine.counters.sequence_steps_verified_read == len(ends)
    assert b.engine.counters.tag_checks == len(ends)
    assert b.engine.counters.prompt_tokens == 50
    assert b.engine.counters.output_tokens == 6


def test_what_a_page_held_before_does_not_show(tiny: str) -> None:
    clean, dirty = bench(tiny, 8), bench(tiny, 8)
    dirty.engine.pool.memory[:] = np.random.default_rng(0).integers(0, 256, dirty.engine.pool.memory.shape)
    assert clean.ask([prompt(33)]) == dirty.ask([prompt(33)])
