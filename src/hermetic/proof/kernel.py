"""The inner loops of the compiled search: rows of small numbers, tables that say what follows, nothing of the protocol.

A row is a state: one part for each ticket (parts.py), then link * budgets + budget. The one thing to know: a loop never asks
Python anything. What a table does not know yet is written to a list of missing things, and its row is taken again later.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I8 = npt.NDArray[np.int8]
I16 = npt.NDArray[np.int16]
I32 = npt.NDArray[np.int32]

BROKEN, MISSING = 0xFFFFFFFF, 0xFFFFFFFE
KINDS = ("crash prefill", "crash decode", "fence", "greet", "welcome", "silence decode", "silence prefill")
CRASH, FENCE, GREET, WELCOME, SILENCE, STRIKE = 0, 2, 3, 4, 5, 7
MAX_PAGES = 4  # of a prompt
IS_MOVES, IS_SHARED, IS_GHOSTS = 1, 2, 3  # kinds of missing things, in the top bits of their names
MOST = 512  # successors of a state
MOST_SLOTS, MOST_PAGES = 6, 15  # what the names of missing things have room for


class Tables(NamedTuple):
    """By part: slots, pages, needs, modes, over, begins_old/new, turned [parts, turns], ghost lists. shared [kind, link, part].
    Moves: a hash table from key to a range of (fault, to). budget_next [budget, fault], -1: none left."""

    slots: U8
    prefill: U8
    decode: U8
    needs: U8  # 1: pages at prefill, 2: at decode, 4: slots
    modes: U8  # 1: between copy and hash, 2: bytes may come once more
    over: U8
    begins_old: U32
    begins_new: U32
    turned: U32
    ghost_start: I32  # -1: missing
    ghost_count: I32
    ghost_to: U32
    ghost_hits: U32
    shared: U32
    keys: U64
    starts: I32
    counts: I32
    quiet: U8
    faults: I8
    to: U32
    budget_next: I16
    none_left: U8  # [budget]
    link_after: I16  # [kind, link]
    link_up: U8  # [link]: 1 up, 2 welcomed
    groups: I32  # by request: the first request with a prompt of the same size
    fenceable: int
    crash_fault: int
    silence_fault: int


@numba.njit(nogil=True, cache=True)
def _mix(x: Any) -> Any:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@numba.njit(nogil=True, cache=True)
def row_hash(row: U32) -> Any:
    h = np.uint64(0x9E3779B97F4A7C15)
    for x in row:
        h = _mix(h ^ np.uint64(x)) + np.uint64(0x9E3779B97F4A7C15)
    return h


@numba.njit(nogil=True, cache=True)
def key_at(keys: U64, key: Any) -> Any:
    """Where the key is, or the free place where it would be (as -1 - place)."""
    mask = np.uint64(len(keys) - 1)
    place = _mix(key) & mask
    while keys[place] != np.uint64(0):
        if keys[place] == key:
            return np.int64(place)
        place = (place + np.uint64(1)) & mask
    return -1 - np.int64(place)


@numba.njit(nogil=True, cache=True)
def _budget(last: int, budgets: int) -> tuple[int, int]:
    """Link and budget of a row's last number."""
    return last // budgets, last % budgets


@numba.njit(nogil=True, cache=True)
def canonical(tables: Tables, row: U32, one: U32, best: U32) -> None:
    """Into `best`: the least of the rows that differ from `row` in names of slots and of equal requests only."""
    n = len(row) - 1
    requests = n // 2
    for turn in range(tables.turned.shape[1]):
        for t in range(n):
            one[t] = tables.turned[row[t], turn]
        one[n] = row[n]
        for a in range(requests):
            for b in range(a + 1, requests):
                if tables.groups[a] == tables.groups[b] and (
                    one[2 * b] < one[2 * a] or (one[2 * b] == one[2 * a] and one[2 * b + 1] < one[2 * a + 1])
                ):
                    for k in range(2):
                        x = one[2 * a + k]
                        one[2 * a + k] = one[2 * b + k]
                        one[2 * b + k] = x
        less = turn == 0
        if not less:
            for t in range(n):
                if one[t] != best[t]:
                    less = one[t] < best[t]
                    break
        if less:
            best[:] = one


@numba.njit(nogil=True, cache=True)
def move_key(tables: Tables, row: U32, t: int, link: int, budget: int) -> Any:
    """The name of what a ticket's moves depend on: its part, and what others have as far as it makes a difference."""
    slots, prefill, decode, busy, ghost = 0, 0, 0, 0, 0
    for u in range(len(row) - 1):
        if u != t:
            part = row[u]
            slots |= tables.slots[part]
            prefill += tables.prefill[part]
            decode += tables.decode[part]
            busy |= tables.modes[part] & 1
            ghost |= tables.modes[part] >> 1
    part = row[t]
    needs = tables.needs[part]
    if not needs & 1:
        prefill = 0
    if not needs & 2:
        decode = 0
    if not needs & 4:
        slots = 0
    spent = tables.none_left[budget]
    env = (((prefill * 16 + decode) * 64 + slots) * 8 + link) * 8 + spent * 4 + busy * 2 + ghost
    return (np.uint64(IS_MOVES) << np.uint64(60)) | (np.uint64(env) << np.uint64(32)) | np.uint64(part)


