"""Output pages are taken as answers grow; when the pool is dry the youngest gives way, and nobody can tell from its answer."""

from __future__ import annotations

from typing import Any

import pytest
from engine_world import bench, greedy, lab_pair, pages_of, prompt

from hermetic.engine.sequence import Emit, JobDone, JobFailed

DRAWN: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9}


def test_two_requests_of_4_and_3_pages_in_7_that_both_want_one_more_both_end(tiny: str) -> None:
    b = bench(tiny, 7)
    old, young = b.submit(prompt(60), max_tokens=20), b.submit(prompt(44), max_tokens=20)
    b.run(lambda: b.started(old) and b.started(young))
    assert b.engine.pool.free == 0
    b.run()
    assert b.engine.counters.preemptions >= 1
    assert b.outputs[old][0] == greedy(tiny, prompt(60), 20)
    assert b.outputs[young][0] == greedy(tiny, prompt(44), 20)
    # The old one was never stopped: it has one token in every step between its first and its last.
    assert b.ended == [old, young]
    b.check_idle()


@pytest.mark.parametrize("sampling", [{}, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("pages", [6, 9, 14])
def test_many_requests_in_a_tiny_pool_answer_as_if_undisturbed(
    tiny: str, pages: int, sampling: dict[str, Any]
) -> None:
    prompts = [prompt(n, seed=n) for n in (15, 16, 17, 30, 40, 47, 48, 49)]
    undisturbed = bench(tiny, 200).ask(prompts, max_tokens=30, **sampling)
    b = bench(tiny, pages, chunk=32, verify="read")
    assert b.ask(prompts, max_tokens=30, **sampling) == undisturbed
    if pages < 14:
        assert b.engine.counters.preemptions > 0
    b.check_idle()


@pytest.mark.parametrize("sampling", [{}, DRAWN], ids=["greedy", "drawn"])
def test_a_disaggregated_pair_runs_preempted_choices_again_through_the_gateway(
    tiny: str, sampling: dict[str, Any]
) -> None:
    prompts = [prompt(n, seed=n) for n in (15, 16, 30, 40, 47, 48)]
    undisturbed = bench(tiny, 200).ask(prompts, max_tokens=30, **sampling)
    pair = lab_pair(tiny, prefill_pages=12, decode_pages=11)
    keys = [pair.submit(p, max_tokens=30, **sampling) for p in prompts]
    pair.run()
    assert [pair.answer(k).tokens for k in keys] == undisturbed
    assert pair.decode.engine.counters.preemptions > 0
    assert any(pair.answer(k).attempts > 1 for k in keys)
    pair.check()
    assert pair.idle()


def test_every_choice_of_a_preempted_request_goes_on_with_its_own_tokens(tiny: str) -> None:
    undisturbed, b = bench(tiny, 200), bench(tiny, 8)
    keys = []
    for one in (undisturbed, b):
        keys = [one.submit(prompt(20, seed=i), n=3, max_tokens=40, **DRAWN) for i in range(2)]
        one.run()
    assert b.engine.counters.preemptions > 0
    for key in keys:
        assert b.outputs[key] == undisturbed.outputs[key]
        assert len(b.done[key]) == 3
        assert b.ended.count(key) == 1
    b.check_idle()


@pytest.mark.parametrize("limit", [1, 2])
def test_a_choice_without_a_page_of_its_own_keeps_to_its_limit(tiny: str, limit: int) -> None:
    """3 pages: 33 tokens with their next row leave none for the tails of choices 1 and 2."""
    b = bench(tiny, 3)
    key = b.submit(prompt(33), n=3, max_tokens=limit)
    b.run()
    alone = greedy(tiny, prompt(33), limit)
    assert b.outputs[key] == {i: alone for i in range(3)}
    assert {d.reason for d in b.done[key].values()} == {"length"}
    assert len(b.done[key]) == 3
    b.check_idle()


def test_preemption_is_never_shown_as_an_end(tiny: str) -> None:
    b = bench(tiny, 7)
    keys = [b.submit(prompt(n), max_tokens=20) for n in (60, 44)]
    b.run()
    assert b.engine.counters.preemptions
    for key in keys:
        mine = [e for e in b.events if e.key == key]
        assert sum(isinstance(e, Emit) for e in mine) == 20
        assert [type(e) for e in mine if isinstance(e, JobDone | JobFailed)] == [JobDone]
        assert isinstance(mine[-1], JobDone)


def test_the_oldest_is_never_the_one_that_gives_way(tiny: str) -> None:
    b = bench(tiny, 7)
    keys = [b.submit(prompt(20, seed=i), max_tokens=60) for i in range(4)]
    pages = []
    b.run(lambda: b.started(keys[0]))
    while keys[0] not in b.ended:
        b.step()
        if keys[0] not in b.ended:
            pages.append(len(b.engine.pages(keys[0])))
    assert b.engine.counters.preemptions > 0
    assert pages == sorted(pages)  # it only ever grew
    assert pages[-1] == pages_of(20 + 59)
    b.run()
    b.check_idle()
