"""The invariant holds of the beginning, and every action keeps it: for any number of anything, by z3.

One query for each action and conjunct: the whole invariant before, the action's guard, and the conjunct's negation after it
must be impossible together. The one thing to know: an "unknown" counts as a failure, an action that can never happen as well
(vacuity), and of each conjunct it is said whether the proof needs it (redundancy).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import z3

from hermetic.proof.abstract import ACTIONS, HOSTILE, Action
from hermetic.proof.counterexample import found_in
from hermetic.proof.invariant import ALONE, CONJUNCTS, MOMENTS, PROMISES, Conjunct, Moment
from hermetic.proof.slips import SLIPS, mutated
from hermetic.proof.smt import language

MS = 10_000  # for one query
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Query:
    """That `action` keeps `conjunct`. `needs`: conjuncts before the action that this rests on (one sufficient set)."""

    action: str
    conjunct: str
    verdict: str  # holds, fails, unknown
    needs: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Need:
    """What becomes of the proof without one conjunct. `breaks`: what fails then; "" when the conjunct is redundant."""

    conjunct: str
    breaks: str


@dataclass
class InductionResult:
    """`queries`: those that z3 was asked; `untouched`: pairs of action and conjunct that share no relation, true by
    themselves. `counterexample`: in the protocol's own words; `failed`: (action, conjunct) of it."""

    mutant: str = ""
    queries: list[Query] = field(default_factory=list)
    untouched: int = 0
    beginning: bool = False  # the first states fulfil the invariant, and there are such
    implied: dict[str, bool] = field(
        default_factory=dict
    )  # promises that follow: whether the conjuncts imply them
    alone: bool = False  # the promises about pages hold even with a lying prefill and a broken transport
    needs: list[Need] = field(default_factory=list)
    possible: list[str] = field(default_factory=list)  # actions that can happen in a state of the invariant
    impossible: list[str] = field(default_factory=list)  # those that never can
    counterexample: str | None = None
    failed: tuple[str, str] | None = None
    seconds: float = 0.0

    @property
    def closed(self) -> bool:
        good = all(q.verdict == "holds" for q in self.queries)
        sound = good and self.beginning and self.alone and all(self.implied.values())
        return bool(self.queries) and bool(self.implied) and sound and not self.impossible

    @property
    def redundant(self) -> list[str]:
        return [need.conjunct for need in self.needs if not need.breaks]

    def lines(self) -> list[str]:
        """For a person."""
        said = [
            f"{len(CONJUNCTS)} conjuncts (implying {len(PROMISES)} promises of I1-I3, {len(MOMENTS)} more when bytes move), "
            f"{len(ACTIONS)} actions: {len(self.queries)} queries, {self.untouched} pairs share no relation, {self.seconds:.1f} s",
            "any number of requests, pages, slots, uses, messages and workers: "
            + ("every action keeps the invariant" if self.closed else "NOT proved"),
        ]
        if self.alone:
            said.append(
                f"{len(ALONE)} conjuncts, all of I1 among them, hold even if prefill lies and bytes go astray in slots"
            )
        if self.possible and not self.impossible:
            said.append(f"vacuity: the beginning and all {len(self.possible)} actions are possible")
        if self.impossible:
            said.append(f"vacuity: these can never happen: {', '.join(self.impossible)}")
        if self.needs:
            without = ", ".join(self.redundant) or "none"
            said.append(f"redundancy: each conjunct was taken out once; not needed: {without}")
        if self.counterexample:
            said += ["", self.counterexample]
        return said


class Induction:
    """The protocol (or a mutant of it) and its invariant, translated once."""

    def __init__(self, actions: Mapping[str, Action], conjuncts: Mapping[str, Conjunct]) -> None:
        self.actions, self.conjuncts = actions, conjuncts
        self.language = language()
        self.before = {name: self.language.conjunct(c, self.language.state) for name, c in conjuncts.items()}
        self._solvers: dict[str, tuple[Any, dict[str, Any]]] = {}

    def _solver(self, action: str) -> tuple[Any, dict[str, Any]]:
        """A solver that knows the action's guard and, each under its own name, the conjuncts; and the state after."""
        found = self._solvers.get(action)
        if found is None:
            what = self.actions[action]
            given = self.language.parameters(what)
            solver = z3.Solver()
            solver.set("timeout", MS)
            solver.add(*self.language.guard(what, self.language.state, given))
            for name, formula in self.before.items():
                solver.add(z3.Implies(z3.Bool(f"@{name}"), formula))
            found = self._solvers[action] = solver, self.language.after(what, self.language.state, given)
        return found

    def ask(self, action: str, conjunct: str, without: str = "") -> Query | None:
        """None: the action touches nothing that the conjunct speaks of."""
        solver, after = self._solver(action)
        if not self._touches(action, conjunct):
            return None
        then = self.language.conjunct(self.conjuncts[conjunct], after)
        solver.push()
        solver.add(z3.Not(then))
        verdict = solver.check(*(z3.Bool(f"@{name}") for name in self.conjuncts if name != without))
        needs = frozenset(str(b)[1:] for b in solver.unsat_core()) if verdict == z3.unsat else frozenset()
        solver.pop()
        return Query(action, conjunct, _word(verdict), needs)

    def _touches(self, action: str, conjunct: str) -> bool:
        """Whether an effect of the action changes a relation that the conjunct names."""
        changed = {line.replace("[", " ").split()[0] for line in self.actions[action].does}
        return any(name in self.conjuncts[conjunct].names for name in changed)

    def implied(self, conjunct: Conjunct, without: str = "") -> bool:
        """Whether z3 shows that the conjuncts (but `without`) imply this one."""
        solver = z3.Solver()
        solver.set("timeout", MS)
        solver.add(*(f for name, f in self.before.items() if name != without))
        solver.add(z3.Not(self.language.conjunct(conjunct, self.language.state)))
        return bool(solver.check() == z3.unsat)

    def beginning(self) -> bool:
        """The first states fulfil every conjunct, and there is one."""
        solver = z3.Solver()
        solver.set("timeout", MS)
        solver.add(*self.language.first())
        if solver.check() != z3.sat:
            return False
        solver.add(z3.Not(z3.And(*self.before.values())))
        return bool(solver.check() == z3.unsat)

    def possible(self, action: str) -> bool:
        """Whether z3 has a state of the invariant in which the action can happen."""
        solver, _ = self._solver(action)
        return bool(solver.check(*(z3.Bool(f"@{name}") for name in self.conjuncts)) == z3.sat)

    def moment(self, moment: Moment, without: str = "") -> Query:
        """That what a moment says follows from the invariant and the action's guard."""
        solver, _ = self._solver(moment.action)
        given = self.language.parameters(self.actions[moment.action])
        solver.push()
        solver.add(z3.Not(self.language.formula(moment.holds, self.language.state, given)))
        verdict = solver.check(*(z3.Bool(f"@{name}") for name in self.conjuncts if name != without))
        solver.pop()
        return Query(moment.action, moment.name, _word(verdict))

    def counterexample(self, query: Query) -> str:
        broken = self.conjuncts.get(query.conjunct) or MOMENTS[query.action]
        return found_in(self.language, self.actions[query.action], broken, self.conjuncts)


