"""A worker's sessions with everything around them written down: lines, processes that are watched, and what the worker is told.

The one thing to know: the other ends are real links (`Peer`), so a test follows the rules of a session exactly, or breaks one
of them with `raw`. Time is `world.now` and passes in `world.passes` only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hermetic.handoff.messages import PROTOCOL, Key
from hermetic.kv.geometry import Geometry
from hermetic.worker import messages as m
from hermetic.worker.core import Connection, Parts, Send, Worker
from hermetic.worker.link import Link
from hermetic.worker.prefill import PrefillWorker
from hermetic.worker.sessions import Sessions

SILENT_SECONDS = 30.0
HERE, ELSEWHERE = "this host", "another host"
GATE = "tcp://127.0.0.1:1"


def info(worker: str, role: str = "decode", **changes: Any) -> m.WorkerInfo:
    values: dict[str, Any] = {
        "worker": worker, "role": role, "incarnation": worker.encode().ljust(8, b"-")[:8], "pid": 7, "host": HERE,
        "address": "", "transport": "shm", "source": "", "slots": 4, "model": "m", "numeric": "n", "position": "p",
        "geometry": Geometry.attention(16, 1, 1, 8, "f32"), "key_id": "k", "pages": 4, "page_size": 16, "max_tokens": 64,
        "window": 64, "vocab": 100, "max_batch": 4, "verify": "landing", "eos": (),
    }  # fmt: skip
    return m.WorkerInfo(**(values | changes))


@dataclass(eq=False)
class Line:
    """Keeps what was put on it. `dialled` names the connection of one that the worker opened."""

    dialled: Connection = b""
    address: str = ""
    backlog: int | None = None
    sent: list[bytes] = field(default_factory=list)
    closed: bool = False

    def put(self, raw: bytes) -> None:
        assert not self.closed, "sent over a closed line"
        self.sent.append(raw)

    def close(self) -> None:
        self.closed = True

    def read(self) -> list[m.Envelope]:
        """What was sent since the last look."""
        sent, self.sent = self.sent, []
        return [m.decode(raw) for raw in sent]

    def bodies(self) -> list[m.Body]:
        """The same without signs of life."""
        return [e.body for e in self.read() if not isinstance(e.body, m.Beat)]


@dataclass(eq=False)
class Watch:
    pid: int
    dead: set[int]
    closed: bool = False

    def ended(self) -> bool:
        assert not self.closed, "looked at a process after it was let go"
        return self.pid in self.dead

    def close(self) -> None:
        assert not self.closed, "let go twice"
        self.closed = True


class Wire:
    """Opens lines to anywhere but to addresses in `impossible`, and watches any process but those in `unknown`."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.watches: list[Watch] = []
        self.dead: set[int] = set()
        self.unknown: set[int] = set()
        self.impossible: set[str] = set()

    def dial(self, address: str, connection: Connection, backlog: int | None = None) -> Line:
        if address in self.impossible:
            raise OSError("No such device")
        self.lines.append(Line(connection, address, backlog))
        return self.lines[-1]

    def watch(self, pid: int) -> Watch:
        if pid in self.unknown:
            raise ProcessLookupError(f"no process {pid}")
        self.watches.append(Watch(pid, self.dead))
        return self.watches[-1]

    @property
    def open(self) -> list[Line]:
        """To other workers."""
        return [line for line in self.lines if line.dialled[:1] == b"d" and not line.closed]

    @property
    def watched(self) -> list[int]:
        return [watch.pid for watch in self.watches if not watch.closed]


Told = tuple[Any, ...]


class Decode(Worker):
    """Writes down what it is told. It has no engine: nothing here computes."""

    told: list[Told]

    def handle(self, source: Connection, key: Key | None, body: m.Body) -> None:
        self.told.append(("handle", source, body))

    def lost(self, source: Connection, why: str = "is gone") -> None:
        self.told.append(("lost", source, why))

    @property
    def serving(self) -> bool:
        return self.busy

    busy = False


class Prefill(PrefillWorker):
    """The same, and it dials. `up`: the connections that it says are paired; `holding`: those that have tickets."""

    told: list[Told]
    up_now: set[Connection]
    holding: set[Connection]

    def handle(self, source: Connection, key: Key | None, body: m.Body) -> None:
        self.told.append(("handle", source, body))

    def lost(self, source: Connection, why: str = "is gone") -> None:
        self.told.append(("lost", source, why))
        self.up_now.discard(source)

    def gone(self, source: Connection) -> None:
        self.told.append(("gone", source))
        self.up_now.discard(source)

    def dialled(self, connection: Connection, worker: str, incarnation: bytes, asked_by: Connection) -> None:
        self.told.append(("dialled", connection, asked_by))
        self.send(connection, None, m.Hello(self.info.worker, self.info))

    def paired_with(self, connection: Connection) -> bool:
        return connection in self.up_now

    def holds_for(self, connection: Connection) -> bool:
        return connection in self.holding

    def tell_paired(self, connection: Connection, asked_by: Connection) -> None:
        self.told.append(("tell_paired", connection, asked_by))


class World:
    """One worker's sessions."""

    def __init__(
        self, role: str = "decode", gateways: tuple[str, ...] = (), impossible: tuple[str, ...] = ()
    ) -> None:
        self.now, self.wire, self.info = 1000.0, Wire(), info(f"{role}-0", role)
        self.wire.impossible |= set(impossible)
        self.told: list[Told] = []

        def make(send: Send) -> Worker:
            parts = Parts(self.info, None, None, lambda: self.now)  # type: ignore[arg-type]
            made: Any = Prefill(parts, send, None) if role == "prefill" else Decode(parts, send)  # type: ignore[arg-type]
            made.told = self.told
            if role == "prefill":
                made.up_now, made.holding = set(), set()
            return made  # type: ignore[no-any-return]

        self.sessions = Sessions(make, self.wire, lambda: self.now, gateways, SILENT_SECONDS)
        self.worker: Any = self.sessions.worker

    def passes(self, seconds: float, step: float = 0.25) -> None:
        """Time, as the loop of a process sees it."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + step)
            self.sessions.keep(self.now)

    def heard(self) -> list[Told]:
        """What the worker was told since the last look."""
        told = list(self.told)
        self.told.clear()
        return told

    def gates(self) -> list[Line]:
        """The lines to the gateways' control ports."""
        return [line for line in self.wire.lines if line.dialled[:1] == b"g"]

    def gateway_says(self, line: Line, body: m.Body) -> None:
        self.sessions.take(line.dialled, m.datagram(b"g" * 8, body))


class Peer:
    """Somebody who dialled the worker, under the name `connection`."""

    def __init__(
        self, world: World, name: bytes = b"rpeer", session: int = 1, incarnation: bytes = b"p" * 8
    ) -> None:
        self.world, self.name, self.line = world, name, Line()
        self.link = Link(incarnation, session, world.now)

    def say(self, body: m.Body, key: Key | None = None) -> None:
        self.raw(self.link.wrap(key, body, self.world.now))

    def raw(self, raw: bytes) -> None:
        self.world.sessions.take(self.name, raw, self.line)

    def hello(self, worker: m.WorkerInfo | None = None) -> Peer:
        self.say(m.Hello("gateway" if worker is None else worker.worker, worker))
        return self

    def beat(self) -> None:
        self.raw(m.datagram(self.link.incarnation, m.Beat(), self.link.session))


def ours(body: m.Body, session: int, sequence: int, incarnation: bytes) -> bytes:
    """A message as the other end of a line that the worker opened would send it."""
    return m.encode(m.Envelope(PROTOCOL, incarnation, session, sequence, 0, None, body))
