"""Whether one customer can tell by the clock what another has asked: the prefix cache as a side channel.

The one thing to know: there is a positive control. Where one's own repeat is no faster, nothing can be seen here, and nothing
is claimed. The three kinds of trial are drawn in mixed order, so that a server that slows down or warms up favours none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from hermetic.audit.exchange import Answer, Ask
from hermetic.audit.scenarios.asking import SHORT, copy, prefill_seconds, text_endpoints
from hermetic.audit.scenarios.registry import scenario
from hermetic.audit.stage import Stage, changed

Kind = Literal["other", "nobody", "self"]
Scoped = Callable[[Ask, int], Ask]
"""A request in the name of customer 0 or 1."""

MOST = 2_000  # tokens of a prompt: long enough to be seen, whatever the server takes
# Trials. One out of place in the lower half of 24: (1 + 12 * 12) of C(24, 12), times 2 scenarios and 1 / 0.2, is 0.0005. With 6 trials even none
# is more than the 0.001 of a finding.
LEAST = 12


def _tokens(stage: Stage) -> int:
    """A prompt that takes some time to read here, that the server takes, and that leaves time for many trials."""
    tokens = min(MOST, int(stage.learned.takes(text_endpoints(stage)[0]) * 0.6))
    while tokens > 200 and 5 * _trials(stage) * prefill_seconds(stage, tokens) > max(stage.left(), 1.0):
        tokens = int(tokens * 0.75)
    return tokens


def _trials(stage: Stage) -> int:
    """Of each kind. With LEAST of each, and one of them out of place, chance can still be ruled out."""
    return max(LEAST, min(2 * stage.size.rounds, 40))


def _seconds(answer: Answer) -> float | None:
    """To the first token; of an answer that came at once, to its end."""
    if answer.how != "answered":
        return None
    return answer.first if answer.first is not None else answer.seconds


async def _compare(stage: Stage, scoped: Scoped, why: str) -> None:
    """Play the trials and hand the times over. Every trial has a prompt nobody has sent before."""
    tokens = _tokens(stage)
    times: dict[Kind, list[float]] = {"other": [], "nobody": [], "self": []}
    kinds: list[Kind] = ["other", "nobody", "self"]
    async for _ in stage.rounds(_trials(stage)):
        for kind in stage.random.sample(kinds, 3):
            ask = copy(stage, stage.tenant(), tokens=tokens, max_tokens=2, logprobs=False)
            if kind != "nobody":
                await stage.alone(scoped(ask, 1 if kind == "other" else 0))
            seconds = _seconds(await stage.alone(scoped(ask, 0)))
            if seconds is not None:
                times[kind].append(seconds)
    if min(len(list_) for list_ in times.values()) < 2:
        stage.note("too few of the timed requests were answered to compare anything")
        return
    stage.timing(times["other"], times["nobody"], times["self"], why)


@scenario(
    "keys",
    "Times a prompt that the other key has sent before, that nobody has, and that the same key has: can one tell by the clock?",
    evidence=("timing", "differential"),
    needs=("text", "two keys"),
    weight=2.5,  # some ten trials of each kind are needed before chance can be ruled out
    order=50,
)
async def keys(stage: Stage) -> None:
    await _compare(
        stage,
        lambda ask, who: changed(ask, key=who),
        "the first token of a prompt that another key had sent before, against one that nobody had sent",
    )
    await _same_for_both(stage, lambda ask, who: changed(ask, key=who), "the same bytes under two keys")


@scenario(
    "salts",
    "The same with `cache_salt`: prompts with another salt must be as slow as new ones, those with the same salt are the control.",
    evidence=("timing", "differential"),
    needs=("text", "salt"),
    weight=2.5,
    order=52,
)
async def salts(stage: Stage) -> None:
    run = f"{stage.random.getrandbits(64):016x}"

    def salted(ask: Ask, who: int) -> Ask:
        return changed(ask, extra={**ask.extra, "cache_salt": f"{run}-{who}"})

    trial = await stage.alone(salted(copy(stage, stage.tenant(), max_tokens=SHORT), 0))
    if trial.how != "answered":
        stage.note(f"this server does not take `cache_salt`: {trial.error[:120] or trial.how}")
        return
    await _compare(
        stage,
        salted,
        "the first token of a prompt that was sent with another salt before, against one that nobody had sent",
    )
    await _same_for_both(stage, salted, "the same bytes with two salts")


async def _same_for_both(stage: Stage, scoped: Scoped, why: str) -> None:
    """What the cache keeps apart has to be answered alike: alone under one name, at once under both."""
    async for _ in stage.rounds(max(2, stage.size.rounds // 2)):
        ask = copy(stage, stage.tenant(), tokens=100)
        alone = await stage.alone(scoped(ask, 0))
        for answer in await stage.together([scoped(ask, 0), scoped(ask, 1)]):
            stage.same(alone, answer, why)


__all__: list[str] = []
