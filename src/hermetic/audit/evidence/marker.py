"""Evidence by markers: an answer that holds what was planted for somebody else.

The one thing to know: every answer is looked at for every tenant's markers, so chance has many tries. Tenants near in time (active or
drawn lately, `NEAR` of each) and all others have half of the error each: a leak is most often of a neighbour, and the audit does not
lose its eye for that as tenants add up. What is said of a pair of answer and tenant stands in planted.py.

Three questions are asked, with shares of the error: of each pair, does the answer hold more than chance allows (0.9); over the whole run, do
answers hold single words of their neighbours, or halves of their codes, more often than chance allows (0.04 each), which finds a server that leaks a
little at a time (excess.py); and of answers known in advance, is another's given more often beside others than when asked alone (0.02)?
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hermetic.audit.chance import bonferroni, fisher_exact
from hermetic.audit.evidence.differential import MOVED, ahead
from hermetic.audit.evidence.excess import PIECES_OF_CODES, SINGLE_WORDS, Excess
from hermetic.audit.evidence.gathering import ERROR, SHARES, SHOWN, covered
from hermetic.audit.evidence.planted import Book, Match, Own, anything, foreign
from hermetic.audit.evidence.reading import SHORTEST, read
from hermetic.audit.exchange import Answer
from hermetic.audit.markers import Plant, Tenant
from hermetic.audit.result import Coverage, Finding, Highlight

NEAR = 64  # tenants active last, and as many drawn last
SHARE_NEAR, SHARE_FAR, SHARE_EXCESS, SHARE_EXPECTED = 0.45, 0.45, 0.04, 0.02  # of the share of this evidence
COUNTED = 20_000  # matches of one scenario whose chance is kept
SURELY, QUIET = 2, 8  # swapped answers far from a tie, and answers alone, that are enough for a finding
KEPT_BYTES = 16_000_000  # of victims' last requests, to be shown beside
_SAID = re.compile(r"\w+")


def read_text(answer: Answer) -> str:
    """Everything in an answer that could hold a marker; `Answer.text` comes first, so that places in it stay."""
    half = answer.prefill
    parts = [answer.text, answer.error, *((half.text, half.error) if half else ())]
    text = "\n".join(part for part in parts if part)
    # Of what cannot be read as an answer only a little stands in the error.
    return f"{text}\n{answer.excerpt}" if answer.how == "garbled" else text or answer.excerpt


@dataclass
class _Seen:
    """The matches of one scenario: their chances with their side (near or not), and the best of them with what they show."""

    chances: list[tuple[float, bool]] = field(default_factory=list)
    best: list[tuple[float, bool, Answer, Match, Answer | None]] = field(default_factory=list)

    def add(self, p: float, near: bool, answer: Answer, match: Match, victim: Answer | None) -> None:
        if len(self.chances) < COUNTED:
            self.chances.append((p, near))
        self.best.append((p, near, answer, match, victim))
        self.best.sort(key=lambda one: one[:2])
        del self.best[SHOWN // 2 :]


class _Read:
    """An answer, read: what it holds that its request does not."""

    def __init__(self, answer: Answer, asker: Tenant | None) -> None:
        self.own = Own(asker, answer.ask)
        self.reading = read(read_text(answer))
        self.words, self.parts = foreign(self.reading, self.own)
        self.halves = {
            row
            for row in self.reading.syllables
            if row not in self.own.windows and not self.own.has_syllables(row)
        }
        self.anything = anything(self.reading, self.own, self.parts)


class _Search:
    """The looking-for of one set of tenants: those who ask, or the decoys. Both go through just the same."""

    def __init__(self, drawn: deque[Tenant]) -> None:
        self.book = Book(drawn)
        self.near_pairs = self.far_pairs = 0
        self.words, self.codes = Excess(SINGLE_WORDS), Excess(PIECES_OF_CODES)
        self.seen: dict[str, _Seen] = defaultdict(_Seen)
        self.least = 1.0

    def corrected(self, p: float, near: bool) -> float:
        """`p` of a pair, corrected for all pairs of its side until now."""
        pairs, share = (self.near_pairs, SHARE_NEAR) if near else (self.far_pairs, SHARE_FAR)
        return bonferroni(p, max(1, pairs), share * SHARES["marker"])

    def look(self, scenario: str, answer: Answer, near: set[int], read_: _Read, victims: _Recent) -> None:
        self.book.catch_up()
        own, asker = read_.own, read_.own.asker.number if read_.own.asker else -1
        near = {n for n in near if n in self.book.by_number and n != asker}
        if read_.anything:
            self.near_pairs += len(near)
            self.far_pairs += len(self.book.by_number) - len(near)
            for match in self.book.matches(read_.reading, own, read_.words, read_.parts):
                self._match(scenario, answer, match, match.tenant.number in near, victims)
        neighbours = [self.book.by_number[number] for number in near]
        for tenant, word in self.words.add(asker, neighbours, read_.words):
            spans = read_.reading.words[word]
            self.words.show(scenario, answer, tenant, word, spans, victims.get(tenant.name))
        for tenant, row in self.codes.add(asker, neighbours, read_.halves):
            spans = [read_.reading.span(place, SHORTEST) for place in read_.reading.syllables[row]]
            self.codes.show(scenario, answer, tenant, row, spans, victims.get(tenant.name))

    def _match(self, scenario: str, answer: Answer, match: Match, near: bool, victims: _Recent) -> None:
        corrected = self.corrected(match.p, near)
        self.least = min(self.least, corrected)
        if (
            corrected <= ERROR
        ):  # a later correction is for more pairs: what is no finding now never will be one
            self.seen[scenario].add(match.p, near, answer, match, victims.get(match.tenant.name))

    def found(self) -> int:
        """How many answers are findings, after all corrections."""
        return sum(self.corrected(*one) <= ERROR for seen in self.seen.values() for one in seen.chances)


class _Recent:
    """The last answer of each tenant, up to KEPT_BYTES of requests."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[Answer, int]] = OrderedDict()
        self._bytes = 0

    def keep(self, answer: Answer) -> None:
        _, size = self._kept.pop(answer.ask.tenant, (answer, 0))
        self._bytes -= size
        size = len(answer.ask.prompt) + len(answer.ask.system) + len(answer.text) + 1000
        self._kept[answer.ask.tenant] = answer, size
        self._bytes += size
        while self._bytes > KEPT_BYTES and len(self._kept) > 1:
            _, (_, size) = self._kept.popitem(last=False)
            self._bytes -= size

    def get(self, tenant: str) -> Answer | None:
        kept = self._kept.get(tenant)
        return kept[0] if kept else None


