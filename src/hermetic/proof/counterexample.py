"""A state in which an action breaks a conjunct, as small as it can be, in the protocol's own words.

z3's model is made smaller sort by sort, then fact by fact, and then it is played on the interpreter: only what both agree on
is shown. The one thing to know: the state before need not be reachable; it fulfils the invariant, and that is all that is
known of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import z3

from hermetic.proof.abstract import Action
from hermetic.proof.interpret import State
from hermetic.proof.invariant import Conjunct, Moment
from hermetic.proof.smt import Chosen, Language
from hermetic.proof.vocabulary import CONTENTS, FIXED, FUNCTIONS, PHASES, RELATIONS

LARGEST = 4  # elements of one sort in what is shown
LETTER = {"index": "", "page": "d", "source": "p", "segment": "segment ", "rows": "rows "}


def found_in(
    language: Language, action: Action, conjunct: Conjunct | Moment, conjuncts: Mapping[str, Conjunct]
) -> str:
    """The text. There must be a counterexample."""
    shrinking = _Shrinking(language, action, conjunct, conjuncts)
    before, args = shrinking.state()
    return told(before, action, args, conjunct)


def told(before: State, action: Action, args: Mapping[str, Any], conjunct: Conjunct | Moment) -> str:
    """`before`, the action, and what does not hold after it. Raises AssertionError where interpreter and z3 differ."""
    following = before.after(action, **args)
    holds = before.holds(conjunct, args) if isinstance(conjunct, Moment) else following.holds(conjunct)
    assert not holds, "z3's counterexample is none on the interpreter"
    given = ", ".join(f"{name} = {_shown(value)}" for name, value in args.items())
    lines = [
        "counterexample to induction",
        f"  before: {_sentences(before)}",
        f"  then:   {action.says}",
        f"          [{action.name}: {given}]",
    ]
    changed = _changed(before, following)
    if changed:
        lines.append(f"  after:  {changed}")
    kind = f"{conjunct.promise} " if conjunct.promise else ""
    lines.append(f"  broken: {kind}{conjunct.name}: {conjunct.says}")
    return "\n".join(lines)


class _Shrinking:
    def __init__(
        self,
        language: Language,
        action: Action,
        conjunct: Conjunct | Moment,
        conjuncts: Mapping[str, Conjunct],
    ) -> None:
        self.language, self.action = language, action
        self.given = language.parameters(action)
        self.solver = z3.Solver()
        self.solver.set("timeout", 10_000)
        self.solver.add(*(language.conjunct(c, language.state) for c in conjuncts.values()))
        self.solver.add(*language.guard(action, language.state, self.given))
        if isinstance(conjunct, Moment):
            self.solver.add(z3.Not(language.formula(conjunct.holds, language.state, self.given)))
        else:
            after = language.after(action, language.state, self.given)
            self.solver.add(z3.Not(language.conjunct(conjunct, after)))
        self.elements: dict[str, list[Any]] = {}

    def state(self) -> tuple[State, dict[str, Any]]:
        assert self.solver.check() == z3.sat
        for sort in self.language.sorts:
            self._fewest(sort)
        assert self.solver.check() == z3.sat
        self.model = self.solver.model()
        self._fewest_facts()
        assert self.solver.check() == z3.sat
        return self._read(self.solver.model())

    def _fewest(self, sort: str) -> None:
        """As few elements of this sort as possible, each under a name."""
        for size in range(1, LARGEST + 1):
            names = [z3.Const(f"{sort}.{n}", self.language.sorts[sort]) for n in range(size)]
            x = z3.Const(f"{sort}.x", self.language.sorts[sort])
            self.solver.push()
            self.solver.add(z3.ForAll([x], z3.Or(*(x == n for n in names))))
            if size > 1:
                self.solver.add(z3.Distinct(*names))
            if self.solver.check() == z3.sat:
                self.elements[sort] = names
                return
            self.solver.pop()
        raise AssertionError(f"no counterexample with {LARGEST} elements of {sort}")

    def _places(self, sorts: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
        return product(*(self.elements[s] for s in sorts))

    def _fewest_facts(self) -> None:
        """Whatever need not be so is not so; attempts are no further than they need to be."""
        for name, (sort, phases) in PHASES.items():
            for place in self.elements[sort]:
                value = self.language.state[name](place)
                any(self._prefer(value == self.language.phase[name][phase]) for phase in phases)
        for name, relation in {**RELATIONS, **FIXED}.items():
            symbol = self.language.state[name] if name in RELATIONS else self.language.fixed[name]
            for places in self._places(relation.sorts):
                self._prefer(z3.Not(symbol(*places)))

    def _prefer(self, formula: Any) -> bool:
        """Keep this, if there is a counterexample with it. One that is known may be such already."""
        if z3.is_true(self.model.eval(formula, model_completion=True)):
            self.solver.add(formula)
            return True
        self.solver.push()
        self.solver.add(formula)
        if self.solver.check() == z3.sat:
            self.model = self.solver.model()
            return True
        self.solver.pop()
        return False

    # -------------------------------------------------------------------- reading

    def _read(self, model: Any) -> tuple[State, dict[str, Any]]:
        self.names: dict[str, Any] = {}
        for sort, elements in self.elements.items():
            for number, element in enumerate(elements):
                self.names[str(model.eval(element))] = self._name(sort, number)
        for number, use in enumerate(self.elements["use"]):
            slot = self._value(model, self.language.functions["slot"](use))
            self.names[str(model.eval(use))] = f"{slot} (use {number + 1})"
        functions = {name: self._function(model, name) for name in FUNCTIONS}
        needed = self._facts(model, self.language.fixed["needed"], FIXED["needed"].sorts)
        segments = [self._value(model, g) for g in self.elements["segment"]]
        state = State.first(functions, needed, segments)
        for name, relation in RELATIONS.items():
            facts = self._facts(model, self.language.state[name], relation.sorts)
            for fact in facts:
                if name in CONTENTS:
                    state.now[name][fact[0]] = state.now[name][fact[0]] | {fact[1]}
                else:
                    state.now[name].add(fact[0] if len(fact) == 1 else fact)
        for name, (sort, _) in PHASES.items():
            for attempt in self.elements[sort]:
                phase = str(model.eval(self.language.state[name](attempt), model_completion=True))
                state.now[name][self._value(model, attempt)] = phase.partition(":")[2]
        args = {name: self._argument(model, value) for name, value in self.given.items()}
        return state, args

    def _name(self, sort: str, number: int) -> str:
        if sort == "attempt":
            return chr(65 + number)
        return f"{LETTER.get(sort, sort + ' ')}{number}"

    def _value(self, model: Any, term: Any) -> Any:
        return self.names[str(model.eval(term, model_completion=True))]

    def _argument(self, model: Any, value: Any) -> Any:
        if isinstance(value, Chosen):
            facts = self._facts(model, value.symbol, value.sorts)
            return frozenset(fact[0] if len(fact) == 1 else fact for fact in facts)
        return self._value(model, value)

    def _facts(self, model: Any, symbol: Any, sorts: tuple[str, ...]) -> set[tuple[Any, ...]]:
        return {
            tuple(self._value(model, p) for p in places)
            for places in self._places(sorts)
            if z3.is_true(model.eval(symbol(*places), model_completion=True))
        }

    def _function(self, model: Any, name: str) -> Any:
        sorts, _ = FUNCTIONS[name]
        symbol = self.language.functions[name]
        table = {
            tuple(self._value(model, p) for p in places): self._value(model, symbol(*places))
            for places in self._places(sorts)
        }
        return lambda *places: table[places]


def _sentence(name: str, fact: Any) -> str:
    relation = RELATIONS[name]
    places = fact if len(relation.sorts) > 1 else (fact,)
    return relation.says.format(*places)


def _sentences(state: State) -> str:
    said = []
    for name, (_, phases) in PHASES.items():
        for attempt, phase in sorted(state.now[name].items()):
            if phase != phases[0]:
                said.append(f"{name} of {attempt} is {phase}")
    for name, facts in state.facts().items():
        if name not in PHASES:
            said += [_sentence(name, fact) for fact in sorted(facts, key=str)]
    return "\n          ".join(said) or "nothing has begun"


def _changed(before: State, after: State) -> str:
    said = []
    old, new = before.facts(), after.facts()
    for name in RELATIONS:
        said += [_sentence(name, fact) for fact in sorted(new[name] - old[name], key=str)]
        said += [f"no longer: {_sentence(name, fact)}" for fact in sorted(old[name] - new[name], key=str)]
    for name in PHASES:
        said += [f"{name} of {attempt} is {phase}" for attempt, phase in sorted(new[name] - old[name])]
    return "\n          ".join(said)


def _shown(value: Any) -> str:
    return "{" + ", ".join(sorted(map(str, value))) + "}" if isinstance(value, frozenset) else str(value)
