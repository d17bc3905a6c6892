"""A backend that plays a script, for tests of the API's shapes: it obeys the protocol and computes nothing."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from hermetic.gateway.backend import Capacity, Failed, Finish, Generate, Refused, Token

Step = Token | Finish | Refused | Failed | Exception | asyncio.Event
"""An event to send, an exception to raise, or a gate to wait for."""


class ScriptedStream:
    """Plays its steps; remembers how it was ended."""

    def __init__(self, request: Generate, steps: Sequence[Step]) -> None:
        self.request, self.closed, self.cancelled, self.sent = request, 0, [], 0
        self._steps = steps
        self._over = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[Token | Finish]:
        return self._play()

    async def _play(self) -> AsyncIterator[Token | Finish]:
        for step in self._steps:
            if self.closed:
                return
            if isinstance(step, asyncio.Event):
                gate, over = asyncio.create_task(step.wait()), asyncio.create_task(self._over.wait())
                await asyncio.wait({gate, over}, return_when=asyncio.FIRST_COMPLETED)
                gate.cancel()
                over.cancel()
            elif isinstance(step, Exception):
                raise step
            elif step.index not in self.cancelled:
                self.sent += 1
                yield step
                await asyncio.sleep(0)

    async def aclose(self) -> None:
        self.closed += 1
        self._over.set()

    async def cancel(self, index: int) -> None:
        self.cancelled.append(index)


@dataclass
class ScriptedBackend:
    """Answers every request with `reply` (as tokens, then end-of-sequence), or with the next of `scripts`."""

    tokenizer: object
    reply: str = "The capital of France is Paris."
    max_model_len: int = 256
    scripts: list[Sequence[Step] | Exception] = field(default_factory=list)
    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    unready: str | None = None
    requests: list[Generate] = field(default_factory=list)
    streams: list[ScriptedStream] = field(default_factory=list)
    taken_away: str | None = None  # why the model is disabled
    unsaved: Failed | None = None  # what `enable` raises
    asked: list[tuple[str, object]] = field(default_factory=list)  # operations, in order

    def accepting(self) -> None:
        if self.taken_away is not None:
            raise Refused("model_disabled", f"this model was disabled: {self.taken_away}", 400)

    def disabled(self) -> str | None:
        return self.taken_away

    async def status(self) -> Mapping[str, object]:
        return {"gateway": {"model": "smollm2", "disabled": self.taken_away}, "workers": []}

    def drain(self, worker: str) -> str:
        if worker != "decode-0":
            raise Refused(
                "worker_not_found", f"there is no worker {worker!r}; there are: decode-0", 404, "worker"
            )
        self.asked.append(("drain", worker))
        return "draining"

    def undrain(self, worker: str) -> str:
        self.asked.append(("undrain", worker))
        return "ready"

    def disable(self, reason: str, by: str) -> str | None:
        self.asked.append(("disable", by))
        self.taken_away = reason
        return None

    def enable(self, by: str) -> None:
        if self.unsaved is not None:
            raise self.unsaved
        self.asked.append(("enable", by))
        self.taken_away = None

    def set_context(self, tokens: int | None) -> int:
        self.asked.append(("context", tokens))
        return min(tokens or self.max_model_len, self.max_model_len)

    def capacity(self) -> Capacity:
        pools = {"prefill-0": self.max_model_len, "decode-0": 2 * self.max_model_len}
        return Capacity(
            "smollm2", self.max_model_len, 8192, 16, pools, {"fingerprint": "f" * 32, "verify": "landing"}
        )

    def admit(self, prompt_tokens: int, max_tokens: int, n: int = 1) -> None:
        if prompt_tokens + max_tokens > self.max_model_len:
            raise Refused(
                "context_length_exceeded",
                f"{prompt_tokens} prompt tokens + {max_tokens} do not fit {self.max_model_len}",
                400,
                "messages",
            )

    async def generate(self, request: Generate) -> ScriptedStream:
        script = self.scripts.pop(0) if self.scripts else self._reply(request)
        if isinstance(script, Exception):
            raise script
        self.requests.append(request)
        self.streams.append(ScriptedStream(request, script))
        return self.streams[-1]

    async def ready(self) -> str | None:
        return self.unready

    async def stats(self) -> Mapping[str, Mapping[str, float]]:
        return self.figures

    def _reply(self, request: Generate) -> list[Step]:
        return script(self.tokenizer, self.reply, request)


def script(tokenizer: object, reply: str, request: Generate) -> list[Step]:
    """`reply` for every choice, interleaved; logprobs are -(position + 1) / 4, and each top has the token first."""
    params, eos = request.params, tokenizer.eos_token_id
    tokens = [*tokenizer.encode(reply, add_special=False), eos][: params.max_tokens]
    steps: list[Step] = []
    for at, token in enumerate(tokens):
        logprob = top = None
        if params.logprobs is not None:
            logprob = -(at + 1) / 4
            others = [(t, -9.0 - t if t % 2 else -math.inf) for t in range(3, 3 + params.logprobs)]
            top = tuple([(token, logprob), *others][: params.logprobs])
        steps += [Token(index, token, logprob, top) for index in range(request.n)]
    ended = tokens[-1] == eos
    steps += [
        Finish(index, "stop" if ended else "length", eos if ended else None) for index in range(request.n)
    ]
    return steps
