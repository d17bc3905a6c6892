"""Decode's half of one handoff. Every transition stands in TABLE.

    RESERVED       pages are leased, prefill has the grant
    LANDING        prefill holds its pages; slots are given, pages are copied out of them and verified
    ENTERED        every page is verified, counts agree: the request is the engine's
    DRAINING       ended, and slots are granted into which prefill may still write: waits for *drained*, asks for it again
    QUARANTINED    *drained* did not come in time, or the peer is silent: those slots are out of use; still asks
    ENDED          nothing is held

Slots belong to the peer (`kv.slots.Slots`), shared by all its tickets; a machine asks for as many as it can use. Its own
pages no remote party can reach, so they go back as soon as no copy of ours runs; only slots wait for the peer.
"""

from __future__ import annotations

import enum

from hermetic.handoff.actions import Action, CloseLeases, Copy, Enter, Forget, Report, Send
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
from hermetic.kv.slots import Slots, SlotUse

WINDOW = 16  # slots that one ticket holds at most


class State(enum.Enum):
    RESERVED = enum.auto()
    LANDING = enum.auto()
    DRAINING = enum.auto()
    QUARANTINED = enum.auto()
    ENTERED = enum.auto()
    ENDED = enum.auto()


_S = State
_OPEN = (_S.RESERVED, _S.LANDING)
OPEN = frozenset(_OPEN)
_ENDS = (_S.DRAINING, _S.ENDED)

TABLE = {
    **rows([_S.RESERVED], "reserved"),
    **rows([_S.RESERVED], "Started", _S.LANDING),
    # landing
    **rows([_S.LANDING], "credit"),
    **rows([_S.LANDING], "Landed", _S.LANDING, *_ENDS),
    **rows([_S.LANDING], "copied", _S.LANDING, _S.ENTERED, *_ENDS),
    **rows([_S.LANDING], "Complete", _S.LANDING, _S.ENTERED, *_ENDS),
    # time: say again what may have been lost
    **rows([_S.RESERVED, _S.LANDING, _S.DRAINING, _S.QUARANTINED], "nudge"),
    # ends
    **rows(_OPEN, "abort", *_ENDS),
    **rows(_OPEN, "Abort", *_ENDS),
    **rows([_S.DRAINING], "copied", *_ENDS),
    **rows([_S.QUARANTINED], "copied", _S.QUARANTINED, _S.ENDED),
    **rows([_S.DRAINING], "overdue", _S.QUARANTINED),
    **rows([_S.DRAINING], "Drained", *_ENDS),
    **rows([_S.QUARANTINED], "Drained", _S.QUARANTINED, _S.ENDED),
    **rows([*_OPEN, _S.DRAINING], "fenced", *_ENDS),
    **rows([_S.QUARANTINED], "fenced", _S.QUARANTINED, _S.ENDED),
}


