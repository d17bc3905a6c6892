"""The Numba kernels: loops over pages, tiles and segments around the row instructions of simd.py.

Each factory returns a kernel specialised on a page layout; its integers become compile-time constants. The one thing
to know: Numba's disk cache tells two kernels apart by name and by what their closures hold, not by how they are
compiled, and looks for changes in this file alone. So a kernel closes over plain integers only (a dispatcher or an
array there would never be found again), and its name carries the parallel build and a digest of simd.py: else the one
would be served the serial code, and an edit there the code of yesterday.

`memory` is uint8 [pages, stride]; tensors come as addresses with strides in bytes. The calling class has checked
shapes and types; what could lead outside a buffer is checked here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numba import int64, njit, prange, uint64

from hermetic.kernels import simd
from hermetic.kernels.simd import (
    BLOCK,
    VECTOR,
    Row,
    add_rows,
    copy_bytes,
    dot_rows,
    hash_rows,
    load_query,
    load_word,
    merge_parts,
    next_ticket,
    pack_row,
    store_word,
    unpack_rows,
    weigh_rows,
    zero_bytes,
)

SPLIT = 256  # rows of a sequence that one task reads: a fixed cut by position, so that sums never depend on the batch

Kernel = Callable[..., Any]
_INSTRUCTIONS = hashlib.blake2b(Path(simd.__file__).read_bytes(), digest_size=6).hexdigest()


@njit(nogil=True, inline="always")
def mix(x: Any) -> Any:
    """SplitMix64's finaliser, as kv/lineage.py: uint64 -> uint64."""
    x = (x ^ (x >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> uint64(27))) * uint64(0x94D049BB133111EB)
    return x ^ (x >> uint64(31))


def _compile(function: Kernel, parallel: int) -> Kernel:
    function.__qualname__ += f".{_INSTRUCTIONS}" + (".parallel" if parallel else "")
    # Of what `parallel` stands for only the prange is wanted: the rest costs compile time.
    others = ("comprehension", "reduction", "inplace_binop", "setitem", "numpy", "stencil", "fusion")
    options: Any = {"prange": True, **dict.fromkeys(others, False)} if parallel else False
    kernel: Kernel = njit(nogil=True, cache=True, error_model="numpy", parallel=options)(function)
    return kernel


