"""Whole simulated deployments: they keep their promises, a run is a function of its seed, and what is broken is found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hermetic.proof.conform import conform
from hermetic.proof.mutants.catch import catch
from hermetic.proof.mutants.patching import WORKERS
from hermetic.proof.mutants.registry import MUTANTS, SIMULATOR, applied
from hermetic.proof.saved import load
from hermetic.proof.simulation import command
from hermetic.proof.simulation.campaign import campaign, one, until_found
from hermetic.proof.simulation.options import Narrowed, Rates, SimulateOptions
from hermetic.proof.simulation.plan import Asked
from hermetic.proof.simulation.shrink import shrink

QUIET = Asked(30, Rates().quiet())


def outcomes(counts: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if name.startswith("outcome ")}


def test_without_faults_every_request_gets_its_answer() -> None:
    for seed in range(1, 5):
        result = one(QUIET, seed)
        assert result.found is None, result.found
        assert set(outcomes(result.counts)) <= {
            "outcome completed",
            "outcome refused context_length_exceeded",  # by the gateway: it can never fit
            "outcome failed context_length_exceeded",  # by a worker that holds less than it announced
        }
        assert sum(outcomes(result.counts).values()) == 30
        assert set(result.counts) == set(outcomes(result.counts))


def test_with_every_fault_on_every_promise_is_kept() -> None:
    summary = campaign(range(1, 7), Asked(50), processes=1)
    assert [result.found for result in summary.found] == []
    assert summary.requests == 300
    ended = sum(count for name, count in summary.counts.items() if name.startswith("outcome "))
    assert ended == 300
    assert summary.counts["outcome completed"] > 100
    for fault in ("message lost", "message doubled", "crash", "freeze", "cut", "fence", "slot damaged"):
        assert summary.counts[fault] > 0, fault


def test_a_run_is_the_same_in_another_process_with_other_hash_seeds() -> None:
    script = (
        "from hermetic.proof.simulation.campaign import one\n"
        "from hermetic.proof.simulation.plan import Asked\n"
        "print(*[one(Asked(40), seed).digest for seed in (4, 5, 6)])\n"
    )
    here = [one(Asked(40), seed).digest for seed in (4, 5, 6)]
    environment = os.environ | {"PYTHONHASHSEED": "4711"}
    there = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment
    )
    assert there.stdout.split() == here
    assert len(set(here)) == 3


@pytest.mark.parametrize(
    ("mutant", "kinds"),
    [
        ("release-at-abort", {"I3"}),
        ("verification-skipped", {"I1"}),
        ("firsts-by-slot", {"I1"}),
        ("lineage-without-tenant", {"I1"}),
        ("double-close", {"I5"}),
        ("quarantine-forgets", {"I5", "handoff"}),
        ("failure-reported-as-success", {"I4"}),
        ("tail-left-behind", {"I6"}),
        ("all-slots-or-none", {"L1"}),
        ("leases-left", {"L2"}),
    ],
)
def test_a_fault_of_the_field_is_found(mutant: str, kinds: set[str]) -> None:
    with applied(mutant, WORKERS):
        numbers, found = until_found(1, Asked(50))
    assert found is not None
    assert found.kind in kinds
    assert numbers[0] <= 10


def test_a_failing_run_shrinks_is_saved_and_fails_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    mutant = "failed-send-counts-as-drained"
    with applied(mutant, WORKERS):
        _, first = until_found(1, Asked(20))
    assert first is not None
    assert first.seed is not None
    options = SimulateOptions(seed=first.seed, requests=20, mutant=mutant, json=str(file))
    assert command.main(options) == 1
    said = capsys.readouterr().out
    found = load(file)
    assert found.kind == "I3"
    assert found.mutant == options.mutant
    assert isinstance(found.scope["only"], list)
    assert len(found.scope["only"]) <= 5
    assert f"--only {','.join(map(str, found.scope['only']))}" in said.splitlines()[-1]
    with applied(found.mutant, WORKERS):
        repeated = command.replay(found)
    assert repeated is not None
    assert (repeated.text, repeated.steps) == (found.text, found.steps)
    assert command.replay(found) is None, "without the fault it holds"


def test_shrinking_keeps_the_kind_of_promise_that_is_broken() -> None:
    asked = Asked(12)
    with applied("lineage-without-tenant", WORKERS):
        found = next(r.found for seed in range(1, 30) if (r := one(asked, seed)).found is not None)
        assert found.seed is not None
        small, narrowed = shrink(found, found.seed, asked)
        again = one(narrowed, found.seed).found
    assert small.kind == found.kind
    assert again is not None
    assert again.text == small.text
    assert narrowed.narrowed.only is not None
    assert len(narrowed.narrowed.only) < 8
    assert narrowed.narrowed.without, "no message needs to be lost for it"


def test_the_command_says_what_happened(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(SimulateOptions(seed=2, requests=10, rates=Rates().quiet())) == 0
    said = capsys.readouterr().out
    assert "1 runs, 10 requests" in said
    assert "what went wrong: nothing" in said
    assert "every promise held" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (SimulateOptions(narrowed=Narrowed(without=("rain",))), "--without rain"),
        (SimulateOptions(requests=0), "at least 1"),
        (SimulateOptions(mutant="no-such"), "no-such"),
        (SimulateOptions(transport="mooncake"), "go together"),
        (SimulateOptions(seeds=2, trace="x"), "one seed"),
        (SimulateOptions(rates=Rates(loss=-1.0)), "--loss"),
        (SimulateOptions(json="/nowhere/found.json"), "/nowhere/found.json cannot be written"),
        (SimulateOptions(transport="mooncake", wall_clock=True, json="x"), "without --wall-clock"),
    ],
)
def test_what_cannot_be_run_is_refused(
    options: SimulateOptions, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(options) == 2
    assert said in capsys.readouterr().err


def test_for_each_mutant_the_seeds_are_counted_in_the_weather_that_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "nudge-says-nothing"
    monkeypatch.setattr(command, "MUTANTS", {name: MUTANTS[name]})
    assert command.main(SimulateOptions(seeds=2, mutants=True)) == 0
    found = catch(name, SIMULATOR, tries=2)
    assert capsys.readouterr().out.split() == [
        name,
        found.found,
        *f"median of 2 tries: {found.steps} seeds".split(),
    ]


def conforms(seed: int, file: Path) -> bool:
    assert command.main(SimulateOptions(seed=seed, trace=str(file), processes=1)) == 0
    return conform(file).exit_code == 0


def test_what_a_run_with_faults_records_is_a_behaviour_of_the_protocol(tmp_path: Path) -> None:
    assert conforms(6, tmp_path / "trace")


@pytest.mark.soak
def test_recordings_of_many_runs_are_behaviours_of_the_protocol(tmp_path: Path) -> None:
    assert all(conforms(seed, tmp_path / "trace") for seed in range(1, 61))


@pytest.mark.soak
def test_ten_thousand_requests_over_two_hundred_seeds_keep_every_promise() -> None:
    summary = campaign(range(1, 201), Asked(50), processes=2)
    assert [result.found for result in summary.found] == []
    assert summary.requests == 10_000


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if SIMULATOR in mutant.caught_by])
def test_every_mutant_that_the_simulator_must_find_is_found(name: str) -> None:
    with applied(name, WORKERS):
        _, found = until_found(1, Asked(50))
    assert found is not None


def test_an_exception_of_the_product_is_a_finding_and_ends_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("the product broke")

    for target in ("hermetic.worker.decode.DecodeWorker._enter", "hermetic.gateway.runs.Runs.begin"):
        with monkeypatch.context() as patched:
            patched.setattr(target, broken)
            found = one(QUIET, 1).found
        assert found is not None
        assert found.kind == "handoff"
        assert "the product broke" in found.text
