"""Conversations that come back when others have filled the cache, and one probe again and again for a long time.

The one thing to know: what an offload or a retraction brings back is compared with what the same turn got before it, and with
what it gets when everything is quiet again. A turn is sent as the whole conversation so far, as chat clients do.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from hermetic.audit.exchange import Answer, Ask
from hermetic.audit.markers import Tenant
from hermetic.audit.scenarios.asking import (
    LONG,
    NORMAL,
    SHORT,
    again_and_again,
    asks,
    beside,
    copy,
    prefill_seconds,
    some,
    still_serves,
    text_endpoints,
    words_for,
)
from hermetic.audit.scenarios.mixing import varied
from hermetic.audit.scenarios.registry import scenario
from hermetic.audit.stage import Stage, changed


class Talk:
    """One tenant's conversation, as one growing text."""

    def __init__(self, stage: Stage, tenant: Tenant, tokens: int) -> None:
        self.stage, self.tenant = stage, tenant
        self.text = (
            f"{tenant.filler(words_for(stage, tokens))}\n\nUser: Say this again: {tenant.line}\nAssistant:"
        )

    def ask(self, max_tokens: int = NORMAL) -> Ask:
        return asks(self.stage, self.tenant, self.text, max_tokens=max_tokens)

    def go_on(self, answer: Answer) -> None:
        """Take the answer in, and ask for the line once more."""
        said = answer.text if answer.how == "answered" and answer.text.strip() else self.tenant.line
        self.text += f" {said.strip()}\nUser: And once more: {self.tenant.line}\nAssistant:"


def _pressure(stage: Stage, seconds: float) -> list[Ask]:
    """New tenants' long prompts, as many as can be read in so many seconds: what drives others out of the cache."""
    endpoint = text_endpoints(stage)[0]
    tokens = int(stage.learned.takes(endpoint) * 0.6)
    while tokens > 200 and prefill_seconds(stage, tokens) > seconds / 2:
        tokens //= 2
    many = int(seconds / max(prefill_seconds(stage, tokens), 0.02))
    return [
        copy(stage, stage.tenant(), tokens=tokens, max_tokens=SHORT, logprobs=False)
        for _ in range(max(2, min(many, 2 * stage.size.requests)))
    ]


@scenario(
    "sessions",
    "Holds several conversations, fills the cache with others' prompts, and lets the conversations come back: offload, retraction.",
    evidence=("differential", "marker"),
    weight=2.0,
    order=60,
)
async def sessions(stage: Stage) -> None:
    async for number in stage.rounds():
        many = max(2, some(stage, number) // 2)
        tokens = min(300, stage.learned.takes(text_endpoints(stage)[0]) // 4)
        talks = [Talk(stage, stage.tenant(), tokens) for _ in range(many)]
        for talk, answer in zip(talks, await stage.together([t.ask() for t in talks]), strict=True):
            talk.go_on(answer)
        # Half of the second turns are asked now, when all of it is in the cache; all of them when they come back.
        known = talks[: (many + 1) // 2]
        before = [await stage.alone(talk.ask()) for talk in known]
        await stage.together(_pressure(stage, max(1.0, stage.left() / 8)), at_once=8)
        back = await _come_back(stage, talks, number)
        why = "a turn of a conversation, before and after others had filled the cache"
        for one, two in zip(before, back, strict=False):
            stage.same(one, two, why)
        for talk, answer in list(zip(talks, back, strict=True))[len(known) :]:
            stage.same(
                await stage.alone(talk.ask()), answer,
                "a turn of a conversation that came back after others had filled the cache, and once more in quiet",
            )  # fmt: skip


async def _come_back(stage: Stage, talks: Sequence[Talk], number: int) -> list[Answer]:
    """All of them, in turns one behind the other or at once beside more pressure."""
    wave = [talk.ask() for talk in talks]
    if number % 2:
        return [await stage.ask(ask) for ask in wave]
    return (await stage.together([*wave, *_pressure(stage, 1.0)]))[: len(wave)]


@scenario(
    "soak",
    "Asks one probe again and again among all kinds of traffic for as long as there is time: does its answer or its time drift?",
    evidence=("differential", "marker", "liveness", "semantics"),
    weight=1.5,
    order=70,
)
async def soak(stage: Stage) -> None:
    probes = [copy(stage, stage.tenant(), tokens=n, max_tokens=NORMAL) for n in (0, 150)]
    first = [await stage.alone(ask) for ask in probes]
    began = time.monotonic()
    turn = 0
    while turn == 0 or (stage.left() > 0 and time.monotonic() - began < stage.size.seconds):
        which = turn % len(probes)
        passed = "asked first, and again beside traffic later on"
        await beside(stage, [probes[which]], _traffic(stage, turn), [first[which]], passed)
        if turn % 2:
            again = await stage.alone(probes[which])
            stage.must_serve(again, "the probe of the soak, when nothing else was asked")
            stage.same(first[which], again, "asked first, and again in a pause of the traffic later on")
            if again.how in ("silent", "unreachable"):
                return
        turn += 1
    await still_serves(stage, "after the soak")


def _traffic(stage: Stage, turn: int) -> list[Ask]:
    """A wave of unlike requests: some leave, some are long, some have long answers."""
    many = min(some(stage, turn), 16)
    wave = [varied(stage, stage.tenant()) for _ in range(many)]
    for at in range(0, many, 4):
        wave[at] = changed(wave[at], leave_seconds=stage.random.uniform(0.01, 2.0))
    if turn % 3 == 0:
        wave.append(again_and_again(stage, stage.tenant(), max_tokens=LONG, logprobs=False))
    return wave


__all__ = ["Talk"]
