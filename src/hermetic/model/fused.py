"""A decode step's layers in one call each: everything between one layer's attention and the next one's.

At one row the arithmetic of a layer takes some 0.3 ms and eleven calls from Python nearly as much again, so the four
products, the norms, SiLU and the rotation are one Numba function here. The one thing to know: it gives the same bits as
the calls that it replaces, being made of the same pieces, so a row does not notice whether a prompt is computed beside it.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numba import get_num_threads, njit, prange

from hermetic.kernels.matmul import ALONE, LAYOUTS, FewRows, Kernel, compile_kernel, processor_kind
from hermetic.kernels.tiles import BLOCK_OUTPUTS, TILE_INPUTS, multiply_blocks
from hermetic.model import ops
from hermetic.model.ops import _add_row, _norm_heads, _norm_row, _rotate_heads, _silu_row, as_numpy

_APART = 4  # rows from which the work between two products is shared among the threads
_OUTPUT, _GATE_UP, _DOWN, _QKV, _END = range(5)  # the stages of one call, in order
_OPS = hashlib.blake2b(Path(ops.__file__).read_bytes(), digest_size=6).hexdigest()
Bits = np.ndarray[Any, np.dtype[np.uint16]]


class Attend(Protocol):
    """As in decoder.py."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor: ...


class FusedLayer(NamedTuple):
    """One layer: products in the order of the stages, and the bf16 weights of its norms."""

    products: tuple[FewRows, FewRows, FewRows, FewRows]
    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    qk_norms: tuple[torch.Tensor, torch.Tensor] | None

    @property
    def fits(self) -> bool:
        """Whether all widths are whole blocks, so that one product's result is the next one's input as it lies."""
        return all(p.outputs % BLOCK_OUTPUTS == 0 and p.inputs % TILE_INPUTS == 0 for p in self.products)


class DecodeLayers:
    """All layers of a model, for bf16 decode rows. One step at a time: it keeps buffers between steps."""

    def __init__(
        self, layers: list[FusedLayer], last_norm: torch.Tensor, heads: int, kv_heads: int, eps: float
    ):
        """The layers must fit, and stay alive with their tensors."""
        self._layers, self._heads, self._kv_heads = layers, heads, kv_heads
        self._eps = np.float32(eps)
        products = layers[0].products
        self._widths = (
            products[_QKV].outputs,
            products[_GATE_UP].outputs,
            products[_DOWN].inputs,
            products[_DOWN].outputs,
        )
        self._alone = sum(p.bytes for p in products) <= ALONE
        self._kept = torch.empty(0, dtype=torch.bfloat16)
        none: Bits = np.zeros(0, np.uint16)
        # Call n: what follows the attention of layer n-1 and precedes that of layer n.
        self._calls: list[tuple[Any, ...]] = []
        for before, after in zip([None, *layers], [*layers, None], strict=True):
            table = np.zeros((_END, 4), np.int64)
            if before:
                table[:_QKV] = [p.place for p in before.products[:_QKV]]
            if after:
                table[_QKV] = after.products[_QKV].place
            norms = after.qk_norms if after else None
            self._calls.append(
                (
                    table,
                    _OUTPUT if before else _QKV,
                    _END if after else _QKV,
                    as_numpy(before.mlp_norm) if before else none,
                    as_numpy(after.attention_norm if after else last_norm),
                    as_numpy(norms[0]) if norms else none,
                    as_numpy(norms[1]) if norms else none,
                )
            )

    def run(
        self,
        x: torch.Tensor,
        h: torch.Tensor,
        positions: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
    ) -> None:
        """x bf16 [T, hidden], changed; h the same by the first layer's norm, becomes the result by the last norm.

        positions i64 [T]; cos, sin f32 [more than any position, dim / 2].
        """
        rows, heads, kv_heads = x.shape[0], self._heads, self._kv_heads
        sizes = [rows * width for width in self._widths]
        if self._kept.numel() < sum(sizes):
            self._kept = torch.empty(2 * sum(sizes), dtype=torch.bfloat16)
        qkv, middle, active, delta = (part.view(rows, -1) for part in self._kept[: sum(sizes)].split(sizes))
        q, k, v = qkv.view(rows, heads + 2 * kv_heads, -1).split((heads, kv_heads, kv_heads), 1)
        threads = 1 if self._alone else get_num_threads()
        advance = layer_kernel(processor_kind(), int(threads > 1))
        arrays = [as_numpy(part) for part in (x, h, qkv, middle, active, delta)]
        fixed = (
            positions.numpy(), cos.numpy(), sin.numpy(), heads, kv_heads, self._eps, LAYOUTS.ctypes.data, threads
        )  # fmt: skip
        attended = h  # not looked at by the first call
        for n, call in enumerate(self._calls):
            advance(*arrays, attended.data_ptr(), *call, *fixed)
            if n < len(self._layers):
                attended = attend(n, q, k, v).contiguous()


