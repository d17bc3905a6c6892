"""One run: a plan, the deployment that it is about, and what came of it.

The one thing to know: after the plan has happened all faults are turned off, and within a bound every request must have ended
(L1) and nothing be held any more (L2).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from hermetic.proof.saved import Counterexample
from hermetic.proof.simulation.clients import Client
from hermetic.proof.simulation.deployment import Deployment
from hermetic.proof.simulation.faults import Faults
from hermetic.proof.simulation.loop import VirtualLoop
from hermetic.proof.simulation.options import CLASSES, Narrowed, Rates, SimulationError
from hermetic.proof.simulation.plan import MISFIT, Asked, Plan
from hermetic.proof.simulation.watching import ended, observed, quiet_logs, raised

END_WITHIN = 60.0  # seconds after the last fault without a page that lands or a request that ends (L1)
END_ALL_WITHIN = 300.0  # seconds after the last fault within which every request ends
FREE_WITHIN = 90.0  # seconds after the last request within which everything is free again (L2)


@dataclass(frozen=True)
class Result:
    """What came of one run. `counts`: outcomes and faults by kind."""

    seed: int
    requests: int
    attempts: int
    counts: dict[str, int]
    virtual_seconds: float
    events: int
    digest: str
    found: Counterexample | None = None
    pages_sent: int = 0


@dataclass
class _Going:
    """The clients that have asked."""

    clients: list[Client] = field(default_factory=list)
    tasks: dict[asyncio.Task[None], Client] = field(default_factory=dict)


def run(plan: Plan) -> Result:
    """Let it happen. Never raises for what the product does: that is a finding."""
    return play(Deployment(plan, VirtualLoop()))


def play(deployment: Deployment) -> Result:
    """`run`, for a deployment that was made. Closes its loop."""
    loop = deployment.loop
    try:
        with observed() as watch, quiet_logs() as critical:
            watch(deployment.checks)
            critical.append(deployment.checks)
            loop.set_exception_handler(lambda _, context: raised(deployment.checks, context))
            going = _Going()
            loop.run_until_complete(_all(deployment, going))
            result = _result(deployment, going)
            rest = asyncio.all_tasks(loop)
            for task in rest:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*rest, return_exceptions=True))
            return result
    finally:
        loop.close()


async def _all(deployment: Deployment, going: _Going) -> None:
    stopped = asyncio.Event()
    deployment.checks.stop = stopped.set
    story = asyncio.create_task(_story(deployment, going))
    stop = asyncio.create_task(stopped.wait())
    await asyncio.wait((story, stop), return_when=asyncio.FIRST_COMPLETED)
    if story.done() and not story.cancelled() and (error := story.exception()) is not None:
        raise error


async def _story(deployment: Deployment, going: _Going) -> None:
    plan, loop, checks = deployment.plan, deployment.loop, deployment.checks
    deployment.net.faulty = deployment.wires.faulty = False
    await deployment.open_gateway()
    for name in plan.shape.workers:
        deployment.start(name)
    cluster = deployment.cluster
    assert cluster is not None
    await cluster.wait_ready(20.0, len(plan.shape.workers))
    deployment.net.faulty = deployment.wires.faulty = True
    if plan.shape.misfit:
        deployment.start(MISFIT)
    begun = loop.time()
    faults = Faults(deployment, going.tasks)

    def ask(client: Client) -> None:
        task = asyncio.create_task(client.go())
        task.add_done_callback(lambda done: ended(checks, done))
        going.tasks[task] = client

    for one in plan.asks:
        client = Client(
            one,
            plan.shape.boast,
            lambda: deployment.cluster,
            checks,
            deployment.events,
            lambda: faults.happened,
        )
        going.clients.append(client)
        loop.call_at(begun + one.at, ask, client)
    for fault in plan.faults:
        loop.call_at(begun + fault.at, faults.begin, fault)
    await asyncio.sleep(plan.quiet_at)
    deployment.net.faulty = deployment.wires.faulty = False
    await faults.over()
    quiet = still = loop.time()
    moved = -1
    while waits := [client for client in going.clients if not client.outcome]:
        if (now_moved := deployment.pages_landed - len(waits)) != moved:
            moved, still = (
                now_moved,
                loop.time(),
            )  # a deployment of one slot and slow writes has much to do yet
        if loop.time() - still > END_WITHIN or loop.time() - quiet > END_ALL_WITHIN:
            since = loop.time() - quiet
            text = f"request {waits[0].ask.number} has not ended {since:.0f} s after the last fault"
            checks.found("L1", text, *waits[0].keys)
            return
        await asyncio.sleep(0.1)
    quiet = loop.time()
    while left := deployment.left():
        if loop.time() - quiet > FREE_WITHIN:
            text = f"{FREE_WITHIN:g} s after the last request something is still held: " + "; ".join(left)
            checks.found("L2", text, *deployment.open_keys())
            return
        await asyncio.sleep(0.25)
    for process in checks.processes.values():
        checks.conserved(process)
    # It may become a member while all others are away; but no decode worker may ever take pages of it.
    misfit = None if deployment.cluster is None else deployment.cluster.members.remotes.get(MISFIT)
    if misfit is not None and misfit.paired:
        checks.found(
            "I1", f"{MISFIT}, a worker of another model, is paired with {', '.join(sorted(misfit.paired))}"
        )


def _result(deployment: Deployment, going: _Going) -> Result:
    events, checks, plan = deployment.events, deployment.checks, deployment.plan
    found = None
    if checks.finding is not None:
        kind, text, keys = checks.finding
        shown = tuple(deployment.left()[:12])
        steps = events.steps(keys)
        found = Counterexample(
            kind, text, steps, _scope(plan), seed=plan.seed, source="simulator", shows=shown
        )
    return Result(
        plan.seed,
        len(plan.asks),
        sum(len(client.keys) for client in going.clients),
        dict(sorted(events.counts.items())),
        deployment.loop.time() - deployment.began,
        events.count,
        events.digest,
        found,
        deployment.pages_landed,
    )


def _scope(plan: Plan) -> dict[str, int | float | str | bool | list[int | str]]:
    """What a replay needs, and what a reader wants to know of the deployment."""
    asked, shape = plan.asked, plan.shape
    scope: dict[str, int | float | str | bool | list[int | str]] = {
        "requests": asked.requests,
        "prefills": shape.prefills,
        "decodes": shape.decodes,
        "pages": f"{shape.prefill_pages}+{shape.decode_pages}",
        "slots": shape.slots,
        "verify": shape.verify,
        "fenceable": shape.fenceable,
        "one_host": shape.one_host,
    }
    for name in ("only", "faults", "without"):
        chosen = getattr(asked.narrowed, name)
        if chosen:
            scope[name] = [*chosen]
        elif chosen is not None and name != "without":
            scope[name] = "none"
    for name in CLASSES:
        if getattr(asked.rates, name) != getattr(Rates(), name):
            scope[name] = getattr(asked.rates, name)
    return scope


def asked_again(found: Counterexample) -> Asked:
    """What a counterexample of the simulator was made from. Raises SimulationError for one that is not its own."""
    scope = found.scope
    if found.source != "simulator" or found.seed is None or not isinstance(scope.get("requests"), int):
        raise SimulationError(
            "this counterexample was not found by the simulator, or lacks its seed and requests"
        )
    rates = {name: float(scope[name]) for name in CLASSES if name in scope}  # type: ignore[arg-type]
    narrowed = {
        name: None if name not in scope else () if scope[name] == "none" else tuple(scope[name])  # type: ignore[arg-type]
        for name in ("only", "faults")
    }
    without = tuple(scope.get("without", ()))  # type: ignore[arg-type]
    return Asked(
        int(scope["requests"]),  # type: ignore[arg-type]
        Rates(**{**vars(Rates()), **rates}),
        Narrowed(without=without, **narrowed),  # type: ignore[arg-type]
    )


__all__ = ["Result", "asked_again", "play", "run"]
