"""How many hits at which time, in steps that fit their span. Bounded memory: where there are too many steps, they become longer."""

from __future__ import annotations

import itertools
from collections import Counter
from datetime import UTC, datetime

import msgspec

_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
STEPS = (_MINUTE, 5 * _MINUTE, 15 * _MINUTE, _HOUR, 6 * _HOUR, _DAY, 7 * _DAY, 28 * _DAY, 364 * _DAY)  # each a multiple of the one before  # fmt: skip
ROWS = 48  # steps that are shown at most, while there are longer ones
MOST = 10_000  # steps that are kept


class Bucket(msgspec.Struct, frozen=True):
    """`start`: ISO 8601, UTC."""

    start: str
    hits: int


class TimeLine:
    """`unknown`: hits without a time."""

    def __init__(self) -> None:
        self.unknown = 0
        self._level, self._counts = 0, Counter[int]()

    def add(self, when: datetime | None) -> None:
        if when is None:
            self.unknown += 1
            return
        self._counts[int(when.timestamp()) // STEPS[self._level]] += 1
        while len(self._counts) > MOST and self._level + 1 < len(STEPS):
            self._level, self._counts = self._level + 1, _longer(self._counts, self._level)

    def shown(self) -> tuple[int, list[Bucket]]:
        """(seconds of a step, all steps from the first hit to the last); (0, []) where there is none."""
        level, counts = self._level, self._counts
        if not counts:
            return 0, []
        while max(counts) - min(counts) >= ROWS and level + 1 < len(STEPS):
            level, counts = level + 1, _longer(counts, level)
        places = range(min(counts), max(counts) + 1)
        step = STEPS[level]
        return step, [Bucket(_start(place * step), counts[place]) for place in places]


def _longer(counts: Counter[int], level: int) -> Counter[int]:
    """The same in the next longer steps."""
    more, longer = STEPS[level + 1] // STEPS[level], Counter[int]()
    for place, hits in counts.items():
        longer[place // more] += hits
    return longer


def _start(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%MZ")


assert all(longer % shorter == 0 for shorter, longer in itertools.pairwise(STEPS))

__all__ = ["MOST", "ROWS", "STEPS", "Bucket", "TimeLine"]
