"""Every state that a scope can reach, breadth first, on several processes.

A state belongs to the process that its fingerprint names; what leads into another's part is handed over at the end of each
level, with the contents of components that the other has not seen. Breadth first, so the first violation has a shortest
path. The one thing to know: a state is remembered by a 64-bit fingerprint (Python's hash of a tuple of 64-bit content ids).
Two states with one fingerprint would be taken for one: with n states the chance that this happened at all is below
n * n / 2^62 (61 bits count), which every result states.

There is a second search, `compiled.py`. This one takes every scope and every mutant (several pairs of workers, states without
reductions, worlds that something was done to), needs no tables, and is short enough to be read; but it sees some 20,000 states
a second. The other is ten times as fast and keeps states whole, for one pair of workers and the protocol as it is: without it
the default scope would take hours. A test compares the two, state by state.
"""

from __future__ import annotations

import array
import contextlib
import gc
import marshal
import multiprocessing
import multiprocessing.connection
import resource
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import numpy as np

from hermetic.handoff.actions import Action
from hermetic.handoff.machine import Machine
from hermetic.proof.liveness import unreached
from hermetic.proof.model import MASK, Broken, Move, State
from hermetic.proof.saved import Counterexample
from hermetic.proof.scopes import Scope
from hermetic.proof.story import replayed, told, unended
from hermetic.proof.world import World

SAY_SECONDS = 1.0  # between two words of a process about the level that it is in

Row = tuple[str, str, str]
"""Machine, state, event."""
Progress = Callable[["Exploration"], None]


class SearchError(RuntimeError):
    """A process of the search was ended from outside; what it had seen is lost."""


@dataclass
class Exploration:
    """What was searched and found. `complete`: every reachable state was seen."""

    scope: Scope
    states: int = 0
    transitions: int = 0
    depth: int = 0
    seconds: float = 0.0
    local_steps: int = 0
    good: int = 0
    memory: int = 0  # bytes, of all processes
    complete: bool = False
    ending: int = (
        0  # states of which it is known already that a good end can be reached, while that is looked for
    )
    rows: set[Row] = field(default_factory=set)  # of the machines' tables, that were taken
    violation: Counterexample | None = None

    @property
    def collision(self) -> float:
        """Upper bound of the chance that two states shared a fingerprint."""
        return self.states**2 / 2**62


def explore(
    scope: Scope,
    *,
    processes: int = 2,
    mutant: str = "",
    reduce: bool = True,
    limit: int = 10**12,
    liveness: bool = True,
    progress: Progress | None = None,
) -> Exploration:
    """Search the whole scope, or until a promise is broken, or more than `limit` states. The mutant must be applied by the
    caller: processes are forked, and inherit it. Raises SearchError."""
    began, result = time.monotonic(), Exploration(scope)
    with (
        tempfile.TemporaryDirectory(prefix="hermetic-prove-") as folder,
        _workers(scope, processes, reduce, liveness, Path(folder)) as workers,
    ):

        def say(states: int, transitions: int) -> None:
            result.states, result.transitions = states, transitions
            result.seconds = time.monotonic() - began
            if progress is not None:
                progress(result)

        broken: list[tuple[str, str, Move, int]] = []
        while True:
            levels = _level(workers, say)
            result.local_steps = sum(x["steps"] for x in levels)
            result.good = sum(x["good"] for x in levels)
            result.memory = sum(x["memory"] for x in levels)
            result.rows = set().union(*(x["rows"] for x in levels))
            say(sum(x["states"] for x in levels), sum(x["transitions"] for x in levels))
            broken = [x["broken"] for x in levels if x["broken"] is not None]
            if broken or not any(x["frontier"] for x in levels) or result.states > limit:
                break
            result.depth += 1
        result.complete = not broken and not any(x["frontier"] for x in levels)
        if broken:
            kind, text, move, last = min(broken, key=repr)
            world = World(scope, reduce)
            taken, _ = replayed(world, [*_path(workers, last), move])
            result.violation = told(world, mutant, kind, text, taken)
        elif result.complete and liveness:
            stuck = unreached(_arrays(workers, Path(folder)))
            if stuck is not None:
                world = World(scope, reduce)
                result.violation = unended(world, mutant, *replayed(world, _path(workers, stuck)))
        result.seconds = time.monotonic() - began
    return result


