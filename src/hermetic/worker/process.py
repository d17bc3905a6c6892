"""A worker as a process: sockets around `Worker`, one loop.

Started by `hermetic serve` with its configuration on standard input (secrets never stand in arguments or environment).
Standard output carries one JSON object a line to the parent: progress, then `ready` with the port, or `error`. When
standard input ends, the parent is gone, and so is this process.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from hermetic.handoff.messages import Key
from hermetic.model.errors import ModelError
from hermetic.options import OptionError
from hermetic.telemetry import logs
from hermetic.transport.process import ProcessWatch
from hermetic.worker import messages as m
from hermetic.worker import wire
from hermetic.worker.build import WorkerConfig, build
from hermetic.worker.core import Connection, Worker
from hermetic.worker.prefill import PrefillWorker

IDLE_MS = 200  # how long the loop sleeps when nothing happens: also how often peers' processes are looked at
LOOK_EVERY = 50  # busy rounds between two looks at the peers' processes
MAX_READ = 256  # messages taken in before the next step at most


@dataclass
class _Line:
    """One connection: where to send, how to number, and whose process is at the other end (None: not known)."""

    send: Callable[[bytes], object]
    outgoing: wire.Outgoing
    incoming: wire.Incoming = field(default_factory=wire.Incoming)
    watch: ProcessWatch | None = None


class WorkerProcess:
    """Owns the sockets of one worker and drives it until told to stop."""

    def __init__(self, config: WorkerConfig, report: Callable[[dict[str, Any]], None]) -> None:
        self._config, self._report = config, report
        self._log = logging.getLogger(f"hermetic.{config.name}")
        self._lines: dict[Connection, _Line] = {}
        self._dealers: dict[zmq.Socket[Any], Connection] = {}
        self.worker: Worker = build(config, self._send, lambda f, text: report({"progress": f, "text": text}))
        self._context: zmq.Context[Any] = zmq.Context()
        self._auth = wire.authenticator(self._context, config.keys)
        self._router = self._context.socket(zmq.ROUTER)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(sys.stdin.fileno(), zmq.POLLIN)
        self._stop = False

    def run(self) -> None:
        """Serve until the parent goes or a signal comes."""
        port = wire.serve(self._router, self._config.keys, self._config.host)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        gc.collect()
        gc.freeze()  # the model stays; collections need not walk it again
        self._report({"ready": {"port": port, "info": msgspec.to_builtins(self.worker.info)}})
        try:
            idle, rounds = False, 0
            while not self._stop:
                rounds += 1
                ready = dict(self._poller.poll(IDLE_MS if idle else 0))
                if sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 4096):
                    break
                read = self._read(ready)
                idle = not self.worker.tick() and not read
                if idle or rounds % LOOK_EVERY == 0:
                    self._look_at_peers()
        finally:
            self._auth.stop()
            self._context.destroy(linger=0)

    def _on_signal(self, *_: object) -> None:
        self._stop = True

    # ------------------------------------------------------------------- reading

    def _read(self, ready: dict[Any, int]) -> bool:
        read = 0
        if self._router in ready:
            while read < MAX_READ:
                try:
                    source, raw = self._router.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                except ValueError:  # another number of frames: not one of ours
                    self.worker.counters.messages_rejected += 1
                    continue
                read += 1
                self._take(b"r" + source, raw)
        for socket, connection in list(self._dealers.items()):
            while socket in ready and read < 2 * MAX_READ:
                try:
                    raw = socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                read += 1
                self._take(connection, raw)
        return read > 0

    def _take(self, connection: Connection, raw: bytes) -> None:
        counters = self.worker.counters
        try:
            envelope = m.decode(raw)
        except m.ProtocolError as error:
            counters.messages_rejected += 1
            self._log.warning("a message was rejected: %s", error)
            return
        line = self._lines.get(connection)
        if line is None:
            if not isinstance(envelope.body, m.Hello):
                counters.messages_rejected += 1
                return
            identity = connection[1:]
            line = _Line(lambda data: self._router.send_multipart([identity, data]), self._numbered())
            self._lines[connection] = line
        if not line.incoming.accept(envelope):
            counters.messages_stale += 1
            return
        match envelope.body:
            case m.Hello(info=m.WorkerInfo() as info):
                line.watch = self._watch(info)
            case m.Welcome(info=info):
                line.watch = self._watch(info)
            case m.Connect(address=address, worker=name) if isinstance(self.worker, PrefillWorker):
                self._dial(self.worker, connection, address, name)
                return
        self.worker.handle(connection, envelope.key, envelope.body)

    def _dial(self, worker: PrefillWorker, asked_by: Connection, address: str, name: str) -> None:
        socket = self._context.socket(zmq.DEALER)
        wire.dial(socket, self._config.keys, address)
        connection = b"d" + name.encode()
        self._dealers[socket] = connection
        self._poller.register(socket, zmq.POLLIN)
        self._lines[connection] = _Line(socket.send, self._numbered())
        worker.dialled(connection, name, asked_by)

    def _numbered(self) -> wire.Outgoing:
        return wire.Outgoing(self.worker.info.incarnation)

    def _watch(self, info: m.WorkerInfo) -> ProcessWatch | None:
        try:
            return ProcessWatch(info.pid)
        except OSError:
            return None

    def _look_at_peers(self) -> None:
        for connection, line in list(self._lines.items()):
            if line.watch is not None and line.watch.ended():
                self._log.warning("the process at the other end of a connection has ended")
                line.watch.close()
                del self._lines[connection]
                self.worker.lost(connection)

    # ------------------------------------------------------------------- writing

    def _send(self, to: Connection, key: Key | None, body: m.Body) -> None:
        line = self._lines.get(to)
        if line is None:
            return  # the connection was lost; its worker has been told
        try:
            line.send(line.outgoing.wrap(key, body))
        except zmq.ZMQError as error:
            self._log.warning("a message could not be sent: %s", error)


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
            raise SystemExit("hermetic workers are started by `hermetic serve`")
        data += part
    return data


def main(
    make: Callable[[WorkerConfig, Callable[[dict[str, Any]], None]], WorkerProcess] = WorkerProcess,
) -> None:
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
    try:
        make(config, report).run()
    except (OptionError, ModelError) as error:
        report({"error": str(error)})
        raise SystemExit(2) from None
    except MemoryError:
        report({"error": f"{config.name}: not enough memory; give smaller --prefill-kv and --decode-kv"})
        raise SystemExit(2) from None
    except (zmq.ZMQError, OSError) as error:
        traceback.print_exc()
        report({"error": f"{config.name}: {error}"})
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
