"""Who holds which page, and what each page is known to contain.

Wall 1, ownership. A page is free only when its last lease is closed; it carries a *tag*, null when allocated and then
(lineage, fill), set by a verified landing or by the owner's own row write and by nothing else; a reader compares the
tag with the lineage that it computed for itself, before every step. All work is vectorised over the pages touched.

Misuse by our own code (a lease closed twice, a page written by someone without its append lease) is counted and
contained, or raises `OwnershipError`; it never passes. Memory is private to this process: it is not shared, mapped
or registered anywhere, so no remote party can address a live page.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hermetic.kv.geometry import Geometry, empty_pages
from hermetic.kv.lineage import U64

I32 = npt.NDArray[np.int32]


class Kind(enum.IntEnum):
    """What a lease allows. APPEND excludes every other lease but its owner's."""

    READ = 0
    APPEND = 1
    SEND = 2
    RECEIVE = 3


class OwnershipError(RuntimeError):
    """Our own code broke a rule of ownership. The step that did so must not be used."""


class PoolExhausted(RuntimeError):
    """Fewer pages are free than were asked for; nothing was taken."""


@dataclass(eq=False)
class Lease:
    """A hold on pages, closed exactly once, through `Pool.close`. `pages` int32 [n]."""

    kind: Kind
    owner: str
    pages: I32
    open: bool = True


class Counts(NamedTuple):
    """Every page is in exactly one of these; they add up to the pool's size (I5)."""

    free: int
    leased: int
    quarantined: int


@dataclass
class PoolCounters:
    """What went wrong and was contained."""

    double_closes: int = 0
    tag_mismatches: int = 0
    quarantined_total: int = 0


@dataclass
class Mismatch:
    """A page whose tag is not what its reader expects: `index` in the list that was checked."""

    index: int
    page: int
    fill: int
    reason: str


class PoolObserver(Protocol):
    """Sees every change of who holds which page in this process; changes nothing."""

    def pages_changed(self, pool: Pool, what: str, kind: Kind, owner: str, pages: I32) -> None:
        """`what` is take (they were free), share, drop (one hold of this kind fewer) or quarantine."""
        ...