@dataclass(frozen=True)
class _Worker:
    """One searching process, as this one sees it."""

    pipe: Connection
    process: ForkProcess

    def answer(self) -> Any:
        """What it says next. Raises SearchError when it has ended."""
        multiprocessing.connection.wait([self.pipe, self.process.sentinel])
        if not self.pipe.poll():
            self.process.join()
            raise SearchError(
                f"a searching process ended with {self.process.exitcode}; if it was killed (-9), for lack of memory?"
            )
        answer = self.pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(f"a searching process ended: {answer}")
        return answer


def _level(workers: list[_Worker], say: Callable[[int, int], None]) -> list[dict[str, Any]]:
    """One level more: what each process has then. `say` is told on the way how many states and transitions there are."""
    for worker in workers:
        worker.pipe.send("level")
    latest: dict[_Worker, dict[str, Any]] = {}
    open_ = list(workers)
    while open_:
        ready = multiprocessing.connection.wait([x for w in open_ for x in (w.pipe, w.process.sentinel)])
        for worker in [w for w in open_ if w.pipe in ready or w.process.sentinel in ready]:
            latest[worker] = worker.answer()
            if "frontier" in latest[worker]:
                open_.remove(worker)
        if open_ and len(latest) == len(workers):
            say(sum(x["states"] for x in latest.values()), sum(x["transitions"] for x in latest.values()))
    return [latest[worker] for worker in workers]


def _path(workers: list[_Worker], last: int) -> list[int]:
    """Fingerprints from the initial state to `last`."""
    path = [last]
    while True:
        worker = workers[path[-1] % len(workers)]
        worker.pipe.send(("parent", path[-1]))
        parent = worker.answer()["parent"]
        if parent == path[-1]:
            return path[::-1]
        path.append(parent)


def _arrays(workers: list[_Worker], folder: Path) -> list[Path]:
    for worker in workers:
        worker.pipe.send("arrays")
    for worker in workers:
        worker.answer()
    return sorted(folder.glob("*.npz"))


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until this is over: Python drops what is raised in the hooks that run around a fork."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _workers(
    scope: Scope, processes: int, reduce: bool, liveness: bool, folder: Path
) -> Iterator[list[_Worker]]:
    context = multiprocessing.get_context("fork")
    mains = [context.Pipe() for _ in range(processes)]
    sides = {(a, b): context.Pipe() for a in range(processes) for b in range(a + 1, processes)}
    running: list[_Worker] = []
    try:
        with _uninterrupted():
            for rank in range(processes):
                peers = {b: sides[a, b][0] for a, b in sides if a == rank} | {
                    a: sides[a, b][1] for a, b in sides if b == rank
                }
                process = context.Process(
                    target=_serve,
                    args=(_Searcher(scope, rank, processes, reduce, liveness), mains[rank][1], peers, folder),
                    daemon=True,
                )
                process.start()
                running.append(_Worker(mains[rank][0], process))
        yield running
    finally:
        for worker in running:
            worker.process.kill()
            worker.process.join()


