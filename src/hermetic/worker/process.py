"""A worker as a process: its sockets (`zmq_wire.py`), its sessions (`sessions.py`), one loop.

Two ways to start one. `hermetic serve` starts it with its configuration on standard input (secrets never stand in arguments
or environment) and reads one JSON object a line from its standard output: progress, then `ready`, or `error`; when standard
input ends, the parent is gone, and so is this process. `hermetic prefill` and `hermetic decode` run it by itself
(`run_standalone`): the first SIGTERM lets it leave its gateways in peace, the second ends it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec
import zmq

from hermetic.handoff.trace import Recorder, TraceFileError, recording
from hermetic.model.errors import ModelError
from hermetic.options import OptionError
from hermetic.telemetry import logs
from hermetic.transport.base import TransportError
from hermetic.worker.build import WorkerConfig, build
from hermetic.worker.core import Worker
from hermetic.worker.sessions import Clock, Sessions
from hermetic.worker.zmq_wire import ZmqWire

IDLE_MS = 50  # how long the loop sleeps when nothing happens; an acknowledgement waits no longer
WAITING_MS = 1  # while something ends by itself soon

Report = Callable[[dict[str, Any]], None]


class WorkerProcess:
    """Owns one worker's sockets and sessions and drives them until told to stop."""

    def __init__(self, config: WorkerConfig, report: Report, clock: Clock = time.monotonic) -> None:
        self._config, self._report, self._clock = config, report, clock
        # Before anything slow: a port that cannot be had is said at once.
        self._wire = ZmqWire(config.keys, config.host, config.port)
        host = config.advertise or config.host
        address = f"tcp://[{host}]:{self._wire.port}" if ":" in host else f"tcp://{host}:{self._wire.port}"
        self.sessions = Sessions(
            lambda send: build(
                config, send, lambda f, text: report({"progress": f, "text": text}), address, clock
            ),
            self._wire,
            clock,
            config.gateways,
            config.silent_seconds,
        )
        if config.supervised:
            self._wire.poller.register(sys.stdin.fileno(), zmq.POLLIN)
        self._stop = False

    @property
    def worker(self) -> Worker:
        return self.sessions.worker

    def run(self) -> None:
        """Serve until the parent goes, a signal comes, or the gateways have let it leave."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        gc.collect()
        gc.freeze()  # the model stays; collections need not walk it again
        self._report({"ready": {"port": self._wire.port, "info": msgspec.to_builtins(self.worker.info)}})
        sessions, wire = self.sessions, self._wire
        try:
            idle = False
            while not self._stop and not sessions.over:
                wait = (WAITING_MS if self.worker.waiting else IDLE_MS) if idle else 0
                ready = dict(wire.poller.poll(wait))
                if self._config.supervised and self._parent_gone(ready):
                    break
                read = wire.read(ready, sessions.take, sessions.complain, sessions.keyless)
                idle = not self.worker.tick() and not read
                sessions.keep(self._clock())
                if Recorder.current is not None:
                    Recorder.current.keep()
        finally:
            wire.close()

    @staticmethod
    def _parent_gone(ready: dict[Any, int]) -> bool:
        return sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 4096)

    def _on_signal(self, *_: object) -> None:
        if self._config.supervised or not self.sessions.leave():
            self._stop = True
        else:
            self._report({"text": "leaving: requests that are here may end; a second signal ends them now"})


def read_config() -> WorkerConfig:
    """The configuration from standard input: 4 bytes length, then MessagePack."""
    stream = sys.stdin.buffer.raw  # type: ignore[union-attr]
    size = int.from_bytes(_exactly(stream, 4), "little")
    return msgspec.msgpack.decode(_exactly(stream, size), type=WorkerConfig)


def _exactly(stream: Any, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = stream.read(size - len(data))
        if not part:
            raise SystemExit(
                "this is started by `hermetic serve`; see `hermetic prefill` and `hermetic decode`"
            )
        data += part
    return data


Make = Callable[[WorkerConfig, Report], WorkerProcess]


def main(make: Make = WorkerProcess) -> None:
    """Entry point. `make` lets the lab build a worker with something broken; the product passes nothing."""
    config = read_config()
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever prints goes to the log, not into the channel
    logs.setup(config.log_format)

    def report(line: dict[str, Any]) -> None:
        channel.write(json.dumps(line, default=lambda b: b.hex()) + "\n")

    # Until the loop reads standard input, a parent that goes away is noticed by writing to it.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends us
    raise SystemExit(_run(config, report, make))


def run_standalone(config: WorkerConfig, report: Report, make: Make = WorkerProcess) -> NoReturn:
    """This process is the worker, until it is told to leave. `report` gets what a parent would read (see above).

    Exit code 0 when it left, 2 when the user can mend what is wrong (reported as `error`), else 1."""
    raise SystemExit(_run(config, report, make))


def _run(config: WorkerConfig, report: Report, make: Make) -> int:
    try:
        with recording(config.trace) if config.trace else contextlib.nullcontext():
            make(config, report).run()
    except (OptionError, ModelError, TransportError, TraceFileError) as error:
        report({"error": str(error)})
        return 2
    except MemoryError:
        report({"error": f"{config.name}: not enough memory; give smaller --prefill-kv and --decode-kv"})
        return 2
    except zmq.ZMQError as error:
        report({"error": f"{config.name} cannot listen on {config.host} port {config.port}: {error}"})
        return 2
    except OSError as error:
        traceback.print_exc()
        report({"error": f"{config.name}: {error}"})
        return 1
    return 0


if __name__ == "__main__":
    main()
