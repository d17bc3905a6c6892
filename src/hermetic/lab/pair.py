"""A prefill and a decode worker in this process: real engines, kernels and landing slots, messages moved by hand.

The one thing to know: nothing here runs by itself. `pump` delivers what is queued, `round` lets each worker tick once,
so the same calls give the same run every time, and a fault can be put between any two of them. The pair plays the
gateway as well: it mints tickets, collects tokens, and runs a preempted choice again.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch

from hermetic.handoff.messages import Key
from hermetic.handoff.outcome import Completed, Outcome
from hermetic.kv.lineage import Secret
from hermetic.model.config import ModelConfig
from hermetic.model.decoder import Decoder
from hermetic.model.params import SamplingParams
from hermetic.model.source import ModelSource, locate
from hermetic.model.weights import read_config
from hermetic.worker import messages as m
from hermetic.worker.build import WorkerConfig, build, sizes
from hermetic.worker.core import Connection, Worker
from hermetic.worker.decode import DecodeWorker
from hermetic.worker.prefill import PrefillWorker
from hermetic.worker.wire import CurveKeys

PREFILL, DECODE, GATEWAY = b"prefill", b"decode", b"gateway"
ROUNDS = 20_000  # after so many without an end, a run is taken to hang
LAB_SECRET = Secret(bytes(range(32)))

_load = Decoder.load


@functools.lru_cache(maxsize=8)
def _config(source: ModelSource) -> ModelConfig:
    return read_config(source)


@functools.lru_cache(maxsize=8)
def _loaded(source: ModelSource, dtype: str, _threads: int) -> Decoder:
    return _load(source, dtype)


@contextmanager
def _models_loaded_once() -> Iterator[None]:
    """Workers of one process share a model: it is read-only, and loading it is most of the time of a test."""

    def load(source: ModelSource, dtype: str, *_: object) -> Decoder:
        return _loaded(source, dtype, torch.get_num_threads())  # row counts that agree are measured for these

    with mock.patch.object(Decoder, "load", load), mock.patch("hermetic.model.weights.read_config", _config):
        yield


def make_worker(
    role: str,
    model: str = "smollm2",
    pages: int = 64,
    *,
    verify: str = "landing",
    dtype: str = "bf16",
    page_size: int = 16,
    chunk: int = 512,
    max_batch: int = 64,
    context_length: int | None = None,
    threads: int = 2,
    secret: Secret = LAB_SECRET,
    send: Callable[[Connection, Key | None, m.Body], None] = lambda *_: None,
    clock: Callable[[], float] = time.monotonic,
    slots: int = 64,
    transport: str = "shm",
    drain_seconds: float = 30.0,
) -> Worker:
    """One worker as the product builds it, with a pool of exactly `pages` pages; its model is shared.

    `threads` is set for the whole process, as in a worker's own: all workers in use at once should agree on it."""
    config = WorkerConfig(
        name=role,
        role=role,
        model=model,
        dtype=dtype,
        kv_bytes=1 << 30,
        page_size=page_size,
        verify=verify,
        context_length=None,
        chunk=chunk,
        max_batch=max_batch,
        threads=threads,
        host="127.0.0.1",
        secret=secret.key,
        keys=CurveKeys(b"", b"", b"", b""),
        log_format="text",
        slots=slots,
        transport=transport,
        drain_seconds=drain_seconds,
    )
    page = sizes(config, _config(locate(model))).geometry.stride
    config = msgspec.structs.replace(config, kv_bytes=pages * page, context_length=context_length)
    with _models_loaded_once():
        return build(config, send, lambda *_: None, clock=clock)


