"""Pools and slots that are just too small: everybody ends with the tokens of an undisturbed run, and nothing stays held."""

from __future__ import annotations

import pytest
from engine_world import bench, greedy, lab_pair, prompt


def test_two_requests_of_4_and_3_pages_in_a_pool_of_7_that_both_want_one_more(tiny: str) -> None:
    b = bench(tiny, 7)
    keys = [b.submit(prompt(n), max_tokens=20) for n in (60, 44)]
    b.run(lambda: all(b.started(k) for k in keys))
    assert b.engine.pool.free == 0
    b.run()
    assert [b.outputs[k][0] for k in keys] == [greedy(tiny, prompt(n), 20) for n in (60, 44)]
    assert b.engine.counters.preemptions > 0
    b.check_idle()


@pytest.mark.parametrize("prefill_pages", [7, 64])
@pytest.mark.parametrize("slots", [1, 64])
def test_the_same_on_the_decode_side_of_a_pair(tiny: str, prefill_pages: int, slots: int) -> None:
    pair = lab_pair(tiny, prefill_pages=prefill_pages, decode_pages=7, slots=slots)
    keys = [pair.submit(prompt(n), max_tokens=20) for n in (60, 44)]
    pair.run()
    assert [pair.answer(k).tokens for k in keys] == [greedy(tiny, prompt(n), 20) for n in (60, 44)]
    assert pair.decode.engine.counters.preemptions > 0
    pair.check()
    assert pair.idle()


@pytest.mark.parametrize("common", [False, True], ids=["apart", "common prefix"])
def test_one_landing_slot_for_ten_requests(tiny: str, common: bool) -> None:
    lengths = [1, 15, 16, 17, 33, 48, 64, 65, 70, 100]
    prompts = [prompt(100)[:n] if common else prompt(n) for n in lengths]
    pair = lab_pair(tiny, slots=1, chunk=16, decode_pages=80)
    assert pair.decode.stats()["slots_total"] == 1
    keys = [pair.submit(tokens, max_tokens=8) for tokens in prompts]
    pair.run()
    assert [pair.answer(k).tokens for k in keys] == [greedy(tiny, tokens, 8) for tokens in prompts]
    pair.check()
    assert pair.idle()


@pytest.mark.parametrize(("length", "outputs"), [(111, 1), (97, 15), (96, 16), (80, 32)])
def test_a_prompt_that_needs_every_page_there_is_ends_between_others_that_want_some(
    tiny: str, length: int, outputs: int
) -> None:
    """7 pages are 112 tokens. The long one waits for the first to end; the last, behind it, waits for the long one or
    goes before."""
    wanted = [(20, 6), (length, outputs), (40, 6)]
    b = bench(tiny, 7)
    keys = [b.submit(prompt(n), max_tokens=m) for n, m in wanted]
    b.run()
    assert [b.outputs[k][0] for k in keys] == [greedy(tiny, prompt(n), m) for n, m in wanted]
    b.check_idle()
    pair = lab_pair(tiny, prefill_pages=7, decode_pages=7, chunk=32)
    asked = [pair.submit(prompt(n), max_tokens=m) for n, m in wanted]
    pair.run()
    assert [pair.answer(k).tokens for k in asked] == [greedy(tiny, prompt(n), m) for n, m in wanted]
    pair.check()
    assert pair.idle()


def test_one_token_more_than_every_page_holds_is_refused_at_the_door(tiny: str) -> None:
    refused = bench(tiny, 7).refusal(prompt(112), max_tokens=1)
    assert refused is not None
    assert refused.code == "context_length_exceeded"
    pair = lab_pair(tiny, prefill_pages=7, decode_pages=7)
    ended = pair.ask(prompt(112), max_tokens=1).outcome
    assert ended is not None
    assert getattr(ended, "code", "") == "context_length_exceeded"
    assert pair.idle()
