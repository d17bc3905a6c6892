"""Both machines, the slots, two memories and a network that delays, repeats and loses: what the random walks walk over.

The one thing to know: a write in flight may put any of its bytes into its slots at any moment until it is reported
(one that failed without stopping: until a fence). After every move `check` asks whether each such slot still belongs
to the ticket that may write there.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hermetic.handoff import messages as m
from hermetic.handoff.actions import (
    Action,
    CloseLeases,
    Copy,
    Enqueue,
    Enter,
    Report,
    Send,
    StopComputing,
    Write,
)
from hermetic.handoff.decode import DecodeHandoff
from hermetic.handoff.decode import State as DecodeState
from hermetic.handoff.outcome import Aborted, Completed, Outcome
from hermetic.handoff.prefill import ACTIVE, PrefillHandoff
from hermetic.handoff.prefill import State as PrefillState
from hermetic.kv.slots import Slots, SlotUse

SIZE = 16
Content = tuple[bytes, int, bool]  # ticket, page, intact
Move = tuple[str, Callable[[], None]]


@dataclass
class Flight:
    """A write: `lost` when it failed without a promise that no byte follows."""

    batch: int
    pages: tuple[tuple[int, SlotUse], ...]
    lost: bool = False


@dataclass
class Ticket:
    """One request on both sides."""

    key: m.Key
    tokens: int
    prefill: PrefillHandoff
    decode: DecodeHandoff
    submitted: bool = False
    queued: bool = False
    computing: bool = False
    ready: int = 0
    flights: list[Flight] = field(default_factory=list)
    copies: deque[Copy] = field(default_factory=deque)
    landed: dict[int, Content] = field(default_factory=dict)  # decode's own pages
    reports: dict[str, list[Outcome]] = field(default_factory=lambda: {"prefill": [], "decode": []})
    closes: Counter[str] = field(default_factory=Counter)
    entered: int = 0

    @property
    def pages(self) -> int:
        return -(-self.tokens // SIZE)


class World:
    """`faults` left are counted down, so that every walk ends in calm."""

    def __init__(self, tokens: list[int], slots: int, budget: int = 6) -> None:
        self.slots = Slots(slots)
        self.memory: dict[int, Content] = {}
        self.budget = budget
        self.down: deque[tuple[Ticket, m.HandoffMessage]] = deque()  # decode -> prefill
        self.up: deque[tuple[Ticket, m.HandoffMessage]] = deque()
        self.old: list[tuple[str, Ticket, m.HandoffMessage]] = []
        self.prefill_alive = self.decode_alive = self.connected = True
        self.tickets = []
        for i, count in enumerate(tokens):
            key = m.Key(bytes([i]) * 16, 1)
            decode = DecodeHandoff(key, count, -(-count // SIZE), self.slots)
            ticket = Ticket(key, count, PrefillHandoff(), decode)
            self.tickets.append(ticket)
            self.at_decode(ticket, decode.reserved())

    # ----------------------------------------------------------------- performing

    def at_prefill(self, t: Ticket, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(message=message):
                    if self.connected:
                        self.up.append((t, message))
                case Enqueue():
                    assert not t.queued
                    t.queued = True
                case StopComputing():
                    t.queued = t.computing = False
                case Write(batch=batch, pages=pages):
                    assert all(page < t.ready for page, _ in pages)
                    t.flights.append(Flight(batch, pages))
                case CloseLeases():
                    t.closes["prefill"] += 1
                    assert not t.flights, "source pages were given back under a write"
                    t.computing = False
                case Report(outcome=outcome):
                    t.reports["prefill"].append(outcome)
                case _:
                    raise AssertionError(action)

    def at_decode(self, t: Ticket, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(message=message):
                    if self.connected:
                        self.down.append((t, message))
                case Copy():
                    t.copies.append(action)
                case Enter(state=state):
                    t.entered += 1
                    assert state == t.key.ticket
                    # Evidence of its own: what lies in decode's memory is this prompt, whole.
                    assert t.landed == {p: (t.key.ticket, p, True) for p in range(t.pages)}
                case CloseLeases():
                    t.closes["decode"] += 1
                    assert not t.copies, "decode's pages were given back under a copy"
                case Report(outcome=outcome):
                    t.reports["decode"].append(outcome)
                    if not isinstance(outcome, Completed):
                        self.abandon(t)
                case _:
                    raise AssertionError(action)

    def abandon(self, t: Ticket) -> None:
        """As the worker does: copies still queued are not made."""
        while t.copies:
            self.at_decode(t, t.decode.copied(t.copies.popleft().page, False))

    # ------------------------------------------------------------------ calm moves

    def calm(self) -> list[Move]:
        moves: list[Move] = []
        if self.connected:
            moves += [("down", self.deliver_down)] * bool(self.down) + [("up", self.deliver_up)] * bool(
                self.up
            )
        for t in self.tickets:
            if self.prefill_alive:
                if not t.submitted:
                    moves.append(("submit", lambda t=t: self.submit(t)))
                if t.queued:
                    moves.append(("start", lambda t=t: self.start(t)))
                if t.computing:
                    moves.append(("compute", lambda t=t: self.compute(t)))
                moves += [("wrote", lambda t=t, f=f: self.wrote(t, f)) for f in t.flights if not f.lost]
            if self.decode_alive:
                if t.copies:
                    moves.append(("copy", lambda t=t: self.copy(t)))
                if t.decode.wants() and self.slots.free:
                    moves.append(("credit", lambda t=t: self.at_decode(t, t.decode.credit(self.slots.free))))
        return moves

    def submit(self, t: Ticket, tokens: int | None = None) -> None:
        t.submitted = True
        tokens = tokens or t.tokens
        self.at_prefill(t, t.prefill.submitted(tokens, -(-tokens // SIZE)))

    def start(self, t: Ticket) -> None:
        t.queued, t.computing = False, True
        self.at_prefill(t, t.prefill.started())

    def compute(self, t: Ticket) -> None:
        t.ready += 1
        last = t.ready == t.pages
        t.computing = not last
        self.at_prefill(t, t.prefill.pages_ready(t.ready))
        if last:
            self.at_prefill(t, t.prefill.computed(t.key.ticket))

    def put(self, t: Ticket, flight: Flight, at: int, intact: bool) -> None:
        page, use = flight.pages[at % len(flight.pages)]
        self.memory[use.slot] = (t.key.ticket, page, intact)

    def wrote(self, t: Ticket, flight: Flight, intact: bool = True) -> None:
        for at in range(len(flight.pages)):
            self.put(t, flight, at, intact or at > 0)
        t.flights.remove(flight)
        self.at_prefill(t, t.prefill.wrote(flight.batch, True))

    def copy(self, t: Ticket) -> None:
        copy = t.copies.popleft()
        t.landed[copy.page] = self.memory[copy.slot.slot]
        good = t.landed[copy.page] == (t.key.ticket, copy.page, True)
        self.at_decode(t, t.decode.copied(copy.page, good))

    def deliver_down(self) -> None:
        t, message = self.down.popleft()
        self.old.append(("down", t, message))
        if self.prefill_alive:
            self.at_prefill(t, t.prefill.received(message))

    def deliver_up(self) -> None:
        t, message = self.up.popleft()
        self.old.append(("up", t, message))
        if self.decode_alive:
            self.at_decode(t, t.decode.received(message))

    # -------------------------------------------------------------------- faults

    def faults(self, pick: int) -> list[Move]:
        """What can go wrong now; `pick` chooses among equals."""
        if not self.budget:
            return []
        t = self.tickets[pick % len(self.tickets)]
        moves: list[Move] = []
        if self.old and self.connected:
            moves.append(("repeat", lambda: self.repeat(self.old[pick % len(self.old)])))
        if self.down and isinstance(self.down[0][1], m.Credit):
            moves.append(("lose a credit", lambda: self.down.popleft() and None))
        if self.up and isinstance(self.up[0][1], m.Complete):
            moves.append(("lie", self.lie))
        if self.prefill_alive:
            moves.append(("prefill aborts", lambda: self.abort_prefill(t, Aborted("prefill", str(pick)))))
            if not t.submitted:
                moves.append(("submit otherwise", lambda: self.submit(t, t.tokens + 1 + pick % 40)))
            for f in t.flights[:1]:
                if not f.lost:
                    moves.append(("write badly", lambda f=f: self.wrote(t, f, intact=False)))
                    moves.append(("write fails", lambda f=f: self.write_fails(t, f, True)))
                    moves.append(("write hangs", lambda f=f: self.write_fails(t, f, False)))
                moves.append(("bytes arrive", lambda f=f: self.put(t, f, pick, pick % 2 == 0)))
            moves.append(("prefill dies", lambda: self.prefill_dies()))
        if self.decode_alive:
            moves.append(("decode aborts", lambda: self.abort_decode(t, Aborted("decode", str(pick)))))
            moves.append(("decode dies", lambda: self.decode_dies()))
            if self.connected:
                moves.append(("silence", lambda: self.silence()))
        return moves

    def spend(self, move: Move) -> None:
        self.budget -= 1
        move[1]()

    def repeat(self, what: tuple[str, Ticket, m.HandoffMessage]) -> None:
        way, t, message = what
        if way == "down" and self.prefill_alive:
            self.at_prefill(t, t.prefill.received(message))
        if way == "up" and self.decode_alive:
            self.at_decode(t, t.decode.received(message))

    def lie(self) -> None:
        t, message = self.up.popleft()
        assert isinstance(message, m.Complete)
        self.up.appendleft((t, m.Complete(message.tokens - 1, message.pages, message.state)))

    def abort_prefill(self, t: Ticket, cause: Outcome) -> None:
        first = t.prefill.state in ACTIVE
        self.at_prefill(t, t.prefill.abort(cause))
        if first:
            assert t.reports["prefill"] == [cause]

    def abort_decode(self, t: Ticket, cause: Outcome) -> None:
        first = t.decode.state in (DecodeState.RESERVED, DecodeState.LANDING)
        self.at_decode(t, t.decode.abort(cause))
        if first:
            assert t.reports["decode"] == [cause]

    def write_fails(self, t: Ticket, flight: Flight, stopped: bool) -> None:
        if stopped:
            t.flights.remove(flight)
        else:
            flight.lost = True
        self.at_prefill(t, t.prefill.wrote(flight.batch, False, stopped))

    def cut(self) -> None:
        self.connected = False
        self.up.clear()
        self.down.clear()

    def prefill_dies(self) -> None:
        """Its process is confirmed dead: nothing of it can write any more."""
        self.prefill_alive = False
        self.cut()
        for t in self.tickets:
            t.flights.clear()
        if self.decode_alive:
            for t in self.tickets:
                self.at_decode(t, t.decode.fenced("prefill died"))
            self.slots.fence()

    def decode_dies(self) -> None:
        self.decode_alive = False
        self.cut()
        if self.prefill_alive:
            for t in self.tickets:
                self.at_prefill(t, t.prefill.peer_gone("decode died"))

    def silence(self) -> None:
        """Decode gives up on a peer that may live on, and write on."""
        self.cut()
        for t in self.tickets:
            self.at_decode(t, t.decode.lost("silence"))

    # ---------------------------------------------------------------- invariants

    def check(self) -> None:
        self.slots.check_conservation()
        for t in self.tickets:
            for half, reports in t.reports.items():
                assert len(reports) <= 1, (half, reports)
                assert t.closes[half] <= 1
            assert t.entered <= 1
            assert (t.entered == 1) == (t.decode.state is DecodeState.ENTERED)
            if not self.decode_alive:
                continue  # its memory is gone with it
            for flight in t.flights:
                for _, use in flight.pages:
                    safe = self.slots.holds(t.key, use) or use.slot in self.slots._quarantined
                    assert safe, f"{use} was given away while {t.key} may still write into it"

    def settle(self) -> None:
        """No more faults: everything that can happen happens, and lost credits are repeated when all else is quiet."""
        for _ in range(10_000):
            moves = self.calm()
            if not moves:
                before = len(self.down)
                for t in self.tickets:
                    if self.decode_alive:
                        self.at_decode(t, t.decode.repeat_credit())
                if not self.connected or len(self.down) == before or self.quiet():
                    return
                continue
            moves[0][1]()
            self.check()
        raise AssertionError("it does not end")

    def quiet(self) -> bool:
        return all(t.reports["decode"] for t in self.tickets)

    def check_end(self) -> None:
        """Both halves of everything have ended, by the rules, and nothing leaks but what a dead or mad peer holds."""
        stuck = any(t.prefill.state is PrefillState.STUCK for t in self.tickets)
        for t in self.tickets:
            if stuck and self.connected and not self.slots.free and not t.reports["decode"]:
                # Every slot is held by writes that may still run: the others wait, until a fence or their deadline.
                assert (t.prefill.state, t.decode.state) == (PrefillState.SENDING, DecodeState.LANDING)
                continue
            if self.prefill_alive and (self.connected or not self.decode_alive):
                assert len(t.reports["prefill"]) == 1, t
                if t.prefill.state is not PrefillState.STUCK:
                    assert (t.prefill.state, t.closes["prefill"]) == (PrefillState.ENDED, 1)
            if not self.decode_alive:
                continue
            assert len(t.reports["decode"]) == 1, t
            if t.entered:
                assert isinstance(t.reports["decode"][0], Completed)
                assert t.closes["decode"] == 0  # its leases are the running request's now
            elif t.prefill.state is PrefillState.STUCK and self.connected and self.prefill_alive:
                assert t.decode.state is DecodeState.DRAINING  # until a fence, and not before
            else:
                assert (t.decode.state, t.closes["decode"]) == (DecodeState.ENDED, 1)
        if self.decode_alive:
            if (self.connected and not stuck) or not self.prefill_alive:
                assert self.slots.counts() == (self.slots.count, 0, 0)
            if self.prefill_alive:
                self.prefill_dies()  # a fence at last: then nothing at all is held
                self.check()
                assert self.slots.counts() == (self.slots.count, 0, 0)
                assert all(len(t.reports["decode"]) == 1 for t in self.tickets)
                assert all(t.entered or t.closes["decode"] == 1 for t in self.tickets)
