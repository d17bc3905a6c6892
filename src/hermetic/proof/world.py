"""Everything that two halves can meet, as states and moves: the gateway, the network, memory, timers, and an adversary.

The one thing to know: local steps run production code (`halves.py`, `pages.py`) once for each different input and are
remembered; what stands here are the things between the workers, and they stand here once, for every search.

    order       any message of a channel may be the next to arrive
    a write     puts its bytes when it ends; while it flies, or ended in doubt, its slots must be held for its ticket (I3),
                which is checked in every state, so that the moment of each byte need not be a move
    timers      nudge, overdue and fence happen when nothing else can happen for a ticket; earlier ones are the adversary's
    decode      copies, then hashes; nothing of this worker comes between, bytes from outside do
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from hermetic.kv.slots import Slots
from hermetic.proof.codec import encode_slots
from hermetic.proof.draft import Draft
from hermetic.proof.halves import ticket_of
from hermetic.proof.model import (
    ATTEMPTS,
    DOWN,
    DT,
    FL,
    GT,
    PRODUCT,
    PT,
    UP,
    Broken,
    Known,
    Link,
    Model,
    Move,
    State,
    raised,
)  # fmt: skip
from hermetic.proof.pages import empty, name
from hermetic.proof.scopes import FAULTS

COSTS = {
    "lose": "loss",
    "double": "duplicate",
    "early overdue": "deadline",
    "abort": "abort",
    "doubt": "late",
    "write fails": "late",
    "haunt": "late",
    "damage": "damage",
}


TicketMove = tuple[Move, bool, tuple[tuple[int, int], ...], tuple[Any, ...], Broken | None]
"""A move, whether it is calm, the components that it changes, what it does to pages, what it breaks."""


class World(Model):
    """States and moves of one scope. `store` and what is remembered belong to one process."""

    def initial(self) -> State:
        one = [self.nobody[k] for k in (PT, DT, GT, UP, UP, UP)]
        begun = [*one[:GT], self.store.id(tuple(Known(pair=0))), *one[GT + 1 :]]
        state: list[int] = []
        for ticket in range(self.tickets):
            state += begun if ticket % ATTEMPTS == 0 and self.pairs == 1 else one
        fresh = encode_slots(Slots(self.scope.slots), ticket_of)
        for _ in range(self.pairs):
            state += [self.store.id(fresh), self.store.id((None,) * self.scope.slots)]
            state.append(self.store.id(tuple(Link())))
        state += [self.store.id(empty(self.scope.pages))] * (self.scope.prefills + self.scope.decodes)
        budget = [self.scope.faults.get(f, 0) for f in FAULTS]
        state.append(self.store.id((*budget, min(sum(budget), self.scope.at_most))))
        return tuple(state)

    # ------------------------------------------------------------------------ moves

    def expand(self, state: State) -> list[tuple[Move, bool, State]]:
        """Everything that can happen: (name, whether it is calm, what follows). Raises Broken, with its `move`."""
        found: list[tuple[Move, bool, State]] = []
        busy = self._busy(state)
        fenceable: set[int] = set()
        for t in range(self.tickets):
            places = self._places(state, t)
            if places is None:
                continue
            pair, where = places
            views = (self._view(state[self.ppool_at(pair)], t), self._view(state[self.dpool_at(pair)], t))
            ghosts = self._ghosts(tuple(state[6 * u + FL] for u in range(self.tickets) if u != t))
            key = ("moves", t, pair, busy, ghosts, views, tuple([state[i] for i in where]))
            remembered = self._memo.get(key)
            if remembered is None:
                remembered = self._memo[key] = self._ticket_moves(state, t, pair, busy, where)
            moves, quiet = remembered
            if quiet:
                fenceable.add(pair)
            for move, calm, changes, operations, wrong in moves:
                if wrong is not None:
                    raise Broken(wrong.kind, wrong.text, move)
                after = list(state)
                for index, number in changes:
                    after[index] = number
                for place, op, args in operations:
                    try:
                        after[place] = self.pages_after(after[place], place, op, args)
                    except Broken as broken:
                        raise Broken(broken.kind, broken.text, move) from broken
                slots = self.globals + 3 * pair
                if after[slots] != state[slots]:
                    self._check_others(after, pair, move)
                found.append((move, calm, tuple(after)))
        found += self._common_moves(state, busy, fenceable)
        return found

    def _busy(self, state: State) -> frozenset[int]:
        """Decode workers that are between a copy and its hash, where nothing else of them runs."""
        contents = self.store.contents
        return frozenset(
            contents[state[6 * t + GT]][0] % self.scope.decodes
            for t in range(self.tickets)
            if contents[state[6 * t + DT]][3]
        )

    def _ghosts(self, flights: tuple[int, ...]) -> bool:
        """Whether bytes of another's write may come once more: a copy and its hash are two steps then."""
        contents = self.store.contents
        return any(f[3] == "ghost" for number in flights for f in contents[number])

    def _places(self, state: State, t: int) -> tuple[int, tuple[int, ...]] | None:
        """The pair of a ticket, and the components that its own moves read and change. None: it is not begun."""
        pair = self.store.contents[state[6 * t + GT]][0]
        if pair < 0:
            return None
        return pair, self._where(t, pair)

    @functools.cache  # noqa: B019  (a world is used for one search, and lives as long)
    def _where(self, t: int, pair: int) -> tuple[int, ...]:
        own = range(6 * t, 6 * t + 6)
        shared = (self.slots_at(pair), self.mem_at(pair), self.link_at(pair))
        return (*own, *shared, self.globals + 3 * self.pairs + self.scope.prefills + self.scope.decodes)

    def _ticket_moves(
        self, state: State, t: int, pair: int, busy: frozenset[int], where: tuple[int, ...]
    ) -> tuple[list[TicketMove], bool]:
        """The moves of one ticket as changes of its own components, and operations on pages. The second: it is quiet, and
        in quarantine."""
        draft = Draft(self, state)
        g = draft.known(t)
        wanted: list[tuple[Move, bool, Callable[[Draft], None]]] = []
        local = list(self._local(draft, t, g, busy))
        wanted += [(what, True, do) for what, do in local]
        faults: list[tuple[Move, Callable[[Draft], None]]] = []
        messages = False
        deaf = self._deaf(pair, busy)
        for way in (DOWN, UP):
            # A session is in order as far as its Welcome goes: what decode says later does not overtake it.
            held_up = not draft.link(pair).welcomed if way == DOWN else deaf
            if held_up:
                messages = messages or bool(draft.at(t, way))
                continue
            for message in dict.fromkeys(draft.at(t, way)):
                messages = True
                what = ("down" if way == DOWN else "up", t, message)
                wanted.append((what, True, partial(Draft.deliver, t=t, way=way, message=message, keep=False)))
                faults.append((("lose", *what), partial(Draft.lose, t=t, way=way, message=message)))
                faults.append(
                    (("double", *what), partial(Draft.deliver, t=t, way=way, message=message, keep=True))
                )
        still = not local and not messages and not deaf
        timers = list(self._timers(draft, t, g))
        if still:
            wanted += [(what, True, do) for what, do in timers]
        if not deaf and draft.d_state(t) == "DRAINING" and draft.p_state(t) != "STUCK":
            faults.append((("early overdue", t), partial(Draft.early, t=t)))
        faults += self._faults(draft, t, g)
        wanted += [(what, False, do) for what, do in faults if draft.left(COSTS[what[0]])]
        found: list[TicketMove] = []
        for what, calm, do in wanted:
            operations: list[tuple[int, str, tuple[Any, ...]]] = []
            try:
                after = self._done(state, do, (t,), operations)
            except Broken as broken:
                found.append((what, calm, (), (), broken))
                continue
            changes = tuple((i, after[i]) for i in where if after[i] != state[i])
            found.append((what, calm, changes, tuple(operations), None))
        return found, still and draft.quarantined(t)

    def _common_moves(
        self, state: State, busy: frozenset[int], fenceable: set[int]
    ) -> list[tuple[Move, bool, State]]:
        """What concerns more than one ticket: new attempts, pairs that part and meet, workers that end."""
        of = 6 * self.tickets
        key = ("common", busy, frozenset(fenceable), state[GT:of:6], state[FL:of:6], state[of:])
        wanted = self._memo.get(key)
        if wanted is None:
            wanted = self._memo[key] = self._common_wanted(state, busy, fenceable)
        found = []
        for what, calm, do in wanted:
            known = self._crash_key(state, what) if what[0] == "crash" else None
            after = self._memo.get(known) if known is not None else None
            if after is None:
                try:
                    after = self._done(state, do, range(self.tickets))
                except Broken as broken:
                    raise Broken(broken.kind, broken.text, what) from broken
                if known is not None:
                    self._memo[known] = after
            found.append((what, calm, after))
        return found

    def _crash_key(self, state: State, what: Move) -> Any:
        """What is left of a state when a worker ends depends on this alone: the worker's own side is gone with it."""
        if self.pairs > 1:
            return None
        of = 6 * self.tickets
        gone = what[1] == "prefill"
        survives = state[DT:of:6] if gone else (state[PT:of:6], state[DT:of:6], state[FL:of:6])
        pool = self.dpool_at(0) if gone else self.ppool_at(0)
        slots = state[self.slots_at(0)] if gone else 0
        return (
            "crash",
            gone,
            state[GT:of:6],
            survives,
            slots,
            state[self.link_at(0)],
            state[pool],
            state[-1],
        )

    def _common_wanted(
        self, state: State, busy: frozenset[int], fenceable: set[int]
    ) -> list[tuple[Move, bool, Callable[[Draft], None]]]:
        draft = Draft(self, state)
        wanted: list[tuple[Move, bool, Callable[[Draft], None]]] = []
        for t in range(self.tickets):
            if draft.known(t).pair < 0:
                if draft.may_begin(t):
                    wanted += [
                        (("begin", t, p), True, partial(Draft.begin, t=t, pair=p)) for p in range(self.pairs)
                    ]
                continue
            for flight in draft.flights(t):
                if flight.mode == "ghost":
                    wanted.append(
                        (("ghost", t, flight.batch), True, partial(Draft.strike, t=t, flight=flight))
                    )
        for pair in range(self.pairs):
            if self._deaf(pair, busy):
                continue
            link = draft.link(pair)
            if link.state != "up":
                wanted.append((("greet", pair), True, partial(Draft.greet, pair=pair)))
            elif not link.welcomed:
                wanted.append((("welcome", pair), True, partial(Draft.welcome, pair=pair)))
            elif self.scope.fenceable and pair in fenceable:
                wanted.append((("fence", pair), True, partial(Draft.replace, pair=pair)))
            if link.state == "up" and draft.left("silence") and draft.of(pair):
                wanted.append(
                    (("silence", "decode", pair), False, partial(Draft.silence, pair=pair, who="d_lost"))
                )
                wanted.append(
                    (("silence", "prefill", pair), False, partial(Draft.silence, pair=pair, who="p_lost"))
                )
        if draft.left("crash") and not busy:
            for worker in range(self.scope.prefills):
                wanted.append(
                    (("crash", "prefill", worker), False, partial(Draft.crash_prefill, worker=worker))
                )
            for worker in range(self.scope.decodes):
                wanted.append(
                    (("crash", "decode", worker), False, partial(Draft.crash_decode, worker=worker))
                )
        return wanted

    def _done(
        self,
        state: State,
        do: Callable[[Draft], None],
        tickets: Iterable[int],
        operations: list[tuple[int, str, tuple[Any, ...]]] | None = None,
    ) -> State:
        draft = Draft(self, state, operations)
        try:
            do(draft)
        except (*PRODUCT, KeyError, IndexError) as error:
            raise raised(error) from error
        draft.check(tickets)
        draft.tidy(tickets)
        return tuple(draft.ids)

    def _check_others(self, state: list[int], pair: int, move: Move) -> None:
        """Slots changed: whether every other ticket's writes still go to slots of its own."""
        draft = Draft(self, state)  # type: ignore[arg-type]
        try:
            draft.check(range(self.tickets))
        except Broken as broken:
            raise Broken(broken.kind, broken.text, move) from broken

    def _deaf(self, pair: int, busy: frozenset[int]) -> bool:
        return pair % self.scope.decodes in busy

    def _local(
        self, draft: Draft, t: int, g: Known, busy: frozenset[int]
    ) -> Iterator[tuple[Move, Callable[[Draft], None]]]:
        """What the workers do for a ticket without being told."""
        p = draft.prefill(t)
        if not g.submit_p:
            yield ("submit prefill", t), partial(Draft.submit_p, t=t)
        elif g.cancel_p:
            yield ("cancel prefill", t), partial(Draft.cancel_p, t=t)
        if p.queued and draft.free(self.ppool_at(g.pair)) >= self.pages_of(t):
            yield ("start", t), partial(Draft.start, t=t)
        if p.computing:
            yield ("compute", t), partial(Draft.compute, t=t)
        for flight in draft.flights(t):
            if flight.mode == "flying":
                yield ("wrote", t, flight.batch), partial(Draft.wrote, t=t, flight=flight)
        if self._deaf(g.pair, busy):
            if draft.decode(t).checking:
                yield ("verify", t), partial(Draft.verify, t=t)
            return
        view = draft.decode(t)
        if not g.submit_d:
            yield ("submit decode", t), partial(Draft.submit_d, t=t)
        elif g.cancel_d:
            yield ("cancel decode", t), partial(Draft.cancel_d, t=t)
        if view.stage == "waiting" and draft.free(self.dpool_at(g.pair)) >= self.pages_of(t):
            yield ("reserve", t), partial(Draft.reserve, t=t)
        if view.stage == "machine" and draft.wants(t):
            yield ("credit", t), partial(Draft.credit, t=t)
        if view.copies:
            yield ("copy", t), partial(Draft.copy, t=t)
        if view.stage == "entered":
            yield ("finish", t), partial(Draft.finish, t=t)

    def _timers(self, draft: Draft, t: int, g: Known) -> Iterator[tuple[Move, Callable[[Draft], None]]]:
        link = draft.link(g.pair)
        if draft.p_state(t) in ("SENDING", "COMPLETE") and link.state != "p_lost":
            yield ("nudge prefill", t), partial(Draft.nudge_p, t=t)
        if draft.d_state(t) not in ("", "ENTERED", "ENDED") and link.state != "d_lost":
            yield ("nudge decode", t), partial(Draft.nudge_d, t=t)
        if draft.d_state(t) == "DRAINING" and draft.p_state(t) == "STUCK":
            # In time only where *drained* cannot come; a deadline that passes before it does is the adversary's.
            yield ("overdue", t), partial(Draft.overdue, t=t)

    def _faults(self, draft: Draft, t: int, g: Known) -> list[tuple[Move, Callable[[Draft], None]]]:
        """What the adversary can do to a ticket now."""
        found: list[tuple[Move, Callable[[Draft], None]]] = []
        over = g.report_p is not None and g.report_d is not None and draft.decode(t).stage == "over"
        if not over and not g.left:
            found.append((("abort", t), partial(Draft.leave, t=t)))
        for flight in draft.flights(t):
            if flight.mode != "flying":
                continue
            found += [
                (("doubt", t, flight.batch), partial(Draft.doubt, t=t, flight=flight)),
                (("write fails", t, flight.batch), partial(Draft.write_fails, t=t, flight=flight)),
            ]
            if flight.live:
                found.append((("damage", t, flight.batch), partial(Draft.damaged, t=t, flight=flight)))
                found.append((("haunt", t, flight.batch), partial(Draft.haunt, t=t, flight=flight)))
        return found

    def open_requests(self, state: State) -> list[str]:
        """Attempts that have not ended for the gateway, or whose answer has not."""
        draft = Draft(self, state)
        known = {t: draft.known(t) for t in range(self.tickets)}
        return [
            name(t)
            for t, g in known.items()
            if g.pair >= 0
            and (None in (g.report_p, g.report_d) or draft.decode(t).stage in ("waiting", "entered"))
        ]

    def held(self, state: State) -> str:
        """What is not free, for a person."""
        draft = Draft(self, state)
        slots = sum(self.scope.slots - draft.slots_free(pair) for pair in range(self.pairs))
        first = self.globals + 3 * self.pairs
        workers = [f"prefill-{i}" for i in range(self.scope.prefills)]
        workers += [f"decode-{i}" for i in range(self.scope.decodes)]
        pages = {who: self.scope.pages - draft.free(first + i) for i, who in enumerate(workers)}
        held = [f"{slots} landing slot{'s' * (slots > 1)}"] if slots else []
        held += [f"{n} page{'s' * (n > 1)} of {who}" for who, n in pages.items() if n]
        return f"held for ever: {', '.join(held) or 'nothing, but a half is open'}"

    def good(self, state: State) -> bool:
        """Every request has ended on both sides, and nothing is held for any."""
        if any(state[self.slots_at(p)] not in self._all_free(state, p) for p in range(self.pairs)):
            return False
        draft = Draft(self, state)
        for t in range(self.tickets):
            ids = state[6 * t : 6 * t + 3]
            if ids[GT] == self.nobody[GT]:
                if draft.may_begin(t):
                    return False
            elif not self.remembered(("over", ids), partial(self._over, draft, t)):
                return False
        places = {self.ppool_at(p) for p in range(self.pairs)} | {self.dpool_at(p) for p in range(self.pairs)}
        return all(draft.free(place) == self.scope.pages for place in places)

    def _all_free(self, state: State, pair: int) -> set[int]:
        number = state[self.slots_at(pair)]
        if number not in self._slots_seen:
            self._slots_seen.add(number)
            if len(self.store.contents[number][1]) == self.scope.slots:
                self._slots_free.add(number)
        return self._slots_free

    @staticmethod
    def _over(draft: Draft, t: int) -> bool:
        g, p, d = draft.known(t), draft.prefill(t), draft.decode(t)
        if p.machine is not None or d.machine is not None or d.stage in ("waiting", "entered"):
            return False
        return g.report_p is not None and g.report_d is not None


def label(move: Move) -> str:
    """A move's name, as a saved step has it."""
    return re.sub(r"\s+", " ", repr(move))
