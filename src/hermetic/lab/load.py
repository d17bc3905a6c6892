"""A load generator for OpenAI-compatible servers: fixed or mixed requests, some of which leave early.

Used by the load test and by benchmarks/serving.py, against this server and others alike: it sends token ids and
counts events of the stream, and knows nothing of who answers.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import httpx


@dataclass(frozen=True)
class Ask:
    """One request: prompt token ids, output tokens wanted, and after how many tokens the client leaves (None: never)."""

    prompt: tuple[int, ...]
    max_tokens: int
    leave_after: int | None = None
    stream: bool = True


@dataclass
class Answer:
    """What came back. Times in seconds since the request was sent; `tokens` counts stream events with text or an end."""

    ask: Ask
    status: int = 0
    error: str = ""
    text: str = ""
    texts: dict[int, str] = field(default_factory=dict)  # by choice
    finish: str | None = None
    left: bool = False
    usage: dict[str, int] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ttft(self) -> float:
        return self.times[0] if self.times else self.seconds

    @property
    def gaps(self) -> list[float]:
        """Seconds between one token event and the next."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


async def send(
    client: httpx.AsyncClient,
    model: str,
    ask: Ask,
    *,
    headers: Mapping[str, str] | None = None,
    **more: object,
) -> Answer:
    """One request to /v1/completions. Errors of the server are in the answer; errors of the connection raise."""
    answer, start = Answer(ask), time.perf_counter()
    body = {
        "model": model, "prompt": list(ask.prompt), "max_tokens": ask.max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": ask.stream, **({"stream_options": {"include_usage": True}} if ask.stream else {}), **more,
    }  # fmt: skip
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        answer.status = response.status_code
        if response.status_code != 200 or not ask.stream:
            whole = json.loads(await response.aread())
            answer.seconds = time.perf_counter() - start
            answer.error = json.dumps(whole["error"]) if "error" in whole else ""
            if not answer.error:
                answer.text, answer.finish = whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]
                answer.texts = {choice["index"]: choice["text"] for choice in whole["choices"]}
                answer.usage = whole["usage"]
            return answer
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                answer.error = json.dumps(event["error"])
                break
            if event.get("usage"):
                answer.usage = event["usage"]
            for choice in event["choices"]:
                answer.times.append(time.perf_counter() - start)
                answer.text += choice["text"]
                answer.texts[choice["index"]] = answer.texts.get(choice["index"], "") + choice["text"]
                answer.finish = choice["finish_reason"] or answer.finish
            if ask.leave_after is not None and len(answer.times) >= ask.leave_after:
                answer.left = True
                break
    answer.seconds = time.perf_counter() - start
    return answer


async def drive(
    url: str, model: str, asks: Sequence[Ask], concurrency: int, timeout: float = 600.0
) -> list[Answer]:
    """All requests, `concurrency` at a time, in order of `asks`; answers in the same order."""
    answers: list[Answer | None] = [None] * len(asks)
    todo = iter(range(len(asks)))
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits) as client:

        async def work() -> None:
            for i in todo:
                answers[i] = await send(client, model, asks[i])

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
    return [a for a in answers if a is not None]


def fixed(
    count: int, prompt: int, output: int, seed: int = 0, low: int = 1000, high: int = 40000
) -> list[Ask]:
    """Prompts of random token ids, all of one size."""
    rng = random.Random(seed)
    return [Ask(tuple(rng.randrange(low, high) for _ in range(prompt)), output) for _ in range(count)]


def mixed(count: int, longest: int, most: int, leaving: float, seed: int = 0) -> list[Ask]:
    """Prompts of 1..longest tokens (short ones more often) and answers of 1..most; a share of the clients leaves early."""
    rng = random.Random(seed)
    asks = []
    for _ in range(count):
        size = max(1, int(longest * rng.random() ** 2))
        output = rng.randint(1, most)
        leave = rng.randint(1, output) if rng.random() < leaving else None
        prompt = tuple(rng.randrange(1000, 40000) for _ in range(size))
        asks.append(Ask(prompt, output, leave, stream=leave is not None or rng.random() < 0.5))
    return asks
