"""Requests as scenarios make them: copy tasks of tenants, prompts of a wanted length, waves beside quiet baselines.

The one thing to know: text that two tenants share is `plain`: common words that are nobody's markers. Lengths are in tokens;
those of texts are estimates (`Learned.tokens_per_word`), unless the server's own usage was asked for first (`Ruler`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from hermetic.audit.exchange import Answer, Ask, Endpoint
from hermetic.audit.markers import Tenant
from hermetic.audit.markers import shared_prefix as plain
from hermetic.audit.stage import Stage, changed

SHORT, NORMAL, LONG = (
    12,
    24,
    96,
)  # tokens of an answer: shows whose it is; copies a line; copies it again and again
IDS = range(500, 16_000)  # token ids that every vocabulary in use has, beyond its special ones
# Answers after either of two tenants. If they group but for one, that is a finding beside another scenario: 2 * 13 of C(24, 12), times 2 scenarios and
# 1 / 0.2, is 0.0001. Of 8 it is none even if all of them do.
TURNS = 12


# ------------------------------------------------------------------------------------ texts


def words_for(stage: Stage, tokens: float) -> int:
    """About how many words of ours make so many tokens; at least 1."""
    return max(1, int(tokens / max(stage.learned.tokens_per_word, 0.5)))


def pads(count: int) -> str:
    """A beginning of `count` tokens: ` a` is one token, and stays one, in the vocabularies in use."""
    return ("a " * count).rstrip()


def ids(randomly: random.Random, count: int, unit: int = 8) -> tuple[int, ...]:
    """`count` token ids: a few drawn ids again and again, which a model goes on repeating: a copy task without text."""
    drawn = [randomly.choice(IDS) for _ in range(unit)]
    return tuple((drawn * (count // unit + 1))[:count])


# ------------------------------------------------------------------------------------ requests


def text_endpoints(stage: Stage) -> tuple[Endpoint, ...]:
    """The OpenAI endpoints that are there, chat first."""
    return tuple(e for e in ("chat", "completions") if e in stage.learned.endpoints)


def all_endpoints(stage: Stage) -> tuple[Endpoint, ...]:
    """Every endpoint that is there."""
    return tuple(e for e in ("chat", "completions", "generate") if e in stage.learned.endpoints)


def id_endpoints(stage: Stage) -> tuple[Endpoint, ...]:
    """Those that take token ids."""
    return tuple(e for e in all_endpoints(stage) if e != "chat") if stage.learned.token_ids else ()


def asks(stage: Stage, tenant: Tenant, prompt: str | tuple[int, ...], **fields: Any) -> Ask:
    """A request of `tenant`. Chat where there is chat, unless said otherwise."""
    plainly: dict[str, Any] = {
        "endpoint": text_endpoints(stage)[0],
        "max_tokens": NORMAL,
        "stream": stage.learned.streams,
        "logprobs": stage.learned.logprobs,
        "key": tenant.key,
        "within": stage.learned.bound,
    }
    return Ask(tenant=tenant.name, prompt=prompt, **{**plainly, **fields})


def copy(stage: Stage, tenant: Tenant, tokens: int = 0, **fields: Any) -> Ask:
    """'Repeat this line' of `tenant`, with filler of its own to about `tokens` tokens."""
    return asks(stage, tenant, tenant.copy_task(words_for(stage, tokens) if tokens else 0), **fields)


def again_and_again(stage: Stage, tenant: Tenant, **fields: Any) -> Ask:
    """A request with a long answer that still is a copy: the tenant's line, repeated."""
    line = tenant.line
    prompt = f"Write this line again and again, and nothing else.\n{line}\n{line}\n{line}\n"
    return asks(stage, tenant, prompt, **{"max_tokens": LONG, **fields})


def beginning_with(stage: Stage, tenant: Tenant, beginning: str, tokens: int = 0, **fields: Any) -> Ask:
    """A copy task of `tenant` behind a text that others may share, with about `tokens` tokens of its own in between."""
    return asks(stage, tenant, tenant.after(beginning, words_for(stage, tokens) if tokens else 0), **fields)