@dataclass
class _Expected:
    """Answers known in advance, of one scenario: asked alone, and beside others."""

    alone: int = 0
    alone_wrong: int = 0
    beside: int = 0
    swapped: int = 0
    surely: int = 0  # of the swapped: by more than arithmetic could tip
    shown: list[Answer] = field(default_factory=list)
    what: str = ""
    why: str = ""


class Markers:
    """The marker part of a judge."""

    def __init__(self, plant: Plant, limit: float = MOVED) -> None:
        self._plant, self._limit = plant, limit
        self._real, self._decoys = _Search(plant.tenants), _Search(plant.decoys)
        self._active: OrderedDict[int, None] = OrderedDict()
        self._recent = _Recent()
        self._expected: dict[str, _Expected] = defaultdict(_Expected)
        self._compared: Counter[str] = Counter()

    def seen(self, scenario: str, answer: Answer) -> None:
        """Look for everybody's markers in an answer of any kind: also an error, or half an answer, can hold them."""
        self._real.book.catch_up()
        asker = self._real.book.by_name.get(answer.ask.tenant)
        near = self._near(asker)
        if read_text(answer):
            read_ = _Read(answer, asker)
            self._real.look(scenario, answer, near, read_, self._recent)
            self._decoys.look(scenario, answer, near, read_, self._recent)
            if answer.text and len(self._real.book.by_number) > 1:
                self._compared[scenario] += 1
        self._recent.keep(answer)

    def _near(self, asker: Tenant | None) -> set[int]:
        """Numbers of the tenants that are near now, by activity and order of drawing alone."""
        if asker is not None:
            self._active[asker.number] = None
            self._active.move_to_end(asker.number)
            while len(self._active) > NEAR:
                self._active.popitem(last=False)
        return {*self._active, *range(max(0, self._plant.drawn - NEAR), self._plant.drawn)}

    def expects(self, scenario: str, answer: Answer, own: str, others: Iterable[str], why: str) -> None:
        """`others` empty: the answer was asked for alone, and shows how often this model is wrong by itself. Else an answer that
        says another's and not its own is compared with that, by Fisher's exact test over the scenario. Where there are logprobs, and
        QUIET or more were asked alone and none was wrong, SURELY swapped answers are enough: own was the likelier one alone, and another's is
        now ahead by more than arithmetic moves it."""
        if answer.how != "answered":
            return
        words = _SAID.findall(answer.text)
        said = {*words, *(word.upper() for word in words[:1])}
        others = set(others) - {own}
        one = self._expected[scenario]
        if not others:
            one.alone += 1
            one.alone_wrong += own not in said
            return
        one.beside += 1
        if own not in said and said & others:
            one.swapped += 1
            first = next((token.logprob for token in answer.tokens if token.text.strip()), None)
            one.surely += first is not None and ahead(first) > self._limit
            one.why = why
            one.what = (
                one.what
                or f"{answer.ask.tenant} had to be told {own!r} and was told {sorted(said & others)[0]!r}, another's"
            )
            if len(one.shown) < SHOWN:
                one.shown.append(answer)

    def findings(self) -> list[Finding]:
        """All until now, corrected for what has been compared until now."""
        found = [
            f
            for scenario, seen in list(self._real.seen.items())
            if (f := self._held(scenario, seen)) is not None
        ]
        if not found:
            some = map(_single, (self._real.words, self._real.codes))
            found += [single for single in some if single is not None]
        tested = [(scenario, one) for scenario, one in self._expected.items() if one.alone and one.beside]
        for scenario, one in tested:
            p = fisher_exact(one.swapped, one.beside, one.alone_wrong, one.alone)
            p = bonferroni(p, len(tested), SHARE_EXPECTED * SHARES["marker"])
            sure = one.surely >= SURELY and one.alone >= QUIET and not one.alone_wrong
            if p <= ERROR or sure:
                found.append(_swapped(scenario, one, p if p <= ERROR else None))
        return found

    def _held(self, scenario: str, seen: _Seen) -> Finding | None:
        search = self._real
        p, near, first, match, _ = seen.best[0]
        corrected = search.corrected(p, near)
        if corrected > ERROR:
            return None
        best = [one for one in seen.best if search.corrected(one[0], one[1]) <= ERROR]
        answers = _each_once(a for _, _, answer, _, victim in best for a in (answer, victim) if a is not None)
        pairs = search.near_pairs if near else search.far_pairs
        where = (
            "an answer"
            if match.spans and match.spans[0].start < len(first.text)
            else "an error or other half"
        )
        return Finding(
            evidence="marker",
            scenario=scenario,
            what=f"{where} to {first.ask.tenant} holds {_listing(match.held)} of {match.tenant.name}",
            why=(
                f"they were drawn by chance for {match.tenant.name} alone and stand nowhere in this request; with no leak as much is held "
                f"with probability {match.p:.1e}, or {corrected:.1e} after correction for the {pairs} pairs of answer and tenant compared"
            ),
            p=corrected,
            answers=answers,
            highlights=_highlights((answer, m) for _, _, answer, m, _ in best),
            detail={
                "kind": "planted markers",
                "statistic": match.statistic,
                "markers": list(match.held),
                "victim": match.tenant.name,
                "near": near,
                "pairs": pairs,
                "p_alone": match.p,
                "other_key": match.tenant.key != first.ask.key,
            },
            times=sum(search.corrected(*one) <= ERROR for one in seen.chances),
        )

    def coverage(self, scenario: str) -> Coverage:
        """Answers with text, when there was somebody whose markers they could have held."""
        return covered("marker", self._compared[scenario], self.findings(), scenario)

    def noise(self) -> dict[str, Any]:
        """How the same search went for decoys, whom nobody ever sent: everything found of them is a false alarm."""
        decoys = self._decoys
        return {
            "decoys": len(decoys.book.by_number),
            "decoy_pairs": decoys.near_pairs + decoys.far_pairs,
            "decoys_called_findings": decoys.found(),
            "decoy_least_p": decoys.least,
            "pairs": self._real.near_pairs + self._real.far_pairs,
            **self._real.words.noise(),
            **self._real.codes.noise(),
            **decoys.words.noise("decoy_"),
            **decoys.codes.noise("decoy_"),
        }