@dataclass(eq=False)
class Pool:
    """`count` pages of one geometry. memory: uint8 [count, stride]."""

    observer: ClassVar[PoolObserver | None] = None

    geometry: Geometry
    count: int
    memory: npt.NDArray[np.uint8] = field(init=False, repr=False)
    counters: PoolCounters = field(default_factory=PoolCounters)

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError("a pool needs at least one page")
        self.memory = empty_pages(self.geometry, self.count)
        self._free = np.arange(
            self.count - 1, -1, -1, dtype=np.int32
        )  # a stack; the top is at _free_count - 1
        self._free_count = self.count
        self._holds = np.zeros((len(Kind), self.count), np.int32)
        self._total = np.zeros(self.count, np.int32)  # sum of _holds over kinds
        self._quarantined = np.zeros(self.count, np.bool_)
        self.tag_lineage: U64 = np.zeros((self.count, 2), np.uint64)
        self.tag_fill: I32 = np.zeros(self.count, np.int32)

    # ---------------------------------------------------------------- leases

    @property
    def free(self) -> int:
        return self._free_count

    def counts(self) -> Counts:
        quarantined = int(self._quarantined.sum())
        leased = int(np.count_nonzero((self._total > 0) & ~self._quarantined))
        return Counts(self._free_count, leased, quarantined)

    def holds(self, kind: Kind) -> int:
        """Pages with at least one lease of this kind."""
        return int(np.count_nonzero(self._holds[kind]))

    def allocate(self, number: int, owner: str, kind: Kind = Kind.APPEND) -> Lease:
        """Take `number` free pages, tags null. Raises PoolExhausted and takes nothing if there are fewer."""
        if number < 0:
            raise ValueError(f"{owner}: {number} pages asked for")
        if number > self._free_count:
            raise PoolExhausted(f"{number} pages asked for, {self._free_count} of {self.count} free")
        pages = self._free[self._free_count - number : self._free_count][::-1].copy()
        if self._total[pages].any() or self._quarantined[pages].any() or self.tag_fill[pages].any():
            raise OwnershipError("the free list holds a page that is held, quarantined or tagged")
        self._free_count -= number
        self._holds[kind][pages] = 1
        self._total[pages] = 1
        self._tell("take", kind, owner, pages)
        return Lease(kind, owner, pages)

    def lease(self, kind: Kind, owner: str, pages: I32) -> Lease:
        """A further lease on pages that are held already. Leases to write (APPEND, RECEIVE) are refused: they come from
        `allocate` or `convert` only."""
        if kind in (Kind.APPEND, Kind.RECEIVE):
            raise OwnershipError(f"{owner}: {kind.name} cannot be added to a page that somebody holds")
        if (self._total[pages] == 0).any():
            raise OwnershipError(f"{owner}: a {kind.name} lease on a page that nobody holds")
        if self._quarantined[pages].any():
            raise OwnershipError(f"{owner}: a {kind.name} lease on a quarantined page")
        self._add(kind, pages, 1)
        self._tell("share", kind, owner, pages)
        return Lease(kind, owner, np.array(pages, np.int32))

    def extend(self, lease: Lease, number: int) -> I32:
        """Add `number` free pages to an open APPEND or RECEIVE lease; returns them. Raises PoolExhausted."""
        self._require_open(lease)
        if lease.kind not in (Kind.APPEND, Kind.RECEIVE):
            raise OwnershipError(f"{lease.owner}: a {lease.kind.name} lease does not grow")
        more = self.allocate(number, lease.owner, lease.kind)
        lease.pages = np.concatenate([lease.pages, more.pages])
        return more.pages

    def convert(self, lease: Lease, pages: I32, into: Lease) -> None:
        """Move pages from one open lease to another of the same owner, never passing through "free".

        A page moved to APPEND must be held by nobody else (a received tail page that its request now extends)."""
        self._require_open(lease)
        self._require_open(into)
        if lease.owner != into.owner:
            raise OwnershipError(f"pages of {lease.owner} cannot be converted into a lease of {into.owner}")
        keep = ~np.isin(lease.pages, pages)
        if len(lease.pages) - np.count_nonzero(keep) != len(pages):
            raise OwnershipError(f"{lease.owner}: converting pages that the lease does not hold")
        if into.kind is Kind.APPEND and (self._total[pages] != 1).any():
            raise OwnershipError(f"{lease.owner}: an append lease on a page that somebody else holds")
        lease.pages = lease.pages[keep]
        into.pages = np.concatenate([into.pages, np.asarray(pages, np.int32)])
        self._add(lease.kind, pages, -1)
        self._add(into.kind, pages, 1)
        self._tell("share", into.kind, into.owner, pages)
        self._tell("drop", lease.kind, lease.owner, pages)

    def close(self, lease: Lease) -> bool:
        """Give up a lease. Pages that nobody else holds become free (or stay in quarantine). False, counted and without
        effect, when it was closed before."""
        if not lease.open:
            self.counters.double_closes += 1
            return False
        lease.open = False
        self._tell("drop", lease.kind, lease.owner, lease.pages)
        self._add(lease.kind, lease.pages, -1)
        gone = lease.pages[self._total[lease.pages] == 0]
        self.tag_fill[gone] = 0
        self.tag_lineage[gone] = 0
        back = gone[~self._quarantined[gone]]
        self._free[self._free_count : self._free_count + len(back)] = back
        self._free_count += len(back)
        return True

    def quarantine(self, pages: Sequence[int] | I32) -> None:
        """Take pages that failed a check out of circulation: readers lose the tag now, and no close frees them."""
        chosen = np.unique(np.asarray(pages, np.int32))
        fresh = chosen[~self._quarantined[chosen]]
        if (self._total[fresh] == 0).any():
            raise OwnershipError("only a page that is held can be quarantined")
        self._tell("quarantine", Kind.READ, "", fresh)
        self._quarantined[fresh] = True
        self.tag_fill[fresh] = 0
        self.tag_lineage[fresh] = 0
        self.counters.quarantined_total += len(fresh)

    def check_conservation(self) -> None:
        """I5: free + leased + quarantined = total, the free list has no page twice, and free pages are null."""
        counts = self.counts()
        listed = self._free[: self._free_count]
        if sum(counts) != self.count or len(np.unique(listed)) != len(listed):
            raise OwnershipError(f"pages do not add up: {counts} of {self.count}")
        if (
            self._total[listed].any()
            or self.tag_fill[listed].any()
            or (self._total != self._holds.sum(0)).any()
        ):
            raise OwnershipError("a free page is held or tagged")

    # ------------------------------------------------------------------ tags

    def writable(self, pages: I32, first: I32) -> npt.NDArray[np.bool_]:
        """Which of these pages could take a row at `first` from their owner now: what `check_write` asks, page by page.

        pages, first: int32 [n] -> bool [n]. A number that names no page is not writable."""
        inside = (pages >= 0) & (pages < self.count)
        near = np.where(inside, pages, 0)
        own = (self._holds[Kind.APPEND][near] == 1) & (self._total[near] == 1) & ~self._quarantined[near]
        fits: npt.NDArray[np.bool_] = inside & own & (self.tag_fill[near] == first)
        return fits

    def held(self, pages: I32) -> npt.NDArray[np.bool_]:
        """Which of these numbers name a page that somebody holds: int32 [n] -> bool [n]."""
        inside = (pages >= 0) & (pages < self.count)
        found: npt.NDArray[np.bool_] = inside & (self._total[np.where(inside, pages, 0)] > 0)
        return found

    def shareable(self, pages: I32, lineages: U64) -> npt.NDArray[np.bool_]:
        """Which of these pages a further reader may lease now: held, full, of this lineage, and no row will be added.

        pages int32 [n], lineages uint64 [n, 2] -> bool [n]. Asking counts no mismatch: a page that is gone is no fault."""
        held = (self._total[pages] > 0) & ~self._quarantined[pages]
        final = (self._holds[Kind.APPEND][pages] == 0) & (self._holds[Kind.RECEIVE][pages] == 0)
        tagged = (self.tag_lineage[pages] == lineages).all(-1)
        good: npt.NDArray[np.bool_] = (
            held & final & tagged & (self.tag_fill[pages] == self.geometry.page_size)
        )
        return good

    def check_write(self, pages: I32, first: I32) -> None:
        """Before rows are written at `first` of each page: one append lease, nobody else, no send, and rows in order.

        pages, first: int32 [n]. Raises OwnershipError (I2: one writer; a sealed row never changes)."""
        if not self.writable(pages, first).all():
            alone = (self._holds[Kind.APPEND][pages] == 1) & (self._total[pages] == 1)
            if not alone.all():
                raise OwnershipError("a write to a page without its only lease being an append lease")
            raise OwnershipError("a write that would skip or overwrite a row, or into a quarantined page")

    def set_tags(self, pages: I32, lineages: U64, fills: I32) -> None:
        """After the owner's row write or a verified landing. pages, fills [n]; lineages uint64 [n, 2].

        Raises OwnershipError for a page that nobody holds or that is in quarantine: neither may be readable again."""
        if (self._total[pages] == 0).any() or self._quarantined[pages].any():
            raise OwnershipError("a tag for a page that nobody holds or that is in quarantine")
        self.tag_lineage[pages] = lineages
        self.tag_fill[pages] = fills

    def check_read(self, pages: I32, lineages: U64, rows: I32) -> Mismatch | None:
        """I1 by identity: every page's tag is the reader's own lineage, with at least `rows` rows. First mismatch or None.

        pages, rows int32 [n]; lineages uint64 [n, 2]. A page of which no row is read yet (rows 0) may be null. A number
        that names no page is a mismatch as well."""
        inside = (pages >= 0) & (pages < self.count)
        near = np.where(inside, pages, 0)
        own = (
            inside
            & (self.tag_lineage[near] == lineages).all(-1)
            & (self.tag_fill[near] >= rows)
            & (self._total[near] > 0)
        )
        wrong = ~own & (rows > 0)
        if not wrong.any():
            return None
        self.counters.tag_mismatches += int(np.count_nonzero(wrong))
        index = int(np.argmax(wrong))
        page, fill = int(pages[index]), int(self.tag_fill[near[index]])
        if not inside[index]:
            reason = f"no such page: the pool has {self.count}"
        elif self._total[page] == 0:
            reason = "nobody holds it"
        elif fill == 0:
            reason = "it has no tag"
        elif fill < rows[index]:
            reason = f"{fill} rows are filled, {int(rows[index])} would be read"
        else:
            reason = "it holds another lineage"
        return Mismatch(index, page, fill, reason)

    def zero_unfilled(self, page: int, fill: int) -> None:
        """Clear the rows at and past `fill` of a held page, before it is frozen and sent: old rows never travel."""
        if self._holds[Kind.APPEND][page] != 1 or self.tag_fill[page] != fill:
            raise OwnershipError("only the owner can clear a page's unfilled rows, at its present fill")
        for part in self.geometry.components:
            self.geometry.rows(self.memory[page : page + 1], part.name)[:, :, :, fill:] = 0

    # --------------------------------------------------------------- private

    def _tell(self, what: str, kind: Kind, owner: str, pages: I32) -> None:
        if self.observer is not None and len(pages):
            self.observer.pages_changed(self, what, kind, owner, pages)

    def _add(self, kind: Kind, pages: I32, change: int) -> None:
        self._holds[kind][pages] += change
        self._total[pages] += change
        if change < 0 and (self._holds[kind][pages] < 0).any():
            raise OwnershipError(f"more {kind.name} leases were closed than opened")

    def _require_open(self, lease: Lease) -> None:
        if not lease.open:
            raise OwnershipError(f"{lease.owner}: a {lease.kind.name} lease is used after it was closed")
