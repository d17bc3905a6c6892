"""Choosing the next token. Stateless: the draw for output index i depends only on (seed, i), the logits and the params.

The one thing to know: a row is sampled by itself, from its own logits, with a uniform number that is a hash of its
request's seed and of the output index. So an answer with a seed does not change with its neighbours in the batch, with
the worker that computes it, or when it is preempted and run again.

The order of the steps is vLLM's: bias, penalties and `min_tokens` change the logits; temperature; then top-k, top-p (of
what top-k left) and min-p remove tokens; then one draw by inverting the cumulative distribution in token order.
Log-probabilities are of the raw distribution, before all of that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit, prange

from hermetic.model.errors import NonFiniteLogits
from hermetic.model.ops import exp32
from hermetic.model.params import SamplingParams

_BLOCK = 512  # probabilities summed together; a draw searches the blocks first
_TOGETHER = 2  # rows up to which one thread is as fast
Floats = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class SampleRow:
    """One row of logits to be sampled.

    `seed` is the request's own, or one that was drawn for it; `index` counts its output tokens from 0, `output_ids` are
    those so far; `eos_token_ids`, the model's, cannot be chosen before `min_tokens` are out (unless there is nothing else).
    """

    params: SamplingParams
    seed: int
    index: int
    output_ids: Sequence[int] = ()
    eos_token_ids: tuple[int, ...] = ()

    @property
    def changes_logits(self) -> bool:
        """Whether bias, penalties or `min_tokens` have anything to do."""
        p = self.params
        penal = (p.presence_penalty != 0.0 or p.frequency_penalty != 0.0) and len(self.output_ids) > 0
        return bool(p.logit_bias) or penal or self.index < p.min_tokens


class Sampled(NamedTuple):
    """The chosen token; its log-probability and the most likely tokens' where asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] | None = None


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
    """logits float32 [R, vocab], left unchanged; rows: R of them. Raises NonFiniteLogits naming the bad rows."""
    raw = logits.numpy()
    if raw.shape[0] != len(rows):
        raise ValueError(f"{raw.shape[0]} rows of logits for {len(rows)} requests")
    if not rows:
        return []
    best = raw.argmax(axis=1)
    peaks = raw[
        np.arange(len(rows)), best
    ]  # argmax takes a NaN for the largest, so this sees NaN and infinity
    if not np.isfinite(peaks).all():
        raise NonFiniteLogits(tuple(int(r) for r in np.flatnonzero(~np.isfinite(peaks))))

    tokens = [int(token) for token in best]
    adjusted = {r: _adjust(raw[r], row) for r, row in enumerate(rows) if row.changes_logits}
    for r, values in adjusted.items():
        tokens[r] = int(values.argmax())
    drawn = [r for r, row in enumerate(rows) if not row.params.greedy]
    if drawn:
        scaled = np.stack([adjusted.get(r, raw[r]) for r in drawn])
        # The floor keeps a temperature next to nothing from overflowing float32: infinity times a gap of 0 is no number.
        inverse = np.array([1.0 / max(rows[r].params.temperature, 1e-30) for r in drawn], dtype=np.float32)
        weights, sums = _exponentials(scaled, inverse)
        for i, r in enumerate(drawn):
            tokens[r] = _draw(weights[i], sums[i], rows[r].params, uniform(rows[r].seed, rows[r].index))

    wanted = [r for r, row in enumerate(rows) if row.params.logprobs is not None]
    if not wanted:
        return [Sampled(token) for token in tokens]
    _, sums = _exponentials(np.ascontiguousarray(raw[wanted]), np.ones(len(wanted), dtype=np.float32))
    normal = {r: float(peaks[r]) + float(np.log(sums[i].sum())) for i, r in enumerate(wanted)}
    return [
        Sampled(token, *_logprobs(raw[r], token, normal[r], rows[r].params.logprobs or 0))
        if r in normal
        else Sampled(token)
        for r, token in enumerate(tokens)
    ]


