"""Prefill's half in a recording: what it may write, when it may say that a page has landed, and when that it has drained."""

from __future__ import annotations

from dataclasses import dataclass

from hermetic.handoff import messages as m
from hermetic.handoff import records as r
from hermetic.handoff.messages import HandoffMessage
from hermetic.handoff.prefill import ACTIVE, BATCH_PAGES, TABLE, State
from hermetic.proof.conformance.half import Half, Party, args_of, rows_by_name
from hermetic.proof.conformance.ledger import Broken, demand

_ACTIVE = frozenset(state.name for state in ACTIVE)


@dataclass
class Flight:
    """A write that may still put bytes somewhere. `sources`: pages of the pool that it reads; None: not started yet."""

    pages: tuple[tuple[int, int, int], ...]
    sources: tuple[int, ...] | None = None
    ended: tuple[bool, bool] | None = None  # ok, stopped, as the transport said
    doubt: bool = False


class PrefillHalf(Half):
    """See half.py. Everything that it may rely on came in a message of decode or from its own engine."""

    rows = rows_by_name(TABLE)
    first = State.NEW.name
    who = "prefill"

    def __init__(self, key: str, party: Party, peer: str) -> None:
        super().__init__(key, party, peer)
        self.asked: tuple[int, int] | None = None  # tokens, pages of the request
        self.grant: tuple[int, int] | None = None
        self.ready = 0
        self.computed = False
        self.credits: list[r.Use] = []  # by number
        self.numbered: set[r.Use] = set()
        self.again: dict[r.Use, int] = {}  # use that decode asked for a page in once more -> page
        self.used: set[r.Use] = set()
        self.first_written = 0  # pages 0.. that were put in a write
        self.flights: dict[int, Flight] = {}
        self.batches = 0
        self.unsaid: list[tuple[tuple[int, int, int], ...]] = []  # written whole, not announced yet
        self.announced: list[m.Landed] = []
        self.drained = False

    @property
    def pages(self) -> int:
        return self.asked[1] if self.asked else 0

    def happens(self, step: r.Step, pending: list[r.SlotsChanged]) -> None:
        demand(not pending, "prefill changes landing slots", "only decode gives and takes slots")
        match step.e:
            case "submitted":
                tokens, pages = args_of(step, int, int)
                self.asked = tokens, pages
            case "Grant":
                assert isinstance(step.m, m.Grant)
                self.grant = step.m.tokens, step.m.pages
            case "started":
                held = self.party.pages.held(self.owner)
                if self.party.pooled and held < self.pages:
                    raise Broken(
                        f"prefill starts with {held} of {self.pages} pages", "taking all of them first"
                    )
            case "pages_ready":
                (count,) = args_of(step, int)
                demand(
                    self.ready <= count <= self.pages,
                    f"{count} pages of {self.pages} are ready after {self.ready}",
                    "more of its own pages",
                )
                self.ready = count
            case "computed":
                self.computed = True
            case "Credit":
                assert isinstance(step.m, m.Credit)
                self._credit(step.m)
            case "Resend":
                assert isinstance(step.m, m.Resend)
                self.again.setdefault(step.m.slot, step.m.page)
            case "wrote":
                self._wrote(*args_of(step, int, bool, bool))
            case "fenced" if self.party.whole:
                if self.party.senders.get(self.peer) is not None:
                    raise Broken(
                        "prefill takes its writes for fenced while its sender is open", "closing it first"
                    )
        if step.e == "fenced":
            self.flights.clear()

    def _credit(self, credit: m.Credit) -> None:
        for number, use in enumerate(credit.slots, start=credit.first):
            if number < len(self.credits):
                known = self.credits[number]
                if known != use:
                    raise Broken(f"credit {number} is slot use {use}", f"{known}, as it was said before")
            elif number == len(self.credits):
                self.credits.append(use)
                self.numbered.add(use)

    def _wrote(self, batch: int, ok: bool, stopped: bool) -> None:
        flight = self.flights.get(batch)
        if flight is None:
            raise Broken(f"write {batch} ends, which is not in flight", f"the end of {sorted(self.flights)}")
        if self.party.whole and flight.ended != (ok, stopped):
            raise Broken(
                f"write {batch} ends with ok {ok}, stopped {stopped}; the transport said {flight.ended}",
                "what the transport said",
            )
        if ok or stopped:
            del self.flights[batch]
        else:
            flight.doubt = True
        if ok:
            self.unsaid.append(flight.pages)

    def says(self, step: r.Step, message: HandoffMessage) -> None:
        match message:
            case m.Started(pages=pages):
                demand(pages == self.pages, f"started with {pages} pages", f"{self.pages} pages")
            case m.Landed():
                self._says_landed(message)
            case m.Complete(tokens=tokens, pages=pages, batches=batches):
                announced = {page for landed in self.announced for page, _, _ in landed.pages}
                if not self.computed or len(announced) != self.pages or batches != len(self.announced):
                    raise Broken(
                        f"complete, {batches} batches, with {len(announced)} of {self.pages} pages announced in "
                        f"{len(self.announced)}, {'' if self.computed else 'not '}computed",
                        "complete when everything is computed, written and announced",
                    )
                demand(
                    (tokens, pages) == self.asked,
                    f"complete for {tokens} tokens, {pages} pages",
                    f"the request's {self.asked}",
                )
            case m.Abort():
                demand(step.s not in _ACTIVE, f"abort, and goes on as {step.s}", "abort when this half ends")
            case m.Drained():
                self._idle("says drained")
                self.drained = True
            case _:
                raise self.wrong(message)

    def _says_landed(self, landed: m.Landed) -> None:
        known = len(self.announced)
        if landed.sequence <= known:
            was = self.announced[landed.sequence - 1] if landed.sequence > 0 else None
            if landed != was:
                raise Broken(f"{landed} as batch {landed.sequence}", f"{was}, as it was")
            return
        if landed.sequence != known + 1 or landed.pages not in self.unsaid:
            raise Broken(
                f"landed {landed.sequence}: {[list(p) for p in landed.pages]}",
                f"announcement {known + 1}, of a write that has ended: {self.unsaid or 'there is none'}",
            )
        self.unsaid.remove(landed.pages)
        self.announced.append(landed)

    def _idle(self, what: str) -> None:
        if self.flights:
            raise Broken(
                f"prefill {what} while write {sorted(self.flights)} of it may still put bytes into slots "
                f"{sorted({slot for flight in self.flights.values() for _, slot, _ in flight.pages})} (I3)",
                "that when every write has ended, or the segment is fenced",
            )

    def acts(self, step: r.Step, done: r.Done) -> None:
        match done:
            case r.Enqueued():
                demand(
                    self.asked is not None and self.asked == self.grant,
                    f"prefill queues {self.asked} with a grant of {self.grant} (tokens, pages)",
                    "queueing when request and grant are here and agree",
                )
            case r.Writes(batch=batch, pages=pages):
                self._writes(batch, pages)
            case r.Stopped():
                pass
            case r.LeasesClosed():
                demand(not self.closed, "prefill closes its leases twice", "closing them once")
                self._idle("closes the leases on its source pages")
                self.closed = True
            case _:
                raise self.wrong(done)

    def _writes(self, batch: int, pages: tuple[tuple[int, int, int], ...]) -> None:
        if self.state not in _ACTIVE or self.drained or self.reported:
            raise Broken(
                f"prefill begins write {batch} after its end", "no write for a ticket that has ended"
            )
        if batch != self.batches + 1 or not 0 < len(pages) <= BATCH_PAGES:
            raise Broken(
                f"write {batch} of {len(pages)} pages",
                f"write {self.batches + 1}, of 1 to {BATCH_PAGES} pages",
            )
        self.batches = batch
        for page, slot, use in pages:
            where = (slot, use)
            if page >= self.ready:
                raise Broken(
                    f"page {page} is written with {self.ready} pages ready", "writing what is computed"
                )
            if where in self.used:
                raise Broken(f"slot {slot}, use {use} is written twice", "each use of a slot once")
            if where in self.again:
                if self.again[where] != page:
                    raise Broken(
                        f"page {page} is written to slot {slot}, use {use}",
                        f"page {self.again[where]}, asked for there",
                    )
            elif where not in self.numbered:
                raise Broken(
                    f"page {page} is written to slot {slot}, use {use}, which this ticket was not given",
                    f"uses that it has credit for: {[u for u in self.credits if u not in self.used]}",
                )
            elif page != self.first_written:
                raise Broken(
                    f"page {page} is written again into a fresh slot", f"page {self.first_written} next"
                )
            else:
                self.first_written += 1
            self.used.add(where)
        self.flights[batch] = Flight(pages)

    # --------------------------------------------------------- what the worker says

    def write(self, write: r.Write) -> None:
        """The batch is given to the transport."""
        flight = self.flights.get(write.batch)
        slots = [(page, slot) for page, _, slot in write.pages]
        if flight is None or flight.sources is not None or slots != [(p, s) for p, s, _ in flight.pages]:
            raise Broken(
                f"write {write.batch} of {slots} is started", "the writes that the machine asked for, once"
            )
        if self.party.senders.get(self.peer) is None:
            raise Broken(f"write {write.batch} without a segment", "writing to a segment that was opened")
        for page, q, _ in write.pages:
            if self.party.pooled and not self.party.pages.holds_as(q, "SEND", self.owner):
                raise Broken(
                    f"page {page} is sent from page {q} of the pool without a send lease on it (I3)",
                    "sending pages that a send lease holds",
                )
        flight.sources = tuple(q for _, q, _ in write.pages)

    def written(self, written: r.Written) -> None:
        """The transport says how the batch ended."""
        flight = self.flights.get(written.batch)
        if flight is None or flight.sources is None or flight.ended is not None:
            raise Broken(
                f"the transport ends write {written.batch}", f"one that runs: {sorted(self.flights)}"
            )
        flight.ended = (written.ok, written.stopped)
        if written.ok or written.stopped:
            flight.sources = ()

    def gives_up(self, change: r.PagesChanged) -> None:
        if change.kind != "SEND":
            return
        reading = [
            b for b, f in self.flights.items() if f.sources and set(f.sources).intersection(change.pages)
        ]
        if reading:
            raise Broken(
                f"page {list(change.pages)} is given up while write {reading[0]} reads it (I3)",
                "that after the write",
            )
        if not self.closed:
            raise Broken(f"send leases are closed in {self.state}", "closing them when the half has ended")

    def sender_closed(self) -> None:
        """No source is read any more."""
        for flight in self.flights.values():
            flight.sources = ()

    def settles(self, step: r.Step) -> None:
        if step.e != "Ack" and any(isinstance(d, r.Reported) and d.outcome == "Completed" for d in step.do):
            raise Broken(f"prefill has completed by {step.e}", "completed by decode's ack")
        if self.unsaid and self.state in _ACTIVE:
            raise Broken(f"write of {self.unsaid} has ended and is not announced", "announcing it at once")


__all__ = ["PrefillHalf"]
