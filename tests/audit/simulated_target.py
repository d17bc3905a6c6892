"""A server in the test process for scenarios: it copies what it is told to copy, refuses what does not fit, and waits for nobody.

Deterministic; tokens are counted by a plain rule; times are invented, not measured. The leaky ones each break one thing.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hermetic.audit.exchange import Answer, Ask, Token, Usage
from hermetic.audit.learned import Edge, Learned
from hermetic.audit.markers import Plant
from hermetic.audit.scenarios import SCENARIOS
from hermetic.audit.stage import Size, Stage

LIMIT, PAGE = 600, 16
TINY = Size(rounds=3, at_once=(4, 8), requests=8, seconds=0.3)


def pieces(prompt: str | tuple[int, ...]) -> list[str]:
    """The tokens of this server: runs of letters, digits, and other characters that are no space."""
    return (
        [str(i) for i in prompt]
        if not isinstance(prompt, str)
        else re.findall(r"[^\W\d_]+|\d+|[^\s\w]|_", prompt)
    )


class Clean:
    """In order. `send` lets others in between, so that requests sent together are in flight together."""

    limit = LIMIT

    def __init__(self) -> None:
        self.number = 0
        self.asked: list[Ask] = []
        self.open: list[Ask] = []
        self.most_open = 0
        self.cached: set[tuple[Any, ...]] = set()
        self.company: dict[
            int, int
        ] = {}  # by number, how many were in flight when it came, itself among them
        self.now = 0  # the number of the request that is being answered

    async def send(self, ask: Ask) -> Answer:
        self.number += 1
        number = self.number
        self.asked.append(ask)
        self.open.append(ask)
        self.company[number] = len(self.open)
        self.most_open = max(self.most_open, len(self.open))
        try:
            for _ in range(3):
                await asyncio.sleep(0)
            self.now = number
            answer = self.answer(ask, number)
        finally:
            self.open.remove(ask)
        self.after(ask, answer)
        return answer

    def answer(self, ask: Ask, number: int) -> Answer:
        tokens = len(pieces(ask.prompt)) + len(pieces(ask.system))
        if ask.raw is not None and not _sane(ask.raw, ask.endpoint):
            return self.made(ask, number, how="refused", status=400, error="not a request")
        if not self.fits(ask, tokens):
            return self.made(
                ask, number, how="refused", status=400, error=f"{tokens} tokens do not fit {self.limit}"
            )
        if _broken(ask.extra):
            return self.made(ask, number, how="refused", status=400, error="the grammar does not compile")
        if ask.leave_seconds is not None or (ask.leave_tokens or 99) < ask.max_tokens:
            return self.made(ask, number, how="left")
        return self.said(ask, number, self.text(ask), tokens)

    def fits(self, ask: Ask, tokens: int) -> bool:
        return tokens <= self.limit

    def scope(self, ask: Ask) -> tuple[Any, ...]:
        return (ask.key, ask.extra.get("cache_salt"))

    def said(self, ask: Ask, number: int, text: str, tokens: int) -> Answer:
        seen = (*self.scope(ask), ask.system, ask.prompt)
        first = 0.01 if seen in self.cached else 0.01 + tokens / 1000
        self.cached.add(seen)
        words = re.findall(r"\S+\s*", text)[: ask.max_tokens]
        return self.made(
            ask, number, how="answered", status=200, text="".join(words), tokens=[Token(w, first) for w in words],
            first=first, seconds=first + 0.01 * len(words), finish="stop",
            usage=Usage(tokens, len(words)),
        )  # fmt: skip

    def made(self, ask: Ask, number: int, **fields: Any) -> Answer:
        return Answer(ask=ask, number=number, sent=float(number), **fields)

    def text(self, ask: Ask) -> str:
        return reply(ask.prompt, ask.extra)

    def after(self, ask: Ask, answer: Answer) -> None:
        """For leaky ones: what is left behind."""


def reply(prompt: str | tuple[int, ...], extra: Mapping[str, Any] | None = None) -> str:
    """What a good model says: it copies lines, letters and words of a schema; else a few words that depend on the prompt."""
    schema = (extra or {}).get("response_format")
    if isinstance(schema, dict) and "json_schema" in schema:
        return json.dumps({"word": schema["json_schema"]["schema"]["properties"]["word"]["enum"][0]})
    text = prompt if isinstance(prompt, str) else ""
    for pattern in (r"Line: (.+)", r"(?:once more|Say this again): (.+)", r"and nothing else\.\n(.+)\n.+\n"):
        found = re.findall(pattern, text)
        if found:
            return (found[-1] + "\n") * 8 if "again and again" in text else found[-1]
    letter = re.search(r"single letter ([A-Z]) ", text)
    if letter:
        return letter[1]
    digest = hashlib.sha256(repr(prompt).encode()).hexdigest()
    return " ".join(re.findall("..", digest))


def _sane(raw: bytes, endpoint: str) -> bool:
    try:
        value = json.loads(raw.decode())
    except (ValueError, RecursionError):
        return False
    if not isinstance(value, dict) or not isinstance(value.get("max_tokens", 1), int):
        return False
    if not isinstance(value.get("temperature", 0), int | float):
        return False
    return (
        isinstance(value.get("messages"), list)
        if endpoint == "chat"
        else isinstance(value.get("prompt"), str)
    )


def _broken(extra: Mapping[str, Any]) -> bool:
    form = extra.get("response_format")
    good = isinstance(form, dict) and form.get("json_schema", {}).get("strict") is True
    wrong = {
        "structured_outputs",
        "guided_regex",
        "guided_json",
        "regex",
        "ebnf",
        "json_schema",
        "grammar",
        "logit_bias",
    }
    return (form is not None and not good) or bool(wrong & extra.keys()) or extra.get("stop") == [""]


LEARNED = Learned(
    model="simulated", engine="vllm", endpoints=("chat", "completions"), token_ids=True, claimed=LIMIT, page=PAGE,
    edges={e: Edge(accepted=LIMIT, refused=LIMIT + 1) for e in ("chat", "completions")},
    tokens_per_word=1.6, prefill=1e5, first=0.001, bound=1.0,
)  # fmt: skip


@dataclass
class Recorder:
    """A judge that keeps what it is told."""

    answers: list[Answer] = field(default_factory=list)
    sames: list[tuple[Answer, Answer, str]] = field(default_factory=list)
    contrasts: list[Mapping[str, Sequence[Answer]]] = field(default_factory=list)
    refusals: list[tuple[Answer, int, str]] = field(default_factory=list)
    serves: list[tuple[Answer, str]] = field(default_factory=list)
    expected: list[tuple[Answer, str, tuple[str, ...], str]] = field(default_factory=list)
    timings: list[tuple[Sequence[float], Sequence[float], Sequence[float]]] = field(default_factory=list)

    def seen(self, scenario: str, answer: Answer) -> None:
        self.answers.append(answer)

    def same(self, scenario: str, alone: Answer, again: Answer, why: str) -> None:
        self.sames.append((alone, again, why))

    def contrast(self, scenario: str, after: Mapping[str, Sequence[Answer]], why: str) -> None:
        self.contrasts.append(after)

    def must_refuse(self, scenario: str, answer: Answer, tokens: int, why: str) -> None:
        self.refusals.append((answer, tokens, why))

    def must_serve(self, scenario: str, answer: Answer, why: str) -> None:
        self.serves.append((answer, why))

    def expects(self, scenario: str, answer: Answer, own: str, others: Any, why: str) -> None:
        self.expected.append((answer, own, tuple(others), why))

    def timing(self, scenario: str, after_other: Any, after_nobody: Any, after_self: Any, why: str) -> None:
        self.timings.append((after_other, after_nobody, after_self))


@dataclass
class Seen:
    """What a plain judge makes of a recording, by kind of evidence: no statistics, the server has no noise."""

    marker: list[Any]
    differential: list[Any]
    contrast: list[Any]
    semantics: list[Any]
    liveness: list[Any]
    timing: list[Any]

    def kinds(self) -> set[str]:
        return {name for name, found in vars(self).items() if found}


def judged(record: Recorder, plant: Plant) -> Seen:
    owner = {code: tenant.name for tenant in plant.tenants for code in tenant.codes}
    pairs = [
        (" ".join(pair), tenant.name)
        for tenant in plant.tenants
        for pair in zip(tenant.words, tenant.words[1:], strict=False)
    ]
    often = Counter(pair for pair, _ in pairs)  # of hundreds of tenants two may have drawn the same two words
    owner |= {pair: name for pair, name in pairs if often[pair] == 1}

    def whose(answer: Answer) -> set[str]:
        text = f" {' '.join(answer.text.split())} "  # whole words: "ash unit" is no part of "crash united"
        return {name for marker, name in owner.items() if f" {marker} " in text} - {answer.ask.tenant}

    def differ(one: Answer, two: Answer) -> bool:
        return "answered" in (one.how, two.how) and (one.how, one.text[: len(two.text)]) != (
            two.how, two.text[: len(one.text)],
        )  # fmt: skip

    wrong = [
        (a, own)
        for a, own, others, _ in record.expected
        if own not in a.text and any(o in a.text for o in others)
    ]
    return Seen(
        marker=[a for a in record.answers if whose(a)] + wrong,
        differential=[pair for pair in record.sames if pair[0].ask.endpoint and differ(*pair[:2])],
        contrast=[
            c for c in record.contrasts if len({frozenset(a.text for a in some) for some in c.values()}) > 1
        ],
        semantics=[a for a, _, _ in record.refusals if a.how == "answered"],
        liveness=[a for a, _ in record.serves if a.how != "answered"]
        + [a for a in record.answers if a.how == "silent"],
        timing=[t for t in record.timings if sum(t[0]) / len(t[0]) < 0.6 * sum(t[1]) / len(t[1])],
    )


@dataclass
class Show:
    record: Recorder
    seen: Seen
    target: Clean
    stage: Stage


async def play(
    name: str, target: Clean, learned: Learned = LEARNED, size: Size = TINY, seed: int = 1, keys: int = 1,
    left: float = 1000.0,
) -> Show:  # fmt: skip
    """Play one scenario to its end."""
    record, plant = Recorder(), Plant(seed)
    stage = Stage(name, target, learned, plant, record, size, seed, lambda: left, keys)
    stage.pause = lambda seconds: asyncio.sleep(0)  # type: ignore[method-assign]
    async with asyncio.timeout(60):
        await SCENARIOS[name].play(stage)
    return Show(record, judged(record, plant), target, stage)


# ------------------------------------------------------------------------------------ leaky ones


class Sometimes(Clean):
    """Answers one request in `every` with the text of another that was asked before and is not its own."""

    every = 5

    def victim(self, ask: Ask, among: Sequence[Ask]) -> Ask | None:
        return next(
            (a for a in reversed(among) if a.tenant != ask.tenant and isinstance(a.prompt, str)), None
        )

    def leaks(self, ask: Ask) -> bool:
        return self.now % self.every == 0

    def text(self, ask: Ask) -> str:
        other = self.victim(ask, self.asked[:-1]) if self.leaks(ask) else None
        return super().text(ask) if other is None else reply(other.prompt, other.extra)


class RowsSwapped(Sometimes):
    """A batch row swapped: only when others are in flight."""

    def text(self, ask: Ask) -> str:
        other = self.victim(ask, self.open) if self.now % 3 == 0 else None
        return Clean.text(self, ask) if other is None else reply(other.prompt, other.extra)


class HitTooLong(Sometimes):
    """A prefix hit goes on into the former prompt's own part."""

    def text(self, ask: Ask) -> str:
        begin = pieces(ask.prompt)[:PAGE]
        alike = [
            a
            for a in self.asked
            if a.tenant != ask.tenant and pieces(a.prompt)[:PAGE] == begin and len(begin) == PAGE
        ]
        return reply(alike[0].prompt) if alike else Clean.text(self, ask)


