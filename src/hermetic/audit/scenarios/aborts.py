"""Clients that leave: while the prompt is read, at the first token, in mid-answer, and many at once.

The one thing to know: what a cancel releases too early shows in whoever comes right after; what it never releases shows in
silence. So each leaving is followed at once by somebody new and by a retry of the same prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hermetic.audit.exchange import Answer, Ask
from hermetic.audit.scenarios.asking import (
    NORMAL,
    SHORT,
    again_and_again,
    beginning_with,
    beside,
    copy,
    plain,
    prefill_seconds,
    quiet,
    some,
    still_serves,
    text_endpoints,
)
from hermetic.audit.scenarios.registry import scenario
from hermetic.audit.stage import Stage, changed

Leaving = Callable[[Ask], Ask]


def _long_enough(stage: Stage) -> int:
    """Tokens of a prompt that takes about half a second to read, as far as this server takes such."""
    room = min(stage.learned.takes(e) for e in text_endpoints(stage)) * 0.6
    return int(min(room, max(200.0, 0.5 / max(prefill_seconds(stage, 1), 1e-6))))


def _soon(stage: Stage, tokens: int) -> Leaving:
    """Leave at a random moment while so many tokens are being read."""
    seconds = prefill_seconds(stage, tokens)
    return lambda ask: changed(ask, leave_seconds=max(0.005, seconds * stage.random.uniform(0.05, 0.9)))


async def _many_leave(
    stage: Stage,
    victim: Callable[[str], Ask],
    leaving: Leaving,
    when: str,
    number: int,
    known: Sequence[Ask],
    alone: Sequence[Answer],
) -> list[Answer]:
    """Several leave at once, on a shared beginning, beside requests that stay; their retries follow, beside the same. What those
    who leave got."""
    beginning = plain(stage.random, 24)
    asked = [victim(beginning) for _ in range(max(2, some(stage, number) // 3))]
    fresh = [copy(stage, stage.tenant(), max_tokens=SHORT) for _ in range(2)]
    left = [leaving(one) for one in asked]
    others = await beside(
        stage, known, [*left, *fresh], alone, f"alone, and beside requests whose clients left {when}"
    )
    fresh = [copy(stage, stage.tenant(), max_tokens=SHORT) for _ in range(2)]
    short = [changed(one, max_tokens=SHORT) for one in asked[:4]]
    await beside(
        stage, known[:1], [*short, *fresh], alone[:1],
        f"alone, and right after clients had left {when}, beside their retries",
    )  # fmt: skip
    return others[: len(left)]


def _nobody_left(stage: Stage, leaving: Sequence[Answer], when: str) -> None:
    """Say so where no request was cancelled: what this scenario is for has not been tried then."""
    if not any(answer.how == "left" for answer in leaving):
        stage.note(
            f"none of {len(leaving)} clients could leave {when}: their answers were over before, or came in one piece"
        )


async def _leave_and_look(stage: Stage, victim: Callable[[str], Ask], leaving: Leaving, when: str) -> None:
    """The pattern of all three: leave, ask as somebody new, retry; alone and with many at once."""
    known = [copy(stage, stage.tenant(), max_tokens=NORMAL) for _ in range(2)]
    alone = await quiet(stage, known)
    gone: list[Answer] = []
    async for number in stage.rounds():
        # One after the other: leave, then at once somebody new, then the same prompt again, then once more.
        ask = victim(plain(stage.random, 24))
        gone.append(await stage.ask(leaving(ask)))
        await stage.ask(copy(stage, stage.tenant(), max_tokens=SHORT))
        retry = await stage.ask(ask)
        if stage.left() > 0:
            gone += await _many_leave(stage, victim, leaving, when, number, known, alone)
        else:
            stage.note("there was no time for several clients who leave at once")
        stage.same(
            await stage.alone(ask),
            retry,
            f"on a quiet server, and as a retry at once after its client had left {when}",
        )
    _nobody_left(stage, gone, when)
    await still_serves(stage, f"after clients had left {when}")


def _prompting(stage: Stage, tokens: int, **fields: Any) -> Callable[[str], Ask]:
    """New tenants' copy tasks of about so many tokens, behind a given beginning."""
    return lambda beginning: beginning_with(stage, stage.tenant(), beginning, tokens, **fields)


@scenario(
    "abort-prefill",
    "Leaves while the prompt is still being read, retries at once, and looks at what those who come after get.",
    evidence=("marker", "differential", "liveness"),
    order=30,
)
async def abort_prefill(stage: Stage) -> None:
    tokens = _long_enough(stage)
    victim = _prompting(stage, tokens, max_tokens=SHORT)
    await _leave_and_look(stage, victim, _soon(stage, tokens), "while their prompts were read")


@scenario(
    "abort-first-token",
    "Leaves at the first token, retries at once, and looks at what those who come after get.",
    evidence=("marker", "differential", "liveness"),
    needs=("text", "streams"),
    order=31,
)
async def abort_first_token(stage: Stage) -> None:
    victim = _prompting(stage, 120, max_tokens=NORMAL, stream=True)
    await _leave_and_look(stage, victim, lambda ask: changed(ask, leave_tokens=1), "at the first token")


@scenario(
    "abort-stream",
    "Leaves in the middle of a long answer, retries at once, and looks at what those who come after get.",
    evidence=("marker", "differential", "liveness"),
    needs=("text", "streams"),
    order=32,
)
async def abort_stream(stage: Stage) -> None:
    def victim(beginning: str) -> Ask:
        ask = again_and_again(stage, stage.tenant(), max_tokens=2 * NORMAL, stream=True)
        return changed(ask, prompt=f"{beginning}\n{ask.prompt}")

    def leaving(ask: Ask) -> Ask:
        return changed(ask, leave_tokens=stage.random.randint(2, 10))

    await _leave_and_look(stage, victim, leaving, "in mid-answer")


@scenario(
    "cancel-storm",
    "Sends and cancels many requests at once, again and again; then silence, and one probe that has to be answered as before.",
    evidence=("differential", "liveness", "marker"),
    order=34,
)
async def cancel_storm(stage: Stage) -> None:
    known = copy(stage, stage.tenant())
    before = await stage.alone(known)
    tokens = min(_long_enough(stage), 400)
    moment = stage.learned.first + prefill_seconds(stage, tokens)
    victim = _prompting(stage, tokens, max_tokens=NORMAL)
    gone: list[Answer] = []
    async for number in stage.rounds(max(2, stage.size.rounds // 2)):
        beginning = plain(stage.random, 24)
        storm = [
            changed(victim(beginning), leave_seconds=max(0.002, stage.random.uniform(0.0, 1.5) * moment))
            for _ in range(stage.size.requests)
        ]
        gone += await stage.together(storm)
        if number % 2:
            stage.same(
                before, await stage.ask(known), "on a quiet server, and right behind a storm of cancels"
            )
        await stage.pause(max(1.0, min(3.0, stage.learned.first)))
        probe = await stage.alone(known)
        stage.must_serve(probe, f"one request, in silence, after {len(storm)} cancelled ones")
        stage.same(before, probe, "on a quiet server, and in the silence after a storm of cancels")
        if probe.how == "silent":
            return
    _nobody_left(stage, gone, "in the storm")


__all__: list[str] = []
