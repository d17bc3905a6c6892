"""Traffic whose every token is known, for drills: clients that stay, clients that leave, and what came of each.

The one thing to know: nothing is forgiven here. An answer is right only if it has exactly the tokens of an undisturbed run
and an end; whoever left, or got an error, must have seen a prefix of them; a request that does not end within REQUEST_SECONDS
hangs. Whether an error was allowed at all is for the drill to say: errors are counted by their code.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import httpx

from hermetic.lab.load import Answer, Ask, send

REQUEST_SECONDS = 120.0  # a request that takes longer is taken to hang

Expected = Mapping[tuple[int, ...], Sequence[int]]
"""Prompt -> the tokens of an undisturbed run, at least as many as any request for it wants."""


@dataclass
class Tally:
    """What came of the requests. A drill is good when `wrong` and `hung` are empty."""

    right: int = 0
    left: int = 0
    failed: Counter[str] = field(default_factory=Counter)  # by error code
    wrong: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.right} right, {self.left} left, failed {dict(self.failed)}, wrong {self.wrong}, hung {self.hung}"


@dataclass
class Traffic:
    """Sends requests to `client`'s server and judges what comes. Texts are token numbers (see cluster.make_model)."""

    client: httpx.AsyncClient
    model: str
    expected: Expected
    tally: Tally = field(default_factory=Tally)
    pause: float = 0.0  # seconds that `keep_asking` waits between two requests of a client, at most

    async def ask(self, ask: Ask, n: int = 1, headers: Mapping[str, str] | None = None) -> bool:
        """One request, to its end. Whether it got its whole and right answer."""
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                answer = await send(self.client, self.model, ask, headers=headers, n=n)
        except TimeoutError:
            self.tally.hung.append(f"{_named(ask, n)}: no end within {REQUEST_SECONDS:.0f} s")
            return False
        except httpx.HTTPError as error:
            self.tally.wrong.append(f"{_named(ask, n)}: the connection ended with {error!r}")
            return False
        return self._judge(answer, n)

    async def ask_and_leave(
        self, ask: Ask, seconds: float, n: int = 1, headers: Mapping[str, str] | None = None
    ) -> None:
        """The client goes away after so long, whatever it has by then: perhaps before the first byte."""
        task = asyncio.create_task(self.ask(ask, n, headers))
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
            self.tally.left += 1

    def _judge(self, answer: Answer, n: int) -> bool:
        ask, name = answer.ask, _named(answer.ask, n)
        whole = not answer.error and not answer.left
        for choice in range(n) if whole else answer.texts:
            got = [int(word) for word in answer.texts.get(choice, "").split()]
            must = list(self.expected[ask.prompt][: ask.max_tokens])
            if got != (must if whole else must[: len(got)]):
                self.tally.wrong.append(f"{name}, choice {choice}: {got} instead of {must}")
                return False
        if answer.left:
            self.tally.left += 1
        elif answer.error:
            self.tally.failed[json.loads(answer.error)["code"]] += 1
        elif answer.finish != "length" or answer.usage.get("completion_tokens") != n * ask.max_tokens:
            self.tally.wrong.append(f"{name}: ended with {answer.finish}, {answer.usage}")
        else:
            self.tally.right += 1
            return True
        return False

    async def keep_asking(
        self, asks: Sequence[Ask], clients: int, stop: asyncio.Event, seed: int = 0
    ) -> None:
        """`clients` at a time until `stop`: streams and whole answers, one or two choices, some leave. Then all end."""

        async def one(rng: random.Random) -> None:
            while not stop.is_set():
                ask, n = rng.choice(asks), rng.choice([1, 1, 1, 2])
                ask = replace(ask, stream=rng.random() < 0.8)
                if rng.random() < 0.2:
                    await self.ask_and_leave(ask, rng.random() * 0.3, n)
                elif rng.random() < 0.2:
                    await self.ask(replace(ask, stream=True, leave_after=rng.randint(1, ask.max_tokens)), n)
                else:
                    await self.ask(ask, n)
                await asyncio.sleep(rng.random() * self.pause)

        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(one(random.Random(f"{seed}/{number}")))


def _named(ask: Ask, n: int) -> str:
    kind = "stream" if ask.stream else "answer"
    return f"{kind} of {n} x {ask.max_tokens} tokens to a prompt of {len(ask.prompt)} that begins {ask.prompt[:3]}"


def with_common_beginnings(
    count: int, output: int, vocab: int, seed: int = 0, longest: int = 200
) -> list[Ask]:
    """Prompts of 1..longest tokens of which most begin as one of three others do, for a page or for many."""
    rng = random.Random(seed)
    stems = [[rng.randrange(1, vocab) for _ in range(longest)] for _ in range(3)]
    asks = []
    for _ in range(count):
        size, stem = rng.randint(1, longest), rng.choice(stems)
        shared = rng.choice([0, size // 2, size // 16 * 16, size - 1])
        own = [rng.randrange(1, vocab) for _ in range(size - shared)]
        asks.append(Ask(tuple(stem[:shared] + own), output))
    return asks


async def storm(
    traffic: Traffic, asks: Sequence[Ask], leaving: float, again: float, concurrency: int, seed: int = 0
) -> None:
    """All of `asks`; a share leaves at random points, and a share of those is sent again at once, under the same client id."""
    rng = random.Random(seed)
    plans = [
        (ask, rng.random() < leaving, rng.random() < again, rng.random(), f"client-{i % 7}")
        for i, ask in enumerate(asks)
    ]
    todo = iter(plans)

    async def work() -> None:
        for ask, leaves, returns, when, name in todo:
            headers = {"X-Request-Id": name}  # used by many: to the server it is a label and nothing else
            if not leaves:
                await traffic.ask(ask, headers=headers)
                continue
            if when < 0.5:  # before the first byte, or not long after
                await traffic.ask_and_leave(ask, when * 0.3, headers=headers)
            else:
                leave = max(1, round((when - 0.5) * 2 * ask.max_tokens) - 1)
                await traffic.ask(replace(ask, leave_after=leave), headers=headers)
            if returns:
                await traffic.ask(ask, headers=headers)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
