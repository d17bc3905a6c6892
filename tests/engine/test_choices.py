"""n > 1: choices share the prompt's full pages under leases and copy the page that they extend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_world import bench, greedy, lab_pair, pages_of, prompt

from hermetic.kv.pool import Kind

DRAWN: dict[str, Any] = {"temperature": 1.0}


@pytest.mark.parametrize("length", [5, 16, 17, 31, 32, 40])
def test_full_prompt_pages_are_shared_and_each_choice_has_its_own_tail(tiny: str, length: int) -> None:
    n, b = 4, bench(tiny, 64)
    key = b.submit(prompt(length), n=n, max_tokens=40, **DRAWN)
    b.run(lambda: b.started(key))
    # By hand: the prompt's full pages once, and for each choice the page of its next row.
    shared = length // 16
    assert b.engine.pool.counts().leased == shared + (n if length % 16 else 1)
    b.step()  # now every choice has written its first own row
    assert b.engine.pool.counts().leased == shared + n
    tables = [s.pages.tolist() for s in b.engine._live[key]]
    assert all(t[:shared] == tables[0][:shared] for t in tables)
    assert len({t[shared] for t in tables}) == n
    held = b.engine.pool._holds[Kind.READ][np.array(tables[0][:shared], np.int32)]
    assert held.tolist() == [n] * shared
    b.run()
    assert b.engine.counters.forks == n - 1
    b.check_idle()


@pytest.mark.parametrize("length", [5, 16, 40])
@pytest.mark.parametrize("verify", ["tags", "read"])
def test_choices_are_what_separate_requests_with_their_seeds_would_be(
    tiny: str, length: int, verify: str
) -> None:
    b = bench(tiny, 64, verify=verify)
    key = b.submit(prompt(length), n=3, seed=100, max_tokens=20, **DRAWN)
    b.run()
    alone = [b.ask([prompt(length)], seed=100 + i, max_tokens=20, **DRAWN)[0] for i in range(3)]
    assert [b.outputs[key][i] for i in range(3)] == alone
    assert len({tuple(a) for a in alone}) == 3
    b.check_idle()


def test_choices_of_a_pair_are_those_of_one_engine(tiny: str) -> None:
    b, pair = bench(tiny, 64), lab_pair(tiny)
    for length in (5, 16, 40):
        key = b.submit(prompt(length), n=3, max_tokens=20, **DRAWN)
        b.run()
        answer = pair.ask(prompt(length), n=3, max_tokens=20, temperature=1.0)
        assert answer.outputs == b.outputs[key]
    pair.check()
    assert pair.idle()


def test_a_choice_that_ends_early_leaves_the_others_their_pages(tiny: str) -> None:
    b = bench(tiny, 64)
    key = b.submit(prompt(40), n=3, max_tokens=30, **DRAWN)
    b.run(lambda: b.started(key))
    assert b.engine.cancel(key, 0)
    b.run()
    alone = [b.ask([prompt(40)], seed=7 + i, max_tokens=30, **DRAWN)[0] for i in (1, 2)]
    assert [b.outputs[key][i] for i in (1, 2)] == alone
    assert set(b.done[key]) == {1, 2}
    assert b.ended.count(key) == 1
    b.check_idle()


def test_a_shared_page_is_never_written(tiny: str) -> None:
    b = bench(tiny, 64)
    key = b.submit(prompt(40), n=3, max_tokens=20, **DRAWN)
    b.run(lambda: b.started(key))
    pages = next(iter(b.engine._live[key])).pages[:2]
    before = b.engine.pool.memory[pages].copy()
    b.run()
    assert (b.engine.pool.memory[pages] == before).all()


def test_a_tail_that_was_changed_is_not_copied_into_a_choice(tiny: str) -> None:
    """A fork reads back, so it verifies first: the job fails instead of sealing somebody else's bytes anew."""
    b = bench(tiny, 64)
    kernels = b.engine.runner.kernels
    real = kernels.verify_pages

    def after_a_stray_write(memory: np.ndarray, pages: np.ndarray, *rest: Any) -> np.ndarray:
        b.engine.pool.geometry.rows(memory, "v")[int(pages[0]), 1, 0, 2, 3] += 1
        return real(memory, pages, *rest)

    kernels.verify_pages = after_a_stray_write  # type: ignore[method-assign]
    other = b.submit(prompt(30))
    key = b.submit(prompt(40), n=2, max_tokens=20)
    b.run()
    assert b.failed[key].code == "kv_integrity"
    assert b.outputs[other][0] == greedy(tiny, prompt(30), 8)
    b.check_idle()


def test_more_choices_than_rows_are_refused_and_as_many_are_served(tiny: str) -> None:
    b = bench(tiny, 64, max_batch=4)
    refusal = b.refusal(prompt(10), n=5)
    assert refusal is not None
    assert "5" in refusal.reason
    assert "4" in refusal.reason
    key = b.submit(prompt(10), n=4)
    other = b.submit(prompt(10), n=2)
    b.run()
    assert len(b.done[key]) == 4
    assert len(b.done[other]) == 2
    assert pages_of(10 + 8) * 4 <= 64
    b.check_idle()
