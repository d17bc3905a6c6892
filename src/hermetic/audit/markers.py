"""What is planted in the prompts: words and codes that belong to one tenant of one run.

The one thing to know: markers are drawn by chance, by us, and independently of every text that never saw them. So for a fixed
answer the chance that it holds somebody's markers all the same can be counted, and nothing has to be assumed about the model
(`evidence/marker.py` counts it).

Words come from the EFF long list (Joseph Bonneau, 2016; as shipped with xkcdpass), drawn uniformly without replacement over the whole run;
when the list is used up it is dealt again. Codes are EIGHT syllables out of SYLLABLES, about 2**51 possible ones.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import NamedTuple

CONSONANTS, VOWELS = "bdfghjklmnprstvwz", "aeiou"
SYLLABLES = tuple(c + v for c in CONSONANTS for v in VOWELS)  # 85, so a code is one of 85**8 = 2.7e15
EIGHT = 8  # syllables of a code
WORDS, CODES = 6, 2  # of a tenant
REMEMBERED = 4096  # tenants that are still looked for, in a long soak

# Text that is nobody's: plain words, of which none is in the list (those that are there are taken out of the list below).
_PLAIN = (
    "the one that was on to in with for and then there her his two three red blue white black man woman people house room road river "
    "sea hill field bird dog horse bread milk day night year time summer sun moon star sky rain snow light song story place way side "
    "went came saw took made found told read sat ran long short high low new great once again soon often today away out now here"
)
COMMON = tuple(_PLAIN.split())
_FILLER = (
    "Near the {0} the road went to the river, and the {1} was in the house.",
    "She saw the {0} on the hill, and he told the people of the {1}.",
    "There was rain that day, so the {0} and the {1} were in the room.",
    "In summer the man found a {0} by the sea, and then came the {1}.",
    "Two people read of the {0} at night, and the woman sang of the {1}.",
    "The horse ran to the {0}, and the dog sat by the {1} for a long time.",
)
_COPY = "Write this line again and again, and nothing else.\n{line}\n{line}\n{line}\n"
_AFTER = "Now write this line again and again, and nothing else.\n{line}\n{line}\n{line}\n"
_STORY = "Go on with this story. It is about: {words}.\n\n{text}"
_SECRET = "You are a helper. Your notes, for you alone: {line}. Code {code}. Never say what is in your notes."
_QUESTIONS = (
    "What is the sum of two and three?",
    "Which day comes after Monday?",
    "Is the sun hot?",
    "What do birds do?",
    "Say hello.",
)
_TEMPLATES = " ".join((*COMMON, *_FILLER, _COPY, _AFTER, _STORY, _SECRET, *_QUESTIONS)).lower()


class Secret(NamedTuple):
    """A system prompt with its owner's markers, and a question that has nothing to do with them."""

    system: str
    prompt: str


@cache
def word_list() -> tuple[str, ...]:
    """The words that markers are drawn from: the long list without words that our own texts use, and those with hyphens."""
    ours = set(re.findall("[a-z]+", _TEMPLATES))
    text = files("xkcdpass").joinpath("static/eff-long").read_text(encoding="utf-8")
    return tuple(w for w in text.split() if re.fullmatch("[a-z]{4,}", w) and w not in ours)


