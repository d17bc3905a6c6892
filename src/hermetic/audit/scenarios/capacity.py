"""Prompts up to what a server takes, around it and far beyond, and more at once than its pool holds.

The one thing to know: what cannot fit has to be refused, every time, on every endpoint, streaming or not; and a normal request right
after has to be served. What is accepted has to be read to its end: the limit may be one that was only advertised. Prompts past the
edge come last: a server may not recover from them. `must_refuse` is said only of what surely cannot fit: of token ids past the
learned edge, or of texts with more words than the limit has tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hermetic.audit.exchange import Answer, Ask, Endpoint
from hermetic.audit.scenarios.asking import (
    NORMAL,
    SHORT,
    TURNS,
    Ruler,
    affordable,
    again_and_again,
    all_endpoints,
    asks,
    beside,
    copy,
    id_endpoints,
    ids,
    patience,
    plain,
    prefill_seconds,
    quiet,
    some,
    still_serves,
    text_endpoints,
    words_for,
)
from hermetic.audit.scenarios.prefixes import USUAL_PAGES
from hermetic.audit.scenarios.registry import scenario
from hermetic.audit.stage import Stage, changed

MOST_TOKENS = 1_500_000  # of one prompt: past the longest contexts in use, in about 10 MB of text
SHOWS = 2 * NORMAL  # tokens of an answer that should not be: enough to show whose it is
VICTIM = 160  # tokens of a victim's prompt, counted as those of a text; its codes make it twice as many
TASK = 130  # tokens of a copy task without filler, with its template
AT_LEAST = 256  # tokens of the one long prompt that is sent even where there is no time for it
AGAIN = 3  # requests of a full pool that began last, and that ended last, and are asked once more in quiet
SURE = 1.3  # words for each token of the limit: a word of ours is at least one token
PACED = 8  # the part of what is accepted that, by the time it takes, judges the times of all steps of LADDER (evidence/semantics.py)
ABOUT = 0.8  # of the wanted length that a text has, before it is measured and filled up to the token
LADDER = (
    0.5,
    0.7,
    0.85,
    0.95,
)  # of what is accepted: a pool smaller than the advertised context lies somewhere there


class Over(NamedTuple):
    """A prompt longer than what fits. `exact`: `tokens` is the number itself, not an estimate from below."""

    endpoint: Endpoint
    tokens: int
    exact: bool
    stream: bool


def limit_of(stage: Stage, endpoint: Endpoint) -> int | None:
    """Tokens of prompt from which on this endpoint refuses, or no longer reads all of it: as learned, else as it claims. None: it
    has shown no limit."""
    edge = stage.learned.edges.get(endpoint)
    shown = [] if edge is None else [tokens for tokens in (edge.refused, edge.cut) if tokens is not None]
    if shown:
        return min(shown)
    return stage.learned.claimed + 1 if stage.learned.claimed is not None else None


def overs(stage: Stage) -> list[Over]:
    """Every endpoint, with and without streaming, at lengths from the edge on to far beyond it."""
    found = []
    streams = (True, False) if stage.learned.streams else (False,)
    page = stage.learned.page or USUAL_PAGES[0]
    for endpoint in all_endpoints(stage):
        limit = limit_of(stage, endpoint)
        if limit is None:
            continue
        texts = [int(limit * SURE) + 8, 2 * limit, 4 * limit]
        rounded = -(-limit // page) * page
        exacts = (
            [limit, limit + 1, rounded, rounded + 1, rounded + page]
            if endpoint in id_endpoints(stage)
            else []
        )
        for tokens, exact in [(n, False) for n in texts] + [(n, True) for n in dict.fromkeys(exacts)]:
            if tokens <= MOST_TOKENS:
                found += [Over(endpoint, tokens, exact, stream) for stream in streams]
    return found


def _over(stage: Stage, over: Over) -> Ask:
    """The request. A text holds `over.tokens` words, so at least as many tokens, whatever the tokenizer."""
    tenant = stage.tenant()
    prompt: str | tuple[int, ...] = (
        ids(stage.random, over.tokens) if over.exact else tenant.copy_task(over.tokens)
    )
    ask = asks(stage, tenant, prompt, endpoint=over.endpoint, stream=over.stream, max_tokens=SHOWS)
    return changed(ask, within=stage.learned.bound + prefill_seconds(stage, over.tokens))


def _refuse(stage: Stage, over: Over, answer: Answer) -> None:
    kind = "token ids" if over.exact else "words, each of one token or more,"
    stage.must_refuse(
        answer, over.tokens,
        f"{over.tokens} {kind} to /{over.endpoint}, which takes no {limit_of(stage, over.endpoint)} tokens",
    )  # fmt: skip


async def _fill(stage: Stage) -> None:
    """Victims: their markers lie in the pages that an over-long prompt could be given."""
    longest = min(600, int(stage.learned.takes(text_endpoints(stage)[0]) * 0.3))
    victims = [
        copy(stage, stage.tenant(), tokens=longest, max_tokens=SHORT, logprobs=False) for _ in range(4)
    ]
    await stage.ask(victims[0])
    await stage.together(victims[1:])


@scenario(
    "over-capacity",
    "Sends prompts at, just past and far past what fits, to each endpoint, streaming and not: refused, and the next is served.",
    evidence=("semantics", "marker", "liveness", "differential"),
    weight=2.0,
    order=90,
)
async def over_capacity(stage: Stage) -> None:
    beyond = overs(stage)
    if not beyond:
        stage.note(
            "this server has shown and claims no limit that a prompt of ours could pass: nothing was sent past it"
        )
    known = [copy(stage, stage.tenant(), max_tokens=NORMAL) for _ in range(2)]
    alone = await quiet(stage, known)
    await _fill(stage)
    turns = _turns(stage, beyond)
    async for number in stage.rounds(None if beyond else 0):
        if not await _one_by_one(stage, turns, len(beyond) if number == 0 else 4):
            return
        wave = [next(turns) for _ in range(4)]
        asked = [_over(stage, over) for over in wave]
        came = await stage.together([*asked, *known])
        for over, answer in zip(wave, came, strict=False):
            _refuse(stage, over, answer)
        for before, after in zip(alone, came[-2:], strict=True):
            stage.same(before, after, "alone, and beside prompts that are longer than what fits")
        if number % 2 == 0:
            await _fill(stage)
    if not await still_serves(stage, "after prompts that are longer than what fits"):
        return
    await _edges(stage)


def _turns(stage: Stage, beyond: list[Over]) -> Iterator[Over]:
    """All of them in a drawn order, again and again."""
    return itertools.cycle(stage.random.sample(beyond, len(beyond))) if beyond else iter(())


async def _one_by_one(stage: Stage, turns: Iterator[Over], count: int) -> bool:
    """The sequential form: a victim, a prompt that is too long, and now and then a normal request. False: it is stuck."""
    for at in range(count):
        if at and stage.left() <= 0:
            stage.note("not every length past the edge had its turn in the time there was")
            return True
        over = next(turns)
        if at % 4 == 0:
            await stage.ask(copy(stage, stage.tenant(), tokens=120, max_tokens=SHORT, logprobs=False))
        answer = await stage.ask(_over(stage, over))
        _refuse(stage, over, answer)
        if (at % 4 == 3 or answer.how == "silent") and not await still_serves(
            stage, f"right after a prompt of {over.tokens} tokens to /{over.endpoint}"
        ):
            return False
    return True


async def _edges(stage: Stage) -> None:
    """The very edge, from below: the last lengths that are accepted, page rounding, and those that were never answered."""
    page = stage.learned.page or USUAL_PAGES[0]
    for endpoint in all_endpoints(stage):
        edge = stage.learned.edges.get(endpoint)
        if edge is None:
            continue
        rounded = edge.accepted // page * page
        below = [edge.accepted, edge.accepted - 1, rounded, rounded - 1, rounded + 1, edge.accepted - page]
        for tokens in [n for n in dict.fromkeys(below) if 0 < n <= edge.accepted]:
            if stage.left() <= 0 or not affordable(stage, tokens):
                stage.note("not every length at the edge could be tried in the time there was")
                break
            answer = await stage.ask(await _at_the_edge(stage, endpoint, tokens))
            if endpoint in id_endpoints(stage):
                stage.must_serve(
                    answer, f"{tokens} token ids to /{endpoint}, which has taken {edge.accepted}"
                )
            if not await still_serves(
                stage, f"right after a prompt of {tokens} tokens, at the edge of what fits"
            ):
                return
    await _silences(stage)


async def _silences(stage: Stage) -> None:
    """What got neither an answer nor an error while the edges were learned, once more and with all the time there is for any request. It comes
    last: whoever sends it may be the last to be served. The first is asked also where there is no time left."""
    edges = stage.learned.edges
    exact = id_endpoints(stage)  # first: there is no doubt about how long their prompts are
    endpoints = sorted(all_endpoints(stage), key=lambda endpoint: endpoint not in exact)
    silent = [(e, n) for e in endpoints if e in edges for n in edges[e].silent]
    for at, (endpoint, tokens) in enumerate(silent):
        if at and stage.left() <= 0:
            stage.note(
                f"{len(silent) - at} more lengths that got neither an answer nor an error were not tried once more"
            )
            return
        await stage.ask(await _at_the_edge(stage, endpoint, tokens))
        if not await still_serves(
            stage, f"right after a prompt of {tokens} tokens, at the edge of what fits"
        ):
            return


async def _at_the_edge(stage: Stage, endpoint: Endpoint, tokens: int) -> Ask:
    """As many ids, or a text of as many tokens by the server's own count; one token of answer, as when the edge was learned."""
    tenant = stage.tenant()
    within = stage.learned.bound + 2 * prefill_seconds(stage, tokens)
    if endpoint in id_endpoints(stage):
        prompt = ids(stage.random, tokens)
        return asks(stage, tenant, prompt, endpoint=endpoint, max_tokens=1, within=within)
    text = tenant.copy_task(words_for(stage, ABOUT * tokens))
    ask = asks(stage, tenant, text, endpoint=endpoint, max_tokens=1, within=within)
    ruler = Ruler(stage)
    measured = await ruler.measure(ask)
    if measured is None or measured > tokens:  # it does not count, or too many
        return changed(ask, prompt=tenant.copy_task(words_for(stage, tokens)))
    return ruler.to(ask, measured, tokens)


