"""What a fault takes down: exactly the jobs it concerns, in the step in which it shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_world import Bench, bench, greedy, prompt

from hermetic.engine.sequence import Emit
from hermetic.handoff.messages import Key
from hermetic.kv.pool import Kind


def running(b: Bench, *jobs: tuple[int, int]) -> list[Key]:
    """Jobs (prompt length, n) that have each shown a first token."""
    keys = [b.submit(prompt(length), n=n, max_tokens=12) for length, n in jobs]
    b.run(lambda: all(b.started(k) for k in keys))
    return keys


def others_are_right(tiny: str, b: Bench, jobs: dict[Key, tuple[int, int]]) -> None:
    for key, (length, n) in jobs.items():
        assert b.outputs[key] == {i: greedy(tiny, prompt(length), 12) for i in range(n)}


def poison(b: Bench, positions: set[int], length: int) -> None:
    """From now on, a logits row of a sequence at one of these positions is NaN, if its prompt has this length."""
    forward = b.engine.runner.model.forward

    class Poisoned:
        config = b.engine.runner.model.config

        def forward(self, tokens: torch.Tensor, at: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
            logits, rows = forward(tokens, at, *rest, **options), rest[1]
            for i, row in enumerate(rows.tolist()):
                if int(at[row]) in positions:
                    logits[i] = float("nan")
            return logits

    b.engine.runner.model = Poisoned()  # type: ignore[assignment]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_an_output_that_is_no_number_fails_its_own_request_only(tiny: str, n: int) -> None:
    """While others decode and a prompt with several choices ends in the same step, sharing one row of the logits."""
    b = bench(tiny, 64)
    lost, kept = running(b, (30, 1), (17, 1))
    late = b.submit(prompt(40), n=n, max_tokens=12)
    poison(b, {30}, 30)  # the row that `lost` computes in this very step
    b.step()
    assert set(b.failed) == {lost}
    assert b.failed[lost].code == "numerical_error"
    assert b.started(late)
    b.run()
    others_are_right(tiny, b, {kept: (17, 1), late: (40, n)})
    b.check_idle()


def test_a_prompt_whose_output_is_no_number_fails_before_it_says_anything(tiny: str) -> None:
    b = bench(tiny, 64)
    (kept,) = running(b, (17, 2))
    poison(b, {39}, 40)
    lost = b.submit(prompt(40), n=2)
    b.run()
    assert b.failed[lost].code == "numerical_error"
    assert lost not in b.outputs
    others_are_right(tiny, b, {kept: (17, 2)})
    b.check_idle()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_after_a_bad_read_nobody_is_given_another_rows_logits(tiny: str, n: int) -> None:
    b = bench(tiny, 64, verify="read")
    lost, kept = running(b, (30, 1), (17, 1))
    late = b.submit(prompt(40), n=n, max_tokens=12)
    b.engine.pool.memory[b.engine.pages(lost)[0], 5] ^= 1
    b.step()
    assert set(b.failed) == {lost}
    b.run()
    others_are_right(tiny, b, {kept: (17, 1), late: (40, n)})
    b.check_idle()


@pytest.mark.parametrize(
    "harm", ["another lineage", "no tag", "fewer rows", "nobody holds it", "no such page"]
)
def test_a_page_table_that_does_not_hold_what_it_should_fails_that_request_in_that_step(
    tiny: str, harm: str
) -> None:
    b = bench(tiny, 64)
    keys = running(b, (40, 1), (33, 2), (20, 1))
    lost, pool = keys[0], b.engine.pool
    (seq,) = b.engine._live[lost]
    page = int(seq.pages[1])
    match harm:
        case "another lineage":
            b.engine.rows.table[seq.row, 1] = b.engine.pages(keys[2])[0]
        case "no tag":
            pool.tag_fill[page] = 0
        case "fewer rows":
            pool.tag_fill[page] = 15
        case "nobody holds it":
            b.engine.rows.table[seq.row, 1] = pool._free[0]
        case "no such page":
            b.engine.rows.table[seq.row, 1] = 999
    before = {k: len(b.outputs[k][0]) for k in keys}
    events = b.step()
    assert set(b.failed) == {lost}
    assert b.failed[lost].code == "kv_integrity"
    assert harm.split()[-1] in b.failed[lost].reason or "filled" in b.failed[lost].reason
    assert {e.key for e in events if isinstance(e, Emit)} == set(keys[1:])
    assert len(b.outputs[lost][0]) == before[lost]
    assert b.engine.counters.kv_integrity_failures == 1
    b.run()
    others_are_right(tiny, b, {keys[1]: (33, 2), keys[2]: (20, 1)})
    b.check_idle()


def test_a_prompt_in_pieces_is_checked_before_each_piece(tiny: str) -> None:
    b = bench(tiny, 64, chunk=16)
    (kept,) = running(b, (10, 1))
    lost = b.submit(prompt(60))
    b.step()
    b.step()
    pages = b.engine.pages(lost)
    assert b.engine.pool.tag_fill[pages[0]] == 16
    b.engine.pool.tag_lineage[pages[0]] += 1
    b.run()
    assert b.failed[lost].code == "kv_integrity"
    assert lost not in b.outputs
    others_are_right(tiny, b, {kept: (10, 1)})
    b.check_idle()


@pytest.mark.parametrize("page", [0, 1, 2])
def test_a_bad_read_ends_exactly_the_jobs_whose_tables_hold_the_page_and_quarantines_it(
    tiny: str, page: int
) -> None:
    b = bench(tiny, 64, verify="read")
    keys = running(b, (40, 3), (40, 1), (20, 2))
    lost = keys[0]
    choices = sorted(b.engine._live[lost], key=lambda s: s.choice)
    bad = int(choices[1].pages[page])
    b.engine.pool.memory[bad, 17] ^= 64
    before = {i: list(o) for i, o in b.outputs[lost].items()}
    b.step()
    assert set(b.failed) == {lost}
    assert b.outputs[lost] == before  # nothing of the step that read it came out
    pool = b.engine.pool
    assert pool.counts().quarantined == 1
    assert pool._quarantined[bad]
    assert pool.tag_fill[bad] == 0
    assert pool.counters.quarantined_total == 1
    b.run()
    others_are_right(tiny, b, {keys[1]: (40, 1), keys[2]: (20, 2)})
    b.check_idle()
    assert pool.free == 63
    assert bad not in pool.allocate(63, "everything that is left").pages


def test_a_page_that_two_jobs_hold_takes_both_down_and_nobody_else(tiny: str) -> None:
    """A table that names another job's page without a lease on it; pages shared under leases are in test_prefix."""
    b = bench(tiny, 64, verify="read")
    one, two, three = running(b, (40, 1), (40, 1), (20, 1))
    (a,), (c,) = b.engine._live[one], b.engine._live[two]
    c.pages[0] = a.pages[0]
    b.engine.rows.table[c.row, 0] = a.pages[0]  # same tenant, same tokens: the same lineage
    b.step()
    assert not b.failed
    b.engine.pool.memory[int(a.pages[0]), 99] ^= 1
    b.step()
    assert set(b.failed) == {one, two}
    b.run()
    others_are_right(tiny, b, {three: (20, 1)})