def _serve(searcher: _Searcher, pipe: Connection, peers: dict[int, Connection], folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that waits for the answer ends this one
    Machine.observer = searcher.taken
    gc.disable()  # what is made here stays, and has no cycles: walking it again and again is most of the time
    try:
        while True:
            match pipe.recv():
                case "level":
                    pipe.send(searcher.level(peers, pipe.send))
                case ("parent", fingerprint):
                    pipe.send({"parent": searcher.seen[fingerprint]})
                case "arrays":
                    searcher.save(folder)
                    pipe.send({})
    except Exception as error:  # noqa: BLE001  (told to the process that waits for the answer, which raises it)
        pipe.send(f"{error!r}\n{traceback.format_exc()}")


class Rows:
    """Which rows of the machines' tables are taken, for the observer of machines."""

    def __init__(self) -> None:
        self.rows: set[Row] = set()

    def stepped(
        self, machine: Machine[Any], event: str, args: tuple[Any, ...], before: Any, actions: list[Action]
    ) -> None:
        if (before, event) in machine.table:
            self.rows.add((type(machine).__name__, before.name, event))


class _Searcher:
    """One process's part of the search."""

    def __init__(self, scope: Scope, rank: int, processes: int, reduce: bool, liveness: bool) -> None:
        self.scope, self.rank, self.processes, self.reduce = scope, rank, processes, reduce
        self.liveness = liveness
        self.world = World(scope, reduce)
        self.seen: dict[int, int] = {}  # fingerprint -> its parent's
        self.order, self.sources, self.targets = array.array("Q"), array.array("I"), array.array("Q")
        self.good = array.array("B")
        self.frontier: list[State] = []
        self.transitions = 0
        self.given: dict[int, set[int]] = {}  # by peer, ids whose contents it has
        self.taken = Rows()
        start = self.world.initial()
        if (hash(start) & MASK) % processes == rank:
            self.seen[hash(start) & MASK] = hash(start) & MASK
            self.frontier = [start]

    def level(self, peers: dict[int, Connection], say: Callable[[dict[str, int]], None]) -> dict[str, Any]:
        """Expand the frontier; hand over what is others'; take what is ours. `say` is told how far it is, now and then."""
        world, seen, rank, processes = self.world, self.seen, self.rank, self.processes
        order, sources, targets, liveness = self.order, self.sources, self.targets, self.liveness
        found: list[State] = []
        out: dict[int, dict[int, tuple[State, int]]] = {peer: {} for peer in peers}
        broken, said = None, time.monotonic()
        for state in self.frontier:
            if time.monotonic() - said > SAY_SECONDS:
                said = time.monotonic()
                say({"states": len(seen), "transitions": self.transitions})
            fingerprint = hash(state) & MASK
            number = len(order)
            order.append(fingerprint)
            self.good.append(world.good(state))
            try:
                moves = world.expand(state)
            except Broken as error:
                broken = broken or (error.kind, error.text, error.move, fingerprint)
                continue
            self.transitions += len(moves)
            for _, calm, after in moves:
                there = hash(after) & MASK
                if calm and liveness:
                    sources.append(number)
                    targets.append(there)
                owner = there % processes
                if owner == rank:
                    if there not in seen:
                        seen[there] = fingerprint
                        found.append(after)
                else:
                    out[owner].setdefault(there, (after, fingerprint))
        for peer in sorted(peers):
            mine = self._packed(peer, out[peer])
            if rank < peer:
                peers[peer].send_bytes(mine)
                theirs = peers[peer].recv_bytes()
            else:
                theirs = peers[peer].recv_bytes()
                peers[peer].send_bytes(mine)
            contents, states = marshal.loads(theirs)
            for content in contents:
                world.store.id(content)
            for after, parent in states:
                there = hash(after) & MASK
                if there not in seen:
                    seen[there] = parent
                    found.append(after)
        self.frontier = found
        return {
            "states": len(seen),
            "transitions": self.transitions,
            "steps": world.steps,
            "good": sum(self.good),
            "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "frontier": len(found),
            "broken": broken,
            "rows": self.taken.rows,
        }

    def _packed(self, peer: int, states: dict[int, tuple[State, int]]) -> bytes:
        given = self.given.setdefault(peer, set())
        fresh = {number for state, _ in states.values() for number in state} - given
        given |= fresh
        contents = [self.world.store.contents[number] for number in fresh]
        return marshal.dumps((contents, list(states.values())), 2)

    def save(self, folder: Path) -> None:
        np.savez(
            folder / f"{self.rank}.npz",
            order=np.array(self.order, np.uint64),
            good=np.array(self.good, np.bool_),
            sources=np.array(self.sources, np.uint32),
            targets=np.array(self.targets, np.uint64),
        )


__all__ = ["Exploration", "Progress", "Row", "Rows", "SearchError", "explore"]
