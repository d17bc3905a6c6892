"""Every step that the explorer takes on production objects is an instance of abstract actions: what ties proof to code.

`RefinedWorld` is the explorer's world with one thing added. After each move, before states are tidied up, the events of the
machines during it become abstract actions (`mapping.py`); these are played from the abstraction of the state before, every
guard is asked, and what results has to be the abstraction of the state after. The one thing to know: only what the protocol
says may be forgotten (messages, books of halves that are over) may be missing then, and bytes may differ in slots only, where
the adversary may put anything.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from hermetic.handoff.actions import Action
from hermetic.handoff.machine import Machine
from hermetic.proof.abstract import ACTIONS
from hermetic.proof.abstract import Action as Abstract
from hermetic.proof.abstraction import CUR, OLD, abstracted, page_of, use_of
from hermetic.proof.codec import Data, decode
from hermetic.proof.draft import Draft
from hermetic.proof.halves import DecodeHalf, PrefillHalf
from hermetic.proof.instances import footprint, looked_at
from hermetic.proof.interpret import Contents, Facts, NotAllowed, Phases, State
from hermetic.proof.mapping import (
    Call,
    Names,
    Took,
    decode_step,
    ended_at_prefill,
    prefill_step,
    unknown_at_decode,
    unknown_at_prefill,
)
from hermetic.proof.model import DOWN, PRODUCT, UP, Broken, Flight, raised
from hermetic.proof.model import State as Ids
from hermetic.proof.scopes import Scope
from hermetic.proof.vocabulary import ACTIVE, MESSAGES
from hermetic.proof.world import World

_PREFILL_BOOKS = ("known", "spent", "wrote", "written")
_DECODE_BOOKS = ("credited", "asked", "verified", "heard")
_OVER_AT_DECODE = ("draining", "quarantined", "ended")
Step = Callable[[State], Iterable[Call]]
"""Abstract actions, given the abstract state in which they begin."""


@dataclass(frozen=True)
class Abstractly:
    """One abstract step, with what its action looks at."""

    action: Abstract
    args: dict[str, Any]
    before: State
    after: State


@dataclass
class Tally:
    """What was checked. `distinct`: the abstract steps, by action, its parameters and what it looks at and changes."""

    transitions: int = 0
    actions: Counter[str] = field(default_factory=Counter)
    distinct: dict[Any, Abstractly] = field(default_factory=dict)
    keep: bool = True  # one of each distinct step, for z3

    @contextlib.contextmanager
    def noting(self, name: str, args: dict[str, Any], state: State) -> Iterator[None]:
        """Keep one of each different abstract step: what its action looks at, before and after."""
        action = ACTIONS[name]
        key = footprint(action, args, state) if self.keep else None
        if key is None or key in self.distinct:
            yield
            return
        seen = looked_at(action)
        before = state.only(seen)
        yield
        self.distinct[key] = Abstractly(action, args, before, state.only(seen))


class _Watch:
    """A machine's steps, as its observer sees them."""

    def __init__(self) -> None:
        self.took: list[Took] = []

    def stepped(
        self, machine: Machine[Any], event: str, args: tuple[Any, ...], before: Any, actions: list[Action]
    ) -> None:
        message = args[0] if event == type(args[0] if args else None).__name__ else None
        self.took.append(Took(event, args, message, before.name, machine.state.name, tuple(actions)))