def _word(verdict: Any) -> str:
    return "holds" if verdict == z3.unsat else "fails" if verdict == z3.sat else "unknown"


def prove_induction(
    mutant: str | None = None, progress: Progress | None = None, full: bool = True
) -> InductionResult:
    """The whole proof; of a mutant, until its first counterexample. `full`: also what each conjunct is needed for."""
    started = time.perf_counter()
    say = progress or (lambda text: None)
    proof = Induction(ACTIONS if mutant is None else mutated(mutant), CONJUNCTS)
    result = InductionResult(mutant or "")
    result.beginning = proof.beginning()
    # Of a mutant only one action is another than in the proof.
    asked = list(proof.actions) if mutant is None else [SLIPS[mutant].action]
    for number, action in enumerate(asked):
        say(f"induction: action {number + 1} of {len(asked)}, {action}")
        for query in _queries(proof, action):
            if query is None:
                result.untouched += 1
                continue
            result.queries.append(query)
            if query.verdict == "fails" and result.counterexample is None:
                result.failed = action, query.conjunct
                result.counterexample = proof.counterexample(query)
                if mutant is not None:
                    break
        (result.possible if proof.possible(action) else result.impossible).append(action)
    if result.counterexample is None:
        result.alone = _alone()
        result.implied = {name: proof.implied(promise) for name, promise in PROMISES.items()}
        if full and mutant is None:
            result.needs = _redundancy(proof, result.queries, say)
    result.seconds = time.perf_counter() - started
    return result


def _queries(proof: Induction, action: str) -> Iterator[Query | None]:
    for conjunct in _in_order(proof.conjuncts):
        yield proof.ask(action, conjunct)
    if action in MOMENTS:
        yield proof.moment(MOMENTS[action])


def _in_order(conjuncts: Mapping[str, Conjunct]) -> list[str]:
    """Promises first: of what fails, they say most."""
    return sorted(conjuncts, key=lambda name: not conjuncts[name].promise)


def _alone() -> bool:
    """The conjuncts of `ALONE` by themselves, with every hostile action added."""
    proof = Induction({**ACTIONS, **HOSTILE}, {name: CONJUNCTS[name] for name in ALONE})
    asked = [proof.ask(action, conjunct) for action in proof.actions for conjunct in ALONE]
    return all(query is None or query.verdict == "holds" for query in asked)


def _redundancy(proof: Induction, queries: list[Query], say: Progress) -> list[Need]:
    """Take each conjunct out once: which action breaks which of the others then, or which promise is lost."""
    found = []
    for number, conjunct in enumerate(proof.conjuncts):
        say(f"induction: without conjunct {number + 1} of {len(proof.conjuncts)}, {conjunct}")
        found.append(Need(conjunct, _breaks(proof, queries, conjunct)))
    return found


def _breaks(proof: Induction, queries: list[Query], conjunct: str) -> str:
    unknown = ""
    for query in queries:
        if conjunct in query.needs and query.conjunct in proof.conjuncts and query.conjunct != conjunct:
            again = proof.ask(query.action, query.conjunct, without=conjunct)
            assert again is not None
            if again.verdict == "fails":
                return f"{query.action} does not keep {query.conjunct}"
            if again.verdict == "unknown":
                unknown = f"z3 does not know whether {query.action} keeps {query.conjunct}"
    if unknown:
        return unknown
    for promise in PROMISES.values():
        if not proof.implied(promise, without=conjunct):
            return f"nothing else implies {promise.promise} {promise.name}"
    for moment in MOMENTS.values():
        if proof.moment(moment, without=conjunct).verdict != "holds":
            return f"nothing else implies {moment.promise} {moment.name}"
    return ""


__all__ = ["Induction", "InductionResult", "Need", "Query", "prove_induction"]
