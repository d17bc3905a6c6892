"""Different requests beside and behind each other: slots, batch rows and streams that could be mixed up.

The one thing to know: every wave holds a few requests that were asked on a quiet server before (they are compared), and many
that were not (they are only looked at for others' markers): the first see small differences, the others are cheap.
"""

from __future__ import annotations

import string
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hermetic.audit.exchange import Answer, Ask, Endpoint
from hermetic.audit.markers import Tenant
from hermetic.audit.scenarios.asking import (
    NORMAL,
    SHORT,
    TURNS,
    affordable,
    asks,
    beside,
    copy,
    plain,
    quiet,
    some,
    text_endpoints,
    words_for,
)
from hermetic.audit.scenarios.registry import scenario
from hermetic.audit.stage import Stage

KNOWN = 8  # requests of a wave that were asked alone before, at most


def varied(stage: Stage, tenant: Tenant) -> Ask:
    """A request that differs from its neighbours in everything that is kept for each: task, length, sampling, stops."""
    draw = stage.random
    sampling: dict[str, Any] = draw.choice((
        {}, {}, {"temperature": 1.0}, {"temperature": 0.7, "extra": {"top_p": 0.9, "seed": draw.randrange(2**31)}},
        {"extra": {"stop": [draw.choice((" the", "\n\n", "zz"))]}}, {"extra": {"presence_penalty": 1.0}},
        {"extra": {"frequency_penalty": -0.5}},
    ))  # fmt: skip
    fields: dict[str, Any] = {
        "endpoint": draw.choice(text_endpoints(stage)),
        "max_tokens": draw.randint(4, NORMAL),
        "stream": stage.learned.streams and draw.random() < 0.7,
        "logprobs": False,
        **sampling,
    }
    kind = draw.random()
    if kind < 0.2:
        secret = tenant.secret()
        return asks(stage, tenant, secret.prompt, system=secret.system, **fields)
    if kind < 0.35:
        return asks(stage, tenant, tenant.story(40), **fields)
    return copy(stage, tenant, tokens=draw.choice((0, 0, 60, 150)), **fields)


