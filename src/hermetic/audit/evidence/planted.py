"""Whose markers an answer holds, and how likely that is by chance.

The one thing to know: the null. A tenant's words and codes were drawn by chance and stand in no text that this answer could depend on
in order. So the answer is fixed, and the draw is what varies:

- *words*, *parts*: of N words of the list (without those that stand in the request itself, or are the asker's) the answer holds
  M; of a tenant's n words among them h or more are hit with the hypergeometric tail of (N, M, n, h), exactly. A part is a word of
  which the answer holds a beginning or an end of 4 letters, or all but one letter, or that stands in a longer row of letters.
- *row*: r of a tenant's words behind each other, in their order: at most (different rows of r in the answer) x (6 - r + 1) /
  (N (N-1) ... (N-r+1)), by the union bound.
- *code*: n syllables of a code in a row: at most (different rows of n in the answer) x (2 codes x (8 - n + 1)) / 85**n.

The least of the four, times four, is what counts for a pair of answer and tenant.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass

from hermetic.audit.chance import hypergeometric_tail
from hermetic.audit.evidence.reading import SHORTEST, Reading, Span, code_windows, listed_in
from hermetic.audit.exchange import Ask
from hermetic.audit.markers import CODES, EIGHT, REMEMBERED, SYLLABLES, WORDS, Tenant, word_list

STATISTICS = 4


@dataclass(frozen=True)
class Match:
    """What an answer holds of one tenant. `p`: under the null, for this answer and tenant alone."""

    tenant: Tenant
    p: float
    statistic: str
    held: tuple[str, ...]
    spans: tuple[Span, ...]


class Own:
    """What an answer may hold: its asker's markers, and whatever stands in the request."""

    def __init__(self, asker: Tenant | None, ask: Ask) -> None:
        self.asker, self._ask = asker, ask
        self.words = frozenset(asker.words) if asker else frozenset()
        self.windows = (
            frozenset(w for code in asker.codes for w in code_windows(code)) if asker else frozenset()
        )
        self._text: str | None = None
        self._letters: str | None = None
        self._excluded: frozenset[str] | None = None

    def text(self) -> str:
        """Everything that was sent, in small letters."""
        if self._text is None:
            ask = self._ask
            prompt = ask.prompt if isinstance(ask.prompt, str) else ""
            raw = ask.raw.decode("utf-8", "replace") if ask.raw else ""
            fields = f"{ask.extra}{ask.headers}" if ask.extra or ask.headers else ""
            self._text = "\n".join((prompt, ask.system, fields, ask.request_id, raw)).lower()
        return self._text

    def has_word(self, word: str) -> bool:
        return word in self.words or word in self.text()

    def has_syllables(self, gram: str) -> bool:
        """`gram`: SHORTEST syllables or more."""
        if self._letters is None:
            codes = "\n".join(c.replace("-", "") for c in self.asker.codes) if self.asker else ""
            self._letters = "".join(re.findall("[a-z]+", self.text())) + "\n" + codes
        return gram in self._letters

    def excluded(self) -> frozenset[str]:
        """The words of the list that cannot be a hit."""
        if self._excluded is None:
            self._excluded = self.words | listed_in(self.text())
        return self._excluded


