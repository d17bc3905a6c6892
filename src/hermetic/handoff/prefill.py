"""Prefill's half of one handoff.

state          leaves by
NEW            submitted -> HAS_REQUEST; granted -> HAS_GRANT
HAS_REQUEST    granted -> QUEUED
HAS_GRANT      submitted -> QUEUED
QUEUED         started (pages taken) -> SENDING
SENDING        all pages announced and the prompt computed -> COMPLETE
COMPLETE       ack -> ENDED (Completed)
any of these   abort, or decode gone -> DRAINING while a write is in flight, else ENDED
               a write that may not have stopped -> STUCK
DRAINING       last write ended -> ENDED;  a write that may not have stopped -> STUCK
STUCK          by nothing: it never says drained, and its source pages are never given back
"""

from __future__ import annotations

import enum
from collections import deque

from hermetic.handoff.actions import Action, CloseLeases, Enqueue, Report, Send, StopComputing, Write
from hermetic.handoff.messages import (
    Abort,
    Ack,
    Complete,
    Credit,
    Drained,
    Grant,
    HandoffMessage,
    Landed,
    Resend,
    Started,
)
from hermetic.handoff.outcome import Aborted, Completed, Failed, Outcome, Refused
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


ACTIVE = frozenset(
    {State.NEW, State.HAS_REQUEST, State.HAS_GRANT, State.QUEUED, State.SENDING, State.COMPLETE}
)


