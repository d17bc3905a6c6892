"""One ticket's share of a state, as one small number: what the compiled search is made of (see compiled.py).

A state of `world.py` with one pair of workers falls apart into what each ticket has (its six components, its slots and the
bytes in them, its pages at both workers), the link and the adversary's budget. What a ticket can do depends on its own part
and on little else (`Env`), so it is asked of the world once, with somebody else holding what others hold, and remembered.

The one thing to know: nothing of the protocol stands here. A part is turned into a state of the world, the world makes its
moves there, and what comes out is a part again. Uses of slots are numbered anew in each part (they are compared with those
of the same ticket only, and only for equality), and slots have no order: which free one is granted is a choice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from hermetic.kv.pool import Kind
from hermetic.proof.codec import Data
from hermetic.proof.model import ATTEMPTS, DOWN, DT, FL, GT, PT, UP, Broken, Flight, Known, State
from hermetic.proof.part import LINKS, OTHER, OWN, SHARED, Env, Made, Pages, Part, changed, named
from hermetic.proof.scopes import FAULTS, Scope
from hermetic.proof.world import COSTS, Draft, World


class Parts:
    """Parts by number, and what the world says about each. Part 0 is that of a ticket that has not begun."""

    def __init__(self, scope: Scope, any_slot: bool = True) -> None:
        if scope.prefills * scope.decodes != 1:
            raise ValueError("parts are of scopes with one pair of workers")
        self.scope, self.world, self.any_slot = scope, World(scope), any_slot
        self.contents = self.world.store.contents
        self.turns = (
            list(itertools.permutations(range(scope.slots))) if any_slot else [tuple(range(scope.slots))]
        )
        plenty = tuple(
            9 if scope.faults.get(f) else 0 for f in FAULTS
        )  # whether it is left is asked elsewhere
        self._plenty = self.world.store.id((*plenty, 99))
        self._spent = self.world.store.id((0,) * (len(FAULTS) + 1))
        self.parts: list[Part] = []
        self.turned: list[tuple[int, ...]] = []  # by part: its number with the slots renamed by each turn
        self._numbers: dict[Part, int] = {}
        self._named: dict[int, frozenset[tuple[int, int]]] = {}  # by component
        self._empty = (
            *(self._nobody() * self.world.tickets),
            *self.world.initial()[6 * self.world.tickets :],
        )
        self.none = self.number(Part(0, self._nobody(), (0,) * scope.slots))

    def _nobody(self) -> tuple[int, ...]:
        empty = self.world.nobody
        return (empty[PT], empty[DT], empty[GT], empty[UP], empty[UP], empty[UP])

    def number(self, part: Part) -> int:
        """The part's number; all its namesakes with other slots get theirs at the same time."""
        known = self._numbers.get(part)
        if known is not None:
            return known
        family = [self._renamed(part, turn) for turn in self.turns]
        for one in family:
            if one not in self._numbers:
                self._numbers[one] = len(self.parts)
                self.parts.append(one)
                self.turned.append(())
        for one in family:
            number = self._numbers[one]
            if not self.turned[number]:
                self.turned[number] = tuple(self._numbers[self._renamed(one, turn)] for turn in self.turns)
        return self._numbers[part]

    def begun(self, size: int) -> int:
        six = list(self._nobody())
        six[GT] = self.world.store.id(tuple(Known(pair=0)))
        return self.number(Part(size, tuple(six), (0,) * self.scope.slots))

    # ------------------------------------------------------------------ to the world and back

    def _place(self, size: int) -> tuple[int, int]:
        """A ticket with a prompt of this size, and another one that stands for all others."""
        t = ATTEMPTS * self.scope.prompts.index(size)
        return t, (t + 1 if t + 1 < self.world.tickets else t - 1)

    def state(self, number: int, env: Env) -> tuple[State, int]:
        """A state of the world in which this part's ticket is alone with somebody who holds what `env` says; the ticket."""
        part, world, store = self.parts[number], self.world, self.world.store
        t, f = self._place(part.size)
        ids = list(self._empty)
        ids[6 * t : 6 * t + 6] = part.six
        if env.ghost:
            ids[6 * f + GT] = store.id(tuple(Known(pair=0)))
            ids[6 * f + FL] = store.id((tuple(Flight(1, (), True, "ghost")),))
        mine = {slot for slot, _ in part.granted}
        theirs = {s for s in range(self.scope.slots) if env.slots >> s & 1} - mine
        granted = tuple(sorted([(s, ("K", t)) for s in mine] + [(s, ("K", f)) for s in theirs]))
        free = tuple(s for s in range(self.scope.slots) if s not in mine | theirs)
        ids[world.slots_at(0)] = store.id((part.uses, free, granted, part.quarantined))
        memory: list[Data] = [None] * self.scope.slots
        for slot, content in part.lies:
            memory[slot] = self._absolute(content, t, f)
        ids[world.mem_at(0)] = store.id(tuple(memory))
        ids[world.link_at(0)] = store.id(tuple(LINKS[env.link]))
        ids[world.ppool_at(0)] = store.id(self._pool(part.prefill, env.prefill, t, f))
        ids[world.dpool_at(0)] = store.id(self._pool(part.decode, env.decode, t, f))
        ids[-1] = self._plenty if env.faults else self._spent
        return tuple(ids), t

    def _pool(self, pages: Pages, others: int, t: int, f: int) -> Data:
        count = len(pages.lies)
        contents = [self._absolute(c, t, f) for c in pages.lies] + [None] * (self.scope.pages - count)
        held = [(t, kind, which) for kind, which in pages.held]
        if others:
            held.append((f, int(Kind.RECEIVE), tuple(range(count, count + others))))
        tables = ((t, pages.table, pages.tagged),) if pages.table else ()
        readings = tuple((t, *reading) for reading in pages.readings)
        return ((0,) * self.scope.pages, tuple(sorted(held)), tables, tuple(contents), readings)

    @staticmethod
    def _absolute(content: Data, t: int, f: int) -> Data:
        return content and ("K", t if content[0] == OWN else f, *content[1:])

    def part(self, state: State, t: int) -> int:
        """The part of a ticket in a state of the world."""
        world, contents = self.world, self.contents
        six = tuple(state[6 * t : 6 * t + 6])
        if contents[six[GT]][0] < 0:
            return self.none
        uses, _, granted, quarantined = contents[state[world.slots_at(0)]]
        mine = tuple((s, uses[s]) for s, key in granted if key == ("K", t))
        slots = {s for s, _ in mine}
        memory = contents[state[world.mem_at(0)]]
        lies = tuple((s, self._relative(memory[s], t)) for s in sorted(slots))
        part = Part(
            world.pages_of(t),
            six,
            uses,
            mine,
            tuple(s for s in quarantined if s in slots),
            lies,
            self._pages(contents[state[world.ppool_at(0)]], t),
            self._pages(contents[state[world.dpool_at(0)]], t),
        )
        return self.number(self._dense(part))

    @staticmethod
    def _relative(content: Data, t: int) -> Data:
        return content and (OWN if content[1] == t else OTHER, *content[2:])

    def _pages(self, pool: Data, t: int) -> Pages:
        _, held, tables, contents, readings = pool
        table, tagged = next(((pages, tagged) for u, pages, tagged in tables if u == t), ((), ()))
        read = tuple((b, i, page) for u, b, i, page in readings if u == t)
        leases = [(kind, pages) for u, kind, pages in held if u == t]
        order = dict.fromkeys(
            (*table, *(page for _, _, page in read), *(p for _, pages in leases for p in pages))
        )
        names = {page: n for n, page in enumerate(order)}
        return Pages(
            tuple(sorted((kind, tuple(sorted(names[p] for p in pages))) for kind, pages in leases)),
            tuple(names[p] for p in table),
            tagged,
            tuple(self._relative(contents[p], t) for p in order),
            tuple(sorted((b, i, names[page]) for b, i, page in read)),
        )

    def _alone(self, before: State, after: State, t: int) -> None:
        """What others hold is as it was: a step of a ticket touches nothing of another's."""
        world, contents = self.world, self.contents
        slots = [[x for x in contents[s[world.slots_at(0)]][2] if x[1] != ("K", t)] for s in (before, after)]
        if slots[0] != slots[1]:
            raise Broken("I3", "a step of one ticket changed who has another's slots")
        for place in (world.ppool_at(0), world.dpool_at(0)):
            counts = [sum(len(x[2]) for x in contents[s[place]][1] if x[0] != t) for s in (before, after)]
            if counts[0] != counts[1]:
                raise Broken("I3", "a step of one ticket changed who has another's pages")

    # ------------------------------------------------------------------------ names of slots

    def _components(self, part: Part, change: Callable[[Data], Data]) -> tuple[int, ...]:
        """The six with every use of a slot renamed; what has no order is sorted again."""
        store, six = self.world.store, list(part.six)
        for what in range(6):
            content = changed(self.contents[six[what]], change)
            if what in (UP, DOWN):
                content = tuple(sorted(content, key=repr))
            elif what == FL:
                content = tuple(sorted(content))
            six[what] = store.id(content)
        return tuple(six)

    def _renamed(self, part: Part, turn: tuple[int, ...]) -> Part:
        if turn == self.turns[0]:
            return part
        uses = [0] * len(turn)
        for slot, use in enumerate(part.uses):
            uses[turn[slot]] = use
        return part._replace(
            six=self._components(part, lambda use: ("U", turn[use[1]], use[2])),
            uses=tuple(uses),
            granted=tuple(sorted((turn[s], use) for s, use in part.granted)),
            quarantined=tuple(sorted(turn[s] for s in part.quarantined)),
            lies=tuple(sorted((turn[s], content) for s, content in part.lies)),
        )

    def _dense(self, part: Part) -> Part:
        """Uses of each slot numbered 1, 2, .. in their order: a use that nothing names any more is forgotten."""
        named: set[tuple[int, int]] = set(part.granted)
        for number in part.six:
            named |= self._uses(number)
        ranks: dict[tuple[int, int], int] = {}
        uses = [0] * self.scope.slots
        for slot, use in sorted(named):
            uses[slot] += 1
            ranks[slot, use] = uses[slot]
        if all(use == rank for (_, use), rank in ranks.items()):
            return part._replace(uses=tuple(uses))
        return part._replace(
            six=self._components(part, lambda use: ("U", use[1], ranks[use[1:]])),
            uses=tuple(uses),
            granted=tuple((s, ranks[s, use]) for s, use in part.granted),
        )

    def _uses(self, number: int) -> frozenset[tuple[int, int]]:
        found = self._named.get(number)
        if found is None:
            found = self._named[number] = frozenset(named(self.contents[number]))
        return found

    # ---------------------------------------------------------------------------- questions

    def moves(self, number: int, env: Env) -> tuple[list[Made], bool]:
        """What this ticket can do. The second: it is quiet, and its slots are in quarantine."""
        found: dict[tuple[int, int], Made] = {}
        quiet = False
        for turn, back in zip(range(len(self.turns)), self._back(), strict=True):
            if turn and not self.needs(number)[2]:
                break
            mask = sum(1 << self.turns[turn][s] for s in range(self.scope.slots) if env.slots >> s & 1)
            made, quiet = self._moves(self.turned[number][turn], env._replace(slots=mask))
            for one in made:
                to = self.turned[one.to][back] if one.to >= 0 else -1
                found.setdefault((one.fault, to), one._replace(to=to))
        return list(found.values()), quiet

    def _back(self) -> list[int]:
        inverse = [tuple(turn.index(s) for s in range(len(turn))) for turn in self.turns]
        return [self.turns.index(turn) for turn in inverse]

    def _moves(self, number: int, env: Env) -> tuple[list[Made], bool]:
        state, t = self.state(number, env)
        world = self.world
        busy = frozenset({0}) if env.busy or self.contents[state[6 * t + 1]][3] else frozenset[int]()
        moves, quiet = world._ticket_moves(state, t, 0, busy, world._where(t, 0))
        found = []
        for move, calm, changes, operations, broken in moves:
            fault = -1 if calm else FAULTS.index(COSTS[move[0]])
            to = -1
            if broken is None:
                after = list(state)
                for index, content in changes:
                    after[index] = content
                try:
                    for place, op, args in operations:
                        after[place] = world.pages_after(after[place], place, op, args)
                    self._alone(state, tuple(after), t)
                    to = self.part(tuple(after), t)
                except Broken as error:
                    broken = Broken(error.kind, error.text, move)
            found.append(Made(fault, to, move, broken))
        return found, quiet

    def needs(self, number: int) -> tuple[bool, bool, bool]:
        """Whether free pages at prefill, at decode, and free slots make a difference to it."""
        six = self.parts[number].six
        p, d = self.contents[six[0]], self.contents[six[1]]
        machine = d[0]
        landing = machine is not None and ("E", "d", "LANDING") in machine
        return bool(p[3]), d[1] == "waiting", landing

    def shared(self, kind: str, number: int, link: int) -> tuple[int, Broken | None]:
        """What a crash, a fence, a greeting, a welcome or a silence makes of a part."""
        state, t = self.state(number, Env(link=link))
        try:
            after = self.world._done(state, SHARED[kind], (t,))
        except Broken as broken:
            return -1, broken
        return self.part(after, t), None

    def link_after(self, kind: str, link: int) -> int:
        state, _ = self.state(self.begun(self.scope.prompts[0]), Env(link=link))
        draft = Draft(self.world, state)
        SHARED[kind](draft)
        return LINKS.index(draft.link(0))

    def ghosts(self, number: int, link: int) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
        """Bytes of this ticket that come once more: (its part then, (slot, page) that they hit)."""
        state, t = self.state(number, Env(link=link))
        found = []
        for flight in Draft(self.world, state).flights(t):
            if flight.mode == "ghost":
                after = self.world._done(state, lambda d, f=flight: d.strike(t, f), (t,))  # type: ignore[misc]
                hits = tuple((use[1], page) for page, use in flight.pages) if flight.live else ()
                found.append((self.part(after, t), hits))
        return found

    def struck(self, number: int, slot: int, page: int) -> int:
        """A part after bytes of another ticket's page came into one of its slots."""
        state, t = self.state(number, Env())
        ids, (_, f) = list(state), self._place(self.parts[number].size)
        ghost = Flight(1, ((page, ("U", slot, 1)),), True, "ghost")
        ids[6 * f + GT] = self.world.store.id(tuple(Known(pair=0)))
        ids[6 * f + FL] = self.world.store.id((tuple(ghost),))
        return self.part(self.world._done(tuple(ids), lambda d: d.strike(f, ghost), (t,)), t)

    def begins(self, number: int) -> tuple[int, int] | None:
        """When the gateway begins another attempt after this one: the parts of both then."""
        known = Known(*self.contents[self.parts[number].six[GT]])
        if number == self.none or known.report_p is None or known.report_d is None:
            return None
        state, t = self.state(number, Env())
        draft = Draft(self.world, state)
        if not draft.may_begin(t + 1):
            return None
        after = self.world._done(state, lambda d: d.begin(t + 1, 0), (t, t + 1))
        return self.part(after, t), self.part(after, t + 1)

    def is_over(self, number: int) -> bool:
        if number == self.none:
            return True
        part = self.parts[number]
        known = Known(*self.contents[part.six[GT]])
        if part.granted or part.prefill.held or part.decode.held or None in (known.report_p, known.report_d):
            return False
        state, t = self.state(number, Env())
        return World._over(Draft(self.world, state), t)

    def modes(self, number: int) -> tuple[bool, bool]:
        """Whether it is between a copy and its hash, and whether bytes of it may come once more."""
        six = self.parts[number].six
        return bool(self.contents[six[1]][3]), any(f[3] == "ghost" for f in self.contents[six[FL]])


__all__ = ["Parts"]