# ------------------------------------------------------------------------------------ time


def prefill_seconds(stage: Stage, tokens: int) -> float:
    """About how long this server takes to read so many tokens."""
    return stage.learned.reading(tokens)


def affordable(stage: Stage, tokens: int, share: float = 0.5) -> bool:
    """Whether so many tokens of prompt can be read in `share` of the time left."""
    return prefill_seconds(stage, tokens) <= max(stage.left(), 0.0) * share


def patience(stage: Stage, asked: Sequence[Ask], one: float) -> list[Ask]:
    """The same requests, each waited for as long as all of them may take one after the other, if one takes `one` seconds."""
    within = stage.learned.bound + len(asked) * max(one, 0.0)
    return [changed(ask, within=max(ask.within, within)) for ask in asked]


def some(stage: Stage, number: int) -> int:
    """How many requests beside each other in round `number`: the size's steps in turn, within what a wave may have."""
    steps = stage.size.at_once
    return max(2, min(steps[number % len(steps)], stage.size.requests))


# ------------------------------------------------------------------------------------ waves


async def quiet(stage: Stage, asked: Sequence[Ask]) -> list[Answer]:
    """Each of them alone, one after the other: baselines."""
    return [await stage.alone(ask) for ask in asked]


async def beside(
    stage: Stage, asked: Sequence[Ask], others: Sequence[Ask], alone: Sequence[Answer], why: str
) -> list[Answer]:
    """`asked`, whose quiet answers are `alone`, together with `others`, in mixed order; each is compared. Answers of `others`."""
    one = max((answer.seconds for answer in alone), default=0.0)
    wave = patience(stage, [*asked, *others], one)
    order = list(range(len(wave)))
    stage.random.shuffle(order)
    came = await stage.together([wave[i] for i in order])
    back = dict(zip(order, came, strict=True))
    for before, after in zip(alone, [back[i] for i in range(len(asked))], strict=True):
        stage.same(before, after, why)
    return [back[i] for i in range(len(asked), len(wave))]


async def still_serves(stage: Stage, why: str) -> bool:
    """Whether a plain request of somebody new is answered now; it has to be."""
    answer = await stage.alone(copy(stage, stage.tenant(), max_tokens=SHORT))
    stage.must_serve(answer, why)
    return answer.how not in ("silent", "unreachable")


class Ruler:
    """Prompts of an exact number of tokens, by the server's own count.

    A prompt is measured once, with one `a` at its beginning; every further ` a` is one token more."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    async def measure(self, ask: Ask) -> int | None:
        """Tokens of `ask` with one pad, as the server counts; None if it does not count. Costs one request of one token."""
        answer = await self.stage.ask(changed(self.padded(ask, 1), max_tokens=1))
        return (answer.usage.prompt or None) if answer.how == "answered" else None

    def padded(self, ask: Ask, count: int) -> Ask:
        """`ask` behind `count` pads."""
        assert isinstance(ask.prompt, str)
        return changed(ask, prompt=f"{pads(count)} {ask.prompt}")

    def to(self, ask: Ask, measured: int | None, tokens: int) -> Ask:
        """`ask` at exactly `tokens` tokens, if it was measured; else at some length that nobody knows.

        Raises ValueError when it is longer than that already."""
        if measured is None:
            return self.padded(ask, self.stage.random.randrange(1, 65))
        if tokens < measured:
            raise ValueError(f"the prompt has {measured} tokens and cannot be made {tokens}")
        return self.padded(ask, 1 + tokens - measured)


__all__ = [
    "IDS", "LONG", "NORMAL", "SHORT", "TURNS", "Ruler", "affordable", "again_and_again", "all_endpoints", "asks",
    "beginning_with", "beside", "copy", "id_endpoints", "ids", "pads", "patience", "plain", "prefill_seconds", "quiet", "some",
    "still_serves", "text_endpoints", "words_for",
]  # fmt: skip
