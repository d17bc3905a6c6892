"""What an answer holds of the word list: whole words, pieces of words, words in a row, and syllables of codes.

The one thing to know: nothing here knows whose a marker is. An answer is read against the whole list, so that how many words of the
list it holds anyway is known before anybody's markers are looked for; the chance of a hit is counted from that number.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from hermetic.audit.markers import CONSONANTS, EIGHT, VOWELS, word_list

PIECE = 4  # letters that a piece of a word has at least
GARBLED = 5  # letters that a word has at least, to be known with one of them wrong
SHORTEST = 4  # syllables of a code that count at least
LONGEST_RUN = 400  # letters in a row that are looked into for words without spaces between them
_RUN = re.compile("[A-Za-z]+")
_SYLLABLES = re.compile(f"(?=((?:[{CONSONANTS}][{VOWELS}]){{{SHORTEST}}}))")


class Span(NamedTuple):
    """Characters of a text."""

    start: int
    end: int


@cache
def listed() -> frozenset[str]:
    return frozenset(word_list())


@cache
def _pieces() -> dict[str, tuple[str, ...]]:
    """Every proper beginning and end of a word that has PIECE letters or more, and the words that it is a piece of."""
    of: dict[str, set[str]] = defaultdict(set)
    for word in word_list():
        for size in range(PIECE, len(word)):
            of[word[:size]].add(word)
            of[word[-size:]].add(word)
    return {piece: tuple(sorted(words)) for piece, words in of.items()}


@cache
def _misspelt() -> dict[str, tuple[str, ...]]:
    """Every word of GARBLED letters or more with one letter left open, and the words that it can be."""
    of: dict[str, list[str]] = defaultdict(list)
    for word in word_list():
        for i in range(len(word) if len(word) >= GARBLED else 0):
            of[f"{word[:i]}?{word[i + 1 :]}"].append(word)
    return {open_: tuple(words) for open_, words in of.items()}


@cache
def _lengths() -> range:
    sizes = {len(word) for word in word_list()}
    return range(max(min(sizes), 5), max(sizes) + 1)


@dataclass(frozen=True)
class Reading:
    """`words`: whole words of the list; `parts`: words of the list of which the text holds at least a piece, or all but one letter, or that
    stand in a longer row of letters; `row`: the text's words in order, "" where one is not of the list; `letters`: the letters of the text in small, with their places."""

    words: dict[str, list[Span]]
    parts: dict[str, list[Span]]
    row: list[tuple[str, Span]]
    letters: str
    places: list[int]
    syllables: dict[str, list[int]] = field(
        default_factory=dict
    )  # SHORTEST of them in a row -> where in `letters`

    def grams(self, syllables: int) -> set[str]:
        """The different rows of so many syllables in the text."""
        if syllables == SHORTEST:
            return set(self.syllables)
        size = 2 * syllables
        found = re.finditer(f"(?=((?:[{CONSONANTS}][{VOWELS}]){{{syllables}}}))", self.letters)
        return {m[1] for m in found if len(m[1]) == size}

    def rows(self, length: int) -> set[tuple[str, ...]]:
        """The different rows of so many words of the list, none twice in a row."""
        found = set()
        for i in range(len(self.row) - length + 1):
            row = tuple(word for word, _ in self.row[i : i + length])
            if all(row) and len(set(row)) == length:
                found.add(row)
        return found

    def span(self, at: int, syllables: int) -> Span:
        """Where in the text a row of syllables stands that begins at `letters[at]`."""
        return Span(self.places[at], self.places[at + 2 * syllables - 1] + 1)


def read(text: str) -> Reading:
    """Case and punctuation do not count; a code is found with and without its hyphens."""
    words: dict[str, list[Span]] = defaultdict(list)
    parts: dict[str, list[Span]] = defaultdict(list)
    row: list[tuple[str, Span]] = []
    letters: list[str] = []
    places: list[int] = []
    every, pieces = listed(), _pieces()
    for match in _RUN.finditer(text):
        run, span = match[0].lower(), Span(*match.span())
        letters.append(run)
        places.extend(range(*span))
        whole = run in every
        row.append((run if whole else "", span))
        if whole:
            words[run].append(span)
            parts[run].append(span)
        for word in pieces.get(run, ()):
            parts[word].append(span)
        for word in _one_wrong(run):
            parts[word].append(span)
        if not whole and len(run) > _lengths().start:
            for word, start in _inside(run[:LONGEST_RUN]):
                parts[word].append(Span(span.start + start, span.start + start + len(word)))
    joined = "".join(letters)
    syllables: dict[str, list[int]] = defaultdict(list)
    for found in _SYLLABLES.finditer(joined):
        syllables[found[1]].append(found.start())
    return Reading(dict(words), dict(parts), row, joined, places, dict(syllables))


def _one_wrong(run: str) -> set[str]:
    """Words of the list that differ from a row of letters in one letter."""
    if not GARBLED <= len(run) <= _lengths().stop:
        return set()
    misspelt = _misspelt()
    near = {word for i in range(len(run)) for word in misspelt.get(f"{run[:i]}?{run[i + 1 :]}", ())}
    return near - {run}


def _inside(run: str) -> Iterable[tuple[str, int]]:
    """Words of the list, of five letters or more, within a row of letters without spaces."""
    every = listed()
    for start in range(len(run) - _lengths().start + 1):
        for size in _lengths():
            if start + size > len(run):
                break
            if size < len(run) and run[start : start + size] in every:
                yield run[start : start + size], start


def listed_in(text: str) -> set[str]:
    """The words of the list that stand in a text (whole ones)."""
    return {run for run in _RUN.findall(text.lower()) if run in listed()}


def code_windows(code: str) -> list[str]:
    """The rows of SHORTEST syllables in a code."""
    plain = code.replace("-", "")
    return [plain[2 * i : 2 * (i + SHORTEST)] for i in range(EIGHT - SHORTEST + 1)]


__all__ = ["PIECE", "SHORTEST", "Reading", "Span", "code_windows", "listed", "listed_in", "read"]
