"""One worker process of a simulated deployment: the product's sessions and worker around the fake model, on virtual time.

It runs in rounds, as `worker/process.py` does: read what has come, tick, keep sessions. The one thing to know: a frozen one
reads nothing and its clock goes on, as after SIGSTOP; a dead one never comes back, another process takes its name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from hermetic.engine.batch import Rows
from hermetic.engine.engine import Engine, Role
from hermetic.handoff.messages import Key
from hermetic.kv.lineage import Hasher, Secret
from hermetic.kv.pool import Pool
from hermetic.kv.seals import SealKey
from hermetic.kv.slots import SlotUse
from hermetic.proof.simulation.checks import Checks
from hermetic.proof.simulation.model import EOS, GEOMETRY, PAGE_SIZE, VOCAB, FakeRunner
from hermetic.proof.simulation.network import DialledLine, Network, name_at
from hermetic.proof.simulation.plan import DRAIN, MISFIT, SILENT, WINDOW, Shape
from hermetic.transport.base import Transport
from hermetic.worker.core import Connection, Parts, Send, Worker
from hermetic.worker.decode import DecodeWorker
from hermetic.worker.lines import Line
from hermetic.worker.messages import WorkerInfo
from hermetic.worker.prefill import PrefillWorker
from hermetic.worker.sessions import Sessions

SECRET = Secret(bytes(range(1, 33)))
SEALS = SealKey(SECRET, GEOMETRY)
HASHER = Hasher(SECRET)
IDLE = 0.05  # seconds between two rounds of a process to which nothing comes
STEP = (0.002, 0.006)  # seconds that a round with work takes
EVERY = 4  # rounds with work between two checks of conservation


@dataclass(frozen=True)
class Place:
    """What a process is told at its start. `pid` is never used twice in a run."""

    name: str
    pid: int
    host: str
    address: str
    gateway: str
    skew: float
    rate: float


class Watched:
    """A process of the same host, seen from another."""

    def __init__(self, ended: Callable[[], bool]) -> None:
        self.ended = ended

    def close(self) -> None:
        """Nothing is held."""


class Process:
    """`open_transport` is given this process. `alive_pid`: whether a pid runs."""

    def __init__(
        self,
        place: Place,
        shape: Shape,
        incarnation: bytes,
        net: Network,
        checks: Checks,
        loop: asyncio.AbstractEventLoop,
        rng: Random,
        open_transport: Callable[[Process], Transport],
        alive_pid: Callable[[int], bool],
    ) -> None:
        self.name, self.place, self.label = place.name, place, f"{place.name}#{place.pid}"
        self.alive, self.frozen, self.slowness = True, False, 1.0
        self.ready = False  # its sessions exist
        self.writes: list[tuple[Key, tuple[SlotUse, ...]]] = []  # asked for by a machine, not begun yet
        self.damaged: set[int] = set()
        self.tenants: dict[int, str] = {}  # for whom each page was taken
        self._shape, self._incarnation, self._net, self._checks = shape, incarnation, net, checks
        self._loop, self._rng, self._alive_pid = loop, rng, alive_pid
        self._inbox: list[tuple[Connection, bytes, Line | None]] = []
        self._free_at = loop.time()  # its round under way ends then
        self._soon = False
        self._worked = 0
        self._transport = open_transport(self)
        role = Role.PREFILL if place.name.startswith("prefill") else Role.DECODE
        self.pool = Pool(GEOMETRY, shape.prefill_pages if role is Role.PREFILL else shape.decode_pages)
        self.base = self.pool.memory.ctypes.data
        self.sessions = Sessions(
            lambda send: self._make(role, send), self, self.clock, (place.gateway,), SILENT
        )
        self.ready = True
        net.ends[place.address] = self
        self._idle()

    def clock(self) -> float:
        """This process's own monotonic seconds."""
        return self.place.skew + self.place.rate * self._loop.time()

    @property
    def worker(self) -> Worker:
        return self.sessions.worker

    def _make(self, role: Role, send: Send) -> Worker:
        shape, pool = self._shape, self.pool
        context = min(WINDOW, pool.count * PAGE_SIZE)
        rows = Rows(shape.batch, GEOMETRY.pages_for(context))
        runner = FakeRunner(SEALS, pool, rows, shape.verify == "read", self._checks.reads)
        held = shape.boast if shape.boast and role is Role.PREFILL else context
        engine = Engine(runner, HASHER, SEALS, role, held, EOS, shape.chunk)  # type: ignore[arg-type]
        info = WorkerInfo(
            worker=self.name, role=role.value, incarnation=self._incarnation, pid=self.place.pid,
            host=self.place.host, address=self.place.address, source=self.label, transport="simulated",
            slots=shape.slots if role is Role.DECODE else 0, model="simulated", numeric="none", position="other" if self.name == MISFIT else "none",
            geometry=GEOMETRY, key_id=SECRET.key_id, pages=pool.count, page_size=PAGE_SIZE, max_tokens=context,
            window=WINDOW, vocab=VOCAB, max_batch=shape.batch, verify=shape.verify, eos=EOS,
        )  # fmt: skip
        parts = Parts(info, engine, HASHER, self.clock)
        if role is Role.PREFILL:
            return PrefillWorker(parts, send, self._transport)
        return DecodeWorker(parts, send, self._transport, shape.verify != "tags", shape.slots, DRAIN)

    # ------------------------------------------------------------------------- wire

    def dial(self, address: str, connection: Connection, backlog: int | None = None) -> DialledLine:
        def take(raw: bytes) -> None:
            self._inbox.append((connection, raw, None))
            self.wake()

        return DialledLine(self._net, self, address, name_at(address), self._net.new_name(), take)

    def watch(self, pid: int) -> Watched:
        if not self._alive_pid(pid):
            raise ProcessLookupError(f"no process {pid}")
        return Watched(lambda: not self._alive_pid(pid))

    def arrive(self, connection: Connection, raw: bytes, answer: Line | None) -> None:
        self._inbox.append((connection, raw, answer))
        self.wake()

    # ----------------------------------------------------------------------- rounds

    def wake(self) -> None:
        """Something has come: a round as soon as the present one is over."""
        if not self._soon and self.alive and not self.frozen:
            self._soon = True
            self._loop.call_at(max(self._free_at, self._loop.time()), self._round)

    def _idle(self) -> None:
        if self.alive:
            self.wake()
            self._loop.call_later(IDLE, self._idle)

    def _round(self) -> None:
        self._soon = False
        if not self.alive or self.frozen or self._checks.finding is not None:
            return
        checks, sessions = self._checks, self.sessions
        checks.current = self
        came, self._inbox = self._inbox, []
        for connection, raw, answer in came:
            sessions.take(connection, raw, answer)
        worked = sessions.worker.tick()
        sessions.keep(self.clock())
        if worked:
            self._worked += 1
            if self._worked % EVERY == 0:
                checks.conserved(self)
            self._free_at = self._loop.time() + self._rng.uniform(*STEP) * self.slowness
            self.wake()
        checks.current = None

    # ----------------------------------------------------------------------- faults

    def freeze(self) -> None:
        self.frozen = True

    def resume(self) -> None:
        self.frozen = False
        self.wake()

    def die(self) -> None:
        """SIGKILL, or the end of a process that has left."""
        self.alive = False
        self._inbox.clear()
        if self._net.ends.get(self.place.address) is self:
            del self._net.ends[self.place.address]


__all__ = ["EVERY", "HASHER", "IDLE", "SEALS", "SECRET", "Place", "Process", "Watched"]
