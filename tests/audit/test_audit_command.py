"""`hermetic audit` as a process: its exit code, its one line of error, and the files that a pipeline reads afterwards."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import subprocess
import sys
import threading
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import pytest
from audit_reports import clean
from scripted_endpoint import Request, Script, ScriptedEndpoint, SmallEngine, Wire, serving

from hermetic.audit import command
from hermetic.audit.exchange import How
from hermetic.audit.report import json_file, terminal
from hermetic.audit.result import Played
from hermetic.audit.run import AuditOptions, audit
from hermetic.audit.scenarios.registry import SCENARIOS
from hermetic.audit.stage import Stage
from hermetic.options import OptionError

NOBODY = "http://127.0.0.1:9"
QUICK = ("--scenario", "mixing", "--budget", "20s")


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


async def hermetic(*arguments: str, **environment: str) -> Ended:
    """The command in a process of its own, while this one serves."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "hermetic.cli", *arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=os.environ | environment,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))


def files(folder: Path) -> list[str]:
    """The options that ask for all three reports."""
    return [word for name in ("report", "json", "junit") for word in (f"--{name}", str(folder / f"a.{name}"))]


def verdict(folder: Path) -> str:
    """Of the JSON report; the three files say the same."""
    report = json_file.read(folder / "a.json")
    error = ElementTree.parse(folder / "a.junit").find(".//error")
    assert (report.verdict == "could not run") == (error is not None)
    assert (folder / "a.report").read_text().rstrip().endswith("</html>")
    assert sorted(os.listdir(folder)) == ["a.json", "a.junit", "a.report"]
    return report.verdict


# ------------------------------------------------------------------------------------ what cannot run


async def five_hundred(request: Request, wire: Wire) -> None:
    await wire.json({"error": {"message": "boom", "type": "InternalServerError"}}, 500)


async def closes(request: Request, wire: Wire) -> None:
    wire.cut()


async def page(request: Request, wire: Wire) -> None:
    await wire.text("<html>Welcome to nginx</html>")


async def garbage(request: Request, wire: Wire) -> None:
    await wire.stream()
    await wire.event("{{{ no json")
    await wire.end()


async def slow_down(request: Request, wire: Wire) -> None:
    await wire.json({"error": {"message": "slow down"}}, 429, retry_after="900")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (five_hundred, "failed, status 500: boom"),
        (closes, "answers none of the audit's requests"),
        (page, "Welcome to nginx"),
        (garbage, "{{{ no json"),
        (slow_down, "slow down: wait, or ask for a higher limit"),
        (SmallEngine(key="other"), "HERMETIC_AUDIT_KEY"),
    ],
)
async def test_a_server_that_cannot_be_audited_ends_in_2_with_one_line_and_reports_that_say_so(
    tmp_path: Path, script: Script, said: str
):
    async with serving(ScriptedEndpoint(script)) as endpoint:
        ended = await hermetic("audit", endpoint.url, *files(tmp_path), "--quiet")
    written = ", ".join(str(tmp_path / name) for name in ("a.report", "a.json", "a.junit"))
    assert (ended.code, ended.out) == (2, f"written: {written}\n")
    (line,) = ended.err.splitlines()
    assert line.startswith("error: ")
    assert said in line
    assert verdict(tmp_path) == "could not run"
    assert said in json_file.read(tmp_path / "a.json").reason


@pytest.mark.parametrize(
    "url", [NOBODY, "not a url", "http://user:secret-word@h", "http://h/?key=secret-word"]
)
async def test_reports_are_written_as_well_where_nothing_could_be_asked(tmp_path: Path, url: str):
    """Else a pipeline would read those of the run before."""
    for name in ("report", "json", "junit"):
        (tmp_path / f"a.{name}").write_text("of the run before")
    ended = await hermetic("audit", url, *files(tmp_path))
    assert ended.code == 2
    assert verdict(tmp_path) == "could not run"
    said = ended.err + "".join(file.read_text() for file in tmp_path.iterdir())
    assert "secret-word" not in said
    played = json_file.read(tmp_path / "a.json").scenarios
    assert {one.state for one in played} == {"not run"}
    assert len(played) > 10


@pytest.mark.parametrize(("status", "asked"), [(500, False), (502, True), (503, True), (504, True)])
async def test_a_server_that_is_not_up_yet_is_told_from_one_that_is_broken(status: int, asked: bool):
    async def answer(request: Request, wire: Wire) -> None:
        await wire.json({"error": "loading model"}, status)

    async with serving(ScriptedEndpoint(answer, models=None)) as endpoint:
        ended = await hermetic("audit", endpoint.url)
    assert f"answers with status {status}: " in ended.err
    assert ("has it loaded its model?" in ended.err) == asked


