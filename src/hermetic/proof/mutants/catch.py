"""Who notices a mutant, and how fast: one run of the explorer, the induction, the simulator or the seals with it.

The one thing to know: a mutant counts as caught only if its code was reached there. One that nobody reached, and that was
therefore not found, is an error of the mutant, not a result.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace

import msgspec

from hermetic.proof.mutants.patching import EXPLORER, WORKERS, MutantError, Reached
from hermetic.proof.mutants.registry import Mutant, applied, find
from hermetic.proof.saved import Counterexample

REQUESTS = 50  # of one simulated run
TRIES = 5  # by the simulator, of which the median number of seeds is taken


@dataclass(frozen=True)
class Catch:
    """`by` a catcher; `found` what broke, in a few words ("" if nothing did); `steps` of its counterexample, for the simulator
    the median number of seeds until it is found."""

    mutant: str
    by: str
    found: str
    steps: int = 0
    seconds: float = 0.0
    counterexample: Counterexample | None = None


def catch(name: str, by: str, *, processes: int = 1, tries: int = TRIES) -> Catch:
    """Raises MutantError for a name, a catcher or a target that is not there, and for code that was not reached."""
    mutant, began = find(name), time.monotonic()
    match by:
        case "explorer":
            found = _explore(mutant, processes)
        case "induction":
            found = _induce(mutant)
        case "simulator":
            found = _simulate(mutant, tries)
        case "seal" | "lab":
            found = _play(mutant)
        case _:
            raise MutantError(f"there is no catcher {by!r}")
    return Catch(name, by, *found[:2], time.monotonic() - began, found[2])


Found = tuple[str, int, Counterexample | None]


def _explore(mutant: Mutant, processes: int) -> Found:
    from hermetic.proof.search import explore

    if mutant.scope is None:
        return "", 0, None
    with applied(mutant.name, EXPLORER) as reached:
        # Without reductions: they are argued for the protocol as it is.
        result = explore(mutant.scope, processes=processes, mutant=mutant.name, reduce=False)
        found = result.violation
        _require(mutant, reached, EXPLORER, found)
    return (found.kind, len(found.steps), found) if found else ("", 0, None)


def _induce(mutant: Mutant) -> Found:
    from hermetic.proof.induction import prove_induction
    from hermetic.proof.replay import of_induction

    result = prove_induction(mutant.name, full=False)
    if result.failed is None:
        return "", 0, None
    action, conjunct = result.failed
    return f"{conjunct}, by {action}", 1, of_induction(result)


def _simulate(mutant: Mutant, tries: int) -> Found:
    """`steps` is the median number of seeds until it is found."""
    from hermetic.proof.simulation.campaign import until_found
    from hermetic.proof.simulation.options import Rates
    from hermetic.proof.simulation.plan import Asked

    asked = Asked(REQUESTS, replace(Rates(), **mutant.weather))
    with applied(mutant.name, WORKERS) as reached:
        seeds, found = until_found(tries, asked)
        _require(mutant, reached, WORKERS, found)
    if found is None:
        return "", 0, None
    return found.kind, round(statistics.median(seeds)), msgspec.structs.replace(found, mutant=mutant.name)


def _play(mutant: Mutant) -> Found:
    from hermetic.proof.mutants.plays import PLAYS

    play = PLAYS.get(mutant.name)
    if play is None:
        return "", 0, None
    with applied(mutant.name, WORKERS) as reached:
        refused = play()
        _require(mutant, reached, WORKERS, refused)
    return refused, 0, None


def _require(mutant: Mutant, reached: Reached, runs: str, found: object) -> None:
    """A find ends a run early: then something of the mutant must have been reached. Without one, all of it."""
    missed = reached.missed(runs)
    if missed and (not found or len(missed) == len(reached.patches)):
        raise MutantError(
            f"{mutant.name} changes {', '.join(missed)}, and that code was never reached in this run"
        )


__all__ = ["Catch", "catch"]
