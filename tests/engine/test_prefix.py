"""Full pages of a common prefix are computed once and read by many, and nobody can tell from an answer.

Twins: the same request with its prefix in pages already, and alone in an engine of its own. The arithmetic of a row does
not depend on how its prompt was cut (docs/design.md), so the two agree bit for bit, in the logits and in what is cached.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_world import Bench, bench, greedy, lab_pair, pages_of, prompt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hermetic.engine.batch import Step
from hermetic.engine.prefix import Leading, PrefixIndex
from hermetic.engine.runner import Result
from hermetic.engine.sequence import First, PagesReady, PromptDone, Started
from hermetic.handoff.messages import Key
from hermetic.kv.geometry import Geometry
from hermetic.kv.lineage import Hasher, Scope, Secret
from hermetic.kv.pool import Kind, Pool

TEXT = prompt(200)


def watch(b: Bench) -> dict[Key, list[torch.Tensor]]:
    """The logits of every row that is sampled from now on, by job, in order."""
    seen: dict[Key, list[torch.Tensor]] = {}
    run = b.engine.runner.run

    def watched(step: Step) -> Result:
        result = run(step)
        owners = [s.job.key for s in step.decode] + [p.seq.job.key for p in step.pieces if p.last]
        for key, row in zip(owners, result.logits, strict=True):
            seen.setdefault(key, []).append(row.clone())
        return result

    b.engine.runner.run = watched  # type: ignore[method-assign]
    return seen


def shared(b: Bench) -> int:
    return b.engine.counters.prefix_pages_shared


def running(b: Bench, tokens: list[int], **options: Any) -> Key:
    """A request that has shown its first token and goes on for long."""
    key = b.submit(tokens, **({"max_tokens": 60} | options))
    b.run(lambda: b.started(key))
    return key


def sent(b: Bench, tokens: list[int], **options: Any) -> tuple[Key, Any]:
    """Prefill: a prompt that is computed; only its send lease holds the pages, as after its last chunk in a handoff."""
    key = b.submit(tokens, **options)
    b.run(lambda: any(isinstance(e, PromptDone) and e.key == key for e in b.events))
    lease = b.engine.pool.lease(Kind.SEND, str(key), b.engine.pages(key))
    b.engine.cancel(key)
    return key, lease


def rows_of(b: Bench, key: Key) -> list[np.ndarray]:
    """The data of a job's full pages."""
    pool, pages = b.engine.pool, b.engine.pages(key)
    full = [p for p in pages.tolist() if pool.tag_fill[p] == b.engine.size]
    return [pool.memory[p].copy() for p in full]


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize("length", [31, 32, 33, 63, 64, 65, 96, 97])
@pytest.mark.parametrize("before", [64, 96, 120], ids=lambda n: f"{n} tokens in pages")
def test_a_prefix_that_is_in_pages_gives_the_bits_of_one_that_is_computed(
    tiny: str, dtype: str, length: int, before: int
) -> None:
    """At k*page-1, k*page, k*page+1, at a full hit, and where what is in pages ends before or after the prompt."""
    with_prefix, alone = bench(tiny, dtype=dtype), bench(tiny, dtype=dtype)
    running(with_prefix, TEXT[:before])
    logits, plain = watch(with_prefix), watch(alone)
    key, twin = with_prefix.submit(TEXT[:length], max_tokens=20), alone.submit(TEXT[:length], max_tokens=20)
    for b, k in ((with_prefix, key), (alone, twin)):
        b.run(lambda b=b, k=k: b.started(k))  # type: ignore[misc]
    assert shared(with_prefix) == min((length - 1) // 16, before // 16)
    assert shared(alone) == 0
    assert with_prefix.engine.counters.prefix_tokens_shared == 16 * shared(with_prefix)
    for ours, theirs in zip(rows_of(with_prefix, key), rows_of(alone, twin), strict=True):
        assert (ours == theirs).all()  # keys, values and seals
    with_prefix.run()
    alone.run()
    assert with_prefix.outputs[key] == alone.outputs[twin]
    assert len(logits[key]) == len(plain[twin]) == 20
    assert all(torch.equal(a, b) for a, b in zip(logits[key], plain[twin], strict=True))
    with_prefix.check_idle()


@pytest.mark.parametrize("chunk", [1, 7, 48])
def test_what_is_left_of_a_prompt_may_be_cut_anywhere(tiny: str, chunk: int) -> None:
    b = bench(tiny, chunk=chunk, verify="read")
    first = running(b, TEXT[:70])
    keys = [b.submit(TEXT[:n] + prompt(9), max_tokens=12) for n in (40, 64, 70)]
    b.run()
    assert shared(b) == 2 + 4 + 4
    for key, n in zip(keys, (40, 64, 70), strict=True):
        assert b.outputs[key][0] == greedy(tiny, TEXT[:n] + prompt(9), 12)
    assert b.outputs[first][0] == greedy(tiny, TEXT[:70], 60)
    b.check_idle()


@pytest.mark.parametrize("verify", ["landing", "read"])
@pytest.mark.parametrize("length", [47, 48, 49, 80, 120])
def test_a_pair_shares_on_its_prefill_side_and_gives_the_tokens_of_one_engine(
    tiny: str, verify: str, length: int
) -> None:
    pair = lab_pair(tiny, chunk=16, verify=verify)
    old = pair.submit(TEXT[:120])
    counters = pair.prefill.engine.counters
    pair.run(lambda: counters.prompt_tokens >= 48)
    young = pair.submit(TEXT[:length])
    pair.run()
    assert counters.prefix_pages_shared > 0
    assert counters.prompt_tokens + counters.prefix_tokens_shared == 120 + length
    assert pair.decode.engine.counters.prefix_pages_shared == 0
    assert pair.answer(old).tokens == greedy(tiny, TEXT[:120], 16)
    assert pair.answer(young).tokens == greedy(tiny, TEXT[:length], 16)
    pair.check()
    assert pair.idle()


def test_pages_that_are_only_being_sent_are_shared_and_are_ready_to_be_sent_again_at_once(tiny: str) -> None:
    b = bench(tiny, role="prefill")
    _, sending = sent(b, TEXT[:70])
    key = b.submit(TEXT[:100])
    events = [e for e in b.step() if e.key == key]
    assert events[:2] == [Started(key), PagesReady(key, 4)]
    assert b.engine.pages(key)[:4].tolist() == sending.pages[:4].tolist()
    b.engine.pool.close(sending)  # the first handoff ends; the second has its own hold
    assert b.engine.pool.counts().leased == pages_of(100)
    b.engine.cancel(key)
    b.check_idle()
    # Nobody holds them any more: this is no cache.
    b.submit(TEXT[:100])
    b.step()
    assert shared(b) == 4


def test_two_prompts_of_one_step_do_not_wait_for_each_other_but_what_earlier_steps_filled_is_shared(
    tiny: str,
) -> None:
    b = bench(tiny, chunk=32)
    keys = [b.submit(TEXT[:80]) for _ in range(2)]
    b.step()
    assert shared(b) == 0
    assert set(b.engine.pages(keys[0]).tolist()).isdisjoint(b.engine.pages(keys[1]).tolist())
    third = b.submit(TEXT[:80])
    b.step()
    assert shared(b) == 2  # what the first step filled of the oldest prompt
    b.run()
    assert all(b.outputs[k][0] == greedy(tiny, TEXT[:80], 8) for k in (*keys, third))
    b.check_idle()


@pytest.mark.parametrize(
    "differs", ["tenant", "salt", "model", "numeric", "adapter", "layout", "position", "key_id"]
)
def test_another_scope_shares_nothing(tiny: str, differs: str) -> None:
    b = bench(tiny)
    fields = dict.fromkeys(Scope.__struct_fields__, "same")
    roots = [b.engine._hasher.root(Scope(**(fields | {differs: text}))) for text in ("same", "other", "same")]
    keys = []
    for root in roots:
        job = b.job(TEXT[:70], max_tokens=30)
        keys.append(b.give(type(job)(**(vars(job) | {"root": root}))))
        b.run(lambda: b.started(keys[-1]))
    tables = [set(b.engine.pages(key).tolist()) for key in keys]
    assert not tables[0] & tables[1]
    assert len(tables[0] & tables[2]) == 4
    assert shared(b) == 4
    b.run()
    assert b.outputs[keys[0]] == b.outputs[keys[1]] == b.outputs[keys[2]]


def test_the_same_tokens_behind_another_beginning_are_not_shared(tiny: str) -> None:
    b = bench(tiny)
    running(b, TEXT[:70])
    key = b.submit([TEXT[0] ^ 1, *TEXT[1:70]])
    b.run()
    assert shared(b) == 0
    assert b.outputs[key][0] == greedy(tiny, [TEXT[0] ^ 1, *TEXT[1:70]], 8)


def test_pages_that_a_decode_step_wrote_are_not_offered(tiny: str) -> None:
    """The two attention kernels may differ in a row's last bits: an answer would depend on who was there before."""
    b = bench(tiny)
    old = b.submit(TEXT[:20], max_tokens=100)
    b.run(lambda: len(b.outputs.get(old, {0: []})[0]) > 60)
    text = TEXT[:20] + b.outputs[old][0][:50]
    key = b.submit(text)
    b.run()
    assert shared(b) == 1
    assert b.outputs[key][0] == greedy(tiny, text, 8)


def test_a_preempted_choice_shares_the_prompt_with_those_that_run_on(tiny: str) -> None:
    b = bench(tiny, 11)
    old, other = running(b, TEXT[:50], max_tokens=100), running(b, prompt(60, seed=3), max_tokens=20)
    young = running(b, TEXT[:50], max_tokens=30)
    assert shared(b) == 3
    b.run(lambda: b.engine.counters.preemptions > 0)
    b.run()  # the other one ends and makes room, the oldest still runs
    assert shared(b) == 6
    assert b.engine.counters.preemptions == 1
    assert b.outputs[old][0] == greedy(tiny, TEXT[:50], 100)
    assert b.outputs[young][0] == greedy(tiny, TEXT[:50], 30)
    assert b.outputs[other][0] == greedy(tiny, prompt(60, seed=3), 20)
    b.check_idle()


def test_only_what_is_not_shared_is_asked_of_the_pool(tiny: str) -> None:
    """8 pages: 6 are held. A prompt of 6 pages has 5 of them, and one page of headroom is left for who runs."""
    b = bench(tiny, 8)
    old = running(b, TEXT[:90], max_tokens=6)
    keys = [b.submit(TEXT[:85] + tail, max_tokens=6) for tail in ([1], [2])]
    b.step()
    assert b.engine.pool.counts().leased == 6 + 1
    assert b.engine.depth()["waiting"] == 1
    b.run()
    assert b.outputs[old][0] == greedy(tiny, TEXT[:90], 6)
    for key, tail in zip(keys, ([1], [2]), strict=True):
        assert b.outputs[key][0] == greedy(tiny, TEXT[:85] + tail, 6)
    b.check_idle()


def test_a_waiting_prompt_is_tried_again_when_there_is_more_to_share(tiny: str) -> None:
    """Nothing is freed: only because its prefix is in pages now does it fit."""
    b = bench(tiny, 8, role="prefill")
    sent(b, prompt(16))
    old, young = b.submit(TEXT[:80]), b.submit(TEXT[:80])
    b.step()
    assert b.engine.depth()["waiting"] == 1
    b.engine.pool.lease(Kind.SEND, str(old), b.engine.pages(old))
    b.engine.cancel(old)
    assert b.engine.pool.free == 2
    assert b.engine.busy
    assert Started(young) in b.step()
    assert shared(b) == 4


def test_who_holds_a_bad_shared_page_fails_and_everybody_else_goes_on(tiny: str) -> None:
    b = bench(tiny, verify="read")
    old = running(b, TEXT[:70])
    young = [running(b, TEXT[:n]) for n in (40, 64)]
    aside = [running(b, TEXT[:20]), running(b, prompt(40, seed=3))]  # one shares page 0 and not page 1
    waiting = b.submit(TEXT[:60], max_tokens=12)  # will be placed in the step that finds it
    assert shared(b) == 2 + 3 + 1
    bad = int(b.engine.pages(old)[1])
    b.engine.pool.memory[bad, 99] ^= 1
    events = b.step()
    assert set(b.failed) == {old, *young, waiting}
    assert {f.code for f in b.failed.values()} == {"kv_integrity"}
    assert {e.key for e in events} == {old, *young, waiting, *aside}
    assert b.engine.pool.counts().quarantined == 1
    again = b.submit(TEXT[:70], max_tokens=12)
    b.run()
    assert shared(b) == 6 + 3  # what was placed in that step; nothing of a failed request since
    assert b.outputs[again][0] == greedy(tiny, TEXT[:70], 12)
    assert b.outputs[aside[0]][0] == greedy(tiny, TEXT[:20], 60)
    assert b.outputs[aside[1]][0] == greedy(tiny, prompt(40, seed=3), 60)
    b.check_idle()


def test_pages_of_a_failed_request_are_offered_to_nobody_though_others_hold_them_still(tiny: str) -> None:
    b = bench(tiny, verify="read")
    lost = running(b, TEXT[:70])
    kept = running(b, TEXT[:40])
    b.engine.pool.memory[int(b.engine.pages(lost)[3]), 99] ^= 1
    b.step()
    assert set(b.failed) == {lost}
    before = shared(b)
    late = running(b, TEXT[:40])
    assert shared(b) == before
    last = running(b, TEXT[:40])
    assert shared(b) == before + 2  # of the one that computed them anew
    b.run()
    assert all(b.outputs[k][0] == greedy(tiny, TEXT[:40], 60) for k in (kept, late, last))
    b.check_idle()


def test_pages_that_a_worker_withholds_are_offered_to_nobody(tiny: str) -> None:
    """A handoff failed its verification: the engine has forgotten the job, its send lease is still open."""
    b = bench(tiny, role="prefill")
    _, sending = sent(b, TEXT[:70])
    b.engine.withhold(sending.pages)
    b.submit(TEXT[:70])
    b.step()
    assert shared(b) == 0


def test_a_quarantined_page_ends_the_prefix_that_can_be_shared(tiny: str) -> None:
    b = bench(tiny, role="prefill")
    _, sending = sent(b, TEXT[:70])
    b.engine.pool.quarantine(sending.pages[2:3])
    b.submit(TEXT[:70])
    b.step()
    assert shared(b) == 2


def test_decode_reserves_every_page_for_landing_though_the_same_prefix_has_landed_before(tiny: str) -> None:
    b = bench(tiny, role="decode")
    old = b.submit(TEXT[:40])
    b.step()
    seq = b.engine.reserved(old)
    b.engine.pool.set_tags(seq.pages[:2], seq.chain.lineages[:2], np.full(2, 16, np.int32))
    b.engine.pool.set_tags(seq.pages[2:3], seq.chain.lineages[2:3], np.full(1, 8, np.int32))
    b.engine.enter(old, (First(1, None, None),))
    b.engine._prefixes.note(seq.pages[:2], seq.chain.lineages[:2])  # even if they were offered
    young = b.submit(TEXT[:40])
    b.step()
    assert set(b.engine.pages(old).tolist()).isdisjoint(b.engine.pages(young).tolist())
    assert b.engine.pool.holds(Kind.RECEIVE) == pages_of(41)
    assert shared(b) == 0


PROMPTS = [TEXT[:n] for n in (15, 32, 33, 64, 80)] + [TEXT[:32] + prompt(20), TEXT[:16] + prompt(40)]


@pytest.fixture(scope="module")
def crowded(tiny: str) -> Bench:
    return bench(tiny, 14, chunk=24, verify="read")


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(1, 2), st.integers(0, 5), st.booleans()),
        min_size=2,
        max_size=12,
    )
)
def test_requests_with_common_prefixes_come_go_and_are_cancelled_and_the_rest_answer_as_if_alone(
    tiny: str, crowded: Bench, arrivals: list[tuple[int, int, int, bool]]
) -> None:
    b = crowded
    kept: dict[Key, tuple[int, int]] = {}
    gone: list[Key] = []
    for which, n, steps, cancelled in arrivals:
        key = b.submit(PROMPTS[which], n=n, max_tokens=12)
        if cancelled:
            gone.append(key)
        else:
            kept[key] = which, n
        for _ in range(steps):
            b.step()
        if len(gone) > 1:
            b.engine.cancel(gone.pop(0))
    for key in gone:
        b.engine.cancel(key)
    b.run()
    assert not b.failed
    for key, (which, n) in kept.items():
        assert b.outputs[key] == {i: greedy(tiny, PROMPTS[which], 12) for i in range(n)}
    b.check_idle()


