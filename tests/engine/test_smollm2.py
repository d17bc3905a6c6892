"""The default model through real engines against transformers' own generate, on the same weights.

The prompts are copy tasks: a sentence several times over, then its first words. What comes next is certain, so that the
comparison is about arithmetic going to the right rows and not about which of two equal logits is taken: on open
questions transformers in bf16 disagrees with itself (token by token against one pass). How near our rounding is
on those is tested in tests/model.
"""

from __future__ import annotations

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
PAGES = 400  # enough that nobody is preempted


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.load(locate("smollm2"))
    texts = [
        "\n".join([sentence] * times) + "\n" + " ".join(sentence.split()[:2])
        for sentence in SENTENCES
        for times in (5, 12)
    ]
    return [tokenizer.encode(text, add_special=False) for text in texts]


def generate(prompts: list[list[int]], dtype: torch.dtype) -> tuple[list[list[int]], list[torch.Tensor]]:
    """transformers: the greedy tokens of each prompt, and the logits that each was chosen from [OUTPUT, vocab]."""
    from transformers import AutoModelForCausalLM, GgufConfig

    source = locate("smollm2")
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(source.folder),
        gguf_file=source.gguf,
        quantization_config=GgufConfig(gguf_file=source.gguf, dequantize=True),
        dtype=dtype,
    ).eval()
    texts, logits = [], []
    for tokens in prompts:
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([tokens]),
                max_new_tokens=OUTPUT,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
        texts.append(out.sequences[0, len(tokens) :].tolist())
        logits.append(torch.cat(out.logits).float())
    return texts, logits


def together(engine: Bench, prompts: list[list[int]]) -> list[list[int]]:
    return engine.ask(prompts, max_tokens=OUTPUT)


def test_in_bf16_whole_texts_agree_with_transformers_and_the_rest_part_at_near_ties(
    prompts: list[list[int]],
) -> None:
    ours = together(bench("smollm2", PAGES, dtype="bf16", threads=2), prompts)
    theirs, logits = generate(prompts, torch.bfloat16)
    differing = [i for i in range(len(prompts)) if ours[i] != theirs[i]]
    assert len(differing) <= 2
    for i in differing:
        at = next(j for j in range(OUTPUT) if ours[i][j] != theirs[i][j])
        gap = logits[i][at].max() - logits[i][at][ours[i][at]]
        assert gap <= 2 * 2.0 ** (logits[i][at].max().log2().floor() - 7)  # two steps of a bf16 of that size


@pytest.mark.parametrize("dtype", ["bf16", "float32"])
def test_unified_disaggregated_any_chunk_and_any_batch_give_the_same_tokens(
    prompts: list[list[int]], dtype: str
) -> None:
    some = prompts[::4] if dtype == "bf16" else prompts[::7]
    expected = together(bench("smollm2", PAGES, dtype=dtype), some)
    if dtype == "float32":
        assert expected == generate(some, torch.float32)[0]
    one_by_one = bench("smollm2", PAGES, dtype=dtype, chunk=48)
    assert [together(one_by_one, [tokens])[0] for tokens in some] == expected
    assert together(bench("smollm2", PAGES, dtype=dtype, chunk=37, page_size=8), some) == expected
    pair = lab_pair("smollm2", prefill_pages=PAGES, decode_pages=PAGES, dtype=dtype, chunk=96)
    keys = [pair.submit(tokens, max_tokens=OUTPUT) for tokens in some]
    pair.run()
    assert [pair.answer(key).tokens for key in keys] == expected
