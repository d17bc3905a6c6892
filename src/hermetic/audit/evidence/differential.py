"""Evidence by difference: the same request at temperature 0, alone on a quiet server and again in company.

The one thing to know: batch arithmetic changes the last bits of every number, so equal answers are not to be expected, but only
near-ties may tip. With logprobs that is decided request by request: how far have the log-odds of a token moved at least? Over the
common beginning that is the difference of its logprob; where the answers part, the token that each of them took had to be the likelier
one, so the log-odds have moved by at least both margins together. A move of more than MOVED natural units, and FACTOR
times what this server was seen to vary by itself, is no arithmetic.

Without logprobs only broken copies count (a copy task that was in order alone and no longer is): whether there are more of them in
company than this server's own variation, by Fisher's exact test against the calibrating runs, corrected for the scenarios compared.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hermetic.audit.chance import bonferroni, fisher_exact
from hermetic.audit.evidence.gathering import ERROR, SHARES, SHOWN, Gathering, covered
from hermetic.audit.exchange import Answer, Token
from hermetic.audit.learned import Learned
from hermetic.audit.result import Coverage, Finding

MOVED = 0.25  # natural units of log-odds: a token of probability 0.56 where it was 0.5; two steps of a bf16 logit between 16 and 32
UNCALIBRATED = 0.75  # where fewer than CALIBRATED runs beside others were measured
CALIBRATED = 8
FACTOR = 6.0  # times the calibrated variation of a logprob
COPIED = 0.8  # share of the words of an answer that are in both, above which a copy is a copy
BROKEN = 0.5  # and below which it is broken
_SURE = math.log(1 - 1e-6)  # a margin is read no finer than this: it is about 13.8 then


def move_limit(learned: Learned) -> float:
    """Natural units of log-odds that arithmetic may move a token by on this server."""
    noise = learned.noise
    if noise.logprob_error is None or noise.beside_runs < CALIBRATED:
        return UNCALIBRATED
    return max(MOVED, FACTOR * noise.logprob_error)


class Apart(NamedTuple):
    """How two answers to one request differ. `at`: characters that they have in common at their beginning; None if they are equal.

    `moved`: natural units by which the log-odds of some token have moved at least; None without logprobs."""

    at: int | None
    moved: float | None


def apart(alone: Answer, again: Answer) -> Apart:
    """Compare two answers to one request at temperature 0."""
    at = None if alone.text == again.text else _common(alone.text, again.text)
    before, after = _placed(alone.tokens), _placed(again.tokens)
    moves: list[float] = []
    for place, one in before.items():
        other = after.get(place)
        if other is None or one.logprob is None or other.logprob is None:
            continue
        if one.text == other.text and (at is None or place + len(one.text) <= at):
            moves.append(abs(one.logprob - other.logprob))
        elif one.text != other.text and at is not None and place <= at:
            moves.append(ahead(one.logprob) + ahead(other.logprob))
            break
    for shorter, longer in ((alone, after), (again, before)):
        last = (
            longer.get(at)
            if at is not None and at == len(shorter.text) and shorter.finish == "stop"
            else None
        )
        if last is not None and last.logprob is not None:  # one ended where the other went on
            moves.append(ahead(last.logprob))
    return Apart(at, max(moves) if moves else None)


def _common(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _placed(tokens: list[Token]) -> dict[int, Token]:
    """Pieces by the place where they begin; what a server cut otherwise is at other places and is not compared."""
    placed, place = {}, 0
    for token in tokens:
        if token.text:
            placed[place] = token
            place += len(token.text)
    return placed


def ahead(logprob: float) -> float:
    """How far a token that was taken as the likeliest is ahead of any other, in log-odds: at least its own odds, at least 0."""
    sure = min(logprob, _SURE)
    return max(0.0, sure - math.log(-math.expm1(sure)))


@dataclass
class _Copies:
    """Copy tasks of one scenario, where there are no logprobs."""

    compared: int = 0
    broken: int = 0
    shown: list[Answer] = field(default_factory=list)
    what: str = ""
    why: str = ""


class Differential:
    """The differential part of a judge."""

    def __init__(self, learned: Learned) -> None:
        self._noise = learned.noise
        self._limit = move_limit(learned)
        self._found = Gathering("differential")
        self._copies: dict[str, _Copies] = defaultdict(_Copies)
        self._largest = 0.0  # move that was no finding
        self._tipped: Counter[str] = Counter()

    def same(self, scenario: str, alone: Answer, again: Answer, why: str) -> None:
        """Both have to be answers to the same request at temperature 0; others are not compared."""
        if alone.how != "answered" or again.how != "answered" or not _one_request(alone, again):
            return
        found = apart(alone, again)
        if found.moved is not None:
            self._found.compared[scenario] += 1
            self._by_logprob(scenario, alone, again, why, found)
        elif alone.text.strip() and resembles(alone.text, _asked_line(alone)) >= COPIED:
            self._found.compared[scenario] += 1
            self._by_copy(scenario, alone, again, why)

    def _by_logprob(self, scenario: str, alone: Answer, again: Answer, why: str, found: Apart) -> None:
        assert found.moved is not None
        if found.moved <= self._limit:
            self._largest = max(self._largest, found.moved)
            self._tipped[scenario] += found.at is not None
            return
        noise = self._noise.logprob_error
        varies = "was not seen to vary" if not noise else f"varies by {noise:.2g} by itself"
        where = "in its logprobs" if found.at is None else f"from character {found.at} on"
        self._found.add(
            scenario,
            "moved",
            f"the same request at temperature 0 was answered otherwise, {where}",
            f"{why}: the log-odds of a token moved by {found.moved:.2f} or more, and this server {varies} (limit {self._limit:.2f})",
            (again, alone),
            moved=found.moved,
            limit=self._limit,
            at=found.at,
        )

    def _by_copy(self, scenario: str, alone: Answer, again: Answer, why: str) -> None:
        one = self._copies[scenario]
        one.compared += 1
        if resembles(again.text, alone.text) >= BROKEN:
            return
        one.broken += 1
        one.why = why
        one.what = one.what or f"a copy task that was in order alone is no copy any more: {again.text[:60]!r}"
        if len(one.shown) < SHOWN:
            one.shown += [again, alone]

    def findings(self) -> list[Finding]:
        return [*self._found.findings(), *self._broken()]

    def _broken(self) -> Iterator[Finding]:
        noise = self._noise
        runs, differ = noise.alone_runs + noise.beside_runs, noise.alone_differ + noise.beside_differ
        for scenario, one in self._copies.items():
            if not one.broken or not runs:
                continue
            p = fisher_exact(one.broken, one.compared, differ, runs)
            p = bonferroni(p, len(self._copies), SHARES["differential"])
            if p <= ERROR:
                yield Finding(
                    evidence="differential",
                    scenario=scenario,
                    what=one.what,
                    why=(
                        f"{one.why}: {one.broken} of {one.compared} copies broke, where {differ} of {runs} calibrating runs differed in any way; "
                        f"by chance with probability {p:.1e} at most"
                    ),
                    p=p,
                    answers=list(one.shown),
                    detail={"kind": "broken copies", "broken": one.broken, "compared": one.compared},
                    times=one.broken,
                )

    def coverage(self, scenario: str) -> Coverage:
        return covered("differential", self._found.compared[scenario], self.findings(), scenario)

    def notes(self) -> list[str]:
        """Copies that broke without being a finding: how few such could be told from this server's own variation, a bound does not say."""
        found = {finding.scenario for finding in self._broken()}
        left = [one for name, one in self._copies.items() if one.broken and name not in found]
        if not left:
            return []
        broken, compared = sum(one.broken for one in left), sum(one.compared for one in left)
        return [
            f"{broken} of {compared} copy tasks broke in company. Without logprobs that is not told from this server's own variation, and is no finding; "
            "nor is it clean."
        ]

    def noise(self) -> dict[str, Any]:
        """What this server varied by in the run without being a finding."""
        return {
            "largest_move": self._largest,
            "limit": self._limit,
            "tipped": sum(self._tipped.values()),
            "copies_broken": sum(one.broken for one in self._copies.values()),
        }


def _one_request(alone: Answer, again: Answer) -> bool:
    a, b = alone.ask, again.ask
    return a.temperature == 0.0 == b.temperature and (a.prompt, a.system, a.endpoint, a.max_tokens) == (
        b.prompt, b.system, b.endpoint, b.max_tokens,
    )  # fmt: skip


def _asked_line(answer: Answer) -> str:
    """The words of the answer that stand in its request, in the answer's order: for a copy, all of them."""
    prompt = answer.ask.prompt if isinstance(answer.ask.prompt, str) else ""
    there = set(prompt.lower().split())
    return " ".join(word for word in answer.text.lower().split() if word in there)


def resembles(a: str, b: str) -> float:
    """Share of the words of two texts that are in both, by number: 1 for the same words, 0 for none (Dice 1945)."""
    x, y = Counter(a.lower().split()), Counter(b.lower().split())
    both = sum((x & y).values())
    return 2 * both / (x.total() + y.total()) if x or y else 1.0


__all__ = ["MOVED", "Apart", "Differential", "ahead", "apart", "move_limit", "resembles"]