class Watched(Draft):
    """A draft that keeps what happens in it as abstract steps."""

    def __init__(self, world: RefinedWorld, state: Ids, operations: Any = None) -> None:
        super().__init__(world, state, operations)
        self.steps: list[Step] = []
        self._ending: dict[tuple[int, int], Flight] = {}
        self.refined = world

    def _names(self, t: int, present: bool) -> Names:
        pair = self.known(t).pair
        decodes = self.world.scope.decodes
        return Names(
            t,
            self.world.pages_of(t),
            lambda slot, number: use_of(pair, (slot, number), t, present),
            lambda i: page_of(pair % decodes, t, i),
            lambda i: page_of(pair // decodes, t, i),
        )

    def _now(self, *calls: Call) -> None:
        self.steps.append(lambda state: calls)

    # ----------------------------------------------------------- steps of the halves

    def p_step(self, t: int, event: str, *args: Any) -> None:
        before = self.prefill(t)
        took = self.refined.watch(
            ("p", t, before, event, args), lambda: PrefillHalf(before, t, self.world.pages_of(t)), event, args
        )
        names = self._names(t, self.link(self.known(t).pair).welcomed)
        flight: tuple[tuple[int, Any], ...] = ()
        if event == "wrote":
            ended = self._ending[t, args[0]]
            names = self._names(t, ended.live)
            flight = tuple((page, decode(use)) for page, use in ended.pages)
        for one in took:
            self.steps.append(
                lambda state, o=one, n=names, f=flight: prefill_step(o, n, state, f)  # type: ignore[misc]
            )
        up = len(self.at(t, UP))
        super().p_step(t, event, *args)
        if not took and before.machine is None:
            if event == "message":
                said = tuple(decode(x) for x in self.at(t, UP)) if len(self.at(t, UP)) > up else ()
                self._now(*unknown_at_prefill(t, before.ended is not None, decode(args[0]), said))
            elif before.ended is None and self.prefill(t).ended is not None:
                self._now(*ended_at_prefill(t))

    def d_step(self, t: int, event: str, *args: Any) -> None:
        before = self.decode(t)
        slots = self.contents[self.ids[self.world.slots_at(self.known(t).pair)]]
        took = self.refined.watch(
            ("d", t, before, slots, event, args),
            lambda: DecodeHalf(before, slots, t, self.world.pages_of(t)),
            event,
            args,
        )
        names = self._names(t, True)
        if event == "copy":
            page, use = before.copies[0]
            copied = {"t": t, "i": page, "u": names.use(*decode(use)), "p": names.page(page)}
            self._now(("copy", copied))
        for one in took:
            self.steps.append(lambda state, o=one, n=names: decode_step(o, n, state))  # type: ignore[misc]
        super().d_step(t, event, *args)
        after = self.decode(t)
        if before.stage in ("none", "waiting") and after.stage == "over":
            self._now(("never_reserved", {"t": t}))
        elif before.stage == "entered" and after.stage == "over":
            self._now(("finish", {"t": t}))
        elif event == "message" and before.machine is None:
            said = tuple(decode(x) for x in self.at(t, DOWN))
            self._now(*unknown_at_decode(t, said))

    # ----------------------------------------------------------------- around them

    def _end_flight(self, t: int, flight: Flight) -> None:
        self._ending[t, flight.batch] = flight
        super()._end_flight(t, flight)

    def fence(self, pair: int) -> None:
        self._now(("fence", {"g": (CUR, pair)}))
        super().fence(pair)
        self.steps.append(lambda state: _former(state, pair))

    def drop_segment(self, pair: int) -> None:
        self._now(("drop", {"g": (OLD, pair)}))
        super().drop_segment(pair)

    def crash_prefill(self, worker: int) -> None:
        self._now(("prefill_dies", {"n": worker}))
        super().crash_prefill(worker)

    def crash_decode(self, worker: int) -> None:
        self._now(("decode_dies", {"m": worker}))
        for pair in range(self.world.pairs):
            if pair % self.world.scope.decodes == worker:
                self.steps.append(lambda state, p=pair: _former(state, p))  # type: ignore[misc]
        super().crash_decode(worker)

    # ----------------------------------------------------------------------- the check

    def verdict(self, before: State) -> str | None:
        """What is wrong, or None."""
        state, tally = before, self.refined.tally
        try:
            for step in self.steps:
                for name, args in step(state):
                    tally.actions[name] += 1
                    with tally.noting(name, args, state):
                        state.take(name, **args)
        except NotAllowed as refused:
            return str(refused)
        except KeyError as unknown:
            return f"a thing that the abstract protocol does not know here: {unknown}"
        return self._differs(state, abstracted(self))

    def _differs(self, claimed: State, after: State) -> str | None:
        """Whether the machines have come where the abstract actions lead."""
        for name, there in claimed.now.items():
            is_so = after.now[name]
            match there:
                case Phases():
                    for t in is_so:
                        if there[t] != is_so[t]:
                            return f"{name} of {t} is {is_so[t]}, and by its actions would be {there[t]}"
                case Contents():
                    for place in sorted(is_so.keys() | there.keys(), key=repr):
                        if is_so[place] != there[place] and not _may_differ(name, place, after):
                            return f"{name}: {sorted(is_so[place])} is in {place}, not {sorted(there[place])}"
                case Facts():
                    if more := is_so - there:
                        return f"{name} holds for {min(more, key=repr)}, which no action has brought about"
                    for fact in there - is_so:
                        if not _may_be_forgotten(name, fact, after):
                            return f"{name} holds for {fact} by its actions, and does not"
        return None


def _may_differ(name: str, place: Any, after: State) -> bool:
    """Bytes: those in a slot may be anything (the adversary's); those in a page that nobody holds are not remembered."""
    if name == "lies":
        return True
    return not any(page == place for page, _ in after.now["leased" if name == "holds" else "kept"])


def _may_be_forgotten(name: str, fact: Any, after: State) -> bool:
    """As the protocol's actions of forgetting say."""
    t = fact[0] if isinstance(fact, tuple) else fact
    now = after.now
    if name in MESSAGES:
        return True
    if name in _PREFILL_BOOKS:
        return now["prefill"][t] not in ACTIVE
    if name in _DECODE_BOOKS:
        return now["decode"][t] in _OVER_AT_DECODE or (name != "verified" and now["decode"][t] == "entered")
    if name in ("went_on", "quiet"):
        return now["decode"][t] == "ended"
    if name == "given":
        return fact not in now["given"]  # nothing speaks of it any more
    if name == "doubtful":
        return not any(b == fact[0] and u == fact[1] for b, _, u, _ in now["writing"])
    return name == "final" and not any(q == fact for q, _ in now["kept"])


def _former(state: State, pair: int) -> tuple[Call, ...]:
    """A segment that is fenced is a former one from now on, and the next is the present one: nothing but names changes."""
    owners = dict(state.now["given"])

    def renamed(x: Any) -> Any:
        if isinstance(x, tuple) and x[:2] == (CUR, pair):
            if len(x) == 4 and x in owners:
                return (OLD, *x[1:], owners[x])
            return (OLD, *x[1:])
        return x

    for name, facts in state.now.items():
        if isinstance(facts, Facts):
            state.now[name] = Facts(
                renamed(f) if name in ("used", "quarantined", "fenced") else _each(renamed, f) for f in facts
            )
    state.now["used"] = Facts(u for u in state.now["used"] if u[:2] != (OLD, pair))
    lies = state.now["lies"]
    state.now["lies"] = Contents({s: rows for s, rows in lies.items() if s[:2] != (CUR, pair)})
    return ()


def _each(renamed: Callable[[Any], Any], fact: Any) -> Any:
    return tuple(renamed(x) for x in fact) if isinstance(fact, tuple) else fact


class RefinedWorld(World):
    """The explorer's world; a step that is no instance of abstract actions is Broken, as "refinement".

    `every`: look at every transition, not once at each different local one."""

    def __init__(self, scope: Scope, reduce: bool = True, every: bool = False, keep: bool = True) -> None:
        super().__init__(scope, reduce)
        self.tally = Tally(keep=keep)
        self._every = every
        self._took: dict[Any, list[Took]] = {}
        self._before: tuple[Ids, State] | None = None

    def expand(self, state: Ids) -> Any:
        if self._every:
            self._memo = {k: v for k, v in self._memo.items() if k[0] not in ("moves", "common", "crash")}
        return super().expand(state)

    def watch(self, key: Any, half: Callable[[], Any], event: str, args: tuple[Data, ...]) -> list[Took]:
        """What machines see during this step of a half."""
        found = self._took.get(key)
        if found is None:
            watching = _Watch()
            # What product code raises here, the step itself is about to raise, and to say.
            with mock.patch.object(Machine, "observer", watching), contextlib.suppress(*PRODUCT):
                getattr(half(), event)(*(decode(a) for a in args))
            found = self._took[key] = watching.took
        return found

    def _done(self, state: Ids, do: Any, tickets: Any, operations: Any = None) -> Ids:
        draft = Watched(self, state, operations)
        try:
            getattr(draft, do.func.__name__)(*do.args, **do.keywords)  # as Watched has it
        except (*PRODUCT, KeyError, IndexError) as error:
            raise raised(error) from error
        draft.check(tickets)
        self._refine(state, draft)
        draft.tidy(tickets)
        return tuple(draft.ids)

    def _refine(self, state: Ids, draft: Watched) -> None:
        if self._before is None or self._before[0] != state:
            before = abstracted(Draft(self, state))
            broken = before.broken()
            if broken:
                raise Broken("refinement", f"a state that breaks {broken[0].name}: {broken[0].says}")
            self._before = state, before
        self.tally.transitions += 1
        wrong = draft.verdict(self._before[1].copy())
        if wrong is not None:
            raise Broken("refinement", wrong)
