"""What the engine asks of a kernel set, and the promises that every kernel set keeps.

`NumbaKernels` (numba_cpu.py) is the fast one, `ReferenceKernels` (reference.py) the plain one; both are built as
`NumbaKernels(geometry, key, heads=9, scale=0.125, dtype="bf16")` and take the same calls. Layers are slots (0-based).
Plans are numpy arrays that the engine builds once a step and uses for every layer.

Promises:

- *Load once.* Bytes that are hashed are the very bytes that are used: each is loaded from the page once, and hash and
  arithmetic (or the copy) take it from the register. A row's seal term comes from the values being written.
- *Neighbours do not matter.* What comes out for a sequence depends on its own rows and length alone, bit for bit:
  not on the batch, not on the thread count, not on how its prompt was cut into chunks, not on `verify`.
- *Nothing is silently clean.* NaN in a page gives NaN out (or a failed check). A page number outside the pool is
  never followed: it is reported like a page whose seal is wrong.
- Rows at or past the fill have no influence on any result, whatever they hold.

One kernel set serves one thread at a time: it keeps buffers between calls. `numba.set_num_threads` by the calling
thread is honoured; kernels release the GIL.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hermetic.kv.geometry import ITEM_SIZE, Geometry
from hermetic.kv.seals import SealKey

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Memory = npt.NDArray[np.uint8]
Dtype = Literal["bf16", "f32"]

TORCH: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "f32": torch.float32}
KEY_PAD = 512  # keys of a gather are zero-padded to a multiple of this many rows
QUERY_PAD = 32  # queries of prefill attention likewise: the same bits whatever the chunk size


class KernelError(ValueError):
    """A plan or a tensor that cannot be used; nothing was written. The message names the argument and the numbers."""


class GatherResult(NamedTuple):
    bad: int  # -1, or the index (0..) of the first page that is outside the pool or did not verify
    tiles: int  # tiles whose hash was compared


def _need(what: str, array: npt.NDArray[Any], dtype: type[np.generic], shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise KernelError(
            f"{what} must be a contiguous {np.dtype(dtype).name} array of shape {shape}, "
            f"not {array.dtype.name} {array.shape}{'' if array.flags.c_contiguous else ' with gaps'}"
        )


@dataclass(frozen=True)
class WritePlan:
    """Where the T rows of k and v go: S segments, each some consecutive rows of one page; no page twice."""

    page: I32  # [S]
    first: I32  # [S] row slot of the segment's first row; rows 0..first-1 were written and sealed before
    count: I32  # [S] rows
    start: I32  # [S] the segment's first row in k and v
    word: U64  # [S] mask word of the page, from the writer's own Chain
    binds: U64  # [T] bind term of each row of k and v

    def __post_init__(self) -> None:
        segments = self.page.shape[:1]
        for name in ("page", "first", "count", "start"):
            _need(f"WritePlan.{name}", getattr(self, name), np.int32, segments)
        _need("WritePlan.word", self.word, np.uint64, segments)
        _need("WritePlan.binds", self.binds, np.uint64, self.binds.shape[:1])
        if len(np.unique(self.page)) != len(self.page):
            raise KernelError(
                f"WritePlan.page names a page twice ({len(self.page)} segments): merge the segments"
            )


@dataclass(frozen=True)
class ReadPlan:
    """What B sequences read: their page tables and what their own chains say must be there."""

    table: I32  # [B, Pmax] page of rows i*page_size..; entries past the length are not looked at
    lengths: I32  # [B] rows to read, the one just written included; 0 gives zeros
    words: U64  # [B, Pmax] mask words
    binds: U64  # [B, Pmax] sum of the bind terms of the rows that will be read
    bad: I32  # [B] in/out: -1, or the lowest index (0..) of a bad page found by any layer so far
    tiles: I64  # [B, kv_heads] in/out: tiles whose hash was compared; added to

    def __post_init__(self) -> None:
        batch, width = self.table.shape
        _need("ReadPlan.table", self.table, np.int32, (batch, width))
        _need("ReadPlan.lengths", self.lengths, np.int32, (batch,))
        _need("ReadPlan.words", self.words, np.uint64, (batch, width))
        _need("ReadPlan.binds", self.binds, np.uint64, (batch, width))
        _need("ReadPlan.bad", self.bad, np.int32, (batch,))
        _need("ReadPlan.tiles", self.tiles, np.int64, (batch, self.tiles.shape[-1]))


def check_copy(
    geometry: Geometry, source: Memory, source_pages: I32, target: Memory, target_pages: I32, fills: I32
) -> None:
    """Raises KernelError for a `copy_rows` that would leave its memory or read what it writes."""
    if not len(source_pages) == len(target_pages) == len(fills):
        raise KernelError(
            f"{len(source_pages)} pages cannot be copied to {len(target_pages)} with {len(fills)} fills"
        )
    if not len(fills):
        return
    for what, pages, pool in (("source", source_pages, len(source)), ("target", target_pages, len(target))):
        if pages.min() < 0 or pages.max() >= pool:
            raise KernelError(f"{what} pages {pages.min()}..{pages.max()} are not all in 0..{pool - 1}")
    if fills.min() < 0 or fills.max() > geometry.page_size:
        raise KernelError(f"fills {fills.min()}..{fills.max()} are not all in 0..{geometry.page_size}")
    if len(np.unique(target_pages)) != len(target_pages):
        raise KernelError("a target page is named twice: each can hold one page")
    if np.shares_memory(source, target) and len(np.intersect1d(source_pages, target_pages)):
        raise KernelError("a page is both source and target of one copy: copy in two steps")


class Kernels(ABC):
    """One model's kernels over one page layout.

    geometry  two components of equal dtype and width (K, V); `dtype` is theirs and the model's
    key       the seal key of that geometry
    heads     query heads: a multiple of the geometry's KV heads (GQA)
    scale     what scores are multiplied by, 1/sqrt(dim) as a rule
    """

    def __init__(self, geometry: Geometry, key: SealKey, heads: int, scale: float, dtype: Dtype) -> None:
        parts = geometry.components
        if len(parts) != 2 or parts[0].width != parts[1].width or {c.dtype for c in parts} != {dtype}:
            shape = ", ".join(f"{c.name}: {c.width} x {c.dtype}" for c in parts)
            raise KernelError(
                f"these kernels want K and V of one width in {dtype}; the page layout has {shape}"
            )
        if key.geometry != geometry:
            raise KernelError("the seal key was made for another page layout: derive it from this geometry")
        if heads < 1 or heads % len(geometry.heads):
            raise KernelError(f"{heads} query heads do not divide among {len(geometry.heads)} KV heads")
        self.geometry, self.key, self.heads, self.scale, self.dtype = (
            geometry,
            key,
            heads,
            float(scale),
            dtype,
        )
        self.kv_heads = len(geometry.heads)
        self.group = heads // self.kv_heads
        self.dim = parts[0].width
        self.item = ITEM_SIZE[dtype]
        self.torch_dtype = TORCH[dtype]

    @abstractmethod
    def write(self, memory: Memory, layer: int, k: Tensor, v: Tensor, plan: WritePlan) -> None:
        """Write rows into their pages and add their terms to the pages' seals.

        memory uint8 [pages, stride]; k, v model dtype [T, kv_heads, dim], any strides but the last, which is 1.
        A segment with first == 0 starts the seal anew, at mask + terms; any other adds to the seal that is there.
        Raises KernelError, before anything is written, for a segment outside the pool, the page or k and v.
        """

    @abstractmethod
    def attend(
        self, memory: Memory, layer: int, q: Tensor, out: Tensor, plan: ReadPlan, verify: bool
    ) -> None:
        """Decode attention: one query row a sequence over that sequence's pages.

        q, out model dtype [B, heads, dim], any strides but the last, which is 1. Scores and sums in float32, result
        rounded to nearest even. With `verify` the seal of every tile that is read is checked; findings go to
        plan.bad and plan.tiles, and `out` of a sequence with a bad page must not be used.
        """

    @abstractmethod
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
        """Copy one sequence's first `length` rows out of its pages.

        pages int32 [P], words, binds uint64 [P] as in ReadPlan; k_out, v_out model dtype [kv_heads, L, dim]
        contiguous, L >= length; rows from `length` on are zeroed.
        """

    @abstractmethod
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
        """Causal attention of T query rows at positions start..start+T-1 of one sequence over its start+T rows.

        q, out model dtype [T, heads, dim], any strides but the last; the chunk's own rows are written before.
        pages, words, binds as in `gather`, for start+T rows. A row's result does not depend on the chunk it is in.
        """

    @abstractmethod
    def verify_pages(
        self, memory: Memory, pages: I32, fills: I32, words: U64, binds: U64
    ) -> npt.NDArray[np.bool_]:
        """Which tiles hold what this reader expects: bool [n, layers, kv_heads].

        pages, fills int32 [n] (fill 0..page_size: rows 0..fill-1 are checked, and the seal must be of exactly that
        fill); words, binds uint64 [n]. A page outside the pool is False throughout.
        """

    @abstractmethod
    def copy_rows(
        self, source: Memory, source_pages: I32, target: Memory, target_pages: I32, fills: I32
    ) -> None:
        """Copy pages, but of each only the filled rows and the seals; everything else in the target becomes zero.

        source, target uint8 [*, stride] of one geometry, the same memory or not; pages and fills int32 [n]. Checks
        nothing about the bytes: the reader verifies the copy. Raises KernelError, before anything is written, for a
        page outside its memory, a fill that is no fill, or a target that is named twice or is also a source.
        """

    @abstractmethod
    def warm(self, progress: Callable[[str], None] | None = None) -> None:
        """Compile or load everything, so that no request pays for it; `progress` gets a line for each step."""
