"""What a scenario plays on: it asks in the names of tenants, and says what is to be compared with what.

The one thing to know: a scenario judges nothing. Every answer that passes through here is looked at for other tenants'
markers, for what its end, usage and time claim, and for whether it came at all; a scenario only names the comparisons that
need to be meant (`same`, `contrast`, `must_refuse`, ...).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from hermetic.audit.exchange import Answer, Ask
from hermetic.audit.learned import SLOWER, Learned
from hermetic.audit.markers import Plant, Tenant


@dataclass(frozen=True)
class Size:
    """How much of a scenario is played. quick: about 2 minutes for all of them on a small server; soak: hours."""

    rounds: int  # repetitions of a scenario's pattern
    at_once: tuple[int, ...]  # how many requests beside each other, one after the other
    requests: int  # in one concurrent wave at most
    seconds: float  # of a soak


SIZES: Mapping[str, Size] = {
    "quick": Size(rounds=3, at_once=(4, 8), requests=16, seconds=20.0),
    "standard": Size(rounds=12, at_once=(4, 16, 64), requests=64, seconds=120.0),
    "soak": Size(rounds=60, at_once=(4, 16, 32, 64), requests=128, seconds=3600.0),
}


class Judge(Protocol):
    """What evidence makes of answers; see judge.py."""

    def seen(self, scenario: str, answer: Answer) -> None:
        """Every answer: markers, semantics, liveness."""

    def same(self, scenario: str, alone: Answer, again: Answer, why: str) -> None:
        """Differential: the same request, once alone on a quiet server and once not."""

    def contrast(self, scenario: str, after: Mapping[str, Sequence[Answer]], why: str) -> None:
        """Contrast: answers to one and the same request, by who came before."""

    def must_refuse(self, scenario: str, answer: Answer, tokens: int, why: str) -> None:
        """Semantics: this cannot fit, or must not be accepted."""

    def must_serve(self, scenario: str, answer: Answer, why: str) -> None:
        """Liveness and semantics: this is in order and has to be answered."""

    def expects(self, scenario: str, answer: Answer, own: str, others: Iterable[str], why: str) -> None:
        """Marker: answers known in advance (a single letter, say): another tenant's in place of one's own."""

    def timing(self, scenario: str, after_other: Sequence[float], after_nobody: Sequence[float],
               after_self: Sequence[float], why: str) -> None:  # fmt: skip
        """Timing: seconds to the first token when another key, nobody, or the same key had sent the prompt before."""


class Sender(Protocol):
    """The target, as a stage needs it; see target.py."""

    async def send(self, ask: Ask) -> Answer: ...


class Stage:
    """One scenario's view of the audit. `random` depends on seed, scenario and `turn` (how often it was played before) alone."""

    def __init__(
        self,
        name: str,
        target: Sender,
        learned: Learned,
        plant: Plant,
        judge: Judge,
        size: Size,
        seed: int,
        left: Callable[[], float],
        keys: int = 1,
        answered: Callable[[str, Answer], None] = lambda *_: None,
        turn: int = 0,
    ) -> None:
        self.name, self.learned, self.size, self.keys = name, learned, size, keys
        self.random = random.Random(f"{seed}/{name}/{turn}" if turn else f"{seed}/{name}")
        self._target, self._plant, self._judge, self._left, self._answered = (
            target,
            plant,
            judge,
            left,
            answered,
        )
        self.notes: list[str] = []  # what was left out here, and why; for the report
        self._open = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    # ------------------------------------------------------------------------------ who asks

    def tenant(self, key: int | None = None) -> Tenant:
        """A tenant nobody has seen yet, with markers of its own. Keys are taken in turn if there are two."""
        return self._plant.tenant(self.random, self.keys, key)

    # ------------------------------------------------------------------------------ asking

    async def ask(self, ask: Ask) -> Answer:
        """Send one request and wait for its end. Never raises for what a server does."""
        self._open += 1
        self._quiet.clear()
        try:
            answer = await self._target.send(ask)
        finally:
            self._open -= 1
            if self._open == 0:
                self._quiet.set()
        self._answered(self.name, answer)
        self._judge.seen(self.name, answer)
        return answer

    async def together(self, asks: Sequence[Ask], at_once: int | None = None) -> list[Answer]:
        """Send these beside each other, at most `at_once` at a time; answers in the order of `asks`. Each is waited for as much longer as the others that
        are there may take to be read."""
        tokens = sorted((self.learned.tokens(ask.prompt) for ask in asks), reverse=True)
        within = self.learned.bound + SLOWER * self.learned.reading(sum(tokens[:at_once]))
        room = asyncio.Semaphore(at_once or len(asks) or 1)

        async def one(ask: Ask) -> Answer:
            async with room:
                return await self.ask(changed(ask, within=max(ask.within, within)))

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(ask)) for ask in asks]
        return [task.result() for task in tasks]

    async def alone(self, ask: Ask) -> Answer:
        """Send one request when none of ours is open."""
        await self._quiet.wait()
        return await self.ask(ask)

    async def pause(self, seconds: float) -> None:
        """Silence, if there is time for it."""
        await asyncio.sleep(min(seconds, max(0.0, self._left())))

    async def rounds(self, at_most: int | None = None, least: int = 1) -> AsyncIterator[int]:
        """0, 1, 2, ... up to the size's number of rounds, while there is time left. The first `least` always run."""
        for number in range(self.size.rounds if at_most is None else at_most):
            if number >= least and self._left() <= 0:
                return
            yield number

    def left(self) -> float:
        """Seconds that this scenario may still take."""
        return self._left()

    def note(self, text: str) -> None:
        """Say that something of the scenario was left out here, and why. Said once."""
        if text not in self.notes:
            self.notes.append(text)

    # ------------------------------------------------------------------------------ what is compared

    def same(self, alone: Answer, again: Answer, why: str) -> None:
        self._judge.same(self.name, alone, again, why)

    def contrast(self, after: Mapping[str, Sequence[Answer]], why: str) -> None:
        self._judge.contrast(self.name, after, why)

    def must_refuse(self, answer: Answer, tokens: int, why: str) -> None:
        self._judge.must_refuse(self.name, answer, tokens, why)

    def must_serve(self, answer: Answer, why: str) -> None:
        self._judge.must_serve(self.name, answer, why)

    def expects(self, answer: Answer, own: str, others: Iterable[str], why: str) -> None:
        self._judge.expects(self.name, answer, own, others, why)

    def timing(
        self,
        after_other: Sequence[float],
        after_nobody: Sequence[float],
        after_self: Sequence[float],
        why: str,
    ) -> None:
        self._judge.timing(self.name, after_other, after_nobody, after_self, why)


def changed(ask: Ask, **fields: Any) -> Ask:
    """The same request with other fields."""
    return msgspec.structs.replace(ask, **fields)


__all__ = ["SIZES", "Judge", "Sender", "Size", "Stage", "changed"]