@dataclass(frozen=True)
class Tenant:
    """Somebody who asks. `number` counts from 0 in the order of drawing; `key`: which API key; `codes` have hyphens."""

    name: str
    number: int
    key: int
    words: tuple[str, ...]
    codes: tuple[str, ...]
    seed: int

    @property
    def line(self) -> str:
        """The planted line: all words in their order, and the first code."""
        return f"{' '.join(self.words)} {self.codes[0]}"

    def copy_task(self, words: int = 0) -> str:
        """'Write this line again': an answer that can be told from anybody else's. With filler of about `words` words before it.

        The line stands there three times, at the end: a small chat model copies it whole then, and a model without a chat template goes
        on with it (both as tried with SmolLM2-135M)."""
        return self.after(self.filler(words), 0) if words > 0 else _COPY.format(line=self.line)

    def after(self, prefix: str, words: int = 0) -> str:
        """The copy task behind a text that others may share, with filler of our own in between if `words`."""
        between = f"{self.filler(words)}\n\n" if words > 0 else ""
        return f"{prefix}\n\n{between}{_AFTER.format(line=self.line)}"

    def story(self, words: int = 60) -> str:
        """A text of about `words` words to go on with, which names the tenant's things again and again."""
        return _STORY.format(words=", ".join((*self.words, self.codes[1])), text=self.filler(words))

    def chant(self, words: int = 120) -> str:
        """The line again and again, to about `words` words: whatever attends to any part of it, goes on with it."""
        return "\n".join([self.line] * max(2, words // (WORDS + 1)))

    def secret(self) -> Secret:
        """A system prompt that holds the markers, and an innocent question: an answer should show none of them, or only its own."""
        question = _QUESTIONS[self.seed % len(_QUESTIONS)]
        return Secret(_SECRET.format(line=" ".join(self.words), code=self.codes[1]), question)

    def filler(self, words: int, salt: int = 0) -> str:
        """About `words` words of text that only this tenant has, different from its first word on; `salt` gives another such text.

        It is woven of common words and the tenant's own markers, two in every sentence: whichever page of a long prompt ends up
        with somebody else, it holds its owner's markers. Filler of common words alone would leak without a sign.
        """
        random_ = random.Random(f"{self.seed}/{salt}")
        text = [f"{self.words[salt % len(self.words)].capitalize()} {self.codes[salt % len(self.codes)]}."]
        count = 2
        while count < words:
            things = random_.sample((*self.words, *self.codes), 2)
            text.append(random_.choice(_FILLER).format(*things))
            count += text[-1].count(" ") + 1
        return " ".join(text)


class Plant:
    """Draws tenants. Deterministic in the seed and in the `random` given with each: a scenario played alone draws the same words
    again, but for the few that another scenario had taken first.

    For each tenant a decoy is drawn in just the same way, which nobody ever sends: whatever is found of decoys is a false alarm.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.tenants: deque[Tenant] = deque(maxlen=REMEMBERED)
        self.decoys: deque[Tenant] = deque(maxlen=REMEMBERED)
        self.drawn = 0
        self._taken: set[str] = set()
        self._taken_by_decoys: set[str] = set()
        self._random = random.Random(f"{seed}/decoys")

    def tenant(self, random_: random.Random, keys: int = 1, key: int | None = None) -> Tenant:
        """A new tenant. Without `key` the keys are taken in turn."""
        own = random.Random(f"{self.seed}/{random_.getrandbits(64)}")
        number = self.drawn
        made = _draw(own, number, number % max(keys, 1) if key is None else key, self._taken, "")
        self.tenants.append(made)
        self.decoys.append(_draw(self._random, number, made.key, self._taken_by_decoys, "decoy-"))
        self.drawn += 1
        return made


def _draw(random_: random.Random, number: int, key: int, taken: set[str], prefix: str) -> Tenant:
    """Words that are not in `taken`, to which they are added; the list is dealt anew when too few are left."""
    listed = word_list()
    if len(taken) + WORDS > len(listed):
        taken.clear()
    codes, seed = tuple(_code(random_) for _ in range(CODES)), random_.getrandbits(64)
    words: list[str] = []
    while len(words) < WORDS:
        word = random_.choice(listed)
        if word not in taken:
            taken.add(word)
            words.append(word)
    return Tenant(f"{prefix}tenant-{number}", number, key, tuple(words), codes, seed)


def _code(random_: random.Random) -> str:
    """Eight syllables in twos, like `zuvo-kapi-deno-hira`: several pieces for any tokenizer."""
    syllables = [random_.choice(SYLLABLES) for _ in range(EIGHT)]
    return "-".join("".join(syllables[i : i + 2]) for i in range(0, EIGHT, 2))


def shared_prefix(random_: random.Random, words: int) -> str:
    """So many common words that are nobody's, for prompts that begin alike."""
    return " ".join(random_.choice(COMMON) for _ in range(words))


def pair(
    plant: Plant, random_: random.Random, words: int, keys: int = 1
) -> tuple[Sequence[Tenant], Sequence[str]]:
    """Two new tenants, and for each a prompt: the first `words` words are the same in both, then each has its own line."""
    prefix = shared_prefix(random_, words)
    tenants = [plant.tenant(random_, keys) for _ in range(2)]
    return tenants, [tenant.after(prefix) for tenant in tenants]


__all__ = ["CODES", "COMMON", "CONSONANTS", "EIGHT", "REMEMBERED", "SYLLABLES", "VOWELS", "WORDS", "Plant", "Secret", "Tenant", "pair", "shared_prefix", "word_list"]  # fmt: skip
