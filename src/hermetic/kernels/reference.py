"""The kernels in plain numpy and PyTorch: what the fast ones are tested against. Slow, short, and meant to be read.

The one thing to know: seals come from kv/seals.py and attention is a softmax written out in float64, so nothing here
shares code or order of summation with the Numba kernels. Results agree within rounding, seals exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hermetic.kernels.base import (
    I32,
    U64,
    GatherResult,
    KernelError,
    Kernels,
    Memory,
    ReadPlan,
    WritePlan,
    check_copy,
)


class ReferenceKernels(Kernels):
    """See base.py."""

    def _bits(self, rows: Tensor) -> npt.NDArray[np.generic]:
        """A tensor as numpy, bf16 as its bits, as Geometry.rows shows a page."""
        dense = rows.detach().contiguous()
        return dense.view(torch.int16).numpy().view(np.uint16) if self.dtype == "bf16" else dense.numpy()

    def _tensor(self, bits: npt.NDArray[np.generic]) -> Tensor:
        dense = np.ascontiguousarray(bits)
        if self.dtype == "bf16":
            return torch.from_numpy(dense.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(dense)

    def write(self, memory: Memory, layer: int, k: Tensor, v: Tensor, plan: WritePlan) -> None:
        geometry, tokens = self.geometry, k.shape[0]
        inside = (plan.page >= 0) & (plan.page < len(memory)) & (plan.first >= 0) & (plan.count >= 0)
        inside &= (plan.first + plan.count <= geometry.page_size) & (plan.start >= 0)
        inside &= plan.start + plan.count <= tokens
        if not inside.all():
            raise KernelError(
                f"segment {int(np.flatnonzero(~inside)[0])} leads outside the pool, the page or k and v"
            )
        if v.shape[0] != tokens or len(plan.binds) != tokens:
            raise KernelError(f"k has {tokens} rows, v {v.shape[0]}, the plan {len(plan.binds)} bind terms")
        for s in range(len(plan.page)):
            first, count, start = int(plan.first[s]), int(plan.count[s]), int(plan.start[s])
            # A page of nothing but these rows: its lanes are the values, not what the pool holds afterwards.
            fresh = np.zeros((1, geometry.stride), np.uint8)
            for component, values in zip(geometry.components, (k, v), strict=True):
                rows = self._bits(values[start : start + count]).swapaxes(0, 1)
                geometry.rows(fresh, component.name)[0, layer, :, first : first + count] = rows
            terms = self.key.nh(geometry.lanes(fresh), first, first + count)[0, layer]
            terms = terms + plan.binds[start : start + count].sum(dtype=np.uint64)
            page = memory[plan.page[s] : plan.page[s] + 1]
            for component in geometry.components:
                size = component.row_bytes
                for head in range(self.kv_heads):
                    index = geometry.components.index(component)
                    at = geometry.offset(layer, head, index, first)
                    page[0, at : at + count * size] = fresh[0, at : at + count * size]
            seals = geometry.seals(page)[0, layer]
            seals[:] = terms + (self.key.masks(plan.word[s : s + 1])[0, layer] if first == 0 else seals)

    def attend(
        self, memory: Memory, layer: int, q: Tensor, out: Tensor, plan: ReadPlan, verify: bool
    ) -> None:
        for b, length in enumerate(plan.lengths.tolist()):
            k = torch.empty(self.kv_heads, length, self.dim, dtype=self.torch_dtype)
            v = torch.empty_like(k)
            held = self.geometry.pages_for(length)
            pages = plan.table[b, :held]
            if held > len(pages):  # the table is too short: as if its next page were outside the pool
                pages = np.concatenate([pages, np.full(held - len(pages), -1, np.int32)])
            grown = [np.resize(x[b], max(held, 1)) for x in (plan.words, plan.binds)]
            found = self.gather(memory, layer, pages, length, grown[0], grown[1], k, v, verify)
            outside = int(np.count_nonzero((pages < 0) | (pages >= len(memory))))
            if verify:
                plan.tiles[b] += held - outside
            if found.bad >= 0 and (plan.bad[b] < 0 or found.bad < plan.bad[b]):
                plan.bad[b] = found.bad
            out[b] = softmax_attention(q[b : b + 1], k, v, length - 1, self.scale)[0].to(out.dtype)

    def gather(
        self,
        memory: Memory,
        layer: int,
        pages: I32,
        length: int,
        words: U64,
        binds: U64,
        k_out: Tensor,
        v_out: Tensor,
        verify: bool,
    ) -> GatherResult:
        size, held = self.geometry.page_size, self.geometry.pages_for(length)
        k_out.zero_()
        v_out.zero_()
        bad, tiles = -1, 0
        for i in range(held):
            page, rows = int(pages[i]), min(size, length - i * size)
            good = 0 <= page < len(memory)
            if good:
                copy = memory[page : page + 1].copy()
                for name, target in zip(
                    (c.name for c in self.geometry.components), (k_out, v_out), strict=True
                ):
                    values = self._tensor(self.geometry.rows(copy, name)[0, layer, :, :rows])
                    target[:, i * size : i * size + rows] = values
                if verify:
                    good = bool(
                        self.key.verify(copy, [rows], words[i : i + 1], binds[i : i + 1])[0, layer].all()
                    )
                    tiles += self.kv_heads
            if not good and bad < 0:
                bad = i
        return GatherResult(bad, tiles)

    def prefill_attend(
        self,
        memory: Memory,
        layer: int,
        q: Tensor,
        out: Tensor,
        pages: I32,
        start: int,
        words: U64,
        binds: U64,
        verify: bool,
    ) -> GatherResult:
        length = start + q.shape[0]
        k = torch.empty(self.kv_heads, length, self.dim, dtype=self.torch_dtype)
        v = torch.empty_like(k)
        found = self.gather(memory, layer, pages, length, words, binds, k, v, verify)
        out.copy_(softmax_attention(q, k, v, start, self.scale))
        return found

    def verify_pages(
        self, memory: Memory, pages: I32, fills: I32, words: U64, binds: U64
    ) -> npt.NDArray[np.bool_]:
        inside = (pages >= 0) & (pages < len(memory)) & (fills >= 0) & (fills <= self.geometry.page_size)
        good = np.zeros((len(pages), *self.key.places.shape), np.bool_)
        chosen = np.ascontiguousarray(memory[pages[inside]])
        good[inside] = self.key.verify(chosen, fills[inside], words[inside], binds[inside])
        return good

    def copy_rows(
        self, source: Memory, source_pages: I32, target: Memory, target_pages: I32, fills: I32
    ) -> None:
        check_copy(self.geometry, source, source_pages, target, target_pages, fills)
        for a, b, fill in zip(source_pages, target_pages, fills.tolist(), strict=True):
            page = np.zeros((1, self.geometry.stride), np.uint8)
            old = source[a : a + 1]
            filled = self.key.rows < fill
            self.geometry.lanes(page)[..., filled] = self.geometry.lanes(old)[..., filled]
            self.geometry.seals(page)[...] = self.geometry.seals(old)
            target[b] = page[0]

    def warm(self, progress: Callable[[str], None] | None = None) -> None:
        """Nothing to compile."""


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, start: int, scale: float) -> Tensor:
    """Causal attention in float64: q [T, heads, dim] at positions start.., k, v [kv_heads, L, dim] -> [T, heads, dim]."""
    group = q.shape[1] // k.shape[0]
    keys, values = (x.double().repeat_interleave(group, 0) for x in (k, v))
    scores = torch.einsum("thd,hld->htl", q.double(), keys) * scale
    late = torch.arange(k.shape[1])[None, :] > torch.arange(start, start + q.shape[0])[:, None]
    weights = scores.masked_fill(late, float("-inf")).softmax(-1)
    return torch.einsum("htl,hld->thd", weights, values)
