"""An audit that is broken off, as a process: whatever ends it, what was seen until then is in whole files, and it ends with 2."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType

import pytest
import scripted_endpoint
from scripted_endpoint import SmallEngine, serving

from hermetic.audit.report import json_file
from hermetic.audit.result import Report
from hermetic.audit.run import AuditOptions, audit

LEARNING, PLAYING = "learning: how much", "/3 mixing"  # lines of progress
WORDS = ("--profile", "soak", "--scenario", "mixing", "--budget", "10m")


@asynccontextmanager
async def started(*words: str, **pipes: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that is gone when the block ends."""
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stdin=subprocess.DEVNULL, **pipes)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def server() -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A small engine in a process of its own, and its URL."""
    async with started(scripted_endpoint.__file__, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process, (await process.stdout.readline()).decode().strip()


@asynccontextmanager
async def auditing(url: str, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """An audit of hours, which writes all three reports."""
    files = [
        word for name in ("report", "json", "junit") for word in (f"--{name}", str(folder / f"a.{name}"))
    ]
    words = ("-m", "hermetic.cli", "audit", url, *WORDS, *files)
    async with started(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        yield process


async def until(process: asyncio.subprocess.Process, line: str) -> None:
    """Read its progress as far as this line."""
    assert process.stderr is not None
    while line not in (said := (await process.stderr.readline()).decode()):
        assert said, f"the audit ended before {line!r}"


async def ended(process: asyncio.subprocess.Process, folder: Path) -> tuple[str, Report]:
    """What it said at its end, and its report, of which all three files are whole."""
    out, err = await process.communicate()
    said = (out + err).decode()
    assert process.returncode == 2, said
    assert sorted(os.listdir(folder)) == ["a.json", "a.junit", "a.report"]
    report = json_file.read(folder / "a.json")
    assert (report.complete, bool(report.reason)) == (False, True)
    assert ElementTree.parse(folder / "a.junit").find(".//error") is not None
    page = (folder / "a.report").read_text()
    assert page.rstrip().endswith("</html>")
    assert "Nothing found" not in page
    assert "Nothing found" not in said
    return said, report


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_in_the_middle_of_a_scenario_leaves_what_was_seen(tmp_path: Path, number: int):
    async with serving(SmallEngine()) as endpoint, auditing(endpoint.url, tmp_path) as process:
        await until(process, PLAYING)
        wanted = len(endpoint.posts) + 40
        while len(endpoint.posts) < wanted:
            await asyncio.sleep(0.05)
        process.send_signal(number)
        said, report = await ended(process, tmp_path)
    assert report.reason == "interrupted"
    (played,) = report.scenarios
    assert (played.state, played.reason) == ("cut short", "interrupted")
    assert played.requests == report.requests > 0
    assert any(cell.comparisons for cell in played.coverage)
    assert "Broken off" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_while_the_server_is_learned_leaves_a_report_that_says_so(tmp_path: Path, number: int):
    async with server() as (_, url), auditing(url, tmp_path) as process:
        await until(process, LEARNING)
        process.send_signal(number)
        said, report = await ended(process, tmp_path)
    assert report.reason == "interrupted"
    assert [(one.name, one.state, one.reason) for one in report.scenarios] == [
        ("mixing", "not run", "not reached")
    ]
    assert said.rstrip().splitlines()[-1] == "error: interrupted"


async def test_a_second_ctrl_c_ends_it_at_once_and_never_as_a_finding_or_clean(tmp_path: Path):
    async with server() as (engine, url), auditing(url, tmp_path) as process:
        await until(process, PLAYING)
        engine.send_signal(signal.SIGSTOP)
        for _ in range(20):
            if process.returncode is None:
                process.send_signal(signal.SIGINT)
                await asyncio.sleep(0.02)
        out, err = await process.communicate()
        engine.send_signal(signal.SIGCONT)
    assert process.returncode in (2, 130, -signal.SIGINT), (out + err).decode()
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    for name in os.listdir(tmp_path):  # what there is, is whole
        assert (tmp_path / name).read_text().rstrip().endswith(("</html>", "}", "</testsuites>"))


@pytest.mark.parametrize("where", [LEARNING, PLAYING])
async def test_a_server_that_dies_ends_the_audit_and_leaves_what_was_seen(tmp_path: Path, where: str):
    async with server() as (engine, url), auditing(url, tmp_path) as process:
        await until(process, where)
        engine.kill()
        _, report = await ended(process, tmp_path)
    assert "reached" in report.reason or "does not any more" in report.reason
    assert not report.findings


@pytest.mark.parametrize("where", [LEARNING, PLAYING])
async def test_a_ctrl_c_ends_an_audit_of_a_server_that_has_stopped_reading(tmp_path: Path, where: str):
    async with server() as (engine, url), auditing(url, tmp_path) as process:
        await until(process, where)
        engine.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.5)  # requests pile up
        process.send_signal(signal.SIGINT)
        _, report = await ended(process, tmp_path)
        engine.send_signal(signal.SIGCONT)
    assert report.reason == "interrupted"


async def test_an_audit_under_nohup_does_not_mind_a_hangup(tmp_path: Path):
    words = (
        "-c",
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); from hermetic import cli; cli.main()",
    )
    async with server() as (_, url):
        arguments = ("audit", url, *WORDS, "--json", str(tmp_path / "a.json"))
        async with started(*words, *arguments, stderr=subprocess.PIPE) as process:
            await until(process, PLAYING)
            process.send_signal(signal.SIGHUP)
            await asyncio.sleep(1)
            assert process.returncode is None


def test_what_handled_a_signal_before_an_audit_does_so_after_it():
    """The drill, whose servers must end with it, handles SIGTERM by itself."""

    def mine(number: int, frame: FrameType | None) -> None: ...

    before = signal.signal(signal.SIGTERM, mine)
    try:
        report = asyncio.run(audit(AuditOptions(("http://127.0.0.1:9",))))
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "no connection" in report.reason
