"""Decode's half of one handoff.

    state       leaves by
    RESERVED    started -> LANDING; abort -> DRAINING (prefill may have started meanwhile)
    LANDING     complete, counts agree, every page verified -> ENTERED (Completed)
    either      abort, a page bad twice, counts that differ or complete too early -> DRAINING
    DRAINING    drained, or the peer fenced, and no copy running -> ENDED

Slots belong to the peer (`kv.slots.Slots`), shared by all its tickets; a machine asks for as many as it can use.
"""

from __future__ import annotations

import enum

from hermetic.handoff.actions import Action, CloseLeases, Copy, Enter, Report, Send
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
    ENTERED = enum.auto()
    ENDED = enum.auto()


class DecodeHandoff:
    """One ticket and attempt on the decode side; `pages` pages are leased for a prompt of `tokens` tokens."""

    def __init__(self, key: Key, tokens: int, pages: int, slots: Slots) -> None:
        self.key, self.state, self.stale = key, State.RESERVED, 0
        self._tokens, self._pages, self._slots = tokens, pages, slots
        self._credited: list[SlotUse] = []  # slots ever granted by credit, in the order of their numbers
        self._used = 0  # credits 0.._used-1 have landed
        self._outstanding: set[SlotUse] = set()  # granted by credit, nothing landed in them yet
        self._copying: dict[int, SlotUse] = {}
        self._resent: dict[int, SlotUse] = {}  # page -> the slot it was asked into again
        self._verified: set[int] = set()
        self._complete: Complete | None = None
        self._drained = False
        self.resends = 0

    # ------------------------------------------------------------- local events

    def reserved(self) -> list[Action]:
        """All pages are leased: let prefill begin."""
        return [Send(Grant(self._tokens, self._pages))]

    def wants(self) -> int:
        """How many more slots this ticket could use now."""
        if self.state is not State.LANDING:
            return 0
        needed = self._pages - len(self._verified) - len(self._copying) - len(self._resent)
        return max(0, min(WINDOW, needed) - len(self._outstanding))

    def credit(self, number: int) -> list[Action]:
        """Give it up to `number` of the peer's free slots."""
        fresh = self._slots.grant(self.key, min(number, self.wants()))
        if not fresh:
            return []
        self._credited.extend(fresh)
        self._outstanding.update(fresh)
        return self.repeat_credit()

    def repeat_credit(self) -> list[Action]:
        """Every credit from the first in which nothing has landed yet: a lost one is repaired by the next, or by this."""
        while self._used < len(self._credited) and self._credited[self._used] not in self._outstanding:
            self._used += 1
        open_ = self._credited[self._used :]
        if self.state is not State.LANDING or not open_:
            return []
        return [Send(Credit(self._used, tuple((s.slot, s.use) for s in open_)))]

    def copied(self, page: int, good: bool) -> list[Action]:
        """The copy of one page is done; `good` when the page it was copied to verified (and was tagged)."""
        slot = self._copying.pop(page)
        if self.state is not State.LANDING:
            return self._end_if_quiet()
        if good:
            self._slots.consume(self.key, slot)
            self._verified.add(page)
            self._resent.pop(page, None)
            return self._enter_if_whole()
        if page in self._resent:
            self._slots.consume(self.key, slot)
            return self.abort(Failed("kv_integrity", f"page {page} of the prompt failed verification twice"))
        # Another slot than the one that just failed: grant before giving the bad one back.
        other = self._slots.grant(self.key, 1)
        self._slots.consume(self.key, slot)
        if not other:
            other = self._slots.grant(self.key, 1)
        self._resent[page] = other[0]
        self.resends += 1
        return [Send(Resend(page, (other[0].slot, other[0].use)))]

    def abort(self, cause: Outcome) -> list[Action]:
        """End this half for a local cause; prefill is told, and slots wait for its *drained*."""
        if self.state not in (State.RESERVED, State.LANDING):
            return []
        assert not isinstance(cause, Completed)
        self.state = State.DRAINING
        return [Send(Abort(cause.code, cause.reason)), Report(cause), *self._end_if_quiet()]

    def fenced(self, reason: str) -> list[Action]:
        """The peer is proven unable to write. Ends whatever waited for it."""
        out: list[Action] = []
        if self.state in (State.RESERVED, State.LANDING):
            self.state = State.DRAINING
            out.append(Report(Failed("worker_lost", reason)))
        if self.state is State.DRAINING:
            self._drained = True
            out += self._end_if_quiet()
        return out

    def lost(self, reason: str) -> list[Action]:
        """The peer does not answer and is not fenced: its slots go to quarantine, our pages are our own."""
        out: list[Action] = []
        if self.state in (State.RESERVED, State.LANDING):
            self.state = State.DRAINING
            out.append(Report(Failed("worker_lost", reason)))
        if self.state is State.DRAINING:
            self._slots.quarantine(self.key)
            self._drained = True
            out += self._end_if_quiet()
        return out

    # --------------------------------------------------------- prefill's messages

    def received(self, message: HandoffMessage) -> list[Action]:
        """A message of the other half, already matched by ticket, attempt and incarnation."""
        match message:
            case Started():
                if self.state is not State.RESERVED:
                    return self._ignored()
                self.state = State.LANDING
                return []
            case Landed(pages=pages):
                return self._landed(pages)
            case Complete():
                if self.state is not State.LANDING or self._complete is not None:
                    return self._ignored()
                self._complete = message
                if (message.tokens, message.pages) != (self._tokens, self._pages):
                    text = (
                        f"prefill says it computed {message.tokens} tokens on {message.pages} pages, "
                        f"{self._tokens} tokens on {self._pages} pages were reserved"
                    )
                    return self.abort(Failed("kv_integrity", text))
                # Messages come in order: a page that was not announced before *complete* will never come.
                announced = self._verified | self._copying.keys() | self._resent.keys()
                if len(announced) != self._pages:
                    text = f"prefill says complete after announcing {len(announced)} of {self._pages} pages"
                    return self.abort(Failed("kv_integrity", text))
                return self._enter_if_whole()
            case Abort(code=code, reason=reason):
                if self.state not in (State.RESERVED, State.LANDING):
                    return self._ignored()
                self.state = State.DRAINING
                return [Report(Aborted(code, reason)), *self._end_if_quiet()]
            case Drained():
                if self.state is not State.DRAINING:
                    return self._ignored()
                self._drained = True
                return self._end_if_quiet()
            case _:
                return self._ignored()

    # ------------------------------------------------------------------- private

    def _landed(self, pages: tuple[tuple[int, int, int], ...]) -> list[Action]:
        if self.state is not State.LANDING:
            return self._ignored()
        out: list[Action] = []
        for page, slot, use in pages:
            where = SlotUse(slot, use)
            expected = where in self._outstanding or self._resent.get(page) == where
            repeated = self._copying.get(page) == where
            if repeated or not expected or not self._slots.holds(self.key, where):
                self.stale += 1
                continue
            if not 0 <= page < self._pages or page in self._verified or page in self._copying:
                return [
                    *out,
                    *self.abort(
                        Failed("kv_integrity", f"prefill sent page {page} of {self._pages} out of turn")
                    ),
                ]
            self._outstanding.discard(where)
            self._copying[page] = where
            out.append(Copy(page, where))
        return out

    def _enter_if_whole(self) -> list[Action]:
        if self._complete is None or len(self._verified) != self._pages:
            return []
        assert not self._copying
        assert self._verified == set(range(self._pages))
        self.state = State.ENTERED
        # Slots granted beyond need: prefill has said complete and, with the ack, will not write again.
        self._slots.release(self.key)
        return [Send(Ack()), Enter(self._complete.state), Report(Completed())]

    def _end_if_quiet(self) -> list[Action]:
        if self._copying or not self._drained:
            return []
        self.state = State.ENDED
        self._slots.release(self.key)
        return [CloseLeases()]

    def _ignored(self) -> list[Action]:
        self.stale += 1
        return []
