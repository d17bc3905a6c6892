"""`hermetic simulate`: run seeds, say what happened and what was found; exit 0 when everything held, 1 with a counterexample.

The one thing to know: the last line of a finding is the command that repeats it.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path

import msgspec

from hermetic.handoff.trace import TraceFileError, recording, start
from hermetic.proof.chart import draw
from hermetic.proof.mutants.catch import TRIES, catch
from hermetic.proof.mutants.patching import WORKERS, MutantError
from hermetic.proof.mutants.registry import MUTANTS, SIMULATOR, applied
from hermetic.proof.report import Progress
from hermetic.proof.saved import SAVED, Counterexample, SavedError, check_place
from hermetic.proof.simulation.campaign import Summary, campaign, one
from hermetic.proof.simulation.options import CLASSES, Narrowed, Rates, SimulateOptions, SimulationError
from hermetic.proof.simulation.plan import Asked
from hermetic.proof.simulation.shrink import shrink
from hermetic.proof.simulation.world import Result, asked_again


def main(options: SimulateOptions) -> int:
    """0: all held; 1: something did not; 2: it could not be run."""
    try:
        _check(options)
        if options.mutants:
            return _mutants(options)
        with applied(options.mutant, WORKERS):
            return _wall_clock(options) if options.wall_clock else _virtual(options)
    except (SimulationError, MutantError, SavedError, TraceFileError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def replay(found: Counterexample) -> Counterexample | None:
    """Run it again: what it finds now, or None if everything holds. The mutant is applied by the caller.

    Raises SimulationError for a counterexample that is not the simulator's."""
    asked = asked_again(found)
    assert found.seed is not None
    again = one(asked, found.seed).found
    return None if again is None else msgspec.structs.replace(again, mutant=found.mutant)


def _check(options: SimulateOptions) -> None:
    if options.seeds < 1 or options.requests < 1 or options.processes < 1:
        raise SimulationError("--seeds, --requests and --processes are at least 1")
    for name in options.narrowed.without:
        if name not in CLASSES:
            raise SimulationError(f"--without {name}: there are {', '.join(CLASSES)}")
    for one_rate in fields(Rates):
        if getattr(options.rates, one_rate.name) < 0:
            raise SimulationError(f"--{one_rate.name.replace('_', '-')} is less than nothing")
    if options.transport not in ("simulated", "mooncake"):
        raise SimulationError(f"--transport {options.transport}: there are simulated and mooncake")
    if (options.transport == "mooncake") != options.wall_clock:
        raise SimulationError("--transport mooncake and --wall-clock go together: real bytes take real time")
    if options.trace and options.seeds > 1:
        raise SimulationError("--trace records one run: give one seed")
    if options.wall_clock and (options.json or options.trace):
        raise SimulationError("--json and --trace are for runs that can be repeated, without --wall-clock")
    if options.json:
        check_place(Path(options.json))  # not after minutes of runs


def _virtual(options: SimulateOptions) -> int:
    asked = Asked(options.requests, options.rates, options.narrowed)
    seeds = range(options.seed, options.seed + options.seeds)
    began = time.monotonic()
    shown = Progress()

    def so_far(summary: Summary) -> None:
        shown.say(f"{summary.runs} of {options.seeds} seeds, {len(summary.found)} with a finding")

    if options.trace:
        start(options.trace)
    with recording(options.trace) if options.trace else nullcontext():
        summary = campaign(seeds, asked, min(options.processes, options.seeds), so_far)
    shown.clear()
    print(_told(summary, time.monotonic() - began))
    if not summary.found:
        return 0
    _report(options, summary.found[0], asked)
    return 1


def _report(options: SimulateOptions, result: Result, asked: Asked) -> None:
    found = result.found
    assert found is not None
    print(f"\nseed {result.seed}: {found.kind}: {found.text}")
    if options.shrink:
        shown = Progress()
        found, asked = shrink(found, result.seed, asked, shown.say)
        shown.clear()
    found = msgspec.structs.replace(found, mutant=options.mutant)
    print()
    print(draw(found))
    saved = Path(options.json or SAVED)
    found.save(saved)
    print(f"\nsaved as {saved}; every step that is kept: hermetic prove --replay {saved} --full")
    print(f"again: {again(result.seed, asked, options.mutant)}")


def again(seed: int, asked: Asked, mutant: str = "") -> str:
    """The command that repeats a run."""
    words = [f"hermetic simulate --seed {seed} --requests {asked.requests}"]
    narrowed: Narrowed = asked.narrowed
    for name in ("only", "faults", "without"):
        chosen = getattr(narrowed, name)
        if chosen or (chosen is not None and name != "without"):
            words.append(f"--{name} {','.join(map(str, chosen)) or 'none'}")
    for name in CLASSES:
        if getattr(asked.rates, name) != getattr(Rates(), name):
            words.append(f"--{name.replace('_', '-')} {getattr(asked.rates, name):g}")
    words += [f"--mutant {mutant}"] if mutant else []
    return " ".join(words)


def _told(summary: Summary, seconds: float) -> str:
    outcomes = {
        k.removeprefix("outcome "): n for k, n in sorted(summary.counts.items()) if k.startswith("outcome ")
    }
    faults = {k: n for k, n in sorted(summary.counts.items()) if not k.startswith("outcome ")}
    return "\n".join(
        [
            f"{summary.runs} runs, {summary.requests:,} requests, {summary.attempts:,} attempts, "
            f"{summary.pages:,} pages landed, {summary.events:,} events",
            f"{summary.virtual_seconds:,.0f} virtual seconds in {seconds:.1f} s: "
            f"{summary.requests / max(seconds, 1e-9):,.0f} requests a second",
            "outcomes: " + (", ".join(f"{name} {n:,}" for name, n in outcomes.items()) or "none"),
            "what went wrong: " + (", ".join(f"{name} {n:,}" for name, n in faults.items()) or "nothing"),
            f"broken promises: {len(summary.found)} runs"
            if summary.found
            else "every promise held in every run",
        ]
    )


def _mutants(options: SimulateOptions) -> int:
    """For each mutant the median number of seeds until it is found. 0: each was found that has to be."""
    missed, tries = 0, options.seeds if options.seeds > 1 else TRIES
    for name, mutant in MUTANTS.items():
        found = catch(name, SIMULATOR, tries=tries)
        must = SIMULATOR in mutant.caught_by
        missed += must and not found.found
        how = found.found or "not found" + (", and must be" if must else "")
        seeds = f"median of {tries} tries: {found.steps} seeds" if found.found else ""
        print(f"{name:36} {how:24} {seeds}".rstrip(), flush=True)
    return 1 if missed else 0


def _wall_clock(options: SimulateOptions) -> int:
    from hermetic.proof.simulation.wall_clock import run_real

    began = time.monotonic()
    summary = Summary()
    for seed in range(options.seed, options.seed + options.seeds):
        summary.add(run_real(seed, Asked(options.requests, options.rates, options.narrowed)))
    print(_told(summary, time.monotonic() - began))
    for result in summary.found:
        assert result.found is not None
        print(f"\nseed {result.seed}:\n{draw(result.found)}")
    return 1 if summary.found else 0


__all__ = ["again", "main", "replay"]