# ------------------------------------------------------------------------------------ up to what is accepted


@scenario(
    "long-prompts",
    "Sends prompts up to the longest that is accepted, each after one tenant and after another: is all of it really read?",
    evidence=("marker", "differential", "contrast", "semantics", "liveness"),
    weight=2.0,
    order=8,
)
async def long_prompts(stage: Stage) -> None:
    endpoints = itertools.cycle(text_endpoints(stage))
    accepted = min(stage.learned.takes(endpoint) for endpoint in text_endpoints(stage))
    steps = [int(accepted * part) for part in LADDER]
    fit = [n for n in steps if affordable(stage, n, 0.3)] or [min(steps[0], AT_LEAST)]
    if max(fit) < max(steps):
        stage.note(f"prompts of more than {max(fit)} tokens take too long to be read in the time there is")
    await _cut_short(stage)
    await _pace(stage, accepted // PACED)
    alone: dict[int, Answer] = {}
    async for number in stage.rounds():
        for tokens in stage.random.sample(fit, len(fit)):
            if alone and stage.left() <= 0:
                stage.note("not every length below the edge had its turn in the time there was")
                break
            if number % 2 and tokens in alone:
                await _among_victims(stage, alone[tokens])
                continue
            came = await _between_victims(stage, _long(stage, next(endpoints), tokens))
            if any(answer.how == "silent" for answer in came) and not await still_serves(
                stage, f"right after a prompt of {tokens} tokens"
            ):
                return
            alone[tokens] = came[0]
        if number == 0:
            read = [tokens for tokens, answer in alone.items() if answer.how == "answered"]
            await _long_after_others(stage, text_endpoints(stage)[0], max(read, default=0))


async def _pace(stage: Stage, tokens: int) -> None:
    """Two new prompts of so many tokens, alone: how fast this server reads now. It may have been busy while its speed was learned, and long
    prompts that are read at its true speed would look as if they had not been."""
    for _ in range(2):
        await stage.alone(copy(stage, stage.tenant(), tokens=max(1, tokens - TASK), max_tokens=SHORT))


async def _cut_short(stage: Stage) -> None:
    """Where the server was seen to answer what it had not read whole, one such prompt: that it answers is a finding, and no risk."""
    for endpoint in text_endpoints(stage):
        edge = stage.learned.edges.get(endpoint)
        if edge is not None and edge.cut is not None:
            over = Over(endpoint, int(edge.cut * SURE) + 8, exact=False, stream=stage.learned.streams)
            _refuse(stage, over, await stage.ask(_over(stage, over)))


async def _among_victims(stage: Stage, alone: Answer) -> None:
    """The concurrent form: the same long prompt once more, beside victims whose prompts fill pages at the same time."""
    others = [copy(stage, stage.tenant(), tokens=200, max_tokens=SHORT, logprobs=False) for _ in range(some(stage, 0))]  # fmt: skip
    await beside(
        stage, [alone.ask], others, [alone], "one long prompt, alone and beside other tenants' prompts"
    )


async def _between_victims(stage: Stage, ask: Ask) -> list[Answer]:
    """One long prompt after each of two victims, whose markers lie in what it is given without having been read."""
    came = []
    for _ in range(2):
        await _victim(stage)
        came.append(await stage.alone(ask))
    stage.same(came[0], came[1], "one long prompt, alone after either of two tenants")
    return came


async def _victim(stage: Stage, many: int = 4) -> None:
    """One tenant fills page after page with its line, in prompts as short as any pool holds: whatever reads them goes on with it.
    Their beginnings differ, so that none is taken from a cache."""
    tokens = min(VICTIM, stage.learned.takes(text_endpoints(stage)[0]) // 4)
    victim = stage.tenant()
    prompts = [f"{plain(stage.random, 4)}\n{victim.chant(words_for(stage, tokens))}" for _ in range(many)]
    await stage.together([asks(stage, victim, prompt, max_tokens=2, logprobs=False) for prompt in prompts])


def _long(stage: Stage, endpoint: Endpoint, tokens: int) -> Ask:
    filler = max(1, tokens - TASK)
    ask = copy(stage, stage.tenant(), tokens=filler, endpoint=endpoint, max_tokens=SHOWS)
    return changed(ask, within=stage.learned.bound + 2 * prefill_seconds(stage, tokens))


async def _long_after_others(stage: Stage, endpoint: Endpoint, tokens: int) -> None:
    """Contrast: one long prompt right after each of two tenants, in turn. Each time with another beginning of four words,
    drawn whoever came before: else the prefix cache would have it."""
    if not tokens:
        return
    if not affordable(stage, 2 * TURNS * tokens, 0.4):
        stage.note(f"one prompt of {tokens} tokens after either of two tenants would take too long here")
        return
    victims, owner = (stage.tenant(), stage.tenant()), stage.tenant()
    after: dict[str, list[Answer]] = {victim.name: [] for victim in victims}
    body = owner.copy_task(words_for(stage, max(1, tokens - TASK)))
    for _ in range(TURNS):
        for victim in stage.random.sample(victims, 2):
            beginning = plain(stage.random, 4)
            before = f"{plain(stage.random, 4)} {victim.chant(words_for(stage, VICTIM))}"
            await stage.ask(asks(stage, victim, before, endpoint=endpoint, max_tokens=SHORT, logprobs=False))
            ask = asks(
                stage, owner, f"{beginning}\n{body}", endpoint=endpoint, max_tokens=SHORT, logprobs=False
            )
            after[victim.name].append(await stage.ask(ask))
        if stage.left() <= 0:
            break
    stage.contrast(
        after, f"one prompt of about {tokens} tokens, after one tenant's requests and after another's"
    )


# ------------------------------------------------------------------------------------ more at once than the pool holds


@scenario(
    "exhaustion",
    "Asks for more at once than a pool can hold, with long prompts and long answers: slower or refused, but nobody else's.",
    evidence=("marker", "differential", "liveness"),
    weight=2.0,
    order=95,
)
async def exhaustion(stage: Stage) -> None:
    endpoint = text_endpoints(stage)[0]
    known = [
        copy(stage, stage.tenant(), endpoint=endpoint),
        copy(stage, stage.tenant(), tokens=150, endpoint=endpoint),
    ]
    alone = await quiet(stage, known)
    waited: list[Answer] = []
    tokens = many = 0
    async for number in stage.rounds(least=2):  # what waited in the first is asked again after the second
        if number == 0 or stage.left() > 0:
            tokens = _tokens_each(stage, endpoint, number)
            at_once = int(stage.left() / 3 / max(prefill_seconds(stage, tokens), 0.1))
            many = max(2, min(stage.size.requests, at_once))
        wave = [
            copy(stage, stage.tenant(), tokens=tokens, endpoint=endpoint, max_tokens=2 * NORMAL)
            if at % 2
            else again_and_again(stage, stage.tenant(), endpoint=endpoint, max_tokens=4 * NORMAL)
            for at in range(many)
        ]
        expected = prefill_seconds(stage, tokens) + 2 * max(answer.seconds for answer in alone)
        came = await beside(
            stage, known, patience(stage, wave, expected), alone,
            f"alone, and beside {many} long requests that fill the pool",
        )  # fmt: skip
        for before, ask in zip(alone, known, strict=True):
            after = await stage.alone(ask)
            stage.must_serve(after, "a request that was served before, after the pool had been full")
            stage.same(before, after, "alone, and again after the pool had been full")
            if after.how in ("silent", "unreachable"):
                return
        await _once_more(stage, waited)
        waited = _longest(came)
    await still_serves(stage, "after the pool had been full")


def _longest(came: Sequence[Answer]) -> list[Answer]:
    """Those that waited longest for room, to begin or in all: a server may have put them aside and fetched them back."""
    answered = [answer for answer in came if answer.how == "answered"]
    begun = sorted(answered, key=lambda answer: answer.first or answer.seconds, reverse=True)[:AGAIN]
    ended = sorted(answered, key=lambda answer: answer.seconds, reverse=True)[:AGAIN]
    return list({answer.number: answer for answer in [*begun, *ended]}.values())


async def _once_more(stage: Stage, waited: Sequence[Answer]) -> None:
    """The same in quiet, when the pool has been full of others since: what was wrong then is not in a cache any more."""
    for at, answer in enumerate(waited):
        if at >= AGAIN and stage.left() <= 0:
            stage.note("not all that waited for room were asked once more in the time there was")
            return
        again = await stage.alone(answer.ask)
        stage.same(again, answer, "in quiet, and before when the pool was full and it had to wait")


def _tokens_each(stage: Stage, endpoint: Endpoint, number: int) -> int:
    """Long prompts, and in every other round longer ones, within the time."""
    tokens = int(stage.learned.takes(endpoint) * (0.25, 0.6)[number % 2])
    while tokens > 200 and prefill_seconds(stage, tokens) * 4 > max(stage.left(), 1.0):
        tokens //= 2
    return tokens


__all__ = ["Over", "limit_of", "overs"]
