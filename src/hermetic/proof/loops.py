"""The loops over rows of the compiled search: expand, take in what is new, and go back from the good ends.

All of it runs without the interpreter's lock, on a thread for each rank. The one thing to know: a row belongs to the rank
that its hash names, and nobody else writes to that rank's arrays.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from hermetic.proof.kernel import I32, MISSING, MOST, U8, U32, U64, Tables, canonical, row_hash, successors


@numba.njit(nogil=True, cache=True)
def expand(
    tables: Tables,
    rows: U32,
    todo: I32,
    rank: int,
    ranks: int,
    out_rows: U32,
    out_hash: U64,
    out_parent: U32,
    out_count: I32,
    pending: I32,
    missing: U64,
    broken: I32,
) -> tuple[int, int, int, int]:
    """Take rows `todo` of this rank; what follows goes to the buffers of its rank. Returns (rows taken, pending, missing,
    transitions). Stops early when a buffer or a list is full."""  # fmt: skip
    width = rows.shape[1]
    scratch = np.empty((MOST, width), np.uint32)
    names = np.empty((MOST, 2), np.int32)
    one, best = np.empty(width, np.uint32), np.empty(width, np.uint32)
    waiting, transitions, taken = 0, 0, 0
    lacking: Any = 0
    room = out_rows.shape[1] - MOST
    for i in todo:
        full = lacking > len(missing) - 64
        for q in range(ranks):
            full |= out_count[q] > room
        if full:
            break
        taken += 1
        n, lacking = successors(tables, rows[i], False, scratch, names, missing, lacking)
        if n == -1:
            pending[waiting] = i
            waiting += 1
            continue
        if n < -1:
            if broken[0] < 0:
                broken[0], broken[1] = i, -2 - n
            continue
        transitions += n
        for k in range(n):
            canonical(tables, scratch[k], one, best)
            h = row_hash(best)
            owner = np.int64(h % np.uint64(ranks))
            place = out_count[owner]
            out_rows[owner, place] = best
            out_hash[owner, place] = h
            out_parent[owner, place] = np.uint32(i) * np.uint32(ranks) + np.uint32(rank)
            out_count[owner] = place + 1
    return taken, waiting, lacking, transitions


@numba.njit(nogil=True, cache=True)
def find(table: I32, rows: U32, row: U32, h: Any) -> Any:
    """Where the row is among `rows`, or the free place of the table (as -1 - place)."""
    mask = np.uint64(len(table) - 1)
    place = (h >> np.uint64(3)) & mask
    while table[place] >= 0:
        at = table[place]
        same = True
        for k in range(len(row)):
            if rows[at, k] != row[k]:
                same = False
                break
        if same:
            return np.int64(at)
        place = (place + np.uint64(1)) & mask
    return -1 - np.int64(place)


@numba.njit(nogil=True, cache=True)
def insert(
    table: I32, rows: U32, parents: U32, count: int, new_rows: U32, new_hash: U64, new_parent: U32, new: int
) -> int:
    """Add the rows that are new; returns how many there are then."""
    for k in range(new):
        place = find(table, rows, new_rows[k], new_hash[k])
        if place < 0:
            table[-1 - place] = count
            rows[count] = new_rows[k]
            parents[count] = new_parent[k]
            count += 1
    return count


@numba.njit(nogil=True, cache=True)
def rehash(table: I32, rows: U32, count: int) -> None:
    table[:] = -1
    for i in range(count):
        table[-1 - find(table, rows, rows[i], row_hash(rows[i]))] = i


@numba.njit(nogil=True, cache=True)
def is_good(tables: Tables, row: U32) -> bool:
    """Everything has ended, and nothing is held."""
    for t in range(len(row) - 1):
        if not tables.over[row[t]]:
            return False
        if t % 2 and row[t] == 0 and tables.begins_new[row[t - 1]] != MISSING:
            return False
    return True


@numba.njit(nogil=True, cache=True)
def reach(
    tables: Tables,
    rows: tuple[U32, ...],
    hashes: tuple[I32, ...],
    marks: tuple[U8, ...],
    rank: int,
    first: int,
    end: int,
) -> int:
    """Mark those of rows `first`..`end` of this rank with a calm move into a marked one, last first. Returns how many."""
    mine, mark, ranks = rows[rank], marks[rank], len(rows)
    width = mine.shape[1]
    scratch, names = np.empty((MOST, width), np.uint32), np.empty((MOST, 2), np.int32)
    one, best = np.empty(width, np.uint32), np.empty(width, np.uint32)
    missing = np.empty(0, np.uint64)
    marked = 0
    for i in range(end - 1, first - 1, -1):
        if mark[i]:
            continue
        n, _ = successors(tables, mine[i], True, scratch, names, missing, 0)
        for k in range(n):
            canonical(tables, scratch[k], one, best)
            h = row_hash(best)
            q = np.int64(h % np.uint64(ranks))
            at = find(hashes[q], rows[q], best, h)
            if at >= 0 and marks[q][at]:
                mark[i] = 1
                marked += 1
                break
    return marked


@numba.njit(nogil=True, cache=True)
def mark_good(tables: Tables, rows: U32, mark: U8, count: int) -> int:
    found = 0
    for i in range(count):
        mark[i] = is_good(tables, rows[i])
        found += mark[i]
    return found
