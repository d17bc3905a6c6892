"""What the audit learns of a server before it plays: what it takes, how fast it is, how much it varies by itself.

The one thing to know: learning may not break what it measures. It asks one thing at a time, noise before limits, and a length
that gets neither answer nor error is noted and left alone.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from hermetic.audit.edges import Search, Tried, find_edge, numbers
from hermetic.audit.engines import Said, recognise
from hermetic.audit.exchange import Answer, Ask, Endpoint, How
from hermetic.audit.learned import SLOWER, Edge, Learned, Noise
from hermetic.audit.markers import COMMON, Plant
from hermetic.audit.stage import changed
from hermetic.audit.target import Target, TargetError, TargetOptions

FIRST_BOUND = 120.0  # seconds at most for a short request: some servers load or compile only then
PATIENT = 4.0  # times what learning may take: no short request is waited for longer than that, nor less than LEAST_BOUND
LEAST_BOUND = 15.0  # seconds
STOPPED = 3  # short requests in a row without an answer, after which this server is no longer asked
MOST = 2 * 1024**2  # tokens: no prompt is longer, whatever is claimed
UNCLAIMED = 262_144  # tokens: the longest prompt that is tried where nothing is claimed
ALONE = (4, 12)  # repetitions of the two requests, at least and at most
BESIDE = 8  # copies of it at once
WAVES = (1, 6)
SETTLE = 1.0  # seconds that a pair's decode half is waited for after its prefill half has refused
USUAL = 0.75  # share of calibrating runs whose logprobs have to lie within what counts as noise
STILL = (15.0, 45.0)  # seconds for the requests that look whether a server still serves
LONG_ENOUGH = 1.3  # how much longer the long prompt has to take than the short one, before a rate is believed
CLEARLY = 3.0  # how much longer it takes when a rate is good enough
FELL = 0.7  # of the time of a prompt half as long: one that takes less has not been read
RATED = 16_384  # tokens: no longer prompt is read to learn the rate
CUT_SHORT = 0.9  # of a prompt: a server that counts less than this share has not read all of it
LOOK = "look at its log"
ADVICE: Mapping[How, str] = {  # what to do about a server whose short requests end so
    "refused": "does it serve text, and is this the model (--model)?",
    "silent": "is it still loading, or stuck? Look at its log",
    "garbled": "is this the OpenAI-compatible address of the server?",
    "unreachable": "is it still running?",
    "limited": "wait, or ask for a higher limit",
}
# Where a request's penalty of repeated tokens goes. It is always sent, as none: else a model's own (vLLM reads it from generation_config.json) would
# choose tokens that are not the likeliest by the logprobs that come with them, and a near-tie would look like a leap.
PENALTY = {"vllm": "repetition_penalty", "sglang": "repetition_penalty", "llama.cpp": "repeat_penalty"}
_VOCABULARIES = ((1000, 9000), (64, 200))  # ranges of token ids that are words in most vocabularies


@dataclass(frozen=True)
class Ruler:
    """How long a prompt of `n` units is: tokens = overhead + per * n."""

    overhead: float = 0.0
    per: float = 1.0
    known: bool = True  # from the server's usage, or token ids; else assumed

    def tokens(self, units: int) -> int:
        return round(self.overhead + self.per * units)

    def units(self, tokens: int) -> int:
        return max(1, int((tokens - self.overhead) / self.per))


async def learn(
    target: Target, options: TargetOptions | None = None, progress: Callable[[str], None] = lambda what: None
) -> Learned:
    """Learn it, in about `options.learning` seconds. Raises TargetError if nothing here can be asked."""
    return await _Learning(target, options or TargetOptions(), progress).run()


class _Learning:
    """One server being learned."""

    def __init__(self, target: Target, options: TargetOptions, progress: Callable[[str], None]) -> None:
        self.target, self.progress = target, progress
        self.began, self.time = time.monotonic(), options.learning
        self.random = random.Random(f"learning {target.name}")
        self.tenants = Plant(self.random.getrandbits(32))
        self.learned = Learned(model=target.model, models=target.models)
        self.said = Said()
        self.ids: tuple[int, int] | None = None
        self.short: list[float] = []
        self.short_tokens = 0
        self.single = self.wave = 0.0  # seconds of a request alone, and of BESIDE of them at once
        self.short_bound = min(FIRST_BOUND, max(LEAST_BOUND, PATIENT * options.learning))
        self.unanswered = 0  # short requests in a row
        self.until = 0.0  # when learning the limits has to be over, on the monotonic clock
        self.served: dict[Endpoint, int] = {}  # words of the longest prompt that was answered on the way
        self.endpoints: list[Endpoint] = []  # that answer

    def left(self) -> float:
        return self.time - (time.monotonic() - self.began)

    async def run(self) -> Learned:
        learned = self.learned
        self.progress("what kind of server this is")
        self.said = await recognise(self.target)
        self.target.dialect.rid = self.said.engine == "sglang"
        self.target.dialect.penalty = PENALTY.get(self.said.engine, "")
        learned.engine, learned.version = self.said.engine, self.said.version
        learned.claimed, learned.page, learned.facts = (
            self.said.claimed,
            self.said.page,
            dict(self.said.facts),
        )
        self.progress("which endpoints there are")
        await self._endpoints()
        self.began = time.monotonic()  # a server's very first request may have loaded the model
        await self._abilities()
        self.progress("how fast it is")
        await self._speed()
        self.progress("how much its answers vary by themselves")
        await self._noise()
        await self._limits()
        self._bound()
        return learned

    # ------------------------------------------------------------------------ prompts

    def _words(self, count: int) -> str:
        """Common words, each one token in most vocabularies, never twice in the same order."""
        return " ".join(self.random.choices(COMMON, k=count))

    def _token_ids(self, count: int) -> tuple[int, ...]:
        low, high = self.ids or _VOCABULARIES[0]
        return tuple(self.random.choices(range(low, high), k=count))

    def _ask(
        self, endpoint: Endpoint, prompt: str | tuple[int, ...], max_tokens: int = 1, **more: object
    ) -> Ask:
        ask = Ask(
            tenant="learning",
            prompt=prompt,
            endpoint=endpoint,
            max_tokens=max_tokens,
            stream=self.learned.streams,
        )
        return changed(ask, **{"within": self.short_bound, **more})

    async def _short(self, ask: Ask, place: int | None = None) -> Answer:
        """Send something that any server answers at once. Raises TargetError if it has stopped doing so."""
        answer = await self.target.send(ask, place=place, settle=SETTLE)
        # What prefill has refused decode may know nothing of.
        refused = answer.prefill is not None and answer.prefill.how == "refused"
        self.unanswered = 0 if refused or answer.how in ("answered", "refused") else self.unanswered + 1
        if self.unanswered >= STOPPED:
            raise TargetError(
                f"{self.target.name} has answered, and does not any more: the last {STOPPED} short requests were {answer.how} "
                f"({_ended(answer)}); {ADVICE.get(answer.how, LOOK)}"
            )
        return answer

    @property
    def main(self) -> Endpoint:
        """The endpoint that everything but the limits is measured on."""
        return self.endpoints[0]

    # ------------------------------------------------------------------------ what there is

    async def _endpoints(self) -> None:
        """Which endpoints answer at all."""
        wanted: list[Endpoint] = ["chat", "completions"]
        if self.said.engine == "sglang":
            wanted.append("generate")
        reasons: dict[str, str] = {}
        ends = set[How]()
        for endpoint in wanted:
            answer = await self._contact(endpoint)
            if answer.how == "answered":
                self.endpoints.append(endpoint)
            else:
                reasons[endpoint] = _ended(answer)
                ends.add(answer.how)
        if not self.endpoints:
            every = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            advice = ADVICE.get(ends.pop(), LOOK) if len(ends) == 1 else LOOK
            raise TargetError(
                f"{self.target.name} answers none of the audit's requests for {self.target.model!r} ({every}); {advice}"
            )
        self.learned.endpoints = tuple(self.endpoints)
        self.learned.facts |= {f"no {name}": reason for name, reason in reasons.items()}
        for key in range(1, self.target.keys):
            self._allowed(
                await self.target.send(self._ask(self.main, "Say hello.", 4, stream=False, key=key))
            )

    async def _contact(self, endpoint: Endpoint) -> Answer:
        ask = self._ask(endpoint, "Say hello.", 4, stream=False)
        answer = await self.target.send(ask)
        if answer.how == "refused" and "max_completion_tokens" in answer.error:
            self.target.dialect.max_tokens = "max_completion_tokens"
            answer = await self.target.send(ask)
        self._allowed(answer)
        if answer.how in ("unreachable", "limited"):
            why = (
                "tells even single requests to slow down: wait, or ask for a higher limit"
                if answer.how == "limited"
                else f"cannot be reached any more ({answer.error})"
            )
            raise TargetError(f"{self.target.name} {why}")
        return answer

    def _allowed(self, answer: Answer) -> None:
        if answer.status in (401, 403):
            raise TargetError(self.target.rejected(answer.ask.key, answer.status))

    async def _abilities(self) -> None:
        """Streams, usage, logprobs, token ids."""
        learned, dialect = self.learned, self.target.dialect
        ask = self._ask(self.main, "Say hello.", 4, stream=True)
        answer = await self._short(ask)
        if answer.how == "refused" and dialect.include_usage:
            dialect.include_usage = False
            answer = await self._short(ask)
        learned.streams = answer.how == "answered" and answer.first is not None
        if not learned.streams:
            dialect.include_usage = True
            answer = await self._short(changed(ask, stream=False))
        learned.usage = bool(answer.usage.prompt)
        with_probs = await self._short(changed(ask, stream=learned.streams, logprobs=True))
        learned.logprobs = with_probs.how == "answered" and any(
            t.logprob is not None for t in with_probs.tokens
        )
        if not learned.engine:
            await self._unpenalised(changed(ask, stream=learned.streams))
        for endpoint in self.endpoints:
            if endpoint != "chat" and not learned.token_ids:
                learned.token_ids = await self._takes_ids(endpoint)

    async def _unpenalised(self, ask: Ask) -> None:
        """Whether a server that does not say what it is takes the field that most engines have: a gateway may stand before one of them."""
        field = PENALTY["vllm"]
        if (await self._short(changed(ask, extra={field: 1.0}))).how == "answered":
            self.target.dialect.penalty = field

    async def _takes_ids(self, endpoint: Endpoint) -> bool:
        for low, high in _VOCABULARIES:
            self.ids = low, high
            answer = await self._short(self._ask(endpoint, self._token_ids(40), 2))
            counted = answer.usage.prompt
            if answer.how == "answered" and (
                counted is None or 40 <= counted <= 42
            ):  # 42: with BOS and the like
                return True
        self.ids = None
        return False

    # ------------------------------------------------------------------------ how fast

    async def _speed(self) -> None:
        learned = self.learned
        for words in (24, 32, 40):
            answer = await self._short(self._ask(self.main, self._words(words), 4))
            if answer.how == "answered":
                self.short.append(_first(answer))
                self.short_tokens = answer.usage.prompt or words
        if not self.short:
            raise TargetError(f"{self.target.name} answered once and does not any more: look at its log")
        learned.first = median(self.short)
        await self._prefill()
        await self._words_of_ours()

    async def _prefill(self) -> None:
        """Prompt tokens a second: the best slope between short prompts and longer ones, each twice as long as the one before,
        until one takes clearly longer. A server for which longer prompts take less time does not read them: those say nothing
        of its rate, and are noted."""
        most = max(64, min(self.learned.claimed or 4096, 2 * RATED) // 2)
        words, before = 64, 0.0
        while words <= most and (self.learned.prefill is None or self.left() > 0.6 * self.time):
            answers = [await self._short(self._ask(self.main, self._words(words), 1)) for _ in range(2)]
            if not all(answer.how == "answered" for answer in answers):
                return
            if min(answer.usage.prompt or words for answer in answers) < CUT_SHORT * words:
                return  # such prompts are answered, and not read whole
            self.served[self.main] = words
            took = min(_first(answer) for answer in answers)
            if took < FELL * before and before > LONG_ENOUGH * max(self.short):
                self.learned.facts["longer prompts are faster"] = (
                    f"{words // 2} words took {before:.2f} s, and {words} words {took:.2f} s"
                )
                return
            for answer in answers:
                self._rate(answer.usage.prompt or words, _first(answer))
            if took > CLEARLY * max(self.short) + 0.1:
                return
            words, before = 2 * words, took

    def _rate(self, tokens: int, seconds: float) -> None:
        """One more point for the slope."""
        more, longer = tokens - self.short_tokens, seconds - min(self.short)
        if more > 0 and seconds > LONG_ENOUGH * max(self.short) and longer > 0:
            self.learned.prefill = max(self.learned.prefill or 0.0, more / longer)

    async def _words_of_ours(self) -> None:
        """Tokens a word of the audit's own prompts, by the server's usage."""
        if not self.learned.usage:
            return
        sizes = []
        for words in (20, 220):
            prompt = self.tenants.tenant(self.random).filler(words)
            answer = await self._short(self._ask(self.main, prompt, 1))
            if answer.how != "answered" or not answer.usage.prompt:
                return
            sizes.append((len(prompt.split()), answer.usage.prompt))
        (words, tokens), (more_words, more_tokens) = sizes
        if more_tokens > tokens:
            self.learned.tokens_per_word = (more_tokens - tokens) / (more_words - words)

    # ------------------------------------------------------------------------ how much it varies

    async def _noise(self) -> None:
        """Two requests alone again and again, then beside copies of themselves: one whose tokens are all but sure, as in most
        that the audit compares, and one whose tokens are not, which arithmetic moves most."""
        tenant = self.tenants.tenant(self.random)
        asks = [
            self._ask(self.main, prompt, 24, logprobs=self.learned.logprobs)
            for prompt in (tenant.copy_task(60), tenant.story(60))
        ]
        until = time.monotonic() + 0.1 * self.time
        firsts = [await self._short(ask) for ask in asks]
        self.single = max(first.seconds for first in firsts)
        alone: list[Answer] = []
        for number in range(ALONE[1]):
            if number < ALONE[0] or time.monotonic() < until:
                alone.append(await self._short(asks[number // 2 % len(asks)]))
        repeats = [[again for again in alone if again.ask == first.ask] for first in firsts]
        self.learned.counts_cached = not all(map(leaves_out, firsts, repeats))
        until, beside = time.monotonic() + 0.15 * self.time, []
        for wave in range(WAVES[1]):
            if wave < WAVES[0] or time.monotonic() < until:
                began = time.monotonic()
                crowd = [asks[number % len(asks)] for number in range(BESIDE)]
                beside += await asyncio.gather(*(self.target.send(ask, settle=SETTLE) for ask in crowd))
                self.wave = max(self.wave, time.monotonic() - began)
        self.learned.noise = _together(
            measure(first, again, [answer for answer in beside if answer.ask == first.ask])
            for first, again in zip(firsts, repeats, strict=True)
        )

    # ------------------------------------------------------------------------ limits

    async def _limits(self) -> None:
        """The edge of every endpoint on every server; of several servers, what all take and what none takes."""
        self.learned.facts["edge_max_tokens"] = 1
        self.until = time.monotonic() + max(self.left(), 0.75 * self.time)
        hints = list(dict.fromkeys(self.said.hints))
        for endpoint in self.endpoints:
            found: Edge | None = None
            for place in range(self.target.places):
                edge = await self._limit(endpoint, place, hints)
                if edge is None:
                    break
                hints = [edge.accepted, edge.accepted + 1, *hints]
                found = edge if found is None else _both(found, edge)
            if found is not None:
                self.learned.edges[endpoint] = found
            if "stuck" in self.learned.facts:
                return

    async def _limit(self, endpoint: Endpoint, place: int, hints: Sequence[int]) -> Edge | None:
        ids = self.learned.token_ids and endpoint != "chat"
        ruler = Ruler() if ids else await self._ruler(endpoint, place)
        if ruler is None:
            return None
        learned = self.learned
        top = max(hints, default=0)
        longest = ruler.units(min(MOST, 4 * top) if top else UNCLAIMED)
        start = ruler.units(top + 4 * (learned.page or 16)) if top else ruler.units(2048)
        tried: dict[int, Answer] = {}

        async def probe(units: int) -> Tried:
            self.progress(f"the longest prompt that {endpoint} takes: trying {ruler.tokens(units)} tokens")
            prompt = self._token_ids(units) if ids else self._words(units)
            ask = self._ask(endpoint, prompt, 1, within=self._patience(ruler.tokens(units)))
            answer = await self.target.send(ask, place=place, settle=SETTLE)
            tried[units] = answer
            return await self._verdict(answer, ruler.tokens(units) if ruler.known else None)

        def can(units: int) -> str:
            if "stuck" in learned.facts:
                return "the server does not serve any more"
            tokens = ruler.tokens(units)
            if learned.claimed and tokens >= learned.claimed > ruler.tokens(1) and units not in tried:
                return ""  # it should be refused, and that costs nothing
            cost, left = tokens / learned.prefill if learned.prefill else 0.0, self.until - time.monotonic()
            if cost > max(10.0, left):
                return f"a prompt of {tokens} tokens takes about {cost:.0f} s here, more than there is for learning"
            return "" if left > 0 else "there was no more time for learning"

        def told(said: str) -> list[int]:
            return [
                ruler.units(n + more) for n in numbers(said) for more in (0, -1, 1) if 64 < n + more < MOST
            ]

        units = [ruler.units(hint) for hint in hints]
        good = 40 if ids else self.served[endpoint]
        search = await find_edge(probe, good, start, longest, units, told, can)
        await self._reach(search, ruler, probe)
        edge = search.edge(ruler.tokens)
        await self._around(endpoint, search, ruler, probe, can)
        self._note(endpoint, place, search, ruler, tried)
        return edge

    async def _ruler(self, endpoint: Endpoint, place: int) -> Ruler | None:
        """Measured with two prompts. Without usage: a token a word, which is noted."""
        counts = []
        for words in (40, 140):
            answer = await self._short(self._ask(endpoint, self._words(words), 1), place=place)
            if answer.how != "answered":
                return None
            counts.append(answer.usage.prompt)
            self.served[endpoint] = max(words, self.served.get(endpoint, 0))
        short, long = counts
        if short is None or long is None or long <= short:
            self.learned.facts["edges in words"] = "this server counts no tokens, so lengths are words"
            return Ruler(known=False)
        per = (long - short) / 100
        return Ruler(overhead=short - 40 * per, per=per)

    async def _verdict(self, answer: Answer, sent: int | None) -> Tried:
        """Accepted, refused, or neither; after neither, whether the server still serves. `sent`: tokens, if known."""
        counted = answer.usage.prompt
        if answer.how == "answered":
            if sent is not None and counted is not None and counted < CUT_SHORT * sent:
                return Tried("cut short", f"only {counted} of {sent} tokens were read")
            return Tried("accepted")
        refusal = answer if answer.how == "refused" or answer.prefill is None else answer.prefill
        if refusal.how in ("refused", "failed") and refusal.error:
            if answer.how == "silent":
                self.learned.facts["decode waits after a refusal"] = refusal.error
            if refusal.how == "failed":
                await self._still_serves(answer)
            return Tried("refused", refusal.error)
        self._allowed(answer)
        if answer.how == "limited":
            return Tried("unknown", f"the server tells the audit to slow down: {answer.error}")
        await self._still_serves(answer)
        return Tried("silent", answer.error)

    async def _still_serves(self, silent: Answer) -> None:
        for within in STILL:
            answer = await self.target.send(self._ask(self.main, "Say hello.", 1, within=within))
            if answer.how == "answered":
                return
        self.learned.facts["stuck"] = (
            f"after a prompt of {_sent(silent)} tokens ({silent.how}) it served nothing any more"
        )

    async def _reach(self, search: Search, ruler: Ruler, probe: Callable[[int], Awaitable[Tried]]) -> None:
        """Where there was no time for the edge: at least a longer prompt than the short ones, of about 5 s."""
        units = ruler.units(int(5.0 * (self.learned.prefill or 400.0)))
        top = min([*search.silent, search.end or units + 1])
        if search.why and "stuck" not in self.learned.facts and 2 * search.accepted < units < top:
            tried = await probe(units)
            if tried.verdict == "accepted":
                search.accepted = units

    async def _around(
        self,
        endpoint: Endpoint,
        search: Search,
        ruler: Ruler,
        probe: Callable[[int], Awaitable[Tried]],
        can: Callable[[int], str],
    ) -> None:
        """A page beyond the edge: rounding up to pages must not open what was closed."""
        if search.refused is None or search.why:
            return
        page = self.learned.page or 16
        for tokens in (ruler.tokens(search.refused) + page - 1, ruler.tokens(search.refused) + page):
            units = ruler.units(tokens)
            if units > search.refused and not can(units):
                tried = await probe(units)
                if tried.verdict != "refused":
                    self.learned.facts[f"{endpoint} beyond its edge"] = f"{tokens} tokens: {tried.verdict}"

    def _note(
        self, endpoint: Endpoint, place: int, search: Search, ruler: Ruler, tried: dict[int, Answer]
    ) -> None:
        where = endpoint if self.target.places == 1 else f"{endpoint} of {self.target.address.servers[place]}"
        self.learned.facts[f"{where} probes"] = search.probes
        if search.why:
            self.learned.facts[f"{where} edge"] = search.why
        if search.cut_short is not None:
            self.learned.facts[f"{where} cuts prompts short"] = (
                f"from {ruler.tokens(search.cut_short)} tokens on: {tried[search.cut_short].usage.prompt} are read"
            )
        counted = tried[search.accepted].usage.prompt if search.accepted in tried else None
        if counted is not None and ruler.known and counted != ruler.tokens(search.accepted):
            self.learned.facts[f"{where} counts"] = f"{ruler.tokens(search.accepted)} tokens as {counted}"

    def _patience(self, tokens: int) -> float:
        """Seconds within which a prompt of so many tokens has to be answered, when nothing else runs."""
        prefill = self.learned.prefill
        return max(15.0, SLOWER * (max(self.short) + (tokens / prefill if prefill else 5.0)) + 5.0)

    def _bound(self) -> None:
        """For any request of the audit: the longest prompt, or 64 requests at once, with plenty to spare. Eight times as many
        take as much longer again as the first eight did."""
        longest = max((edge.accepted for edge in self.learned.edges.values()), default=512)
        slower = min(float(BESIDE), max(1.5, self.wave / self.single)) if self.single else float(BESIDE)
        crowd = self.wave * slower ** (math.log(64 / BESIDE) / math.log(BESIDE))
        self.learned.bound = min(600.0, max(30.0, self._patience(longest), 1.5 * crowd + 5.0))


# ------------------------------------------------------------------------------------ small readers


def leaves_out(first: Answer, again: Sequence[Answer]) -> bool:
    """Whether at least half of the repeats of a request count fewer tokens of prompt than it did: those from a cache are not
    counted then. (With room for one conversation in it, a repeat right behind another request finds nothing there.)"""
    counts = [answer.usage.prompt for answer in again if answer.usage.prompt is not None]
    before = first.usage.prompt or 0
    return bool(counts) and 2 * sum(count < before for count in counts) >= len(counts)


def measure(first: Answer, alone: Sequence[Answer], beside: Sequence[Answer]) -> Noise:
    """How much answers to one request differ from each other. Those that were not answered do not count.

    A server that leaks now and then may do so here as well. So what counts is what USUAL of the answers stay within, and they are compared with the
    one of those asked alone that is nearest to the others."""
    if first.how != "answered":
        return Noise()
    kept = [[answer for answer in some if answer.how == "answered"] for some in ([first, *alone], beside)]
    return min(
        (_from(one, [a for a in kept[0] if a is not one], kept[1]) for one in kept[0]),
        key=lambda noise: (noise.alone_differ + noise.beside_differ, noise.logprob_error or 0.0),
    )


def _from(one: Answer, alone: Sequence[Answer], beside: Sequence[Answer]) -> Noise:
    """How much others differ from this answer."""
    gaps = [[gap for answer in some if (gap := _gap(one, answer)) is not None] for some in (alone, beside)]
    return Noise(
        alone_runs=len(alone),
        alone_differ=sum(answer.text != one.text for answer in alone),
        beside_runs=len(beside),
        beside_differ=sum(answer.text != one.text for answer in beside),
        logprob_error=max(
            (sorted(some)[int(USUAL * (len(some) - 1))] for some in gaps if some), default=None
        ),
        logprob_largest=max((gap for some in gaps for gap in some), default=None),
    )


def _together(parts: Iterable[Noise]) -> Noise:
    """What was measured on several requests, as one."""
    some = list(parts)
    return Noise(
        alone_runs=sum(one.alone_runs for one in some),
        alone_differ=sum(one.alone_differ for one in some),
        beside_runs=sum(one.beside_runs for one in some),
        beside_differ=sum(one.beside_differ for one in some),
        logprob_error=max((one.logprob_error for one in some if one.logprob_error is not None), default=None),
        logprob_largest=max(
            (one.logprob_largest for one in some if one.logprob_largest is not None), default=None
        ),
    )


def _gap(one: Answer, other: Answer) -> float | None:
    """The largest difference of a logprob over the common beginning, in nats."""
    largest: float | None = None
    for ours, theirs in zip(one.tokens, other.tokens, strict=False):
        if ours.text != theirs.text:
            break
        if ours.logprob is not None and theirs.logprob is not None:
            largest = max(largest or 0.0, abs(ours.logprob - theirs.logprob))
    return largest


def _ended(answer: Answer) -> str:
    """How it ended, in a few words."""
    said = answer.error or " ".join(answer.excerpt[:120].split())
    if answer.how == "silent":
        return f"neither an answer nor an error within {answer.ask.within:g} s"
    status = f"{answer.how}, status {answer.status}" if answer.status else answer.how
    return f"{status}: {said}" if said else status


def _first(answer: Answer) -> float:
    return answer.first if answer.first is not None else answer.seconds


def _sent(answer: Answer) -> int:
    prompt = answer.ask.prompt
    return answer.usage.prompt or len(prompt if isinstance(prompt, tuple) else prompt.split())


def _both(one: Edge, other: Edge) -> Edge:
    """Of two servers: what both take, and what neither does."""
    refused = None if None in (one.refused, other.refused) else max(one.refused or 0, other.refused or 0)
    return Edge(
        min(one.accepted, other.accepted),
        refused,
        tuple(sorted({*one.silent, *other.silent})),
        min((cut for cut in (one.cut, other.cut) if cut is not None), default=None),
        one.said or other.said,
    )


__all__ = ["Ruler", "learn", "leaves_out", "measure"]