class AfterAbort(Sometimes):
    """Whoever comes after one that left reads what it left."""

    left: Ask | None = None

    def after(self, ask: Ask, answer: Answer) -> None:
        if answer.how == "left":
            self.left = ask

    def text(self, ask: Ask) -> str:
        left, self.left = self.left, None
        return Clean.text(self, ask) if left is None or left.tenant == ask.tenant else reply(left.prompt)


class IdMeansSlot(Sometimes):
    """A request id that was used before means the former request."""

    def text(self, ask: Ask) -> str:
        former = [a for a in self.asked if a.request_id and a.request_id == ask.request_id]
        return reply(former[0].prompt) if former else Clean.text(self, ask)


class IdOutlives(Sometimes):
    """The same, when the former request is over and nothing else is in flight."""

    def text(self, ask: Ask) -> str:
        former = [a for a in self.asked[:-1] if a.request_id and a.request_id == ask.request_id]
        return reply(former[0].prompt) if former and len(self.open) == 1 else Clean.text(self, ask)


class Placeholder(Sometimes):
    """The incident: what does not fit is answered from what was there."""

    def fits(self, ask: Ask, tokens: int) -> bool:
        return True

    def leaks(self, ask: Ask) -> bool:
        return len(pieces(ask.prompt)) > self.limit


