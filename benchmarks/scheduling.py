"""What the engine itself costs in a step: 64 running sequences, time of a step minus time in the model.

    python benchmarks/scheduling.py [--model smollm2] [--running 64] [--steps 40]

The one thing to know: `runner.run` is timed inside `step`, and `forward` inside `runner.run`; what is left outside
`forward` is scheduling, tag checks, page tables, chains, sampling and events. Medians, since machines are shared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hermetic.engine import batch
from hermetic.engine import engine as engine_module
from hermetic.engine.sequence import Job
from hermetic.handoff.messages import Key
from hermetic.kv.lineage import Scope
from hermetic.lab.pair import make_worker
from hermetic.model.params import SamplingParams


class Stopwatch:
    """Adds up the time inside one function; `take` returns the sum since the last call, in milliseconds."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._spent = function, 0.0

    def __call__(self, *args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._function(*args, **options)
        finally:
            self._spent += time.perf_counter() - start

    def take(self) -> float:
        spent, self._spent = self._spent * 1e3, 0.0
        return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompt", type=int, default=100)
    options = parser.parse_args()
    pages = options.running * (-(-(options.prompt + options.steps + 20) // 16) + 1)
    engine = make_worker("unified", options.model, pages, max_batch=options.running).engine
    rng = np.random.default_rng(0)
    root = engine._hasher.root(Scope("t", "", "m", "n", "", "l", "p", "k"))
    for i in range(options.running):
        tokens = rng.integers(1, engine.runner.model.config.vocab, options.prompt)
        params = SamplingParams(max_tokens=options.steps + 15, temperature=0.0, ignore_eos=True)
        engine.submit(Job(Key(i.to_bytes(16, "little"), 1), tokens, len(tokens), params, 1, 0, 7, root, i))
    while engine.depth()["running"] < options.running:
        engine.step()

    forward = Stopwatch(engine.runner.model.forward)
    run = Stopwatch(engine.runner.run)
    parts = {
        "admit": Stopwatch(engine._admit_waiting),
        "make room": Stopwatch(engine._make_room),
        "tag check": Stopwatch(engine._check_tags),
        "build": Stopwatch(batch.build),
        "commit": Stopwatch(engine._commit),
        "sample": Stopwatch(engine_module.sample),
        "advance": Stopwatch(engine._advance),
    }
    engine.runner.model = _Model(engine.runner.model, forward)  # type: ignore[assignment]
    engine.runner.run = run  # type: ignore[method-assign]
    engine._admit_waiting, engine._make_room = parts["admit"], parts["make room"]  # type: ignore[method-assign]
    engine._check_tags, engine._commit = parts["tag check"], parts["commit"]  # type: ignore[method-assign]
    engine._advance = parts["advance"]  # type: ignore[method-assign]
    engine_module.build, engine_module.sample = parts["build"], parts["sample"]  # type: ignore[assignment]

    watches = {"step": Stopwatch(engine.step), "run": run, "forward": forward, **parts}
    taken: dict[str, list[float]] = {name: [] for name in watches}
    for _ in range(options.steps):
        watches["step"]()
        for name, watch in watches.items():
            taken[name].append(watch.take())
    outside = [a - b for a, b in zip(taken["step"], taken["forward"], strict=True)]
    own = [a - b for a, b in zip(outside, taken["sample"], strict=True)]
    print(f"{options.running} running, {options.steps} steps, {options.model}: milliseconds a step, median")
    for name, values in (*taken.items(), ("step - model", outside), ("step - model - sampling", own)):
        print(f"  {name:24s} {statistics.median(values):8.3f}   (least {min(values):.3f})")


class _Model:
    """The model with a stopwatch around `forward`."""

    def __init__(self, model: Any, forward: Stopwatch) -> None:
        self.config, self.forward = model.config, forward


if __name__ == "__main__":
    main()