# ------------------------------------------------------------------- the index alone

HASHER, ROOT = Hasher(Secret(bytes(32))), bytes(24)
GEOMETRY = Geometry.attention(4, 1, 1, 4, "bf16")
WORDS = np.arange(40, dtype=np.int64)


class Shelf:
    """A pool whose pages hold prefixes of WORDS, four tokens each, and an index over them."""

    def __init__(self, count: int = 12) -> None:
        self.pool = Pool(GEOMETRY, count)
        self.index = PrefixIndex(self.pool)

    def put(self, number: int) -> Any:
        """A request that computed the first `number` pages."""
        lease = self.pool.allocate(number, "writer")
        digest, names = ROOT, []
        for i in range(number):
            digest = HASHER.page(digest, WORDS[4 * i : 4 * i + 4])
            names.append(np.frombuffer(digest, np.uint64, 2))
        lineages = np.array(names).reshape(-1, 2)
        self.pool.set_tags(lease.pages, lineages, np.full(number, 4, np.int32))
        reading = self.pool.lease(Kind.READ, "writer", lease.pages)
        self.pool.close(lease)
        self.index.note(reading.pages, lineages)
        return reading

    def find(self, tokens: int) -> list[int]:
        return self.index.find(Leading(HASHER, ROOT, WORDS[:tokens], 4)).tolist()