def test_a_job_that_holds_the_bad_page_fails_also_when_it_did_not_read_it_in_that_step(tiny: str) -> None:
    b = bench(tiny, 64, verify="read", chunk=16)
    reads, kept = running(b, (40, 1), (20, 1))
    first, waits = b.submit(prompt(80)), b.submit(prompt(70))
    b.step()
    (a,), (w,) = b.engine._live[reads], b.engine._live[waits]
    assert w.computed == 0  # the chunk is spent on the older prompt
    w.pages[0] = a.pages[1]
    b.engine.pool.memory[int(a.pages[1]), 40] ^= 1
    b.step()
    assert set(b.failed) == {reads, waits}
    b.run()
    others_are_right(tiny, b, {kept: (20, 1)})
    assert b.outputs[first][0] == greedy(tiny, prompt(80), 8)


def test_without_reads_verified_the_tags_are_still_checked_but_a_flipped_bit_is_not_seen(tiny: str) -> None:
    b = bench(tiny, 64, verify="landing")
    (key,) = running(b, (40, 1))
    b.engine.pool.memory[b.engine.pages(key)[0], 17] ^= 64
    b.run()
    assert key in b.ended
    assert b.engine.counters.tiles_verified_read == 0
    assert b.engine.counters.tag_checks == b.engine.counters.steps


def test_a_row_is_never_written_into_a_page_that_is_not_its_owners_alone(tiny: str) -> None:
    b = bench(tiny, 64)
    table, sent, kept = running(b, (40, 1), (20, 1), (33, 1))
    (a,), (c,) = b.engine._live[table], b.engine._live[sent]
    victim = int(b.engine.pages(kept)[2])
    b.engine.rows.table[a.row, 2] = victim  # the table names a page of somebody else
    b.engine.pool.lease(Kind.SEND, "somebody", c.pages[1:2])  # the page is frozen: it is being sent
    before = b.engine.pool.memory.copy()
    b.step()
    assert set(b.failed) == {table, sent}
    assert {f.code for f in b.failed.values()} == {"kv_integrity"}
    changed = np.flatnonzero((b.engine.pool.memory != before).any(1))
    assert changed.tolist() == [victim]  # by its owner
    b.run()
    others_are_right(tiny, b, {kept: (33, 1)})


@pytest.mark.parametrize("harm", ["sent", "out of order"])
def test_a_fresh_page_that_is_not_writable_fails_its_request_before_the_step(tiny: str, harm: str) -> None:
    """The next row starts a page, so no tag check sees it."""
    b = bench(tiny, 64)
    (key,) = running(b, (32, 1))
    (seq,) = b.engine._live[key]
    if harm == "sent":
        b.engine.pool.lease(Kind.SEND, "somebody", seq.pages[2:3])
    else:
        b.engine.pool.tag_fill[seq.pages[2]] = 5
    memory = b.engine.pool.memory[seq.pages[2]].copy()
    b.step()
    assert b.failed[key].code == "kv_integrity"
    assert (b.engine.pool.memory[seq.pages[2]] == memory).all()
