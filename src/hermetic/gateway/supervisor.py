"""Starts the worker processes of `hermetic serve`, hands them their configuration, and sees when one ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from hermetic.worker.build import WorkerConfig
from hermetic.worker.messages import WorkerInfo

STOP_SECONDS = 2.0  # between asking a worker to stop and killing it


class StartError(Exception):
    """A worker did not start; `exit_code` 2 when the user can mend it (the message says how), else 1."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


@dataclass
class WorkerHandle:
    """A running worker process."""

    config: WorkerConfig
    process: asyncio.subprocess.Process
    info: WorkerInfo | None = None
    port: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def address(self) -> str:
        return f"tcp://{self.config.host}:{self.port}"


Progress = Callable[[str, float, str], None]
# How long a thread that waits for the others of its parallel section spins before it sleeps (some 0.3 ms here). GNU
# OpenMP's own 13 ms make a step 10-30 times as long as soon as another process wants the core; sleeping at once costs
# a quiet machine 60 %. Whoever knows better sets the variable.
ENVIRONMENT = {"GOMP_SPINCOUNT": "10000"}
COMMAND = (sys.executable, "-m", "hermetic.worker.process")


async def start(config: WorkerConfig, progress: Progress, command: Sequence[str] = COMMAND) -> WorkerHandle:
    """Start one worker and wait until it is ready. Raises StartError.

    `command` is the product's own everywhere but in the lab, which starts workers with something broken."""
    read_end, write_end = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=write_end,
            start_new_session=True,
            limit=2**24,
            env=ENVIRONMENT | os.environ,
        )
    finally:
        os.close(write_end)
    handle = WorkerHandle(config, process)
    assert process.stdin is not None
    raw = msgspec.msgpack.encode(config)
    try:
        process.stdin.write(len(raw).to_bytes(4, "little") + raw)
        await process.stdin.drain()
        await _wait_ready(handle, read_end, progress)
    except BaseException:
        await stop([handle])
        raise
    return handle


async def _wait_ready(handle: WorkerHandle, read_end: int, progress: Progress) -> None:
    reader = asyncio.StreamReader(limit=2**24)
    loop = asyncio.get_running_loop()
    pipe = os.fdopen(read_end, "rb", 0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        while line := await reader.readline():
            message = json.loads(line)
            if "error" in message:
                code = await handle.process.wait()
                raise StartError(message["error"], 2 if code == 2 else 1)
            if "ready" in message:
                handle.port = message["ready"]["port"]
                handle.info = msgspec.convert(message["ready"]["info"], WorkerInfo)
                return
            progress(handle.config.name, message["progress"], message["text"])
        code = await handle.process.wait()
        raise StartError(
            f"worker {handle.config.name} ended with status {code} while it started; its log is above", 1
        )
    finally:
        transport.close()


async def stop(handles: Sequence[WorkerHandle]) -> None:
    """End every process: ask, wait, kill. Returns when all are gone."""
    waiting = []
    for handle in handles:
        if handle.process.returncode is None:
            _signal(handle, signal.SIGTERM)
            if handle.process.stdin is not None:
                handle.process.stdin.close()
        waiting.append(asyncio.ensure_future(handle.process.wait()))
    if not waiting:
        return
    _, pending = await asyncio.wait(waiting, timeout=STOP_SECONDS)
    if pending:
        for handle in handles:
            if handle.process.returncode is None:
                _signal(handle, signal.SIGKILL)
        await asyncio.wait(pending)


def _signal(handle: WorkerHandle, number: signal.Signals) -> None:
    try:
        handle.process.send_signal(number)
    except ProcessLookupError:
        return  # it has ended already
