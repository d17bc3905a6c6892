"""Prompts that begin alike, or are alike: what a prefix cache may share, and where its pages end.

The one thing to know: the cached path has to compute what the uncached one does, to the token, wherever a page ends; so the
same prompt is asked at k pages and one token less and more, first uncached, then cached.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hermetic.audit.exchange import Answer, Ask, Endpoint
from hermetic.audit.scenarios.asking import (
    NORMAL,
    SHORT,
    Ruler,
    affordable,
    asks,
    beginning_with,
    copy,
    id_endpoints,
    ids,
    patience,
    plain,
    some,
    text_endpoints,
)
from hermetic.audit.scenarios.registry import scenario
from hermetic.audit.stage import Stage, changed

USUAL_PAGES = (16, 64)  # tokens: what vLLM and SGLang, and others, use where nothing is set
OFF = (-1, 0, 1)


def pages(stage: Stage) -> tuple[int, ...]:
    """Tokens of a page: the learned one, else the usual ones that fit here."""
    if stage.learned.page is not None and stage.learned.page > 1:
        return (stage.learned.page,)
    return tuple(p for p in USUAL_PAGES if 4 * p <= stage.learned.takes(text_endpoints(stage)[0]))


def _targets(stage: Stage, endpoint: Endpoint, page: int, at_least: int) -> list[int]:
    """k pages, and one token less and more, for a drawn k; all over `at_least` and within what the endpoint takes."""
    lowest = at_least // page + 2
    highest = min(lowest + 3, (stage.learned.takes(endpoint) - NORMAL - 1) // page)
    if highest < lowest or not affordable(stage, 9 * highest * page):
        return []
    k = stage.random.randint(lowest, highest)
    return [k * page + off for off in OFF]


async def _twins(stage: Stage, wave: Sequence[Ask], why: str, at_once: bool) -> None:
    """Each asked for the first time, then again: behind each other, or all of them beside each other."""
    first = [await stage.alone(ask) for ask in wave]
    again = (
        await stage.together(patience(stage, wave, max(a.seconds for a in first)))
        if at_once
        else [await stage.alone(ask) for ask in wave]
    )
    for one, two in zip(first, again, strict=True):
        stage.same(one, two, why)


@scenario(
    "page-edges",
    "Asks prompts of exactly k pages of KV cache, and of one token less and more, first uncached and then from the cache.",
    evidence=("differential", "marker", "semantics"),
    weight=1.5,
    order=20,
)
async def page_edges(stage: Stage) -> None:
    forms = [("text", e) for e in text_endpoints(stage)] + [("ids", e) for e in id_endpoints(stage)]
    sizes = pages(stage) or USUAL_PAGES[:1]
    ruler = Ruler(stage)
    played = 0
    async for number in stage.rounds():
        form, endpoint = forms[number % len(forms)]
        page = sizes[(number // len(forms)) % len(sizes)]
        if form == "ids":
            tenant = stage.tenant()
            wave = [
                asks(stage, tenant, ids(stage.random, n), endpoint=endpoint, max_tokens=SHORT)
                for n in _targets(stage, endpoint, page, 0)
            ]
        else:
            ask = copy(stage, stage.tenant(), endpoint=endpoint, max_tokens=SHORT)
            measured = await ruler.measure(ask)
            if measured is None:
                stage.note(
                    "this server does not count tokens: lengths around page edges were tried at random"
                )
            wave = [ruler.to(ask, measured, n) for n in _targets(stage, endpoint, page, measured or 64)]
        played += len(wave)
        why = f"{form} of k pages of {page} tokens, and one token less and more: uncached, and again from the cache"
        if wave:
            await _twins(stage, wave, why, at_once=number % 2 == 1)
    if not played:
        stage.note(
            f"no prompt of k pages of {' or '.join(map(str, sizes))} tokens fits here in the time there is"
        )


async def _exact_beginning(stage: Stage, tokens: int) -> str | None:
    """Common words that are exactly so many tokens of a completion's prompt, by the server's count; None: it does not count."""
    ruler, tenant = Ruler(stage), stage.tenant()
    ask = asks(stage, tenant, plain(stage.random, 4), endpoint="completions")
    measured = await ruler.measure(ask)
    if measured is None or measured > tokens:
        return None
    return str(ruler.to(ask, measured, tokens).prompt)


@scenario(
    "shared-prefix",
    "Gives several tenants one beginning of about k pages and ends of their own: a hit that goes too far reads the other's end.",
    evidence=("marker", "differential"),
    weight=1.5,
    order=22,
)
async def shared_prefix(stage: Stage) -> None:
    endpoints = text_endpoints(stage)
    sizes = pages(stage) or USUAL_PAGES[:1]
    offs = itertools.cycle(OFF)
    async for number in stage.rounds():
        endpoint, page = endpoints[number % len(endpoints)], sizes[number % len(sizes)]
        room = max(1, min(4, (stage.learned.takes(endpoint) // 2) // page))
        tokens = stage.random.randint(1, room) * page + next(offs)
        exact = await _exact_beginning(stage, tokens) if endpoint == "completions" else None
        beginning = exact or plain(stage.random, tokens)
        one, two, *more = [
            beginning_with(stage, stage.tenant(), beginning, endpoint=endpoint)
            for _ in range(max(4, some(stage, number) // 2))
        ]
        first = await stage.alone(one)
        await stage.alone(two)  # hits what the first left
        await stage.together(
            [changed(ask, max_tokens=SHORT, logprobs=False) for ask in more]
        )  # all hit it at once
        stage.same(
            first, await stage.ask(one), "asked first, and again after others had used the same beginning"
        )


@scenario(
    "identical",
    "Sends the same bytes twice and thrice at once, and prompts that differ in one word: the same answer as alone, and no more.",
    evidence=("differential", "marker"),
    order=24,
)
async def identical(stage: Stage) -> None:
    endpoints = text_endpoints(stage)
    async for number in stage.rounds():
        tenant = stage.tenant()
        endpoint = endpoints[number % len(endpoints)]
        ask = copy(stage, tenant, tokens=stage.random.choice((0, 80, 200)), endpoint=endpoint)
        # The same bytes under each of the keys; the marker is one tenant's, so the name is as well.
        copies = [changed(ask, key=(tenant.key + i) % stage.keys) for i in range(2 + number % 2)]
        before: Answer | None = await stage.alone(ask) if number % 2 == 0 else None
        near = _nearly(stage, endpoint)
        came = await stage.together([*copies, *near])
        alone = before or await stage.alone(ask)
        for answer in came[: len(copies)]:
            stage.same(alone, answer, f"the same bytes {len(copies)} times at once, and alone")


def _nearly(stage: Stage, endpoint: Endpoint) -> list[Ask]:
    """Two prompts that are alike but for the tenants' own lines."""
    beginning = plain(stage.random, 40)
    return [
        beginning_with(stage, stage.tenant(), beginning, endpoint=endpoint, max_tokens=SHORT)
        for _ in range(2)
    ]


__all__ = ["USUAL_PAGES", "pages"]
