"""What the world's states are made of, what is remembered of their steps, and what is wrong when something is.

A state is a tuple of component ids (`codec.Store`). Six for each ticket: what prefill keeps of it (PT), what decode keeps
(DT), what the gateway knows (GT), its messages on the way up, prefill -> decode, and down, its writes in flight (FL). Then
for each pair of workers the landing slots, the bytes in them and the link; for each worker its pages; last what the
adversary may still do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hermetic.handoff.machine import HandoffError
from hermetic.kv.pool import Kind, OwnershipError
from hermetic.kv.slots import SlotError
from hermetic.proof.codec import Data, Store
from hermetic.proof.halves import DecodeView, PrefillView
from hermetic.proof.pages import PageBook
from hermetic.proof.scopes import Scope

State = tuple[int, ...]
Move = tuple[Any, ...]
PT, DT, GT, UP, DOWN, FL = range(6)
MASK = 2**64 - 1
ATTEMPTS = 2


class Broken(Exception):
    """A promise does not hold; `kind` is the invariant."""

    def __init__(self, kind: str, text: str, move: Move = ()) -> None:
        super().__init__(text)
        self.kind, self.text, self.move = kind, text, move


PRODUCT = (HandoffError, AssertionError, SlotError, OwnershipError)
"""What production code raises when it finds something wrong itself."""


def raised(error: Exception) -> Broken:
    """What the product found wrong itself: an owner that does not own is I5."""
    kind = "I5" if isinstance(error, (SlotError, OwnershipError)) else "handoff"
    return Broken(kind, f"product code raised {type(error).__name__}: {error}")


class Known(NamedTuple):
    """What the gateway knows of an attempt. `pair` -1: not begun. `hurt`: the adversary touched its bytes (I6)."""

    pair: int = -1
    submit_p: bool = False
    submit_d: bool = False
    cancel_p: bool = False
    cancel_d: bool = False
    report_p: Data = None
    report_d: Data = None
    hurt: bool = False
    left: bool = False  # its client is gone


class Flight(NamedTuple):
    """A write. `live`: its segment is the present one. `mode`: flying, doubt, or ghost (ended, and comes once more)."""

    batch: int
    pages: Data  # ((page, slot use), ...)
    live: bool
    mode: str


class Link(NamedTuple):
    """A pair's session. `state`: up, d_lost (decode gave it up, prefill does not know), p_lost.

    `welcomed`: prefill writes to the present segment."""

    state: str = "up"
    welcomed: bool = True


class Model:
    """One scope's store of contents, places of components in a state, and memory of steps. Belongs to one process."""

    def __init__(self, scope: Scope, reduce: bool = True) -> None:
        self.scope, self.store, self.reduce = scope, Store(), reduce
        self.tickets = len(scope.prompts) * ATTEMPTS
        self.pairs = scope.prefills * scope.decodes
        self.globals = 6 * self.tickets
        self._memo: dict[Any, Any] = {}
        self._slots_seen: set[int] = set()
        self._slots_free: set[int] = set()
        self.steps = 0  # local steps that production code has taken
        self.nobody = {
            PT: self.store.id(tuple(PrefillView())),
            DT: self.store.id(tuple(DecodeView())),
            GT: self.store.id(tuple(Known())),
            UP: self.store.id(()),
        }

    # ---------------------------------------------------------------------- places

    def slots_at(self, pair: int) -> int:
        return self.globals + 3 * pair

    def mem_at(self, pair: int) -> int:
        return self.globals + 3 * pair + 1

    def link_at(self, pair: int) -> int:
        return self.globals + 3 * pair + 2

    def ppool_at(self, pair: int) -> int:
        return self.globals + 3 * self.pairs + pair // self.scope.decodes

    def dpool_at(self, pair: int) -> int:
        return self.globals + 3 * self.pairs + self.scope.prefills + pair % self.scope.decodes

    def pages_of(self, ticket: int) -> int:
        return self.scope.prompts[ticket // ATTEMPTS]

    def _view(self, number: int, t: int) -> Data:
        """What of a worker's pages a ticket's own moves depend on; what they do to all of them are operations."""
        key = ("view", number, t)
        known = self._memo.get(key)
        if known is None:
            _, held, tables, contents, readings = self.store.contents[number]
            free = PageBook(self.store.contents[number]).pool.free
            mine = tuple(contents[p] for ticket, pages, _ in tables if ticket == t for p in pages)
            read = tuple((b, i, contents[p]) for ticket, b, i, p in readings if ticket == t)
            kinds = tuple(kind for ticket, kind, _ in held if ticket == t)
            known = self._memo[key] = (free, mine, read, kinds)
        return known

    def pages_after(self, number: int, place: int, op: str, args: tuple[Any, ...]) -> int:
        """An operation on a worker's pages, with everything checked that it can break."""
        decodes = place >= self.globals + 3 * self.pairs + self.scope.prefills

        def run() -> int:
            book = PageBook(self.store.contents[number])
            getattr(book, op)(*args)
            trouble = book.check()
            if decodes:
                for ticket, leases in book.held.items():
                    reads = any(lease.kind in (Kind.READ, Kind.APPEND) for lease in leases)
                    trouble = trouble or (book.read_own(ticket) if reads else None)
            if trouble is not None:
                kind, _, text = trouble.partition(": ")
                raise Broken(kind, text)
            return self.store.id(book.packed())

        return self.remembered(("pages", number, decodes, op, args), run)

    # -------------------------------------------------------------------- remembering

    def remembered(self, key: Any, run: Callable[[], Any]) -> Any:
        """What `run` gave the first time for this key. A Broken is remembered as well."""
        found = self._memo.get(key)
        if found is None:
            self.steps += 1
            try:
                found = (run(), None)
            except Broken as broken:
                found = (None, broken)
            except PRODUCT as error:
                found = (None, raised(error))
            self._memo[key] = found
        result, wrong = found
        if wrong is not None:
            raise Broken(wrong.kind, wrong.text)
        return result