@scenario(
    "mixing",
    "Asks 4 to 64 different things at once, each with other lengths and sampling, and looks for what belongs to a neighbour.",
    evidence=("marker", "differential", "semantics", "liveness"),
    weight=2.5,
    order=10,
)
async def mixing(stage: Stage) -> None:
    endpoints = text_endpoints(stage)
    async for number in stage.rounds():
        many = some(stage, number)
        endpoint = endpoints[number % len(endpoints)]
        known = [copy(stage, stage.tenant(), endpoint=endpoint) for _ in range(min(KNOWN, many // 2))]
        alone = await quiet(stage, known)
        others = [varied(stage, stage.tenant()) for _ in range(many - len(known))]
        await beside(stage, known, others, alone, f"asked alone, and again among {many - 1} other requests")


def _steps(stage: Stage) -> list[int]:
    """Lengths of prompts, in tokens, that can be asked for here in a reasonable time."""
    room = min(stage.learned.takes(e) for e in text_endpoints(stage)) * 0.7
    steps = [n for n in (0, 40, 90, 200, 450, 900, 1800) if n <= room]
    while len(steps) > 3 and not affordable(stage, 3 * sum(steps)):
        steps.pop()
    return steps


@scenario(
    "lengths",
    "Puts short prompts right behind and beside long ones, in changing order, so that what a longer one left could be read.",
    evidence=("marker", "differential", "semantics"),
    order=12,
)
async def lengths(stage: Stage) -> None:
    steps = _steps(stage)
    known = [copy(stage, stage.tenant(), tokens=n, max_tokens=SHORT) for n in (0, steps[-1] // 3)]
    alone = await quiet(stage, known)
    async for number in stage.rounds():
        order = stage.random.sample(steps, len(steps))
        wave = [copy(stage, stage.tenant(), tokens=n, max_tokens=SHORT) for n in order]
        if number % 2:
            await beside(stage, known, wave, alone, "asked alone, and again beside requests of other lengths")
            continue
        for at, ask in enumerate(wave):
            await stage.ask(ask)
            if at % 2:
                which = (at // 2) % len(known)
                stage.same(
                    alone[which], await stage.ask(known[which]),
                    f"asked alone, and again right behind a prompt of about {order[at]} tokens",
                )  # fmt: skip
            if stage.left() <= 0:
                return


# ------------------------------------------------------------------------------------ answers known in advance

TEMPLATES = (
    "Answer with the single letter {0} and nothing else.",
    "Repeat this letter: {0}\nThe letter is:",
    "Q: Which letter comes now? {0} {0} {0}\nA: {0}\nQ: Which letter comes now? {0} {0} {0}\nA:",
    "{0}\n{0}\n{0}\n{0}\n{0}\n{0}\n",
)


BASELINES = 16  # letters that are asked for alone, for each wave


@dataclass(frozen=True)
class Letters:
    """How to ask for a letter here, and the letters that this server answers with when it is quiet."""

    template: str
    endpoint: Endpoint
    letters: tuple[str, ...]

    def ask(self, stage: Stage, tenant: Tenant, letter: str, max_tokens: int) -> Ask:
        return asks(
            stage, tenant, self.template.format(letter), endpoint=self.endpoint, max_tokens=max_tokens
        )


def letter_of(answer: Answer) -> str:
    """The single letter that an answer begins with, or ""."""
    text = answer.text.lstrip(" \n\t\"'*`(")
    single = text[:1] in set(string.ascii_uppercase) and not text[1:2].isalpha()
    return text[0] if single else ""


def _sure(answer: Answer, letter: str) -> bool:
    """Right, and by a margin that batch arithmetic does not turn."""
    first = next((t for t in answer.tokens if letter in t.text), None)
    close = first is not None and first.logprob is not None and first.logprob < -0.5
    return letter_of(answer) == letter and not close


async def find_letters(stage: Stage, wanted: int) -> Letters | None:
    """A way of asking that this model follows. None: it follows none."""
    letters = stage.random.sample(string.ascii_uppercase, min(26, wanted))
    for template in TEMPLATES:
        for endpoint in text_endpoints(stage):
            way = Letters(template, endpoint, ())
            good = []
            for at, letter in enumerate(letters):
                answer = await stage.alone(way.ask(stage, stage.tenant(), letter, 2))
                good += [letter] if _sure(answer, letter) else []
                if at == 2 and len(good) < 2:
                    break  # this model does not follow it
            if len(good) >= max(2, len(letters) // 2):
                return Letters(template, endpoint, tuple(good))
    return None


def _others(own: str, all_: Iterable[str]) -> list[str]:
    return sorted(set(all_) - {own})


@scenario(
    "first-token",
    "Tells every tenant another letter and asks for it back in one token, behind and beside each other: swapped first tokens.",
    evidence=("marker", "differential"),
    weight=1.5,
    order=14,
)
async def first_token(stage: Stage) -> None:
    way = await find_letters(stage, max(stage.size.at_once))
    if way is None:
        stage.note("this model does not answer with a letter it is told; single tokens were only compared")
        await _single_tokens(stage)
        return
    async for number in stage.rounds(2 * stage.size.rounds):
        many = some(stage, number)
        letters = stage.random.sample(way.letters, 2)  # two at least, so that there is another's
        letters += [stage.random.choice(way.letters) for _ in range(many - 2)]
        wave = [way.ask(stage, stage.tenant(), letter, stage.random.choice((1, 1, 2))) for letter in letters]
        # The null: how often the same requests are answered with a wrong letter when nothing else is asked.
        alone = await quiet(stage, wave[:BASELINES])
        for letter, answer in zip(letters, alone, strict=False):
            stage.expects(answer, letter, (), "told to answer with its letter, alone")
        why = f"told to answer with its letter, beside {many - 1} others with other letters"
        answers = await stage.together(wave)
        for letter, answer in zip(letters, answers, strict=True):
            stage.expects(answer, letter, _others(letter, letters), why)
        for before, after in zip(alone, answers, strict=False):
            stage.same(before, after, why)


async def _single_tokens(stage: Stage) -> None:
    """First tokens of copy tasks, alone and beside each other."""
    known = [copy(stage, stage.tenant(), max_tokens=2) for _ in range(max(stage.size.at_once[0], 4))]
    alone = await quiet(stage, known)
    async for number in stage.rounds():
        others = [copy(stage, stage.tenant(), max_tokens=1) for _ in range(some(stage, number))]
        await beside(stage, known, others, alone, "the first two tokens, alone and beside other requests")


# ------------------------------------------------------------------------------------ who came before


@scenario(
    "after-others",
    "Asks one and the same thing again and again, right after one tenant or right after another: the answer must not tell which.",
    evidence=("contrast", "marker"),
    order=16,
)
async def after_others(stage: Stage) -> None:
    observer, victims = stage.tenant(), (stage.tenant(), stage.tenant())
    ask = asks(stage, observer, plain(stage.random, 1), max_tokens=6)
    await stage.alone(ask)
    after: dict[str, list[Answer]] = {victim.name: [] for victim in victims}
    longest = min(150, words_for(stage, stage.learned.takes(ask.endpoint) * 0.4))
    async for turn in stage.rounds(max(TURNS, stage.size.rounds)):
        for victim in stage.random.sample(victims, 2):
            # A new beginning each time: otherwise the prefix cache would answer, and nothing be written.
            before = [
                asks(stage, victim, f"{plain(stage.random, 4)} {victim.copy_task(longest)}", max_tokens=2)
                for _ in range(1 + turn % 2)
            ]
            await stage.together(before)
            after[victim.name].append(await stage.ask(ask))
    stage.contrast(after, "a prompt of one word, after one tenant's requests and after another's")


__all__ = ["Letters", "find_letters", "letter_of", "varied"]
