"""The machine room of a simulated deployment: processes, gateway, network, transport. Everything that a fault is done to.

The one thing to know: names stay, processes do not. A worker that was killed and is back is another `Process`, with another
pid and incarnation, at the same address.
"""

from __future__ import annotations

import asyncio

from hermetic.gateway.cluster import Cluster
from hermetic.gateway.options import ClusterOptions
from hermetic.proof.simulation.checks import Checks
from hermetic.proof.simulation.events import Events
from hermetic.proof.simulation.network import GatewayEnd, Network
from hermetic.proof.simulation.plan import MISFIT, SILENT, Plan, dice
from hermetic.proof.simulation.process import Place, Process
from hermetic.proof.simulation.transport import SimTransport, Wires
from hermetic.transport.base import Transport
from hermetic.worker.wire import CurveKeys

GATE = "tcp://gateway:1"
NO_KEYS = CurveKeys(b"", b"", b"", b"")
DEADLINE = 600.0  # seconds of a request, far beyond what the simulator waits for


class Deployment:
    """`processes` that live, by name, are in `checks`."""

    def __init__(self, plan: Plan, loop: asyncio.AbstractEventLoop) -> None:
        self.plan, self.loop = plan, loop
        shape, seed = plan.shape, plan.seed
        self.events = Events(loop.time)
        self.net = Network(seed, plan.rates, self.events, loop)
        self.wires = Wires(seed, shape, plan.rates, self.events, loop, self._label_lives)
        self.checks = Checks(self.events, self.wires, loop.time)
        self.net.trouble = self.checks.trouble
        self._entropy = dice(seed, "entropy")
        self._pids = 100
        self.cluster: Cluster | None = None
        self.gate: GatewayEnd | None = None
        self.began = loop.time()
        self.landed = 0  # pages, at processes that have died

    # ------------------------------------------------------------------- processes

    def start(self, name: str) -> Process:
        """A new process of this name."""
        self._pids += 1
        workers = (*self.plan.shape.workers, MISFIT)
        index = workers.index(name)
        host = "one" if self.plan.shape.one_host else name
        place = Place(name, self._pids, host, f"tcp://{name}:{index + 1}", GATE, *self.plan.shape.skew[index])
        process = Process(
            place,
            self.plan.shape,
            self._entropy.randbytes(8),
            self.net,
            self.checks,
            self.loop,
            dice(self.plan.seed, "rounds", name, self._pids),
            self.open_transport,
            self._pid_lives,
        )
        self.checks.processes[name] = process
        return process

    def open_transport(self, process: Process) -> Transport:
        return SimTransport(self.wires, process)

    def end(self, process: Process, why: str) -> None:
        """It ends now, whatever it was doing."""
        process.die()
        self.landed += int(process.worker.stats().get("pages_landed", 0))
        self.checks.trouble(process.name)
        self.wires.abandon(process)
        self.events.noted(process.name, why)
        if self.plan.shape.one_host:  # its supervisor sees it
            self.loop.call_later(0.1, self._tell_gateway, process)

    def _tell_gateway(self, process: Process) -> None:
        if self.cluster is not None:
            self.cluster.lost(process.name, process.worker.info.incarnation)

    def _pid_lives(self, pid: int) -> bool:
        return any(p.alive and p.place.pid == pid for p in self.checks.processes.values())

    def _label_lives(self, label: str) -> bool:
        return any(p.alive and p.label == label for p in self.checks.processes.values())

    @property
    def pages_landed(self) -> int:
        live = [process for process in self.checks.processes.values() if process.alive]
        return self.landed + sum(int(p.worker.stats().get("pages_landed", 0)) for p in live)

    # --------------------------------------------------------------------- gateway

    async def open_gateway(self) -> None:
        self.gate = GatewayEnd(self.net, GATE)
        options = ClusterOptions(
            silent_seconds=SILENT,
            on_disconnect=self.plan.shape.on_disconnect,
            trip_failures=0,
            deadline=DEADLINE,
        )
        self.cluster = Cluster(
            "simulated", NO_KEYS, options, self.gate, self.loop.time, self._entropy.randbytes
        )
        await self.cluster.listen("gateway", 1)

    async def kill_gateway(self) -> Cluster:
        """As by SIGKILL: it says goodbye to nobody. Returns what it was."""
        assert self.cluster is not None
        assert self.gate is not None
        cluster, self.cluster = self.cluster, None
        self.gate.die()
        self.checks.trouble("gateway")
        for run in list(cluster.runs._runs.values()):
            cluster.runs._settle(run)  # its timers end with it
        await cluster.members.close()
        return cluster

    # ---------------------------------------------------------------------- looking

    def open_keys(self) -> list[str]:
        """The attempts that a worker has not done with."""
        workers = [process.worker for process in self.checks.processes.values() if process.alive]
        return list(dict.fromkeys(str(key) for worker in workers for key in getattr(worker, "_records", ())))

    def left(self) -> list[str]:
        """What is open or held, one a line."""
        found = []
        for name, process in self.checks.processes.items():
            if not process.alive:
                continue
            stats = process.worker.stats()
            for figure in (
                "pages_leased",
                "handoffs_open",
                "releases_deferred",
                "writes_in_flight",
                "peers_silent",
            ):
                if stats.get(figure):
                    found.append(f"{name}: {figure} {stats[figure]:g}")
            if stats.get("slots_free", 0) != stats.get("slots_total", 0):
                found.append(f"{name}: {stats['slots_free']:g} of {stats['slots_total']:g} slots are free")
            if stats["sequences_waiting"] + stats["sequences_running"] + stats["sequences_prefilling"]:
                found.append(f"{name}: the engine has work")
        if self.cluster is not None:
            counts = self.cluster.runs.counts()
            if counts["attempts_open"]:
                found.append(f"gateway: {counts['attempts_open']:g} attempts are open")
        return found


__all__ = ["GATE", "Deployment"]
