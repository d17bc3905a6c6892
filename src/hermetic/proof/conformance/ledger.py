"""What a recording says about memory: who holds which page of a pool, and to whom each landing slot is granted.

Kept from the records alone, so that what a machine claims can be compared with what was there. The one thing to know: a
change of slots is recorded before the step that made it, because it happens inside; it waits here for that step's reasons.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hermetic.handoff import records as r


class Broken(Exception):
    """The record is no behaviour of the protocol. `text`: what happened, `allowed`: what could have been instead."""

    def __init__(self, text: str, allowed: str) -> None:
        super().__init__(text)
        self.text, self.allowed = text, allowed


def demand(true: bool, text: str, allowed: str) -> None:
    if not true:
        raise Broken(text, allowed)


@dataclass
class Pages:
    """One process's pool. `count` 0: nothing is recorded of it."""

    count: int
    holds: dict[int, Counter[tuple[str, str]]] = field(
        default_factory=dict
    )  # page -> (kind, owner) -> how often
    of: dict[str, Counter[int]] = field(default_factory=dict)  # owner -> page -> how often
    quarantined: set[int] = field(default_factory=set)

    def changed(self, change: r.PagesChanged) -> None:
        what, pages, hold = change.what, change.pages, (change.kind, change.owner)
        outside = [page for page in pages if not 0 <= page < self.count]
        demand(not outside, f"page {outside} of a pool of {self.count}", "pages of the pool")
        match what:
            case "take":
                self._take(pages, hold)
            case "share":
                free = [page for page in pages if page not in self.holds]
                demand(
                    not free,
                    f"{hold[1]} shares page {free}, which nobody holds",
                    "a page that somebody holds",
                )
                bad = self.quarantined.intersection(pages)
                demand(not bad, f"{hold[1]} shares page {sorted(bad)}, which is in quarantine", "other pages")
                self._add(pages, hold)
            case "drop":
                self._drop(pages, hold)
            case "quarantine":
                free = [page for page in pages if page not in self.holds]
                demand(not free, f"page {free} goes to quarantine from the free list", "pages that are held")
                self.quarantined.update(pages)
            case _:
                raise Broken(f"pages change by {what!r}", "take, share, drop or quarantine")

    def held(self, owner: str) -> int:
        """How many pages this owner has."""
        return len(self.of.get(owner, ()))

    def holds_as(self, page: int, kind: str, owner: str) -> bool:
        return self.holds.get(page, Counter())[kind, owner] > 0

    def _take(self, pages: tuple[int, ...], hold: tuple[str, str]) -> None:
        held = [page for page in pages if page in self.holds or page in self.quarantined]
        if held or len(set(pages)) != len(pages):
            others = sorted({owner for page in held for _, owner in self.holds.get(page, ())})
            raise Broken(
                f"{hold[1]} takes page {held} as free, which {' and '.join(others) or 'nobody'} holds (I3)",
                "taking pages whose last lease is closed, each once",
            )
        self._add(pages, hold)

    def _add(self, pages: tuple[int, ...], hold: tuple[str, str]) -> None:
        for page in pages:
            self.holds.setdefault(page, Counter())[hold] += 1
        self.of.setdefault(hold[1], Counter()).update(pages)

    def _drop(self, pages: tuple[int, ...], hold: tuple[str, str]) -> None:
        kind, owner = hold
        for page in pages:
            holds = self.holds.get(page, Counter())
            if holds[hold] < 1:
                raise Broken(
                    f"{owner} closes a {kind} lease on page {page} that it does not have",
                    "closing each lease once",
                )
            holds[hold] -= 1
            if not holds[hold]:
                del holds[hold]
            if not holds:
                del self.holds[page]
            mine = self.of[owner]
            mine[page] -= 1
            if not mine[page]:
                del mine[page]
            if not mine:
                del self.of[owner]


@dataclass
class SlotBook:
    """One segment of a decode process."""

    number: int
    peer: str
    count: int
    last: dict[int, int] = field(default_factory=dict)  # slot -> its last use
    granted: dict[int, tuple[int, str]] = field(default_factory=dict)  # slot -> (use, key)
    quarantined: set[int] = field(default_factory=set)
    fenced: bool = False

    def holds(self, key: str, use: r.Use) -> bool:
        return self.granted.get(use[0]) == (use[1], key)

    def of(self, key: str) -> set[r.Use]:
        return {(slot, use) for slot, (use, whose) in self.granted.items() if whose == key}

    def grant(self, key: str, uses: tuple[r.Use, ...]) -> None:
        for slot, use in uses:
            was = self.granted.get(slot)
            if was is not None or not 0 <= slot < self.count:
                still = f" while it is granted to {was[1]} as use {was[0]} (I3)" if was else ""
                raise Broken(
                    f"slot {slot} of {self.count} is granted to {key}{still}", "granting slots that are free"
                )
            due = self.last.get(slot, 0) + 1
            if use != due:
                raise Broken(f"slot {slot} is granted as use {use}", f"use {due}: each use once, in order")
            self.last[slot] = use
            self.granted[slot] = (use, key)

    def back(self, key: str, uses: tuple[r.Use, ...], what: str) -> None:
        """These uses end."""
        for use in uses:
            if not self.holds(key, use) and (key or use[0] not in self.granted):
                raise Broken(
                    f"{what} of slot {use[0]}, use {use[1]}, which is not granted to {key or 'anybody'}",
                    f"{what} of the uses that it has: {sorted(self.of(key))}",
                )
            del self.granted[use[0]]
            self.quarantined.discard(use[0])


__all__ = ["Broken", "Pages", "SlotBook", "demand"]
