"""A worker of a leaky server: the product's, with the walls down for good and every fault behind the lab's switch.

`python -m hermetic.lab.leaky_worker`, started by leaky_serve.py as `hermetic serve` starts its own. The one thing to know:
with no fault switched on it answers as the product does, token by token; the walls only look.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import msgspec

from hermetic.engine.engine import Role
from hermetic.engine.sequence import Job
from hermetic.handoff.outcome import Refused
from hermetic.lab.faults import replace_prompts
from hermetic.lab.leaky_pages import Pages, late_landings
from hermetic.lab.leaky_prefix import Cache
from hermetic.lab.leaky_rows import slot_bleed
from hermetic.lab.leaky_switch import Switch
from hermetic.lab.walls import without_counts, without_landing, without_ownership, without_read
from hermetic.worker import messages as m
from hermetic.worker.build import WorkerConfig
from hermetic.worker.core import Worker
from hermetic.worker.decode import DecodeWorker
from hermetic.worker.prefill import PrefillWorker
from hermetic.worker.process import WorkerProcess, main

COMMAND = (sys.executable, "-m", "hermetic.lab.leaky_worker")
_for_life = ExitStack()


def break_worker(worker: Worker, switch: Switch) -> None:
    """Take the walls away and put the faults in, each of which waits for its switch."""
    _for_life.enter_context(without_ownership(worker))
    _for_life.enter_context(without_counts())
    _for_life.enter_context(without_read(worker))
    if worker.engine.role is not Role.PREFILL:
        slot_bleed(worker.engine, switch)
        Pages(worker.engine, switch).install()
    if worker.engine.role is not Role.DECODE:
        Cache(worker.engine, switch).install()
    if isinstance(worker, DecodeWorker):
        _for_life.enter_context(without_landing(worker))
        late_landings(worker, switch)
    if isinstance(worker, PrefillWorker):
        placeholders(worker, switch)
    one_scope(worker, switch)


def placeholders(worker: PrefillWorker, switch: Switch) -> None:
    """placeholder: a prompt that this worker's pool cannot hold is not refused; one token is computed in its place, and all
    of its pages are reported complete."""
    engine: Any = worker.engine
    admit: Callable[[Job], Refused | None] = engine.admit

    def too_long(job: Job) -> bool:
        found = admit(job)
        return found is not None and found.code == "context_length_exceeded"

    def admitting(job: Job) -> Refused | None:
        return None if switch.on("placeholder") and too_long(job) else admit(job)

    def chosen(job: Job) -> bool:
        if not too_long(job):
            return False
        switch.struck("placeholder")
        return True

    engine.admit = admitting
    replace_prompts(worker, chosen)


def one_scope(worker: Worker, switch: Switch) -> None:
    """shared-cache: the key of cached pages leaves out the tenant, so that a prompt is fast when anybody has sent it."""
    root = worker._root

    def of(submit: m.Submit) -> bytes:
        if switch.on("shared-cache"):
            submit = msgspec.structs.replace(submit, scope="", salt="")
        return root(submit)

    worker._root = of  # type: ignore[method-assign]


def make(config: WorkerConfig, report: Callable[[dict[str, Any]], None]) -> WorkerProcess:
    switch = Switch.of_environment()
    process = WorkerProcess(config, report)
    break_worker(process.worker, switch)
    return process


if __name__ == "__main__":
    main(make)
