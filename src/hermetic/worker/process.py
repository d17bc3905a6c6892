"""A worker as a process: sockets around `Worker`, one loop.

Two ways to start one. `hermetic serve` starts it with its configuration on standard input (secrets never stand in arguments
or environment) and reads one JSON object a line from its standard output: progress, then `ready`, or `error`; when standard
input ends, the parent is gone, and so is this process. `hermetic prefill` and `hermetic decode` run it by itself
(`run_standalone`): the first SIGTERM lets it leave its gateways in peace, the second ends it.

Every connection carries sessions (`link.py`). A worker says to each gateway every second that it is there; gateways dial it
back, and prefill dials decode. A session ends when the other end's process has ended, is silent for too long, or has
forgotten it; whoever dialled begins the next one.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec
import zmq

from hermetic.handoff.messages import Key
from hermetic.model.errors import ModelError
from hermetic.options import OptionError
from hermetic.telemetry import logs
from hermetic.transport.base import TransportError
from hermetic.transport.process import ProcessWatch
from hermetic.worker import messages as m
from hermetic.worker import wire
from hermetic.worker.build import WorkerConfig, build
from hermetic.worker.core import Connection, Worker
from hermetic.worker.link import BEAT_SECONDS, Link
from hermetic.worker.prefill import PrefillWorker
from hermetic.worker.timers import Every

IDLE_MS = 50  # how long the loop sleeps when nothing happens; an acknowledgement waits no longer
WAITING_MS = 1  # while something ends by itself soon
LOOK_SECONDS = 0.2  # between two looks at peers' processes and at who is silent
LINKS_SECONDS = 0.02  # between two looks at what links have to repeat
MAX_READ = 256  # messages taken in before the next step at most
STRANGER_SECONDS = (
    0.5  # a session's first message may be overtaken; one that does not come within this is unknown here
)
STRANGERS = 1024
COMPLAINTS = 1000  # different complaints that are logged; every one is counted
UNHEARD_SECONDS = 10.0  # without an answer of any gateway after which a new worker says so
FORGET_SECONDS = 600.0  # a decode worker that does not answer for so long is dialled no more
DEAF_SECONDS = 5.0  # without an answer after which a leaving worker waits for a gateway no more
LEAVE_SECONDS = 600.0  # a leaving worker waits so long for its requests to end

Report = Callable[[dict[str, Any]], None]
Clock = Callable[[], float]


@dataclass
class _Line:
    """One connection: where to send, its session, and whose process is at the other end (None: not known)."""

    send: Callable[[bytes], object]
    link: Link
    watch: ProcessWatch | None = None


@dataclass
class _Dialled:
    """A line that we opened: to a decode worker in one incarnation."""

    socket: zmq.Socket[Any]
    name: str
    incarnation: bytes
    asked_by: Connection
    up: float  # when it last stood


class WorkerProcess:
    """Owns the sockets of one worker and drives it until told to stop."""

    def __init__(self, config: WorkerConfig, report: Report, clock: Clock = time.monotonic) -> None:
        self._config, self._report, self._clock = config, report, clock
        self._log = logging.getLogger(f"hermetic.{config.name}")
        self._lines: dict[Connection, _Line] = {}
        self._dialled: dict[Connection, _Dialled] = {}
        self._sockets: dict[zmq.Socket[Any], Connection] = {}
        self._strangers: OrderedDict[Connection, float] = OrderedDict()
        self._complained: set[str] = set()
        self._context: zmq.Context[Any] = zmq.Context()
        self._auth = wire.authenticator(self._context, config.keys)
        self._router = self._context.socket(zmq.ROUTER)
        # Before anything slow: a port that cannot be had is said at once.
        self._port = wire.serve(self._router, config.keys, config.host, config.port)
        self._strangers_at_the_door = wire.strangers(self._router)
        host = config.advertise or config.host
        address = f"tcp://[{host}]:{self._port}" if ":" in host else f"tcp://{host}:{self._port}"
        self.worker: Worker = build(
            config, self._send, lambda f, text: report({"progress": f, "text": text}), address, clock
        )
        self._announcers = [self._announcer(gateway) for gateway in config.gateways]
        self._poller = zmq.Poller()
        for socket in (self._router, self._strangers_at_the_door, *self._announcers):
            self._poller.register(socket, zmq.POLLIN)
        if config.supervised:
            self._poller.register(sys.stdin.fileno(), zmq.POLLIN)
        self._stop = False
        self._kept = self._since = clock()
        self._heard_of = not config.gateways  # a gateway has answered, or it was said that none does
        self._leaving: float | None = None  # since when
        self._registered: dict[
            zmq.Socket[Any], float
        ] = {}  # gateways that know us, and when they last said so
        self._beat, self._look, self._repeat = Every(BEAT_SECONDS), Every(LOOK_SECONDS), Every(LINKS_SECONDS)

    def run(self) -> None:
        """Serve until the parent goes, a signal comes, or the gateways have let it leave."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        gc.collect()
        gc.freeze()  # the model stays; collections need not walk it again
        self._report({"ready": {"port": self._port, "info": msgspec.to_builtins(self.worker.info)}})
        try:
            idle = False
            while not self._stop:
                wait = (WAITING_MS if self.worker.waiting else IDLE_MS) if idle else 0
                ready = dict(self._poller.poll(wait))
                if self._config.supervised and self._parent_gone(ready):
                    break
                read = self._read(ready)
                idle = not self.worker.tick() and not read
                self._keep(self._clock())
        finally:
            self._auth.stop()
            self._context.destroy(linger=0)

    @staticmethod
    def _parent_gone(ready: dict[Any, int]) -> bool:
        return sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 4096)

    def _on_signal(self, *_: object) -> None:
        if self._config.supervised or self._leaving is not None or not self._registered:
            self._stop = True
        else:
            self._leaving = self._clock()
            self._report({"text": "leaving: requests that are here may end; a second signal ends them now"})

    def _keep(self, now: float) -> None:
        """What time asks for."""
        if now - self._kept > self._config.silent_seconds / 2:
            for line in self._lines.values():  # we were away ourselves (stopped, or in a long step)
                line.link.forgive(now)
        self._kept = now
        if self._repeat.due(now):
            for line in self._lines.values():
                before = line.link.resent
                for raw in line.link.due(now):
                    self._raw(line, raw)
                self.worker.counters.messages_resent += line.link.resent - before
        if self._beat.due(now):
            for socket in self._announcers:
                body = m.Register(self.worker.info, self._leaving is not None)
                with contextlib.suppress(zmq.Again):  # nobody reads there now; the next one will do
                    socket.send(m.datagram(self.worker.info.incarnation, body), zmq.NOBLOCK)
        if self._look.due(now):
            self._look_at_lines(now)
        if not self._heard_of and now - self._since > UNHEARD_SECONDS:
            self._heard_of = True
            where = ", ".join(self._config.gateways)
            self._log.warning("no gateway answers at %s: does it run, and with the same key file?", where)
        if self._leaving is not None:
            self._go_if_free(now, self._leaving)

    def _go_if_free(self, now: float, since: float) -> None:
        """Gateways say when we may go; one that says nothing any more is not waited for once its requests have ended."""
        for socket, heard in list(self._registered.items()):
            if now - heard > DEAF_SECONDS and not self.worker.serving:
                self._left(socket)
        if now - since > LEAVE_SECONDS:
            self._log.warning("requests did not end within %.0f s; leaving all the same", LEAVE_SECONDS)
            self._stop = True

    # ------------------------------------------------------------------- reading

    def _read(self, ready: dict[Any, int]) -> bool:
        read = 0
        if self._router in ready:
            while read < MAX_READ:
                try:
                    frames = self._router.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                read += 1
                if len(frames) != 2:
                    self._complain("a message of another number of frames")
                    continue
                self._take(b"r" + frames[0], frames[1])
        for socket, connection in list(self._sockets.items()):
            while socket in ready and not socket.closed and read < 2 * MAX_READ:
                try:
                    raw = socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                read += 1
                self._take(connection, raw)
        while self._strangers_at_the_door in ready:
            try:
                self._strangers_at_the_door.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self.worker.counters.peers_refused += 1
            if self.worker.counters.peers_refused == 1:
                self._log.warning("a connection without this cluster's keys was refused (said once)")
        for socket in self._announcers:
            while socket in ready:
                try:
                    self._heard_gateway(socket, socket.recv(zmq.NOBLOCK))
                except zmq.Again:
                    break
        return read > 0

    def _take(self, connection: Connection, raw: bytes) -> None:
        counters, now = self.worker.counters, self._clock()
        try:
            envelope = m.decode(raw)
        except m.ProtocolError as error:
            self._complain(str(error))
            return
        line = self._lines.get(connection)
        if connection in self._dialled:
            if isinstance(envelope.body, m.Reset):
                if line is not None and envelope.session == line.link.session:
                    self._redial(connection, "does not know this session", now)
                return
        elif line is None or envelope.session > line.link.session:
            if envelope.sequence != 1 or not isinstance(envelope.body, m.Hello):
                self._stranger(connection, envelope, now)
                return
            line = self._open(connection, envelope, now)
        assert line is not None
        stale = line.link.stale
        for key, body in line.link.accept(envelope, now):
            match body:
                case m.Hello(info=m.WorkerInfo() as info) | m.Welcome(info=info):
                    self._watch(line, info)
                case m.Connect() if isinstance(self.worker, PrefillWorker):
                    self._dial(self.worker, connection, body, now)
                    continue
            self.worker.handle(connection, key, body)
        counters.messages_stale += line.link.stale - stale

    def _open(self, connection: Connection, envelope: m.Envelope, now: float) -> _Line:
        """Somebody begins a session; what was open on the former one is over."""
        if connection in self._lines:
            self._drop(connection, "has begun a new session")
        self._strangers.pop(connection, None)
        identity = connection[1:]
        link = Link(self.worker.info.incarnation, envelope.session, now)
        line = _Line(lambda data: self._router.send_multipart([identity, data], zmq.NOBLOCK), link)
        self._lines[connection] = line
        return line

    def _stranger(self, connection: Connection, envelope: m.Envelope, now: float) -> None:
        """A session that is not known here. Its Hello may still be on its way; after a while, ask for a new one."""
        self.worker.counters.messages_stale += 1
        first = self._strangers.setdefault(connection, now)
        while len(self._strangers) > STRANGERS:
            self._strangers.popitem(last=False)
        if now - first < STRANGER_SECONDS:
            return
        self._strangers.pop(connection, None)
        raw = m.datagram(self.worker.info.incarnation, m.Reset(), envelope.session)
        with contextlib.suppress(zmq.ZMQError):
            self._router.send_multipart([connection[1:], raw], zmq.NOBLOCK)

    def _complain(self, text: str) -> None:
        """Count what cannot be used; log each kind once."""
        self.worker.counters.messages_rejected += 1
        if text not in self._complained and len(self._complained) < COMPLAINTS:
            self._complained.add(text)
            self._log.warning("a message was rejected: %s (said once)", text)

    def _heard_gateway(self, socket: zmq.Socket[Any], raw: bytes) -> None:
        """An answer to what we announce."""
        try:
            envelope = m.decode(raw)
        except m.ProtocolError as error:
            self._complain(str(error))
            return
        self._heard_of = True
        match envelope.body:
            case m.Registered():
                if socket not in self._registered:
                    self._log.info("registered with a gateway")
                self._registered[socket] = self._clock()
            case m.Rejected(reason=reason):
                self._registered.pop(socket, None)
                text = f"a gateway does not take this worker: {reason}"
                if text not in self._complained:
                    self._complained.add(text)
                    self._log.error("%s", text)
                if self._leaving is not None:
                    self._left(socket)
            case m.Leave():
                if self._leaving is not None:
                    self._left(socket)
            case _:
                self._complain(f"{type(envelope.body).__name__} from a gateway's control port")

    def _left(self, socket: zmq.Socket[Any]) -> None:
        """This gateway has nothing of ours any more; when none has, this process may end."""
        self._registered.pop(socket, None)
        self._stop = not self._registered

    # ------------------------------------------------------------------ sessions

    def _announcer(self, gateway: str) -> zmq.Socket[Any]:
        socket = self._context.socket(zmq.DEALER)
        wire.dial(socket, self._config.keys, gateway, wire.new_identity())
        socket.sndhwm = 2  # what a gateway that is away did not read is worth nothing later
        return socket

    def _dial(self, worker: PrefillWorker, asked_by: Connection, connect: m.Connect, now: float) -> None:
        connection = b"d" + connect.worker.encode() + b"/" + connect.incarnation
        known = self._dialled.get(connection)
        if known is not None:
            known.asked_by = asked_by
            if worker.paired_with(connection):
                worker.tell_paired(connection, asked_by)
            return
        for other, dialled in list(self._dialled.items()):
            if dialled.name == connect.worker:  # an incarnation that the gateway no longer knows
                self._hang_up(other)
        socket = self._context.socket(zmq.DEALER)
        wire.dial(socket, self._config.keys, connect.address, wire.new_identity())
        self._sockets[socket] = connection
        self._poller.register(socket, zmq.POLLIN)
        self._dialled[connection] = _Dialled(socket, connect.worker, connect.incarnation, asked_by, now)
        self._begin(connection, 1, now)

    def _begin(self, connection: Connection, session: int, now: float) -> None:
        dialled = self._dialled[connection]
        link = Link(self.worker.info.incarnation, session, now)
        self._lines[connection] = _Line(lambda data: dialled.socket.send(data, zmq.NOBLOCK), link)
        assert isinstance(self.worker, PrefillWorker)
        self.worker.dialled(connection, dialled.name, dialled.incarnation, dialled.asked_by)

    def _redial(self, connection: Connection, why: str, now: float) -> None:
        """The session with a decode worker is over; begin the next."""
        assert isinstance(self.worker, PrefillWorker)
        session = self._lines[connection].link.session
        if self.worker.paired_with(connection):
            self._dialled[connection].up = now
            self._drop(connection, why)
        elif now - self._dialled[connection].up > FORGET_SECONDS and not self.worker.holds_for(connection):
            self._hang_up(connection)
            return
        self._begin(connection, session + 1, now)

    def _hang_up(self, connection: Connection) -> None:
        """Nothing of this decode worker's incarnation will come back."""
        dialled = self._dialled.pop(connection)
        line = self._lines.pop(connection, None)
        if line is not None and line.watch is not None:
            line.watch.close()
        assert isinstance(self.worker, PrefillWorker)
        self.worker.gone(connection)
        self._poller.unregister(dialled.socket)
        del self._sockets[dialled.socket]
        dialled.socket.close(linger=0)

    def _drop(self, connection: Connection, why: str) -> None:
        """A session is over: tell the worker."""
        line = self._lines.pop(connection)
        if line.watch is not None:
            line.watch.close()
        self._log.warning("the other end of a connection %s", why)
        self.worker.lost(connection, why)

    def _watch(self, line: _Line, info: m.WorkerInfo) -> None:
        """A process of this host can be seen to end; one elsewhere can only be silent."""
        if info.host != self.worker.info.host:
            return
        with contextlib.suppress(OSError):
            line.watch = ProcessWatch(info.pid)

    def _look_at_lines(self, now: float) -> None:
        for connection, line in list(self._lines.items()):
            ended = line.watch is not None and line.watch.ended()
            if ended and connection in self._dialled:
                self._hang_up(connection)
            elif ended:
                self._drop(connection, "has ended")
            elif line.link.broken or line.link.silent(now) > self._config.silent_seconds:
                why = f"has been silent for {line.link.silent(now):.0f} s"
                if connection in self._dialled:
                    self._redial(connection, why, now)
                else:
                    self._drop(connection, why)

    # ------------------------------------------------------------------- writing

    def _send(self, to: Connection, key: Key | None, body: m.Body) -> None:
        line = self._lines.get(to)
        if line is None:
            return  # the session is over; its worker has been told
        self._raw(line, line.link.wrap(key, body, self._clock()))

    def _raw(self, line: _Line, raw: bytes) -> None:
        try:
            line.send(raw)
        except zmq.Again:
            return  # its queue is full; the link says it again
        except zmq.ZMQError as error:
            self._log.debug("a message could not be sent: %s", error)


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
        make(config, report).run()
    except (OptionError, ModelError, TransportError) as error:
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
