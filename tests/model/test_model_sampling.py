"""Sampling against a slow plain reference, the distributions it should have, and independence of the batch."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hermetic.model.errors import NonFiniteLogits
from hermetic.model.params import SamplingParams
from hermetic.model.sampling import Sampled, SampleRow, sample, uniform


def _params(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=64, **fields)


def _reference(logits: list[float], row: SampleRow) -> int | list[tuple[int, float]]:
    """The chosen token when greedy, else [(token, probability)] ascending by token: plain loops in float64."""
    p, values = row.params, list(logits)
    for token, bias in p.logit_bias.items():
        values[token] += bias
    for token in set(row.output_ids):
        values[token] -= p.presence_penalty + p.frequency_penalty * list(row.output_ids).count(token)
    ends = set(row.eos_token_ids + p.stop_token_ids)
    if row.index < p.min_tokens and ends < set(range(len(values))):
        for token in ends:
            values[token] = -math.inf
    ranked = sorted(range(len(values)), key=lambda t: (-values[t], t))
    if p.temperature == 0.0:
        return ranked[0]
    top = values[ranked[0]]
    weight = {t: math.exp((values[t] - top) / p.temperature) for t in ranked}
    if p.top_k:
        ranked = ranked[: p.top_k]
    total, kept, mass = sum(weight[t] for t in ranked), [], 0.0
    for t in ranked:
        kept.append(t)
        mass += weight[t]
        if mass >= p.top_p * total:
            break
    kept = [t for t in kept if weight[t] >= p.min_p] if p.min_p else kept
    left = sum(weight[t] for t in kept)
    return [(t, weight[t] / left) for t in sorted(kept) if weight[t] > 0]


@st.composite
def _rows(draw: st.DrawFn) -> tuple[list[float], SampleRow]:
    vocab = draw(st.integers(2, 700))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    # Steps of 1/8 make ties, which are where orders differ.
    logits = (generator.integers(-40, 40, vocab) / 8).tolist()
    token = st.integers(0, vocab - 1)
    params = _params(
        temperature=draw(st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.0])),
        top_p=draw(st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.01])),
        top_k=draw(st.sampled_from([0, 1, 2, 5, 50, 1000])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.1, 1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.25])),
        logit_bias=draw(st.dictionaries(token, st.sampled_from([-100.0, 2.0, 100.0]), max_size=3)),
        min_tokens=draw(st.sampled_from([0, 5])),
        stop_token_ids=tuple(draw(st.lists(token, max_size=1))),
    )
    outputs = draw(st.lists(token, max_size=6))
    return logits, SampleRow(params, draw(st.integers(-5, 2**64 - 1)), len(outputs), outputs, (0,))


@settings(max_examples=300)
@given(_rows())
def test_the_token_is_the_one_that_a_plain_reference_draws(case: tuple[list[float], SampleRow]) -> None:
    logits, row = case
    [found] = sample(torch.tensor([logits]), [row])
    expected = _reference(logits, row)
    if isinstance(expected, int):
        assert found == Sampled(expected)
        return
    u, mass, allowed = uniform(row.seed, row.index), 0.0, []
    for token, probability in expected:
        # Within float32's rounding of a boundary, either side may be taken.
        if mass - 1e-5 <= u <= mass + probability + 1e-5:
            allowed.append(token)
        mass += probability
    assert found.token in allowed


def test_a_rows_token_does_not_depend_on_the_batch_around_it() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn((40, 5000), generator=generator) * 2
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_p": 0.8},
        {"top_k": 7},
        {"min_p": 0.1, "logprobs": 3},
    ]
    rows = [SampleRow(_params(**kinds[n % 5]), seed=n, index=n, output_ids=[1, 2]) for n in range(40)]
    together = sample(logits, rows)
    assert [sample(logits[n : n + 1], rows[n : n + 1])[0] for n in range(40)] == together
    order = torch.randperm(40, generator=generator)
    mixed = sample(logits[order], [rows[n] for n in order])
    assert [together[n] for n in order] == mixed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_holds_back_end_tokens_unless_there_is_no_other_token(temperature: float) -> None:
    logits = torch.tensor([[9.0, 8.0, -50.0]])
    held = _params(temperature=temperature, min_tokens=2, stop_token_ids=(1,))
    assert sample(logits, [SampleRow(held, 1, 1, [2], (0,))])[0].token == 2
    assert sample(logits, [SampleRow(held, 1, 2, [2, 2], (0,))])[0].token in (0, 1)
    every = _params(temperature=temperature, min_tokens=2, stop_token_ids=(1, 2))
    assert sample(logits, [SampleRow(every, 1, 0, [], (0,))])[0].token in (0, 1)


def test_the_logits_are_left_unchanged() -> None:
    logits = torch.randn((3, 100))
    before = logits.clone()
    params = _params(logit_bias={1: 5.0}, presence_penalty=1.0, top_k=3, logprobs=2, min_tokens=9)
    sample(logits, [SampleRow(params, 1, 2, [4, 4], (7,))] * 3)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("filters", [{}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.2}])
def test_drawn_tokens_have_the_frequencies_of_their_probabilities(filters: dict[str, Any]) -> None:
    logits = [0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -3.0, 1.0]
    draws = 20_000
    params = _params(temperature=0.8, **filters)
    expected = _reference(logits, SampleRow(params, 0, 0))
    assert isinstance(expected, list)
    rows = [SampleRow(params, seed=99, index=n) for n in range(draws)]
    counts = np.bincount([s.token for s in sample(torch.tensor([logits] * draws), rows)], minlength=8)
    assert counts.sum() == sum(counts[token] for token, _ in expected)
    chi = sum((counts[token] - draws * p) ** 2 / (draws * p) for token, p in expected)
    assert chi < 30  # chi-squared with at most 7 degrees of freedom: 30 is passed by 1 in 10,000


def test_uniform_numbers_differ_by_seed_and_index_and_are_even() -> None:
    values = np.array([[uniform(seed, index) for index in range(200)] for seed in range(-50, 50)])
    assert len(np.unique(values)) == values.size
    assert values.min() >= 0.0
    assert values.max() < 1.0
    assert abs(values.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(values[:, 0], values[:, 1])[0, 1]) < 0.4
    assert uniform(2**64 - 1, 0) != uniform(-1, 0)


def test_logprobs_are_of_the_raw_distribution_and_top_ones_come_in_order() -> None:
    logits = torch.randn((2, 3000), generator=torch.Generator().manual_seed(8)) * 3
    params = _params(temperature=0.5, logprobs=20, logit_bias={17: 100.0}, top_k=1)
    found = sample(logits, [SampleRow(params, 1, 0), SampleRow(_params(temperature=0.0), 1, 0)])
    expected = torch.log_softmax(logits[0].double(), -1)
    assert found[0].token == 17
    assert found[0].logprob == pytest.approx(float(expected[17]), abs=1e-5)
    values, ids = expected.topk(20)
    assert found[0].top is not None
    assert [token for token, _ in found[0].top] == ids.tolist()
    assert [value for _, value in found[0].top] == pytest.approx(values.tolist(), abs=1e-5)
    assert found[1] == Sampled(int(logits[1].argmax()))
    chosen_only = sample(logits[:1], [SampleRow(_params(temperature=0.0, logprobs=0), 1, 0)])[0]
    assert chosen_only.top == ()
    assert chosen_only.logprob == pytest.approx(float(values[0]), abs=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_name_the_rows_they_are_in(bad: float) -> None:
    logits = torch.zeros((4, 50))
    logits[1, 7] = logits[3, 49] = bad
    with pytest.raises(NonFiniteLogits) as caught:
        sample(logits, [SampleRow(_params(temperature=t), 1, 0) for t in (0.0, 0.0, 1.0, 1.0)])
    assert caught.value.rows == (1, 3)


def test_no_rows_give_no_tokens_and_a_wrong_number_of_rows_is_an_error() -> None:
    assert sample(torch.empty((0, 10)), []) == []
    with pytest.raises(ValueError, match="2 rows of logits for 1 requests"):
        sample(torch.zeros((2, 10)), [SampleRow(_params(), 1, 0)])


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": math.nan},
        {"temperature": -0.1},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"top_k": -1},
        {"seed": -(2**63) - 1},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"logit_bias": {-1: 0.0}},
        {"logit_bias": {1: 101.0}},
        {"logprobs": 21},
        {"min_tokens": 65},
        {"stop_token_ids": (-3,)},
    ],
)
def test_params_out_of_range_cannot_be_made_nor_decoded(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        _params(**fields)
    wire = {str(key): value for key, value in fields.items()}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"max_tokens": 64, **wire}, type=SamplingParams)


def test_params_cross_the_wire_unchanged_and_need_no_torch() -> None:
    params = _params(temperature=0.5, logit_bias={5: -1.5}, stop_token_ids=(1, 2), seed=-3, logprobs=0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize("temperature", [1e-5, 1e-39, 5e-324])
def test_a_temperature_next_to_nothing_takes_the_likeliest_token(temperature: float) -> None:
    logits = torch.tensor([[0.0, 3.0, 2.999, -5.0]])
    row = SampleRow(SamplingParams(max_tokens=4, temperature=temperature), seed=3, index=0)
    assert sample(logits, [row])[0].token == 1
