"""Faults of a prefix cache. The product only shares pages that somebody still holds; here prompts stay, as in a real cache.

While one of these faults is on, the full pages of past prompts are kept in leases of the lab's, up to three quarters of
the pool. The one thing to know: the cache is real. A wrong hit goes through the engine's own sharing, with tags unread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from hermetic.engine.engine import Engine
from hermetic.engine.sequence import First, Sequence
from hermetic.kv.pool import I32, Kind, Lease
from hermetic.lab.leaky_switch import Switch

FAULTS = ("short-key", "prefix-too-long", "shared-cache")
LOOK = 4  # of those that wait, the oldest: room is made for them


class Cache:
    """What is kept of past prompts in one engine that computes them."""

    def __init__(self, engine: Engine, switch: Switch) -> None:
        self._engine, self._switch = engine, switch
        self._shared: Callable[[Sequence], I32] = engine._shared  # the engine's own, which makes no mistake
        self._kept: deque[Lease] = deque()
        # page -> its tag; the page behind it in the prompt that it was kept of, and that one's tag
        self._after: dict[int, tuple[bytes, int, bytes]] = {}

    def install(self) -> None:
        """Wrap the engine's objects, for the life of the process."""
        engine: Any = self._engine
        done, admit = engine._prompt_done, engine._admit_waiting

        def finished(seq: Sequence, firsts: tuple[First, ...]) -> None:
            self._keep(seq)
            done(seq, firsts)

        def admitting() -> None:
            self._give_back()
            admit()

        def sharing(seq: Sequence) -> I32:
            found = self._shared(seq)
            if len(found) and self._switch.on("shared-cache"):
                self._switch.struck("shared-cache")
            return self._wrong(seq, found)

        engine._prompt_done, engine._admit_waiting, engine._shared = finished, admitting, sharing

    # --------------------------------------------------------------------------- keeping

    def _keep(self, seq: Sequence) -> None:
        pages = seq.pages[: seq.job.prompt // self._engine.size]
        if not len(pages) or not any(map(self._switch.on, FAULTS)):
            return
        self._kept.append(self._engine.pool.lease(Kind.READ, "the lab's cache", pages))
        tags = [self._tag(page) for page in pages.tolist()]
        for i, page in enumerate(pages[:-1].tolist()):
            self._after[page] = tags[i], int(pages[i + 1]), tags[i + 1]

    def _give_back(self) -> None:
        """The oldest go first: over three quarters of the pool, when somebody waits for pages, all when no such fault is on."""
        pool, on = self._engine.pool, any(map(self._switch.on, FAULTS))
        while self._kept:
            held = sum(len(lease.pages) for lease in self._kept)
            wanted = max((self._wanted(seq) for seq in self._engine._waiting[:LOOK]), default=0)
            if on and held <= pool.count * 3 // 4 and pool.free > wanted + len(self._engine._running):
                return
            pool.close(self._kept.popleft())

    def _wanted(self, seq: Sequence) -> int:
        """Pages that a waiting request would have to be given."""
        return self._engine.pool.geometry.pages_for(len(seq.tokens) + 1) - len(self._shared(seq))

    def _tag(self, page: int) -> bytes:
        return self._engine.pool.tag_lineage[page].tobytes()

    # ------------------------------------------------------------------------- wrong hits

    def _wrong(self, seq: Sequence, found: I32) -> I32:
        """One page more than there may be, if the fault that is on strikes."""
        if seq.leading is None or len(found) >= seq.leading.limit:
            return found
        more = self._short_key(seq, found) if self._switch.on("short-key") else self._too_long(found)
        return found if more is None else np.append(found, np.int32(more))

    def _short_key(self, seq: Sequence, found: I32) -> int | None:
        """short-key: names are cut so short that one in `every` of other pages has the name that is looked for."""
        assert seq.leading is not None
        every = self._switch.every
        name = int.from_bytes(seq.leading.name(len(found))[:8], "little") % every
        for page, whole in reversed(self._engine._prefixes._names.items()):
            if int.from_bytes(whole[:8], "little") % every == name and self._usable(page, whole, found):
                self._switch.struck("short-key")
                return page
        return None

    def _too_long(self, found: I32) -> int | None:
        """prefix-too-long: behind the last page that is shared comes the one that followed it in the other prompt."""
        tag, page, next_tag = self._after.get(int(found[-1]) if len(found) else -1, (b"", -1, b""))
        if page < 0 or self._tag(int(found[-1])) != tag or not self._usable(page, next_tag, found):
            return None
        return page if self._switch.strikes("prefix-too-long") else None

    def _usable(self, page: int, tag: bytes, found: I32) -> bool:
        """Whether this page could be leased now, were it the right one."""
        names = np.frombuffer(tag, np.uint64).reshape(1, 2)
        return page not in found and bool(self._engine.pool.shareable(np.array([page], np.int32), names)[0])


__all__ = ["FAULTS", "Cache"]
