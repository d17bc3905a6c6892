"""A path through the world as steps that a person can read, and back: a saved path taken again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from hermetic.proof.codec import Data
from hermetic.proof.model import MASK, Broken, Move, State
from hermetic.proof.pages import name
from hermetic.proof.saved import Counterexample, SavedError, Step
from hermetic.proof.scopes import Scope
from hermetic.proof.snapshot import standing
from hermetic.proof.world import World, label

Taken = tuple[Move, State]
"""A move, and the state in which it was made."""


def replayed(scope: Scope, path: Sequence[int | Move], reduce: bool = True) -> list[Taken]:
    """The moves along a path of fingerprints; a last element that is a move is the one that broke something."""
    world = World(scope, reduce)
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
    return taken


def told(scope: Scope, mutant: str, kind: str, text: str, taken: Sequence[Taken]) -> Counterexample:
    moves = [move for move, _ in taken]
    shows = standing(scope, moves if kind.startswith("L") else moves[:-1])
    return Counterexample(kind, text, tuple(_steps(scope, taken)), _saved(scope), mutant, shows=shows)


def unended(world: World, mutant: str, taken: Sequence[Taken], state: State) -> Counterexample:
    """For a state from which no good end can be reached, told on to where it stays for ever."""
    kind, text = unending(world, state)
    return told(world.scope, mutant, kind, text, [*taken, *_to_where_it_stays(world, state)])


def again(found: Counterexample, reduce: bool = True) -> tuple[Counterexample | None, str]:
    """Take a saved path once more: what breaks now (None: nothing), and how far it went. Mutants are applied by the caller.

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
            taken.append((broken.move, state))
            return told(scope, found.mutant, broken.kind, broken.text, taken), f"after {number} steps"
        following = [(move, after) for move, _, after in moves if label(move) == step.move]
        if not following:
            raise SavedError(
                f"step {number}, {step.move}, cannot be taken: the protocol does not do this any more"
            )
        taken.append((following[0][0], state))
        state = following[0][1]
    if found.kind in ("L1", "L2") and not ends(world, state):
        return told(scope, found.mutant, found.kind, found.text, taken), f"after {len(found.steps)} steps"
    return None, f"after {len(found.steps)} steps nothing is wrong"


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


def _to_where_it_stays(world: World, state: State) -> list[Taken]:
    """The fewest calm moves to states that calm moves do not lead out of: one that stands still, or some that go round."""
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
            return min((paths[s] for s in back), key=len)
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


def _steps(scope: Scope, taken: Sequence[Taken]) -> Iterator[Step]:
    world = World(scope)
    for move, state in taken:
        yield msgspec.structs.replace(_told(world, move, state), move=label(move))


def _told(world: World, move: Move, state: State) -> Step:
    kind, *rest = move
    first = rest[0] if rest else 0
    if kind in ("lose", "double"):
        what, t, message = rest
        fate = "lost" if kind == "lose" else "twice"
        return msgspec.structs.replace(_message(world, t, what, message), fate=fate)
    if kind in ("up", "down"):
        return _message(world, rest[0], kind, rest[1])
    if kind in ("greet", "welcome", "fence", "silence", "crash"):
        return _shared(world, move)
    key = name(first) if isinstance(first, int) else ""
    p, d = _lanes(world, state, first)
    match kind:
        case "begin":
            return Step("gateway", "begins the attempt", key=key, detail=f"on pair {rest[1]}")
        case "submit prefill":
            return Step("gateway", "Submit", p, key)
        case "submit decode":
            return Step("gateway", "Submit", d, key)
        case "cancel prefill":
            return Step("gateway", "Cancel", p, key)
        case "cancel decode":
            return Step("gateway", "Cancel", d, key)
        case "abort":
            return Step("adversary", "the client leaves", "gateway", key)
        case "start":
            return Step(p, "takes its pages and starts", key=key)
        case "compute":
            return Step(p, "has computed the next page", key=key)
        case "wrote" | "damage" | "haunt" | "doubt" | "write fails" | "ghost":
            if kind == "wrote":
                return Step(p, f"bytes of batch {rest[1]}", d, key)
            fate = {
                "damage": "is written, with a damaged byte",
                "haunt": "is written, and its bytes will come once more",
                "doubt": "ends in doubt: its bytes may still come",
                "write fails": "fails, and has stopped",
                "ghost": "comes once more",
            }[kind]
            return Step("adversary", f"batch {rest[1]} {fate}", d, key)
        case "reserve":
            return Step(d, "reserves its pages", key=key)
        case "credit":
            return Step(d, "gives it slots", key=key)
        case "copy":
            return Step(d, "copies a page out of its slot", key=key)
        case "verify":
            return Step(d, "hashes the page it copied to", key=key)
        case "finish":
            return Step(d, "has answered and lets its pages go", key=key)
        case "overdue" | "early overdue":
            who = d if kind == "overdue" else "adversary"
            return Step(who, "the drain deadline passes", d if who != d else "", key)
        case "nudge prefill":
            return Step(p, "time passes: says again what may be lost", key=key)
        case "nudge decode":
            return Step(d, "time passes: says again what may be lost", key=key)
    return Step("adversary", str(kind), key=key)


def _lanes(world: World, state: State, t: Any) -> tuple[str, str]:
    pair = (
        world.store.contents[state[6 * t + 2]][0]
        if isinstance(t, int) and 6 * t + 2 < len(state) and state[6 * t + 2] in world.store.contents
        else 0
    )
    pair = max(pair, 0)
    return f"prefill-{pair // world.scope.decodes}", f"decode-{pair % world.scope.decodes}"


def _shared(world: World, move: Move) -> Step:
    kind, *rest = move
    if kind == "crash":
        return Step("adversary", "its process ends; another begins", f"{rest[0]}-{rest[1]}")
    if kind == "silence":
        return Step("adversary", f"{rest[0]} gives the session up", f"{rest[0]}-0")
    pair = rest[0]
    p, d = f"prefill-{pair // world.scope.decodes}", f"decode-{pair % world.scope.decodes}"
    match kind:
        case "greet":
            return Step(p, "Hello: a new session", d)
        case "welcome":
            return Step(d, "Welcome: another segment", p)
        case _:
            return Step(d, "fences the segment and makes another")


def _message(world: World, t: int, way: str, message: Data) -> Step:
    p, d = _lanes(world, (), t)
    actor, to = (d, p) if way == "down" else (p, d)
    return Step(actor, message[1], to, name(t), _content(message))


def _use(use: Data) -> str:
    return f"slot {use[1]} use {use[2]}"


def _content(message: Data) -> str:
    match message:
        case ("M", "Credit", first, slots):
            return f"from {first}: {', '.join(map(_use, slots[1:])) or 'none open'}"
        case ("M", "Landed", sequence, pages):
            return f"batch {sequence}: " + ", ".join(f"page {p} in {_use(u)}" for _, p, u in pages[1:])
        case ("M", "Resend", page, use):
            return f"page {page} into {_use(use)}"
        case ("M", "Grant", tokens, pages):
            return f"{tokens} tokens, {pages} pages"
        case ("M", "Complete", tokens, pages, batches, _):
            return f"{tokens} tokens, {pages} pages, {batches} batches"
        case ("M", "Abort", code, _):
            return code
    return ""
