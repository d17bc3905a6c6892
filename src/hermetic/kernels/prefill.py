"""Prefill attention: rows gathered from pages, then PyTorch's scaled_dot_product_attention with a mask.

The one thing to know: its bits depend on the shape of the call, so the shape is made not to matter. Keys are
zero-padded to a multiple of 512 and masked with -inf, queries to a multiple of 32, and the mask is always given as
floats (which picks one code path); with that a row's result has the same bits whatever chunk it came in, in bf16 and
float32 (measured for torch 2.13 on CPU; tests/kernels/test_prefill.py holds it).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hermetic.kernels.base import KEY_PAD, QUERY_PAD


def padded(count: int, to: int) -> int:
    """The next multiple of `to`, at least one."""
    return max(1, -(-count // to)) * to


class Prefill:
    """Buffers and mask of one kernel set, kept from layer to layer and from chunk to chunk."""

    def __init__(self, heads: int, kv_heads: int, dim: int, scale: float, dtype: torch.dtype) -> None:
        self.heads, self.kv_heads, self.dim, self.scale, self.dtype = heads, kv_heads, dim, scale, dtype
        self._keys = torch.empty(0, dtype=dtype)
        self._queries = torch.empty(0, dtype=dtype)
        self._mask = torch.empty(0, dtype=dtype)
        self._mask_for = (-1, -1)

    def buffers(self, length: int) -> tuple[Tensor, Tensor]:
        """Uninitialised k and v of [kv_heads, padded(length), dim], for `gather` to fill."""
        rows = padded(length, KEY_PAD)
        need = 2 * self.kv_heads * rows * self.dim
        if self._keys.numel() < need:
            self._keys = torch.empty(need, dtype=self.dtype)
        k, v = self._keys[:need].view(2, self.kv_heads, rows, self.dim)
        return k, v

    def mask(self, start: int, count: int) -> Tensor:
        """[padded(count), padded(start + count)]: 0 where a query may look, -inf elsewhere; padding looks at row 0."""
        if self._mask_for != (start, count):
            rows, columns = padded(count, QUERY_PAD), padded(start + count, KEY_PAD)
            position = torch.arange(start, start + rows)
            position[count:] = 0
            hidden = torch.arange(columns)[None, :] > position[:, None]
            self._mask = torch.zeros(rows, columns, dtype=self.dtype).masked_fill_(hidden, float("-inf"))
            self._mask_for = (start, count)
        return self._mask

    def attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, start: int) -> None:
        """q, out [T, heads, dim]; k, v from `buffers`, filled for start+T rows."""
        count = q.shape[0]
        rows = padded(count, QUERY_PAD)
        need = rows * self.heads * self.dim
        if self._queries.numel() < need:
            self._queries = torch.zeros(need, dtype=self.dtype)
        queries = self._queries[:need].view(rows, self.heads, self.dim)
        queries[:count] = q
        queries[count:] = 0
        result = scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            k[None],
            v[None],
            attn_mask=self.mask(start, count)[None, None],
            scale=self.scale,
            enable_gqa=self.heads != self.kv_heads,
        )
        out.copy_(result[0, :, :count].transpose(0, 1))
