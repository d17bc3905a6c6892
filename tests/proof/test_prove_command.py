"""`hermetic prove`: what it says, what it saves, and its exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any
from unittest import mock

import msgspec
import pytest
from typer.testing import CliRunner

from hermetic import cli
from hermetic.proof import diagram, prove, refinement, report, search
from hermetic.proof.options import ProveError, ProveOptions, Sizes, parts_of
from hermetic.proof.saved import SAVED, load
from hermetic.proof.scopes import FAULTS, SCOPES, Scope
from hermetic.proof.search import explore
from hermetic.proof.simulation import command as simulation
from hermetic.proof.simulation.options import Narrowed, Rates, SimulateOptions

NONE = dict.fromkeys(FAULTS, 0)
TINY = Sizes(requests=1, prompt_pages=1, pages=1, slots=1, faults={**NONE, "abort": 1})
HOLDS = ProveOptions(scope="small", sizes=TINY, induction=False, processes=1)


@pytest.fixture
def found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A counterexample, found with a mutant and saved."""
    path = tmp_path / "found.json"
    options = ProveOptions(scope="small", sizes=TINY, mutant="release-at-abort", processes=1, json=path)
    assert prove.main(options) == 1
    said = capsys.readouterr().out
    assert (
        "==> I3, no early reuse: slot 0 is free while a write of page 0 of A/1 may still arrive in it" in said
    )
    assert "adversary: the client leaves" in said
    assert f"hermetic prove --replay {path}" in said
    return path