@pytest.mark.parametrize(
    ("tokens", "pages"), [(1, 0), (3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3), (40, 3)]
)
def test_the_last_token_is_never_covered(tokens: int, pages: int) -> None:
    shelf = Shelf()
    held = shelf.put(3)
    assert shelf.find(tokens) == held.pages[:pages].tolist()


def test_of_two_requests_with_one_prefix_either_may_go_first() -> None:
    for first in (0, 1):
        shelf = Shelf()
        both = [shelf.put(3), shelf.put(3)]
        shelf.pool.close(both[first])
        assert shelf.find(13) == both[1 - first].pages.tolist()
        shelf.pool.close(both[1 - first])
        assert shelf.find(13) == []
        assert len(shelf.index) == 0  # looking removed what was stale


def test_a_page_that_was_taken_again_is_not_taken_for_what_it_held() -> None:
    shelf = Shelf(3)
    shelf.pool.close(shelf.put(3))
    again = shelf.pool.allocate(3, "somebody else")
    assert shelf.find(13) == []
    shelf.pool.set_tags(again.pages, np.full((3, 2), 7, np.uint64), np.full(3, 4, np.int32))
    assert shelf.find(13) == []


def test_a_page_that_a_row_may_still_be_added_to_is_not_offered() -> None:
    shelf = Shelf(4)
    held = shelf.put(2)
    shelf.pool.tag_fill[held.pages[1]] = 3
    assert shelf.find(9) == held.pages[:1].tolist()


def test_the_index_has_at_most_one_entry_a_page_however_often_pages_change_hands() -> None:
    shelf = Shelf(5)
    for number in (1, 3, 5, 2, 4, 5):
        shelf.pool.close(shelf.put(number))
        assert len(shelf.index) <= 5
    held = shelf.put(5)
    assert len(shelf.index) == 5
    assert shelf.find(40) == held.pages.tolist()
