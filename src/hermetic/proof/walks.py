"""Random walks through scopes that are too large to search: every state on the way is checked, distinct ones are counted."""

from __future__ import annotations

import gc
import multiprocessing
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hermetic.proof.model import MASK, Broken, Move
from hermetic.proof.saved import Counterexample
from hermetic.proof.scopes import Scope
from hermetic.proof.story import Taken, ends, told, unended
from hermetic.proof.world import World

FAULT_ODDS = 0.15  # of a step being a fault, while there are any left and calm moves as well
STEPS = 400  # of one walk at most; calm ones end well before


@dataclass
class Walks:
    """What the walks met."""

    scope: Scope
    walks: int = 0
    steps: int = 0
    distinct: int = 0
    ended: int = 0  # walks after which everything had ended and come back
    seconds: float = 0.0
    violation: Counterexample | None = None


def walk(scope: Scope, seed: int, walks: int, mutant: str = "") -> tuple[Walks, set[int]]:
    """Walks from one seed, in this process; also the fingerprints of the states they met."""
    draw, world, seen = random.Random(seed), World(scope), set[int]()
    result, began = Walks(scope), time.monotonic()
    for _ in range(walks):
        state, taken = world.initial(), list[Taken]()
        result.walks += 1
        for _ in range(STEPS):
            seen.add(hash(state) & MASK)
            try:
                moves = world.expand(state)
            except Broken as broken:
                taken.append((broken.move, state))
                result.violation = told(world, mutant, broken.kind, broken.text, taken)
                break
            if world.good(state) or not moves:
                break
            move, after = _chosen(draw, moves)
            taken.append((move, state))
            state = after
            result.steps += 1
        if result.violation is not None:
            break
        if world.good(state):
            result.ended += 1
        elif not ends(world, state):
            result.violation = unended(world, mutant, taken, state)
            break
    result.distinct, result.seconds = len(seen), time.monotonic() - began
    return result, seen


def _chosen(draw: random.Random, moves: list[tuple[Move, bool, Any]]) -> tuple[Move, Any]:
    calm = [(move, after) for move, is_calm, after in moves if is_calm]
    faults = [(move, after) for move, is_calm, after in moves if not is_calm]
    if faults and (not calm or draw.random() < FAULT_ODDS):
        return draw.choice(faults)
    return draw.choice(calm)


def _begin() -> None:
    """In each process that walks: nothing that is made stays long, and Ctrl-C is for the one that waits for it."""
    gc.disable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def walks(
    scope: Scope,
    seconds: float,
    seed: int = 0,
    processes: int = 2,
    mutant: str = "",
    progress: Callable[[Walks], None] | None = None,
) -> Walks:
    """Walk for so long, from seeds `seed`, `seed`+1, ... Each seed's walks are the same every time."""
    total, seen, began, at = Walks(scope), set[int](), time.monotonic(), seed
    context = multiprocessing.get_context("fork")
    with context.Pool(processes, initializer=_begin, maxtasksperchild=8) as pool:
        while total.violation is None and time.monotonic() - began < seconds:
            jobs = [pool.apply_async(walk, (scope, at + i, 40, mutant)) for i in range(processes)]
            at += processes
            for job in jobs:
                result, states = job.get()
                seen |= states
                total.walks += result.walks
                total.steps += result.steps
                total.ended += result.ended
                total.violation = total.violation or result.violation
            total.distinct, total.seconds = len(seen), time.monotonic() - began
            if progress is not None:
                progress(total)
    return total