def split_pages(page_size: int) -> int:
    """Pages of one split."""
    return max(1, SPLIT // page_size)


def part_bytes(width: int, item: int, group: int) -> int:
    """Bytes that one split's partial result takes: see simd.merge_parts."""
    return VECTOR * group * (2 + Row(width, item).vectors)


@cache
def attend_kernel(PAGE: int, HEADS: int, GROUP: int, WIDTH: int, ITEM: int, PARALLEL: int) -> Kernel:
    """Decode attention over every sequence's pages; tasks are (sequence, KV head, split), taken from one queue."""
    row = Row(WIDTH, ITEM)
    ROW, VECTORS, PAGES = row.bytes, row.vectors, split_pages(PAGE)
    TILE, PART, ROWS = 2 * PAGE * row.bytes, part_bytes(WIDTH, ITEM, GROUP), min(PAGE, BLOCK)

    def attend(
        memory, tiles_at, seals_at, q, q_row, q_head, out, out_row, out_head, factor,
        table, lengths, words, binds, bad, tiles, places, secrets, verify, first_task, parts, notes, workers,
    ):  # fmt: skip
        """tiles_at, seals_at: byte offsets of the layer's first tile and seal in a page; places uint64 [HEADS] of the
        layer; secrets the NH secrets in the order of a tile's bytes. Scratch: first_task int64 [B+1], a sequence's first
        task; parts uint8 [tasks * PART]; notes int64 [tasks + B*HEADS + 1, 2]. workers: threads to use; from Python,
        since Numba will not cache a kernel that asks for it.
        -> 0, or the number of tasks (at least 1) if the scratch is too small; then nothing was done."""
        batch, room = table.shape
        base, stride, pool = memory.ctypes.data, memory.strides[0], memory.shape[0]
        key = secrets.ctypes.data
        # Pages to read of each sequence; one past the table, to be reported, where the table is too short for it.
        held = np.empty(batch, np.int64)
        tasks = int64(0)
        for s in range(batch):
            held[s] = min((max(int64(lengths[s]), 0) + PAGE - 1) // PAGE, room + 1)
            tasks += HEADS * ((held[s] + PAGES - 1) // PAGES)
        if tasks * PART > len(parts) or tasks + batch * HEADS >= len(notes) or batch >= len(first_task):
            return max(tasks, 1)
        tasks = int64(0)
        for s in range(batch):
            first_task[s] = tasks
            tasks += HEADS * ((held[s] + PAGES - 1) // PAGES)
        first_task[batch] = tasks
        done = notes[tasks:, 0]  # per (sequence, head): splits finished; behind them the queue
        for i in range(batch * HEADS + 1):
            done[i] = 0
        queue = done[batch * HEADS :].ctypes.data
        for _worker in prange(workers):
            query = np.empty(GROUP * VECTORS * 16, np.float32)
            products = np.empty(GROUP * BLOCK * 16, np.float32)
            weights = np.empty(2 * GROUP * 16, np.float32)  # weights, then shrink
            query_at, products_at, weights_at = query.ctypes.data, products.ctypes.data, weights.ctypes.data
            shrink_at = weights_at + VECTOR * GROUP
            while True:
                task = next_ticket(queue)
                if task >= tasks:
                    break
                low, high = 0, batch - 1  # the last sequence whose first task is not past this one
                while low < high:
                    middle = (low + high + 1) // 2
                    if first_task[middle] <= task:
                        low = middle
                    else:
                        high = middle - 1
                b = low
                splits = (first_task[b + 1] - first_task[b]) // HEADS
                head = (task - first_task[b]) // splits
                split = (task - first_task[b]) % splits
                for g in range(GROUP):
                    source = q + b * q_row + (head * GROUP + g) * q_head
                    load_query(source, query_at + g * VECTORS * VECTOR, factor, WIDTH, ITEM)
                part = parts.ctypes.data + task * PART
                sums_at = part + 2 * GROUP * VECTOR
                state = parts[task * PART : (task + 1) * PART].view(np.float32)
                state[:] = np.float32(0)
                for g in range(GROUP):
                    state[g * 32 : g * 32 + 16] = np.float32(-np.inf)
                tile_at = tiles_at + head * TILE
                wrong, compared = int64(-1), int64(0)
                end = min((split + 1) * PAGES, held[b])
                for i in range(split * PAGES, end):
                    page = int64(table[b, i]) if i < room else int64(-1)
                    if page < 0 or page >= pool:
                        if wrong < 0:
                            wrong = i
                        continue
                    fill = min(PAGE, lengths[b] - i * PAGE)
                    tile = base + page * stride + tile_at
                    ahead = tile
                    if i + 1 < end and i + 1 < room and table[b, i + 1] >= 0 and table[b, i + 1] < pool:
                        ahead = base + int64(table[b, i + 1]) * stride + tile_at
                    found = uint64(0)
                    for row in range(0, fill, BLOCK):
                        rows = min(BLOCK, fill - row)
                        k = row * ROW
                        v = PAGE * ROW + k
                        if verify:
                            found += dot_rows(
                                tile + k, rows, query_at, products_at, key + k, ahead + k, WIDTH, ITEM, GROUP, 1,
                            )  # fmt: skip
                        else:
                            dot_rows(
                                tile + k, rows, query_at, products_at, key + k, ahead + k, WIDTH, ITEM, GROUP, 0,
                            )  # fmt: skip
                        weigh_rows(products_at, rows, weights_at, part, shrink_at, ROWS, GROUP)
                        if verify:
                            found += add_rows(
                                tile + v, rows, weights_at, shrink_at, sums_at, key + v, ahead + v,
                                WIDTH, ITEM, GROUP, 1,
                            )  # fmt: skip
                        else:
                            add_rows(
                                tile + v, rows, weights_at, shrink_at, sums_at, key + v, ahead + v,
                                WIDTH, ITEM, GROUP, 0,
                            )  # fmt: skip
                    if verify:
                        compared += 1
                        seal = load_word(base + page * stride + seals_at + 8 * head)
                        if mix(words[b, i] ^ places[head]) + found + binds[b, i] != seal and wrong < 0:
                            wrong = i
                notes[task, 0], notes[task, 1] = wrong, compared
                # Whoever finishes a head's last split joins them all, in their order.
                if next_ticket(done[b * HEADS + head :].ctypes.data) == splits - 1:
                    merge_parts(
                        parts.ctypes.data + (task - split) * PART, splits, PART,
                        out + b * out_row + head * GROUP * out_head, out_head, WIDTH, ITEM, GROUP,
                    )  # fmt: skip
        for s in range(batch):
            each = (first_task[s + 1] - first_task[s]) // HEADS
            if each == 0:
                for h in range(HEADS * GROUP):
                    zero_bytes(out + s * out_row + h * out_head, WIDTH * ITEM)
            for n in range(first_task[s], first_task[s + 1]):
                tiles[s, (n - first_task[s]) // each] += notes[n, 1]
                if notes[n, 0] >= 0 and (bad[s] < 0 or notes[n, 0] < bad[s]):
                    bad[s] = notes[n, 0]
        return 0

    return _compile(attend, PARALLEL)


@cache
def write_kernel(PAGE: int, HEADS: int, WIDTH: int, ITEM: int, SEAL: int, PARALLEL: int) -> Kernel:
    """Rows into pages and their terms into the seals; SEAL 0 leaves the seals alone (for the lab's baseline)."""
    ROW = Row(WIDTH, ITEM).bytes
    TILE = 2 * PAGE * ROW

    def write(
        memory, tiles_at, seals_at, k, k_row, k_head, v, v_row, v_head, tokens,
        pages, first, count, start, word, binds, places, secrets,
    ):  # fmt: skip
        """-> -1, or the index of a segment that leads outside something; then nothing was written."""
        base, stride, pool = memory.ctypes.data, memory.strides[0], memory.shape[0]
        key = secrets.ctypes.data
        for s in range(pages.shape[0]):
            inside = 0 <= pages[s] < pool and first[s] >= 0 and count[s] >= 0 and start[s] >= 0
            if not (inside and first[s] + count[s] <= PAGE and start[s] + count[s] <= tokens):
                return s
        for task in prange(pages.shape[0] * HEADS):
            s, head = task // HEADS, task % HEADS
            page = base + int64(pages[s]) * stride
            tile = page + tiles_at + head * TILE
            total = uint64(0)
            for j in range(count[s]):
                token, slot = int64(start[s]) + j, (int64(first[s]) + j) * ROW
                total += pack_row(k + token * k_row + head * k_head, tile + slot, key + slot, WIDTH, ITEM)
                slot += PAGE * ROW
                total += pack_row(v + token * v_row + head * v_head, tile + slot, key + slot, WIDTH, ITEM)
                total += binds[token]
            if SEAL:
                at = page + seals_at + 8 * head
                store_word(at, total + (mix(word[s] ^ places[head]) if first[s] == 0 else load_word(at)))
        return -1

    return _compile(write, PARALLEL)


@cache
def gather_kernel(PAGE: int, HEADS: int, WIDTH: int, ITEM: int, PARALLEL: int) -> Kernel:
    """One sequence's rows out of its pages, hashed on their way."""
    ROW = Row(WIDTH, ITEM).bytes
    TILE = 2 * PAGE * ROW

    def gather(
        memory, tiles_at, seals_at, pages, length, words, binds, places, secrets, k, v, room, verify, good,
    ):  # fmt: skip
        """k, v: addresses of [HEADS, room, WIDTH]; good int8 [pages, HEADS] out: 1, 0 for a bad tile, -1 for none."""
        base, stride, pool = memory.ctypes.data, memory.strides[0], memory.shape[0]
        key = secrets.ctypes.data
        held = (length + PAGE - 1) // PAGE
        for task in prange(held * HEADS):
            i, head = task // HEADS, task % HEADS
            at = (head * room + i * PAGE) * WIDTH * ITEM
            rows = min(PAGE, length - i * PAGE)
            page = int64(pages[i])
            if page < 0 or page >= pool:
                zero_bytes(k + at, rows * WIDTH * ITEM)
                zero_bytes(v + at, rows * WIDTH * ITEM)
                good[i, head] = -1
                continue
            tile = base + page * stride + tiles_at + head * TILE
            good[i, head] = 1
            if verify:
                found = unpack_rows(tile, rows, k + at, key, WIDTH, ITEM, 1)
                found += unpack_rows(tile + PAGE * ROW, rows, v + at, key + PAGE * ROW, WIDTH, ITEM, 1)
                seal = load_word(base + page * stride + seals_at + 8 * head)
                if mix(words[i] ^ places[head]) + found + binds[i] != seal:
                    good[i, head] = 0
            else:
                unpack_rows(tile, rows, k + at, key, WIDTH, ITEM, 0)
                unpack_rows(tile + PAGE * ROW, rows, v + at, key + PAGE * ROW, WIDTH, ITEM, 0)
        for head in range(HEADS):
            at, size = (head * room + length) * WIDTH * ITEM, (room - length) * WIDTH * ITEM
            zero_bytes(k + at, size)
            zero_bytes(v + at, size)

    return _compile(gather, PARALLEL)


@cache
def verify_kernel(PAGE: int, HEADS: int, WIDTH: int, ITEM: int, PARALLEL: int) -> Kernel:
    """Every tile of whole pages against its seal."""
    ROW = Row(WIDTH, ITEM).bytes
    TILE = 2 * PAGE * ROW

    def verify(memory, seals_at, pages, fills, words, binds, places, secrets, good):
        """places uint64 [layers, HEADS]; good bool [n, layers, HEADS] out."""
        base, stride, pool = memory.ctypes.data, memory.strides[0], memory.shape[0]
        key, layers = secrets.ctypes.data, places.shape[0]
        for task in prange(pages.shape[0] * layers):
            i, layer = task // layers, task % layers
            page, fill = int64(pages[i]), int64(fills[i])
            for head in range(HEADS):
                if page < 0 or page >= pool or fill < 0 or fill > PAGE:
                    good[i, layer, head] = False
                    continue
                place = layer * HEADS + head
                tile = base + page * stride + place * TILE
                found = hash_rows(tile, fill, key, WIDTH, ITEM)
                found += hash_rows(tile + PAGE * ROW, fill, key + PAGE * ROW, WIDTH, ITEM)
                seal = load_word(base + page * stride + seals_at + 8 * place)
                good[i, layer, head] = mix(words[i] ^ places[layer, head]) + found + binds[i] == seal

    return _compile(verify, PARALLEL)


@cache
def copy_kernel(PAGE: int, ROW: int, PARTS: int, PARALLEL: int) -> Kernel:
    """Filled rows and seals from pages to pages; the rest of the target page becomes zero.

    PARTS: components of all tiles together, each PAGE rows of ROW bytes."""
    SIZE = PAGE * ROW

    def copy(source, target, source_pages, target_pages, fills, seals_at, page_bytes):
        stride = source.strides[0]
        for i in prange(fills.shape[0]):
            a = source.ctypes.data + int64(source_pages[i]) * stride
            b = target.ctypes.data + int64(target_pages[i]) * stride
            filled = int64(fills[i]) * ROW
            if filled == SIZE:
                copy_bytes(b, a, seals_at)
            else:
                for part in range(PARTS):
                    copy_bytes(b + part * SIZE, a + part * SIZE, filled)
                    zero_bytes(b + part * SIZE + filled, SIZE - filled)
            copy_bytes(b + seals_at, a + seals_at, page_bytes - seals_at)
            zero_bytes(b + page_bytes, stride - page_bytes)

    return _compile(copy, PARALLEL)
