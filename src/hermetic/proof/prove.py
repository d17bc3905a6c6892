"""`hermetic prove`: search, induction, refinement; recordings; saved counterexamples; mutants.

Exit codes: 0 everything holds, 1 there is a counterexample (of a mutant: the good outcome), 2 it could not be run. The one
thing to know: 0 is never said of a search that was cut short; a scope that is walked at random says so in its lines.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hermetic.proof import report
from hermetic.proof.chart import draw
from hermetic.proof.options import ProveError, ProveOptions, Sizes, parts_of
from hermetic.proof.saved import SAVED, Counterexample, SavedError, check_place, load, put
from hermetic.proof.scopes import FAULTS, Scope

if TYPE_CHECKING:
    from hermetic.proof.search import Exploration

REFINED = {"small": 2_000, "default": 20_000, "large": 10**9}
"""By scope: how many states of each part of the small scope are put to the abstract protocol."""


def main(options: ProveOptions) -> int:
    """The exit code. Everything that a person has to mend is one line on standard error."""
    from hermetic.proof.conformance.recording import TraceError
    from hermetic.proof.mutants.patching import MutantError
    from hermetic.proof.search import SearchError

    try:
        return _chosen(options)
    except (ProveError, SavedError, SearchError, MutantError, TraceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _chosen(options: ProveOptions) -> int:
    wanted = {
        "--replay": options.replay,
        "--conform": options.conform,
        "--mutant": options.mutant,
        "--mutants": options.mutants,
        "--growth": options.growth,
    }
    chosen = [name for name, value in wanted.items() if value]
    if len(chosen) > 1:
        raise ProveError(f"{' and '.join(chosen)} are different things to do; give one of them")
    if options.as_test and options.replay is None:
        raise ProveError("--as-test is for a saved counterexample: --replay FILE --as-test")
    if options.write_docs and not (options.mutants or options.growth):
        raise ProveError("--write-docs writes a table into docs/proof.md: give --mutants or --growth with it")
    _check_outputs(options)
    if options.replay is not None:
        return _replay(options, options.replay)
    if options.conform is not None:
        return _conform(options, options.conform)
    if options.mutants:
        return _mutants(options)
    if options.growth:
        return _growth(options)
    parts = parts_of(options.scope, options.sizes)
    return _mutant(options, parts) if options.mutant else _prove(options, parts)


def _check_outputs(options: ProveOptions) -> None:
    """What cannot be written is said before minutes of search, not after them."""
    if options.json is not None:
        check_place(options.json)
    if options.write_docs:
        from hermetic.proof.diagram import DOCS, between

        try:
            between("mutants" if options.mutants else "growth", DOCS.read_text())
        except (OSError, ValueError) as error:
            raise ProveError(f"--write-docs: {error}") from error


# ------------------------------------------------------------------- everything about a scope


def _prove(options: ProveOptions, parts: Sequence[Scope]) -> int:
    if options.induction:
        import z3  # noqa: F401  (if it is missing, that is said before minutes of search, not after them)
    began = time.monotonic()
    result: dict[str, Any] = {"scope": options.scope, "parts": []}
    print(f"scope {options.scope}, on the production machines, slots and pools\nchecked: {report.CHECKED}\n")
    for part in parts:
        print(*report.covered(part), sep="\n")
        found = _searched(options, part, result)
        if found is not None:
            return _fails(options, found)
        print()
    for name, check in (("refinement", _refinement), ("induction", _induction)) if options.induction else ():
        print(name)
        found = check(options, result)
        if found is not None:
            return _fails(options, found)
        print()
    result |= {"holds": True, "seconds": round(time.monotonic() - began, 1)}
    if options.json is not None:
        put(options.json, result)
    left_out = "" if options.induction else "; the induction was left out (--no-induction)"
    held = (
        "nothing was met that does not hold (walks, not a search)"
        if options.scope == "large"
        else "all holds"
    )
    print(f"{held}, {result['seconds']:.0f} s{left_out}")
    return 0


def _searched(options: ProveOptions, part: Scope, result: dict[str, Any]) -> Counterexample | None:
    """Search a part of a scope to its end, or walk where that is too far. Prints what was seen. A mutant is applied already."""
    progress = report.Progress()
    if options.scope == "large":
        from hermetic.proof.walks import walks

        walked = walks(
            part,
            options.seconds,
            options.seed,
            options.processes,
            options.mutant,
            lambda w: progress.say(report.walking(w)),
        )
        progress.clear()
        print(*report.walked(walked), sep="\n")
        figures = {"walks": walked.walks, "steps": walked.steps, "states": walked.distinct, "complete": False}
        result["parts"].append({"name": part.name, "covered": part.covered(), **figures})
        return walked.violation
    found = _explored(options, part, lambda e: progress.say(report.searching(e)))
    progress.clear()
    print(*report.explored(found), sep="\n")
    result["parts"].append({
        "name": part.name,
        "covered": part.covered(),
        "states": found.states,
        "transitions": found.transitions,
        "depth": found.depth,
        "seconds": round(found.seconds, 2),
        "complete": found.complete,
    })  # fmt: skip
    if found.violation is None and not found.complete:
        raise ProveError(f"the search of {part.name} ended before every state was seen")
    return found.violation


def _explored(options: ProveOptions, part: Scope, say: Callable[[Exploration], None]) -> Exploration:
    """The compiled search where it pays for being compiled; the plain one for what is small, runs a mutant or does not fit it."""
    if options.scope != "small" and not options.mutant:
        from hermetic.proof.compiled import explore_exactly
        from hermetic.proof.tables import fits

        if fits(part):
            return explore_exactly(part, threads=options.processes, progress=say)
    from hermetic.proof.search import explore

    reduce = not options.mutant  # reductions are argued for the protocol as it is
    return explore(part, processes=options.processes, mutant=options.mutant, reduce=reduce, progress=say)


def _refinement(options: ProveOptions, result: dict[str, Any]) -> Counterexample | None:
    """Of what the small scope reaches: is each step of the production objects one of the abstract protocol?"""
    from hermetic.proof.refinement import Refinement, refine

    began, parts, found = time.monotonic(), parts_of("small", Sizes()), Refinement()
    progress = report.Progress()
    # Started afresh: z3 has threads of its own, and a fork of them hangs.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(options.processes, len(parts)), context) as pool:
        jobs = [pool.submit(refine, part, states=REFINED[options.scope]) for part in parts]
        while not all(job.done() for job in jobs):
            done = sum(job.done() for job in jobs)
            progress.say(
                f"refinement: {done} of {len(jobs)} parts are done, {time.monotonic() - began:.0f} s"
            )
            wait(jobs, timeout=1.0)
        found.parts = [part for job in jobs for part in job.result().parts]
    progress.clear()
    found.seconds = time.monotonic() - began
    print(*(line for text in found.lines() for line in report.wrapped(f"  {text}")), sep="\n")
    result["refinement"] = found.lines()
    return found.violation


def _induction(options: ProveOptions, result: dict[str, Any]) -> Counterexample | None:
    from hermetic.proof.induction import prove_induction
    from hermetic.proof.replay import of_induction

    progress = report.Progress()
    # What each conjunct is needed for takes as long again, and is a matter of the default scope.
    found = prove_induction(progress=progress.say, full=options.scope != "small")
    progress.clear()
    print(*(line for text in found.lines() for line in report.wrapped(f"  {text}")), sep="\n")
    result["induction"] = {
        "closed": found.closed,
        "queries": len(found.queries),
        "seconds": round(found.seconds, 1),
    }
    return None if found.closed else of_induction(found)


def _fails(options: ProveOptions, found: Counterexample) -> int:
    report.show(found, options.json or Path(SAVED), options.full)
    return 1


# ------------------------------------------------------------------- what somebody has already


def _replay(options: ProveOptions, path: Path) -> int:
    from hermetic.proof.replay import as_test, replay

    found = load(path)
    if options.as_test:
        print(as_test(found, path.name), end="")
        return 0
    try:
        now = replay(found)
    except SavedError as error:
        raise SavedError(f"{path} cannot be played again: {error}") from error
    if now is None:
        print(draw(found, report.width(), full=options.full))
        steps = f"all {len(found.steps)} steps can still be made, and " if found.source == "explorer" else ""
        print(f"\nplayed again: {steps}nothing is wrong now")
        return 0
    print(draw(now, report.width(), full=options.full))
    same = (
        "it still fails"
        if now.kind == found.kind
        else f"it fails, and otherwise than when it was saved ({found.kind})"
    )
    print(f"\nplayed again: {same}")
    return 1


def _conform(options: ProveOptions, path: Path) -> int:
    from hermetic.proof.conform import conform

    found = conform(path)
    print(*found.lines(), sep="\n")
    if found.violation is not None:
        _fails(options, found.violation)
    return found.exit_code


# ------------------------------------------------------------------- mutants, growth


def _mutant(options: ProveOptions, parts: Sequence[Scope]) -> int:
    """With a scope or sizes of its own: that search. Else every catcher that has to find it, in the scope that is its own."""
    from hermetic.proof.mutants.catch import catch
    from hermetic.proof.mutants.registry import find

    mutant = find(options.mutant)
    print(f"{mutant.name}: {mutant.fault}\nclasses: {', '.join(mutant.classes)}\n")
    if options.scope != ProveOptions().scope or options.sizes:
        return _mutant_in(options, parts)
    first: Counterexample | None = None
    caught = missed = 0
    progress = report.Progress()
    for by in mutant.caught_by:
        progress.say(f"{by} looks for it")
        found = catch(mutant.name, by, processes=options.processes)
        caught, missed = caught + bool(found.found), missed + (not found.found)
        steps = f", {found.steps} steps" if by == "explorer" and found.found else ""
        progress.clear()
        print(
            f"{by}: {found.found or 'does not find it, and should'}{steps} ({found.seconds:.1f} s)",
            flush=True,
        )
        if found.counterexample is not None and (first is None or first.source == "induction"):
            first = found.counterexample
    if first is not None:
        _fails(options, first)
    print(f"\ncaught by {caught} of {caught + missed} that have to")
    return 1 if caught else 0


def _mutant_in(options: ProveOptions, parts: Sequence[Scope]) -> int:
    from hermetic.proof.mutants.patching import EXPLORER
    from hermetic.proof.mutants.registry import applied

    for part in parts:
        print(*report.covered(part), sep="\n")
        with applied(options.mutant, EXPLORER):
            found = _searched(options, part, {"parts": []})
        if found is not None:
            return _fails(options, found)
    print("\nnot found in this scope")
    return 0


def _mutants(options: ProveOptions) -> int:
    from hermetic.proof.mutants.registry import MUTANTS
    from hermetic.proof.mutants.table import lines, markdown, table

    progress = report.Progress()
    rows = table(MUTANTS, progress.say, processes=options.processes)
    progress.clear()
    print(*lines(rows, report.width()), sep="\n")
    if options.write_docs:
        from hermetic.proof.diagram import put_between

        put_between("mutants", markdown(rows))
    return 0 if all(row.caught for row in rows) else 1


def _growth(options: ProveOptions) -> int:
    """How many states there are when one bound after the other is made larger."""
    from hermetic.proof.search import explore

    rows = []
    progress = report.Progress()
    for name, scope in growing():
        found = explore(
            scope,
            processes=options.processes,
            liveness=False,
            progress=lambda e: progress.say(report.searching(e)),
        )
        progress.clear()
        if found.violation is not None:
            return _fails(options, found.violation)
        rows.append(
            (name, found.states, found.transitions, found.depth, f"{found.states / found.seconds:,.0f}")
        )
        print(f"{name}: {found.states:,} states", file=sys.stderr, flush=True)
    titles = ("scope", "states", "transitions", "depth", "states/s")
    print(*report.table(titles, rows), sep="\n")
    if options.write_docs:
        from hermetic.proof.diagram import put_between

        put_between("growth", report.markdown(titles, rows))
    return 0


def growing() -> list[tuple[str, Scope]]:
    """One request on one page without faults, and then each bound by itself made larger."""
    six = dict.fromkeys(FAULTS[:6], 1)
    return [
        ("one request, no fault", Scope("calm", (1,), 1, 1)),
        ("prompt of 2 pages", Scope("calm", (2,), 2, 1)),
        ("prompt of 3 pages", Scope("calm", (3,), 3, 1)),
        ("2 pages, 2 slots", Scope("calm", (2,), 2, 2)),
        *((f"{fault} 1", Scope(fault, (1,), 1, 1, {fault: 1})) for fault in FAULTS[:5]),
        ("deadline and abort 1", Scope("deadline", (1,), 1, 1, {"abort": 1, "deadline": 1})),
        *((f"all six, at most {n}", Scope("six", (1,), 1, 1, six, at_most=n)) for n in (1, 2, 3, 6)),
        *((f"{n} requests, no fault", Scope("requests", (1,) * n, 1, 1)) for n in (2, 3)),
        ("2 requests, 2 pages", Scope("requests", (1, 1), 2, 1)),
        ("2 requests, 2 pages, 2 slots", Scope("requests", (1, 1), 2, 2)),
        *(
            (f"2 requests, 1 page, all six, at most {n}", Scope("requests", (1, 1), 1, 1, six, at_most=n))
            for n in (1, 2)
        ),
    ]


__all__ = ["growing", "main"]
