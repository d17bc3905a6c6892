"""Both machines, the slots, two memories and a network that loses, repeats and reorders: what the random walks walk over.

The one thing to know: a write in flight may put any of its bytes into its slots at any moment until it is reported
(one in doubt: until its segment is fenced). After every move `check` asks whether each such slot still belongs to the
ticket that may write there. Around the machines stands what the workers do: a gateway that cancels the other half, a fence
that replaces the segment.

`proof/halves.py` and `proof/draft.py` have such surroundings as well, for the explorer. These are apart on purpose. There, a
step is a function of encoded states of a few pages that can be remembered; here, objects go on for thousands of moves, with
prompts, slots and lies of any size, and every walk is recorded and compared. And a line of a worker that one of the two
tells wrongly is not wrong in the other.
"""

from __future__ import annotations

import os
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from hermetic.handoff import messages as m
from hermetic.handoff.actions import (
    Action,
    CloseLeases,
    Copy,
    Enqueue,
    Enter,
    Forget,
    Report,
    Send,
    StopComputing,
    Write,
)
from hermetic.handoff.decode import OPEN, DecodeHandoff
from hermetic.handoff.decode import State as DecodeState
from hermetic.handoff.machine import Machine
from hermetic.handoff.outcome import Aborted, Completed, Failed, Outcome, Refused
from hermetic.handoff.prefill import ACTIVE, PrefillHandoff
from hermetic.handoff.prefill import State as PrefillState
from hermetic.handoff.trace import Journal, Recorder
from hermetic.handoff.unknown import at_decode, at_prefill
from hermetic.kv.slots import Slots, SlotUse

SIZE = 16
Content = tuple[bytes, int, bool]  # ticket, page, intact
Move = tuple[str, Callable[[], object]]
LOST = Failed("worker_lost", "silence")
TOUCHED = (PrefillState.SENDING, PrefillState.COMPLETE, PrefillState.DRAINING, PrefillState.STUCK)


class Rows:
    """Counts the rows of both tables that are taken: (machine, state, event)."""

    def __init__(self) -> None:
        self.taken: Counter[tuple[type, Any, str]] = Counter()

    def stepped(
        self, machine: Machine[Any], event: str, args: tuple[Any, ...], before: Any, actions: list[Action]
    ) -> None:
        if (before, event) in machine.table:
            self.taken[type(machine), before, event] += 1


@contextmanager
def rows_taken() -> Iterator[Counter[tuple[type, Any, str]]]:
    """The rows that are taken in the block, which is not recorded."""
    rows = Rows()
    with mock.patch.object(Recorder, "current", None), mock.patch.object(Machine, "observer", rows):
        yield rows.taken


class Journals:
    """What the two workers of a world would say to a recording (`--trace`)."""

    def __init__(self, recorder: Recorder, world: World) -> None:
        self.prefill = self._join(recorder, "prefill", 0)
        self.decode = self._join(recorder, "decode", world.count)
        self.decode.has_segment(world.slots, self.prefill.p, 0)
        self.prefill.opened(self.decode.p, 0)

    @staticmethod
    def _join(recorder: Recorder, role: str, slots: int) -> Journal:
        return recorder.join(role, role, os.urandom(8), SIZE, 0, slots)


@dataclass
class Flight:
    """A write. In `doubt` when it failed without a promise that no byte follows."""

    batch: int
    pages: tuple[tuple[int, SlotUse], ...]
    segment: int
    doubt: bool = False


