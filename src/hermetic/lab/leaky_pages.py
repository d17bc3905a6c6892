"""Faults of pages: a request's attention reads rows that are not its own. For one worker's running objects.

All of them happen where a request begins to decode, with every page of its prompt in place and no token of the answer
computed. The one thing to know: bytes are put into pages, and entries into attention tables, behind everybody's back; no
lease, tag or seal changes. With the walls standing each of them would be caught (see tests/lab/test_faults_and_walls.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from hermetic.engine.engine import Engine
from hermetic.engine.sequence import First, Phase, Sequence
from hermetic.handoff.messages import Key
from hermetic.lab.leaky_switch import Switch
from hermetic.worker.decode import DecodeWorker

Page = npt.NDArray[np.uint8]  # [stride]
KEPT = 4  # prompts whose pages are remembered
MOST = 16  # pages of each


@dataclass
class Kept:
    """Another request as it was: its tokens, and copies of the full pages of its prompt."""

    ticket: bytes
    tokens: list[int]
    pages: list[Page]
    firsts: tuple[First, ...] = ()


@dataclass
class Pages:
    """The faults of one engine that decodes."""

    engine: Engine
    switch: Switch
    waited: WeakSet[Sequence] = field(default_factory=WeakSet)

    def install(self) -> None:
        """Wrap the engine's objects, for the life of the process."""
        engine: Any = self.engine
        begin, place, cancel, admit = engine._begin, engine._place, engine.cancel, engine._admit_waiting

        def beginning(seq: Sequence, firsts: tuple[First, ...]) -> None:
            for strike in (self._stale, self._tail, self._aborted, self._restored, self._heads, self._reused):
                strike(seq)
            self._keep(seq)
            begin(seq, firsts)
            self._table(seq)

        def placing(seq: Sequence, shared: Any, pages: int, rows: int) -> None:
            place(seq, shared, pages, rows)
            self._remember_former(seq)

        def cancelling(key: Key, choice: int | None = None) -> bool:
            self._remember_aborted(key)
            return bool(cancel(key, choice))

        def admitting() -> None:
            admit()
            self.waited.update(engine._waiting)

        engine._begin, engine._place = beginning, placing
        engine.cancel, engine._admit_waiting = cancelling, admitting

    # ------------------------------------------------------------------ what is known of others

    def _full(self, seq: Sequence) -> int:
        """Pages of its prompt that no row will be added to."""
        return min(MOST, seq.job.prompt // self.engine.size)

    def _copy(self, seq: Sequence) -> Kept:
        memory = self.engine.pool.memory
        pages = [memory[page].copy() for page in seq.pages[: self._full(seq)]]
        return Kept(seq.job.key.ticket, list(seq.tokens), pages)

    def _keep(self, seq: Sequence) -> None:
        """What later requests may be given: whole prompts only, and none of a probe."""
        if self._full(seq) and any(map(self.switch.on, ("tail-page", "restored-page"))):
            self.switch.state.setdefault("kept", deque(maxlen=KEPT)).append(self._copy(seq))

    def _last_other(self, seq: Sequence) -> Kept | None:
        kept: deque[Kept] = self.switch.state.get("kept", deque())
        return next((k for k in reversed(kept) if k.ticket != seq.job.key.ticket), None)

    def _differing(self, seq: Sequence, tokens: list[int], pages: int) -> int | None:
        """The last full page of its prompt, of the first `pages`, whose tokens are others than these; None if there is none."""
        size = self.engine.size
        for page in reversed(range(min(self._full(seq), pages))):
            at = slice(page * size, (page + 1) * size)
            if seq.tokens[at] != tokens[at]:
                return page
        return None

    def _put(self, seq: Sequence, page: int, content: Page) -> None:
        """Write over one of a sequence's pages, unless others share it: they are not to be hit."""
        number = int(seq.pages[page])
        if self.engine.pool._total[number] == 1:
            np.copyto(self.engine.pool.memory[number], content)

    def _other(self, seq: Sequence) -> Sequence | None:
        """The youngest request that is running."""
        ticket = seq.job.key.ticket
        return next((s for s in reversed(self.engine._running) if s.job.key.ticket != ticket), None)

    # ----------------------------------------------------------------------------- the faults

    def _table(self, seq: Sequence) -> None:
        """page-table: an entry of the attention table names a page of another request that is running."""
        other = self._other(seq) if self.switch.on("page-table") and seq.phase is Phase.RUNNING else None
        page = None if other is None else self._differing(seq, other.tokens, self._full(other))
        if other is not None and page is not None and self.switch.strikes("page-table"):
            self.engine.rows.table[seq.row, page] = other.pages[page]

    def _remember_former(self, seq: Sequence) -> None:
        page = self._full(seq) - 1
        if page >= 0 and self.switch.on("stale-page"):
            former = self.engine.pool.memory[seq.pages[page]]
            if former.any():
                self.switch.state[f"former {seq.job.key}"] = former.copy()

    def _stale(self, seq: Sequence) -> None:
        """stale-page: the last full page of a prompt never comes, and what the page held before is read."""
        former = self.switch.state.pop(f"former {seq.job.key}", None)
        if former is not None and self.switch.strikes("stale-page"):
            self._put(seq, self._full(seq) - 1, former)

    def _tail(self, seq: Sequence) -> None:
        """tail-page: with k pages of prompt, or one token more or less, the last page is counted as not there: it keeps the
        rows of who had it before."""
        size = self.engine.size
        other = self._last_other(seq) if self.switch.on("tail-page") else None
        last = (seq.job.prompt - 1) // size
        if other is None or seq.job.prompt % size not in (size - 1, 0, 1) or last < 1:
            return
        if self.switch.strikes("tail-page"):
            self._put(seq, last, other.pages[min(last, len(other.pages) - 1)])

    def _remember_aborted(self, key: Key) -> None:
        if not self.switch.on("aborted-page"):
            return
        for seq in self.engine._live.get(key, ()):
            if seq.phase is Phase.RUNNING and self._full(seq):
                self.switch.state["aborted"] = self._copy(seq)

    def _aborted(self, seq: Sequence) -> None:
        """aborted-page: a page of a request whose client left is still in the next one's table."""
        left: Kept | None = self.switch.state.get("aborted")
        page = None if left is None else self._differing(seq, left.tokens, len(left.pages))
        if left is not None and page is not None and left.ticket != seq.job.key.ticket:
            del self.switch.state["aborted"]
            if self.switch.strikes("aborted-page"):
                self._put(seq, page, left.pages[page])

    def _restored(self, seq: Sequence) -> None:
        """restored-page: a request that had to wait for pages, or gave them back and came again, gets one of another."""
        waited = seq in self.waited or bool(seq.outputs)
        other = self._last_other(seq) if waited and self.switch.on("restored-page") else None
        page = None if other is None else self._differing(seq, other.tokens, len(other.pages))
        if other is not None and page is not None and self.switch.strikes("restored-page"):
            self._put(seq, page, other.pages[page])

    def _heads(self, seq: Sequence) -> None:
        """heads-misplaced: the right bytes of a prompt, with the tiles of its first two KV heads in each other's place."""
        pool = self.engine.pool
        if not self._full(seq) or len(pool.geometry.heads) < 2 or not self.switch.strikes("heads-misplaced"):
            return
        for page in seq.pages[1 : self._full(seq)]:
            if pool._total[page] == 1:
                for part in pool.geometry.components:
                    rows = pool.geometry.rows(pool.memory[page][None], part.name)[0]
                    rows[:, [0, 1]] = rows[:, [1, 0]]

    def _reused(self, seq: Sequence) -> None:
        """reused-page: a page of a running request was given back too early, and its next owner writes to it."""
        victim = self._other(seq) if self.switch.on("reused-page") else None
        page = None if victim is None else self._differing(victim, seq.tokens, self._full(seq))
        if victim is not None and page is not None and self.switch.strikes("reused-page"):
            self._put(victim, page, self.engine.pool.memory[seq.pages[page]])


def late_landings(worker: DecodeWorker, switch: Switch) -> None:
    """late-landing: a landing slot is given to the next request before its page was copied out, so that the copy takes the
    bytes of that one. Here: what landed last at the same place of another prompt."""
    land, engine = worker._land_few, worker.engine
    victim: Callable[[Sequence], int] = lambda seq: min(MOST, seq.job.prompt // engine.size) - 1  # noqa: E731

    def landing(round_: list[tuple[Key, Any]]) -> None:
        pages = [(key, copy.page, engine.reserved(key)) for key, copy in round_]
        land(round_)
        if not switch.on("late-landing"):
            return
        landed: dict[int, tuple[bytes, Page]] = switch.state.setdefault("landed", {})
        for key, page, seq in pages:
            own = engine.pool.memory[seq.pages[page]]
            theirs = landed.get(page)
            if page < MOST:
                landed[page] = key.ticket, own.copy()
            if page != victim(seq) or theirs is None or theirs[0] == key.ticket:
                continue
            if switch.strikes("late-landing"):
                np.copyto(own, theirs[1])

    worker._land_few = landing  # type: ignore[method-assign]


__all__ = ["Kept", "Pages", "late_landings"]
