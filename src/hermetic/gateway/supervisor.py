"""Starts the worker processes of `hermetic serve`, hands them their configuration, and starts the dead ones again.

The one thing to know: a worker that ended by itself with status 0 was asked to (a signal, a leave) and stays away; any
other end is a death, after which the same name comes back with a new incarnation, later and later if it keeps dying.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from hermetic.options import WORKER_ENVIRONMENT
from hermetic.worker.build import WorkerConfig
from hermetic.worker.messages import WorkerInfo

log = logging.getLogger("hermetic.supervisor")

STOP_SECONDS = 2.0  # between asking a worker to stop and killing it
FIRST_WAIT, LONGEST_WAIT = (
    1.0,
    30.0,
)  # seconds before a dead worker is started again; doubles from death to death
STEADY_SECONDS = 60.0  # a worker that lived as long starts again with the first wait


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

    @property
    def address(self) -> str:
        return f"tcp://{self.config.host}:{self.port}"


Progress = Callable[[str, float, str], None]
Lost = Callable[[str, bytes], None]  # worker, incarnation
Commands = Callable[[WorkerConfig], Sequence[str]]
"""The command line that starts a worker. Always the product's own, but in the lab, which starts broken ones."""

COMMAND = (sys.executable, "-m", "hermetic.worker.process")


def product_command(_config: WorkerConfig) -> Sequence[str]:
    return COMMAND


class Backoff:
    """How long to wait before a worker is started again. Pure: told how long it lived, it says how long to wait."""

    def __init__(self) -> None:
        self._next = FIRST_WAIT

    def after(self, lived: float) -> float:
        """It died `lived` seconds after it was ready (0: it never was)."""
        if lived >= STEADY_SECONDS:
            self._next = FIRST_WAIT
        wait, self._next = self._next, min(2 * self._next, LONGEST_WAIT)
        return wait


class Supervisor:
    """The workers of one `serve`. `handles` are in the order of the configurations, each of the process that is now, or
    was last, running under that name; `lost` is called at every death, with the incarnation that died."""

    def __init__(
        self,
        configs: Sequence[WorkerConfig],
        lost: Lost,
        progress: Progress,
        commands: Commands = product_command,
    ) -> None:
        self._configs, self._lost, self._progress, self._commands = configs, lost, progress, commands
        self._watchers: list[asyncio.Task[None]] = []
        self.handles: list[WorkerHandle] = []
        self.restarts = {config.name: 0 for config in configs}

    async def start(self) -> None:
        """Start all at once; returns when all are ready. Raises StartError, and leaves what runs to `stop`."""
        starting = [asyncio.create_task(start(c, self._progress, self._commands(c))) for c in self._configs]
        try:
            for done in asyncio.as_completed(starting):
                await done
        finally:
            for task in starting:
                task.cancel()
            results = await asyncio.gather(*starting, return_exceptions=True)
            self.handles += [result for result in results if isinstance(result, WorkerHandle)]
        self._watchers = [asyncio.create_task(self._keep(number)) for number in range(len(self.handles))]

    async def stop(self) -> None:
        """End every process; returns when all are gone."""
        for watcher in self._watchers:
            watcher.cancel()  # one that is starting a worker ends that worker
        await asyncio.gather(stop(self.handles), *self._watchers, return_exceptions=True)

    async def _keep(self, number: int) -> None:
        """Have this worker running, for as long as it is not asked to leave."""
        backoff, ready_at = Backoff(), time.monotonic()
        while True:
            handle = self.handles[number]
            name, code = handle.config.name, await handle.process.wait()
            assert handle.info is not None
            self._lost(name, handle.info.incarnation)
            if code == 0:
                log.warning("worker %s has left, as it was asked to; it is not started again", name)
                return
            wait = backoff.after(time.monotonic() - ready_at)
            log.error("worker %s ended with status %d; it is started again in %.0f s", name, code, wait)
            self.handles[number] = await self._again(handle.config, backoff, wait)
            ready_at = time.monotonic()

    async def _again(self, config: WorkerConfig, backoff: Backoff, wait: float) -> WorkerHandle:
        """Try until it is ready."""
        while True:
            await asyncio.sleep(wait)
            self.restarts[config.name] += 1
            try:
                handle = await start(config, _silent, self._commands(config))
            except StartError as error:
                wait = backoff.after(0)
                if error.exit_code == 2:  # it will say the same until somebody mends it
                    wait = LONGEST_WAIT
                log.critical(
                    "worker %s does not start: %s; the next try is in %.0f s", config.name, error, wait
                )
            except OSError as error:  # no process or no pipe to be had just now
                wait = backoff.after(0)
                log.critical(
                    "worker %s cannot be started: %s; the next try is in %.0f s", config.name, error, wait
                )
            else:
                log.warning("worker %s is ready again, process %d", config.name, handle.process.pid)
                return handle


def _silent(_worker: str, _fraction: float, _text: str) -> None:
    """Nobody watches a bar while a worker is started again."""


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
            env=WORKER_ENVIRONMENT | os.environ,
        )
    except BaseException:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
    handle = WorkerHandle(config, process)
    assert process.stdin is not None
    raw = msgspec.msgpack.encode(config)
    try:
        with contextlib.suppress(ConnectionError):  # it has ended already, which is what will be said
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
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        handle.process.send_signal(number)
