"""Steps between finite states, put to z3: do the action's formulas hold between them?

The interpreter has said so already, by Python; this asks the translation that the proof uses, so that what was proved and
what was played cannot drift apart. The one thing to know: relations that the action does not name are left out, because
neither guard nor effects can see them.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from typing import Any

import z3

from hermetic.proof.abstract import Action
from hermetic.proof.interpret import Contents, Phases, State
from hermetic.proof.smt import Chosen, Language, language
from hermetic.proof.vocabulary import CONTENTS, FIXED, FUNCTIONS, PHASES, RELATIONS, SORTS


@cache
def looked_at(action: Action) -> tuple[str, ...]:
    """The relations and phases that its text names."""
    names = {
        n.id
        for line in (*action.guard, *action.does)
        for n in ast.walk(ast.parse(line))
        if isinstance(n, ast.Name)
    }
    return tuple(name for name in (*RELATIONS, *PHASES) if name in names)


def footprint(action: Action, args: Mapping[str, Any], state: State) -> Any:
    """Equal for two steps only if the action's formulas say the same of both."""
    seen = []
    for name in looked_at(action):
        value = state.now[name]
        seen.append(frozenset(value.items()) if isinstance(value, Phases | Contents) else frozenset(value))
    return action.name, tuple(sorted(args.items(), key=lambda a: a[0])), tuple(seen)


class Instance:
    """One step: elements are constants, everything else is a finite list."""

    def __init__(self, action: Action, args: Mapping[str, Any], before: State, after: State) -> None:
        self.language: Language = language()
        self.action, self.args, self.before, self.after = action, args, before, after
        self._elements: dict[str, dict[Any, Any]] = {sort: {} for sort in SORTS}
        self._known: list[Any] = []

    def holds(self) -> bool:
        """Whether z3 shows that guard and effects hold between the two states."""
        before, after = self._state(self.before), self._state(self.after)
        given = {name: self._given(sort, self.args[name]) for name, sort in self.action.params}
        claims = self.language.guard(self.action, before, given)
        formulas = self.language.after(self.action, before, given)
        for name in looked_at(self.action):
            sorts = (PHASES[name][0],) if name in PHASES else RELATIONS[name].sorts
            places = [z3.Const(f"at{n}", self.language.sorts[s]) for n, s in enumerate(sorts)]
            claims.append(z3.ForAll(places, formulas[name](*places) == after[name](*places)))
        solver = z3.Solver()
        solver.set("timeout", 10_000)
        self._functions()
        for sort, elements in self._elements.items():
            if not elements:
                continue
            x = z3.Const("x", self.language.sorts[sort])
            solver.add(z3.ForAll([x], z3.Or(*(x == e for e in elements.values()))))
            solver.add(z3.Distinct(*elements.values()))
        solver.add(*self._known)
        solver.add(z3.Not(z3.And(*claims)))
        return bool(solver.check() == z3.unsat)

    def _element(self, sort: str, value: Any) -> Any:
        elements = self._elements[sort]
        if value not in elements:
            elements[value] = z3.Const(f"{sort}:{len(elements)}", self.language.sorts[sort])
        return elements[value]

    def _given(self, sort: str, value: Any) -> Any:
        kind, _, sorts = sort.partition(" ")
        if kind != "rel":
            return self._element(sort, value)
        places = tuple(sorts.split())
        return Chosen(self._listed([f if len(places) > 1 else (f,) for f in value], places), places)

    def _listed(self, facts: list[tuple[Any, ...]], sorts: tuple[str, ...]) -> Any:
        listed = [tuple(self._element(s, v) for s, v in zip(sorts, fact, strict=True)) for fact in facts]
        return lambda *x: z3.Or(*(z3.And(*(a == b for a, b in zip(x, fact, strict=True))) for fact in listed))

    def _state(self, state: State) -> dict[str, Any]:
        found: dict[str, Any] = dict(self.language.state)
        facts = state.facts()
        for name in looked_at(self.action):
            if name in PHASES:
                found[name] = self._phases(name, state.now[name])
                continue
            sorts = RELATIONS[name].sorts
            one = len(sorts) == 1 and name not in CONTENTS
            found[name] = self._listed([(f,) if one else f for f in facts[name]], sorts)
        for name, relation in FIXED.items():
            symbol = self.language.fixed[name]
            listed = self._listed(list(state.fixed[name]), relation.sorts)
            places = [z3.Const(f"at{n}", self.language.sorts[s]) for n, s in enumerate(relation.sorts)]
            self._known.append(z3.ForAll(places, symbol(*places) == listed(*places)))
        for g in state.fixed["segments"]:
            self._element("segment", g)
        return found

    def _phases(self, name: str, phases: Phases) -> Any:
        sort, _ = PHASES[name]
        known = [(self._element(sort, t), self.language.phase[name][phase]) for t, phase in phases.items()]
        first = self.language.phase[name][phases.first]

        def phase(x: Any) -> Any:
            value = first
            for element, there in known:
                value = z3.If(x == element, there, value)
            return value

        return phase

    def _functions(self) -> None:
        """What the functions give for every element that there is, and for what that gives."""
        for name in ("slot", "segment", "owner", "prefiller", "decoder", "lineage"):
            sorts, result = FUNCTIONS[name]
            symbol, real = self.language.functions[name], self.before.fixed[name]
            for values in _product([list(self._elements[s]) for s in sorts]):
                terms = [self._elements[s][v] for s, v in zip(sorts, values, strict=True)]
                self._known.append(symbol(*terms) == self._element(result, real(*values)))


def _product(lists: list[list[Any]]) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = [()]
    for values in lists:
        found = [(*head, v) for head in found for v in values]
    return found


__all__ = ["Instance", "footprint", "looked_at"]