class Book:
    """Tenants, by what is theirs. Holds the last REMEMBERED."""

    def __init__(self, drawn: deque[Tenant]) -> None:
        self._drawn = drawn
        self.by_number: dict[int, Tenant] = {}
        self.by_name: dict[str, Tenant] = {}
        self._words: dict[str, list[Tenant]] = defaultdict(list)
        self._windows: dict[str, list[tuple[Tenant, str, int]]] = defaultdict(list)
        self.next = 0

    def catch_up(self) -> None:
        """Enter the tenants that have been drawn since."""
        new = [*itertools.takewhile(lambda t: t.number >= self.next, reversed(self._drawn))]
        for tenant in reversed(new):
            self._enter(tenant)
        while len(self.by_number) > REMEMBERED:
            self._forget(self.by_number[next(iter(self.by_number))])

    def _enter(self, tenant: Tenant) -> None:
        self.next = tenant.number + 1
        self.by_number[tenant.number] = self.by_name[tenant.name] = tenant
        for word in tenant.words:
            self._words[word].append(tenant)
        for code in tenant.codes:
            for at, window in enumerate(code_windows(code)):
                self._windows[window].append((tenant, code, at))

    def _forget(self, tenant: Tenant) -> None:
        del self.by_number[tenant.number], self.by_name[tenant.name]
        for word in tenant.words:
            self._words[word].remove(tenant)
        for code in tenant.codes:
            for at, window in enumerate(code_windows(code)):
                self._windows[window].remove((tenant, code, at))
                if not self._windows[window]:
                    del self._windows[window]

    def owners(self, word: str) -> Collection[Tenant]:
        """Whose word this is; several, when the list was dealt more than once."""
        return self._words.get(word, ())

    def matches(self, reading: Reading, own: Own, words: set[str], parts: set[str]) -> list[Match]:
        """Everybody of whom the answer holds more than a single word or part. `words`, `parts`: those that are not the asker's."""
        held: dict[int, set[str]] = defaultdict(set)
        for word in parts:
            for tenant in self.owners(word):
                held[tenant.number].add(word)
        codes = self._codes(reading, own)
        numbers = {n for n, some in held.items() if len(some) > 1} | codes.keys()
        return [
            self._match(self.by_number[n], reading, own, words, parts, held.get(n, set()), codes.get(n))
            for n in sorted(numbers)
        ]

    def _codes(self, reading: Reading, own: Own) -> dict[int, tuple[str, Span]]:
        """For each tenant the longest row of its syllables that the answer holds."""
        longest: dict[int, tuple[str, Span]] = {}
        for window, places in reading.syllables.items():
            if window in own.windows or window not in self._windows or own.has_syllables(window):
                continue
            for tenant, code, at in self._windows[window]:
                plain = code.replace("-", "")[2 * at :]
                for place in places:
                    length = _common(plain, reading.letters[place : place + len(plain)]) // 2
                    if 2 * length > len(longest.get(tenant.number, ("", None))[0]):
                        longest[tenant.number] = plain[: 2 * length], reading.span(place, length)
        return longest

    def _match(
        self,
        tenant: Tenant,
        reading: Reading,
        own: Own,
        words: set[str],
        parts: set[str],
        held: set[str],
        code: tuple[str, Span] | None,
    ) -> Match:
        excluded = own.excluded()
        population = len(word_list()) - len(excluded)
        drawn = sum(word not in excluded for word in tenant.words)
        whole = held & words
        chances = {
            "words": hypergeometric_tail(population, len(words), drawn, len(whole)),
            "parts": hypergeometric_tail(population, len(parts), drawn, len(held)),
            "row": _row_chance(tenant, reading, own, population),
            "code": _code_chance(reading, own, len(code[0]) // 2) if code else 1.0,
        }
        statistic = min(chances, key=chances.__getitem__)
        spans = [span for word in sorted(held) for span in reading.parts[word]]
        things = [w for w in tenant.words if w in held]
        if code:
            spans.append(code[1])
            things.append(code[0])
        p = min(1.0, STATISTICS * chances[statistic])
        return Match(tenant, p, statistic, tuple(things), tuple(sorted(set(spans))))


def _common(a: str, b: str) -> int:
    """Letters that two texts have in common at their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _row_chance(tenant: Tenant, reading: Reading, own: Own, population: int) -> float:
    """Of the longest row of the tenant's words, in their order, that is not in the request."""
    place = {word: i for i, word in enumerate(tenant.words) if not own.has_word(word)}
    longest, length = 0, 0
    before: int | None = None
    for word, _ in reading.row:
        at = place.get(word)
        length = 0 if at is None else (length + 1 if before is not None and at == before + 1 else 1)
        longest, before = max(longest, length), at
    if longest < 2:
        return 1.0
    ways = len(reading.rows(longest)) * (WORDS - longest + 1)
    return min(1.0, ways / math.perm(population, longest))


def _code_chance(reading: Reading, own: Own, syllables: int) -> float:
    """Of so many syllables in a row."""
    rows = sum(not own.has_syllables(gram) for gram in reading.grams(syllables))
    return min(1.0, rows * CODES * (EIGHT - syllables + 1) / math.pow(len(SYLLABLES), syllables))


def foreign(reading: Reading, own: Own) -> tuple[set[str], set[str]]:
    """The whole words, and the words of which there are parts, that the request does not hold."""
    words = {word for word in reading.words if not own.has_word(word)}
    return words, {word for word in reading.parts if word in words or not own.has_word(word)}


def anything(reading: Reading, own: Own, parts: set[str]) -> bool:
    """Whether the answer could have shown anybody else's marker at all."""
    return len(parts) > 1 or any(window not in own.windows for window in reading.syllables)


__all__ = ["SHORTEST", "Book", "Match", "Own", "anything", "foreign"]
