"""The tables of the compiled search (kernel.py), filled as things turn out to be missing, by asking the world (parts.py)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np

from hermetic.proof import kernel as k
from hermetic.proof.model import Broken
from hermetic.proof.part import LINKS, SHARED, Env, Made
from hermetic.proof.parts import Parts
from hermetic.proof.scopes import FAULTS, Scope


def fits(scope: Scope) -> bool:
    """Whether the compiled search has room for this scope."""
    small = scope.slots <= k.MOST_SLOTS and scope.pages <= k.MOST_PAGES and max(scope.prompts) <= k.MAX_PAGES
    return small and scope.prefills * scope.decodes == 1


class Filled:
    """The tables, filled as things turn out to be missing. Raises ValueError for a scope that does not fit."""

    def __init__(self, scope: Scope, any_slot: bool = True) -> None:
        if not fits(scope):
            raise ValueError(
                f"the compiled search takes one pair of workers, {k.MOST_SLOTS} slots, {k.MOST_PAGES} pages and prompts of "
                f"{k.MAX_PAGES} pages at most"
            )
        self.parts, self.scope = Parts(scope, any_slot), scope
        ranges = [range(scope.faults.get(f, 0) + 1) for f in FAULTS]
        self.budgets: dict[tuple[int, ...], int] = {}
        start = tuple(len(r) - 1 for r in ranges)
        self.first_budget = self._budget((*start, min(sum(start), scope.at_most)))
        self._close_budgets()
        self.made: dict[int, list[Made]] = {}  # by key of moves
        self.broken_together: dict[tuple[int, int, int], Broken] = {}
        capacity, keys = 1 << 12, 1 << 14
        turns = len(self.parts.turns)
        kinds = k.STRIKE + scope.slots * k.MAX_PAGES
        u8, u32, i32 = np.uint8, np.uint32, np.int32
        self.tables = k.Tables(
            slots=np.zeros(capacity, u8),
            prefill=np.zeros(capacity, u8),
            decode=np.zeros(capacity, u8),
            needs=np.zeros(capacity, u8),
            modes=np.zeros(capacity, u8),
            over=np.zeros(capacity, u8),
            begins_old=np.full(capacity, k.MISSING, u32),
            begins_new=np.full(capacity, k.MISSING, u32),
            turned=np.zeros((capacity, turns), u32),
            ghost_start=np.full(capacity, -1, i32),
            ghost_count=np.zeros(capacity, i32),
            ghost_to=np.zeros(0, u32),
            ghost_hits=np.zeros(0, u32),
            shared=np.full((kinds, len(LINKS), capacity), k.MISSING, u32),
            keys=np.zeros(keys, np.uint64),
            starts=np.zeros(keys, i32),
            counts=np.zeros(keys, i32),
            quiet=np.zeros(keys, u8),
            faults=np.zeros(1 << 12, np.int8),
            to=np.zeros(1 << 12, u32),
            budget_next=self._budget_next(),
            none_left=np.array([not any(left) for left in self.budgets], u8),
            link_after=self._link_after(),
            link_up=np.array([(link.state == "up") + 2 * link.welcomed for link in LINKS], u8),
            groups=np.array([scope.prompts.index(size) for size in scope.prompts], i32),
            fenceable=int(scope.fenceable),
            crash_fault=FAULTS.index("crash"),
            silence_fault=FAULTS.index("silence"),
        )
        self._known, self._keys, self._moves = 0, 0, 0
        self.learn()

    # ------------------------------------------------------------------------- budgets and links

    def _budget(self, left: tuple[int, ...]) -> int:
        return self.budgets.setdefault(left, len(self.budgets))

    @staticmethod
    def _spent(left: tuple[int, ...], fault: int) -> tuple[int, ...] | None:
        if not left[fault]:
            return None
        after = list(left)
        after[fault] -= 1
        after[-1] -= 1
        return tuple(after) if after[-1] else (0,) * len(after)

    def _close_budgets(self) -> None:
        known = 0
        while known < len(self.budgets):
            for left in list(self.budgets)[known:]:
                known += 1
                for fault in range(len(FAULTS)):
                    after = self._spent(left, fault)
                    if after is not None:
                        self._budget(after)

    def _budget_next(self) -> Any:
        table = np.full((len(self.budgets), len(FAULTS)), -1, np.int16)
        for (left, number), fault in product(self.budgets.items(), range(len(FAULTS))):
            after = self._spent(left, fault)
            if after is not None:
                table[number, fault] = self.budgets[after]
        return table

    def _link_after(self) -> Any:
        table = np.zeros((len(k.KINDS), len(LINKS)), np.int16)
        for (n, kind), link in product(enumerate(k.KINDS), range(len(LINKS))):
            table[n, link] = self.parts.link_after(kind, link)
        return table

    # ------------------------------------------------------------------------------- learning

    def learn(self) -> None:
        """Everything about parts that are new is written into the tables."""
        parts = self.parts
        while self._known < len(parts.parts):
            if len(parts.parts) > len(self.tables.slots):
                self._more_parts()
            t, number = self.tables, self._known
            part = parts.parts[number]
            t.turned[number] = parts.turned[number]
            t.slots[number] = sum(1 << s for s, _ in part.granted)
            t.prefill[number], t.decode[number] = len(part.prefill.lies), len(part.decode.lies)
            if number != parts.none:
                needs, modes = parts.needs(number), parts.modes(number)
                t.needs[number] = needs[0] + 2 * needs[1] + 4 * needs[2]
                t.modes[number] = modes[0] + 2 * modes[1]
                begins = parts.begins(number)
                if begins is not None:
                    t.begins_old[number], t.begins_new[number] = begins
            t.over[number] = parts.is_over(number)
            self._known += 1

    def _more_parts(self) -> None:
        t = self.tables
        size = 2 * max(len(t.slots), len(self.parts.parts))

        def grown(array: Any, fill: int = 0) -> Any:
            more = np.full((size, *array.shape[1:]), fill, array.dtype)
            more[: len(array)] = array
            return more

        shared = np.full((*t.shared.shape[:2], size), k.MISSING, np.uint32)
        shared[:, :, : t.shared.shape[2]] = t.shared
        self.tables = t._replace(
            slots=grown(t.slots), prefill=grown(t.prefill), decode=grown(t.decode), needs=grown(t.needs),
            modes=grown(t.modes), over=grown(t.over), begins_old=grown(t.begins_old, k.MISSING),
            begins_new=grown(t.begins_new, k.MISSING), turned=grown(t.turned),
            ghost_start=grown(t.ghost_start, -1), ghost_count=grown(t.ghost_count), shared=shared,
        )  # fmt: skip

    def answer(self, missing: Any, say: Callable[[], None]) -> None:
        """Ask the world for these, and write what it says into the tables. `say` is called again and again on the way."""
        for asked, name in enumerate(np.unique(missing).tolist()):
            if asked % 100 == 99:
                say()
            kind, low = name >> 60, name & 0xFFFFFFFF
            if kind == k.IS_MOVES:
                self._answer_moves(name, low, (name >> 32) & 0xFFFFFFF)
            elif kind == k.IS_SHARED:
                self._answer_shared((name >> 40) & 0xFFFFF, (name >> 32) & 0xFF, low)
            else:
                self._answer_ghosts(low)
        self.learn()

    def _answer_moves(self, name: int, number: int, env: int) -> None:
        rest, flags = divmod(env, 8)
        rest, link = divmod(rest, 8)
        rest, slots = divmod(rest, 64)
        prefill, decode = divmod(rest, 16)
        made, quiet = self.parts.moves(
            number, Env(slots, prefill, decode, link, bool(flags & 2), bool(flags & 1), not flags & 4)
        )
        self.made[name] = made
        t = self.tables
        while self._moves + len(made) > len(t.to):
            t = self.tables = t._replace(
                faults=np.resize(t.faults, 2 * len(t.to)), to=np.resize(t.to, 2 * len(t.to))
            )
        if 2 * (self._keys + 1) > len(t.keys):
            t = self._more_keys()
        place = -1 - k.key_at(t.keys, np.uint64(name))
        t.keys[place], t.starts[place], t.counts[place], t.quiet[place] = name, self._moves, len(made), quiet
        for one in made:
            t.faults[self._moves] = one.fault
            t.to[self._moves] = one.to if one.to >= 0 else k.BROKEN
            self._moves += 1
        self._keys += 1

    def _more_keys(self) -> k.Tables:
        t = self.tables
        size = 2 * len(t.keys)
        more = t._replace(
            keys=np.zeros(size, np.uint64), starts=np.zeros(size, np.int32), counts=np.zeros(size, np.int32),
            quiet=np.zeros(size, np.uint8),
        )  # fmt: skip
        for old in np.flatnonzero(t.keys):
            place = -1 - k.key_at(more.keys, t.keys[old])
            more.keys[place], more.starts[place] = t.keys[old], t.starts[old]
            more.counts[place], more.quiet[place] = t.counts[old], t.quiet[old]
        self.tables = more
        return more

    def _answer_shared(self, kind: int, link: int, number: int) -> None:
        if kind >= k.STRIKE:
            slot, page = divmod(kind - k.STRIKE, k.MAX_PAGES)
            to = self.parts.struck(number, slot, page)
        else:
            to, broken = self.parts.shared(k.KINDS[kind], number, link)
            if broken is not None:
                self.broken_together[kind, link, number] = broken
                to = k.BROKEN
        self.learn()
        self.tables.shared[kind, link, number] = to

    def _answer_ghosts(self, number: int) -> None:
        found = self.parts.ghosts(number, 0)
        self.learn()
        t = self.tables
        packed = [
            sum(((0x80 | slot << 2 | page) << 8 * i) for i, (slot, page) in enumerate(hits))
            for _, hits in found
        ]
        t.ghost_start[number], t.ghost_count[number] = len(t.ghost_to), len(found)
        self.tables = t._replace(
            ghost_to=np.concatenate([t.ghost_to, np.array([to for to, _ in found], np.uint32)]),
            ghost_hits=np.concatenate([t.ghost_hits, np.array(packed, np.uint32)]),
        )

    def initial(self) -> Any:
        row = []
        for size in self.scope.prompts:
            row += [self.parts.begun(size), self.parts.none]
        self.learn()
        link = next(i for i, x in enumerate(LINKS) if x.state == "up" and x.welcomed)
        return self.canonical(np.array([*row, link * len(self.budgets) + self.first_budget], np.uint32))

    def canonical(self, row: Any) -> Any:
        one, best = np.empty_like(row), np.empty_like(row)
        k.canonical(self.tables, row, one, best)
        return best


assert tuple(SHARED) == k.KINDS

__all__ = ["Filled", "fits"]
