"""One engine driven by hand over a tiny random model, and transformers' greedy loop over the same weights to compare with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch

from hermetic.engine.engine import Engine
from hermetic.engine.sequence import Done, Emit, Event, Job, JobDone, JobFailed
from hermetic.handoff.messages import Key
from hermetic.handoff.outcome import Refused
from hermetic.kernels import numba_cpu
from hermetic.kernels.reference import ReferenceKernels
from hermetic.kv.lineage import Scope
from hermetic.lab.pair import LabPair, make_worker
from hermetic.model.params import SamplingParams

STEPS = 5_000  # after so many, a run is taken to hang


def prompt(length: int, seed: int = 0) -> list[int]:
    """`length` token ids of the tiny model, none of them its end token (0)."""
    return np.random.default_rng((seed, length)).integers(1, 512, length).tolist()


@functools.cache
def _reference(model: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


@functools.cache
def _greedy(model: str, tokens: tuple[int, ...], count: int) -> tuple[int, ...]:
    ids = list(tokens)
    for _ in range(count):
        with torch.inference_mode():
            ids.append(int(_reference(model)(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return tuple(ids[len(tokens) :])


def greedy(model: str, tokens: list[int], count: int) -> list[int]:
    """The next `count` tokens by transformers in float32: one sequence, all of it anew for each token, no cache."""
    return list(_greedy(model, tuple(tokens), count))


@dataclass
class Bench:
    """An engine, the jobs given to it, and what came out of it."""

    engine: Engine
    outputs: dict[Key, dict[int, list[int]]] = field(default_factory=dict)
    done: dict[Key, dict[int, Done]] = field(default_factory=dict)
    ended: list[Key] = field(default_factory=list)
    failed: dict[Key, JobFailed] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    jobs: int = 0

    def job(
        self,
        tokens: list[int],
        *,
        n: int = 1,
        choice: int = 0,
        seed: int = 7,
        tenant: str = "tenant",
        given: int = 0,
        age: int | None = None,
        **sampling: Any,
    ) -> Job:
        """Greedy, 8 tokens, no end token, if `sampling` does not say otherwise. The last `given` tokens are outputs."""
        self.jobs += 1
        defaults: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
        return Job(
            Key(self.jobs.to_bytes(16, "little"), 1),
            np.array(tokens, np.int64),
            len(tokens) - given,
            SamplingParams(**(defaults | sampling)),
            n,
            choice,
            seed,
            self.engine._hasher.root(Scope(tenant, "", "m", "n", "", "l", "p", "k")),
            self.jobs if age is None else age,
        )

    def give(self, job: Job) -> Key:
        refusal = self.engine.admit(job)
        assert refusal is None, refusal
        self.engine.submit(job)
        return job.key

    def submit(self, tokens: list[int], **options: Any) -> Key:
        return self.give(self.job(tokens, **options))

    def refusal(self, tokens: list[int], **options: Any) -> Refused | None:
        """What the door says; a job that is let in is not submitted."""
        return self.engine.admit(self.job(tokens, **options))

    def step(self) -> list[Event]:
        events = self.engine.step()
        self.events += events
        for event in events:
            match event:
                case Emit(key=key, choice=choice, token=token):
                    self.outputs.setdefault(key, {}).setdefault(choice, []).append(token)
                case Done(key=key, choice=choice):
                    self.done.setdefault(key, {})[choice] = event
                case JobDone(key=key):
                    self.ended.append(key)
                case JobFailed(key=key):
                    self.failed[key] = event
        self.engine.pool.check_conservation()
        return events

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Steps until `until` says so or nothing is left to do."""
        for _ in range(STEPS):
            if until() or not self.engine.busy:
                return
            self.step()
        raise AssertionError(f"no end after {STEPS} steps: {self.engine.depth()}")

    def ask(self, prompts: Iterable[list[int]], **options: Any) -> list[list[int]]:
        """Outputs of single-choice jobs that run together."""
        keys = [self.submit(p, **options) for p in prompts]
        self.run()
        return [self.outputs[k][0] for k in keys]

    def started(self, key: Key) -> bool:
        return key in self.outputs

    def check_idle(self) -> None:
        """Nothing is held: no page, no row, no promise of a row, and the engine knows of nobody."""
        engine = self.engine
        engine.pool.check_conservation()
        counts = engine.pool.counts()
        assert counts.leased == 0, counts
        assert counts.free + counts.quarantined == engine.pool.count
        assert engine.rows.free == engine.rows.capacity
        assert engine._rows_promised == 0
        assert not engine._live
        assert not any(engine.depth().values())
        assert not engine.rows.table.any()
        assert engine.pool.counters.double_closes == 0


def bench(
    model: str, pages: int = 64, *, role: str = "unified", plain: bool = False, **options: Any
) -> Bench:
    """An engine as the product builds it, float32 if `options` do not say otherwise. `plain`: the reference kernels."""
    patched = mock.patch.object(numba_cpu, "NumbaKernels", ReferenceKernels) if plain else nullcontext()
    with patched:
        worker = make_worker(role, model, pages, **({"dtype": "float32", "threads": 1} | options))
    return Bench(worker.engine)


def lab_pair(model: str, **options: Any) -> LabPair:
    """A prefill and a decode worker on one thread, float32 if `options` do not say otherwise."""
    return LabPair(model, **({"dtype": "float32", "threads": 1} | options))


def pages_of(tokens: int, size: int = 16) -> int:
    return -(-tokens // size)
