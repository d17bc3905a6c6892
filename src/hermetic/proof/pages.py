"""The pages of one worker: the production pool, who holds what in it, and what each page contains, as symbols.

Contents are (ticket, page of its prompt, intact), or None for whatever a former owner left. Physical page numbers live here
and nowhere else in a state, so that states which differ only in them are made one here (`packed`).

The one thing to know: a write in flight reads its source until it has ended. `readings` says from which page, and `check`
whether that page is still held for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hermetic.kv.geometry import Geometry
from hermetic.kv.pool import I32, Kind, Lease, OwnershipError, Pool
from hermetic.proof.codec import Data
from hermetic.proof.halves import SIZE, key_of, tokens_of

GEOMETRY = Geometry.attention(SIZE, 1, 1, 4, "f32")
_pools: dict[int, Pool] = {}


def empty(count: int) -> Data:
    """A worker that has just started."""
    return ((0,) * count, (), (), (None,) * count, ())


def lineage_of(ticket: int, page: int) -> np.ndarray:
    """A number that stands for the lineage of one page of one prompt: uint64 [2]."""
    return np.array([ticket + 1, page + 1], np.uint64)


class PageBook:
    """Unpacked: `held` ticket -> its open leases, `tables` ticket -> physical pages in order of the prompt."""

    def __init__(self, data: Data) -> None:
        quarantined, held, tables, self.contents, readings = data
        count = len(quarantined)
        pool = self.pool = _pools.setdefault(count, Pool(GEOMETRY, count))
        pool._holds[:] = 0
        pool._quarantined[:] = quarantined
        pool.tag_fill[:] = 0
        pool.tag_lineage[:] = 0
        self.contents = list(self.contents)
        self.tables: dict[int, tuple[int, ...]] = {ticket: pages for ticket, pages, _ in tables}
        self.tagged: set[tuple[int, int]] = set()
        self.held: dict[int, list[Lease]] = {}
        for ticket, kind, pages in held:
            lease = Lease(Kind(kind), str(key_of(ticket)), np.array(pages, np.int32))
            self.held.setdefault(ticket, []).append(lease)
            pool._holds[kind][lease.pages] += 1
        pool._total[:] = pool._holds.sum(0)
        for ticket, pages, tagged in tables:
            for index in tagged:
                if pool._total[pages[index]]:
                    self._tag(ticket, index)
        free = [p for p in range(count) if not pool._total[p] and not quarantined[p]]
        pool._free[: len(free)] = free[::-1]
        pool._free_count = len(free)
        self.readings: dict[tuple[int, int, int], int] = {(t, b, i): page for t, b, i, page in readings}
        self.second_writer: str | None = (
            None  # I2: a write that was not the page's only writer's, or to what is sealed
        )

    def packed(self) -> Data:
        """Pages in the order of who holds them first; the contents of a page that nobody holds or reads are forgotten."""
        pool = self.pool
        order = [p for t in sorted(self.tables) for p in self.tables[t]]
        order += [page for _, page in sorted(self.readings.items())]
        order += [int(p) for t in sorted(self.held) for lease in self.held[t] for p in lease.pages]
        order += sorted(range(pool.count), key=lambda p: (bool(pool._quarantined[p]), p))
        names: dict[int, int] = {}
        for page in order:
            names.setdefault(page, len(names))
        back = sorted(names, key=names.__getitem__)
        used = set(self.readings.values())
        kept = [self.contents[p] if pool._total[p] or p in used else None for p in back]
        held = sorted(
            (ticket, int(lease.kind), tuple(sorted(names[int(p)] for p in lease.pages)))
            for ticket, leases in self.held.items()
            for lease in leases
            if len(lease.pages)
        )
        tables = sorted(
            (t, tuple(names[p] for p in pages), tuple(sorted(i for u, i in self.tagged if u == t)))
            for t, pages in self.tables.items()
        )
        readings = sorted((*key, names[page]) for key, page in self.readings.items())
        quarantined = tuple(int(pool._quarantined[p]) for p in back)
        return (quarantined, tuple(held), tuple(tables), tuple(kept), tuple(readings))

    # -------------------------------------------------------------- both workers

    def allocate(self, ticket: int, number: int, kind: Kind) -> None:
        lease = self.pool.allocate(number, str(key_of(ticket)), kind)
        self.held.setdefault(ticket, []).append(lease)
        self.tables[ticket] = tuple(int(p) for p in lease.pages)
        for page in self.tables[ticket]:
            self.contents[page] = None

    def close(self, ticket: int) -> None:
        """As CloseLeases: everything that the ticket holds."""
        for lease in self.held.pop(ticket, []):
            self.pool.close(lease)
        self.tables.pop(ticket, None)
        self.tagged = {(t, i) for t, i in self.tagged if t != ticket}

    # ------------------------------------------------------------------- prefill

    def made(self, ticket: int, index: int) -> None:
        """The engine wrote page `index`, and the worker leased it for sending; as `_freeze`."""
        page = self._page(ticket, index)
        try:
            self.pool.check_write(page, np.zeros(1, np.int32))
        except OwnershipError as error:
            self.second_writer = f"page {index} of {name(ticket)} is computed: {error}"
            return
        self.contents[int(page[0])] = ("K", ticket, index, True)
        self._tag(ticket, index)
        growing = next(x for x in self.held[ticket] if x.kind is Kind.APPEND)
        full = self.pool.allocate(0, growing.owner, Kind.READ)
        self.pool.convert(growing, page, full)
        send = self.pool.lease(Kind.SEND, growing.owner, page)
        self.held[ticket] += [full, send]

    def stop(self, ticket: int) -> None:
        """As `engine.cancel`: what the engine holds goes, what is leased for sending stays."""
        kept = []
        for lease in self.held.get(ticket, []):
            if lease.kind is Kind.SEND:
                kept.append(lease)
            else:
                self.pool.close(lease)
        self.held[ticket] = kept
        self.held = {t: leases for t, leases in self.held.items() if leases}

    def read(self, ticket: int, batch: int, index: int) -> None:
        """A write of this page begins."""
        self.readings[ticket, batch, index] = self.tables[ticket][index]

    def read_end(self, ticket: int, batch: int) -> None:
        self.readings = {k: page for k, page in self.readings.items() if k[:2] != (ticket, batch)}

    def read_none(self, tickets: frozenset[int]) -> None:
        self.readings = {k: page for k, page in self.readings.items() if k[0] not in tickets}

    # -------------------------------------------------------------------- decode

    def land(self, ticket: int, index: int, content: Data) -> None:
        """The block copy of a slot into the ticket's own page."""
        page = self.tables[ticket][index]
        kinds = [lease.kind for leases in self.held.values() for lease in leases if page in lease.pages]
        if kinds != [Kind.RECEIVE]:
            held = ", ".join(kind.name.lower() for kind in kinds) or "nobody"
            self.second_writer = f"page {index} of {name(ticket)} is copied to, and it is leased for {held}"
        elif (ticket, index) in self.tagged:
            self.second_writer = f"page {index} of {name(ticket)} is copied to, and it was verified already"
        self.contents[page] = content

    def tag(self, ticket: int, index: int) -> None:
        self._tag(ticket, index)

    def enter(self, ticket: int) -> None:
        """As `Engine.enter`: full pages become readable, the tail is the request's to go on in."""
        pool, table = self.pool, np.array(self.tables[ticket], np.int32)
        (landed,) = self.held[ticket]
        tail = tokens_of(len(table)) // SIZE
        full = pool.allocate(0, landed.owner, Kind.READ)
        pool.convert(landed, table[:tail], full)
        growing = pool.allocate(0, landed.owner, Kind.APPEND)
        pool.convert(landed, table[tail:], growing)
        pool.close(landed)
        self.held[ticket] = [full, growing]

    # -------------------------------------------------------------------- checks

    def check(self) -> str | None:
        """What is wrong with this worker's pages, by number of the invariant, or None."""
        pool = self.pool
        try:
            pool.check_conservation()
        except OwnershipError as error:
            return f"I5: {error}"
        if pool.counters.double_closes:
            pool.counters.double_closes = 0
            return "I5: a lease was closed twice"
        if self.second_writer is not None:
            return f"I2: {self.second_writer}"
        for ticket, index in self.tagged:
            content = self.contents[self.tables[ticket][index]]
            if content != ("K", ticket, index, True):
                return (
                    f"I1: a page is tagged as page {index} of {name(ticket)}, and there lies {shown(content)}"
                )
        for (ticket, _, index), page in self.readings.items():
            if not any(
                lease.kind is Kind.SEND and page in lease.pages for lease in self.held.get(ticket, [])
            ):
                return f"I3: page {index} of {name(ticket)} is being read by a write, and nobody holds it for that"
        return None

    def read_own(self, ticket: int) -> str | None:
        """I1: what attention would read for a request that has entered: leased by it, tagged, and its own rows."""
        table = self.tables.get(ticket, ())
        rows = np.array([min(SIZE, tokens_of(len(table)) - i * SIZE) for i in range(len(table))], np.int32)
        lineages = np.array([lineage_of(ticket, i) for i in range(len(table))], np.uint64)
        bad = self.pool.check_read(np.array(table, np.int32), lineages, rows) if table else None
        if bad is not None:
            return f"I1: {name(ticket)} would read page {bad.index}, and {bad.reason}"
        for index, page in enumerate(table):
            if not any(page in lease.pages for lease in self.held.get(ticket, [])):
                return f"I1: {name(ticket)} reads page {index} without a lease"
            if self.contents[page] != ("K", ticket, index, True):
                return f"I1: {name(ticket)} reads page {index}, and there lies {shown(self.contents[page])}"
        return None

    # ------------------------------------------------------------------- private

    def _page(self, ticket: int, index: int) -> I32:
        return np.array([self.tables[ticket][index]], np.int32)

    def _tag(self, ticket: int, index: int) -> None:
        fill = np.array([min(SIZE, tokens_of(len(self.tables[ticket])) - index * SIZE)], np.int32)
        self.pool.set_tags(self._page(ticket, index), lineage_of(ticket, index)[None], fill)
        self.tagged.add((ticket, index))


def name(ticket: int) -> str:
    """Tickets 0, 1, 2 are A/1, A/2, B/1: two attempts of each request (see world.py)."""
    return f"{chr(65 + ticket // 2)}/{ticket % 2 + 1}"


def shown(content: Any) -> str:
    if content is None:
        return "what a former owner left"
    _, ticket, index, intact = content
    return f"page {index} of {name(ticket)}{'' if intact else ', damaged'}"