class DecodeHandoff(Machine[State]):
    """One ticket and attempt on the decode side; `pages` pages are leased for a prompt of `tokens` tokens."""

    table = TABLE

    def __init__(self, key: Key, tokens: int, pages: int, slots: Slots) -> None:
        super().__init__(key, State.RESERVED)
        self._tokens, self._pages, self._slots = tokens, pages, slots
        self._credited: list[SlotUse] = []  # slots ever granted by credit, in the order of their numbers
        self._used = 0  # credits 0.._used-1 have landed
        self._outstanding: set[SlotUse] = set()  # granted by credit, nothing landed in them yet
        self._copying: dict[int, SlotUse] = {}
        self._resent: dict[int, SlotUse] = {}  # page -> the slot it was asked into again
        self._verified: set[int] = set()
        self._batches: set[int] = set()  # sequences of the announcements that came
        self._complete: Complete | None = None
        self._cause = Abort("peer_ended", "prefill ended this attempt")  # ours, once we have one
        self._closed = False  # CloseLeases was asked for
        self._quiet = False  # prefill has drained, or is fenced
        self.resends = 0

    # ------------------------------------------------------------- local events

    def reserved(self) -> list[Action]:
        """All pages are leased: let prefill begin."""
        return self._on("reserved", lambda: [Send(Grant(self._tokens, self._pages))])

    def wants(self) -> int:
        """How many more slots this ticket could use now."""
        if self.state is not State.LANDING:
            return 0
        needed = self._pages - len(self._verified) - len(self._copying) - len(self._resent)
        return max(0, min(WINDOW, needed) - len(self._outstanding))

    def credit(self, number: int) -> list[Action]:
        """Give it up to `number` of the peer's free slots."""

        def handle() -> list[Action]:
            fresh = self._slots.grant(self.key, min(number, self.wants()))
            if not fresh:
                return []
            self._credited.extend(fresh)
            self._outstanding.update(fresh)
            return self._credits()

        return self._on("credit", handle, number)

    def copied(self, page: int, good: bool) -> list[Action]:
        """The copy of one page is done; `good` when the page it was copied to verified (and was tagged)."""
        return self._on("copied", lambda: self._copied(page, good), page, good)

    def abort(self, cause: Outcome) -> list[Action]:
        """End this half for a local cause; prefill is told, and slots wait for its *drained*."""
        assert not isinstance(cause, Completed)
        return self._on("abort", lambda: self._fail(cause), cause)

    def overdue(self) -> list[Action]:
        """*Drained* did not come within its bound, or the peer is silent: the slots go out of use, and stay so."""

        def handle() -> list[Action]:
            self.state = State.QUARANTINED
            self._slots.quarantine(self.key)
            return []

        return self._on("overdue", handle)

    def fenced(self, reason: str) -> list[Action]:
        """The peer is proven unable to write into this segment. Ends whatever waited for it."""

        def handle() -> list[Action]:
            self._quiet = True
            if self.state in OPEN:
                return self._fail(Failed("worker_lost", reason))
            return self._end_if_quiet()

        return self._on("fenced", handle, reason)

    def nudge(self) -> list[Action]:
        """Time has passed without progress: say again what prefill may have missed."""

        def handle() -> list[Action]:
            match self.state:
                case State.RESERVED:
                    return [Send(Grant(self._tokens, self._pages))]
                case State.LANDING:
                    again: list[Action] = [
                        Send(Resend(page, (slot.slot, slot.use)))
                        for page, slot in self._resent.items()
                        if page not in self._copying
                    ]
                    # Also without an open credit: a half that has ended, and whose last words were lost, answers it.
                    return [*self._credits(), *again]
                case _:
                    return [Send(self._cause)]  # asks for *drained* again

        return self._on("nudge", handle)

    # --------------------------------------------------------- prefill's messages

    def received(self, message: HandoffMessage) -> list[Action]:
        """A message of the other half, already matched by ticket, attempt and incarnation."""
        return self._on(type(message).__name__, lambda: self._received(message), message)

    def _received(self, message: HandoffMessage) -> list[Action]:
        match message:
            case Started():
                self.state = State.LANDING
                return []
            case Landed():
                return self._landed(message)
            case Complete():
                return self._completed(message)
            case Abort(code=code, reason=reason):
                return self._end(Aborted(code, reason))
            case Drained():
                self._quiet = True
                return self._end_if_quiet()
            case _:
                raise AssertionError(f"{message} has a row in decode's table and no handler")

    # ------------------------------------------------------------------- private

    def _credits(self) -> list[Action]:
        """Every credit from the first in which nothing has landed yet: a lost one is repaired by the next."""
        while self._used < len(self._credited) and self._credited[self._used] not in self._outstanding:
            self._used += 1
        open_ = self._credited[self._used :]
        return [Send(Credit(self._used, tuple((s.slot, s.use) for s in open_)))]

    def _landed(self, message: Landed) -> list[Action]:
        self._batches.add(message.sequence)
        out: list[Action] = []
        for page, slot, use in message.pages:
            where = SlotUse(slot, use)
            expected = where in self._outstanding or self._resent.get(page) == where
            repeated = self._copying.get(page) == where
            if repeated or not expected or not self._slots.holds(self.key, where):
                self.stale += 1
                continue
            elsewhere = page in self._resent and self._resent[page] != where  # asked for into another slot
            if not 0 <= page < self._pages or page in self._verified or page in self._copying or elsewhere:
                text = f"prefill sent page {page} of {self._pages} out of turn"
                return [*out, *self._fail(Failed("kv_integrity", text))]
            self._outstanding.discard(where)
            self._copying[page] = where
            out.append(Copy(page, where))
        return [*out, *self._fail_if_short()]

    def _completed(self, message: Complete) -> list[Action]:
        if self._complete is not None:
            return self._ignored()
        self._complete = message
        if (message.tokens, message.pages) != (self._tokens, self._pages):
            text = (
                f"prefill says it computed {message.tokens} tokens on {message.pages} pages, "
                f"{self._tokens} tokens on {self._pages} pages were reserved"
            )
            return self._fail(Failed("kv_integrity", text))
        return self._fail_if_short() or self._enter_if_whole()

    def _fail_if_short(self) -> list[Action]:
        """Every announcement that *complete* counts is here, and a page was in none: it will never come."""
        if self._complete is None or not self._batches.issuperset(range(1, self._complete.batches + 1)):
            return []
        announced = self._verified | self._copying.keys() | self._resent.keys()
        if len(announced) == self._pages:
            return []
        text = f"prefill says complete after announcing {len(announced)} of {self._pages} pages"
        return self._fail(Failed("kv_integrity", text))

    def _copied(self, page: int, good: bool) -> list[Action]:
        slot = self._copying.pop(page)
        if self.state is not State.LANDING:
            self._slots.consume(self.key, slot)  # it had landed: nothing is in flight to it
            return self._end_if_quiet()
        if good:
            self._slots.consume(self.key, slot)
            self._verified.add(page)
            self._resent.pop(page, None)
            return self._enter_if_whole()
        if page in self._resent:
            self._slots.consume(self.key, slot)
            return self._fail(Failed("kv_integrity", f"page {page} of the prompt failed verification twice"))
        # Another slot than the one that just failed: grant before giving the bad one back.
        other = self._slots.grant(self.key, 1)
        self._slots.consume(self.key, slot)
        if not other:
            other = self._slots.grant(self.key, 1)
        self._resent[page] = other[0]
        self.resends += 1
        return [Send(Resend(page, (other[0].slot, other[0].use)))]

    def _enter_if_whole(self) -> list[Action]:
        if self._complete is None or len(self._verified) != self._pages:
            return []
        assert not self._copying
        assert self._verified == set(range(self._pages))
        self.state = State.ENTERED
        # Slots granted beyond need: prefill has said complete and, with the ack, will not write again.
        self._slots.release(self.key)
        return [Send(Ack()), Enter(self._complete.state), Report(Completed()), Forget()]

    def _fail(self, cause: Outcome) -> list[Action]:
        assert not isinstance(cause, Completed)
        self._cause = Abort(cause.code, cause.reason)
        return [Send(self._cause), *self._end(cause)]

    def _end(self, cause: Outcome) -> list[Action]:
        self.state = State.DRAINING
        return [Report(cause), *self._end_if_quiet()]

    def _end_if_quiet(self) -> list[Action]:
        if self._copying:
            return []
        out: list[Action] = [] if self._closed else [CloseLeases()]
        self._closed = True
        if not self._quiet and self._slots.held(self.key):
            return out
        self.state = State.ENDED
        self._slots.release(self.key)
        return [*out, Forget()]


__all__ = ["OPEN", "TABLE", "WINDOW", "DecodeHandoff", "State"]
