"""Products of a few rows with bf16 weights, for decode steps: bound by memory where oneDNN is not.

A decode step reads every weight for a handful of rows, so the time is that of reading them once, at the pace of the
memory. oneDNN's linear reaches half of it at one row and falls behind from there.

The one thing to know: a row's result depends on that row and the weights alone, bit for bit: not on the other rows, not
on their number, not on the threads. Each output is one chain of additions by one thread (see tiles.py), so this holds
by construction. It does depend on the kind of processor, which is why the kind is chosen once a process, never by size.

bf16 in, float32 sums; out comes bf16, rounded to nearest even, or the float32 sums themselves. NaN and infinity
propagate.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding
import torch
from numba import get_num_threads, njit, prange

from hermetic.kernels import simd, tiles
from hermetic.kernels.tiles import (
    BLOCK_OUTPUTS,
    PAIRS,
    PORTABLE,
    TILE_INPUTS,
    TILES,
    multiply_blocks,
)

ALONE = 1 << 18  # bytes of weights up to which a second thread is not worth waking
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18  # Linux, x86-64: asm/prctl.h
LAYOUTS = tiles.layouts()

Kernel = Callable[..., Any]
_INSTRUCTIONS = hashlib.blake2b(
    Path(simd.__file__).read_bytes() + Path(tiles.__file__).read_bytes(), digest_size=6
).hexdigest()


@cache
def processor_kind() -> int:
    """The fastest of tiles.py's kinds that this process may use. Linux wants to be asked for AMX, once a process."""
    features = llvmlite.binding.get_host_cpu_features()
    if features.get("amx-bf16") and _may_use_amx():
        return TILES
    return PAIRS if features.get("avx512bf16") else PORTABLE


def _may_use_amx() -> bool:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """weight bf16 [outputs, inputs] -> bf16 [outputs/32][inputs/32][2][16][16][2], new, rounded up with zeros."""
    outputs, inputs = weight.shape
    blocks, steps = -(-outputs // BLOCK_OUTPUTS), -(-inputs // TILE_INPUTS)
    if (outputs, inputs) != (blocks * BLOCK_OUTPUTS, steps * TILE_INPUTS):
        whole = weight.new_zeros((blocks * BLOCK_OUTPUTS, steps * TILE_INPUTS))
        whole[:outputs, :inputs] = weight
        weight = whole
    # [block, side, output, step, pair, of the pair] -> [block, step, side, pair, output, of the pair]
    parts = weight.view(blocks, 2, BLOCK_OUTPUTS // 2, steps, TILE_INPUTS // 2, 2)
    return parts.permute(0, 3, 1, 4, 2, 5).contiguous()


class FewRows:
    """y = x @ weight.T + bias for a fixed bf16 weight and any number of rows, best up to some 64."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
        kind: int | None = None,
    ):
        """weight bf16 [outputs, inputs], copied; bias [outputs] or None; dtype of the result: bf16 or float32.

        kind: of tiles.py's, for tests; as a rule the processor's.
        """
        if weight.dtype is not torch.bfloat16 or dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"bf16 weights give bf16 or float32, not {weight.dtype} giving {dtype}")
        self.outputs, self.inputs = weight.shape
        self._weight = pack(weight)
        self._blocks, self._steps = self._weight.shape[:2]
        self._bias = torch.zeros(self._blocks * BLOCK_OUTPUTS)
        if bias is not None:
            self._bias[: self.outputs] = bias
        self._dtype, self._wide = dtype, int(dtype is torch.float32)
        self._item = 4 if self._wide else 2
        self._padded = (self._steps * TILE_INPUTS, self._blocks * BLOCK_OUTPUTS)
        kind = processor_kind() if kind is None else kind
        self._kernels = [kernel(kind, parallel) for parallel in (0, 1)]
        self.bytes = 2 * self._weight.numel()
        self._small = self.bytes <= ALONE
        # Address, blocks of 32 outputs, steps of 32 inputs, address of the bias: for kernels that take in this product.
        self.place = (self._weight.data_ptr(), self._blocks, self._steps, self._bias.data_ptr())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x bf16 [rows, inputs], contiguous -> [rows, outputs], new."""
        rows, inputs = x.shape
        if inputs != self.inputs or x.dtype is not torch.bfloat16 or not x.is_contiguous():
            raise ValueError(
                f"x must be contiguous bf16 [rows, {self.inputs}], not {x.dtype} {tuple(x.shape)} "
                f"strides {x.stride()}"
            )
        width, room = self._padded
        if width != inputs:
            x = torch.nn.functional.pad(x, (0, width - inputs))
        out = torch.empty((rows, room), dtype=self._dtype)
        threads = 1 if self._small else get_num_threads()
        self._kernels[threads > 1](
            x.data_ptr(), 2 * width, rows, *self.place, LAYOUTS.ctypes.data, out.data_ptr(), self._item * room,
            self._wide, threads,
        )  # fmt: skip
        return out if room == self.outputs else out[:, : self.outputs].contiguous()


# --- kernels: closures hold plain integers and names carry the build; see paged.py for why ------------------------------


def compile_kernel(function: Kernel, parallel: int, digest: str = "") -> Kernel:
    """digest: of the files, other than the function's own and tiles.py, whose pieces go into it."""
    function.__qualname__ += f".{_INSTRUCTIONS}{digest}" + (".parallel" if parallel else "")
    others = ("comprehension", "reduction", "inplace_binop", "setitem", "numpy", "stencil", "fusion")
    options: Any = {"prange": True, **dict.fromkeys(others, False)} if parallel else False
    compiled: Kernel = njit(nogil=True, cache=True, error_model="numpy", parallel=options)(function)
    return compiled


@cache
def kernel(KIND: int, parallel: int) -> Kernel:
    """The kernel of one kind. Its arguments are integers, so one build serves every shape:

    x, x_row            address of bf16 rows, bytes between them
    rows
    weight              address, as `pack` laid it out: `blocks` of 32 outputs, `steps` of 32 inputs
    bias                address of float32 [32 * blocks]
    out, out_row, wide  address of the result, bytes between its rows, 1 for float32 or 0 for bf16
    layouts             address of LAYOUTS
    workers             threads to use
    """

    def multiply(x, x_row, rows, weight, blocks, steps, bias, layouts, out, out_row, wide, workers):
        for worker in prange(workers):
            first, last = blocks * worker // workers, blocks * (worker + 1) // workers
            if wide:
                multiply_blocks(
                    x, x_row, rows, weight, first, last, steps, bias, out, out_row, layouts, 4, KIND
                )  # fmt: skip
            else:
                multiply_blocks(
                    x, x_row, rows, weight, first, last, steps, bias, out, out_row, layouts, 2, KIND
                )  # fmt: skip

    return compile_kernel(multiply, parallel)
