"""The benchmark's baseline gives the same answers, and does none of the work that sealing and checking are."""

from __future__ import annotations

from unittest import mock

import numpy as np

from hermetic.engine import engine as engine_module
from hermetic.lab.pair import LabPair
from hermetic.lab.scene import make_pair
from hermetic.lab.unsealed import UnsealedKernels, strip

PROMPTS = [np.random.default_rng(n).integers(1, 500, n).tolist() for n in (70, 33, 16, 1)]


def answers(pair: LabPair) -> list[dict[int, list[int]]]:
    keys = [pair.submit(p, n=1 + (i == 0), max_tokens=20) for i, p in enumerate(PROMPTS)]
    pair.run()
    pair.check()
    return [pair.answer(k).outputs for k in keys]


def test_an_unsealed_pair_gives_the_same_tokens_and_leaves_no_seal_tag_or_count_behind() -> None:
    expected = answers(make_pair("landing"))
    pair = make_pair("tags")
    with mock.patch.object(engine_module, "check_rows"), mock.patch.object(engine_module, "check_piece"):
        for worker in (pair.prefill, pair.decode):
            strip(worker)
        key = pair.submit(PROMPTS[0], max_tokens=20)
        pair.run(lambda: len(pair.answer(key).tokens) > 3)
        pool = pair.decode.engine.pool
        assert not pool.tag_fill.any()
        assert not pool.geometry.seals(pool.memory).any()
        assert isinstance(pair.decode.engine.runner.kernels, UnsealedKernels)
        pair.run()
        assert answers(pair) == expected
    stats = pair.prefill.stats() | pair.decode.stats()
    assert stats["tiles_verified_landing"] == stats["tiles_verified_read"] == 0
