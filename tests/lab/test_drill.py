"""The drill's judgement and its two panels, and that no server outlives it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from hermetic.audit.exchange import Answer, Ask
from hermetic.audit.result import Coverage, Finding, Highlight, Played, Report
from hermetic.lab import drill
from hermetic.lab.drill import Exchange, Side, faults, show
from hermetic.model.source import locate
from hermetic.model.tokenizer import Tokenizer


def report(*findings: Finding, verdict: str) -> Report:
    played = Played(
        name="over-capacity", says="", state="done", requests=40, how={"answered": 30, "refused": 10},
        coverage=[Coverage(evidence="marker", comparisons=30, findings=len(findings))],
    )  # fmt: skip
    return Report(
        target="http://127.0.0.1:1", model="smollm2", profile="quick", seed=1, started="2026-11-30T10:00:00+00:00",
        verdict=verdict, complete=True, requests=40, scenarios=[played], findings=list(findings),  # type: ignore[arg-type]
    )  # fmt: skip


def leak() -> Finding:
    text = "the word is zeppelin"
    answer = Answer(
        ask=Ask(tenant="tenant-2", prompt="x"), number=7, sent=1.0, how="answered", status=200, text=text
    )
    return Finding(
        evidence="marker", scenario="over-capacity", what="a word of tenant-1 in an answer to tenant-2", why="", p=1e-9,
        answers=[answer], highlights=[Highlight(7, 12, 20, "tenant-1")],
    )  # fmt: skip


DRILL = [sys.executable, "-m", "hermetic.cli", "drill"]
LEAKY = Side(
    drill.FAULTY, 2048, Exchange(200, "-PELICAN-7731 is Alice.", 526), report(leak(), verdict="findings")
)
SOUND = Side(
    drill.SHIPPED,
    512,
    Exchange(400, "this server's context is 512 tokens", None),
    report(verdict="nothing found"),
)


def test_a_leak_that_is_found_and_a_refusal_are_what_the_drill_must_show() -> None:
    assert faults(LEAKY, SOUND) == []


@pytest.mark.parametrize(
    ("leaky", "sound", "said"),
    [
        (replace(LEAKY, report=report(verdict="nothing found")), SOUND, "faulty server found nothing"),
        (replace(LEAKY, bob=Exchange(500, "kv_integrity", None)), SOUND, "faulty server answered Bob with 500"),
        (LEAKY, replace(SOUND, report=report(leak(), verdict="findings")), "shipped server ended with: findings"),
        (LEAKY, replace(SOUND, report=report(verdict="could not run")), "shipped server ended with: could not run"),
        (LEAKY, replace(SOUND, bob=Exchange(200, "sunny", 526)), "answered Bob with 200, and did not refuse"),
    ],
)  # fmt: skip
def test_anything_else_is_said(leaky: Side, sound: Side, said: str) -> None:
    (found,) = faults(leaky, sound)
    assert said in found


def test_alices_prompt_fits_the_prefill_pool_and_bobs_fits_only_the_decode_pool() -> None:
    tokenizer = Tokenizer.load(locate("smollm2"))
    alice, bob = (len(tokenizer.encode(text)) + drill.ANSWER for text in (drill.ALICE, drill.BOB))
    assert alice <= drill.PREFILL < bob - drill.ANSWER
    assert bob <= drill.DECODE


@pytest.mark.parametrize(("width", "beside"), [(160, True), (80, False)])
def test_both_reports_are_shown_side_by_side_where_there_is_room(width: int, beside: bool) -> None:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    show(console, LEAKY, SOUND)
    lines = console.export_text().splitlines()
    assert any(drill.FAULTY in line and drill.SHIPPED in line for line in lines) is beside
    text = "\n".join(lines)
    for said in (
        "HTTP 200",
        "PELICAN-7731 is Alice",
        "HTTP 400",
        "zeppelin",
        "1 finding",
        "The leak, and the refusal",
    ):
        assert said in text


def children(pid: int) -> set[int]:
    """Processes below this one that are there now, by what stands in /proc."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, grown = {pid}, True
    while grown:
        more = {child for child, parent in parents.items() if parent in found} - found
        found, grown = found | more, bool(more)
    return found - {pid}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--scenario", "over-capcity"], "did you mean over-capacity?"),
        (["--budget", "0"], "like 90s, 5m or 2h"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_a_server_starts(arguments: list[str], said: str) -> None:
    ended = subprocess.run([*DRILL, *arguments], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, len(ended.stderr.splitlines())) == (2, "", 1)
    assert said in ended.stderr


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("audited", [False, True], ids=["starting", "audited"])
def test_no_server_outlives_a_drill_that_is_ended(number: int, audited: bool) -> None:
    """While the first server starts, and while it is audited."""
    process = subprocess.Popen(DRILL, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    started: set[int] = set()
    while len(started) < 3 and process.poll() is None:  # the server and its two workers
        started = children(process.pid)
        time.sleep(0.1)
    while audited and "how fast" not in (line := process.stderr.readline()):
        assert line, "it ended before its audit began"
    process.send_signal(number)
    said = process.stderr.read()
    process.wait(timeout=60)
    if number != signal.SIGKILL:
        assert process.returncode == 130
    while any(Path(f"/proc/{pid}").exists() for pid in started):  # the test's own time-out ends this
        time.sleep(0.2)
    assert ("interrupted; its servers have ended" in said) is (number != signal.SIGKILL)
