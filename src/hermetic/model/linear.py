"""Matrix products whose rows do not depend on how many rows there are.

The one thing to know: a BLAS picks its blocking by the number of rows, and another blocking adds in another order, so
the same row gives other bits in another batch. What a shape does is measured when it is first needed (`plan_for`): a
product whose exact result is zero leaves only the rounding errors, which show every difference in order. Products are
then cut into pieces of row counts that were found to agree; a count that was not measured is never run. (Single counts do
stand out: 576 outputs of 1536 inputs in bf16 differ at 130, 140 and 150 rows, and not at 128, 129 or 144.)

oneDNN's prepacked linear (`torch.ops.mkldnn`) is used where torch has it, in bf16 and in float32; else F.linear. On a CPU that has no instructions
for bf16 (no AVX-512) bf16 weights are packed as float32, and each product is rounded once, as it is with such instructions, which add in
float32 too. It wants many rows at once. For the few rows of a decode step a bf16 weight is packed a second time, for kernels/matmul.py, which
reads it at the pace of the memory whatever the number of rows. A row has other bits there than here: what decides is
what the row is for, never how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from hermetic.kernels.matmul import FewRows

# How many rows the weights are packed for. Measured with torch 2.13 on AVX-512 and AMX: packed for one row, bf16 keeps one
# order of addition for nearly every row count at no cost; float32 does so packed for 32.
_PACKED_FOR = {torch.bfloat16: 1, torch.float32: 32}
_WHOLE_BLOCKS = (1024, 512, 256)  # row counts worth running in one piece
_EVERY_COUNT_TO = 128
_BIG = 1 << 23  # weights from which fewer counts are measured: each costs milliseconds
_EVERY_COUNT_TO_BIG = 32


@dataclass(frozen=True)
class RowPlan:
    """Row counts that give the same bits for a row: `least` to `most`, and each of `blocks`.

    Fewer rows than `least` are padded with zeros. Both 32: the counts did not agree; only blocks of 32 are run.
    """

    least: int
    most: int
    blocks: tuple[int, ...] = ()

    def pieces(self, rows: int) -> Iterator[tuple[int, int]]:
        """(first, last) of each piece of `rows` rows."""
        first = 0
        while first < rows:
            left = rows - first
            size = next((b for b in self.blocks if b <= left), min(left, self.most))
            yield first, first + size
            first += size


class Linear:
    """y = x @ weight.T + bias for a fixed weight, prepacked, row-invariant.

    `few` takes and gives the same, faster for up to some 64 rows; its bits are its own, and row-invariant as well.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, twice: bool = False):
        """weight [out, in] bf16 or float32, bias [out] of the same dtype or None. The weight is copied when packed.

        twice: pack a bf16 weight for few rows too, at the cost of its size; without, `few` is the same as a call.
        """
        self.outputs, self.inputs = weight.shape
        self.plan = plan_for(self.outputs, self.inputs, weight.dtype)
        self._apply = _packed(weight, bias)
        self.few: Callable[[torch.Tensor], torch.Tensor] = self
        if twice and weight.dtype is torch.bfloat16:
            self.few = FewRows(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in], contiguous, of the weight's dtype -> [rows, out], new."""
        rows, plan = x.shape[0], self.plan
        if plan.least <= rows <= plan.most:
            return self._apply(x)
        if rows < plan.least:
            padded = x.new_zeros((plan.least, self.inputs))
            padded[:rows] = x
            return self._apply(padded)[:rows]
        out = x.new_empty((rows, self.outputs))
        for first, last in plan.pieces(rows):
            out[first:last] = (
                self._apply(x[first:last]) if last - first >= plan.least else self(x[first:last])
            )
        return out


def has_prepacking() -> bool:
    """Whether this torch has oneDNN's prepacked linear."""
    return bool(torch.backends.mkldnn.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def multiplies_bf16() -> bool:
    """Whether this CPU has what oneDNN needs for bf16."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    if not has_prepacking():
        return lambda x: torch.nn.functional.linear(x, weight, bias)
    if weight.dtype is torch.bfloat16 and not multiplies_bf16():
        wide = _packed(weight.float(), None if bias is None else bias.float())
        return lambda x: wide(x.float()).bfloat16()
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR[weight.dtype])
    apply = torch.ops.mkldnn._linear_pointwise
    return lambda x: apply(x, packed, bias, "none", [], "")


_plans: dict[tuple[int, int, torch.dtype, int], RowPlan] = {}


def plan_for(outputs: int, inputs: int, dtype: torch.dtype) -> RowPlan:
    """The row counts that agree for this shape, on this machine, with the current number of threads. Remembered."""
    key = (outputs, inputs, dtype, torch.get_num_threads())
    if key not in _plans:
        _plans[key] = _probe(outputs, inputs, dtype)
    return _plans[key]


def _probe(outputs: int, inputs: int, dtype: torch.dtype) -> RowPlan:
    """Compare the rounding errors of every row count with those of 8 rows."""
    generator = torch.Generator().manual_seed(0)
    half, distinct = inputs // 2, 8
    few = torch.randn((min(outputs, 64), half), generator=generator)
    weight = torch.zeros((outputs, inputs), dtype=dtype)
    weight[:, :half] = few.repeat(-(-outputs // few.shape[0]), 1)[:outputs].to(dtype)
    weight[:, half : 2 * half] = weight[:, :half]
    row = torch.randn((distinct, half), generator=generator).to(dtype)
    rows = torch.zeros((distinct, inputs), dtype=dtype)
    rows[:, :half], rows[:, half : 2 * half] = row, -row
    apply = _packed(weight, None)
    expected = apply(rows)

    def agrees(count: int) -> bool:
        found = apply(rows.repeat(-(-count // distinct), 1)[:count])
        whole, rest = count // distinct, count % distinct
        repeated = found[: whole * distinct].view(whole, distinct, outputs)
        return torch.equal(found[whole * distinct :], expected[:rest]) and bool((repeated == expected).all())

    big = outputs * inputs > _BIG
    every = _EVERY_COUNT_TO_BIG if big else _EVERY_COUNT_TO
    least = 1 if agrees(1) else 2
    most = least - 1
    while most < every and agrees(most + 1):
        most += 1
    if most < distinct:
        return RowPlan(least=32, most=32)
    blocks = () if big else tuple(block for block in _WHOLE_BLOCKS if agrees(block))
    # Whole tiles of 16 rows, so that the pieces of a long input are even.
    return RowPlan(least=least, most=most if most < 32 else most // 16 * 16, blocks=blocks)
