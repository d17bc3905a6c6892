"""An attempt that brings the output tokens of an earlier one goes on with the very bits of the first, in bf16 too.

Rows that a decode step made are made by decode steps again; computed as part of a prompt they may differ in their last
bits, and in bf16 that is enough to choose another token."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from engine_world import Bench, bench, lab_pair, pages_of, prompt

from hermetic.handoff.messages import Key
from hermetic.worker import messages as m

NEW = 40
WHERE = [
    1,
    2,
    11,
    12,
    13,
    16,
    27,
    28,
    29,
    39,
]  # outputs said before; with 20 prompt tokens 12 and 28 fill a page of 16
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"logprobs": 1},
    "drawn": {"temperature": 1.0, "top_p": 0.9, "logprobs": 1},
    "penalised": {"temperature": 0.8, "frequency_penalty": 0.5, "logprobs": 1},
}


def said(b: Bench, key: Key) -> list[tuple[int, float | None]]:
    return [(e.token, e.logprob) for e in b.events if type(e).__name__ == "Emit" and e.key == key]


@pytest.mark.parametrize("dtype", ["bf16", "float32"])
@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING.keys())
def test_a_unified_engine_goes_on_from_any_output_with_the_same_bits(
    tiny: str, dtype: str, sampling: dict[str, Any]
) -> None:
    b = bench(tiny, 128, dtype=dtype)
    first = b.submit(prompt(20), max_tokens=NEW, **sampling)
    b.run()
    whole = said(b, first)
    tokens = [token for token, _ in whole]
    keys = {k: b.submit(prompt(20) + tokens[:k], given=k, max_tokens=NEW, **sampling) for k in WHERE}
    b.run()
    for k, key in keys.items():
        assert said(b, key) == whole[k:], k
    b.check_idle()


@pytest.mark.parametrize("dtype", ["bf16", "float32"])
@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING.keys())
def test_a_pair_goes_on_from_any_output_with_the_same_bits(
    tiny: str, dtype: str, sampling: dict[str, Any]
) -> None:
    pair = lab_pair(tiny, dtype=dtype, prefill_pages=64, decode_pages=128)
    first = pair.answer(pair.submit(prompt(20), max_tokens=NEW, **sampling))
    pair.run()
    tokens, logprobs = first.tokens, first.logprobs[0]
    landed = pair.decode.landing.pages_landed
    for k in WHERE:
        key = pair.submit(prompt(20), max_tokens=NEW, **sampling)
        # What the gateway gives for a later attempt: the same request, with what was said before.
        answer = pair.answer(key)
        for i, (source, to, of, body) in enumerate(pair._queue):
            if of == key and isinstance(body, m.Submit):
                raw = body.tokens + np.array(tokens[:k], "<i4").tobytes()
                pair._queue[i] = (source, to, of, msgspec.structs.replace(body, tokens=raw))
        pair.run()
        assert answer.tokens == tokens[k:], k
        assert answer.logprobs[0] == logprobs[k:], k
    # Prefill computes and sends the prompt only, 20 tokens on two pages, whatever was said after it.
    assert pair.decode.landing.pages_landed - landed == len(WHERE) * pages_of(20)
    pair.check()
    assert pair.idle()


@pytest.mark.parametrize("pages", [6, 9])
def test_preempted_requests_answer_with_the_bits_of_an_undisturbed_run_in_bf16(tiny: str, pages: int) -> None:
    prompts = [prompt(n, seed=n) for n in (15, 16, 17, 30, 40, 47)]
    runs = []
    for b in (bench(tiny, 200, dtype="bf16"), bench(tiny, pages, dtype="bf16", chunk=32)):
        keys = [b.submit(p, max_tokens=30, logprobs=1) for p in prompts]
        b.run()
        runs.append([said(b, key) for key in keys])
    assert b.engine.counters.preemptions > 0
    assert runs[0] == runs[1]


def test_several_choices_cannot_go_on_from_the_same_output_tokens(tiny: str) -> None:
    refused = bench(tiny, 64).refusal(prompt(20), given=4, n=2, max_tokens=8)
    assert refused is not None
    assert refused.code == "invalid_request"
