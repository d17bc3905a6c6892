"""Many seeds, on every core: what came of each, in the order of the seeds whatever finished first.

The one thing to know: workers of the campaign are forked, so that a mutant that is applied here is applied there.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from hermetic.proof.saved import Counterexample
from hermetic.proof.simulation.plan import Asked, make
from hermetic.proof.simulation.world import Result, run

MOST_SEEDS = 120  # that a mutant is looked for in all tries together


@dataclass
class Summary:
    """All runs of a campaign together."""

    runs: int = 0
    requests: int = 0
    attempts: int = 0
    events: int = 0
    pages: int = 0
    virtual_seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    found: list[Result] = field(default_factory=list)

    def add(self, result: Result) -> None:
        self.runs += 1
        self.requests += result.requests
        self.attempts += result.attempts
        self.events += result.events
        self.pages += result.pages_sent
        self.virtual_seconds += result.virtual_seconds
        self.counts.update(result.counts)
        if result.found is not None:
            self.found.append(result)


def one(asked: Asked, seed: int) -> Result:
    return run(make(seed, asked))


def results(seeds: Iterable[int], asked: Asked, processes: int) -> Iterator[Result]:
    """What comes of each seed, in order."""
    if processes < 2:
        yield from map(partial(one, asked), seeds)
        return
    # Ctrl-C is for the process that waits for them, which ends them.
    quiet = (signal.SIGINT, signal.SIG_IGN)
    with multiprocessing.get_context("fork").Pool(processes, signal.signal, quiet) as pool:
        yield from pool.imap(partial(one, asked), seeds)


def campaign(
    seeds: Iterable[int], asked: Asked, processes: int, progress: Callable[[Summary], None] = lambda _: None
) -> Summary:
    """Every seed; stops at nothing."""
    summary = Summary()
    for result in results(seeds, asked, processes):
        summary.add(result)
        progress(summary)
    return summary


def until_found(tries: int, asked: Asked) -> tuple[list[int], Counterexample | None]:
    """For each try how many seeds it took to find something, and the first counterexample.

    Tries take the seeds 1, 2, .. in turn, and end together after MOST_SEEDS, whether or not each has found something. When
    none has, that is the number."""
    numbers: list[int] = []
    found: Counterexample | None = None
    since = 0
    for seed in range(1, 1 + MOST_SEEDS):
        since += 1
        result = one(asked, seed)
        if result.found is not None:
            found = found or result.found
            numbers.append(since)
            since = 0
            if len(numbers) == tries:
                return numbers, found
    return numbers or [MOST_SEEDS], found


__all__ = ["MOST_SEEDS", "Summary", "campaign", "one", "results", "until_found"]