class Advertised(Sometimes):
    """The incident as it was: the limit is one that is only advertised, and what the smaller pool cannot hold is not read."""

    def leaks(self, ask: Ask) -> bool:
        return len(pieces(ask.prompt)) > self.limit // 3


class Truncates(Clean):
    """What does not fit is cut, and answered."""

    def fits(self, ask: Ask, tokens: int) -> bool:
        return True


class RefusesChatOnly(Truncates):
    """The limit is kept on one endpoint, and only for streams."""

    def fits(self, ask: Ask, tokens: int) -> bool:
        return tokens <= self.limit or (ask.endpoint == "completions" and not ask.stream)


class FirstTokens(Sometimes):
    """First tokens go to another row now and then."""

    def text(self, ask: Ask) -> str:
        other = self.victim(ask, self.open) if ask.max_tokens <= 2 and self.now % 4 == 0 else None
        return Clean.text(self, ask) if other is None else reply(other.prompt)


class ShortRead(Sometimes):
    """A prompt of next to nothing reads on in the page of whoever came before."""

    def leaks(self, ask: Ask) -> bool:
        return ask.raw is None and len(pieces(ask.prompt)) <= 2


class WhoCameBefore(Clean):
    """The same, but so garbled that no marker shows."""

    def text(self, ask: Ask) -> str:
        if len(pieces(ask.prompt)) > 2 or len(self.asked) < 2:
            return Clean.text(self, ask)
        return hashlib.sha256(self.asked[-2].tenant.encode()).hexdigest()