def test_a_scope_that_holds_says_what_was_covered_and_what_was_not(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert prove.main(replace(HOLDS, json=tmp_path / "figures.json")) == 0
    said = capsys.readouterr().out
    assert "covered: 1 request (1 page), 1 prefill + 1 decode, 1 pages, 1 slots; faults: abort 1" in said
    assert "not covered: crash (a worker ends" in said
    assert "every state seen" in said
    assert said.rstrip().endswith("the induction was left out (--no-induction)")
    figures = json.loads((tmp_path / "figures.json").read_text())
    alone = explore(Scope("alone", (1,), 1, 1, {"abort": 1}), processes=1)
    assert figures["holds"] is True
    assert figures["parts"][0]["states"] == alone.states
    assert figures["parts"][0]["depth"] == alone.depth


def test_figures_are_no_counterexample(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    assert prove.main(replace(HOLDS, json=path)) == 0
    assert prove.main(ProveOptions(replay=path)) == 2
    assert "is not a saved counterexample" in capsys.readouterr().err


def test_a_counterexample_is_saved_and_fails_again_when_it_is_replayed(
    found: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = load(found)
    assert (saved.kind, saved.mutant, saved.source) == ("I3", "release-at-abort", "explorer")
    assert prove.main(ProveOptions(replay=found)) == 1
    assert "played again: it still fails" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mutant", "code", "says"),
    [
        ("", 0, "nothing is wrong now"),
        ("gone", 2, "there is no mutant 'gone'; there are: reject-becomes-placeholder"),
    ],
    ids=["mended", "gone"],
)
def test_a_replay_puts_in_the_fault_that_its_file_names_or_none(
    found: Path, capsys: pytest.CaptureFixture[str], mutant: str, code: int, says: str
) -> None:
    msgspec.structs.replace(load(found), mutant=mutant).save(found)
    assert prove.main(ProveOptions(replay=found)) == code
    assert says in "".join(capsys.readouterr())


def test_a_replay_names_the_step_that_is_not_possible_any_more(
    found: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = load(found)
    third = msgspec.structs.replace(saved.steps[2], move="('fly', 0)")
    msgspec.structs.replace(saved, steps=(*saved.steps[:2], third, *saved.steps[3:])).save(found)
    assert prove.main(ProveOptions(replay=found)) == 2
    error = capsys.readouterr().err
    assert "step 3, ('fly', 0), cannot be taken" in error
    assert str(found) in error


def test_the_printed_test_fails_as_long_as_the_fault_is_there(
    found: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert prove.main(ProveOptions(replay=found, as_test=True)) == 0
    (tmp_path / "printed.py").write_text(capsys.readouterr().out)

    def run() -> None:
        space: dict[str, Any] = {"__file__": str(tmp_path / "printed.py")}
        exec((tmp_path / "printed.py").read_text(), space)
        space["test_found_does_not_come_back"]()

    with pytest.raises(AssertionError):
        run()
    msgspec.structs.replace(load(found), mutant="").save(found)
    run()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (ProveOptions(scope="huge"), "there is no scope 'huge'; there are small, default, large"),
        (ProveOptions(mutant="nix"), "there is no mutant 'nix'; there are: reject-becomes-placeholder, "),
        (ProveOptions(sizes=Sizes(faults={"flood": 1})), "there is no fault 'flood'; there are crash, abort"),
        (ProveOptions(sizes=Sizes(prompt_pages=9)), "such a scope cannot be: prompts of (9, 1) pages"),
        (
            ProveOptions(replay=Path("a"), conform=Path("b")),
            "--replay and --conform are different things to do",
        ),
        (ProveOptions(as_test=True), "--replay FILE --as-test"),
        (ProveOptions(write_docs=True), "--mutants or --growth"),
        (
            ProveOptions(replay=Path("/nowhere.json")),
            "/nowhere.json cannot be read: No such file or directory",
        ),
        (ProveOptions(conform=Path(__file__)), "line 1 is no record of a process"),
    ],
)
def test_what_cannot_be_run_is_one_line_and_exit_code_2(
    options: ProveOptions, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prove.main(options) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert says in error
    assert error.count("\n") == 1


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_searched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("_searched", "_conform", "_mutant", "growing"):
        monkeypatch.setattr(prove, name, mock.Mock(side_effect=AssertionError(f"{name} has begun")))
    nowhere = tmp_path / "nowhere" / "found.json"
    for options in (HOLDS, ProveOptions(conform=nowhere), ProveOptions(mutant="double-close")):
        assert prove.main(replace(options, json=nowhere)) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err == f"error: {nowhere} cannot be written: No such file or directory\n"
    monkeypatch.setattr(diagram, "DOCS", nowhere)
    assert prove.main(ProveOptions(growth=True, write_docs=True)) == 2
    assert capsys.readouterr().err.startswith("error: --write-docs: [Errno 2] No such file")


def test_a_counterexample_that_cannot_be_saved_is_drawn_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / SAVED).mkdir()
    options = ProveOptions(scope="small", sizes=TINY, mutant="release-at-abort", processes=1)
    assert prove.main(options) == 2
    said = capsys.readouterr()
    assert "adversary: the client leaves" in said.out
    assert "a counterexample was found (I3, no early reuse: " in said.err
    assert f"{SAVED} cannot be written" in said.err


def test_a_searching_process_that_is_killed_is_said_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def killed(self: Any, *_: object) -> None:
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    monkeypatch.setattr(search._Searcher, "level", killed)
    assert prove.main(replace(HOLDS, processes=2)) == 2
    assert capsys.readouterr().err.startswith("error: a searching process ended with -9")


def test_an_interrupted_search_ends_with_130_and_says_nothing_more() -> None:
    command = [sys.executable, "-m", "hermetic", "prove", "--scope", "small", "--no-induction"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as ran:
        children = Path(f"/proc/{ran.pid}/task/{ran.pid}/children")
        while len(children.read_text().split()) < 2:
            assert ran.poll() is None
            time.sleep(0.05)
        os.killpg(ran.pid, signal.SIGINT)  # as Ctrl-C on a terminal does
        _, error = ran.communicate(timeout=60)
    assert ran.returncode == 130
    assert error == ""


def test_sizes_for_which_the_compiled_search_has_no_room_are_searched_all_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = replace(TINY, pages=16, faults=NONE)
    assert prove.main(ProveOptions(sizes=sizes, induction=False, processes=1)) == 0
    assert "every state seen" in capsys.readouterr().out


def test_progress_of_the_refinement_is_said_while_its_parts_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    enough, said = Event(), list[str]()

    def say(_: object, text: str) -> None:
        said.append(text)
        if len(said) == 3:
            enough.set()

    def refined(part: Scope, states: int) -> refinement.Refinement:
        assert enough.wait(20.0), "nothing was said of it while it ran"
        return refinement.Refinement()

    monkeypatch.setattr(prove, "ProcessPoolExecutor", lambda number, _: ThreadPoolExecutor(number))
    monkeypatch.setattr(refinement, "refine", refined)
    monkeypatch.setattr(report.Progress, "say", say)
    assert prove._refinement(HOLDS, {}) is None
    assert all(text.startswith("refinement: 0 of 4 parts are done, ") for text in said[:3])


def test_a_scope_keeps_its_parts_unless_a_size_is_changed() -> None:
    assert parts_of("default", Sizes()) == SCOPES["default"]
    (changed,) = parts_of("default", Sizes(requests=3, slots=1, faults={"loss": 2}))
    first = SCOPES["default"][0]
    assert changed.prompts == (1, 1, 1)
    assert (changed.pages, changed.slots) == (first.pages, 1)
    assert changed.faults == {**first.faults, "loss": 2}
    with pytest.raises(ProveError, match="at least 1"):
        parts_of("default", Sizes(requests=0))


def test_a_missing_solver_is_an_error_before_the_search_and_names_the_extra_that_has_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "z3", None)
    monkeypatch.setattr("sys.argv", ["hermetic", "prove", "--scope", "small"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert "needs z3, which is not installed: pip install 'hermetic[proof]'" in said.err
    assert not said.out, "said only after the search"


def test_the_command_line_reaches_the_search(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    small = ["--requests", "1", "--prompt-pages", "1", "--pages", "1", "--slots", "1", "--processes", "1"]
    none = [x for name in FAULTS for x in ("--fault", f"{name}=0")]
    ran = CliRunner().invoke(cli.app, ["prove", "--no-induction", *small, *none, "--json", str(path)])
    assert ran.exit_code == 0, ran.output
    assert (
        json.loads(path.read_text())["parts"][0]["states"]
        == explore(Scope("x", (1,), 1, 1), processes=1).states
    )


def test_the_flags_of_simulate_are_its_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[SimulateOptions] = []
    monkeypatch.setattr(simulation, "main", lambda options: asked.append(options) or 0)
    flags = "--seed 7 --seeds 3 --requests 9 --loss 0.5 --write-doubt 0.25 --crash 2 --only 3,17 --faults none --without late,cut"
    ran = CliRunner().invoke(cli.app, ["simulate", *flags.split()])
    assert ran.exit_code == 0, ran.output
    (options,) = asked
    assert (options.seed, options.seeds, options.requests) == (7, 3, 9)
    assert options.rates == Rates(loss=0.5, write_doubt=0.25, crash=2)
    assert options.narrowed == Narrowed((3, 17), (), ("late", "cut"))
    ran = CliRunner().invoke(cli.app, ["simulate", "--quiet", "--crash", "1"])
    assert asked[1].rates == Rates(**{**dict.fromkeys(asked[1].rates.__dict__, 0.0), "crash": 1})


def test_what_is_no_number_is_refused_by_the_option_that_got_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, says in (
        (["prove", "--fault", "crash"], "--fault is 'crash'; it must be a name and a number, like crash=1"),
        (["simulate", "--only", "a,b"], "--only is 'a,b'; it must be numbers, like 3,17, or none"),
    ):
        monkeypatch.setattr("sys.argv", ["hermetic", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2
        assert says in capsys.readouterr().err