class PrefillHandoff:
    """One ticket and attempt on the prefill side. Every method returns the actions to perform."""

    def __init__(self) -> None:
        self.state = State.NEW
        self.stale = 0  # messages ignored because they repeat or come too late
        self._tokens = self._pages = 0
        self._grant: Grant | None = None
        self._ready = 0  # pages 0.._ready-1 are computed, sealed and clean
        self._next = 0  # first page not yet put in a write
        self._landed: set[int] = set()
        self._again: deque[tuple[int, SlotUse]] = deque()  # asked for once more
        self._resent: set[SlotUse] = set()  # slots of resends: a repeated one writes nothing
        self._credits: deque[SlotUse] = deque()
        self._credited = 0
        self._in_flight: dict[int, tuple[tuple[int, SlotUse], ...]] = {}
        self._batches = 0
        self._sequence = 0
        self._computed: bytes | None = None
        self._peer_gone = False

    # ------------------------------------------------------------- local events

    def submitted(self, tokens: int, pages: int) -> list[Action]:
        """The gateway's request is here and was admitted: a prompt of `tokens` tokens on `pages` pages."""
        if self.state not in (State.NEW, State.HAS_GRANT):
            self.stale += 1
            return []
        self._tokens, self._pages = tokens, pages
        if self.state is State.NEW:
            self.state = State.HAS_REQUEST
            return []
        return self._match()

    def started(self) -> list[Action]:
        """The engine took all pages of the prompt."""
        assert self.state is State.QUEUED, self.state
        self.state = State.SENDING
        return [Send(Started(self._pages)), *self._pump()]

    def pages_ready(self, count: int) -> list[Action]:
        """Pages 0..count-1 are final: computed, sealed, and the step that wrote them verified clean."""
        if self.state is not State.SENDING:
            return []
        assert self._ready <= count <= self._pages
        self._ready = count
        return self._pump()

    def computed(self, state: bytes) -> list[Action]:
        """The whole prompt is computed; `state` is what travels besides KV."""
        if self.state is not State.SENDING:
            return []
        self._computed = state
        return self._pump()

    def wrote(self, batch: int, ok: bool, stopped: bool = True) -> list[Action]:
        """A write ended. A failed one has `stopped` only if the transport guarantees that no byte follows."""
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
            return self.abort(Failed("transport_error", "a write to decode failed"))
        self._sequence += 1
        self._landed.update(page for page, _ in pages)
        return [
            Send(Landed(self._sequence, tuple((page, s.slot, s.use) for page, s in pages))),
            *self._pump(),
        ]

    def abort(self, cause: Outcome) -> list[Action]:
        """End this half for a local cause (refusal, failure, the gateway's cancel); decode is told."""
        if self.state not in ACTIVE:
            return []
        assert not isinstance(cause, Completed)
        return [*self._stop(), Send(Abort(cause.code, cause.reason)), *self._end(cause)]

    def peer_gone(self, reason: str) -> list[Action]:
        """Decode's process is gone: nobody to tell, nothing will be read. Source pages stay while a write reads them."""
        if self.state in (State.ENDED, State.STUCK):
            return []
        self._peer_gone = True
        if self.state is State.DRAINING:
            return []  # its last write will end it
        return [*self._stop(), *self._end(Failed("worker_lost", reason))]

    # ---------------------------------------------------------- decode's messages

    def received(self, message: HandoffMessage) -> list[Action]:
        """A message of the other half, already matched by ticket, attempt and incarnation."""
        match message:
            case Grant():
                if self.state not in (State.NEW, State.HAS_REQUEST):
                    return self._ignored()
                self._grant = message
                if self.state is State.NEW:
                    self.state = State.HAS_GRANT
                    return []
                return self._match()
            case Credit(first=first, slots=slots):
                if self.state is not State.SENDING or first > self._credited:
                    return self._ignored()
                fresh = slots[self._credited - first :]
                self._credits.extend(SlotUse(*s) for s in fresh)
                self._credited += len(fresh)
                return self._pump() if fresh else self._ignored()
            case Resend(page=page, slot=slot):
                where = SlotUse(*slot)
                if self.state not in (State.SENDING, State.COMPLETE) or page not in self._landed:
                    return self._ignored()
                if where in self._resent:
                    return self._ignored()
                self._landed.discard(page)
                self._resent.add(where)
                self._again.append((page, where))
                return self._pump()
            case Ack():
                # While a write is in flight decode cannot have everything, so an ack is not for this.
                if self.state is not State.COMPLETE or self._in_flight:
                    return self._ignored()
                self.state = State.ENDED
                return [CloseLeases(), Report(Completed())]
            case Abort(code=code, reason=reason):
                if self.state is State.ENDED:
                    return [Send(Drained())]
                if self.state not in ACTIVE:
                    return self._ignored()
                return [*self._stop(), *self._end(Aborted(code, reason))]
            case _:
                return self._ignored()

    # ------------------------------------------------------------------- private

    def _match(self) -> list[Action]:
        assert self._grant is not None
        if (self._grant.tokens, self._grant.pages) != (self._tokens, self._pages):
            text = (
                f"decode granted {self._grant.pages} pages for {self._grant.tokens} tokens, "
                f"the request needs {self._pages} pages for {self._tokens} tokens"
            )
            return self.abort(Failed("kv_integrity", text))
        self.state = State.QUEUED
        return [Enqueue()]

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
            out.append(Send(Complete(self._tokens, self._pages, self._computed)))
        return out

    def _write(self, pages: tuple[tuple[int, SlotUse], ...]) -> Write:
        self._batches += 1
        self._in_flight[self._batches] = pages
        return Write(self._batches, pages)

    def _stop(self) -> list[Action]:
        return [StopComputing()] if self.state in (State.QUEUED, State.SENDING) else []

    def _end(self, cause: Outcome) -> list[Action]:
        self.state = State.DRAINING
        return [Report(cause), *self._drained_if_idle()]

    def _drained_if_idle(self) -> list[Action]:
        if self._in_flight:
            return []
        self.state = State.ENDED
        return [CloseLeases()] if self._peer_gone else [CloseLeases(), Send(Drained())]

    def _ignored(self) -> list[Action]:
        self.stale += 1
        return []


__all__ = ["ACTIVE", "BATCH_PAGES", "PrefillHandoff", "Refused", "State"]
