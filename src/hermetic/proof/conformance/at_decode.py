"""Decode's half in a recording: which slots it gives, what it copies and believes, when a request enters, when slots go back."""

from __future__ import annotations

from hermetic.handoff import messages as m
from hermetic.handoff import records as r
from hermetic.handoff.decode import OPEN, TABLE, State
from hermetic.handoff.messages import HandoffMessage
from hermetic.proof.conformance.half import Half, Party, args_of, rows_by_name
from hermetic.proof.conformance.ledger import Broken, SlotBook, demand

_OPEN = frozenset(state.name for state in OPEN)


class DecodeHalf(Half):
    """See half.py. Slots are of the segment that was the peer's when this ticket began."""

    rows = rows_by_name(TABLE)
    first = State.RESERVED.name
    who = "decode"

    def __init__(self, key: str, party: Party, peer: str) -> None:
        super().__init__(key, party, peer)
        number = party.current.get(peer)
        if number is None:
            raise Broken(f"a ticket towards {peer}, which has no segment here", "pairing first")
        self.slots: SlotBook = party.segments[number]
        self.granted_to: tuple[int, int] | None = None  # tokens, pages of the grant
        self.credits: list[r.Use] = []
        self.claimed: set[r.Use] = set()  # prefill has announced something in them
        self.running: dict[int, r.Use] = {}  # page -> slot use: copies asked for and not over
        self.moved: dict[
            int, tuple[int, r.Use]
        ] = {}  # page -> page of the pool, from there: copied, not checked
        self.checked: dict[int, tuple[int, bool]] = {}  # page -> page of the pool, whether it verified
        self.verified: dict[int, int] = {}  # page -> page of the pool
        self.asked: dict[int, r.Use] = {}  # page -> where it was asked for once more
        self.complete: m.Complete | None = None
        self.batches: set[int] = set()
        self.quiet = False  # prefill has drained, or is fenced
        self.entered = False

    @property
    def pages(self) -> int:
        return self.granted_to[1] if self.granted_to else 0

    def happens(self, step: r.Step, pending: list[r.SlotsChanged]) -> None:
        strange = [c for c in pending if c.key != self.key or c.segment != self.slots.number]
        if strange and self.party.whole:
            raise Broken("slots of another ticket or segment change in this step", "its own")
        match step.e:
            case "Landed":
                assert isinstance(step.m, m.Landed)
                self.batches.add(step.m.sequence)
            case "Complete":
                assert isinstance(step.m, m.Complete)
                self.complete = self.complete or step.m
            case "Drained":
                self.quiet = True
            case "fenced":
                if self.party.whole and not self.slots.fenced:
                    raise Broken(
                        f"fenced, and segment {self.slots.number} is not", "fencing the segment first"
                    )
                self.quiet = True
            case "copied":
                self._copied(step, *args_of(step, int, bool))
        over = self.running.get(step.a[0]) if step.e == "copied" else None  # type: ignore[arg-type]
        for change in pending:
            if change in strange:  # a test plays the worker, or another ticket
                self._by_hand(change)
            else:
                self._changes(step, change, over)

    def _by_hand(self, change: r.SlotsChanged) -> None:
        match change.what:
            case "grant":
                self.slots.grant(change.key, change.uses)
            case "consume" | "release" | "fence":
                self.slots.back(change.key, change.uses, change.what)

    def _changes(self, step: r.Step, change: r.SlotsChanged, over: r.Use | None) -> None:
        match change.what:
            case "grant":
                self._granted(step, change.uses)
            case "quarantine":
                demand(step.e == "overdue", f"{step.e} puts slots into quarantine", "overdue does")
                self.slots.quarantined.update(slot for slot, _ in change.uses)
            case "consume":
                if change.uses != (over,):
                    raise Broken(
                        f"slot {list(change.uses)} goes back, and nothing was copied out of it (I3)",
                        f"that for {over or 'no slot'}: what was copied out, once prefill had announced it",
                    )
                self.slots.back(self.key, change.uses, "consume")
            case "release":
                self._released(step, change.uses)
            case _:
                raise Broken(f"slots change by {change.what}", "grant, consume, release, quarantine")

    def _granted(self, step: r.Step, uses: tuple[r.Use, ...]) -> None:
        if step.e == "credit":
            self.credits.extend(uses)
        elif step.e != "copied":
            raise Broken(f"slots {list(uses)} are granted by {step.e}", "slots by credit, or for a resend")
        self.slots.grant(self.key, uses)

    def _copied(self, step: r.Step, page: int, good: bool) -> None:
        if page not in self.running:
            raise Broken(
                f"page {page} is copied, of which no copy runs", f"the end of {sorted(self.running)}"
            )
        found = self.checked.get(page)
        if self.party.whole:
            if found is None and (good or step.b in _OPEN):
                raise Broken(
                    f"page {page} counts as copied before it was checked", "copying, then checking it"
                )
            if found is not None and good != found[1]:
                raise Broken(f"page {page} is {'good' if good else 'bad'}", "what its verification said")
        if good and step.b in _OPEN:
            self.verified[page] = found[0] if found else page
            self.asked.pop(page, None)

    def settles(self, step: r.Step) -> None:
        if step.e == "copied":
            page: int = step.a[0]  # type: ignore[assignment]
            del self.running[page]
            self.checked.pop(page, None)
        if self.over and self.slots.of(self.key):
            raise Broken(f"forgotten with slots {sorted(self.slots.of(self.key))}", "holding nothing then")

    def _released(self, step: r.Step, uses: tuple[r.Use, ...]) -> None:
        enters = any(isinstance(done, r.Entered) for done in step.do)
        if not (enters or self.quiet):
            raise Broken(
                f"slots {list(uses)} go back in {step.b} by {step.e}, and prefill may still write into them (I3)",
                "that when every page is here, or after drained, or when the segment is fenced",
            )
        if self.running.keys() - ({step.a[0]} if step.e == "copied" else set()):
            raise Broken(f"slots {list(uses)} go back while pages are copied", "that after the copies")
        self.slots.back(self.key, uses, "release")

    # ------------------------------------------------------------------- actions

    def says(self, step: r.Step, message: HandoffMessage) -> None:
        match message:
            case m.Grant(tokens=tokens, pages=pages):
                held = self.party.pages.held(self.owner)
                if self.party.pooled and held < pages:
                    raise Broken(f"a grant of {pages} pages with {held} reserved", "reserving them all first")
                self.granted_to = self.granted_to or (tokens, pages)
                demand(
                    self.granted_to == (tokens, pages), f"a grant of {pages} pages", f"{self.granted_to[1]}"
                )
            case m.Credit():
                self._credits(message)
            case m.Resend(page=page, slot=slot):
                self._resends(step, page, slot)
            case m.Ack():
                self._whole("says ack")
            case m.Abort():
                demand(step.s not in _OPEN, f"abort, and goes on as {step.s}", "abort when this half ends")
            case _:
                raise self.wrong(message)

    def _credits(self, credit: m.Credit) -> None:
        if list(credit.slots) != self.credits[credit.first :]:
            raise Broken(
                f"credit {credit.first}: {list(credit.slots)}",
                f"{self.credits[credit.first :]}, which it was granted",
            )
        open_ = [use for use in self.credits[: credit.first] if use not in self.claimed]
        demand(
            not open_, f"credit from {credit.first} leaves out {open_}", "every one from the first open one"
        )

    def _resends(self, step: r.Step, page: int, use: r.Use) -> None:
        if self.asked.get(page) == use:
            return
        if page in self.asked or step.e != "copied" or step.a != (page, False):
            raise Broken(f"page {page} is asked for again by {step.e}", "once, when it failed verification")
        if not self.slots.holds(self.key, use) or use in self.credits:
            raise Broken(f"page {page} is asked for into slot use {use}", "a slot granted for that")
        if use[0] == self.running[page][0] and len(self.slots.granted) < self.slots.count:
            raise Broken(
                f"page {page} is asked for into the slot that it failed in", "another slot, if one is free"
            )
        self.asked[page] = use

    def _whole(self, what: str) -> None:
        told = self.complete
        if self.granted_to is None or told is None or (told.tokens, told.pages) != self.granted_to:
            raise Broken(
                f"decode {what} with {told} for a grant of {self.granted_to} (I4)", "that when counts agree"
            )
        if sorted(self.verified) != list(range(self.pages)):
            missing = sorted(set(range(self.pages)) - self.verified.keys())
            raise Broken(
                f"decode {what} while page {missing} is not verified (I1)", "that when every page is"
            )
        if len(set(self.verified.values())) != self.pages:
            raise Broken(
                f"decode {what} with one page of the pool twice: {self.verified}", "each its own page"
            )

    def acts(self, step: r.Step, done: r.Done) -> None:
        match done:
            case r.Copies(page=page, slot=slot, use=use):
                self._copies(step, page, (slot, use))
            case r.Entered():
                self._whole("lets it enter")
                self.entered = True
            case r.LeasesClosed():
                running = self.running.keys() - ({step.a[0]} if step.e == "copied" else set())
                demand(not self.closed, "decode closes its leases twice", "closing them once")
                demand(not running, "decode gives its pages back under a copy (I3)", "that after its copies")
                self.closed = True
            case _:
                raise self.wrong(done)

    def _copies(self, step: r.Step, page: int, use: r.Use) -> None:
        if not isinstance(step.m, m.Landed) or (page, *use) not in step.m.pages:
            raise Broken(f"page {page} is copied from slot use {use}", "copying what prefill says has landed")
        if not self.slots.holds(self.key, use) or use in self.claimed:
            raise Broken(
                f"page {page} is copied from slot {use[0]}, use {use[1]}, which is not this ticket's, or once more",
                "copying each slot use that is granted to it once",
            )
        outside = page < 0 or (page >= self.pages and (self.party.whole or self.granted_to is not None))
        if outside or page in self.verified or page in self.running:
            raise Broken(
                f"page {page} of {self.pages} is copied again, or is none of them (I2)", "other pages"
            )
        if page in self.asked and self.asked[page] != use:
            raise Broken(f"page {page} is taken from slot use {use}", f"{self.asked[page]}, asked for there")
        self.claimed.add(use)
        self.running[page] = use

    # --------------------------------------------------------- what the worker says

    def copying(self, page: int, q: int, use: r.Use) -> None:
        if self.running.get(page) != use or page in self.checked or page in self.moved:
            raise Broken(
                f"page {page} is copied out of slot use {use}", f"what was asked for: {self.running}"
            )
        if not self.slots.holds(self.key, use):
            raise Broken(f"slot use {use} is copied, which is not its own any more (I3)", "slots that it has")
        if self.party.pooled and not self.party.pages.holds_as(q, "RECEIVE", self.owner):
            raise Broken(
                f"a copy to page {q} of the pool, which it does not hold for that (I2)", "its own pages"
            )
        if q in self.verified.values():
            raise Broken(f"a copy to page {q} of the pool, which is verified (I2)", "pages that are not")
        self.moved[page] = q, use

    def checks(self, page: int, q: int, good: bool) -> None:
        moved = self.moved.pop(page, None)
        if moved is None or moved[0] != q:
            raise Broken(
                f"page {page} is verified in page {q} of the pool, copied: {moved}", "checking the copy"
            )
        self.checked[page] = q, good

    def gives_up(self, change: r.PagesChanged) -> None:
        if change.kind == "RECEIVE" and not self.closed:
            raise Broken(
                f"page {list(change.pages)} is given up in {self.state}, while pages may be copied there (I3)",
                "that when its leases are to be closed",
            )


__all__ = ["DecodeHalf"]
