"""A path through the world as steps that a person can read, and back: a saved path taken again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from hermetic.proof.codec import Data, decode
from hermetic.proof.model import GT, MASK, Broken, Move, State
from hermetic.proof.pages import name
from hermetic.proof.saved import Counterexample, SavedError, Step
from hermetic.proof.scopes import Scope
from hermetic.proof.snapshot import standing
from hermetic.proof.words import DOES, DOUBT, FAILS, content
from hermetic.proof.world import World, label

Taken = tuple[Move, State]
"""A move, and the state in which it was made."""


def replayed(world: World, path: Sequence[int | Move]) -> tuple[list[Taken], State]:
    """The moves along a path of fingerprints, and where they lead; a last element that is a move is the one that broke something."""
    state, taken = world.initial(), list[Taken]()
    for step in path[1:]:
        if not isinstance(step, int):
            taken.append((step, state))
            break
        for move, _, after in world.expand(state):
            if hash(after) & MASK == step:
                taken.append((move, state))
                state = after
                break
        else:
            raise RuntimeError(
                "a path of the search cannot be taken again; nothing that was found so far counts"
            )
    return taken, state


def told(
    world: World, mutant: str, kind: str, text: str, taken: Sequence[Taken], end: State | None = None
) -> Counterexample:
    """`end`: what stands at the end of the chart; if none is given, the state before the last move. Its states are `world`'s."""
    if end is None:
        end = taken[-1][1] if taken else world.initial()
    steps = tuple(msgspec.structs.replace(_told(world, *one), move=label(one[0])) for one in taken)
    return Counterexample(kind, text, steps, _saved(world.scope), mutant, shows=standing(world, end))


def unended(world: World, mutant: str, taken: Sequence[Taken], state: State) -> Counterexample:
    """For a state from which no good end can be reached, told on to where it stays for ever."""
    kind, text = unending(world, state)
    way, end = _to_where_it_stays(world, state)
    return told(world, mutant, kind, text, [*taken, *way], end)


def again(found: Counterexample, reduce: bool = True) -> Counterexample | None:
    """Take a saved path once more: what breaks now, or None. Mutants are applied by the caller.

    Raises SavedError when it has no scope of the explorer, or a move that is not possible any more."""
    scope = scope_of(found)
    if not found.steps and found.kind not in ("L1", "L2"):
        raise SavedError("this counterexample has no step, and nothing is broken before the first")
    world = World(scope, reduce)
    state, taken = world.initial(), list[Taken]()
    for number, step in enumerate(found.steps, 1):
        try:
            moves = world.expand(state)
        except Broken as broken:
            return told(world, found.mutant, broken.kind, broken.text, [*taken, (broken.move, state)])
        following = [(move, after) for move, _, after in moves if label(move) == step.move]
        if not following:
            raise SavedError(
                f"step {number}, {step.move}, cannot be taken: the protocol does not do this any more"
            )
        taken.append((following[0][0], state))
        state = following[0][1]
    if found.kind in ("L1", "L2") and not ends(world, state):
        return told(world, found.mutant, found.kind, found.text, taken, state)
    return None


def ends(world: World, state: State) -> bool:
    """Whether a good end can be reached from here by calm moves."""
    return any(world.good(s) for s in _calmly(world, state))


def unending(world: World, state: State) -> tuple[str, str]:
    """Kind and text for a state from which no good end can be reached: L1 when a request cannot even end, else L2."""
    text = "from here, with everything delivered and no further fault, "
    never, last = set(world.open_requests(state)), state
    for last in _calmly(world, state):
        never &= set(world.open_requests(last))
    if never:
        return "L1", f"{text}{', '.join(sorted(never))} never ends"
    return "L2", f"{text}not everything comes back: {world.held(last)}"


def _calmly(world: World, state: State) -> Iterator[State]:
    """Everything that calm moves reach."""
    seen, frontier = {state}, [state]
    while frontier:
        yield from frontier
        following = dict.fromkeys(after for s in frontier for _, calm, after in world.expand(s) if calm)
        frontier = [s for s in following if s not in seen]
        seen.update(frontier)


