"""What the engine knows of a request while it holds it, and what it says about it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from hermetic.engine.prefix import Leading
from hermetic.handoff.messages import Key
from hermetic.kv.lineage import Chain
from hermetic.kv.pool import I32, Lease
from hermetic.model.params import SamplingParams


class Phase(enum.Enum):
    WAITING = enum.auto()  # holds nothing
    RESERVED = enum.auto()  # decode: pages are leased for landing
    PREFILLING = enum.auto()  # pages are leased; the prompt is being computed
    RUNNING = enum.auto()  # in the decode batch
    GONE = enum.auto()


@dataclass(frozen=True)
class Job:
    """One attempt of one request, as submitted. tokens int64 [t]; the first `prompt` are the client's."""

    key: Key
    tokens: npt.NDArray[np.int64]
    prompt: int
    params: SamplingParams
    n: int
    choice: int
    seed: int
    root: bytes  # lineage(-1) of its scope
    age: int


@dataclass(eq=False)
class Sequence:
    """One choice of one job. `tokens` grows; rows 0..computed-1 of it are in pages."""

    job: Job
    choice: int
    tokens: list[int]
    chain: Chain
    phase: Phase = Phase.WAITING
    computed: int = 0
    passed: int = 0  # younger requests that were admitted while this one waited
    pages: I32 = field(default_factory=lambda: np.empty(0, np.int32))
    full: Lease | None = None  # READ: pages that no row will be added to
    growing: Lease | None = None  # APPEND (RECEIVE while landing): the rest
    row: int | None = None
    leading: Leading | None = None  # while it waits: names of the prompt's full pages, for the prefix index

    @property
    def outputs(self) -> int:
        return len(self.tokens) - self.job.prompt

    def __repr__(self) -> str:
        return f"Sequence({self.job.key}#{self.choice} {self.phase.name} {self.computed}/{len(self.tokens)})"


class First(msgspec.Struct, frozen=True, array_like=True):
    """The first token of one choice, sampled by whoever computed the prompt. Travels with *complete*."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] | None


# -------------------------------------------------------------------- events
@dataclass(frozen=True)
class Reserved:
    """Decode: the pages of the prompt and of the first output are leased."""

    key: Key


@dataclass(frozen=True)
class Started:
    """The job's pages are taken and its prompt is being computed."""

    key: Key


@dataclass(frozen=True)
class PagesReady:
    """Prefill: pages 0..count-1 of the prompt are final and clean: computed here, or shared with who computed them."""

    key: Key
    count: int


@dataclass(frozen=True)
class PromptDone:
    """Prefill: the whole prompt is computed."""

    key: Key
    firsts: tuple[First, ...]


@dataclass(frozen=True)
class Emit:
    """An output token, from a step whose verification was clean."""

    key: Key
    choice: int
    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] | None


@dataclass(frozen=True)
class Done:
    """A choice ended by itself: reason "stop" or "length"."""

    key: Key
    choice: int
    reason: str
    stop_token: int | None


@dataclass(frozen=True)
class Preempted:
    """A choice gave back its pages so that older ones can go on; run it again from everything it has emitted."""

    key: Key
    choice: int


@dataclass(frozen=True)
class JobDone:
    """No choice of this job is left in this engine, and none failed."""

    key: Key


@dataclass(frozen=True)
class JobFailed:
    """The job ended by a fault; everything it held is released."""

    key: Key
    code: str
    reason: str


Event = Reserved | Started | PagesReady | PromptDone | Emit | Done | Preempted | JobDone | JobFailed
