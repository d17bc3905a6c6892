"""The faults of a plan, done to a deployment.

The one thing to know: a fault that finds nothing to act on (its worker is down already) does nothing and is not counted.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from hermetic.proof.simulation.clients import Client
from hermetic.proof.simulation.model import GEOMETRY
from hermetic.proof.simulation.plan import GATEWAY, Fault
from hermetic.proof.simulation.process import Process
from hermetic.proof.simulation.watching import ended
from hermetic.worker.prefill import PrefillWorker

if TYPE_CHECKING:
    from hermetic.proof.simulation.deployment import Deployment

SLOWER = 20.0  # times as long as usual a slow worker's rounds take
LEAVES_WITHIN = 40.0  # seconds after which a worker that wants to leave is taken not to


class Faults:
    """`tasks`: the clients that have asked, by the task that reads for them."""

    def __init__(self, deployment: Deployment, tasks: dict[asyncio.Task[None], Client]) -> None:
        self._deployment, self._tasks = deployment, tasks
        self._going: dict[asyncio.Task[None], None] = {}
        self._did = False

    @property
    def happened(self) -> bool:
        """Whether anything has gone wrong so far that may cost a request its answer."""
        counts = self._deployment.events.counts
        return self._did or bool(counts["write failed"] or counts["write in doubt"] or counts["message lost"])

    def begin(self, fault: Fault) -> None:
        task = asyncio.create_task(self._do(fault))
        self._going[task] = None
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._going.pop(task, None)
        ended(self._deployment.checks, task)

    async def over(self) -> None:
        """Return when every fault that has begun is over."""
        while self._going:
            await asyncio.sleep(0.05)

    async def _do(self, fault: Fault) -> None:
        match fault.kind:
            case "crash" | "freeze" | "slow" | "leave" | "damage_slot" | "damage_page":
                process = self._deployment.checks.processes.get(fault.target)
                if process is not None and process.alive and not process.frozen:
                    await self._to_process(fault, process)
            case "cut":
                self._happens(fault, f"no messages between it and {fault.to}")
                await self._cut(fault)
            case "cut_data":
                self._happens(fault, f"no pages between it and {fault.to}")
                await self._cut_data(fault)
            case "drain" | "disable":
                await self._operate(fault)
            case "gateway":
                await self._gateway(fault)

    async def _to_process(self, fault: Fault, process: Process) -> None:
        match fault.kind:
            case "crash":
                self._happens(fault, f"it is killed, and back in {fault.seconds:.1f} s")
                self._deployment.end(process, "has ended")
                await asyncio.sleep(fault.seconds)
                self._deployment.start(process.name)
            case "freeze":
                await self._freeze(fault, process)
            case "slow":
                self._happens(fault, f"it is {SLOWER:g} times as slow for {fault.seconds:.1f} s")
                process.slowness = SLOWER
                await asyncio.sleep(fault.seconds)
                process.slowness = 1.0
                self._deployment.checks.trouble(process.name)
            case "leave":
                await self._leave(fault, process)
            case "damage_slot":
                self._damage_slot(fault, process)
            case "damage_page":
                self._damage_page(fault, process)

    def _happens(self, fault: Fault, detail: str, keys: tuple[str, ...] = ()) -> None:
        self._did = True
        events, checks = self._deployment.events, self._deployment.checks
        events.counted(fault.kind)
        events.noted("adversary", f"{fault.kind} of {fault.target} (fault {fault.number})", detail, keys)
        checks.trouble(fault.target)

    async def _freeze(self, fault: Fault, process: Process) -> None:
        self._happens(fault, f"stopped for {fault.seconds:.1f} s")
        process.freeze()
        await asyncio.sleep(fault.seconds)
        self._deployment.checks.trouble(process.name)
        if process.alive:
            self._deployment.events.noted(process.name, "goes on")
            process.resume()

    async def _cut(self, fault: Fault) -> None:
        net = self._deployment.net
        net.cut(fault.target, fault.to)
        await asyncio.sleep(fault.seconds)
        net.mend(fault.target, fault.to)
        self._deployment.checks.trouble(fault.target)
        self._deployment.checks.trouble(fault.to)

    async def _cut_data(self, fault: Fault) -> None:
        cuts, pair = self._deployment.wires.cuts, (fault.target, fault.to)
        cuts[pair] += 1
        await asyncio.sleep(fault.seconds)
        cuts[pair] -= 1
        self._deployment.checks.trouble(fault.target)

    async def _leave(self, fault: Fault, process: Process) -> None:
        if not process.sessions.leave():
            return
        self._happens(fault, "it is restarted in peace")
        loop = self._deployment.loop
        begun = loop.time()
        while process.alive and not process.sessions.over:
            if loop.time() - begun > LEAVES_WITHIN:
                self._deployment.checks.found("L1", f"{process.name} was not let go in {LEAVES_WITHIN:g} s")
                return
            await asyncio.sleep(0.05)
        if process.alive:
            self._deployment.end(process, "has left")
            await asyncio.sleep(min(fault.seconds, 1.0))
            self._deployment.start(process.name)

    # ------------------------------------------------------------------- operators

    async def _operate(self, fault: Fault) -> None:
        cluster = self._deployment.cluster
        if cluster is None:
            return
        if fault.kind == "disable":
            self._happens(fault, f"the model is disabled for {fault.seconds:.1f} s")
            cluster.disable("an exercise", "the simulator")
            await asyncio.sleep(fault.seconds)
            cluster.enable("the simulator")
            return
        remote = cluster.members.remotes.get(fault.target)
        if remote is None or remote.ended:
            return
        self._happens(fault, f"drained for {fault.seconds:.1f} s")
        cluster.drain(fault.target)
        await asyncio.sleep(fault.seconds)
        for one in (cluster, self._deployment.cluster):
            found = None if one is None else one.members.remotes.get(fault.target)
            if one is not None and found is not None and not found.ended:
                one.undrain(fault.target)
            elif found is not None:
                found.draining = False  # a worker of this name that comes back is given work

    async def _gateway(self, fault: Fault) -> None:
        if self._deployment.cluster is None:
            return
        self._happens(fault, f"it dies, and another is there in {fault.seconds:.1f} s")
        was = await self._deployment.kill_gateway()
        for task, client in list(self._tasks.items()):
            if client.uses(was) and not task.done():
                client.gateway_died(task)
        await asyncio.sleep(fault.seconds)
        await self._deployment.open_gateway()
        self._deployment.checks.trouble(GATEWAY)

    # ---------------------------------------------------------------------- damage

    def _damage_slot(self, fault: Fault, process: Process) -> None:
        """One bit of the next page that lands, or of the next few: a resend may be hit as well."""
        self._happens(fault, "a bit changes in what lands next")
        count = 1 + (fault.pick >> 8) % 3
        self._deployment.wires.damage[process.name] = [fault.pick >> i for i in range(count)]

    def _damage_page(self, fault: Fault, process: Process) -> None:
        """One bit of a page that is held, where every read is verified."""
        if self._deployment.plan.shape.verify != "read":
            return
        held = np.flatnonzero(process.pool._total)
        if not len(held):
            return
        page = int(held[fault.pick % len(held)])
        keys = tuple(sorted(self._holders(process, page)))
        self._happens(fault, f"a bit of page {page} changes", keys)
        self._flip(process.pool.memory[page], fault.pick)
        process.damaged.add(page)
        self._deployment.checks.touched.update(keys)

    def _holders(self, process: Process, page: int) -> set[str]:
        live = process.worker.engine._live.values()
        found = {str(seq.job.key) for sequences in live for seq in sequences if page in seq.pages.tolist()}
        if isinstance(process.worker, PrefillWorker):
            records = process.worker._records.items()
            found |= {str(key) for key, record in records if page in record.pages.tolist()}
        return found

    def _flip(self, memory: np.ndarray, pick: int) -> None:
        byte = (pick >> 3) % GEOMETRY.page_bytes
        memory[byte] ^= np.uint8(1 << (pick & 7))


__all__ = ["Faults"]