async def test_what_needs_a_second_key_is_told_before_minutes_go_into_learning(tmp_path: Path):
    async with serving(ScriptedEndpoint(SmallEngine())) as endpoint:
        ended = await hermetic("audit", endpoint.url, "--scenario", "keys", *files(tmp_path))
    assert (ended.code, endpoint.posts) == (2, [])
    (line,) = ended.err.splitlines()
    assert "needs the key of a second customer: --second-key" in line
    assert verdict(tmp_path) == "could not run"


class Turning(terminal.Live):
    """Silent progress that notes when learning is over."""

    playing_now = False

    def playing(self, played: Played, number: int, of: int, left: float) -> None:
        self.playing_now = True


@pytest.mark.parametrize(
    ("script", "how", "said"),
    [
        (five_hundred, "failed", "status 500: boom"),
        (page, "garbled", "Welcome to nginx"),
        (garbage, "garbled", "{{{ no json"),
        (closes, "cut", "disconnected"),
    ],
)
@pytest.mark.parametrize("answers", [0, 5])  # of mixing, which asks 24 times
async def test_a_server_that_stops_answering_after_it_was_learned_is_never_clean(
    script: Script, how: How, said: str, answers: int
):
    engine, count, progress = SmallEngine(), itertools.count(), Turning(quiet=True)

    async def then(request: Request, wire: Wire) -> None:
        down = progress.playing_now and next(count) >= answers
        await (script if down else engine)(request, wire)

    async with serving(then) as endpoint:
        report = await audit(AuditOptions((endpoint.url,), scenarios=("mixing",), budget=20.0), progress)
    assert (report.verdict, command.code(report)) == ("could not run", 2)
    assert report.reason.startswith("hardly a request was answered (")
    assert report.lost().keys() == {how}
    assert said in report.reason


async def test_a_budget_too_small_says_how_much_would_do(tmp_path: Path):
    async with serving(SmallEngine()) as endpoint:
        ended = await hermetic("audit", endpoint.url, "--budget", "1s", *files(tmp_path), "--quiet")
    assert ended.code == 2
    assert "too small for one scenario" in ended.err
    assert "give at least" in ended.err
    assert json_file.read(tmp_path / "a.json").limits["model"] == "m"  # what was learned is kept


@pytest.mark.parametrize("budget", ["0", "-5", "five", "1e3", "99999999h", "9" * 400, "nan"])
def test_a_time_that_is_none_is_refused(budget: str):
    with pytest.raises(OptionError, match="like 90s, 5m or 2h"):
        command.seconds(budget)


# ------------------------------------------------------------------------------------ before anything is asked


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--scenario", "mixin"], "did you mean mixing?"),
        (["--profile", "fast"], "one of quick, standard, soak"),
        (["--json", "/nowhere/a.json"], "cannot write /nowhere/a.json: No such file or directory"),
        (["--report", "/proc/a.html"], "cannot write /proc/a.html"),
        (["--junit", "/"], "cannot write /: Is a directory"),
        (["--junit", "a.xml", "--json", "./a.xml"], "two of them name the same file"),
    ],
)
async def test_options_that_cannot_be_meant_are_refused_before_anything_is_asked(
    tmp_path: Path, arguments: list[str], said: str
):
    async with serving(SmallEngine()) as endpoint:
        ended = await hermetic("audit", endpoint.url, *arguments)
        assert not endpoint.requests
    assert (ended.code, len(ended.err.splitlines())) == (2, 1)
    assert said in ended.err


# ------------------------------------------------------------------------------------ files that are no files


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path):
    pipe, read = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    json_file.check(pipe)
    json_file.replace(pipe, b"{}")
    reader.join()
    assert read == [b"{}"]
    assert pipe.is_fifo()


