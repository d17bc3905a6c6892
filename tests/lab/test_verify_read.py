"""`--verify read`: a bit that flips anywhere in a live page, at any time, is found in the very next step."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hermetic.engine.sequence import Phase, Sequence
from hermetic.handoff.messages import Key
from hermetic.handoff.outcome import Completed, Failed
from hermetic.lab.pair import LabPair
from hermetic.lab.scene import CHUNK, SIZE, make_pair
from hermetic.worker.core import Worker

LAYERS, KV_HEADS, ROW_BYTES = 3, 2, 32  # of the tiny model: 16 elements of bf16
PROMPTS = (70, 41, 90)
OUTPUTS = 20


def tokens(number: int) -> list[int]:
    return np.random.default_rng(number).integers(1, 500, PROMPTS[number]).tolist()


def tiles(rows: int) -> int:
    """Tiles that one read of so many rows compares: one for every layer, KV head and page."""
    return LAYERS * KV_HEADS * math.ceil(rows / SIZE)


def prefill_tiles(prompt: int, chunks: int | None = None) -> int:
    """Over a prompt computed alone, CHUNK tokens a step: each chunk reads all rows up to its own end."""
    ends = [min(end, prompt) for end in range(CHUNK, prompt + CHUNK, CHUNK)]
    return sum(tiles(end) for end in ends[:chunks])


def decode_tiles(prompt: int, steps: int) -> int:
    """The first token comes from prefill; step i writes row prompt+i-1 and reads prompt+i rows."""
    return sum(tiles(prompt + i) for i in range(1, steps + 1))


@dataclass
class Flip:
    """Where one bit flips: the row of this position, in this layer, head, component, byte and bit."""

    position: int
    layer: int
    head: int
    component: int
    bit: int

    def hit(self, worker: Worker, seq: Sequence) -> None:
        pool = worker.engine.pool
        page, row = divmod(self.position, SIZE)
        at = pool.geometry.offset(self.layer, self.head, self.component, row) + self.bit // 8
        pool.memory[seq.pages[page], at] ^= 1 << self.bit % 8


def flips(computed: int) -> st.SearchStrategy[Flip]:
    return st.builds(
        Flip,
        st.integers(0, computed - 1),
        st.integers(0, LAYERS - 1),
        st.integers(0, KV_HEADS - 1),
        st.integers(0, 1),
        st.integers(0, 8 * ROW_BYTES - 1),
    )


def sequence(worker: Worker, key: Key, phase: Phase) -> Sequence | None:
    return next((s for s in worker.engine._live.get(key, ()) if s.phase is phase), None)


def enter(pair: LabPair, number: int) -> Key:
    """Submit a prompt and let prefill compute it before the next one comes, so that its chunks are known."""
    key = pair.submit(tokens(number), f"tenant {number}", max_tokens=OUTPUTS)
    pair.run(lambda: bool(pair.answer(key).tokens))
    return key


@functools.cache
def undisturbed() -> tuple[tuple[int, ...], ...]:
    """The three answers, computed together and without any verification at the read."""
    pair = make_pair("landing", prefill_pages=32, decode_pages=32)
    keys = [pair.submit(tokens(i), f"tenant {i}", max_tokens=OUTPUTS) for i in range(len(PROMPTS))]
    pair.run()
    return tuple(tuple(pair.answer(k).tokens) for k in keys)


def check_the_others(pair: LabPair, keys: list[Key], reader: int) -> None:
    for number, key in enumerate(keys):
        if number != reader:
            assert isinstance(pair.answer(key).outcome, Completed)
            assert tuple(pair.answer(key).tokens) == undisturbed()[number]
    pair.check()
    assert pair.idle()


def fresh() -> LabPair:
    return make_pair("read", prefill_pages=32, decode_pages=32)


def test_when_nothing_flips_every_tile_of_every_read_is_compared_and_all_verify() -> None:
    pair = fresh()
    keys = [enter(pair, number) for number in range(len(PROMPTS))]
    pair.run()
    check_the_others(pair, keys, reader=-1)
    prefill, decode = pair.prefill.engine.counters, pair.decode.engine.counters
    assert prefill.tiles_verified_read == sum(prefill_tiles(p) for p in PROMPTS)
    assert decode.tiles_verified_read == sum(decode_tiles(p, OUTPUTS - 1) for p in PROMPTS)
    assert pair.decode.landing.tiles_verified_landing == sum(tiles(p) for p in PROMPTS)
    assert prefill.sequence_steps_verified_read == sum(math.ceil(p / CHUNK) for p in PROMPTS)
    assert decode.sequence_steps_verified_read == len(PROMPTS) * (OUTPUTS - 1)


@settings(max_examples=25)
@given(st.data())
def test_a_bit_that_flips_in_decodes_pool_fails_its_request_in_that_very_step_and_no_other(
    data: st.DataObject,
) -> None:
    pair = fresh()
    reader = data.draw(st.integers(0, len(PROMPTS) - 1), "request")
    when = data.draw(st.integers(1, OUTPUTS - 2), "after tokens")
    keys: list[Key] = []
    for number in range(len(PROMPTS)):
        keys.append(enter(pair, number))
        if number == reader:
            answer = pair.answer(keys[reader])
            pair.run(lambda answer=answer: len(answer.tokens) >= when)
            seq = sequence(pair.decode, keys[reader], Phase.RUNNING)
            assert seq is not None
            steps = len(answer.tokens)  # the first token cost no step here, so the next step has this number
            data.draw(flips(seq.computed), "flip").hit(pair.decode, seq)
            before = pair.decode.engine.counters.steps
            pair.decode.tick()
            pair.pump()
            assert pair.decode.engine.counters.steps == before + 1
            assert isinstance(answer.failure, Failed)
            assert answer.failure.code == "kv_integrity"
            assert len(answer.tokens) == steps
            assert tuple(answer.tokens) == undisturbed()[reader][:steps]
            assert pair.decode.engine.pool.counts().quarantined == 1
    pair.run()
    check_the_others(pair, keys, reader)
    done = [(p, steps if i == reader else OUTPUTS - 1) for i, p in enumerate(PROMPTS)]
    counters = pair.decode.engine.counters
    assert counters.tiles_verified_read == sum(decode_tiles(p, n) for p, n in done)
    assert counters.sequence_steps_verified_read == sum(n for _, n in done) - 1
    assert counters.kv_integrity_failures == 1
    assert pair.prefill.engine.counters.tiles_verified_read == sum(prefill_tiles(p) for p in PROMPTS)


@settings(max_examples=15)
@given(st.data())
def test_a_bit_that_flips_in_prefills_pool_fails_its_request_at_the_next_chunk_and_no_other(
    data: st.DataObject,
) -> None:
    pair = fresh()
    reader = data.draw(st.integers(0, len(PROMPTS) - 1), "request")
    chunks = data.draw(st.integers(1, math.ceil(PROMPTS[reader] / CHUNK) - 1), "after chunks")
    keys: list[Key] = []
    for number in range(len(PROMPTS)):
        if number != reader:
            keys.append(enter(pair, number))
            continue
        key = pair.submit(tokens(reader), f"tenant {reader}", max_tokens=OUTPUTS)
        keys.append(key)

        def computed(key: Key = key) -> int:
            seq = sequence(pair.prefill, key, Phase.PREFILLING)
            return 0 if seq is None else seq.computed

        pair.run(lambda: computed() >= chunks * CHUNK)
        seq = sequence(pair.prefill, key, Phase.PREFILLING)
        assert seq is not None
        assert seq.computed == chunks * CHUNK
        data.draw(flips(seq.computed), "flip").hit(pair.prefill, seq)
        pair.prefill.tick()
        pair.pump()
        assert isinstance(pair.answer(key).failure, Failed)
        assert pair.answer(key).failure.code == "kv_integrity"
        assert pair.answer(key).tokens == []
        assert pair.prefill.engine.pool.counts().quarantined == 1
    pair.run()
    check_the_others(pair, keys, reader)
    counters = pair.prefill.engine.counters
    assert counters.tiles_verified_read == sum(
        prefill_tiles(p, chunks + 1 if i == reader else None) for i, p in enumerate(PROMPTS)
    )
    others = [p for i, p in enumerate(PROMPTS) if i != reader]
    assert pair.decode.engine.counters.tiles_verified_read == sum(
        decode_tiles(p, OUTPUTS - 1) for p in others
    )


def test_a_bit_past_the_fill_of_the_tail_page_has_no_influence_and_is_no_fault() -> None:
    pair = fresh()
    key = enter(pair, 0)
    seq = sequence(pair.decode, key, Phase.RUNNING)
    assert seq is not None
    # Two rows on, so that the next step does not write it over: it is written over later, with its own term.
    Flip(seq.computed + 2, 1, 1, 0, 77).hit(pair.decode, seq)
    pair.run()
    assert tuple(pair.answer(key).tokens) == undisturbed()[0]
