"""Prefill's half of one handoff. Every transition stands in TABLE.

NEW            neither request nor grant is here
HAS_REQUEST    the gateway's request came first
HAS_GRANT      decode's grant came first
QUEUED         both agree; waits for the engine to take its pages
SENDING        pages are held, computed, and written as credit comes
COMPLETE       everything is announced; decode verifies, and may ask for a page once more
DRAINING       ended, and a write is still in flight
STUCK          ended, and a write may never have stopped: says drained to nobody, until decode fenced its segment
ENDED          nothing is held
"""

from __future__ import annotations

import enum
from collections import deque

from hermetic.handoff.actions import Action, CloseLeases, Enqueue, Forget, Report, Send, StopComputing, Write
from hermetic.handoff.machine import Machine, rows
from hermetic.handoff.messages import (
    Abort,
    Ack,
    Complete,
    Credit,
    Drained,
    Grant,
    HandoffMessage,
    Key,
    Landed,
    Resend,
    Started,
)
from hermetic.handoff.outcome import Aborted, Completed, Failed, Outcome
from hermetic.kv.slots import SlotUse

BATCH_PAGES = 16  # pages in one write at most: bounds what a batch keeps in flight


class State(enum.Enum):
    NEW = enum.auto()
    HAS_REQUEST = enum.auto()
    HAS_GRANT = enum.auto()
    QUEUED = enum.auto()
    SENDING = enum.auto()
    COMPLETE = enum.auto()
    DRAINING = enum.auto()
    STUCK = enum.auto()
    ENDED = enum.auto()


_S = State
_ACTIVE = (_S.NEW, _S.HAS_REQUEST, _S.HAS_GRANT, _S.QUEUED, _S.SENDING, _S.COMPLETE)
ACTIVE = frozenset(_ACTIVE)
_OVER = (_S.DRAINING, _S.ENDED)

TABLE = {
    # the two halves of the beginning, in either order; a grant that does not fit the request ends it
    **rows([_S.NEW], "submitted", _S.HAS_REQUEST),
    **rows([_S.NEW], "Grant", _S.HAS_GRANT),
    **rows([_S.HAS_GRANT], "submitted", _S.QUEUED, _S.ENDED),
    **rows([_S.HAS_REQUEST], "Grant", _S.QUEUED, _S.ENDED),
    **rows([_S.QUEUED], "started", _S.SENDING),
    # computing and writing
    **rows([_S.SENDING], "pages_ready", _S.SENDING),
    **rows([_S.SENDING], "computed", _S.SENDING, _S.COMPLETE),
    **rows([_S.SENDING], "Credit", _S.SENDING),
    **rows([_S.SENDING], "Resend", _S.SENDING, *_OVER),
    **rows([_S.COMPLETE], "Resend", _S.COMPLETE, *_OVER),
    **rows([_S.SENDING], "wrote", _S.SENDING, _S.COMPLETE, *_OVER, _S.STUCK),
    **rows([_S.COMPLETE], "wrote", _S.COMPLETE, *_OVER, _S.STUCK),
    **rows([_S.COMPLETE], "Ack", _S.COMPLETE, _S.ENDED),
    # time: say again what may have been lost
    **rows([_S.SENDING, _S.COMPLETE], "nudge"),
    # ends
    **rows(_ACTIVE, "abort", *_OVER),
    **rows(_ACTIVE, "Abort", *_OVER),
    **rows([_S.DRAINING], "wrote", *_OVER, _S.STUCK),
    **rows([_S.STUCK], "wrote"),
    **rows([_S.DRAINING, _S.STUCK], "Abort"),  # asked again: the answer comes when it is true
    **rows([s for s in State if s is not _S.ENDED], "fenced", _S.ENDED),
}