def test_a_link_stays_a_link_and_its_target_is_replaced(tmp_path: Path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    link = tmp_path / "a.json"
    link.symlink_to(folder / "real.json")
    json_file.check(link)
    json_file.replace(link, b"{}")
    assert link.is_symlink()
    assert (folder / "real.json").read_bytes() == b"{}"
    assert sorted(os.listdir(tmp_path)) == ["a.json", "elsewhere"]


def test_a_ctrl_c_while_a_file_is_written_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def interrupted(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        json_file.replace(tmp_path / "a.json", b"{}")
    assert os.listdir(tmp_path) == []


def test_one_file_that_cannot_be_written_does_not_keep_the_others_back(tmp_path: Path):
    outputs = command.Outputs(tmp_path / "gone" / "a.html", tmp_path / "a.json", tmp_path / "a.xml")
    written = outputs.write(clean())
    assert written.done == [str(tmp_path / "a.json"), str(tmp_path / "a.xml")]
    assert written.wrong == [f"cannot write {tmp_path}/gone/a.html: No such file or directory"]
    assert sorted(os.listdir(tmp_path)) == ["a.json", "a.xml"]


# ------------------------------------------------------------------------------------ who reads it


async def test_a_whole_audit_of_a_small_server_finds_nothing_and_ends_in_0(tmp_path: Path):
    async with serving(SmallEngine()) as endpoint:
        ended = await hermetic("audit", endpoint.url, *QUICK, *files(tmp_path), PYTHONIOENCODING="ascii")
    assert (ended.code, "Nothing found" in ended.out) == (0, True), ended
    assert verdict(tmp_path) == "nothing found"


async def test_where_standard_output_cannot_take_the_summary_the_files_are_written_and_it_ends_in_2(
    tmp_path: Path,
):
    async with serving(SmallEngine()) as endpoint:
        words = [
            sys.executable,
            "-m",
            "hermetic.cli",
            "audit",
            endpoint.url,
            *QUICK,
            *files(tmp_path),
            "--quiet",
        ]
        for out in ("/dev/full", "a closed pipe"):
            with open(os.devnull, "rb") as nothing:
                where = _closed_pipe() if out == "a closed pipe" else os.open(out, os.O_WRONLY)
                process = await asyncio.create_subprocess_exec(
                    *words, stdin=nothing, stdout=where, stderr=subprocess.PIPE
                )
                os.close(where)
                _, err = await process.communicate()
            assert process.returncode == 2, err
            assert err.decode().startswith("error: the summary cannot be shown: ")
            assert len(err.splitlines()) == 1
            assert verdict(tmp_path) == "nothing found"


def _closed_pipe() -> int:
    """The writing end of a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


async def test_where_nobody_reads_the_progress_the_audit_goes_on(tmp_path: Path):
    async with serving(SmallEngine()) as endpoint:
        words = [sys.executable, "-m", "hermetic.cli", "audit", endpoint.url, *QUICK, *files(tmp_path)]
        where = _closed_pipe()
        process = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE, stderr=where)
        os.close(where)
        out, _ = await process.communicate()
    assert (process.returncode, b"Nothing found" in out) == (0, True)


async def test_a_scenario_that_breaks_costs_itself_and_is_no_success(monkeypatch: pytest.MonkeyPatch):
    async def broken(stage: Stage) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(stage.pause(1000))
            raise KeyError("a fault of our own")

    monkeypatch.setitem(SCENARIOS, "mixing", dataclasses.replace(SCENARIOS["mixing"], play=broken))
    async with serving(SmallEngine()) as endpoint:
        options = AuditOptions((endpoint.url,), scenarios=("mixing", "identical"), budget=20.0)
        report = await audit(options)
    states = {one.name: one.state for one in report.scenarios}
    assert states == {"mixing": "cut short", "identical": "done"}
    (reason,) = [one.reason for one in report.scenarios if one.name == "mixing"]
    assert "please report it: KeyError: 'a fault of our own' (test_audit_command.py, line" in reason
    assert (report.verdict, report.complete, command.code(report)) == ("could not run", False, 2)
    assert "the audit itself failed in mixing" in report.reason


async def test_a_rate_limit_that_was_waited_out_leaves_a_trace():
    engine, count = SmallEngine(), itertools.count()

    async def script(request: Request, wire: Wire) -> None:
        if request.method == "POST" and next(count) % 40 == 30:
            return await wire.json({"error": {"message": "slow down"}}, 429, retry_after="0")
        await engine(request, wire)

    async with serving(script) as endpoint:
        report = await audit(AuditOptions((endpoint.url,), scenarios=("mixing",), budget=20.0))
    assert report.verdict == "nothing found"
    assert any("told requests to slow down" in note for note in report.notes), report.notes


async def test_a_fault_of_our_own_is_no_finding():
    code = (
        "import sys; from hermetic import cli; import hermetic.audit.command as c\n"
        "def broken(*_): raise RuntimeError('a fault of our own')\n"
        f"c.main = broken; sys.argv = ['hermetic', 'audit', '{NOBODY}']; cli.main()"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stderr=subprocess.PIPE)
    _, err = await process.communicate()
    assert process.returncode == 2
    assert "a fault of our own" in err.decode()
    assert err.decode().rstrip().endswith("it says nothing about what it looked at")


def test_the_base_install_is_enough_for_an_audit():
    """Nothing of the engine, and nothing that only the extras bring."""
    code = "import sys, hermetic.audit.command; print('\\n'.join(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    rooms = {name.split(".")[1] for name in loaded if name.startswith("hermetic.")}
    assert rooms == {"audit", "options"}
    heavy = {
        "torch",
        "numpy",
        "numba",
        "transformers",
        "fastapi",
        "pydantic",
        "zmq",
        "z3",
        "prometheus_client",
    }
    assert not heavy & set(loaded)


def test_the_options_of_the_docs_are_those_of_the_command():
    text = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
    shown = subprocess.run(
        [sys.executable, "-m", "hermetic.cli", "audit", "--help"], capture_output=True, text=True, check=True,
        env=os.environ | {"COLUMNS": "200"},
    ).stdout  # fmt: skip
    options = {word.strip("`,") for word in shown.split() if word.startswith("--")} - {"--help"}
    assert len(options) > 8
    assert not {option for option in options if f"`{option}" not in text}
