"""Every state of a scope with one pair of workers, breadth first, in compiled loops on both cores.

States are rows of a few numbers (parts.py), kept whole: nothing is taken for something else by a fingerprint. The loops
(kernel.py) go from row to row by tables; what a table lacks is asked of the world, which runs the production code. States
that differ in names of slots, of pages, of uses, or of equal requests only are one.

The one thing to know: a row belongs to the rank that its hash names. Each rank's thread expands its own rows into buffers by
rank, then each takes in what is its own; between the two, this process answers what was missing.

Why a second search stands in `search.py`, and which of them is used when, is said there.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from hermetic.handoff.machine import Machine
from hermetic.proof import kernel as k
from hermetic.proof import loops
from hermetic.proof.model import Broken, Link, Move, State
from hermetic.proof.part import LINKS
from hermetic.proof.saved import Counterexample, Step
from hermetic.proof.scopes import Scope
from hermetic.proof.search import Exploration, Progress, Rows
from hermetic.proof.story import told, unended
from hermetic.proof.tables import Filled
from hermetic.proof.world import label

CHUNK = 1 << 15
ROOM = 1 << 21  # rows of a buffer
SLICE = 1 << 16  # rows of a rank that are looked at on the way back before progress is said


@dataclass
class Exact(Exploration):
    """As of any search; states are kept whole, so none was taken for another."""

    @property
    def collision(self) -> float:
        return 0.0


class Rank:
    """The rows that belong to one thread."""

    def __init__(self, rank: int, ranks: int, width: int) -> None:
        self.rank, self.ranks, self.count, self.level = rank, ranks, 0, 0
        self.rows, self.parents = np.empty((1 << 16, width), np.uint32), np.empty(1 << 16, np.uint32)
        self.table = np.full(1 << 18, -1, np.int32)
        self.out_rows = np.empty((ranks, ROOM // ranks, width), np.uint32)
        self.out_hash = np.empty((ranks, ROOM // ranks), np.uint64)
        self.out_parent = np.empty((ranks, ROOM // ranks), np.uint32)
        self.out_count = np.zeros(ranks, np.int32)
        self.pending = np.empty(CHUNK, np.int32)
        self.missing = np.empty(1 << 16, np.uint64)
        self.broken = np.full(2, -1, np.int32)
        self.todo: list[Any] = []
        self.transitions = 0

    def plan(self, hi: int) -> None:
        self.todo = [
            np.arange(lo, min(lo + CHUNK, hi), dtype=np.int32) for lo in range(self.level, hi, CHUNK)
        ][::-1]
        self.level = hi

    def expand(self, tables: k.Tables) -> Any:
        """One chunk. Returns the names of what was missing."""
        self.out_count[:] = 0
        if not self.todo:
            return self.missing[:0]
        todo = self.todo.pop()
        taken, waiting, lacking, transitions = loops.expand(
            tables, self.rows, todo, self.rank, self.ranks, self.out_rows, self.out_hash, self.out_parent,
            self.out_count, self.pending, self.missing, self.broken,
        )  # fmt: skip
        self.transitions += transitions
        if taken < len(todo):
            self.todo.append(todo[taken:])
        if waiting:
            self.todo.append(self.pending[:waiting].copy())
        return self.missing[:lacking].copy()

    def take(self, others: list[Rank]) -> None:
        new = sum(int(o.out_count[self.rank]) for o in others)
        if self.count + new > len(self.rows):
            size = 2 * (self.count + new)
            self.rows, self.parents = (
                np.concatenate([a[: self.count], np.empty((size - self.count, *a.shape[1:]), a.dtype)])
                for a in (self.rows, self.parents)
            )
        if 2 * (self.count + new) > len(self.table):
            self.table = np.empty(4 * len(self.table), np.int32)
            loops.rehash(self.table, self.rows, self.count)
        for o in others:
            self.count = loops.insert(
                self.table, self.rows, self.parents, self.count, o.out_rows[self.rank], o.out_hash[self.rank],
                o.out_parent[self.rank], int(o.out_count[self.rank]),
            )  # fmt: skip


def explore_exactly(
    scope: Scope, *, threads: int = 2, any_slot: bool = True, progress: Progress | None = None
) -> Exact:
    """Search the whole scope, or until a promise is broken. Raises ValueError for a scope that there is no room for.

    `any_slot`: which of several free slots is granted is left open, and states that differ in names of slots are one."""
    watching = Rows()
    former, Machine.observer = Machine.observer, watching
    try:
        found, filled, _, end = _search(scope, threads, any_slot, progress)
    finally:
        Machine.observer = former
    found.rows = watching.rows
    if end is not None:
        path, broken = end
        found.violation = _told(filled, path, broken)
        if found.violation is None and any_slot:
            # It needs a slot that is not the first free one, and the world, which tells the story, takes the first.
            found.violation = explore_exactly(scope, threads=threads, any_slot=False).violation
        found.violation = found.violation or _bare(broken, len(path))
    return found


End = tuple[list[Any], Broken | None]
"""Rows to a state, and what its last move breaks; None: from there no good end can be reached."""


def _search(
    scope: Scope, threads: int, any_slot: bool, progress: Progress | None
) -> tuple[Exact, Filled, list[Rank], End | None]:
    began, found, filled = time.monotonic(), Exact(scope), Filled(scope, any_slot)
    ranks = _begun(filled, threads)
    end: End | None = None

    def say() -> None:
        _count(found, filled, ranks, began)
        if progress is not None:
            progress(found)

    with ThreadPoolExecutor(threads) as pool:
        while True:
            before = sum(r.count for r in ranks)
            for r in ranks:
                r.plan(r.count)
            while any(r.todo for r in ranks):
                missing = list(pool.map(lambda r: r.expand(filled.tables), ranks))
                list(pool.map(lambda r: r.take(ranks), ranks))
                filled.answer(np.concatenate(missing), say)
                say()
            _count(found, filled, ranks, began)
            broken = next((r for r in ranks if r.broken[0] >= 0), None)
            if broken is not None or found.states == before:
                break
            found.depth += 1
        found.complete = broken is None
        if broken is not None:
            path = _path(ranks, int(broken.broken[0]), broken.rank)
            end = (path, _which(filled, path[-1], int(broken.broken[1])))
        else:
            end = _unreached(found, filled, ranks, pool, say)
    found.seconds = time.monotonic() - began
    return found, filled, ranks, end


def _begun(filled: Filled, threads: int) -> list[Rank]:
    first = filled.initial()
    ranks = [Rank(r, threads, len(first)) for r in range(threads)]
    h = k.row_hash(first)
    mine = ranks[int(h) % threads]
    mine.count = loops.insert(
        mine.table, mine.rows, mine.parents, 0, first[None], np.array([h], np.uint64),
        np.array([mine.rank], np.uint32), 1,
    )  # fmt: skip
    return ranks


def _count(found: Exact, filled: Filled, ranks: list[Rank], began: float) -> None:
    found.states, found.transitions = sum(r.count for r in ranks), sum(r.transitions for r in ranks)
    found.local_steps = filled.parts.world.steps
    found.memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found.seconds = time.monotonic() - began


def _unreached(
    found: Exact, filled: Filled, ranks: list[Rank], pool: ThreadPoolExecutor, say: Callable[[], None]
) -> End | None:
    """L1 and L2: backwards from the good ends along calm moves, until nothing changes; the first state that is left."""
    marks = tuple(np.zeros(r.count, np.uint8) for r in ranks)
    found.good = found.ending = sum(
        loops.mark_good(filled.tables, r.rows, mark, r.count) for r, mark in zip(ranks, marks, strict=True)
    )
    rows, tables = tuple(r.rows for r in ranks), tuple(r.table for r in ranks)

    def reached(rank: Rank, first: int) -> int:
        return loops.reach(
            filled.tables, rows, tables, marks, rank.rank, first, min(first + SLICE, rank.count)
        )

    before = -1
    while before != found.ending:
        before = found.ending
        for first in range(max(r.count for r in ranks) // SLICE * SLICE, -1, -SLICE):
            found.ending += sum(pool.map(reached, ranks, [first] * len(ranks)))
            say()
    left = [(int(np.argmin(mark)), r.rank) for r, mark in zip(ranks, marks, strict=True) if not mark.all()]
    return (min((_path(ranks, *one) for one in left), key=len), None) if left else None


def _path(ranks: list[Rank], index: int, rank: int) -> list[Any]:
    path = []
    while True:
        path.append(ranks[rank].rows[index].copy())
        parent = int(ranks[rank].parents[index])
        at = (parent // len(ranks), parent % len(ranks))
        if at == (index, rank) or len(path) > 10**5:
            return path[::-1]
        index, rank = at


def _which(filled: Filled, row: Any, number: int) -> Broken:
    """What move `number` of a row breaks."""
    names = np.empty((k.MOST, 2), np.int32)
    k.successors(
        filled.tables, row, False, np.empty((k.MOST, len(row)), np.uint32), names, np.empty(0, np.uint64), 0
    )
    what, which = names[number].tolist()
    link, budget = divmod(int(row[-1]), len(filled.budgets))
    if what < 100:
        broken = filled.made[int(k.move_key(filled.tables, row, what, link, budget))][which].broken
    else:
        kind = what - 100
        broken = next(
            filled.broken_together[kind, link, int(p)]
            for p in row[:-1]
            if (kind, link, int(p)) in filled.broken_together
        )
    assert broken is not None
    return broken


# ------------------------------------------------------------------------- as the world tells it
def row_of(filled: Filled, state: State) -> Any:
    """The row that stands for a state of the world."""
    parts, contents = filled.parts, filled.parts.contents
    link = LINKS.index(Link(*contents[state[parts.world.link_at(0)]]))
    numbers = [parts.part(state, t) for t in range(parts.world.tickets)]
    filled.learn()
    last = link * len(filled.budgets) + filled.budgets[contents[state[-1]]]
    return filled.canonical(np.array([*numbers, last], np.uint32))


def _told(filled: Filled, path: list[Any], broken: Broken | None) -> Counterexample | None:
    """The path taken in the world, step by step; None if it cannot be taken there."""
    world = filled.parts.world
    ways: list[tuple[State, list[tuple[Move, State]]]] = [(world.initial(), [])]
    for row in path[1:]:
        following: dict[State, list[tuple[Move, State]]] = {}
        for state, taken in ways:
            for move, _, after in world.expand(state):
                if after not in following and (row_of(filled, after) == row).all():
                    following[after] = [*taken, (move, state)]
        ways = list(following.items())
    for state, taken in ways:
        if broken is None:
            return unended(world, "", taken, state)
        try:
            world.expand(state)
        except Broken as error:
            return told(world, "", error.kind, error.text, [*taken, (error.move, state)])
    return None


def _bare(broken: Broken | None, steps: int) -> Counterexample:
    kind, text, last = (broken.kind, broken.text, label(broken.move)) if broken else ("L2", "no good end", "")
    told_so = f"{steps} steps, in which a slot is granted that is not the first free one"
    return Counterexample(kind, text, (Step("network", told_so), Step("network", last)))


__all__ = ["Exact", "explore_exactly"]
