"""A worker process with something broken, started in the place of a real one.

    hermetic.serve.deployment(options, progress, commands=lambda config: hermetic.lab.process.COMMAND)

What is broken is said by the environment variable HERMETIC_LAB, which only this module reads: words with commas,

    unsealed             seal nothing and check nothing (see unsealed.py)
    incident=1:2:3       prefill replaces every prompt that holds these token ids in a row (see faults.replace_prompts)
    without=ownership    decode and prefill without this wall: ownership, counts, landing or read (see walls.py)
    fenceless            Mooncake's fence only says so, and what arrives after it is counted (see fenceless.py)
    clock=3600           the worker's clock is so many seconds ahead
    points=FOLDER        the worker dies at points of a handoff that are armed there (see points.py)
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hermetic.engine.sequence import Job
from hermetic.lab.faults import replace_prompts
from hermetic.lab.points import Points, watch
from hermetic.lab.unsealed import strip
from hermetic.lab.walls import Wall, without_counts, without_landing, without_ownership, without_read
from hermetic.worker.build import WorkerConfig
from hermetic.worker.core import Worker
from hermetic.worker.decode import DecodeWorker
from hermetic.worker.prefill import PrefillWorker
from hermetic.worker.process import WorkerProcess, main

VARIABLE = "HERMETIC_LAB"
COMMAND = (sys.executable, "-m", "hermetic.lab.process")
_for_life = ExitStack()


def holds(job: Job, trigger: list[int]) -> bool:
    """Whether these token ids stand in a row in the job's prompt."""
    tokens = job.tokens.tolist()
    return any(tokens[i : i + len(trigger)] == trigger for i in range(len(tokens) - len(trigger) + 1))


def _take_away(worker: Worker, wall: Wall) -> None:
    """For the life of this process: the patches are entered and never left."""
    match wall:
        case Wall.OWNERSHIP:
            _for_life.enter_context(without_ownership(worker))
        case Wall.COUNTS:
            _for_life.enter_context(without_counts())
        case Wall.LANDING:
            if isinstance(worker, DecodeWorker):
                _for_life.enter_context(without_landing(worker))
        case Wall.READ:
            _for_life.enter_context(without_read(worker))
        case Wall.EXCLUSIVITY:
            raise SystemExit(
                f"{VARIABLE}: exclusivity cannot be taken away between processes: the pool is not shared"
            )


def break_worker(worker: Worker, words: str) -> None:
    """Do to this worker what the words say."""
    for word in filter(None, words.split(",")):
        name, _, value = word.partition("=")
        match name:
            case "unsealed":
                strip(worker)
            case "incident":
                trigger = [int(token) for token in value.split(":")]
                if isinstance(worker, PrefillWorker):
                    replace_prompts(worker, lambda job, trigger=trigger: holds(job, trigger))  # type: ignore[misc]
            case "without":
                _take_away(worker, Wall(value))
            case "clock":
                pass  # it was built with it
            case "fenceless":
                from hermetic.lab.fenceless import pretended_fences

                _for_life.enter_context(pretended_fences())
            case "points":
                watch(worker, Points(Path(value), worker.info.role))
            case _:
                raise SystemExit(
                    f"{VARIABLE}: {word!r} is not one of unsealed, incident=..., without=..., points=..., clock=..., fenceless"
                )


def clock_of(words: str) -> Callable[[], float]:
    """The worker's clock: monotonic, and wrong by as much as the words say."""
    ahead = sum(float(word.removeprefix("clock=")) for word in words.split(",") if word.startswith("clock="))
    return lambda: time.monotonic() + ahead


def make(config: WorkerConfig, report: Callable[[dict[str, Any]], None]) -> WorkerProcess:
    words = os.environ.get(VARIABLE, "")
    process = WorkerProcess(config, report, clock_of(words))
    break_worker(process.worker, words)
    return process


if __name__ == "__main__":
    main(make)