@dataclass
class Answer:
    """What has come back for one request. `outputs` are the tokens of each choice, over all attempts."""

    submit: m.Submit
    outputs: dict[int, list[int]]
    logprobs: dict[int, list[float | None]]
    reasons: dict[int, str] = field(default_factory=dict)
    attempts: int = 1
    live: dict[Key, set[int]] = field(default_factory=dict)  # attempts that have not ended -> choices on them
    ended: list[tuple[Connection, Key, Outcome]] = field(default_factory=list)

    @property
    def failure(self) -> Outcome | None:
        """The first end, of either half, that was not Completed."""
        return next((outcome for _, _, outcome in self.ended if not isinstance(outcome, Completed)), None)

    @property
    def outcome(self) -> Outcome | None:
        """How the request ended; None while it has not."""
        if self.failure is not None:
            return self.failure
        return Completed() if len(self.reasons) == len(self.outputs) else None

    @property
    def tokens(self) -> list[int]:
        """Of the only choice."""
        (tokens,) = self.outputs.values()
        return tokens


Message = tuple[Connection, Connection, Key | None, m.Body]  # from, to, key, body


class LabPair:
    """Two workers, paired, and a queue between them. Options are those of `make_worker`."""

    def __init__(
        self,
        model: str = "smollm2",
        *,
        prefill_pages: int = 64,
        decode_pages: int = 64,
        prefill_model: str | None = None,
        **options: Any,
    ) -> None:
        self._queue: deque[Message] = deque()
        self.now = 0.0  # both workers' clock: it stands still but for `advance`
        self.drop: Callable[[Message], bool] = lambda _: False  # messages for which it says True are lost
        self.dropped: list[Message] = []
        self.answers: dict[bytes, Answer] = {}  # by ticket
        self.paired: list[m.Paired] = []
        self.log: list[Message] = []  # what came to the gateway

        def clock() -> float:
            return self.now

        prefill = make_worker(
            "prefill",
            prefill_model or model,
            prefill_pages,
            send=self._sender(PREFILL),
            clock=clock,
            **options,
        )
        decode = make_worker("decode", model, decode_pages, send=self._sender(DECODE), clock=clock, **options)
        assert isinstance(prefill, PrefillWorker)
        assert isinstance(decode, DecodeWorker)
        self.prefill, self.decode = prefill, decode
        prefill.dialled(DECODE, "decode", decode.info.incarnation, GATEWAY)
        self.pump()

    def _sender(self, source: Connection) -> Callable[[Connection, Key | None, m.Body], None]:
        return lambda to, key, body: self._queue.append((source, to, key, body))

    # ------------------------------------------------------------------- asking

    def submit(
        self,
        tokens: Sequence[int],
        tenant: str = "tenant",
        *,
        n: int = 1,
        seed: int = 7,
        params: SamplingParams | None = None,
        **sampling: Any,
    ) -> Key:
        """Give both halves a request. `sampling` are fields of SamplingParams; greedy, 16 tokens, when none is given.

        Returns its first attempt's key; a later attempt has the same ticket."""
        if params is None:
            defaults = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
            params = SamplingParams(**(defaults | sampling))
        number = len(self.answers) + 1
        key = Key(number.to_bytes(16, "little"), 1)
        raw = np.array(tokens, "<i4").tobytes()
        submit = m.Submit(raw, len(tokens), params, n, 0, seed, tenant, "", number, "prefill")
        answer = Answer(submit, {i: [] for i in range(n)}, {i: [] for i in range(n)})
        self.answers[key.ticket] = answer
        self._give(key, submit, set(range(n)))
        return key

    def _give(self, key: Key, submit: m.Submit, choices: set[int]) -> None:
        self.answers[key.ticket].live[key] = choices
        self._queue.append((GATEWAY, DECODE, key, submit))
        self._queue.append((GATEWAY, PREFILL, key, msgspec.structs.replace(submit, peer="decode")))

    def cancel(
        self, key: Key, code: str = "client_gone", choice: int | None = None, drain: bool = False
    ) -> None:
        """What the gateway sends when a client leaves, to every attempt that is alive."""
        for live in self.answers[key.ticket].live:
            for to in (DECODE, PREFILL):
                self._queue.append((GATEWAY, to, live, m.Cancel(code, "the client left", choice, drain)))

    # ------------------------------------------------------------------- moving

    def pump(self) -> bool:
        """Deliver everything that is queued, and what that causes. False when there was nothing."""
        moved = bool(self._queue)
        while self._queue:
            message = self._queue.popleft()
            if self.drop(message):
                self.dropped.append(message)
                continue
            source, to, key, body = message
            if to == GATEWAY:
                self.log.append(message)
                self._answered(source, key, body)
            else:
                (self.prefill if to == PREFILL else self.decode).handle(source, key, body)
        return moved

    def round(self) -> bool:
        """Messages, a tick of prefill, messages, a tick of decode, messages. False when nothing at all happened."""
        moved = self.pump()
        worked = self.prefill.tick()
        moved |= self.pump()
        worked |= self.decode.tick()
        moved |= self.pump()
        return moved or worked

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Rounds until `until` says so or nothing happens any more. Raises when it seems to go on for ever."""
        for _ in range(ROUNDS):
            if until() or not self.round():
                return
        raise AssertionError(f"no end after {ROUNDS} rounds: {self.prefill.stats()} {self.decode.stats()}")

    def advance(self, seconds: float) -> None:
        """Let time pass for both workers, then run until nothing happens any more."""
        self.now += seconds
        self.run()

    def ask(self, tokens: Sequence[int], tenant: str = "tenant", **options: Any) -> Answer:
        """Submit one request and run until everything has ended."""
        key = self.submit(tokens, tenant, **options)
        self.run()
        return self.answer(key)

    def answer(self, key: Key) -> Answer:
        return self.answers[key.ticket]

    # ----------------------------------------------------------------- gateway

    def _answered(self, source: Connection, key: Key | None, body: m.Body) -> None:
        match body:
            case m.Paired():
                self.paired.append(body)
            case m.Tokens(tokens=items):
                for item in items:
                    answer = self.answers[item.key.ticket]
                    if item.choice in answer.live.get(item.key, ()):
                        answer.outputs[item.choice].append(item.token)
                        answer.logprobs[item.choice].append(item.logprob)
            case m.ChoiceDone(choice=choice, reason=reason) if key is not None:
                self.answers[key.ticket].reasons[choice] = reason
            case m.Preempted(choice=choice) if key is not None:
                self._again(key, choice)
            case m.Ended(outcome=outcome) if key is not None:
                answer = self.answers[key.ticket]
                answer.ended.append((source, key, outcome))
                if not isinstance(outcome, Completed):
                    # As the gateway does: the first failure of either half ends the other.
                    self.cancel(key, outcome.code)
                    answer.live.clear()
                elif source == DECODE:
                    answer.live.pop(key, None)

    def _again(self, key: Key, choice: int) -> None:
        answer = self.answers[key.ticket]
        answer.live[key].discard(choice)
        answer.attempts += 1
        so_far = np.array(answer.outputs[choice], "<i4").tobytes()
        again = msgspec.structs.replace(
            answer.submit, tokens=answer.submit.tokens + so_far, n=1, choice=choice
        )
        self._give(Key(key.ticket, answer.attempts), again, {choice})

    # ------------------------------------------------------------------ looking

    def check(self) -> None:
        """I5 for pages of both pools and for slots; raises OwnershipError or SlotError."""
        self.prefill.engine.pool.check_conservation()
        self.decode.engine.pool.check_conservation()
        for peer in self.decode._peers.values():
            peer.slots.check_conservation()

    def idle(self) -> bool:
        """Whether nobody holds anything: every page that is not in quarantine, and every slot, is free."""
        stats = self.decode.stats()
        pools = (self.prefill.engine.pool.counts(), self.decode.engine.pool.counts())
        return not any(p.leased for p in pools) and stats["slots_free"] == stats["slots_total"]


__all__ = ["DECODE", "GATEWAY", "LAB_SECRET", "PREFILL", "Answer", "LabPair", "Message", "make_worker"]