class StuckAtEdge(Clean):
    """The longest prompt that is accepted is never answered, and nobody after it."""

    stuck = False

    def answer(self, ask: Ask, number: int) -> Answer:
        self.stuck = self.stuck or len(pieces(ask.prompt)) == self.limit
        return self.made(ask, number, how="silent") if self.stuck else super().answer(ask, number)


class OneCache(Clean):
    """The prefix cache is everybody's."""

    def scope(self, ask: Ask) -> tuple[Any, ...]:
        return ()


class BadRestore(Clean):
    """A prompt that comes back after much else is restored wrongly."""

    def text(self, ask: Ask) -> str:
        places = [i for i, a in enumerate(self.asked) if a.prompt == ask.prompt]
        gap = sum(len(pieces(a.prompt)) for a in self.asked[places[0] : places[-1]])
        return "restored " + Clean.text(self, ask) if gap > 1500 else Clean.text(self, ask)


class FullHitAtEdge(Clean):
    """A full hit that ends with a page computes nothing, and answers something else."""

    def text(self, ask: Ask) -> str:
        hit = (
            len(pieces(ask.prompt)) % PAGE == 0 and (*self.scope(ask), ask.system, ask.prompt) in self.cached
        )
        return "skipped " + Clean.text(self, ask) if hit else Clean.text(self, ask)


class Rooms(Sometimes):
    """A forged room is somebody's."""

    def leaks(self, ask: Ask) -> bool:
        return "bootstrap_room" in ask.extra


class AfterBad(Clean):
    """A body or grammar that is refused leaves something to the next."""

    bad = False

    def text(self, ask: Ask) -> str:
        bad, self.bad = self.bad, False
        return "null " + Clean.text(self, ask) if bad else Clean.text(self, ask)

    def after(self, ask: Ask, answer: Answer) -> None:
        self.bad = self.bad or answer.how == "refused"


class Deduplicates(Clean):
    """Requests of the same bytes in flight get one slot, which loses a token."""

    def text(self, ask: Ask) -> str:
        twins = sum(a.prompt == ask.prompt for a in self.open)
        return Clean.text(self, ask)[2:] if twins > 1 else Clean.text(self, ask)


class LongerBefore(Clean):
    """A prompt right after a longer one goes on with that one's end."""

    def text(self, ask: Ask) -> str:
        before = self.asked[-2] if len(self.asked) > 1 else ask
        longer = len(pieces(before.prompt)) > len(pieces(ask.prompt)) and before.tenant != ask.tenant
        return reply(before.prompt) if longer else Clean.text(self, ask)


class DeadAfterStorm(Clean):
    """Many cancels in a row leave nothing to serve with."""

    row = 0

    def answer(self, ask: Ask, number: int) -> Answer:
        answer = super().answer(ask, number)
        self.row = self.row + 1 if answer.how == "left" else self.row
        return self.made(ask, number, how="silent") if self.row >= 8 and answer.how != "left" else answer


class Drifts(Clean):
    """After a hundred requests the answers change."""

    def text(self, ask: Ask) -> str:
        return ("late " if self.now > 100 else "") + Clean.text(self, ask)


class Crowded(Clean):
    """Who is not alone is answered otherwise."""

    def text(self, ask: Ask) -> str:
        return ("beside " if self.company[self.now] > 1 else "") + Clean.text(self, ask)


class Overfull(Sometimes):
    """With more than four in flight pages are given twice."""

    def leaks(self, ask: Ask) -> bool:
        return len(self.open) > 4


class Waited(Clean):
    """Who comes when the pool is full waits, and is answered otherwise then; not who was served before."""

    def text(self, ask: Ask) -> str:
        new = sum(a.prompt == ask.prompt for a in self.asked) == 1
        return ("waited " if new and self.company[self.now] > 4 else "") + Clean.text(self, ask)