def _single(excess: Excess) -> Finding | None:
    p = bonferroni(excess.p(), 1, SHARE_EXCESS * SHARES["marker"])
    if p > ERROR or not excess.shown:
        return None
    scenario = excess.where.most_common(1)[0][0]
    shown = [one for one in excess.shown if one[0] == scenario][: SHOWN // 2]
    shown = shown or excess.shown[: SHOWN // 2]
    answers = _each_once(a for _, answer, _, victim in shown for a in (answer, victim) if a is not None)
    return Finding(
        evidence="marker",
        scenario=scenario,
        what=f"{excess.hits} times an answer holds {excess.kind.one} of a neighbour, where chance gives {excess.mean:.2g}",
        why=(
            f"{excess.kind.name} can be met by chance, but how often is known, since they were drawn by us: so often, over the whole run, "
            f"with probability {p:.1e} at most"
        ),
        p=p,
        answers=answers,
        highlights=_highlights((answer, match) for _, answer, match, _ in shown),
        detail={
            "kind": excess.kind.name,
            "hits": excess.hits,
            "expected": excess.mean,
            "where": dict(excess.where),
        },
        times=excess.hits,
    )


def _swapped(scenario: str, one: _Expected, p: float | None) -> Finding:
    chance = (
        f"{one.surely} of them were far from a tie"
        if p is None
        else f"by chance with probability {p:.1e} at most"
    )
    return Finding(
        evidence="marker",
        scenario=scenario,
        what=one.what,
        why=(
            f"{one.why}: beside others {one.swapped} of {one.beside} answers were another's, alone {one.alone_wrong} of {one.alone} were wrong "
            f"in any way; {chance}"
        ),
        p=p,
        answers=list(one.shown),
        detail={"kind": "another's expected answer", "alone": one.alone, "alone_wrong": one.alone_wrong, "beside": one.beside},
        times=one.swapped,
    )  # fmt: skip


def _each_once(answers: Iterable[Answer]) -> list[Answer]:
    return list({answer.number: answer for answer in answers}.values())


def _listing(things: tuple[str, ...]) -> str:
    """The first few, and how many more."""
    shown = ", ".join(repr(thing) for thing in things[:4])
    return shown if len(things) <= 4 else f"{shown} and {len(things) - 4} more markers"


def _highlights(matches: Iterable[tuple[Answer, Match]]) -> list[Highlight]:
    """Where the markers stand in `Answer.text` (not those in an error)."""
    return [
        Highlight(answer.number, span.start, span.end, match.tenant.name)
        for answer, match in matches
        for span in match.spans
        if span.end <= len(answer.text)
    ]


__all__ = ["NEAR", "Markers", "read_text"]