class PrefillHandoff(Machine[State]):
    """One ticket and attempt on the prefill side. Every method returns the actions to perform."""

    table = TABLE

    def __init__(self, key: Key) -> None:
        super().__init__(key, State.NEW)
        self._tokens = self._pages = 0
        self._grant: Grant | None = None
        self._ready = 0  # pages 0.._ready-1 are computed, sealed and clean
        self._next = 0  # first page not yet put in a write
        self._landed: set[int] = set()
        self._again: deque[tuple[int, SlotUse]] = deque()  # asked for once more
        self._resent: set[SlotUse] = set()  # slots of resends: a repeated one writes nothing
        self._credits: deque[SlotUse] = deque()
        self._numbers: dict[SlotUse, int] = {}  # the number of each credit
        self._confirmed = 0  # credits below this number are known to decode as landed
        self._in_flight: dict[int, tuple[tuple[int, SlotUse], ...]] = {}
        self._batches = 0
        self._announced: dict[int, Landed] = {}  # by sequence
        self._computed: bytes | None = None

    # ------------------------------------------------------------- local events

    def submitted(self, tokens: int, pages: int) -> list[Action]:
        """The gateway's request is here and was admitted: a prompt of `tokens` tokens on `pages` pages."""

        def handle() -> list[Action]:
            self._tokens, self._pages = tokens, pages
            if self.state is State.NEW:
                self.state = State.HAS_REQUEST
                return []
            return self._match()

        return self._on("submitted", handle, tokens, pages)

    def started(self) -> list[Action]:
        """The engine took all pages of the prompt."""

        def handle() -> list[Action]:
            self.state = State.SENDING
            return [Send(Started(self._pages)), *self._pump()]

        return self._on("started", handle)

    def pages_ready(self, count: int) -> list[Action]:
        """Pages 0..count-1 are final: computed, sealed, and the step that wrote them verified clean."""

        def handle() -> list[Action]:
            assert self._ready <= count <= self._pages
            self._ready = count
            return self._pump()

        return self._on("pages_ready", handle, count)

    def computed(self, state: bytes) -> list[Action]:
        """The whole prompt is computed; `state` is what travels besides KV."""

        def handle() -> list[Action]:
            self._computed = state
            return self._pump()

        return self._on("computed", handle, state)

    def wrote(self, batch: int, ok: bool, stopped: bool = True) -> list[Action]:
        """A write ended. A failed one has `stopped` only if the transport guarantees that no byte follows."""
        return self._on("wrote", lambda: self._wrote(batch, ok, stopped), batch, ok, stopped)

    def abort(self, cause: Outcome) -> list[Action]:
        """End this half for a local cause (refusal, failure, the gateway's cancel, a lost peer); decode is told."""
        assert not isinstance(cause, Completed)

        def handle() -> list[Action]:
            return [*self._stop(), Send(Abort(cause.code, cause.reason)), *self._end(cause)]

        return self._on("abort", handle, cause)

    def fenced(self, reason: str) -> list[Action]:
        """Nothing that we write can reach decode's segment any more (it was fenced, or decode's process is gone), and the
        sender is closed, so nothing reads our pages either: whatever waited for writes ends."""

        def handle() -> list[Action]:
            out = self._stop()
            if self.state in ACTIVE:
                cause = Failed("worker_lost", reason)
                out += [Send(Abort(cause.code, cause.reason)), Report(cause)]
            self._in_flight.clear()
            self.state = State.ENDED
            return [*out, CloseLeases(), Send(Drained()), Forget()]

        return self._on("fenced", handle, reason)

    def nudge(self) -> list[Action]:
        """Time has passed without progress: say again what decode may have missed."""

        def handle() -> list[Action]:
            out: list[Action] = [] if self.state is State.COMPLETE else [Send(Started(self._pages))]
            for landed in self._announced.values():
                numbers = [self._numbers.get(SlotUse(slot, use)) for _, slot, use in landed.pages]
                if any(number is None or number >= self._confirmed for number in numbers):
                    out.append(Send(landed))
            return [*out, *self._completes()] if self.state is State.COMPLETE else out

        return self._on("nudge", handle)

    # ---------------------------------------------------------- decode's messages

    def received(self, message: HandoffMessage) -> list[Action]:
        """A message of the other half, already matched by ticket, attempt and incarnation."""
        return self._on(type(message).__name__, lambda: self._received(message), message)

    def _received(self, message: HandoffMessage) -> list[Action]:
        match message:
            case Grant():
                self._grant = message
                if self.state is State.NEW:
                    self.state = State.HAS_GRANT
                    return []
                return self._match()
            case Credit(first=first, slots=slots):
                return self._credit(first, [SlotUse(*s) for s in slots])
            case Resend(page=page, slot=slot):
                return self._resend(page, SlotUse(*slot))
            case Ack():
                # While a write is in flight decode cannot have everything, so an ack is not for this.
                if self._in_flight:
                    return self._ignored()
                self.state = State.ENDED
                return [CloseLeases(), Report(Completed()), Forget()]
            case Abort(code=code, reason=reason):
                if self.state not in ACTIVE:
                    return []
                return [*self._stop(), *self._end(Aborted(code, reason))]
            case _:
                raise AssertionError(f"{message} has a row in prefill's table and no handler")

    # ------------------------------------------------------------------- private

    def _match(self) -> list[Action]:
        assert self._grant is not None
        if (self._grant.tokens, self._grant.pages) != (self._tokens, self._pages):
            text = (
                f"decode granted {self._grant.pages} pages for {self._grant.tokens} tokens, "
                f"the request needs {self._pages} pages for {self._tokens} tokens"
            )
            cause = Failed("kv_integrity", text)
            return [Send(Abort(cause.code, cause.reason)), *self._end(cause)]
        self.state = State.QUEUED
        return [Enqueue()]

    def _credit(self, first: int, slots: list[SlotUse]) -> list[Action]:
        credited = len(self._numbers)
        if first > credited:
            return self._ignored()  # an earlier one is missing; the next will hold it
        self._confirmed = max(self._confirmed, first)
        fresh = slots[credited - first :]
        if not fresh:
            return self._ignored()
        for slot in fresh:
            self._numbers[slot] = len(self._numbers)
            self._credits.append(slot)
        return self._pump()

    def _resend(self, page: int, where: SlotUse) -> list[Action]:
        if where in self._resent:  # asked again: if it is written, the news of it was lost
            again = [Send(x) for x in self._announced.values() if (page, where.slot, where.use) in x.pages]
            self.stale += not again
            return list(again)
        if page not in self._landed:
            if any(page == p for pages in self._in_flight.values() for p, _ in pages):
                return self._ignored()  # it is on its way
            # Nothing said that it is there: waiting for it, each half would wait for ever.
            text = f"decode asks again for page {page}, which was not sent"
            cause = Failed("kv_integrity", text)
            return [*self._stop(), Send(Abort(cause.code, cause.reason)), *self._end(cause)]
        self._landed.discard(page)
        self._resent.add(where)
        self._again.append((page, where))
        return self._pump()

    def _pump(self) -> list[Action]:
        """Start every write that pages and credits allow; say complete when all is announced."""
        out: list[Action] = []
        while self._again:
            out.append(self._write((self._again.popleft(),)))
        while self._credits and self._next < self._ready:
            count = min(BATCH_PAGES, len(self._credits), self._ready - self._next)
            out.append(self._write(tuple((self._next + i, self._credits.popleft()) for i in range(count))))
            self._next += count
        if self.state is State.SENDING and self._computed is not None and len(self._landed) == self._pages:
            self.state = State.COMPLETE
            out += self._completes()
        return out

    def _completes(self) -> list[Action]:
        assert self._computed is not None
        return [Send(Complete(self._tokens, self._pages, len(self._announced), self._computed))]

    def _write(self, pages: tuple[tuple[int, SlotUse], ...]) -> Write:
        self._batches += 1
        self._in_flight[self._batches] = pages
        return Write(self._batches, pages)

    def _wrote(self, batch: int, ok: bool, stopped: bool) -> list[Action]:
        pages = self._in_flight.pop(batch)
        if not ok and not stopped:
            out: list[Action] = []
            if self.state in ACTIVE:
                cause = Failed("transport_error", "a write to decode failed and may still be running")
                out = [*self._stop(), Send(Abort(cause.code, cause.reason)), Report(cause)]
            self.state = State.STUCK
            return out
        if self.state is State.DRAINING:
            return self._drained_if_idle()
        if self.state is State.STUCK:
            return []
        if not ok:
            cause = Failed("transport_error", "a write to decode failed")
            return [*self._stop(), Send(Abort(cause.code, cause.reason)), *self._end(cause)]
        landed = Landed(len(self._announced) + 1, tuple((page, s.slot, s.use) for page, s in pages))
        self._announced[landed.sequence] = landed
        self._landed.update(page for page, _ in pages)
        return [Send(landed), *self._pump()]

    def _stop(self) -> list[Action]:
        return [StopComputing()] if self.state in (State.QUEUED, State.SENDING) else []

    def _end(self, cause: Outcome) -> list[Action]:
        self.state = State.DRAINING
        return [Report(cause), *self._drained_if_idle()]

    def _drained_if_idle(self) -> list[Action]:
        if self._in_flight:
            return []
        self.state = State.ENDED
        return [CloseLeases(), Send(Drained()), Forget()]


__all__ = ["ACTIVE", "BATCH_PAGES", "TABLE", "PrefillHandoff", "State"]
