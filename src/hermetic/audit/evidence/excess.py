"""Small things of neighbours, over the whole run: single words, and pieces of codes. One says nothing; so many do.

The one thing to know: the null is that of planted.py. For a tenant, U is all of a kind that the answers hold to which it was near, without
what stood in their requests. Its own things are a draw by chance, so how many of them are expected in U is known; the sum over tenants
is bounded as one of negatively associated indicators. A word in a hundred answers is one word: repeated answers do not count twice.

Words are drawn from the list without the askers' words: n |U| / N are expected of n. A code of eight syllables has five rows of four, so
one of them is in U with probability 5 |U| / 85**4 at most; codes are independent of each other.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from hermetic.audit.chance import poisson_bound
from hermetic.audit.evidence.planted import Match
from hermetic.audit.evidence.reading import SHORTEST, Span, code_windows
from hermetic.audit.exchange import Answer
from hermetic.audit.markers import CODES, EIGHT, REMEMBERED, SYLLABLES, WORDS, Tenant, word_list

SINGLES = 20  # answers with such a thing of a neighbour that are kept, to be shown


@dataclass(frozen=True)
class Kind:
    """`things` of a tenant: each is there as soon as any of its signs is. `expected`: how many of a tenant's things are in so
    many signs, after so many askers; None where that cannot be told any more."""

    name: str
    one: str  # of what an answer holds one
    things: Callable[[Tenant], Iterable[frozenset[str]]]
    expected: Callable[[int, int], float | None]


def _words_expected(signs: int, askers: int) -> float | None:
    listed, gone = len(word_list()), 2 * WORDS * askers
    return None if gone > listed // 2 else WORDS * min(1.0, signs / (listed - gone))


def _codes_expected(signs: int, askers: int) -> float:
    rows = EIGHT - SHORTEST + 1
    return CODES * min(1.0, rows * signs / math.pow(len(SYLLABLES), SHORTEST))


SINGLE_WORDS = Kind(
    "single words", "a word", lambda t: (frozenset((word,)) for word in t.words), _words_expected
)
PIECES_OF_CODES = Kind("pieces of codes", "half a code", lambda t: (frozenset(code_windows(code)) for code in t.codes), _codes_expected)  # fmt: skip


class Excess:
    """One kind of small things. `hits` of them were seen where `mean` are expected."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._tenants: OrderedDict[int, tuple[set[str], set[int]]] = OrderedDict()
        self._means: dict[int, float] = {}
        self.hits, self.mean = 0, 0.0
        self.where: Counter[str] = Counter()
        self.shown: list[tuple[str, Answer, Match, Answer | None]] = []

    def add(self, asker: int, near: Iterable[Tenant], signs: set[str]) -> list[tuple[Tenant, str]]:
        """An answer with these signs, none of them the asker's. The neighbours' things that they show for the first time."""
        found: list[tuple[Tenant, str]] = []
        if not signs:
            return found
        for tenant in near:
            union, askers = self._remembered(tenant.number)
            if self.kind.expected(0, len(askers | {asker})) is None:
                continue
            for thing in self.kind.things(tenant):
                if not thing.isdisjoint(signs) and thing.isdisjoint(union):
                    found.append((tenant, min(thing & signs)))
            askers.add(asker)
            union |= signs
            mean = self.kind.expected(len(union), len(askers)) or 0.0
            self.mean += mean - self._means.get(tenant.number, 0.0)
            self._means[tenant.number] = mean
        self.hits += len(found)
        return found

    def _remembered(self, number: int) -> tuple[set[str], set[int]]:
        if number not in self._tenants:
            self._tenants[number] = set(), set()
            if len(self._tenants) > REMEMBERED:
                gone, _ = self._tenants.popitem(last=False)
                self._means.pop(gone, None)
        return self._tenants[number]

    def show(self, scenario: str, answer: Answer, tenant: Tenant, sign: str, spans: Iterable[Span], victim: Answer | None) -> None:  # fmt: skip
        """Keep an answer that holds such a thing."""
        self.where[scenario] += 1
        if len(self.shown) < SINGLES:
            match = Match(tenant, 1.0, self.kind.name, (sign,), tuple(spans))
            self.shown.append((scenario, answer, match, victim))

    def p(self) -> float:
        """That there are so many, under the null."""
        return poisson_bound(self.mean, self.hits)

    def noise(self, prefix: str = "") -> Mapping[str, float]:
        name = prefix + self.kind.name.replace(" ", "_")
        return {name: self.hits, f"{name}_expected": self.mean}


__all__ = ["PIECES_OF_CODES", "SINGLE_WORDS", "Excess", "Kind"]
