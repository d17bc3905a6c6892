"""Answers as simulated servers give them: a function of a request, no network. For the tests of evidence.

The one thing to know: `Server` copies the line that it is told to, says something of its own before it (with words of the list, as
any text has), and at a known rate says of it what another tenant's line holds instead.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

from hermetic.audit.exchange import Answer, Ask, Token, Usage
from hermetic.audit.markers import COMMON, word_list

Garble = Callable[[random.Random, str], str]
_LINE = re.compile(r"[a-z]+(?: [a-z]+){5} (?:[a-z]{4}-){3}[a-z]{4}")


def answered(ask: Ask, text: str, number: int = 1, **fields: Any) -> Answer:
    """An answer with status 200 and one token a word."""
    plain: dict[str, Any] = {
        "sent": float(number),
        "how": "answered",
        "status": 200,
        "finish": "stop",
        "seconds": 1.0,
        "first": 0.5,
        "tokens": [Token(piece, 0.5 + 0.01 * i) for i, piece in enumerate(re.findall(r"\s*\S+", text))],
        "usage": Usage(),
    }
    return Answer(ask=ask, number=number, text=text, **{**plain, **fields})


def whole(randomly: random.Random, line: str) -> str:
    return line


def three_words(randomly: random.Random, line: str) -> str:
    """Three neighbouring words of the six."""
    words, start = line.split(), randomly.randrange(4)
    return " ".join(words[start : start + 3])


def one_word(randomly: random.Random, line: str) -> str:
    return randomly.choice(line.split()[:6])


def pieces(randomly: random.Random, line: str) -> str:
    """A beginning or an end of every word of six letters or more, out of order, as a broken model shows them."""
    cut = [
        (w[: len(w) - 2], w[2:])[randomly.randrange(2)] if len(w) >= 6 and "-" not in w else w
        for w in line.split()
    ]
    randomly.shuffle(cut)
    return ". ".join(cut)


def half_a_code(randomly: random.Random, line: str) -> str:
    """Six of the eight syllables, in capitals and without hyphens."""
    return line.split()[-1].replace("-", "")[:12].upper()


def garbled(randomly: random.Random, line: str) -> str:
    """Every seventh letter is another."""
    return "".join(randomly.choice("abcdefgh") if i % 7 == 6 else c for i, c in enumerate(line))


class Server:
    """`own`: words of the list that an answer holds by itself."""

    def __init__(self, seed: int, rate: float, leak: Garble = whole, own: int = 4) -> None:
        self.random = random.Random(f"server/{seed}")
        self.rate, self.leak, self.own = rate, leak, own
        self.lines: list[str] = []
        self.number = self.leaked = 0

    def __call__(self, ask: Ask) -> Answer:
        self.number += 1
        assert isinstance(ask.prompt, str)
        found = _LINE.findall(ask.prompt)
        line = found[-1] if found else ""
        says = [self.random.choice(COMMON) for _ in range(8)]
        says += [self.random.choice(word_list()) for _ in range(self.own)]
        self.random.shuffle(says)
        if self.lines and self.random.random() < self.rate:
            line = self.leak(self.random, self.random.choice(self.lines[-8:]))
            self.leaked += 1
        if found:
            self.lines.append(found[-1])
        return answered(ask, f"{' '.join(says)}: {line}.", self.number)
