"""All processes of a recording in one order, in which every message is received after it was sent.

The one thing to know: messages only accumulate (one may be lost, repeated or late), so an order is found greedily: each
process goes on for as long as what it does is possible, and waits where the other half has not come to it yet. When all
wait, the recording is no behaviour of the protocol. A ticket that is over on both sides is dropped but for what was said
about it, and after LATE_KEPT others that as well.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TypeVar

from hermetic.handoff import messages as m
from hermetic.handoff import records as r
from hermetic.handoff.messages import HandoffMessage
from hermetic.proof.conformance.abstractly import Abstract
from hermetic.proof.conformance.at_decode import DecodeHalf
from hermetic.proof.conformance.at_prefill import PrefillHalf
from hermetic.proof.conformance.half import Half, Party, short
from hermetic.proof.conformance.ledger import Broken, SlotBook
from hermetic.proof.conformance.recording import Line, Recording, TraceError
from hermetic.proof.conformance.tickets import Name, Reader, Ticket, Violation, name_of

H = TypeVar("H", bound=Half)
LATE_KEPT = 65536  # tickets of which late messages are still recognised; a worker remembers as many
WAITING_KEPT = 2048  # tickets that are over on one side and may still begin on the other


class Follower:
    """Follows a recording. `alone`: machines by themselves, without the other half, workers and pools; tests only.

    `lab`: messages put in by hand, and tickets of several labs that have the same numbers; tests only."""

    def __init__(self, recording: Recording, alone: bool = False, lab: bool = False) -> None:
        self.recording, self.alone, self.lab = recording, alone, lab
        self.parties = {p: Party(p, info, not alone) for p, info in recording.headers.items()}
        self.readers = {p: Reader(recording.lines(p)) for p in self.parties}
        self.tickets: dict[Name, Ticket] = {}
        self.late: OrderedDict[Name, Ticket] = OrderedDict()
        self.waiting: OrderedDict[Name, None] = OrderedDict()  # over on one side, and not begun on the other
        self.pairs: dict[str, Name] = {}  # key -> the pair that has it
        self.rows: Counter[tuple[str, str, str]] = Counter()
        self.abstract = None if alone else Abstract()
        self.unfollowed = 0  # tickets of which a killed process had a part
        self.records = self.seen = self.dropped = self.from_killed = 0
        self._about: Ticket | None = None  # whose the record is that is being applied

    # -------------------------------------------------------------------- the order

    def run(self) -> None:
        """To the end. Raises Violation, or TraceError."""
        going, open_ = True, dict(self.readers)
        while going:
            going = False
            open_ = {p: reader for p, reader in open_.items() if reader.head is not None}
            for p, reader in open_.items():
                while reader.head is not None and self._waits_for(p, reader.head.record) is None:
                    self._take(p, reader.head)
                    reader.advance()
                    going = True
        stuck = [(reader.head, p) for p, reader in self.readers.items() if reader.head is not None]
        if stuck:
            raise self._why_stuck(stuck)

    def _take(self, p: str, line: Line) -> None:
        self.records += 1
        if self.readers[p].ended:
            raise Violation(line, "a record after the end of its process", "nothing", None)
        self._about = None
        try:
            self._apply(self.parties[p], line)
        except Broken as broken:
            raise Violation(line, broken.text, broken.allowed, self._about) from broken

    def _why_stuck(self, stuck: list[tuple[Line, str]]) -> Violation:
        """Of those that wait, one whose other half has nothing more to say; else the first in the file."""

        def hopeless(at: tuple[Line, str]) -> tuple[bool, int]:
            peer = self._peer_of(at[1], at[0].record)
            return peer is not None and self.readers[peer].head is not None, at[0].number

        line, p = min(stuck, key=hopeless)
        why = self._waits_for(p, line.record)
        assert why is not None
        return Violation(line, *why, self.parties[p].here.get(getattr(line.record, "key", "")))

    def _peer_of(self, p: str, record: r.Record) -> str | None:
        match record:
            case r.Step(key=key):
                half = self._half(self.parties[p], self.parties[p].here.get(key))
                return half.peer if half is not None and half.peer in self.parties else None
            case r.Unknown(peer=peer) | r.Opened(peer=peer) | r.Closed(peer=peer):
                return peer if peer in self.parties else None
            case _:
                return None

    # ------------------------------------------------------------------ what has to wait

    def _waits_for(self, p: str, record: r.Record) -> tuple[str, str] | None:
        """What is missing before this record is possible (what is wrong, what would be right); None: nothing."""
        if self.alone:
            return None
        match record:
            case r.Step(key=key, m=message) if message is not None:
                ticket = self.parties[p].here.get(key)
                half = self._half(self.parties[p], ticket)
                if ticket is not None and half is not None:
                    return self._unsent(half.peer, ticket, message)
            case r.Unknown(key=key, peer=peer, m=message):
                name = name_of(self.parties[p], key, peer)
                return self._unsent(peer, self.tickets.get(name) or self.late.get(name), message)
            case r.Opened(peer=peer, segment=segment):
                party = self.parties.get(peer)
                if party is not None and segment not in party.segments and not self._killed(peer):
                    return f"segment {segment} of {party.name} is opened", "a segment that decode has made"
            case r.Closed(peer=peer, gone=gone):
                return self._unfenced(p, peer, gone)
        return None

    def _unsent(self, peer: str, ticket: Ticket | None, message: HandoffMessage) -> tuple[str, str] | None:
        if ticket is None and self.dropped:
            return None  # too long ago to say
        if ticket is not None and hash(message) in ticket.sent.get(peer, ()):
            return None
        if peer in self.readers and self._killed(peer):
            self.from_killed += 1
            if ticket is not None and not ticket.blind:
                ticket.blind = True
                self.unfollowed += 1
                if self.abstract is not None:
                    self.abstract.abandon(ticket.name)
            return None
        name = self.parties[peer].name if peer in self.parties else peer
        return (
            f"{_text(message)} is received, which {name} did not send",
            "messages that the other half has sent",
        )

    def _unfenced(self, p: str, peer: str, gone: bool) -> tuple[str, str] | None:
        party, segment = self.parties.get(peer), self.parties[p].senders.get(peer)
        if party is None or segment is None or self.readers[peer].head is None:
            return None
        if not gone and segment in party.segments and party.segments[segment].fenced:
            return None
        if gone:
            return f"{party.name} is taken for dead, and goes on", "that when its process has ended"
        return f"segment {segment} of {party.name} is taken for fenced", "that when decode has fenced it"

    def _killed(self, p: str) -> bool:
        """Whether what this process did last is not in the file."""
        reader = self.readers[p]
        return reader.head is None and not reader.ended

    # --------------------------------------------------------------------- applying

    def _apply(self, party: Party, line: Line) -> None:
        record = line.record
        if party.pending and not isinstance(record, r.SlotsChanged | r.Step):
            change = party.pending[0]
            raise Broken(
                f"slots {list(change.uses)} change by {change.what} outside a step", "slots change in steps"
            )
        match record:
            case r.Step():
                self._step(party, line, record)
            case r.PagesChanged():
                self._pages(party, record)
            case r.SlotsChanged():
                self._slots(party, record)
            case r.Write(key=key):
                self._its(party, key, line, PrefillHalf, "write").write(record)
            case r.Written(key=key):
                self._its(party, key, line, PrefillHalf, "write").written(record)
            case r.Copying(pages=pages):
                for key, page, q, slot, use in pages:
                    self._its(party, key, line, DecodeHalf, "copy").copying(page, q, (slot, use))
            case r.Verified(pages=pages):
                for key, page, q, good in pages:
                    self._its(party, key, line, DecodeHalf, "copy").checks(page, q, good)
                    if self.abstract is not None and not party.here[key].blind:
                        self.abstract.checked(party.here[key].name, page, q, good, party.pooled)
            case r.Begin():
                self._begin(party, line, record)
            case r.Unknown():
                self._unknown(party, record)
            case r.Segment(segment=segment) if segment in party.segments:
                raise Broken(f"segment {segment} is made a second time", "each number once")
            case r.Segment(peer=peer, segment=segment, slots=slots):
                party.segments[segment] = SlotBook(segment, peer, slots)
                party.current[peer] = segment
                if self.abstract is not None:
                    self.abstract.segment(party.p, segment)
            case r.Fenced(segment=segment):
                self._segment(party, segment).fenced = True
                if self.abstract is not None:
                    self.abstract.fenced(party.p, segment)
            case r.Opened(peer=peer, segment=segment):
                party.senders[peer] = segment
            case r.Closed(peer=peer, gone=gone):
                self._closed(party, peer, gone)
            case r.Forged(key=key, m=message):
                if not self.lab:
                    raise Broken(f"{_text(message)} is forged", "messages of workers")
                for ticket in (
                    t for n, t in (self.tickets | self.late).items() if n[0] == key and party.p in n
                ):
                    ticket.sent.setdefault(party.p, set()).add(hash(message))
                    if self.abstract is not None:
                        self.abstract.forged(ticket.name, message)
            case r.End():
                self._end(party)
            case r.Process():
                raise TraceError(
                    f"{self.recording.path}, line {line.number}: {party.name} begins a second time"
                )

    def _end(self, party: Party) -> None:
        """It ended in peace: nothing follows, and no lease is left of a ticket that is over here and does not run here."""
        for name, ticket in (self.tickets | self.late).items():
            owner = short(name[0])
            if party.p not in name or party.p not in ticket.ended or party.p in ticket.entered:
                continue
            if party.pages.held(owner) and owner not in party.owners:
                raise Broken(
                    f"{party.name} ends, and {party.pages.held(owner)} pages are still leased by {owner}, which is over",
                    "that every lease is closed",
                )

    def _closed(self, party: Party, peer: str, gone: bool) -> None:
        segment = party.senders.get(peer)
        party.senders[peer] = None
        mine: list[Ticket] = [t for t in party.here.values() if t.prefill.peer == peer]
        for ticket in mine:
            assert ticket.prefill is not None
            ticket.prefill.sender_closed()
        if self.abstract is not None and segment is not None:
            followed = [t.name for t in mine if not t.blind]
            self.abstract.closed(followed, peer, segment, gone, self._killed(peer))

    def _begin(self, party: Party, line: Line, begin: r.Begin) -> None:
        key, peer = begin.key, begin.peer
        if not self.alone and peer not in self.parties:
            raise TraceError(
                f"{self.recording.path}, line {line.number}: {party.name} has a ticket with process {peer}, whose "
                "recording is not here; put the files of all workers together into one"
            )
        name = name_of(party, key, peer)
        ticket = self.tickets.get(name)
        if ticket is None:
            ticket = self.tickets[name] = self.late.pop(name) if name in self.late else Ticket(name)
            self.seen += not ticket.sent
            self.waiting.pop(name, None)
        if not self.lab and self.pairs.setdefault(key, name) != name:
            raise Broken(f"{key} is on a second pair", "each attempt on one pair, once")
        if party.p in ticket.ended or key in party.here:
            raise Broken(
                f"a machine begins for {key}, which has been here", "each attempt once (it had ended here)"
            )
        party.here[key], party.owners[short(key)] = ticket, key
        self._tell(ticket, line)
        if party.info.role == "prefill":
            ticket.prefill = PrefillHalf(key, party, peer)
            if self.abstract is not None:
                self.abstract.segment_of.setdefault(name, party.senders.get(peer) or 0)
        elif party.info.role == "decode":
            ticket.decode = DecodeHalf(key, party, peer)
            if self.abstract is not None:
                self.abstract.segment_of[name] = ticket.decode.slots.number
        else:
            raise Broken(
                f"a {party.info.role} worker has a handoff", "handoffs of prefill and decode workers"
            )

    def _step(self, party: Party, line: Line, step: r.Step) -> None:
        ticket: Ticket | None = party.here.get(step.key)
        half = self._half(party, ticket)
        if ticket is None or half is None:
            raise Broken(f"{step.e} of a machine that is not here", "steps between its beginning and its end")
        self._tell(ticket, line)
        flight = half.flights.get(step.a[0]) if isinstance(half, PrefillHalf) and step.e == "wrote" else None  # type: ignore[arg-type]
        sent = half.step(step, self.rows)
        if self.abstract is not None and not ticket.blind:
            self.abstract.step(ticket.name, half, step, flight.pages if flight else ())
        said = ticket.sent.setdefault(party.p, set())
        said.update(map(hash, sent))
        if half.over and not self.alone:  # by itself it is asked for more after its end, and must do nothing
            ticket.ended.add(party.p)
            del party.here[step.key], party.owners[short(step.key)]
            if isinstance(half, DecodeHalf):
                ticket.decode = None
                if half.entered:
                    ticket.entered.add(party.p)
            else:
                ticket.prefill = None
            if ticket.prefill is None and ticket.decode is None:
                self._drop(ticket)

    def _drop(self, ticket: Ticket) -> None:
        self.tickets.pop(ticket.name, None)
        ticket.story = None
        self.late[ticket.name] = ticket
        self._forget(ticket)
        if len(self.late) > LATE_KEPT:
            old, _ = self.late.popitem(last=False)
            self.pairs.pop(old[0], None)
            self.dropped += 1

    def _forget(self, ticket: Ticket) -> None:
        """In the abstract: at once when it is over on both sides, else when too many wait for their other side."""
        if self.abstract is None:
            return
        if ticket.over:
            self.waiting.pop(ticket.name, None)
            self.abstract.forget(ticket.name)
            return
        self.waiting[ticket.name] = None
        if len(self.waiting) > WAITING_KEPT:
            old, _ = self.waiting.popitem(last=False)
            self.abstract.abandon(old)
            if old in self.late:
                self.late[old].blind = True
                self.unfollowed += 1

    def _unknown(self, party: Party, record: r.Unknown) -> None:
        name = name_of(party, record.key, record.peer)
        ticket = self._about = self.tickets.get(name) or self.late.get(name)
        if ticket is not None and self._half(party, ticket) is not None:
            raise Broken(
                f"{_text(record.m)} for a ticket that is here counts as unknown", "giving it to its machine"
            )
        if ticket is None:
            ticket = Ticket(name)
            self._drop(ticket)
        was_over = ticket.over
        for message in record.send:
            if isinstance(message, m.Ack) and party.p not in ticket.entered and not self.dropped:
                raise Broken("ack for a request that did not enter here", "unknown_ticket, or nothing")
            if isinstance(message, m.Drained):
                ticket.ended.add(party.p)  # and never begins after that
        ticket.sent.setdefault(party.p, set()).update(map(hash, record.send))
        if self.abstract is not None and not was_over and not ticket.blind:
            self.abstract.unknown(name, party.info.role == "prefill", record.m, record.send)

    def _pages(self, party: Party, change: r.PagesChanged) -> None:
        ticket: Ticket | None = party.here.get(party.owners.get(change.owner, ""))
        self._about = ticket
        half = self._half(party, ticket)
        if change.what == "drop" and half is not None:
            half.gives_up(change)
        party.pages.changed(change)
        free = change.what == "drop" and any(page not in party.pages.holds for page in change.pages)
        if free and self.abstract is not None and party.info.role == "decode":
            over = self.abstract.pages_free(party.p, change.owner)
            if over is not None and over not in self.tickets:
                self.abstract.forget(over)

    def _slots(self, party: Party, change: r.SlotsChanged) -> None:
        book = self._segment(party, change.segment)
        if change.what != "fence":
            party.pending.append(change)
            return
        if not book.fenced:
            raise Broken("all slots of a segment go back, and it is not fenced (I3)", "fencing it first")
        book.back("", change.uses, "fence")

    def _segment(self, party: Party, number: int) -> SlotBook:
        book = party.segments.get(number)
        if book is None:
            raise Broken(f"segment {number}, which was never made", f"segments {sorted(party.segments)}")
        return book

    def _half(self, party: Party, ticket: Ticket | None) -> Half | None:
        if ticket is None:
            return None
        half: Half | None = ticket.prefill if party.info.role == "prefill" else ticket.decode
        return half if half is not None and half.party is party else None

    def _its(self, party: Party, key: str, line: Line, kind: type[H], what: str) -> H:
        """The half that this line is about. Raises Broken when it is not here."""
        ticket: Ticket | None = party.here.get(key)
        half = self._half(party, ticket)
        if ticket is None or not isinstance(half, kind):
            raise Broken(f"a {what} for {key}, which is not here", "that for tickets that are")
        self._tell(ticket, line)
        return half

    def _tell(self, ticket: Ticket, line: Line) -> None:
        """This line is about this ticket."""
        ticket.tell(line)
        self._about = ticket


def _text(message: HandoffMessage) -> str:
    return type(message).__name__


__all__ = ["LATE_KEPT", "Follower"]
