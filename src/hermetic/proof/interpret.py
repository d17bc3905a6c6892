"""The abstract protocol on finite relations: whether an action may happen, what follows, which conjuncts hold.

Guards, effects and conjuncts are evaluated by Python, as they stand. The one thing to know: elements are any hashable
values, and what never changes (whose slot a use is of, ...) is given by functions, so a recording or a state of the explorer
names things as it likes.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import CodeType
from typing import Any

from hermetic.proof.abstract import ACTIONS, HOSTILE, Action
from hermetic.proof.invariant import CONJUNCTS, Conjunct, Moment
from hermetic.proof.vocabulary import CONTENTS, FUNCTIONS, GROUPS, PHASES, RELATIONS

Fact = Any
"""A tuple of elements; of a relation with one place, the element itself."""
Functions = Mapping[str, Callable[..., Any]]


class Facts(set[Fact]):
    """A relation: what is in it. `r(x, y)` asks."""

    def __call__(self, *places: Any) -> bool:
        return (places if len(places) != 1 else places[0]) in self


class Phases(dict[Any, str]):
    """Where each attempt is; one that is not listed is where all begin."""

    def __init__(self, first: str, items: Mapping[Any, str] | Iterable[tuple[Any, str]] = ()) -> None:
        super().__init__(items)
        self.first = first

    def __missing__(self, attempt: Any) -> str:
        return self.first


class Contents(dict[Any, frozenset[Any]]):
    """Which rows lie where."""

    def __missing__(self, place: Any) -> frozenset[Any]:
        return frozenset()


class NotAllowed(Exception):
    """An action whose guard does not hold. `guard` is the line of it."""

    def __init__(self, action: Action, guard: str, args: Mapping[str, Any]) -> None:
        given = ", ".join(f"{name}={value}" for name, value in args.items())
        super().__init__(f"{action.name}({given}) ({action.says}) is not possible: {guard}")
        self.action, self.guard = action, guard


@dataclass(frozen=True)
class _Effect:
    """`how`: add, remove (one or many), phase, phases, bytes."""

    how: str
    target: str
    at: CodeType | None
    value: CodeType
    many: bool = False


@dataclass(frozen=True)
class _Compiled:
    guards: tuple[tuple[str, CodeType], ...]
    effects: tuple[_Effect, ...]


def _code(node: ast.expr, text: str) -> CodeType:
    return compile(ast.fix_missing_locations(ast.Expression(node)), f"<{text}>", "eval")


@cache
def _conjunct(text: str) -> CodeType:
    return compile(text, "<conjunct>", "eval")


@cache
def _compiled(action: Action) -> _Compiled:
    guards = tuple((line, compile(line, "<guard>", "eval")) for line in action.guard)
    return _Compiled(guards, tuple(_effect(line) for line in action.does))


def _effect(line: str) -> _Effect:
    (statement,) = ast.parse(line).body
    match statement:
        case ast.AugAssign(target=ast.Name(id=name), op=ast.BitOr(), value=value):
            return _Effect("phases", name, None, _code(value, line))
        case ast.AugAssign(target=ast.Name(id=name), op=op, value=value):
            how = "add" if isinstance(op, ast.Add) else "remove"
            return _Effect(how, name, None, _code(value, line), many=not isinstance(value, ast.Tuple))
        case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name), slice=at)], value=value):
            how = "phase" if name in PHASES else "bytes"
            return _Effect(how, name, _code(at, line), _code(value, line))
    raise ValueError(f"not an effect: {line}")


@dataclass
class State:
    """One state. `fixed`: the functions of `abstract.FUNCTIONS`, and `needed` and `segments` (facts)."""

    fixed: Mapping[str, Any]
    now: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def first(cls, functions: Functions, needed: Iterable[Fact] = (), segments: Iterable[Any] = ()) -> State:
        """As everything begins: nothing is held, said or written."""
        missing = FUNCTIONS.keys() - functions.keys()
        if missing:
            raise ValueError(f"no function for {sorted(missing)}")
        fixed = {**functions, **GROUPS, "needed": Facts(needed), "segments": set(segments)}
        now: dict[str, Any] = {name: Contents() if name in CONTENTS else Facts() for name in RELATIONS}
        now |= {name: Phases(phases[0]) for name, (_, phases) in PHASES.items()}
        return cls(fixed, now)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and self.facts() == other.facts()

    __hash__ = None  # type: ignore[assignment]

    def copy(self) -> State:
        return State(self.fixed, {name: _copied(value) for name, value in self.now.items()})

    def only(self, names: Iterable[str]) -> State:
        """A copy with these relations and phases alone."""
        return State(self.fixed, {name: _copied(self.now[name]) for name in names})

    def facts(self) -> dict[str, set[Fact]]:
        """Everything that is so, relation by relation; phases as (attempt, phase), without those where all begin."""
        found: dict[str, set[Fact]] = {}
        for name, value in self.now.items():
            match value:
                case Phases():
                    found[name] = {(t, phase) for t, phase in value.items() if phase != value.first}
                case Contents():
                    found[name] = {(place, rows) for place, lie in value.items() for rows in lie}
                case _:
                    found[name] = set(value)
        return found

    def refuses(self, action: str | Action, args: Mapping[str, Any]) -> str | None:
        """The line of the guard that does not hold, or None."""
        names = self._names(args)
        for line, code in _compiled(_of(action)).guards:
            if not eval(code, names):
                return line
        return None

    def take(self, action: str | Action, **args: Any) -> None:
        """The action happens, in this state. Raises NotAllowed, and changes nothing then."""
        taken = _of(action)
        refused = self.refuses(taken, args)
        if refused is not None:
            raise NotAllowed(taken, refused, args)
        names = self._names(args)
        done = [(e, e.at and eval(e.at, names), eval(e.value, names)) for e in _compiled(taken).effects]
        for effect, at, value in done:
            self._do(effect, at, value)

    def after(self, action: str | Action, **args: Any) -> State:
        """The state that follows; this one stays as it is."""
        following = self.copy()
        following.take(action, **args)
        return following

    def holds(self, conjunct: Conjunct | Moment, args: Mapping[str, Any] | None = None) -> bool:
        """`args`: an action's parameters, for what is said of the moment at which it happens."""
        return bool(eval(_conjunct(conjunct.holds), self._names(args or {})))

    def broken(self) -> list[Conjunct]:
        """The conjuncts that do not hold here."""
        return [c for c in CONJUNCTS.values() if not self.holds(c)]

    def _names(self, args: Mapping[str, Any]) -> dict[str, Any]:
        return {**self.fixed, **self.now, **args}

    def _do(self, effect: _Effect, at: Any, value: Any) -> None:
        target = self.now[effect.target]
        match effect.how:
            case "add" | "remove":
                facts = [fact[0] if len(fact) == 1 else fact for fact in (value if effect.many else [value])]
                target.update(facts) if effect.how == "add" else target.difference_update(facts)
            case "phase":
                target[at] = value
            case "phases":
                target.update(value)
            case _:
                target[at] = frozenset(value)


def _copied(value: Any) -> Any:
    match value:
        case Phases():
            return Phases(value.first, value)
        case Contents():
            return Contents(value)
        case _:
            return Facts(value)


def _of(action: str | Action) -> Action:
    if isinstance(action, Action):
        return action
    return ACTIONS.get(action) or HOSTILE[action]


__all__ = ["Contents", "Fact", "Facts", "Functions", "NotAllowed", "Phases", "State"]
