"""The decoder's elementwise work: norms, rotary embedding, SiLU. Fused Numba kernels, and plain PyTorch to check them.

The one thing to know: every row is computed by itself, in one fixed order, so a row's bits do not depend on how many
rows there are. bf16 is rounded exactly where transformers' Llama rounds it (after the norm and again after its weight,
after each product of the rotation and after their sum, after SiLU, after each residual addition), so greedy text agrees.
Sums of squares are taken in float64: rounded to float32, they no longer depend on the order of addition.

`PlainOps` and `FusedOps` have the same methods and are held equal bit for bit by tests (in float32 but for SiLU, whose
exponential differs from torch's in the last bits). Arrays are bf16 as uint16 bits, or float32.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import torch
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic, overload

from hermetic.kernels.bf16 import bf16_to_f32, f32_to_bf16

# Elements from which two threads beat one: a parallel Numba call costs some 35 us, a serial element 0.2-0.4 ns.
PARALLEL_ELEMENTS = 200_000


class Ops(Protocol):
    """All tensors of one call share the dtype, bf16 or float32, but for the float32 tables and int64 positions."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [T, hidden] -> normalised and weighted [T, hidden], new."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """x [T, hidden] += delta [T, hidden] in place; returns rms_norm of the sum, new."""
        ...

    def rope(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        heads: int,
        kv_heads: int,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
    ) -> None:
        """Rotate Q and K inside qkv [T, (heads + 2 * kv_heads) * dim], in place, after normalising each head.

        positions i64 [T]; cos, sin f32 [at least max position + 1, dim / 2], rounded to the dtype already;
        norms: the weights [dim] of Q's and K's norm, or None for a model without QK-norm.
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2 * intermediate] -> silu(gate) * up [T, intermediate], new."""
        ...


