"""A state that is being changed into the next: what the gateway, the workers around their machines, the network and the
adversary do. The production objects are in `halves.py` and `pages.py`; the moves, and when they are possible, in `world.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from hermetic.handoff.decode import State as DecodeState
from hermetic.handoff.prefill import State as PrefillState
from hermetic.kv.pool import Kind
from hermetic.kv.slots import Slots
from hermetic.proof.codec import Data, decode, encode, encode_slots
from hermetic.proof.ends import ENDED_DATA, machine_state, quiet_ends
from hermetic.proof.halves import ENDED, LOST, DecodeHalf, DecodeView, PrefillHalf, PrefillView, ticket_of
from hermetic.proof.model import ATTEMPTS, DOWN, DT, FL, GT, PT, UP, Broken, Flight, Known, Link, Model, State
from hermetic.proof.pages import PageBook, empty, name
from hermetic.proof.scopes import FAULTS


class Draft:
    """A state that is being changed into the next."""

    def __init__(
        self,
        world: Model,
        state: State,
        operations: list[tuple[int, str, tuple[Any, ...]]] | None = None,
    ) -> None:
        self.world, self.ids, self.operations = world, list(state), operations
        self.contents = world.store.contents

    # ---------------------------------------------------------------------- reading

    def at(self, t: int, what: int) -> Any:
        return self.contents[self.ids[6 * t + what]]

    def put(self, t: int, what: int, content: Any) -> None:
        self.ids[6 * t + what] = self.world.store.id(tuple(content))

    def prefill(self, t: int) -> PrefillView:
        return PrefillView(*self.at(t, PT))

    def decode(self, t: int) -> DecodeView:
        return DecodeView(*self.at(t, DT))

    def known(self, t: int) -> Known:
        return Known(*self.at(t, GT))

    def flights(self, t: int) -> list[Flight]:
        return [Flight(*f) for f in self.at(t, FL)]

    def link(self, pair: int) -> Link:
        return Link(*self.contents[self.ids[self.world.link_at(pair)]])

    def left(self, fault: str) -> int:
        return self.contents[self.ids[-1]][FAULTS.index(fault)]

    def spend(self, fault: str) -> None:
        left = list(self.contents[self.ids[-1]])
        left[FAULTS.index(fault)] -= 1
        left[-1] -= 1
        if not left[-1]:
            left = [0] * len(left)
        self.ids[-1] = self.world.store.id(tuple(left))

    def _machine_state(self, t: int, what: int) -> str:
        machine = self.at(t, what)[0]
        return "" if machine is None else machine_state(machine)

    def p_state(self, t: int) -> str:
        return self._machine_state(t, PT)

    def d_state(self, t: int) -> str:
        return self._machine_state(t, DT)

    def free(self, place: int) -> int:
        number = self.ids[place]
        return self.world.remembered(("free", number), lambda: PageBook(self.contents[number]).pool.free)

    def slots_free(self, pair: int) -> int:
        return len(self.contents[self.ids[self.world.slots_at(pair)]][1])

    def quarantined(self, t: int) -> bool:
        return self.d_state(t) == DecodeState.QUARANTINED.name

    def wants(self, t: int) -> int:
        slots = self.ids[self.world.slots_at(self.known(t).pair)]
        if not self.contents[slots][1]:
            return 0
        pages = self.world.pages_of(t)
        view = self.decode(t)
        return self.world.remembered(
            ("wants", self.ids[6 * t + DT], slots, t),
            lambda: DecodeHalf(view, self.contents[slots], t, pages).wants(),
        )

    # ---------------------------------------------------------------- steps of halves

    def p_step(self, t: int, event: str, *args: Any) -> None:
        world, before = self.world, self.ids[6 * t + PT]

        def run() -> tuple[int, tuple[Any, ...]]:
            half = PrefillHalf(self.prefill(t), t, world.pages_of(t))
            getattr(half, event)(*(decode(a) for a in args))
            return world.store.id(tuple(half.packed())), tuple(half.effects)

        after, effects = world.remembered(("p", before, t, event, args), run)
        self.ids[6 * t + PT] = after
        pair = self.known(t).pair
        place = world.ppool_at(pair)
        for effect in effects:
            match effect:
                case ("write", batch, pages):
                    live = self.link(pair).welcomed
                    self.put(t, FL, sorted((*self.at(t, FL), tuple(Flight(batch, pages, live, "flying")))))
                    for page, _ in pages:
                        self.page_op(place, "read", t, batch, page)
                case ("stop",):
                    self.page_op(place, "stop", t)
                case _:
                    self._effect(t, UP, place, effect)

    def d_step(self, t: int, event: str, *args: Any) -> None:
        world, before = self.world, self.ids[6 * t + DT]
        pair = self.known(t).pair
        where = world.slots_at(pair)
        slots = self.ids[where]

        def run() -> tuple[int, int, tuple[Any, ...]]:
            half = DecodeHalf(self.decode(t), self.contents[slots], t, world.pages_of(t))
            getattr(half, event)(*(decode(a) for a in args))
            half.slots.check_conservation()
            view, packed = half.packed()
            return world.store.id(tuple(view)), world.store.id(packed), tuple(half.effects)

        after, slots_after, effects = world.remembered(("d", before, slots, t, event, args), run)
        self.ids[6 * t + DT], self.ids[where] = after, slots_after
        if slots_after != slots:
            self._forget_bytes(pair, self.contents[slots], self.contents[slots_after])
        place = world.dpool_at(pair)
        for effect in effects:
            match effect:
                case ("enter",):
                    if self.known(t).report_d is not None or self.known(t).pair < 0:
                        raise Broken("I4", f"{name(t)} enters a batch after it was reported as ended")
                    self.page_op(place, "enter", t)
                case _:
                    self._effect(t, DOWN, place, effect)

    def _effect(self, t: int, way: int, place: int, effect: tuple[Any, ...]) -> None:
        """What either half may do; `way` is where its messages go, `place` its worker's pages."""
        match effect:
            case ("send", message):
                if self.link(self.known(t).pair).state == "up":
                    self.put(t, way, sorted((*self.at(t, way), message), key=repr))
            case ("close",):
                self.page_op(place, "close", t)
            case ("report", outcome):
                self.told(t, "report_p" if way == UP else "report_d", outcome)
            case ("ended", outcome):
                self.blast(t, outcome)
            case _:
                raise AssertionError(effect)

    def page_op(self, place: int, op: str, *args: Any) -> None:
        if self.operations is not None:
            self.operations.append((place, op, args))
        self.ids[place] = self.world.pages_after(self.ids[place], place, op, args)

    def _forget_bytes(self, pair: int, before: Data, after: Data) -> None:
        """What lies in a slot that was given to another use is nobody's any more."""
        where = self.world.mem_at(pair)
        granted_before, granted_after = dict(before[2]), dict(after[2])
        kept = [
            content
            if s in granted_after
            and granted_before.get(s) == granted_after[s]
            and before[0][s] == after[0][s]
            else None
            for s, content in enumerate(self.contents[self.ids[where]])
        ]
        self.ids[where] = self.world.store.id(tuple(kept))

    # ---------------------------------------------------------------------- the gateway

    def told(self, t: int, half: str, outcome: Data) -> None:
        g = self.known(t)
        if getattr(g, half) is not None:
            raise Broken("I4", f"{half[-1]} reported the end of {name(t)} twice")
        g = g._replace(**{half: outcome})
        if outcome[1] != "Completed":
            other = "cancel_d" if half == "report_p" else "cancel_p"
            g = g._replace(**{other: True})
        self.put(t, GT, g)

    def blast(self, t: int, outcome: Data) -> None:
        """I6: an integrity failure ends only requests whose bytes were touched."""
        if outcome[1] != "Completed" and outcome[2] == "kv_integrity" and not self.known(t).hurt:
            raise Broken(
                "I6", f"{name(t)} ends with kv_integrity, and nobody touched its bytes: {outcome[3]}"
            )

    def may_begin(self, t: int) -> bool:
        """Whether the gateway gives this attempt to a pair now."""
        if t % ATTEMPTS == 0:
            return self.world.pairs > 1
        former = self.known(t - 1)
        if former.left or former.report_p is None or former.report_d is None or former.pair < 0:
            return False
        codes = [r[2] for r in (former.report_p, former.report_d) if r[1] != "Completed"]
        return any(code in ("worker_lost", "no_pair") for code in codes) and "kv_integrity" not in codes

    def begin(self, t: int, pair: int) -> None:
        self.put(t, GT, Known(pair=pair))

    def submit_p(self, t: int) -> None:
        g = self.known(t)
        self.put(t, GT, g._replace(submit_p=True))
        self.p_step(t, "submit", self.link(g.pair).state != "p_lost")

    def submit_d(self, t: int) -> None:
        g = self.known(t)
        self.put(t, GT, g._replace(submit_d=True))
        self.d_step(t, "submit", self.link(g.pair).state != "d_lost")

    def cancel_p(self, t: int) -> None:
        self.put(t, GT, self.known(t)._replace(cancel_p=False))
        self.p_step(t, "end", encode(ENDED))

    def cancel_d(self, t: int) -> None:
        self.put(t, GT, self.known(t)._replace(cancel_d=False))
        if self.decode(t).stage == "entered":
            self.d_step(t, "finish")
        else:
            self.d_step(t, "end", encode(ENDED))

    def leave(self, t: int) -> None:
        self.spend("abort")
        self.put(t, GT, self.known(t)._replace(cancel_p=True, cancel_d=True, left=True))

    # ---------------------------------------------------------------------- the workers

    def start(self, t: int) -> None:
        self.page_op(
            self.world.ppool_at(self.known(t).pair), "allocate", t, self.world.pages_of(t), Kind.APPEND
        )
        self.p_step(t, "start")

    def compute(self, t: int) -> None:
        self.page_op(self.world.ppool_at(self.known(t).pair), "made", t, self.prefill(t).ready)
        self.p_step(t, "compute")

    def reserve(self, t: int) -> None:
        place = self.world.dpool_at(self.known(t).pair)
        self.page_op(place, "allocate", t, self.world.pages_of(t), Kind.RECEIVE)
        self.d_step(t, "reserve")

    def credit(self, t: int) -> None:
        self.d_step(t, "credit")

    def copy(self, t: int) -> None:
        """slot -> page, as a block; what is hashed next is the page."""
        page, (_, slot, use) = self.decode(t).copies[0]
        pair = self.known(t).pair
        uses, _, granted, _ = self.contents[self.ids[self.world.slots_at(pair)]]
        if dict(granted).get(slot) != ("K", t) or uses[slot] != use:
            raise Broken(
                "I3",
                f"slot {slot} is given back while page {page} of {name(t)} is still to be copied out of it",
            )
        content = self.contents[self.ids[self.world.mem_at(pair)]][slot]
        self.page_op(self.world.dpool_at(pair), "land", t, page, content)
        self.d_step(t, "copy")
        if not any(f.mode == "ghost" for u in self.of(pair) for f in self.flights(u)):
            self.verify(t)  # no byte can come between, so it is one step

    def verify(self, t: int) -> None:
        page, _ = self.decode(t).checking
        place = self.world.dpool_at(self.known(t).pair)
        book = self.contents[self.ids[place]]
        table = next(pages for ticket, pages, _ in book[2] if ticket == t)
        good = book[3][table[page]] == ("K", t, page, True)
        self.checked(t, page, good)

    def checked(self, t: int, page: int, good: bool) -> None:
        if good:
            self.page_op(self.world.dpool_at(self.known(t).pair), "tag", t, page)
        self.d_step(t, "copied", page, good)

    def finish(self, t: int) -> None:
        self.d_step(t, "finish")

    def nudge_p(self, t: int) -> None:
        self.p_step(t, "nudge")

    def nudge_d(self, t: int) -> None:
        self.d_step(t, "nudge")

    def overdue(self, t: int) -> None:
        if self.p_state(t) != PrefillState.STUCK.name:
            raise Broken(
                "L2", f"a peer that will say drained for {name(t)} is taken for one that does not answer"
            )
        self.d_step(t, "overdue")

    def early(self, t: int) -> None:
        """The drain deadline passes although *drained* is on its way."""
        self.spend("deadline")
        self.d_step(t, "overdue")

    # ---------------------------------------------------------------------- the network

    def deliver(self, t: int, way: int, message: Data, keep: bool) -> None:
        if keep:
            self.spend("duplicate")
        else:
            self._take_out(t, way, message)
        if way == DOWN:
            self.p_step(t, "message", message)
        else:
            self.d_step(t, "message", message)

    def lose(self, t: int, way: int, message: Data) -> None:
        self.spend("loss")
        self._take_out(t, way, message)

    def _take_out(self, t: int, way: int, message: Data) -> None:
        rest = list(self.at(t, way))
        rest.remove(message)
        self.put(t, way, rest)

    # ---------------------------------------------------------------------- writes

    def _end_flight(self, t: int, flight: Flight) -> None:
        self.put(t, FL, [f for f in self.at(t, FL) if f != tuple(flight)])

    def _bytes(self, t: int, flight: Flight, intact: bool = True) -> None:
        """The bytes of a write arrive in its slots, from where it reads them now."""
        if not flight.live:
            return
        pair = self.known(t).pair
        book = self.contents[self.ids[self.world.ppool_at(pair)]]
        source = {(a, b, i): page for a, b, i, page in book[4]}
        where = self.world.mem_at(pair)
        mem = list(self.contents[self.ids[where]])
        for n, (page, (_, slot, _)) in enumerate(flight.pages):
            content = book[3][source[t, flight.batch, page]]
            if content is not None and not intact and n == 0:
                content = (*content[:3], False)
            mem[slot] = content
        self.ids[where] = self.world.store.id(tuple(mem))

    def wrote(self, t: int, flight: Flight, intact: bool = True, haunt: bool = False) -> None:
        self._bytes(t, flight, intact)
        self._end_flight(t, flight)
        if haunt:
            self.put(t, FL, sorted((*self.at(t, FL), tuple(flight._replace(mode="ghost")))))
        self.page_op(self.world.ppool_at(self.known(t).pair), "read_end", t, flight.batch)
        self.p_step(t, "wrote", flight.batch, True, True)

    def damaged(self, t: int, flight: Flight) -> None:
        self.spend("damage")
        self.put(t, GT, self.known(t)._replace(hurt=True))
        self.wrote(t, flight, intact=False)

    def haunt(self, t: int, flight: Flight) -> None:
        self.spend("late")
        self.wrote(t, flight, haunt=True)

    def strike(self, t: int, flight: Flight) -> None:
        """Bytes of a write that was over come once more: the transport broke its promise, and only the seals are left."""
        self._end_flight(t, flight)
        if not flight.live:
            return
        pair = self.known(t).pair
        granted = dict(self.contents[self.ids[self.world.slots_at(pair)]][2])
        where = self.world.mem_at(pair)
        mem = list(self.contents[self.ids[where]])
        for page, (_, slot, _) in flight.pages:
            mem[slot] = ("K", t, page, True) if slot in granted else None
            if slot in granted:
                owner = granted[slot][1]
                self.put(owner, GT, self.known(owner)._replace(hurt=True))
        self.ids[where] = self.world.store.id(tuple(mem))

    def doubt(self, t: int, flight: Flight) -> None:
        self.spend("late")
        self._end_flight(t, flight)
        self.put(t, FL, sorted((*self.at(t, FL), tuple(flight._replace(mode="doubt")))))
        self.p_step(t, "wrote", flight.batch, False, False)

    def write_fails(self, t: int, flight: Flight) -> None:
        self.spend("late")
        self._end_flight(t, flight)
        self.page_op(self.world.ppool_at(self.known(t).pair), "read_end", t, flight.batch)
        self.p_step(t, "wrote", flight.batch, False, True)

    # ---------------------------------------------------------------------- pairs and loss

    def of(self, pair: int) -> list[int]:
        return [t for t in range(self.world.tickets) if self.known(t).pair == pair]

    def set_link(self, pair: int, link: Link) -> None:
        self.ids[self.world.link_at(pair)] = self.world.store.id(tuple(link))

    def cut(self, pair: int) -> None:
        """What was on its way in a session that is over goes with it."""
        for t in self.of(pair):
            self.ids[6 * t + UP] = self.ids[6 * t + DOWN] = self.world.nobody[UP]

    def decode_lost(self, pair: int, dead: bool) -> None:
        """As `DecodeWorker.lost`: end what waits, then fence if the transport can, or if the peer's process has ended."""
        for t in self.of(pair):
            self.d_step(t, "lost")
        if dead or self.world.scope.fenceable:
            self.fence(pair)

    def fence(self, pair: int) -> None:
        """As `_fence`: nothing that was sent to this segment reaches memory in use; it is thrown away."""
        for t in self.of(pair):
            flights = [tuple(f._replace(live=False)) for f in self.flights(t) if f.mode != "ghost"]
            self.put(t, FL, sorted(flights))
        for t in self.of(pair):
            self.d_step(t, "fenced")
        slots = self.world.slots_at(pair)
        self.ids[slots] = self.world.store.id(encode_slots(Slots(self.world.scope.slots), ticket_of))
        self.ids[self.world.mem_at(pair)] = self.world.store.id((None,) * self.world.scope.slots)
        self.set_link(pair, self.link(pair)._replace(welcomed=False))

    def replace(self, pair: int) -> None:
        """As `_replace`: the peer lives and does not drain."""
        self.fence(pair)

    def prefill_lost(self, pair: int) -> None:
        """As `_unpair`."""
        for t in self.of(pair):
            self.p_step(t, "end", encode(LOST))

    def drop_segment(self, pair: int) -> None:
        """As `_drop_segment`: the sender is closed; nothing reads sources for it any more."""
        mine = self.of(pair)
        for t in mine:
            self.put(t, FL, [tuple(f) for f in self.flights(t) if f.mode == "ghost"])
        self.page_op(self.world.ppool_at(pair), "read_none", frozenset(mine))
        for t in mine:
            self.p_step(t, "fenced")

    def welcome(self, pair: int) -> None:
        self.set_link(pair, Link("up", True))
        self.drop_segment(pair)

    def silence(self, pair: int, who: str) -> None:
        """One side gives the session up; the other has not noticed yet, and may go on writing."""
        self.spend("silence")
        self.set_link(pair, self.link(pair)._replace(state=who))
        self.cut(pair)
        if who == "d_lost":
            self.decode_lost(pair, dead=False)
        else:
            self.prefill_lost(pair)

    def greet(self, pair: int) -> None:
        """The next session begins; for the side that knew nothing yet, the former one ends with it."""
        if self.link(pair).state == "d_lost":
            self.prefill_lost(pair)
        else:
            self.decode_lost(pair, dead=False)
        self.cut(pair)
        self.set_link(pair, self.link(pair)._replace(state="up"))
        for t in self.of(pair):
            self.d_step(t, "nudge")

    def crash_prefill(self, worker: int) -> None:
        """Its process ends, decode sees it, and another incarnation begins, which knows nothing."""
        self.spend("crash")
        pairs = range(worker * self.world.scope.decodes, (worker + 1) * self.world.scope.decodes)
        self.ids[self.world.ppool_at(pairs[0])] = self.world.store.id(empty(self.world.scope.pages))
        for pair in pairs:
            self.set_link(pair, Link("up", True))
            for t in self.of(pair):
                self.put(t, PT, PrefillView(ended=ENDED_DATA, submitted=True, report=ENDED_DATA))
                self.put(t, FL, ())
                self.gateway_lost(t, "report_p")
            self.decode_lost(pair, dead=True)
            self.cut(pair)
            self.set_link(pair, Link("up", True))

    def crash_decode(self, worker: int) -> None:
        self.spend("crash")
        pairs = [p for p in range(self.world.pairs) if p % self.world.scope.decodes == worker]
        self.ids[self.world.dpool_at(pairs[0])] = self.world.store.id(empty(self.world.scope.pages))
        for pair in pairs:
            for t in self.of(pair):
                entered = self.decode(t).stage == "entered"
                self.put(t, DT, DecodeView(stage="over", report=ENDED_DATA))
                self.put(t, FL, [tuple(f._replace(live=False)) for f in self.flights(t) if f.mode != "ghost"])
                if entered:
                    self.put(t, GT, self.known(t)._replace(report_d=None))
                self.gateway_lost(t, "report_d")
            slots = encode_slots(Slots(self.world.scope.slots), ticket_of)
            self.ids[self.world.slots_at(pair)] = self.world.store.id(slots)
            self.ids[self.world.mem_at(pair)] = self.world.store.id((None,) * self.world.scope.slots)
            self.set_link(pair, Link("up", True))
            self.prefill_lost(pair)
            self.drop_segment(pair)
            self.cut(pair)

    def gateway_lost(self, t: int, half: str) -> None:
        """The gateway sees a worker end: that half has ended for every attempt on it."""
        g = self.known(t)
        submit, cancel, other = (
            ("submit_p", "cancel_p", "cancel_d")
            if half == "report_p"
            else ("submit_d", "cancel_d", "cancel_p")
        )
        g = g._replace(**{submit: True, cancel: False})
        if getattr(g, half) is None:
            g = g._replace(**{half: encode(LOST), other: True})
        self.put(t, GT, g)

    def tidy(self, tickets: Iterable[int]) -> None:
        """States that differ only in what can never matter again are made one; see `quiet_ends`."""
        if not self.world.reduce:
            return
        for t in tickets:
            ids = tuple(self.ids[6 * t : 6 * t + 5])
            if ids[GT] != self.world.nobody[GT]:
                tidied = self.world.remembered(("tidy", ids), partial(self._tidied, t))
                self.ids[6 * t : 6 * t + 5] = tidied

    def _tidied(self, t: int) -> tuple[int, ...]:
        p, d, g, up, down = quiet_ends(
            self.prefill(t), self.decode(t), self.known(t), self.at(t, UP), self.at(t, DOWN)
        )
        return tuple(self.world.store.id(tuple(x)) for x in (p, d, g, up, down))

    # ---------------------------------------------------------------------- invariants

    def check(self, tickets: Iterable[int]) -> None:
        """I3 for slots; the rest is checked where it changes."""
        for t in tickets:
            flights = self.ids[6 * t + FL]
            if flights == self.world.nobody[UP]:
                continue
            slots = self.ids[self.world.slots_at(self.known(t).pair)]
            self.world.remembered(("I3", flights, slots, t), partial(self._check_slots, t, slots))

    def _check_slots(self, t: int, slots: int) -> bool:
        uses, free, granted, _ = self.contents[slots]
        owner = dict(granted)
        for flight in self.flights(t):
            if not flight.live or flight.mode == "ghost":
                continue
            for page, (_, slot, use) in flight.pages:
                if slot in free:
                    state = "free"
                elif owner[slot] != ("K", t):
                    state = f"granted to {name(owner[slot][1])}"
                elif uses[slot] != use:
                    state = f"granted anew, use {uses[slot]}"
                else:
                    continue
                text = (
                    f"slot {slot} is {state} while a write of page {page} of {name(t)} may still arrive in it"
                )
                raise Broken("I3", text)
        return True
