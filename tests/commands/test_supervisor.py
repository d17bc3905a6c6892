"""Workers that die are started again, later and later; those that were asked to leave are not."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermetic.gateway import supervisor
from hermetic.gateway.supervisor import Backoff, StartError, Supervisor
from hermetic.kv.geometry import Geometry
from hermetic.kv.lineage import Secret
from hermetic.options import ServeOptions
from hermetic.serve import worker_configs
from hermetic.worker.messages import WorkerInfo
from hermetic.worker.wire import CurveKeys

# A worker as its supervisor sees one: it reads its configuration, says that it is ready, and ends when its standard input
# does, or with the status that a file names for its next start.
WORKER = """
import base64, json, os, sys
size = int.from_bytes(sys.stdin.buffer.read(4), "little")
sys.stdin.buffer.read(size)
here = sys.argv[1]
with open(here + "/started", "a") as file:
    file.write(str(os.getpid()) + "\\n")
if os.path.exists(here + "/refuse"):
    print(json.dumps({"error": "it cannot be"}), flush=True)
    sys.exit(int(open(here + "/refuse").read()))
info = dict(json.load(open(here + "/info")), pid=os.getpid(), incarnation=base64.b64encode(os.urandom(8)).decode())
print(json.dumps({"progress": 0.5, "text": "half"}), flush=True)
print(json.dumps({"ready": {"port": 7, "info": info}}), flush=True)
while sys.stdin.buffer.read(1):
    pass
"""


class World:
    """A supervisor over such workers, and what it was told."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lost = folder, list[tuple[str, bytes]]()

    @property
    def starts(self) -> int:
        return len((self.folder / "started").read_text().splitlines())

    def refuse(self, status: int | None) -> None:
        if status is None:
            (self.folder / "refuse").unlink()
        else:
            (self.folder / "refuse").write_text(str(status))

    @asynccontextmanager
    async def workers(self, options: ServeOptions) -> AsyncIterator[Supervisor]:
        configs = worker_configs(options, CurveKeys.make(), Secret.random())
        command = (sys.executable, "-c", WORKER, str(self.folder))
        running = Supervisor(configs, lambda *who: self.lost.append(who), lambda *_: None, lambda _: command)
        try:
            await running.start()
            yield running
        finally:
            await running.stop()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    values: dict[object, object] = {str: "x", int: 1, bytes: b"8 bytes.", tuple[int, ...]: (0,)}
    values[Geometry] = Geometry.attention(16, 1, 1, 16, "bf16")
    info = WorkerInfo(*(values[field.type] for field in msgspec.structs.fields(WorkerInfo)))
    (tmp_path / "info").write_text(json.dumps(msgspec.to_builtins(info)))
    monkeypatch.setattr(supervisor, "FIRST_WAIT", 0.05)
    monkeypatch.setattr(supervisor, "LONGEST_WAIT", 0.2)
    return World(tmp_path)


ONE = ServeOptions(mode="unified", threads=1)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.02)


async def test_a_worker_that_is_killed_comes_back_as_another_process_and_incarnation(world: World) -> None:
    async with world.workers(ONE) as running:
        first = running.handles[0]
        assert first.info is not None
        first.process.kill()
        await until(lambda: running.handles[0] is not first)
        second = running.handles[0]
        assert second.info is not None
        assert second.process.pid != first.process.pid
        assert second.info.incarnation != first.info.incarnation
        assert second.config.name == first.config.name == "unified-0"
        assert world.lost == [("unified-0", first.info.incarnation)]


async def test_a_worker_that_left_as_it_was_asked_to_stays_away(world: World) -> None:
    async with world.workers(ONE) as running:
        stdin = running.handles[0].process.stdin
        assert stdin is not None
        stdin.close()  # it ends with 0
        await until(lambda: bool(world.lost))
        await asyncio.sleep(0.5)
        assert world.starts == 1


async def test_a_death_leaves_the_others_alone(world: World) -> None:
    async with world.workers(ServeOptions(threads=1, prefill_workers=2, decode_workers=2)) as running:
        before = [handle.process.pid for handle in running.handles]
        assert [h.config.name for h in running.handles] == ["prefill-0", "prefill-1", "decode-0", "decode-1"]
        running.handles[2].process.kill()
        await until(lambda: running.handles[2].process.pid != before[2])
        after = [handle.process.pid for handle in running.handles]
        assert [b == a for b, a in zip(before, after, strict=True)] == [True, True, False, True]


@pytest.mark.parametrize("status", [1, 2])
async def test_a_worker_that_cannot_start_again_is_tried_until_it_can(
    world: World, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    async with world.workers(ONE) as running:
        first = running.handles[0]
        world.refuse(status)
        first.process.kill()
        await until(lambda: world.starts >= 3)
        assert "it cannot be" in caplog.text
        waits = [record.args[-1] for record in caplog.records if record.levelname == "CRITICAL"]  # type: ignore[index]
        # The first wait, 0.05 s, was after the death; a status of 2 is somebody's to mend: not sooner than the longest.
        assert waits[0] == (0.2 if status == 2 else 0.1)
        world.refuse(None)
        await until(lambda: running.handles[0] is not first)
    assert len(world.lost) == 1


async def test_the_end_finds_a_worker_that_is_just_being_started(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.workers(ONE) as running:
        running.handles[0].process.kill()
        await until(lambda: running.restarts["unified-0"] == 1)
    pids = [int(line) for line in (world.folder / "started").read_text().splitlines()]
    await until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


async def test_one_that_does_not_start_at_all_ends_those_that_did(world: World) -> None:
    world.refuse(2)
    with pytest.raises(StartError, match="it cannot be") as refused:
        async with world.workers(ServeOptions(threads=1)):
            pass
    assert refused.value.exit_code == 2


async def test_a_worker_that_ends_before_it_reads_anything_is_said_to_have_ended(tmp_path: Path) -> None:
    config = worker_configs(ONE, CurveKeys.make(), Secret.random())[0]
    with pytest.raises(StartError, match="ended with status 3 while it started"):
        await supervisor.start(config, lambda *_: None, (sys.executable, "-c", "raise SystemExit(3)"))


async def test_a_frozen_worker_is_ended_all_the_same(world: World) -> None:
    async with world.workers(ONE) as running:
        pid = running.handles[0].process.pid
        os.kill(pid, signal.SIGSTOP)
    assert not psutil.pid_exists(pid)


@given(st.lists(st.floats(0, 200), min_size=1, max_size=30))
def test_waits_double_up_to_the_longest_and_begin_anew_after_a_steady_life(lives: list[float]) -> None:
    backoff = Backoff()
    waits = [backoff.after(lived) for lived in lives]
    assert waits[0] == 1
    for lived, before, wait in zip(lives[1:], waits, waits[1:], strict=False):
        assert wait == (1 if lived >= 60 else min(2 * before, 30))