class PlainOps:
    """The same in plain PyTorch, a rounding at a time: the reference."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        mean = x.double().square().mean(-1, keepdim=True).float()
        # The root in float64, rounded after: torch's float32 root is off by one ulp for about one row in a hundred.
        root = (mean + eps).double().sqrt().float()
        return weight * (x.float() * (1.0 / root)).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        x += delta
        return self.rms_norm(x, weight, eps)

    def rope(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        heads: int,
        kv_heads: int,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
    ) -> None:
        rows, half = qkv.shape[0], cos.shape[1]
        parts = qkv.view(rows, heads + 2 * kv_heads, 2 * half)
        c = cos[positions].to(qkv.dtype).repeat(1, 2).unsqueeze(1)
        s = sin[positions].to(qkv.dtype).repeat(1, 2).unsqueeze(1)
        for which, part in enumerate((parts[:, :heads], parts[:, heads : heads + kv_heads])):
            x = self.rms_norm(part, norms[which], eps) if norms else part
            part.copy_(x * c + torch.cat((-x[..., half:], x[..., :half]), -1) * s)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


class FusedOps:
    """One pass over memory for each, on as many threads as pay."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        kernel = _rms_norm_parallel if x.numel() >= PARALLEL_ELEMENTS else _rms_norm
        kernel(as_numpy(x), as_numpy(weight), np.float32(eps), as_numpy(out))
        return out

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        out = torch.empty_like(x)
        kernel = _add_rms_norm_parallel if x.numel() >= PARALLEL_ELEMENTS else _add_rms_norm
        kernel(as_numpy(x), as_numpy(delta), as_numpy(weight), np.float32(eps), as_numpy(out))
        return out

    def rope(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        heads: int,
        kv_heads: int,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
    ) -> None:
        bits = as_numpy(qkv)
        where, c, s = positions.numpy(), cos.numpy(), sin.numpy()
        parallel = qkv.numel() >= PARALLEL_ELEMENTS // 4
        if norms is None:
            (_rope_parallel if parallel else _rope)(bits, where, c, s, heads + kv_heads)
        else:
            q_norm, k_norm = as_numpy(norms[0]), as_numpy(norms[1])
            kernel = _norm_rope_parallel if parallel else _norm_rope
            kernel(bits, where, c, s, heads, kv_heads, q_norm, k_norm, np.float32(eps))

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, width = gate_up.shape
        out = torch.empty((rows, width // 2), dtype=gate_up.dtype)
        kernel = _silu_mul_parallel if out.numel() >= PARALLEL_ELEMENTS // 4 else _silu_mul
        kernel(as_numpy(gate_up), as_numpy(out))
        return out


def as_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The tensor's own memory as an array; a bf16 tensor's as its uint16 bits."""
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: np.ndarray[Any, Any] = tensor.numpy()
    return array


# --- kernels. `load` and `store` pick bf16 or float32 by the array's dtype when a kernel is compiled. ---


def load(bits):
    """A stored element as float32. In kernels only."""
    raise NotImplementedError


def store(x, bits):
    """float32 x, rounded to the storage type of the element `bits`. In kernels only."""
    raise NotImplementedError


@overload(load, inline="always")
def _load(bits):
    if isinstance(bits, types.Integer):
        return lambda bits: bf16_to_f32(bits)
    return lambda bits: bits


@overload(store, inline="always")
def _store(x, bits):
    if isinstance(bits, types.Integer):
        return lambda x, bits: f32_to_bf16(x)
    return lambda x, bits: x


@intrinsic
def _power_of_two(_context: Any, exponent: Any) -> Any:
    """2^exponent for an integral float32 from -126 to 127, by writing the exponent bits."""
    word = ir.IntType(32)

    def codegen(_ctx: Any, builder: Any, _signature: Any, args: Any) -> Any:
        biased = builder.add(builder.fptosi(args[0], word), ir.Constant(word, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(word, 23)), ir.FloatType())

    return types.float32(types.float32), codegen


_F = np.float32
_LOW, _HIGH = _F(-103.0), _F(89.0)  # outside, exp is 0 or infinity in float32
_LOG2E, _LN2_HIGH, _LN2_LOW = _F(1.44269504088896341), _F(0.693359375), _F(-2.12194440e-4)
# expf of the Cephes library (S. Moshier): minimax polynomial of (exp(r) - 1 - r) / r^2 for |r| <= ln(2) / 2.
_P0, _P1, _P2 = _F(1.9875691500e-4), _F(1.3981999507e-3), _F(8.3334519073e-3)
_P3, _P4, _P5 = _F(4.1665795894e-2), _F(1.6666665459e-1), _F(5.0000001201e-1)
_ONE, _HALF = _F(1.0), _F(0.5)
_ROUND = _F(1.5 * 2**23)  # adding and taking it away again rounds a small float32 to a whole number


@njit(nogil=True, error_model="numpy")
def exp32(x):
    """exp(x) in float32 within 2 ulp; the same bits at every position of a vectorised loop."""
    x = _HIGH if x > _HIGH else x
    x = _LOW if x < _LOW else x
    n = (x * _LOG2E + _ROUND) - _ROUND
    r = x - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = ((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _P5
    # In two halves, so that 2^128 and the subnormals come out right.
    first = (n * _HALF + _ROUND) - _ROUND
    return (p * r * r + r + _ONE) * _power_of_two(first) * _power_of_two(n - first)


# Reassociation is allowed for this sum alone: it lets LLVM add in lanes, always the same ones for a given width.
@njit(nogil=True, fastmath={"reassoc", "nsz"}, error_model="numpy")
def _inverse_rms(row, eps):
    total = 0.0
    for i in range(row.size):
        value = np.float64(load(row[i]))
        total += value * value
    return _ONE / np.float32(math.sqrt(np.float32(total / row.size) + eps))


@njit(nogil=True, error_model="numpy")
def _norm_row(row, weight, eps, out):
    scale = _inverse_rms(row, eps)
    for i in range(row.size):
        normal = load(store(load(row[i]) * scale, row[i]))
        out[i] = store(load(weight[i]) * normal, row[i])


@njit(nogil=True, error_model="numpy")
def _add_row(row, delta):
    for i in range(row.size):
        row[i] = store(load(row[i]) + load(delta[i]), row[i])


@njit(nogil=True, error_model="numpy")
def _norm_heads(row, weight, eps, first, last):
    dim = weight.size
    for h in range(first, last):
        _norm_row(row[h * dim : (h + 1) * dim], weight, eps, row[h * dim : (h + 1) * dim])


# Indexed, not sliced: a view for each head costs more than its rotation.
@njit(nogil=True, error_model="numpy")
def _rotate_heads(qkv, t, cos, sin, where, rotated):
    half = cos.shape[1]
    for h in range(rotated):
        first = 2 * h * half
        for i in range(half):
            low, high = load(qkv[t, first + i]), load(qkv[t, first + half + i])
            c, s, like = cos[where, i], sin[where, i], qkv[t, first + i]
            turned = load(store(low * c, like)) + load(store(-high * s, like))
            qkv[t, first + half + i] = store(load(store(high * c, like)) + load(store(low * s, like)), like)
            qkv[t, first + i] = store(turned, like)


@njit(nogil=True, error_model="numpy")
def _silu_row(gate, up, out):
    for i in range(gate.size):
        x = load(gate[i])
        activated = load(store(x / (_ONE + exp32(-x)), gate[i]))
        out[i] = store(activated * load(up[i]), gate[i])


# Numba keys its file cache by function, not by options: the serial and the parallel kernel need a `def` each.
_kernel = njit(nogil=True, cache=True, error_model="numpy")
_parallel_kernel = njit(nogil=True, cache=True, error_model="numpy", parallel=True)


@_kernel
def _rms_norm(x, weight, eps, out):
    for t in range(x.shape[0]):
        _norm_row(x[t], weight, eps, out[t])


@_parallel_kernel
def _rms_norm_parallel(x, weight, eps, out):
    for t in prange(x.shape[0]):
        _norm_row(x[t], weight, eps, out[t])


@_kernel
def _add_rms_norm(x, delta, weight, eps, out):
    for t in range(x.shape[0]):
        _add_row(x[t], delta[t])
        _norm_row(x[t], weight, eps, out[t])


@_parallel_kernel
def _add_rms_norm_parallel(x, delta, weight, eps, out):
    for t in prange(x.shape[0]):
        _add_row(x[t], delta[t])
        _norm_row(x[t], weight, eps, out[t])


@_kernel
def _rope(qkv, positions, cos, sin, rotated):
    for t in range(qkv.shape[0]):
        _rotate_heads(qkv, t, cos, sin, positions[t], rotated)


@_parallel_kernel
def _rope_parallel(qkv, positions, cos, sin, rotated):
    for t in prange(qkv.shape[0]):
        _rotate_heads(qkv, t, cos, sin, positions[t], rotated)


@_kernel
def _norm_rope(qkv, positions, cos, sin, heads, kv_heads, q_norm, k_norm, eps):
    for t in range(qkv.shape[0]):
        _norm_heads(qkv[t], q_norm, eps, 0, heads)
        _norm_heads(qkv[t], k_norm, eps, heads, heads + kv_heads)
        _rotate_heads(qkv, t, cos, sin, positions[t], heads + kv_heads)


@_parallel_kernel
def _norm_rope_parallel(qkv, positions, cos, sin, heads, kv_heads, q_norm, k_norm, eps):
    for t in prange(qkv.shape[0]):
        _norm_heads(qkv[t], q_norm, eps, 0, heads)
        _norm_heads(qkv[t], k_norm, eps, heads, heads + kv_heads)
        _rotate_heads(qkv, t, cos, sin, positions[t], heads + kv_heads)


@_kernel
def _silu_mul(gate_up, out):
    width = out.shape[1]
    for t in range(out.shape[0]):
        _silu_row(gate_up[t, :width], gate_up[t, width:], out[t])


@_parallel_kernel
def _silu_mul_parallel(gate_up, out):
    width = out.shape[1]
    for t in prange(out.shape[0]):
        _silu_row(gate_up[t, :width], gate_up[t, width:], out[t])
