"""The default model through real engines against transformers, on the same weights.

The prompts are copy tasks: a sentence several times over, then its first words. What comes next is certain, so that the
comparison is about arithmetic going to the right rows and not about which of two equal logits is taken: on open
questions transformers in bf16 disagrees with itself (token by token against one pass). How near our rounding is
on those is tested in tests/model.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_world import Bench, bench, lab_pair

from hermetic.model.source import locate
from hermetic.model.tokenizer import Tokenizer

SENTENCES = [
    "The cat sat on the mat and looked at the bird in the tree.",
    "Water boils at one hundred degrees and freezes at zero degrees.",
    "My name is Anna and I live in a small house near the river.",
    "Every morning he drinks a cup of coffee and reads the newspaper.",
    "The train to London leaves at nine and arrives at eleven.",
    "She bought three red apples and two green pears at the market.",
    "We walked along the beach until the sun went down behind the hills.",
    "A dog barked, a door opened, and a man stepped into the street.",
    "The teacher wrote the answer on the board and asked for questions.",
    "In winter the lake is frozen and the children skate on the ice.",
]
OUTPUT = 32
# Every which prompt: some in `make test`, all of them in `make soak`.
SHARES = pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.soak)])
PAGES = 400  # enough that nobody is preempted


@functools.cache
def asked(dtype: str, every: int) -> list[list[int]]:
    """The prompts, of float32 fewer: it takes longer and leaves less to chance."""
    tokenizer = Tokenizer.load(locate("smollm2"))
    texts = [
        "\n".join([sentence] * times) + "\n" + " ".join(sentence.split()[:2])
        for sentence in SENTENCES
        for times in (5, 12)
    ]
    prompts = [tokenizer.encode(text, add_special=False) for text in texts]
    return prompts[:: every if dtype == "bf16" else 2 * every + 1]


@functools.cache
def reference() -> Any:
    """transformers' own model on the same file, in float32."""
    from transformers import AutoModelForCausalLM, GgufConfig

    source = locate("smollm2")
    return AutoModelForCausalLM.from_pretrained(
        str(source.folder),
        gguf_file=source.gguf,
        quantization_config=GgufConfig(gguf_file=source.gguf, dequantize=True),
        dtype=torch.float32,
    ).eval()


@functools.cache
def reference_in_bf16() -> Any:
    """A copy with bf16 weights, as transformers has it when it loads the file so: its rotary frequencies stay in float32."""
    model = copy.deepcopy(reference())
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def judged(prompt: list[int], output: list[int], dtype: torch.dtype) -> torch.Tensor:
    """transformers' logits for each place of `output` behind the prompt and the outputs before it: [OUTPUT, vocab].

    A text is its greedy text if and only if each token is the best at its place. One pass says so for all of them; a loop
    of `generate` would take a pass a token to say the same (it does in the last test, for one prompt)."""
    with torch.inference_mode():
        model = reference() if dtype == torch.float32 else reference_in_bf16()
        got = model(torch.tensor([prompt + output[:-1]]), use_cache=False).logits[0]
    return got[len(prompt) - 1 :].float()


def together(engine: Bench, prompts: list[list[int]]) -> list[list[int]]:
    return engine.ask(prompts, max_tokens=OUTPUT)


@functools.cache
def answers(dtype: str, every: int) -> list[list[int]]:
    """All prompts in one batch, by one engine with pages of 16 tokens and chunks of 512."""
    return together(bench("smollm2", PAGES, dtype=dtype), asked(dtype, every))


@pytest.fixture(autouse=True, scope="module")
def _models_are_let_go_at_the_end() -> Iterator[None]:
    yield
    reference_in_bf16.cache_clear()
    reference.cache_clear()


@SHARES
def test_in_bf16_whole_texts_agree_with_transformers_and_the_rest_part_at_near_ties(every: int) -> None:
    parted = 0
    for tokens, ours in zip(asked("bf16", every), answers("bf16", every), strict=True):
        logits = judged(tokens, ours, torch.bfloat16)
        differing = [i for i, best in enumerate(logits.argmax(-1).tolist()) if best != ours[i]]
        if differing:
            parted += 1
            row = logits[differing[0]]
            gap = row.max() - row[ours[differing[0]]]
            assert gap <= 2 * 2.0 ** (row.max().log2().floor() - 7)  # two steps of a bf16 of that size
    assert parted <= 2


@SHARES
def test_in_float32_every_text_is_the_greedy_text_of_transformers(every: int) -> None:
    for tokens, ours in zip(asked("float32", every), answers("float32", every), strict=True):
        assert judged(tokens, ours, torch.float32).argmax(-1).tolist() == ours


@SHARES
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("float32", marks=pytest.mark.soak)])
def test_unified_disaggregated_any_chunk_and_any_batch_give_the_same_tokens(dtype: str, every: int) -> None:
    """Against the batch of all prompts: one by one, in a batch of few, in other chunks and pages, and as a pair."""
    step = 2 if every > 1 else 4
    some, expected = asked(dtype, every)[::step], answers(dtype, every)[::step]
    one_by_one = bench("smollm2", PAGES, dtype=dtype, chunk=48)
    assert [together(one_by_one, [tokens])[0] for tokens in some] == expected
    assert together(bench("smollm2", PAGES, dtype=dtype, chunk=37, page_size=8), some) == expected
    pair = lab_pair("smollm2", prefill_pages=PAGES, decode_pages=PAGES, dtype=dtype, chunk=96)
    keys = [pair.submit(tokens, max_tokens=OUTPUT) for tokens in some]
    pair.run()
    assert [pair.answer(key).tokens for key in keys] == expected


def test_one_pass_and_generate_of_transformers_say_the_same() -> None:
    tokens, ours = asked("float32", 3)[0], answers("float32", 3)[0]
    with torch.inference_mode():
        out = reference().generate(
            torch.tensor([tokens]), max_new_tokens=OUTPUT, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert out[0, len(tokens) :].tolist() == ours