def warm_up() -> None:
    """Draw for one row and for many, so that no request waits for a compiler."""
    for rows in (1, _TOGETHER + 1):
        _exponentials(np.zeros((rows, 2), dtype=np.float32), np.ones(rows, dtype=np.float32))


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) for output `index` of a request with `seed`: 53 bits of BLAKE2b, independent of all others."""
    # 16 bytes hold every seed from -2^63 to 2^64 - 1, signed.
    message = seed.to_bytes(16, "little", signed=True) + index.to_bytes(8, "little")
    digest = hashlib.blake2b(message, digest_size=8, person=b"hermetic draw").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _adjust(raw: Floats, row: SampleRow) -> Floats:
    """A copy of one row of logits with bias, penalties (OpenAI's definition) and `min_tokens` applied."""
    values, params = raw.copy(), row.params
    for token, bias in params.logit_bias.items():
        if token < values.size:
            values[token] += np.float32(bias)
    if len(row.output_ids) and (params.presence_penalty or params.frequency_penalty):
        seen, counts = np.unique(np.asarray(row.output_ids, dtype=np.int64), return_counts=True)
        penalty = params.presence_penalty + params.frequency_penalty * counts
        values[seen] -= penalty.astype(np.float32)
    if row.index < params.min_tokens:
        allowed = values.copy()
        for token in (*row.eos_token_ids, *params.stop_token_ids):
            if token < values.size:
                allowed[token] = -np.inf
        # When every token is an end token there is nothing else to choose: the answer ends early instead.
        if np.isfinite(allowed.max()):
            values = allowed
    return values


def _draw(weights: Floats, sums: Floats, params: SamplingParams, u: float) -> int:
    """The token at which the cumulative weight, in token order, passes u of what the filters leave.

    weights f32 [vocab]: exp((logit - largest) / temperature); sums f64 [blocks]: their sums by block.
    """
    kept = _kept(weights, float(sums.sum()), params)
    if kept is not None:
        return int(kept[_search(np.cumsum(weights[kept], dtype=np.float64), u)])
    cumulative = np.cumsum(sums)
    block = _search(cumulative, u)
    before = float(cumulative[block - 1]) if block else 0.0
    inside = np.cumsum(weights[block * _BLOCK : (block + 1) * _BLOCK], dtype=np.float64)
    # Within the block by what is left; a rounding error at its end falls back to the last token with any weight.
    left = u * float(cumulative[-1]) - before
    offset = int(np.searchsorted(inside, left, side="right"))
    last = int(np.searchsorted(inside, inside[-1], side="left"))
    return block * _BLOCK + min(offset, last)


def _search(cumulative: Floats, u: float) -> int:
    """First position whose cumulative weight is over u of the total; never one of weight zero."""
    last = int(np.searchsorted(cumulative, cumulative[-1], side="left"))
    return min(int(np.searchsorted(cumulative, u * cumulative[-1], side="right")), last)


def _kept(weights: Floats, total: float, params: SamplingParams) -> Floats | None:
    """Token ids, ascending, that top-k, top-p and min-p leave; None: no filter is on. Ties go to the lower id."""
    vocab = weights.size
    if params.top_k and params.top_k < vocab:
        # Everything over the k-th largest, and of those equal to it the first ones.
        edge = np.partition(weights, vocab - params.top_k)[vocab - params.top_k]
        over, equal = np.flatnonzero(weights > edge), np.flatnonzero(weights == edge)
        kept = np.sort(np.concatenate([over, equal[: params.top_k - over.size]]))
    elif params.top_p < 1.0:
        # Tokens under (1 - p) / vocab of the total weigh less than 1 - p together: top-p never reaches them.
        kept = np.flatnonzero(weights >= 0.999 * (1.0 - params.top_p) * total / vocab)
    elif params.min_p > 0.0:
        kept = np.arange(vocab)
    else:
        return None
    if params.top_p < 1.0:
        mass = (
            total
            if not (params.top_k and params.top_k < vocab)
            else float(weights[kept].sum(dtype=np.float64))
        )
        order = kept[np.argsort(-weights[kept], kind="stable")]
        # Up to and including the token that reaches p; the most likely one always stays.
        reached = np.searchsorted(
            np.cumsum(weights[order], dtype=np.float64), params.top_p * mass, side="left"
        )
        kept = np.sort(order[: int(reached) + 1])
    if params.min_p > 0.0:
        kept = kept[weights[kept] >= np.float32(params.min_p) * weights.max()]
    return kept


def _logprobs(
    raw: Floats, token: int, normal: float, count: int
) -> tuple[float, tuple[tuple[int, float], ...]]:
    """(log-probability of `token`, the `count` most likely tokens with theirs, most likely first)."""
    count = min(count, raw.size)
    if count == 0:
        return float(raw[token]) - normal, ()
    edge = np.partition(raw, raw.size - count)[raw.size - count]
    found = np.flatnonzero(raw >= edge)
    found = found[np.argsort(-raw[found], kind="stable")][:count]
    return float(raw[token]) - normal, tuple((int(t), float(raw[t]) - normal) for t in found)


def _exponentials(values: Floats, inverse_temperature: Floats) -> tuple[Floats, Floats]:
    """values f32 [R, vocab], inverse_temperature f32 [R] -> exp((value - largest) * inverse) f32 [R, vocab] and its
    sums by block of 512, f64 [R, blocks]."""
    weights = np.empty_like(values)
    sums = np.zeros((values.shape[0], -(-values.shape[1] // _BLOCK)), dtype=np.float64)
    kernel = _exponential_rows_parallel if values.shape[0] > _TOGETHER else _exponential_rows
    kernel(values, inverse_temperature, weights, sums)
    return weights, sums


# Reassociation is for the sum; with "nsz" and no "nnan" or "ninf", minus infinity keeps its weight of zero.
@njit(nogil=True, error_model="numpy", fastmath={"reassoc", "nsz"})
def _sum(values):
    total = 0.0
    for i in range(values.size):
        total += np.float64(values[i])
    return total


@njit(nogil=True, error_model="numpy")
def _exponential_row(values, inverse, weights, sums):
    largest = values[0]
    for i in range(values.size):
        largest = values[i] if values[i] > largest else largest
    for i in range(values.size):
        # Under -103, exp is 0 in float32; exp32 alone would return the smallest subnormal for minus infinity.
        x = (values[i] - largest) * inverse
        weights[i] = exp32(x) if x > np.float32(-103.0) else np.float32(0.0)
    for block in range(sums.size):
        sums[block] = _sum(weights[block * _BLOCK : (block + 1) * _BLOCK])


@njit(nogil=True, cache=True, error_model="numpy")
def _exponential_rows(values, inverse, weights, sums):
    for r in range(values.shape[0]):
        _exponential_row(values[r], inverse[r], weights[r], sums[r])


@njit(nogil=True, cache=True, error_model="numpy", parallel=True)
def _exponential_rows_parallel(values, inverse, weights, sums):
    for r in prange(values.shape[0]):
        _exponential_row(values[r], inverse[r], weights[r], sums[r])
