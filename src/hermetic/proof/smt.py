"""The text of the abstract protocol for z3: guards, effects and conjuncts over sorts without any bound on their size.

A state is a set of relation symbols; the state after an action is given by formulas over those symbols and the action's
parameters, so nothing is doubled and nothing needs a frame axiom. The one thing to know: quantifiers stay within what z3
decides by finite models (no function leads from an index, a page or a use back to an attempt).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import z3

from hermetic.proof.abstract import Action
from hermetic.proof.invariant import Conjunct
from hermetic.proof.vocabulary import CONTENTS, FIXED, FUNCTIONS, GROUPS, PHASES, RELATIONS, SORTS

Symbol = Callable[..., Any]
State = dict[str, Symbol]
"""For each relation: its formula at some places; for each phase: its value for an attempt."""


class Language:
    """Sorts, functions and the symbols of one state."""

    def __init__(self) -> None:
        self.sorts: dict[str, Any] = {name: z3.DeclareSort(name) for name in SORTS}
        self.phase: dict[str, dict[str, Any]] = {}
        phase_sorts = {}
        for name, (_, phases) in PHASES.items():
            sort, constants = z3.EnumSort(f"{name}_phase", [f"{name}:{p}" for p in phases])
            phase_sorts[name], self.phase[name] = sort, dict(zip(phases, constants, strict=True))
        self.functions = {
            name: z3.Function(name, *(self.sorts[s] for s in args), self.sorts[result])
            for name, (args, result) in FUNCTIONS.items()
        }
        self.fixed = {name: self.relation(name, r.sorts) for name, r in FIXED.items()}
        self.state: State = {name: self.relation(name, r.sorts) for name, r in RELATIONS.items()}
        for name, (sort, _) in PHASES.items():
            self.state[name] = z3.Function(name, self.sorts[sort], phase_sorts[name])
        self.places = {name: r.sorts for name, r in {**RELATIONS, **FIXED}.items()}
        self._fresh = 0

    def relation(self, name: str, sorts: Iterable[str]) -> Any:
        return z3.Function(name, *(self.sorts[s] for s in sorts), z3.BoolSort())

    def const(self, name: str, sort: str) -> Any:
        self._fresh += 1
        return z3.Const(f"{name}!{self._fresh}", self.sorts[sort])

    def parameters(self, action: Action) -> dict[str, Any]:
        """Constants (and, for a choice of many, a relation) that stand for an action's parameters."""
        given: dict[str, Any] = {}
        for name, sort in action.params:
            kind, _, sorts = sort.partition(" ")
            if kind == "rel":
                given[name] = Chosen(
                    self.relation(f"{action.name}.{name}", sorts.split()), tuple(sorts.split())
                )
            else:
                given[name] = z3.Const(f"{action.name}.{name}", self.sorts[sort])
        return given

    # ------------------------------------------------------------------- formulas

    def guard(self, action: Action, state: State, given: dict[str, Any]) -> list[Any]:
        return [self.formula(line, state, given) for line in action.guard]

    def conjunct(self, conjunct: Conjunct, state: State) -> Any:
        return self.formula(conjunct.holds, state, {})

    def formula(self, text: str, state: State, given: dict[str, Any]) -> Any:
        return Reader(self, state).truth(ast.parse(text, mode="eval").body, given)

    def first(self) -> list[Any]:
        """As everything begins; what lies in pages and slots is anything."""
        found = []
        for name, relation in RELATIONS.items():
            if name not in CONTENTS:
                names = [self.const("x", s) for s in relation.sorts]
                found.append(z3.ForAll(names, z3.Not(self.state[name](*names))))
        for name, (sort, phases) in PHASES.items():
            x = self.const("x", sort)
            found.append(z3.ForAll([x], self.state[name](x) == self.phase[name][phases[0]]))
        return found

    # -------------------------------------------------------------------- effects

    def after(self, action: Action, state: State, given: dict[str, Any]) -> State:
        """The state after the action."""
        following = dict(state)
        reader = Reader(self, state)
        for line in action.does:
            (statement,) = ast.parse(line).body
            name, symbol = self._effect(statement, reader, following, given)
            following[name] = symbol
        return following

    def _effect(
        self, statement: ast.stmt, reader: Reader, now: State, given: dict[str, Any]
    ) -> tuple[str, Symbol]:
        match statement:
            case ast.AugAssign(target=ast.Name(id=name), op=ast.BitOr(), value=ast.DictComp() as many):
                return name, self._moved_all(reader, name, now[name], many, given)
            case ast.AugAssign(target=ast.Name(id=name), op=op, value=value):
                among = self._among(reader, name, value, given)
                old = now[name]
                if isinstance(op, ast.Add):
                    return name, lambda *x: z3.Or(old(*x), among(*x))
                return name, lambda *x: z3.And(old(*x), z3.Not(among(*x)))
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name), slice=at)], value=value):
                where, old = reader.term(at, given), now[name]
                if name in PHASES:
                    to = reader.phase(name, value, given)
                    return name, lambda x: z3.If(x == where, to, old(x))
                return name, lambda x, rows: z3.If(x == where, reader.lies(value, rows, given), old(x, rows))
        raise ValueError(f"not an effect: {ast.unparse(statement)}")

    def _among(self, reader: Reader, name: str, value: ast.expr, given: dict[str, Any]) -> Symbol:
        """Whether some places are among those that an effect names."""
        if isinstance(value, ast.Tuple):
            places = [reader.term(e, given) for e in value.elts]
            return lambda *x: z3.And(*(a == b for a, b in zip(x, places, strict=True)))
        assert isinstance(value, ast.ListComp)
        assert isinstance(value.elt, ast.Tuple)
        elements = value.elt.elts

        def among(*x: Any) -> Any:
            bound, ranges, inner = reader.ranges(value.generators, given)
            equal = [a == reader.term(e, inner) for a, e in zip(x, elements, strict=True)]
            return _exists(bound, z3.And(*ranges, *equal))

        return among

    def _moved_all(
        self, reader: Reader, name: str, old: Symbol, many: ast.DictComp, given: dict[str, Any]
    ) -> Symbol:
        def moved(x: Any) -> Any:
            bound, ranges, inner = reader.ranges(many.generators, given)
            chosen = _exists(bound, z3.And(*ranges, x == reader.term(many.key, inner)))
            return z3.If(chosen, reader.phase(name, many.value, given), old(x))

        return moved