@dataclass
class Ticket:
    """One request on both sides, and what each worker keeps of it."""

    key: m.Key
    tokens: int
    prefill: PrefillHandoff | None = None
    decode: DecodeHandoff | None = None
    prefill_end: Outcome | None = None  # remembered after the record went
    decode_over: bool = False
    submitted: bool = False
    queued: bool = False
    computing: bool = False
    ready: int = 0
    flights: list[Flight] = field(default_factory=list)
    copies: deque[Copy] = field(default_factory=deque)
    running: list[Copy] = field(default_factory=list)  # of one round: these are made whatever happens
    copied: set[SlotUse] = field(default_factory=set)
    landed: dict[int, Content] = field(default_factory=dict)  # decode's own pages
    reports: dict[str, list[Outcome]] = field(default_factory=lambda: {"prefill": [], "decode": []})
    closes: Counter[str] = field(default_factory=Counter)
    cancels: set[str] = field(default_factory=set)  # halves that the gateway will cancel
    entered: int = 0

    @property
    def pages(self) -> int:
        return -(-self.tokens // SIZE)


class World:
    """`budget` faults at most, so that every walk ends in calm. `fenceable`: whether decode can fence a living peer."""

    def __init__(self, tokens: list[int], slots: int, budget: int = 6, fenceable: bool = True) -> None:
        self.slots, self.count = Slots(slots), slots
        self.segment = self.sender = 0  # decode's segment, and the one that prefill writes to
        self.memory: dict[int, Content] = {}
        self.written: set[tuple[int, SlotUse]] = set()
        self.budget, self.fenceable = budget, fenceable
        self.down: deque[tuple[Ticket, m.HandoffMessage]] = deque()  # decode -> prefill
        self.up: deque[tuple[Ticket, m.HandoffMessage]] = deque()
        self.old: list[tuple[str, Ticket, m.HandoffMessage]] = []
        self.prefill_alive = self.decode_alive = self.connected = True
        self.tickets = [Ticket(m.Key(bytes([i]) * 16, 1), count) for i, count in enumerate(tokens)]
        self.told: Journals | None = None if Recorder.current is None else Journals(Recorder.current, self)

    # ----------------------------------------------------------------- performing

    def at_prefill(self, t: Ticket, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(message=message):
                    if isinstance(message, m.Drained):
                        assert not t.flights, "drained was said while a write may still land"
                    if self.connected:
                        self.up.append((t, message))
                case Enqueue():
                    assert not t.queued
                    t.queued = True
                case StopComputing():
                    t.queued = t.computing = False
                case Write(batch=batch, pages=pages):
                    assert all(page < t.ready for page, _ in pages)
                    uses = {(self.sender, use) for _, use in pages}
                    assert not uses & self.written, "one use of a slot was written twice"
                    self.written |= uses
                    t.flights.append(Flight(batch, pages, self.sender))
                    if self.told:
                        self.told.prefill.writes(
                            t.key, batch, [(page, page, use.slot) for page, use in pages]
                        )
                case CloseLeases():
                    t.closes["prefill"] += 1
                    assert not t.flights, "source pages were given back under a write"
                    t.computing = False
                case Report(outcome=outcome):
                    self.report(t, "prefill", outcome)
                case Forget():
                    t.prefill, t.prefill_end = None, t.reports["prefill"][0]
                case _:
                    raise AssertionError(action)

    def at_decode(self, t: Ticket, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(message=message):
                    if self.connected:
                        self.down.append((t, message))
                case Copy(slot=slot):
                    assert self.slots.holds(t.key, slot)
                    assert slot not in t.copied, "one use of a slot was copied twice"
                    t.copied.add(slot)
                    t.copies.append(action)
                case Enter(state=state):
                    t.entered += 1
                    assert state == t.key.ticket
                    assert t.decode is not None
                    told = t.decode._complete
                    assert told is not None
                    assert (told.tokens, told.pages) == (t.tokens, t.pages), "false counts were believed"
                    # Evidence of its own: what lies in decode's memory is this prompt, whole.
                    assert t.landed == {p: (t.key.ticket, p, True) for p in range(t.pages)}
                case CloseLeases():
                    t.closes["decode"] += 1
                    assert not t.copies, "decode's pages were given back before a copy"
                    assert not t.running, "decode's pages were given back under a copy"
                case Report(outcome=outcome):
                    self.report(t, "decode", outcome)
                    if not isinstance(outcome, Completed):
                        while t.copies and t.decode is not None:  # as the worker does: these are not made
                            self.at_decode(t, t.decode.copied(t.copies.popleft().page, False))
                case Forget():
                    t.decode, t.decode_over = None, True
                case _:
                    raise AssertionError(action)

    def report(self, t: Ticket, half: str, outcome: Outcome) -> None:
        t.reports[half].append(outcome)
        if not isinstance(outcome, Completed):
            t.cancels.add("decode" if half == "prefill" else "prefill")

    # ------------------------------------------------------------------ calm moves

    def calm(self) -> list[Move]:
        moves: list[Move] = []
        if self.connected:
            if self.down:
                moves.append(("down", lambda: self.deliver_down(0)))
            if self.up:
                moves.append(("up", lambda: self.deliver_up(0)))
            if self.sender != self.segment:
                moves.append(("welcome", self.welcome))
        elif self.prefill_alive and self.decode_alive:
            moves.append(("greet", self.greet))
        for t in self.tickets:
            if self.prefill_alive:
                if not t.submitted:
                    moves.append(("submit", lambda t=t: self.submit(t)))
                elif "prefill" in t.cancels:
                    moves.append(("cancel prefill", lambda t=t: self.cancel_prefill(t)))
                if t.queued:
                    moves.append(("start", lambda t=t: self.start(t)))
                if t.computing:
                    moves.append(("compute", lambda t=t: self.compute(t)))
                moves += [("wrote", lambda t=t, f=f: self.wrote(t, f)) for f in t.flights if not f.doubt]
            if self.decode_alive:
                if "decode" in t.cancels:
                    moves.append(("cancel decode", lambda t=t: self.cancel_decode(t)))
                paired = self.connected and self.sender == self.segment
                if t.decode is None and not t.decode_over and paired:
                    moves.append(("reserve", lambda t=t: self.reserve(t)))
                if t.copies:
                    moves.append(("begin copy", lambda t=t: t.running.append(t.copies.popleft())))
                if t.running:
                    moves.append(("copy", lambda t=t: self.copy(t)))
                if t.decode is not None and t.decode.wants() and self.slots.free:
                    moves.append(("credit", lambda t=t: self.credit(t)))
        return moves

    def reserve(self, t: Ticket) -> None:
        t.decode = DecodeHandoff(t.key, t.tokens, t.pages, self.slots)
        if self.told:
            self.told.decode.begins(t.decode, self.told.prefill.p)
        self.at_decode(t, t.decode.reserved())

    def credit(self, t: Ticket) -> None:
        assert t.decode is not None
        self.at_decode(t, t.decode.credit(self.slots.free))

    def submit(self, t: Ticket, tokens: int | None = None) -> None:
        t.submitted = True
        if t.prefill_end is not None:  # decode's abort was here first
            if not t.reports["prefill"]:
                self.report(t, "prefill", t.prefill_end)
            return
        if t.prefill is None and not self.connected:
            self.report(t, "prefill", Refused("no_pair", ""))
            t.prefill_end = t.reports["prefill"][0]
            return
        t.prefill = t.prefill or self.at_prefill_begins(t)
        tokens = tokens or t.tokens
        self.at_prefill(t, t.prefill.submitted(tokens, -(-tokens // SIZE)))

    def at_prefill_begins(self, t: Ticket) -> PrefillHandoff:
        machine = PrefillHandoff(t.key)
        if self.told:
            self.told.prefill.begins(machine, self.told.decode.p)
        return machine

    def start(self, t: Ticket) -> None:
        assert t.prefill is not None
        t.queued, t.computing = False, True
        self.at_prefill(t, t.prefill.started())

    def compute(self, t: Ticket) -> None:
        assert t.prefill is not None
        t.ready += 1
        last = t.ready == t.pages
        t.computing = not last
        self.at_prefill(t, t.prefill.pages_ready(t.ready))
        if last and t.prefill is not None:
            self.at_prefill(t, t.prefill.computed(t.key.ticket))

    def put(self, t: Ticket, flight: Flight, at: int, intact: bool) -> None:
        page, use = flight.pages[at % len(flight.pages)]
        if flight.segment == self.segment:  # else: it was fenced, and these bytes land nowhere
            self.memory[use.slot] = (t.key.ticket, page, intact)

    def wrote(self, t: Ticket, flight: Flight, intact: bool = True) -> None:
        for at in range(len(flight.pages)):
            self.put(t, flight, at, intact or at > 0)
        t.flights.remove(flight)
        assert t.prefill is not None, "a record was forgotten under a write"
        if self.told:
            self.told.prefill.written(t.key, flight.batch, True, True)
        self.at_prefill(t, t.prefill.wrote(flight.batch, True))

    def copy(self, t: Ticket) -> None:
        assert t.decode is not None
        copy, free = t.running.pop(0), self.slots.free
        t.landed[copy.page] = self.memory.get(copy.slot.slot, (b"", -1, False))
        good = t.landed[copy.page] == (t.key.ticket, copy.page, True)
        if self.told:
            self.told.decode.copies([(t.key, copy)], [copy.page])
            self.told.decode.verified([(t.key, copy)], [copy.page], [good])
        actions = t.decode.copied(copy.page, good)
        for action in actions:
            if isinstance(action, Send) and isinstance(action.message, m.Resend):
                again = SlotUse(*action.message.slot)
                assert again not in t.copied, "a page was asked for again into a use that had landed"
                assert again.slot != copy.slot.slot or not free
        self.at_decode(t, actions)

    def deliver_down(self, at: int) -> None:
        t, message = self.down[at]
        del self.down[at]
        self.old.append(("down", t, message))
        if self.prefill_alive:
            self.to_prefill(t, message)

    def deliver_up(self, at: int) -> None:
        t, message = self.up[at]
        del self.up[at]
        self.old.append(("up", t, message))
        if self.decode_alive:
            self.to_decode(t, message)

    def to_prefill(self, t: Ticket, message: m.HandoffMessage) -> None:
        if t.prefill is not None:
            self.first_cause(t, "prefill", message, t.prefill.state in ACTIVE, t.prefill.received(message))
            return
        answer = at_prefill(t.prefill_end, message)
        t.prefill_end = answer.remember or t.prefill_end
        if answer.begin:
            t.prefill = self.at_prefill_begins(t)
            self.at_prefill(t, t.prefill.received(message))
            return
        if self.told:
            self.told.prefill.unknown(t.key, self.told.decode.p, message, answer.send)
        self.at_prefill(t, [Send(said) for said in answer.send])

    def to_decode(self, t: Ticket, message: m.HandoffMessage) -> None:
        if t.decode is not None:
            self.first_cause(t, "decode", message, t.decode.state in OPEN, t.decode.received(message))
        elif t.decode_over:
            answer = at_decode(t.entered > 0, message)
            if self.told:
                self.told.decode.unknown(t.key, self.told.prefill.p, message, answer.send)
            self.at_decode(t, [Send(said) for said in answer.send])

    def first_cause(
        self, t: Ticket, half: str, message: m.HandoffMessage, was_open: bool, actions: list[Action]
    ) -> None:
        if isinstance(message, m.Abort) and was_open:
            reported = [a.outcome for a in actions if isinstance(a, Report)]
            assert reported == [Aborted(message.code, message.reason)]
        (self.at_prefill if half == "prefill" else self.at_decode)(t, actions)

    def cancel_prefill(self, t: Ticket) -> None:
        t.cancels.discard("prefill")
        if t.prefill is not None and t.prefill.state in ACTIVE:
            self.at_prefill(t, t.prefill.abort(Aborted("other_half", "")))

    def cancel_decode(self, t: Ticket) -> None:
        t.cancels.discard("decode")
        if t.decode is not None:
            if t.decode.state in OPEN:
                self.at_decode(t, t.decode.abort(Aborted("other_half", "")))
        elif not t.decode_over:
            self.never_reserved(t, Aborted("other_half", ""))

    def never_reserved(self, t: Ticket, outcome: Outcome) -> None:
        t.decode_over = True
        self.report(t, "decode", outcome)

    def greet(self) -> None:
        self.connected = True
        for t in self.tickets:
            if t.decode is not None:
                self.at_decode(t, t.decode.nudge())

    # -------------------------------------------------------------------- faults

    def faults(self, pick: int) -> list[Move]:
        """What can go wrong now, and what time may bring; `pick` chooses among equals."""
        if not self.budget:
            return []
        draw = random.Random(pick)
        pick = draw.randrange(2**16)
        t = draw.choice(self.tickets)
        moves: list[Move] = []
        if self.connected:
            if self.old:
                moves.append(("repeat", lambda: self.repeat(draw.choice(self.old))))
            for kind in (m.Resend, m.Landed, m.Ack):
                if some := [what for what in self.old if isinstance(what[2], kind)]:
                    moves.append(
                        (f"repeat {kind.__name__}", lambda some=some: self.repeat(draw.choice(some)))
                    )
            for queue, deliver in ((self.down, self.deliver_down), (self.up, self.deliver_up)):
                if queue:
                    moves.append(("lose", lambda q=queue: q.__delitem__(pick % len(q))))
                if len(queue) > 1:
                    moves.append(("overtake", lambda q=queue, d=deliver: d(1 + pick % (len(q) - 1))))
            if self.up and isinstance(self.up[0][1], m.Complete):
                moves.append(("lie", lambda: self.lie(pick)))
            if self.up and isinstance(self.up[0][1], m.Landed):
                moves.append(("lie about a page", lambda: self.lie_about_a_page(pick)))
        if self.prefill_alive:
            if t.prefill is not None:
                moves.append(("prefill nudges", lambda: self.at_prefill(t, t.prefill.nudge())))
                if t.prefill.state in ACTIVE:
                    moves.append(("prefill aborts", lambda: self.abort_prefill(t, Aborted("p", str(pick)))))
            if not t.submitted:
                moves.append(("submit otherwise", lambda: self.submit(t, t.tokens + 1 + pick % 40)))
            for f in t.flights[:1]:
                if not f.doubt:
                    moves.append(("write badly", lambda f=f: self.wrote(t, f, intact=False)))
                    moves.append(("write fails", lambda f=f: self.write_fails(t, f, True)))
                    moves.append(("write in doubt", lambda f=f: self.write_fails(t, f, False)))
                moves.append(("bytes arrive", lambda f=f: self.put(t, f, pick, pick % 2 == 0)))
            moves.append(("prefill dies", self.prefill_dies))
        if self.decode_alive:
            if t.decode is not None:
                moves.append(("decode nudges", lambda: self.at_decode(t, t.decode.nudge())))
                if t.decode.state in OPEN:
                    moves.append(("decode aborts", lambda: self.abort_decode(t, Aborted("d", str(pick)))))
            for late in self.tickets:
                if late.decode is not None and late.decode.state is DecodeState.DRAINING:
                    moves.append(("overdue", lambda late=late: self.overdue(late)))
            moves.append(("decode dies", self.decode_dies))
            if self.connected:
                moves.append(("silence", self.silence))
                if self.fenceable and self.sender == self.segment:
                    moves.append(("fence", self.fence))
        return moves

    def spend(self, move: Move) -> None:
        self.budget -= 1
        move[1]()

    def repeat(self, what: tuple[str, Ticket, m.HandoffMessage]) -> None:
        way, t, message = what
        if way == "down" and self.prefill_alive:
            self.to_prefill(t, message)
        if way == "up" and self.decode_alive:
            self.to_decode(t, message)

    def lie(self, pick: int) -> None:
        t, told = self.up.popleft()
        assert isinstance(told, m.Complete)
        tokens, pages, batches = [(-1, 0, 0), (0, -1, 0), (0, 0, 1), (0, 0, -1), (1, 0, 0)][pick % 5]
        wrong = m.Complete(told.tokens + tokens, told.pages + pages, told.batches + batches, told.state)
        self.forge(t, wrong)

    def lie_about_a_page(self, pick: int) -> None:
        t, told = self.up.popleft()
        assert isinstance(told, m.Landed)
        (_, slot, use), *rest = told.pages
        self.forge(t, m.Landed(told.sequence, ((pick % (t.pages + 2) - 1, slot, use), *rest)))

    def forge(self, t: Ticket, message: m.HandoffMessage) -> None:
        if self.told:
            self.told.prefill.forged(t.key, message)
        self.up.appendleft((t, message))

    def abort_prefill(self, t: Ticket, cause: Outcome) -> None:
        assert t.prefill is not None
        self.at_prefill(t, t.prefill.abort(cause))
        assert t.reports["prefill"] == [cause]

    def abort_decode(self, t: Ticket, cause: Outcome) -> None:
        assert t.decode is not None
        self.at_decode(t, t.decode.abort(cause))
        assert t.reports["decode"] == [cause]

    def write_fails(self, t: Ticket, flight: Flight, stopped: bool) -> None:
        if stopped:
            t.flights.remove(flight)
        else:
            flight.doubt = True
        assert t.prefill is not None
        if self.told:
            self.told.prefill.written(t.key, flight.batch, False, stopped)
        self.at_prefill(t, t.prefill.wrote(flight.batch, False, stopped))

    def overdue(self, t: Ticket) -> None:
        """Time alone: it may take slots out of use, and gives nothing back."""
        assert t.decode is not None
        held, free = self.slots.held(t.key), self.slots.free
        self.at_decode(t, t.decode.overdue())
        assert (self.slots.held(t.key), self.slots.free) == (held, free)

    def fence(self) -> None:
        """The peer's segment is fenced and thrown away, and the peer, which may be alive, is given another one."""
        self.fenced("fenced")
        self.slots, self.memory, self.segment = Slots(self.count), {}, self.segment + 1
        if self.told:
            self.told.decode.has_segment(self.slots, self.told.prefill.p, self.segment)

    def fenced(self, why: str) -> None:
        for t in self.tickets:
            while t.running:  # a worker fences between two rounds
                self.copy(t)
        if self.told:
            self.told.decode.has_fenced(self.segment)
        for t in self.tickets:
            if t.decode is not None:
                self.at_decode(t, t.decode.fenced(why))
            assert t.decode is None, "something waits for a peer that was fenced"
        self.slots.fence()
        assert self.slots.counts() == (self.count, 0, 0)

    def welcome(self) -> None:
        """Prefill is told of the new segment: it closes the sender of the former one."""
        self.sender = self.segment
        self.drop_segment("fenced")
        if self.told:
            self.told.prefill.opened(self.told.decode.p, self.segment)

    def drop_segment(self, why: str) -> None:
        if self.told:
            self.told.prefill.closed(self.told.decode.p, gone=not self.decode_alive)
        for t in self.tickets:
            if t.prefill is not None and t.prefill.state in TOUCHED:
                t.flights.clear()
                self.at_prefill(t, t.prefill.fenced(why))
                assert t.prefill is None

    def cut(self) -> None:
        self.connected = False
        self.up.clear()
        self.down.clear()

    def silence(self) -> None:
        """The session is lost, on both sides; both may live on, and write on."""
        self.cut()
        for t in self.tickets:
            if t.prefill is not None and t.prefill.state in ACTIVE:
                self.at_prefill(t, t.prefill.abort(LOST))
            if t.decode is not None:
                if t.decode.state in OPEN:
                    self.at_decode(t, t.decode.abort(LOST))
                if t.decode is not None and t.decode.state is DecodeState.DRAINING:
                    self.overdue(t)
            elif not t.decode_over:
                self.never_reserved(t, LOST)

    def prefill_dies(self) -> None:
        """Its process is confirmed dead: nothing of it can write any more."""
        self.prefill_alive = False
        self.cut()
        for t in self.tickets:
            t.flights.clear()
            t.prefill = None
            if self.decode_alive and t.decode is None and not t.decode_over:
                self.never_reserved(t, LOST)
        if self.decode_alive:
            self.fenced("prefill died")

    def decode_dies(self) -> None:
        self.decode_alive = False
        self.cut()
        for t in self.tickets:
            if t.prefill is not None and t.prefill.state in ACTIVE and t.prefill.state not in TOUCHED:
                self.at_prefill(t, t.prefill.abort(LOST))
        self.drop_segment("decode died")

    # ---------------------------------------------------------------- invariants

    def check(self) -> None:
        self.slots.check_conservation()
        for t in self.tickets:
            for half, reports in t.reports.items():
                assert len(reports) <= 1, (half, reports)
                assert t.closes[half] <= 1
            assert t.entered <= 1
            assert (t.entered == 1) == (t.reports["decode"] == [Completed()])
            if not self.decode_alive:
                continue  # its memory is gone with it
            for flight in t.flights:
                for _, use in flight.pages:
                    safe = flight.segment != self.segment or self.slots.holds(t.key, use)
                    assert safe, f"{use} was given away while {t.key} may still write into it"

    def settle(self) -> None:
        """No more faults: what can happen happens; when nothing can, time passes. It must come to an end."""
        passed = 0
        for _ in range(20_000):
            if moves := self.calm():
                moves[0][1]()
            elif self.over() or passed > 40:
                return
            else:
                passed += 1
                self.time_passes(passed)
            self.check()
        raise AssertionError("it does not end")

    def over(self) -> bool:
        return all(t.prefill is None and (t.decode is None or not self.decode_alive) for t in self.tickets)

    def time_passes(self, passed: int) -> None:
        """Nudges first; later drains are overdue, and what is in quarantine is fenced where the transport can."""
        for t in self.tickets:
            if t.prefill is not None:
                self.at_prefill(t, t.prefill.nudge())
            if self.decode_alive and t.decode is not None:
                if passed > 3 and t.decode.state is DecodeState.DRAINING:
                    self.overdue(t)
                elif t.decode is not None:
                    self.at_decode(t, t.decode.nudge())
        if passed > 6 and self.decode_alive and self.slots.counts().quarantined:
            if self.fenceable:
                self.fence()
            elif passed > 12:
                self.prefill_dies()

    def check_end(self) -> None:
        """Both halves of everything have ended, by the rules, and every slot is back."""
        assert not self.calm()
        for t in self.tickets:
            if self.prefill_alive:
                assert t.prefill is None, t
                assert len(t.reports["prefill"]) == 1, t
            if not self.decode_alive:
                continue
            assert (t.decode, t.decode_over) == (None, True), t
            assert len(t.reports["decode"]) == 1, t
            assert not t.entered or t.closes["decode"] == 0  # its leases are the running request's now
        if self.decode_alive:
            assert self.slots.counts() == (self.count, 0, 0)