@numba.njit(nogil=True, cache=True)
def _lacks(missing: U64, lacking: int, kind: int, a: int, b: int, part: Any) -> int:
    if lacking < len(missing):
        missing[lacking] = (
            (np.uint64(kind) << np.uint64(60)) | (np.uint64(a) << np.uint64(40))
            | (np.uint64(b) << np.uint64(32)) | np.uint64(part)
        )  # fmt: skip
        lacking += 1
    return lacking


@numba.njit(nogil=True, cache=True)
def _together(
    tables: Tables, row: U32, kind: int, link: int, budget: int, out: U32, n: int, missing: U64, lacking: int
) -> tuple[int, int]:
    """One move of all tickets: (1 done, 0 something is missing, -1 - ticket something breaks), and how much is missing."""
    budgets = tables.budget_next.shape[0]
    state = 1
    for t in range(len(row) - 1):
        part = row[t]
        if part == 0:
            out[n, t] = 0
            continue
        to = tables.shared[kind, link, part]
        if to == MISSING:
            lacking = _lacks(missing, lacking, IS_SHARED, kind, link, part)
            state = 0
        elif to == BROKEN and state == 1:
            state = -1 - t
        out[n, t] = to
    out[n, len(row) - 1] = tables.link_after[kind, link] * budgets + budget
    return state, lacking


@numba.njit(nogil=True, cache=True)
def successors(
    tables: Tables, row: U32, calm_only: bool, out: U32, names: I32, missing: U64, lacking: int
) -> tuple[int, int]:
    """Into `out`: every row that may follow. Returns how many (-1: something is missing; -2 - n: move n breaks something),
    and how much is missing now. names [n] = (what, which): (ticket, move of its key), (100 + kind, 0), (200 + ticket, ghost),
    (300 + ticket, 0: its next attempt)."""
    tickets = len(row) - 1
    budgets = tables.budget_next.shape[0]
    link, budget = _budget(row[tickets], budgets)
    n, complete, fence, busy, ghost, begun, broken = 0, True, False, False, False, False, -1
    for t in range(tickets):
        part = row[t]
        if part == 0:
            continue
        begun = True
        busy |= tables.modes[part] & 1 != 0
        ghost |= tables.modes[part] & 2 != 0
        key = move_key(tables, row, t, link, budget)
        place = key_at(tables.keys, key)
        if place < 0:
            if lacking < len(missing):
                missing[lacking] = key
                lacking += 1
            complete = False
            continue
        fence |= tables.quiet[place] != 0
        start = tables.starts[place]
        if n + tables.counts[place] > MOST - 32:
            raise ValueError("a state has more successors than there is room for")
        for i in range(start, start + tables.counts[place]):
            fault, after = tables.faults[i], budget
            if fault >= 0:
                if calm_only:
                    continue
                after = tables.budget_next[budget, fault]
                if after < 0:
                    continue
            out[n, :] = row
            out[n, t] = tables.to[i]
            out[n, tickets] = link * budgets + after
            names[n, 0], names[n, 1] = t, i - start
            if tables.to[i] == BROKEN and broken < 0:
                broken = n
            n += 1
    for t in range(1, tickets, 2):
        former = row[t - 1]
        if row[t] == 0 and tables.begins_new[former] != MISSING:
            out[n, :] = row
            out[n, t - 1], out[n, t] = tables.begins_old[former], tables.begins_new[former]
            names[n, 0], names[n, 1] = 300 + t, 0
            n += 1
    if ghost:
        for t in range(tickets):
            part = row[t]
            if tables.modes[part] & 2 == 0:
                continue
            if tables.ghost_start[part] < 0:
                lacking = _lacks(missing, lacking, IS_GHOSTS, 0, 0, part)
                complete = False
                continue
            for i in range(tables.ghost_start[part], tables.ghost_start[part] + tables.ghost_count[part]):
                out[n, :] = row
                out[n, t] = tables.ghost_to[i]
                hits = tables.ghost_hits[i]
                while hits:
                    slot, page = (hits >> 2) & 7, hits & 3
                    for u in range(tickets):
                        if u != t and tables.slots[row[u]] >> slot & 1:
                            to = tables.shared[STRIKE + slot * MAX_PAGES + page, 0, out[n, u]]
                            if to == MISSING:
                                lacking = _lacks(
                                    missing,
                                    lacking,
                                    IS_SHARED,
                                    STRIKE + slot * MAX_PAGES + page,
                                    0,
                                    out[n, u],
                                )
                                complete = False
                            out[n, u] = to
                    hits >>= 8
                names[n, 0], names[n, 1] = 200 + t, i - tables.ghost_start[part]
                n += 1
    if not busy:
        up, welcomed = tables.link_up[link] & 1, tables.link_up[link] & 2
        for step in range(6):
            after = budget
            if step == 0:
                if not up:
                    kind = GREET
                elif not welcomed:
                    kind = WELCOME
                elif tables.fenceable and fence:
                    kind = FENCE
                else:
                    continue
            elif calm_only or step == 5:
                continue
            elif step <= 2:
                kind = SILENCE + step - 1
                after = tables.budget_next[budget, tables.silence_fault]
                if not up or not begun or after < 0:
                    continue
            else:
                kind = CRASH + step - 3
                after = tables.budget_next[budget, tables.crash_fault]
                if after < 0:
                    continue
            state, lacking = _together(tables, row, kind, link, after, out, n, missing, lacking)
            if state == 0:
                complete = False
                continue
            if state < 0 and broken < 0:
                broken = n
            names[n, 0], names[n, 1] = 100 + kind, 0
            n += 1
    if not complete:
        return -1, lacking
    if broken >= 0:
        return -2 - broken, lacking
    return n, lacking
