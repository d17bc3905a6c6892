"""The default model against transformers on the same file: float32 logits, bf16 text, and independence of the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_helpers import PROMPTS, DenseAttention, all_logits, greedy, in_bf16

from hermetic.model.decoder import Decoder
from hermetic.model.tokenizer import Tokenizer

# Every which length and prompt: some in `make test`, all of them in `make soak`.
SHARES = pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.soak)])
LENGTHS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 33, 64, 100, 128, 200, 257, 400, 513, 900, 1500)


@pytest.fixture(scope="module")
def reference_bf16(reference: Any) -> Any:
    return in_bf16(reference)


@SHARES
def test_float32_logits_agree_with_transformers_within_a_thousandth_for_prompts_of_1_to_1500_tokens(
    decoder_float32: Decoder, reference: Any, tokenizer: Tokenizer, every: int
) -> None:
    text = tokenizer.encode(" ".join(PROMPTS) * 14, add_special=False)
    worst = 0.0
    for n, length in enumerate(LENGTHS[::every]):
        tokens = text[37 * n : 37 * n + length]
        assert len(tokens) == length
        with torch.inference_mode():
            expected = reference(torch.tensor([tokens])).logits[0]
        worst = max(worst, float((all_logits(decoder_float32, tokens) - expected).abs().max()))
    assert worst < 1e-3


@SHARES
def test_every_bf16_greedy_token_is_transformers_choice_within_rounding_and_our_rounding_is_no_worse(
    decoder_bf16: Decoder, reference_bf16: Any, reference: Any, tokenizer: Tokenizer, every: int
) -> None:
    # How many whole texts are identical is no yardstick here: a bf16 has 8 significant bits, the two best logits are
    # often the same number, and transformers' own two ways (token by token, and in one pass) part on most prompts. So
    # each token is held against what the reference prefers after the same text, and the noise against float32's truth.
    identical, our_error, their_error = 0, 0.0, 0.0
    for prompt in PROMPTS[::every]:
        tokens = tokenizer.encode(prompt, add_special=False)
        ours = greedy(decoder_bf16, tokens, 32)
        text = tokens + ours[:-1]
        with torch.inference_mode():
            theirs = reference_bf16(torch.tensor([text])).logits[0].float()
            exact = reference(torch.tensor([text])).logits[0]
        our_error += float((all_logits(decoder_bf16, text) - exact).square().mean())
        their_error += float((theirs - exact).square().mean())
        logits = theirs[len(tokens) - 1 :]
        best = logits.max(-1).values
        gap = best - logits.gather(1, torch.tensor(ours).unsqueeze(1)).squeeze(1)
        identical += ours == logits.argmax(-1).tolist()
        unit = 2.0 ** (
            best.abs().log2().floor() - 7
        )  # the distance between neighbouring bf16 numbers at `best`
        assert (gap <= 2 * unit).all(), (prompt, float((gap / unit).max()))
    print(
        f"identical to one pass: {identical} of {len(PROMPTS[::every])}; squared error {our_error:.4f}, theirs {their_error:.4f}"
    )
    assert our_error <= 1.1 * their_error


@pytest.mark.parametrize("dtype", ["bf16", "float32"])
def test_a_rows_logits_have_the_same_bits_whatever_batch_is_around_it(
    dtype: str, decoder_bf16: Decoder, decoder_float32: Decoder
) -> None:
    decoder = decoder_bf16 if dtype == "bf16" else decoder_float32
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, decoder.config.vocab, (513,), generator=generator)
    positions = torch.randint(0, decoder.config.window, (513,), generator=generator)

    def own_value(_layer: int, q: torch.Tensor, _k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)  # attention over a row's own token alone

    few = torch.arange(40)
    expected = decoder.forward(tokens, positions, own_value, few)
    for count in (1, 2, 8, 31, 33, 100, 160, 257, 512):
        rows = few[:count]
        assert torch.equal(
            decoder.forward(tokens[:count], positions[:count], own_value, rows), expected[: len(rows)]
        ), count
    # And at another place of the batch.
    order = torch.randperm(77, generator=generator)
    moved = decoder.forward(tokens[order], positions[order], own_value, torch.arange(77))
    for place, row in enumerate(order.tolist()):
        if row < 40:
            assert torch.equal(moved[place], expected[row])


def test_logits_do_not_depend_on_the_chunks_a_prompt_is_cut_into_in_float32_but_for_attentions_rounding(
    decoder_float32: Decoder, tokenizer: Tokenizer
) -> None:
    tokens = tokenizer.encode(PROMPTS[1] * 3, add_special=False)
    whole = all_logits(decoder_float32, tokens)
    for chunk in (7, 16):
        assert (all_logits(decoder_float32, tokens, chunk) - whole).abs().max() < 1e-3


def test_asking_for_no_logits_still_attends_in_every_layer(decoder_bf16: Decoder) -> None:
    attend = DenseAttention()
    none = decoder_bf16.forward(
        torch.tensor([1, 2, 3]), torch.arange(3), attend, torch.empty(0, dtype=torch.int64)
    )
    assert none.shape == (0, decoder_bf16.config.vocab)
    assert len(attend.keys) == decoder_bf16.config.layers


def test_a_position_outside_the_window_is_refused(decoder_bf16: Decoder) -> None:
    window = decoder_bf16.config.window
    with pytest.raises(ValueError, match=f"position {window} is outside the model's window of {window}"):
        decoder_bf16.forward(torch.tensor([1]), torch.tensor([window]), DenseAttention(), torch.tensor([0]))


def test_the_fingerprint_is_the_same_for_either_dtype_and_128_bits_long(
    decoder_bf16: Decoder, decoder_float32: Decoder
) -> None:
    assert decoder_bf16.fingerprint == decoder_float32.fingerprint
    assert len(bytes.fromhex(decoder_bf16.fingerprint)) == 16


def test_a_decode_row_has_the_same_bits_alone_among_others_and_beside_a_prompt(decoder_bf16: Decoder) -> None:
    """Alone, the layers run fused; beside a prompt, call by call."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, decoder_bf16.config.vocab, (40,), generator=generator)
    positions = torch.randint(0, 3000, (40,), generator=generator)

    def own_value(_layer: int, q: torch.Tensor, _k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)  # attention over a row's own token alone

    def run(rows: list[int], decode: int) -> torch.Tensor:
        every = torch.arange(len(rows))
        return decoder_bf16.forward(tokens[rows], positions[rows], own_value, every, decode)

    expected = run(list(range(40)), 40)
    assert torch.equal(run([7], 1), expected[7:8])
    assert torch.equal(run([3, 9, 1], 3), expected[[3, 9, 1]])
    assert torch.equal(run([*range(17), *range(20, 40)], 17)[:17], expected[:17])
    prompt = run(list(range(20, 40)), 0)
    assert torch.equal(run([*range(17), *range(20, 40)], 17)[17:], prompt)
    # Two kernels for the same weights: equal up to bf16's rounding along the way.
    assert (expected[20:] - prompt).abs().max() < 1.0
    assert torch.nn.functional.cosine_similarity(expected[20:], prompt).min() > 0.9999
