"""The pool against a plain model of it: a dictionary from page to the leases on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from hermetic.kv.geometry import Geometry
from hermetic.kv.pool import Kind, Lease, OwnershipError, Pool, PoolExhausted

GEOMETRY = Geometry.attention(4, 1, 1, 4, "bf16")
COUNT = 5
ANY = st.sampled_from(Kind)


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def name(value: int) -> np.ndarray:
    return np.array([[value, value + 1]], np.uint64)


class PoolMachine(RuleBasedStateMachine):
    """Every rule does one thing to the pool and to the model; what the model forbids, the pool must refuse."""

    leases = Bundle("leases")

    @initialize()
    def start(self) -> None:
        self.pool = Pool(GEOMETRY, COUNT)
        self.held: dict[int, Counter[Kind]] = {p: Counter() for p in range(COUNT)}
        self.of: dict[int, list[int]] = {}  # id of lease -> its pages
        self.keep: list[Lease] = []
        self.bad: set[int] = set()
        self.tags: dict[int, tuple[int, int]] = {}  # page -> (lineage, fill)
        self.doubles = 0

    # -- the model
    def free(self) -> set[int]:
        return {p for p, c in self.held.items() if not c.total() and p not in self.bad}

    def expect(self, allowed: bool, act: Callable[[], object]) -> object | None:
        if allowed:
            return act()
        before = self.pool.counts(), self.pool.tag_fill.copy()
        with pytest.raises((OwnershipError, PoolExhausted)):
            act()
        assert self.pool.counts() == before[0]
        assert (self.pool.tag_fill == before[1]).all()
        return None

    def remember(self, lease: Lease) -> Lease:
        self.keep.append(lease)
        self.of[id(lease)] = lease.pages.tolist()
        return lease

    # -- rules
    @rule(
        target=leases,
        number=st.integers(0, COUNT),
        kind=st.sampled_from([Kind.APPEND, Kind.RECEIVE, Kind.READ]),
    )
    def allocate(self, number: int, kind: Kind) -> object:
        free = self.free()
        lease = self.expect(number <= len(free), lambda: self.pool.allocate(number, "a", kind))
        if not isinstance(lease, Lease):
            return multiple()
        pages = lease.pages.tolist()
        assert len(set(pages)) == number
        assert set(pages) <= free  # never handed out while held
        assert not self.pool.tag_fill[lease.pages].any()
        for page in pages:
            self.held[page][kind] += 1
        return self.remember(lease)

    @rule(target=leases, lease=leases, kind=ANY, data=st.data())
    def share(self, lease: Lease, kind: Kind, data: st.DataObject) -> object:
        pages = data.draw(st.lists(st.integers(0, COUNT - 1), max_size=3, unique=True))
        allowed = kind in (Kind.READ, Kind.SEND) and all(
            self.held[p].total() and p not in self.bad for p in pages
        )
        more = self.expect(allowed, lambda: self.pool.lease(kind, "b", i32(*pages)))
        if not isinstance(more, Lease):
            return multiple()
        for page in pages:
            self.held[page][kind] += 1
        return self.remember(more)

    @rule(lease=leases, number=st.integers(0, 3))
    def extend(self, lease: Lease, number: int) -> None:
        growing = lease.kind in (Kind.APPEND, Kind.RECEIVE)
        more = self.expect(
            lease.open and growing and number <= len(self.free()), lambda: self.pool.extend(lease, number)
        )
        if more is None:
            return
        for page in more.tolist():  # type: ignore[attr-defined]
            assert page in self.free()
            self.held[page][lease.kind] += 1
            self.of[id(lease)].append(page)

    @rule(one=leases, two=leases, data=st.data())
    def convert(self, one: Lease, two: Lease, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.integers(0, COUNT - 1), max_size=3, unique=True))
        allowed = (
            one.open
            and two.open
            and one.owner == two.owner
            and set(pages) <= set(self.of[id(one)])
            and (two.kind is not Kind.APPEND or all(self.held[p].total() == 1 for p in pages))
        )
        self.expect(allowed, lambda: self.pool.convert(one, i32(*pages), two))
        if allowed:
            for page in pages:
                self.held[page][one.kind] -= 1
                self.held[page][two.kind] += 1
                self.of[id(one)].remove(page)
                self.of[id(two)].append(page)

    @rule(lease=leases)
    def close(self, lease: Lease) -> None:
        was_open = lease.open
        assert self.pool.close(lease) is was_open
        if not was_open:
            self.doubles += 1
            return
        for page in self.of[id(lease)]:
            self.held[page][lease.kind] -= 1
            if not self.held[page].total():
                self.tags.pop(page, None)

    @rule(lease=consumes(leases))
    def close_for_good(self, lease: Lease) -> None:
        self.close(lease)

    @rule(pages=st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=2, unique=True))
    def quarantine(self, pages: list[int]) -> None:
        allowed = all(self.held[p].total() or p in self.bad for p in pages)
        self.expect(allowed, lambda: self.pool.quarantine(i32(*pages)))
        if allowed:
            self.bad |= set(pages)
            for page in pages:
                self.tags.pop(page, None)

    @rule(
        page=st.integers(0, COUNT - 1),
        lineage=st.integers(1, 2),
        rows=st.integers(1, 2),
        first=st.integers(0, 3),
    )
    def write(self, page: int, lineage: int, rows: int, first: int) -> None:
        """What a step does: ask, write, tag."""
        held = self.held[page]
        allowed = (
            held[Kind.APPEND] == 1
            and held.total() == 1
            and page not in self.bad
            and first == self.tags.get(page, (0, 0))[1]
        )
        self.expect(allowed, lambda: self.pool.check_write(i32(page), i32(first)) or True)
        if allowed:
            fill = min(4, first + rows)
            self.pool.set_tags(i32(page), name(lineage), i32(fill))
            self.tags[page] = (lineage, fill)

    @rule(page=st.integers(0, COUNT - 1), lineage=st.integers(1, 2))
    def land(self, page: int, lineage: int) -> None:
        """A tag is set on pages that somebody holds and that are not in quarantine; on no other."""
        allowed = self.held[page].total() > 0 and page not in self.bad
        self.expect(allowed, lambda: self.pool.set_tags(i32(page), name(lineage), i32(4)) or True)
        if allowed:
            self.tags[page] = (lineage, 4)

    @rule(page=st.integers(0, COUNT - 1), lineage=st.integers(1, 2), rows=st.integers(0, 4))
    def read(self, page: int, lineage: int, rows: int) -> None:
        tag = self.tags.get(page)
        fine = rows == 0 or (tag is not None and tag[0] == lineage and tag[1] >= rows)
        before = self.pool.counters.tag_mismatches
        found = self.pool.check_read(i32(page), name(lineage), i32(rows))
        assert (found is None) == fine
        assert self.pool.counters.tag_mismatches == before + (not fine)
        if found is not None:
            assert (found.index, found.page) == (0, page)
            assert found.reason

    @rule(lineage=st.integers(1, 2))
    def offer(self, lineage: int) -> None:
        """A further reader may come to a page that is full, its own, and that nobody will add a row to."""
        offered = {
            p
            for p in range(COUNT)
            if self.tags.get(p) == (lineage, 4)
            and self.held[p].total()
            and not self.held[p][Kind.APPEND]
            and not self.held[p][Kind.RECEIVE]
        }
        before = self.pool.counters.tag_mismatches
        good = self.pool.shareable(np.arange(COUNT, dtype=np.int32), np.repeat(name(lineage), COUNT, 0))
        assert set(np.flatnonzero(good).tolist()) == offered
        assert self.pool.counters.tag_mismatches == before

    # -- I5, and the model again
    @invariant()
    def conserved(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_conservation()
        leased = {p for p, c in self.held.items() if c.total() and p not in self.bad}
        assert self.pool.counts() == (len(self.free()), len(leased), len(self.bad))
        assert self.pool.free == len(self.free())
        for kind in Kind:
            assert self.pool.holds(kind) == sum(1 for c in self.held.values() if c[kind])
        for page in self.free():
            assert self.pool.tag_fill[page] == 0
            assert not self.pool.tag_lineage[page].any()
        assert self.pool.counters.double_closes == self.doubles
        assert self.pool.counters.quarantined_total == len(self.bad)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=120, stateful_step_count=40)


def test_closing_twice_is_counted_and_frees_nothing_that_is_somebody_elses_by_then() -> None:
    pool = Pool(GEOMETRY, 1)
    first = pool.allocate(1, "first")
    assert pool.close(first)
    second = pool.allocate(1, "second")
    assert not pool.close(first)
    assert pool.counters.double_closes == 1
    assert pool.free == 0
    with pytest.raises(PoolExhausted, match="1 pages asked for, 0 of 1 free"):
        pool.allocate(1, "third")
    assert pool.close(second)


def test_a_shared_page_is_free_only_when_its_last_holder_lets_go() -> None:
    pool = Pool(GEOMETRY, 2)
    own = pool.allocate(1, "a", Kind.READ)
    others = [pool.lease(Kind.READ, "b", own.pages), pool.lease(Kind.SEND, "c", own.pages)]
    pool.set_tags(own.pages, name(3), i32(4))
    for lease in (own, *others):
        assert pool.free == 1
        assert pool.check_read(own.pages, name(3), i32(4)) is None
        pool.close(lease)
    assert pool.free == 2
    assert pool.check_read(own.pages, name(3), i32(4)) is not None


def test_a_mismatch_says_which_page_of_the_table_and_why() -> None:
    pool = Pool(GEOMETRY, 4)
    lease = pool.allocate(3, "a")
    a, b, c = (lease.pages[i : i + 1] for i in range(3))
    (free,) = set(range(4)) - set(lease.pages.tolist())
    pool.set_tags(np.concatenate([a, b]), np.concatenate([name(1), name(2)]), i32(4, 2))
    cases = (
        (b, name(2), 3, "2 rows are filled, 3 would be read"),
        (b, name(1), 2, "another lineage"),
        (c, name(2), 1, "no tag"),
        (i32(free), name(1), 1, "nobody holds it"),
        (i32(4), name(1), 1, "no such page"),
        (i32(-1), name(1), 1, "no such page"),
    )
    for page, lineage, rows, reason in cases:
        found = pool.check_read(np.concatenate([a, page]), np.concatenate([name(1), lineage]), i32(4, rows))
        assert found is not None
        assert (found.index, found.page) == (1, int(page[0]))
        assert reason in found.reason


def test_half_of_a_lineage_is_not_enough() -> None:
    pool = Pool(GEOMETRY, 1)
    lease = pool.allocate(1, "a")
    pool.set_tags(lease.pages, np.array([[1, 2]], np.uint64), i32(4))
    for other in ([1, 3], [3, 2]):
        assert pool.check_read(lease.pages, np.array([other], np.uint64), i32(1)) is not None


def test_a_page_that_nobody_holds_is_not_read_whatever_its_tag_says() -> None:
    pool = Pool(GEOMETRY, 1)
    pool.tag_lineage[0], pool.tag_fill[0] = name(1)[0], 4
    found = pool.check_read(i32(0), name(1), i32(1))
    assert found is not None
    assert found.reason == "nobody holds it"


def test_a_page_is_offered_to_further_readers_only_when_it_is_held_full_clean_and_final() -> None:
    """Page 0: free with a tag left on it; 1: in quarantine, likewise; 2: not full; 3: its owner may write; 4: landing."""
    pool = Pool(GEOMETRY, 7)
    held = [pool.allocate(1, "a", kind) for kind in (Kind.READ,) * 3 + (Kind.APPEND, Kind.RECEIVE)]
    sending = pool.allocate(1, "a", Kind.SEND)
    pages = np.concatenate([lease.pages for lease in (*held, sending)])
    pool.close(held[0])
    pool.quarantine(held[1].pages)
    pool.tag_lineage[pages], pool.tag_fill[pages] = name(1)[0], 4
    pool.tag_fill[held[2].pages] = 3
    assert pool.shareable(pages, np.repeat(name(1), 6, 0)).tolist() == [False] * 5 + [True]
    assert pool.shareable(pages, np.repeat(name(2), 6, 0)).tolist() == [False] * 6


def test_readers_lose_a_quarantined_page_at_once_and_no_close_frees_it() -> None:
    pool = Pool(GEOMETRY, 2)
    lease = pool.allocate(1, "a")
    pool.set_tags(lease.pages, name(1), i32(2))
    pool.quarantine(lease.pages)
    pool.quarantine(lease.pages)
    assert pool.check_read(lease.pages, name(1), i32(1)) is not None
    with pytest.raises(OwnershipError):
        pool.check_write(lease.pages, i32(0))
    with pytest.raises(OwnershipError):
        pool.lease(Kind.READ, "b", lease.pages)
    pool.close(lease)
    assert pool.counts() == (1, 0, 1)
    assert pool.counters.quarantined_total == 1
    pool.check_conservation()


@pytest.mark.parametrize("kind", [Kind.READ, Kind.SEND])
def test_a_page_that_somebody_else_holds_is_neither_written_nor_made_writable(kind: Kind) -> None:
    pool = Pool(GEOMETRY, 2)
    own, received = pool.allocate(1, "a"), pool.allocate(1, "a", Kind.RECEIVE)
    pool.check_write(own.pages, i32(0))
    for lease in (own, received):
        pool.lease(kind, "b", lease.pages)
    with pytest.raises(OwnershipError, match="append lease"):
        pool.check_write(own.pages, i32(0))
    with pytest.raises(OwnershipError, match="somebody else"):
        pool.convert(received, received.pages, own)
    assert pool.holds(Kind.RECEIVE) == 1


def test_a_negative_number_of_pages_takes_and_makes_none() -> None:
    pool = Pool(GEOMETRY, 3)
    lease = pool.allocate(1, "a")
    for act in (lambda: pool.allocate(-1, "b"), lambda: pool.extend(lease, -1)):
        with pytest.raises(ValueError, match=r"-1 pages"):
            act()
    pool.check_conservation()
    assert pool.free == 2


def test_unfilled_rows_are_cleared_before_a_page_travels_and_only_by_its_owner() -> None:
    pool = Pool(GEOMETRY, 2)
    pool.memory[:] = 255
    lease = pool.allocate(1, "a")
    page = int(lease.pages[0])
    pool.set_tags(lease.pages, name(1), i32(2))
    with pytest.raises(OwnershipError):
        pool.zero_unfilled(page, 1)
    pool.zero_unfilled(page, 2)
    for part in ("k", "v"):
        rows = GEOMETRY.rows(pool.memory, part)
        assert (rows[page, 0, 0, :2] == 0xFFFF).all()
        assert not rows[page, 0, 0, 2:].any()
        assert (rows[1 - page] == 0xFFFF).all()
    into = pool.allocate(0, "a", Kind.READ)
    pool.convert(lease, lease.pages, into)
    with pytest.raises(OwnershipError):
        pool.zero_unfilled(page, 2)


def test_taking_and_giving_back_10000_pages_touches_the_arrays_a_few_times_in_all() -> None:
    """O(pages) by construction: one numpy call does all pages of a lease. Counted as calls, not as time."""
    pool = Pool(GEOMETRY, 10_000)
    calls: Counter[str] = Counter()

    class Counting(np.ndarray):
        def __setitem__(self, key: object, value: object) -> None:
            calls["set"] += 1
            super().__setitem__(key, value)

    pool._total = pool._total.view(Counting)
    pool._free = pool._free.view(Counting)
    for _ in range(2):
        lease = pool.allocate(10_000, "a")
        assert pool.free == 0
        pool.close(lease)
    pool.check_conservation()
    assert pool.free == 10_000
    assert calls["set"] <= 8


def test_conservation_notices_a_page_that_went_missing_or_came_twice() -> None:
    for harm in (
        lambda p: setattr(p, "_free_count", p._free_count - 1),
        lambda p: p._free.__setitem__(0, p._free[1]),
        lambda p: p.tag_fill.__setitem__(p._free[0], 1),
        lambda p: p._total.__setitem__(p._free[0], 1),
        lambda p: p._holds.__setitem__((0, p._free[0]), 1),
    ):
        pool = Pool(GEOMETRY, 4)
        pool.allocate(1, "a")
        pool.check_conservation()
        harm(pool)
        with pytest.raises(OwnershipError):
            pool.check_conservation()
