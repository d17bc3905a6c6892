"""The kernels on CPU: the calls of base.py on top of the Numba kernels of paged.py.

The one thing to know: a fork and join of Numba's threads costs some 35 us on two idle cores, and one that is busy makes
the other wait for it. Small calls therefore run serially, and so does everything under `numba.set_num_threads(1)`; the
bits are the same. Processes that share cores should start with OMP_WAIT_POLICY=passive: with the default, waiting
threads spin, and a step of 11 ms was measured to take 700 beside other load.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from numba import get_num_threads, set_num_threads
from torch import Tensor

from hermetic.kernels import paged
from hermetic.kernels.base import (
    I32,
    I64,
    U64,
    Dtype,
    GatherResult,
    KernelError,
    Kernels,
    Memory,
    ReadPlan,
    WritePlan,
    check_copy,
)
from hermetic.kernels.prefill import Prefill
from hermetic.kv.geometry import Geometry, empty_pages
from hermetic.kv.seals import SealKey

ALONE = 1 << 20  # bytes of KV up to which a second thread is not worth waking
LOG2_E = 1.4426950408889634


def _plain(array: npt.NDArray[Any], dtype: type[np.generic]) -> npt.NDArray[Any]:
    """As a contiguous array of that type: any other would make Numba compile again, in the middle of a request."""
    return np.ascontiguousarray(array, dtype)


class NumbaKernels(Kernels):
    """See base.py. `seals` = False is for the lab's baseline only: rows are written, seals are not."""

    seals = True
    alone = ALONE

    def __init__(self, geometry: Geometry, key: SealKey, heads: int, scale: float, dtype: Dtype) -> None:
        super().__init__(geometry, key, heads, scale, dtype)
        page, width, item = geometry.page_size, self.dim, self.item
        shape = (page, self.kv_heads, width, item)
        self._attend = [
            paged.attend_kernel(page, self.kv_heads, self.group, width, item, parallel) for parallel in (0, 1)
        ]
        self._write = [paged.write_kernel(*shape, int(self.seals), parallel) for parallel in (0, 1)]
        self._gather = [paged.gather_kernel(*shape, parallel) for parallel in (0, 1)]
        self._verify = [paged.verify_kernel(*shape, parallel) for parallel in (0, 1)]
        parts = geometry.tiles * len(geometry.components)
        self._copy = [
            paged.copy_kernel(page, geometry.components[0].row_bytes, parts, parallel) for parallel in (0, 1)
        ]
        # The low secret of a lane, then its high one, as 32-bit words in the order of the tile's bytes.
        self._secrets = np.stack([key.low, key.high], axis=1).astype(np.uint32).reshape(-1)
        self._places = np.ascontiguousarray(key.places)
        self._layer_places = [np.ascontiguousarray(row) for row in key.places]
        # Of each layer, byte offsets in a page: its first tile, its first seal.
        self._layers = [
            (geometry.offset(layer, 0), geometry.seals_offset + 8 * layer * self.kv_heads)
            for layer in range(len(geometry.layers))
        ]
        self._checked: Callable[[], Memory | None] = lambda: (
            None
        )  # weak: must not keep a closed segment mapped
        self._factor = np.float32(scale * LOG2_E)
        self._row = 2 * geometry.components[0].row_bytes  # KV bytes of one row of one head
        self._prefill = Prefill(heads, self.kv_heads, self.dim, self.scale, self.torch_dtype)
        self._part = paged.part_bytes(width, item, self.group)
        self._last: dict[str, tuple[Tensor, tuple[int, int, int]]] = {}
        self._plan: tuple[ReadPlan | None, int] = None, 0  # the last plan, bytes of KV it reads
        self._parts: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._notes: I64 = np.empty((0, 2), np.int64)
        self._first: I64 = np.empty(0, np.int64)

    # --- checks: what would read or write outside a buffer -----------------------------------------------------------

    def _memory(self, memory: Memory, layer: int = 0) -> None:
        if memory is not self._checked():
            self._check(memory)
            self._checked = weakref.ref(memory)
        if not 0 <= layer < len(self._layers):
            raise KernelError(f"layer {layer} is not one of the page layout's {len(self._layers)}")

    def _check(self, memory: Memory) -> None:
        if memory.dtype != np.uint8 or memory.ndim != 2 or memory.shape[1] != self.geometry.stride:
            raise KernelError(
                f"memory must be uint8 [pages, {self.geometry.stride}], not {memory.dtype} {memory.shape}"
            )
        if (
            memory.strides[1] != 1
            or not memory.flags.aligned
            or memory.strides[0] % 8
            or memory.ctypes.data % 8
        ):
            raise KernelError(
                "memory must have its pages' bytes side by side, each page on an 8 byte boundary"
            )

    def _tensor(self, name: str, tensor: Tensor, heads: int) -> None:
        if tensor.dtype != self.torch_dtype or tensor.shape[1:] != (heads, self.dim) or tensor.stride(2) != 1:
            raise KernelError(
                f"{name} must be {self.torch_dtype} [*, {heads}, {self.dim}] with its last dimension dense, "
                f"not {tensor.dtype} {tuple(tensor.shape)} strides {tensor.stride()}"
            )

    def _at(self, name: str, tensor: Tensor, heads: int) -> tuple[int, int, int]:
        """Address, row stride and head stride in bytes, of a tensor that is checked when it is not the last one again:
        a decode step brings the same q, k, v and out for every layer."""
        last = self._last.get(name)
        if last is None or last[0] is not tensor or last[1][0] != tensor.data_ptr():
            self._tensor(name, tensor, heads)
            row, head, _ = tensor.stride()
            last = self._last[name] = tensor, (tensor.data_ptr(), row * self.item, head * self.item)
        return last[1]

    def _together(self, size: int) -> int:
        """1 if work on `size` bytes of KV is worth waking the other threads, else 0: an index into serial, parallel."""
        return int(size > self.alone and get_num_threads() > 1)

    # --- the calls ------------------------------------------------------------------------------------------------------

    def write(self, memory: Memory, layer: int, k: Tensor, v: Tensor, plan: WritePlan) -> None:
        self._memory(memory, layer)
        k_at, v_at = self._at("k", k, self.kv_heads), self._at("v", v, self.kv_heads)
        tokens = k.shape[0]
        if v.shape[0] != tokens or len(plan.binds) != tokens:
            raise KernelError(f"k has {tokens} rows, v {v.shape[0]}, the plan {len(plan.binds)} bind terms")
        kernel = self._write[self._together(tokens * self.kv_heads * self._row)]
        wrong = kernel(
            memory, *self._layers[layer], *k_at, *v_at, tokens,
            plan.page, plan.first, plan.count, plan.start, plan.word, plan.binds,
            self._layer_places[layer], self._secrets,
        )  # fmt: skip
        if wrong >= 0:
            raise KernelError(
                f"segment {wrong} writes rows {plan.first[wrong]}..+{plan.count[wrong]} of page {plan.page[wrong]} "
                f"from row {plan.start[wrong]} of {tokens}: a page has {self.geometry.page_size} rows and the pool "
                f"{memory.shape[0]} pages"
            )

    def _grow(self, batch: int, tasks: int) -> None:
        """Scratch of `attend` for that many tasks, and some more."""
        self._parts = np.empty(2 * tasks * self._part, np.uint8)
        self._notes = np.empty((2 * (tasks + batch * self.kv_heads + 1), 2), np.int64)
        self._first = np.empty(2 * (batch + 1), np.int64)

    def attend(
        self, memory: Memory, layer: int, q: Tensor, out: Tensor, plan: ReadPlan, verify: bool
    ) -> None:
        self._memory(memory, layer)
        q_at, out_at = self._at("q", q, self.heads), self._at("out", out, self.heads)
        batch = len(plan.lengths)
        if q.shape[0] != batch or out.shape[0] != batch or plan.tiles.shape[1] != self.kv_heads:
            raise KernelError(
                f"the plan has {batch} sequences and {plan.tiles.shape[1]} KV heads; q has {q.shape[0]} rows, "
                f"out {out.shape[0]}, the page layout {self.kv_heads} heads"
            )
        if plan is not self._plan[0]:
            self._plan = plan, int(plan.lengths.sum()) * self.kv_heads * self._row
        parallel = self._together(self._plan[1])
        threads = get_num_threads() if parallel else 1
        need = -1
        while need != 0:
            if need > 0:
                self._grow(batch, need)
            need = self._attend[parallel](
                memory, *self._layers[layer], *q_at, *out_at, self._factor,
                plan.table, plan.lengths, plan.words, plan.binds, plan.bad, plan.tiles,
                self._layer_places[layer], self._secrets, verify, self._first, self._parts, self._notes, threads,
            )  # fmt: skip

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
        self._memory(memory, layer)
        pages, words, binds = _plain(pages, np.int32), _plain(words, np.uint64), _plain(binds, np.uint64)
        held = self.geometry.pages_for(length)
        if length < 0 or min(len(pages), len(words), len(binds)) < held:
            raise KernelError(
                f"{length} rows need {held} pages, words and binds; given {len(pages)}, {len(words)}, {len(binds)}"
            )
        room = k_out.shape[1]
        for name, tensor in (("k_out", k_out), ("v_out", v_out)):
            shape = (self.kv_heads, room, self.dim)
            if (
                tensor.shape != shape
                or tensor.dtype != self.torch_dtype
                or not tensor.is_contiguous()
                or room < length
            ):
                raise KernelError(
                    f"{name} must be a contiguous {self.torch_dtype} [{self.kv_heads}, >= {length}, {self.dim}], "
                    f"not {tensor.dtype} {tuple(tensor.shape)}"
                )
        good = np.empty((held, self.kv_heads), np.int8)
        self._gather[self._together(length * self.kv_heads * self._row)](
            memory, *self._layers[layer], pages, length, words, binds, self._layer_places[layer], self._secrets,
            k_out.data_ptr(), v_out.data_ptr(), room, verify, good,
        )  # fmt: skip
        bad = np.flatnonzero(good.min(axis=1, initial=1) < 1)
        tiles = int(np.count_nonzero(good >= 0)) if verify else 0
        return GatherResult(int(bad[0]) if len(bad) else -1, tiles)

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
        self._tensor("q", q, self.heads)
        self._tensor("out", out, self.heads)
        length = start + q.shape[0]
        k, v = self._prefill.buffers(length)
        result = self.gather(memory, layer, pages, length, words, binds, k, v, verify)
        self._prefill.attend(q, k, v, out, start)
        return result

    def verify_pages(
        self, memory: Memory, pages: I32, fills: I32, words: U64, binds: U64
    ) -> npt.NDArray[np.bool_]:
        self._memory(memory)
        if not len(pages) == len(fills) == len(words) == len(binds):
            raise KernelError(
                f"{len(pages)} pages, {len(fills)} fills, {len(words)} words, {len(binds)} binds"
            )
        pages, fills = _plain(pages, np.int32), _plain(fills, np.int32)
        words, binds = _plain(words, np.uint64), _plain(binds, np.uint64)
        good = np.empty((len(pages), *self._places.shape), np.bool_)
        self._verify[self._together(len(pages) * self.geometry.page_bytes)](
            memory, self.geometry.seals_offset, pages, fills, words, binds, self._places, self._secrets, good
        )
        return good

    def copy_rows(
        self, source: Memory, source_pages: I32, target: Memory, target_pages: I32, fills: I32
    ) -> None:
        self._memory(source)
        self._memory(target)
        source_pages, target_pages = _plain(source_pages, np.int32), _plain(target_pages, np.int32)
        fills = _plain(fills, np.int32)
        check_copy(self.geometry, source, source_pages, target, target_pages, fills)
        self._copy[self._together(len(fills) * self.geometry.page_bytes)](
            source,
            target,
            source_pages,
            target_pages,
            fills,
            self.geometry.seals_offset,
            self.geometry.page_bytes,
        )

    def warm(self, progress: Callable[[str], None] | None = None) -> None:
        """Run every kernel once, serial and parallel, on two pages of its own."""
        began = time.perf_counter()
        memory = empty_pages(self.geometry, 2)
        pages, one, none = np.zeros(1, np.int32), np.ones(1, np.int32), np.zeros(1, np.int32)
        word = np.zeros(1, np.uint64)
        rows = torch.zeros(1, self.kv_heads, self.dim, dtype=self.torch_dtype)
        query = torch.zeros(1, self.heads, self.dim, dtype=self.torch_dtype)
        plan = WritePlan(pages, none, one, none, word, word)
        table, tiles = pages.reshape(1, 1), np.zeros((1, self.kv_heads), np.int64)
        read = ReadPlan(table, one, word.reshape(1, 1), word.reshape(1, 1), none.copy(), tiles)
        k, v = self._prefill.buffers(1)
        calls: list[tuple[str, Callable[[], object]]] = [
            ("write rows", lambda: self.write(memory, 0, rows, rows, plan)),
            ("decode attention", lambda: self.attend(memory, 0, query, query.clone(), read, True)),
            ("gather", lambda: self.gather(memory, 0, pages, 1, word, word, k, v, True)),
            ("verify pages", lambda: self.verify_pages(memory, pages, one, word, word)),
            ("copy pages", lambda: self.copy_rows(memory, pages, memory, one, one)),
        ]
        threshold, threads = self.alone, get_num_threads()
        most = int(vars(numba.config)["NUMBA_NUM_THREADS"])  # made at import, so unknown to type checkers
        set_num_threads(most)  # with one thread the parallel build would not be run
        try:
            for name, call in calls:
                if progress is not None:
                    progress(f"kernels: {name} ({time.perf_counter() - began:.1f} s so far)")
                for self.alone in (1 << 62, -1):
                    call()
        finally:
            self.alone = threshold
            set_num_threads(threads)
