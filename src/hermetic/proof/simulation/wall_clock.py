"""The same deployment with the real Mooncake transport underneath, in real time and in this one process.

Gateway, sessions, workers and network faults are the simulator's; pages travel over TCP through Mooncake's own threads. What
cannot be done to a real transport (bytes that arrive in halves, batches in doubt by decree) is left out; freezes stop a
worker's rounds while its transport goes on, which is when late writes come.

The one thing to know: real time is not repeatable. A run's plan follows from its seed, what comes of it does not quite.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from hermetic.proof.simulation.deployment import Deployment
from hermetic.proof.simulation.options import Rates, SimulationError
from hermetic.proof.simulation.plan import DRAIN, Asked, Plan, make
from hermetic.proof.simulation.process import Process
from hermetic.proof.simulation.world import Result, play
from hermetic.transport.base import Receiver, Sender, Transport, TransportError
from hermetic.transport.mooncake import MooncakeTransport

HOST = "127.0.0.1"
LEFT_OUT = ("write_fails", "write_doubt", "cut_data", "damage_slot", "leave", "crash", "gateway")


class _Here:
    """Mooncake for one simulated process. Its peers are known by address only, which here is everybody's."""

    name = "mooncake"

    def __init__(self) -> None:
        self._real = MooncakeTransport(HOST, write_timeout_s=DRAIN / 2)

    def receiver(
        self, slots: int, stride: int, peer_pid: int | None, peer_host: str | None = None
    ) -> Receiver:
        return self._real.receiver(slots, stride, None, HOST)

    def sender(self, descriptor: str, stride: int) -> Sender:
        return self._real.sender(descriptor, stride)

    def close(self) -> None:
        self._real.close()


class RealDeployment(Deployment):
    """Processes wake often enough to see that a write has ended: nothing of a real transport calls them."""

    def __init__(self, plan: Plan, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(plan, loop)
        self.opened: list[_Here] = []

    def open_transport(self, process: Process) -> Transport:
        made = _Here()
        self.opened.append(made)
        self._look(process)
        return made

    def _look(self, process: Process) -> None:
        if process.alive:
            self.loop.call_later(0.001, self._look, process)
            if process.ready and process.worker.waiting:
                process.wake()

    def close(self) -> None:
        for one in self.opened:
            one.close()


def run_real(seed: int, asked: Asked) -> Result:
    """One run in real time. Raises SimulationError when Mooncake cannot be used here."""
    quiet = dict.fromkeys(LEFT_OUT, 0.0)
    plan = make(seed, replace(asked, rates=Rates(**{**vars(asked.rates), **quiet})))
    # Mooncake can fence; pages of a byte a second would only be waited for.
    plan = replace(plan, shape=replace(plan.shape, fenceable=True, one_host=True))
    loop = asyncio.new_event_loop()
    deployment = RealDeployment(plan, loop)
    try:
        return play(deployment)
    except TransportError as error:
        raise SimulationError(str(error)) from error
    finally:
        deployment.close()


__all__ = ["LEFT_OUT", "RealDeployment", "run_real"]