@lru_cache(maxsize=1)
def language() -> Language:
    """The one of this process: z3 knows a sort of phases by its name, once."""
    return Language()


@dataclass(frozen=True)
class Chosen:
    """A parameter that is a relation."""

    symbol: Any
    sorts: tuple[str, ...]


def _exists(bound: list[Any], body: Any) -> Any:
    """∃ bound: body, without the variables that body fixes by an equation."""
    body = z3.simplify(body) if not bound else body
    parts = _parts(body)
    for variable in list(bound):
        for part in parts:
            if not z3.is_eq(part):
                continue
            a, b = part.children()
            other = b if a.eq(variable) else a if b.eq(variable) else None
            if other is not None and not _mentions(other, variable):
                parts = [z3.substitute(p, (variable, other)) for p in parts if not p.eq(part)]
                bound = [v for v in bound if not v.eq(variable)]
                break
    whole = z3.And(*parts)
    return z3.Exists(bound, whole) if bound else whole


def _parts(formula: Any) -> list[Any]:
    if z3.is_and(formula):
        return [part for child in formula.children() for part in _parts(child)]
    return [formula]


def _mentions(formula: Any, variable: Any) -> bool:
    return formula.eq(variable) or any(_mentions(child, variable) for child in formula.children())


class Reader:
    """Reads one expression against one state. `given` maps the names that are bound to terms."""

    def __init__(self, language: Language, state: State) -> None:
        self.language, self.state = language, state

    def truth(self, node: ast.expr, given: dict[str, Any]) -> Any:
        match node:
            case ast.Constant(value=bool() as value):
                return z3.BoolVal(value)
            case ast.BoolOp(op=ast.And(), values=values):
                return z3.And(*(self.truth(v, given) for v in values))
            case ast.BoolOp(op=ast.Or(), values=values):
                return z3.Or(*(self.truth(v, given) for v in values))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return z3.Not(self.truth(operand, given))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._compare(left, op, right, given)
            case ast.Call(func=ast.Name(id="all"), args=[ast.GeneratorExp(elt=body, generators=generators)]):
                bound, ranges, inner = self.ranges(generators, given)
                return z3.ForAll(bound, z3.Implies(z3.And(*ranges), self.truth(body, inner)))
            case ast.Call(func=ast.Name(id="any"), args=[ast.GeneratorExp(elt=body, generators=generators)]):
                bound, ranges, inner = self.ranges(generators, given)
                return _exists(bound, z3.And(*ranges, self.truth(body, inner)))
            case ast.Call(func=ast.Name(id=name), args=args):
                return self._symbol(name, given)(*(self.term(a, given) for a in args))
        raise ValueError(f"not a condition: {ast.unparse(node)}")

    def ranges(
        self, generators: list[ast.comprehension], given: dict[str, Any]
    ) -> tuple[list[Any], list[Any], dict[str, Any]]:
        """The variables that a comprehension binds, what it says of them, and all names with them."""
        bound: list[Any] = []
        said: list[Any] = []
        inner = dict(given)
        for generator in generators:
            assert isinstance(generator.iter, ast.Name)
            over = generator.iter.id
            target = generator.target
            names = [e.id for e in (target.elts if isinstance(target, ast.Tuple) else [target])]  # type: ignore[attr-defined]
            fresh = [self.language.const(n, s) for n, s in zip(names, self._sorts(over, given), strict=True)]
            bound += fresh
            inner.update(zip(names, fresh, strict=True))
            if over not in PHASES and over != "segments":
                said.append(self._symbol(over, given)(*fresh))
            said += [self.truth(condition, inner) for condition in generator.ifs]
        return bound, said, inner

    def term(self, node: ast.expr, given: dict[str, Any]) -> Any:
        match node:
            case ast.Name(id=name):
                return given[name]
            case ast.Call(func=ast.Name(id=name), args=args):
                return self.language.functions[name](*(self.term(a, given) for a in args))
        raise ValueError(f"not a thing: {ast.unparse(node)}")

    def phase(self, name: str, node: ast.expr, given: dict[str, Any]) -> Any:
        match node:
            case ast.Constant(value=str() as value):
                return self.language.phase[name][value]
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return z3.If(
                    self.truth(test, given), self.phase(name, body, given), self.phase(name, orelse, given)
                )
        raise ValueError(f"not a phase: {ast.unparse(node)}")

    def lies(self, node: ast.expr, rows: Any, given: dict[str, Any]) -> Any:
        """Whether `rows` are among what is copied."""
        match node:
            case ast.Set(elts=elements):
                return z3.Or(*(rows == self.term(e, given) for e in elements))
            case ast.Subscript(value=ast.Name(id=name), slice=at):
                return self.state[name](self.term(at, given), rows)
            case ast.Name(id=name):
                return given[name].symbol(rows)
        raise ValueError(f"not contents: {ast.unparse(node)}")

    def _compare(self, left: ast.expr, op: ast.cmpop, right: ast.expr, given: dict[str, Any]) -> Any:
        match left:
            case ast.Subscript(value=ast.Name(id=name), slice=at) if name in PHASES:
                value = self.state[name](self.term(at, given))
                among = z3.Or(*(value == self.language.phase[name][p] for p in _phases(right)))
                return z3.Not(among) if isinstance(op, ast.NotEq | ast.NotIn) else among
        if isinstance(op, ast.In):
            return self.lies(right, self.term(left, given), given)
        if _is_truth(left):
            same = self.truth(left, given) == self.truth(right, given)
        else:
            same = self.term(left, given) == self.term(right, given)
        return z3.Not(same) if isinstance(op, ast.NotEq) else same

    def _symbol(self, name: str, given: dict[str, Any]) -> Symbol:
        if name in given:
            symbol: Symbol = given[name].symbol
            return symbol
        return self.state[name] if name in self.state else self.language.fixed[name]

    def _sorts(self, over: str, given: dict[str, Any]) -> tuple[str, ...]:
        if over in given:
            sorts: tuple[str, ...] = given[over].sorts
            return sorts
        if over in PHASES:
            return (PHASES[over][0],)
        return ("segment",) if over == "segments" else self.language.places[over]


def _phases(node: ast.expr) -> tuple[str, ...]:
    match node:
        case ast.Constant(value=str() as value):
            return (value,)
        case ast.Name(id=name):
            return GROUPS[name]
        case ast.Tuple(elts=elements):
            return tuple(p for e in elements for p in _phases(e))
    raise ValueError(f"not phases: {ast.unparse(node)}")


def _is_truth(node: ast.expr) -> bool:
    return isinstance(node, ast.Compare | ast.BoolOp)


__all__ = ["Chosen", "Language", "State", "language"]