@cache
def layer_kernel(KIND: int, parallel: int) -> Kernel:
    """The kernel for one of tiles.py's kinds; one build serves every shape."""

    def advance(
        x, h, qkv, middle, active, delta, attended, table, begin, end, mlp_norm, next_norm, q_norm, k_norm,
        positions, cos, sin, heads, kv_heads, eps, layouts, workers,
    ):  # fmt: skip
        """x .. delta: uint16 [rows, width]; attended: address of bf16 [rows, heads * dim]; table int64 [stages, 4]: each
        product's weights, blocks, steps, bias; begin, end: stages to run; q_norm, k_norm: empty without QK-norm."""
        rows = x.shape[0]
        for stage in range(begin, end):
            weight, blocks, steps, bias = table[stage, 0], table[stage, 1], table[stage, 2], table[stage, 3]
            if stage == _OUTPUT:
                source, target = attended, delta.ctypes.data
            elif stage == _GATE_UP:
                source, target = h.ctypes.data, middle.ctypes.data
            elif stage == _DOWN:
                source, target = active.ctypes.data, delta.ctypes.data
            else:
                source, target = h.ctypes.data, qkv.ctypes.data
            for worker in prange(workers):
                first, last = blocks * worker // workers, blocks * (worker + 1) // workers
                multiply_blocks(
                    source, steps * 2 * TILE_INPUTS, rows, weight, first, last, steps, bias,
                    target, blocks * 2 * BLOCK_OUTPUTS, layouts, 2, KIND,
                )  # fmt: skip
            groups = workers if rows >= _APART else 1
            if groups == 1:
                _between(
                    stage, 0, rows, x, h, qkv, middle, active, delta, mlp_norm, next_norm, q_norm, k_norm,
                    positions, cos, sin, heads, kv_heads, eps,
                )  # fmt: skip
            else:
                for worker in prange(workers):
                    _between(
                        stage, rows * worker // workers, rows * (worker + 1) // workers,
                        x, h, qkv, middle, active, delta, mlp_norm, next_norm, q_norm, k_norm,
                        positions, cos, sin, heads, kv_heads, eps,
                    )  # fmt: skip

    return compile_kernel(advance, parallel, _OPS)


@njit(nogil=True, error_model="numpy")
def _between(
    stage, first, last, x, h, qkv, middle, active, delta, mlp_norm, next_norm, q_norm, k_norm,
    positions, cos, sin, heads, kv_heads, eps,
):  # fmt: skip
    """What is done to rows first..last-1 of a product before the next one. Norms, SiLU and rotation as in ops.py."""
    width = active.shape[1]
    for t in range(first, last):
        if stage == _OUTPUT:
            _add_row(x[t], delta[t])
            _norm_row(x[t], mlp_norm, eps, h[t])
        elif stage == _GATE_UP:
            _silu_row(middle[t, :width], middle[t, width:], active[t])
        elif stage == _DOWN:
            _add_row(x[t], delta[t])
            _norm_row(x[t], next_norm, eps, h[t])
        else:
            if q_norm.size:
                _norm_heads(qkv[t], q_norm, eps, 0, heads)
                _norm_heads(qkv[t], k_norm, eps, heads, heads + kv_heads)
            _rotate_heads(qkv, t, cos, sin, positions[t], heads + kv_heads)