def _to_where_it_stays(world: World, state: State) -> tuple[list[Taken], State]:
    """The fewest calm moves to a state that calm moves do not lead out of, or only to some that lead back; and that state."""
    paths: dict[State, list[Taken]] = {state: []}
    for here in _calmly(world, state):
        for move, calm, after in world.expand(here):
            if calm and after not in paths:
                paths[after] = [*paths[here], (move, here)]
    stays = state
    while True:
        calm_moves = {s: [after for _, calm, after in world.expand(s) if calm] for s in _calmly(world, stays)}
        back, before = {stays}, 0
        while len(back) > before:
            before = len(back)
            back.update(s for s, following in calm_moves.items() if not back.isdisjoint(following))
        away = [s for s in calm_moves if s not in back]
        if not away:
            end = min(back, key=lambda s: len(paths[s]))
            return paths[end], end
        stays = away[-1]


def _saved(scope: Scope) -> dict[str, Any]:
    flat = asdict(scope) | {f"faults.{k}": v for k, v in scope.faults.items()}
    del flat["faults"]
    return flat | {"prompts": list(scope.prompts)}


def scope_of(found: Counterexample) -> Scope:
    """The scope that a counterexample was found in. Raises SavedError."""
    flat: dict[str, Any] = dict(found.scope)
    faults = {k.partition(".")[2]: v for k, v in flat.items() if k.startswith("faults.")}
    rest = {k: v for k, v in flat.items() if not k.startswith("faults.")}
    try:
        return msgspec.convert(rest | {"faults": faults}, Scope)
    except (msgspec.ValidationError, ValueError) as error:
        raise SavedError(f"this counterexample has no scope of the explorer: {error}") from error


# ------------------------------------------------------------------------- in words

_TO_A_WRITE = {
    "damage": "is written, with a damaged byte",
    "haunt": "is written, and its bytes will come once more",
    "doubt": DOUBT,
    "write fails": FAILS,
    "ghost": "comes once more",
}


def _told(world: World, move: Move, state: State) -> Step:
    kind, *rest = move
    match kind:
        case "lose" | "double":
            fate = "lost" if kind == "lose" else "twice"
            return msgspec.structs.replace(_message(world, state, *rest), fate=fate)
        case "up" | "down":
            return _message(world, state, *move)
        case "crash":
            return Step("adversary", "its process ends; another begins", f"{rest[0]}-{rest[1]}")
        case "greet" | "welcome" | "fence" | "silence":
            return _session(world, kind, rest)
        case "begin":
            at = " and ".join(_lanes(world, rest[1]))
            return Step("gateway", "begins the attempt", key=name(rest[0]), detail=f"at {at}")
    key, (p, d) = name(rest[0]), _lanes(world, _pair(world, state, rest[0]))
    match kind:
        case "submit prefill" | "submit decode" | "cancel prefill" | "cancel decode":
            what, _, half = kind.partition(" ")
            return Step("gateway", what.capitalize(), p if half == "prefill" else d, key)
        case "abort":
            return Step("adversary", "the client leaves", "gateway", key)
        case "wrote":
            return Step(p, f"bytes of batch {rest[1]}", d, key)
        case "damage" | "haunt" | "doubt" | "write fails" | "ghost":
            return Step("adversary", f"batch {rest[1]} {_TO_A_WRITE[kind]}", d, key)
        case "start" | "compute":
            return Step(p, DOES[kind], key=key)
        case "reserve" | "credit" | "copy" | "verify" | "finish" | "overdue":
            return Step(d, DOES[kind], key=key)
        case "early overdue":
            return Step("adversary", DOES["overdue"], d, key)
        case "nudge prefill" | "nudge decode":
            return Step(p if kind == "nudge prefill" else d, DOES["nudge"], key=key)
    return Step("adversary", str(kind), key=key)


def _session(world: World, kind: str, rest: Sequence[Any]) -> Step:
    p, d = _lanes(world, rest[-1])
    match kind:
        case "greet":
            return Step(p, "Hello: a new session", d)
        case "welcome":
            return Step(d, "Welcome: another segment", p)
        case "silence":
            return Step("adversary", f"{rest[0]} gives the session up", p if rest[0] == "prefill" else d)
        case _:
            return Step(d, "fences the segment and makes another")


def _message(world: World, state: State, way: str, t: int, message: Data) -> Step:
    p, d = _lanes(world, _pair(world, state, t))
    actor, to = (d, p) if way == "down" else (p, d)
    return Step(actor, message[1], to, name(t), content(decode(message)))


def _pair(world: World, state: State, t: int) -> int:
    """The pair that a ticket is on. Every move but `begin` is of one that is on a pair."""
    pair: int = world.store.contents[state[6 * t + GT]][0]
    return pair


def _lanes(world: World, pair: int) -> tuple[str, str]:
    return f"prefill-{pair // world.scope.decodes}", f"decode-{pair % world.scope.decodes}"
