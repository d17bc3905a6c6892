"""The explorer's scopes once more, with every step put to the abstract protocol: by Python for all, by z3 for each distinct.

The one thing to know: a step that differs from another only in what its action neither asks nor changes is the same abstract
step, so few thousands stand for all. What is not an instance of abstract actions is a counterexample of kind "refinement".
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from hermetic.proof.abstract import ACTIONS, FORGETTING
from hermetic.proof.instances import Instance
from hermetic.proof.model import Broken, Move, State
from hermetic.proof.saved import Counterexample
from hermetic.proof.scopes import Scope
from hermetic.proof.story import told
from hermetic.proof.watched import RefinedWorld


@dataclass
class Part:
    """One scope. `transitions`: put to the interpreter; `distinct`: different abstract steps; `proved`: by z3 as well."""

    scope: Scope
    states: int = 0
    transitions: int = 0
    distinct: int = 0
    proved: int = 0
    actions: Counter[str] = field(default_factory=Counter)
    complete: bool = False
    violation: Counterexample | None = None

    def line(self) -> str:
        part = "all" if self.complete else "the first"
        return (
            f"{self.scope.name}: {part} {self.states} states; {self.transitions} production steps are "
            f"{sum(self.actions.values())} abstract ones, {self.distinct} distinct, {self.proved} of those put to z3"
        )


@dataclass
class Refinement:
    """What was found, scope by scope."""

    parts: list[Part] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def violation(self) -> Counterexample | None:
        return next((part.violation for part in self.parts if part.violation is not None), None)

    @property
    def actions(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for part in self.parts:
            total.update(part.actions)
        return total

    def lines(self) -> list[str]:
        """For a person."""
        end = "no step is anything else" if self.violation is None else "one step is NONE of them"
        return [
            *(part.line() for part in self.parts),
            f"{len(self.actions)} of {len(ACTIONS) - len(FORGETTING)} abstract actions were taken by production code; {end}; "
            f"{self.seconds:.1f} s",
        ]


def refine(
    scopes: Scope | Iterable[Scope],
    *,
    states: int = 2_000,
    every: bool = False,
    z3_steps: int = 10**9,
    mutant: str = "",
) -> Refinement:
    """Search the first `states` states of each scope and put each step to the abstract protocol; stop at the first step that
    is not one of its own. A mutant is applied by the caller.

    `every`: every transition; else each different local one once, in the state where it is first seen."""
    began, result = time.monotonic(), Refinement()
    for scope in [scopes] if isinstance(scopes, Scope) else scopes:
        part = _refine(scope, states, every, z3_steps, mutant)
        result.parts.append(part)
        if part.violation is not None:
            break
    result.seconds = time.monotonic() - began
    return result


def _refine(scope: Scope, states: int, every: bool, z3_steps: int, mutant: str) -> Part:
    part = Part(scope)
    world = RefinedWorld(scope, reduce=not mutant, every=every, keep=z3_steps > 0)
    first = world.initial()
    came: dict[State, tuple[State, Move] | None] = {first: None}
    queue = deque([first])
    state = first
    try:
        while queue and part.states < states:
            state = queue.popleft()
            part.states += 1
            for move, _, after in world.expand(state):
                if after not in came:
                    came[after] = state, move
                    queue.append(after)
        part.complete = not queue
    except Broken as broken:
        taken = [*_path(came, state), (broken.move, state)]
        part.violation = told(world, mutant, broken.kind, broken.text, taken)
    _settle(part, world, z3_steps, mutant)
    return part


def _settle(part: Part, world: RefinedWorld, z3_steps: int, mutant: str) -> None:
    tally = world.tally
    part.transitions, part.actions, part.distinct = tally.transitions, tally.actions, len(tally.distinct)
    for step in list(tally.distinct.values())[:z3_steps]:
        if not Instance(step.action, step.args, step.before, step.after).holds():
            text = f"z3 does not see {step.action.name} in a step in which the interpreter does: {step.args}"
            part.violation = part.violation or told(world, mutant, "refinement", text, [])
            return
        part.proved += 1


def _path(came: dict[State, tuple[State, Move] | None], state: State) -> list[tuple[Move, State]]:
    path: list[tuple[Move, State]] = []
    step = came[state]
    while step is not None:
        former, move = step
        path.append((move, former))
        step = came[former]
    return path[::-1]


__all__ = ["Part", "Refinement", "refine"]
