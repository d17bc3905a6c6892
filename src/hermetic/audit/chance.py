"""Probabilities of counting: the tails and tests that the evidence uses. Plain Python, no dependency.

The one thing to know: every p-value here is valid, that is at most `a` with probability at most `a` under its null, also for small
counts. Sums are exact, or a bound from above stands in their place.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence


def hypergeometric_tail(population: int, marked: int, drawn: int, hits: int) -> float:
    """P(at least `hits` of `drawn` are marked), drawn without replacement from `population` of which `marked` are.

    Feller, An Introduction to Probability Theory I, II.6. Raises ValueError for impossible sizes."""
    if not (0 <= marked <= population and 0 <= drawn <= population):
        raise ValueError(f"cannot mark {marked} and draw {drawn} of {population}")
    if hits <= 0:
        return 1.0
    everything = math.comb(population, drawn)
    ways = sum(
        math.comb(marked, i) * math.comb(population - marked, drawn - i)
        for i in range(hits, min(marked, drawn) + 1)
    )
    return ways / everything


def fisher_exact(hits: int, of: int, control_hits: int, control_of: int) -> float:
    """P(at least `hits` among the first `of`), given how many there are in all, if both groups have one rate (one-sided).

    R. A. Fisher, The Logic of Inductive Inference, 1935."""
    return hypergeometric_tail(of + control_of, hits + control_hits, of, hits)


def poisson_bound(mean: float, hits: int) -> float:
    """A bound on P(sum >= hits) for a sum of negatively associated (so also: independent) indicators whose expectations add up to
    `mean`: Chernoff's, exp(hits - mean) (mean / hits)**hits.

    Hoeffding 1963; for negative association, to which drawing without replacement belongs: Joag-Dev and Proschan 1983; Dubhashi and
    Ranjan 1998."""
    if hits <= mean or hits <= 0:
        return 1.0
    if mean <= 0.0:
        return 0.0
    return math.exp(hits - mean + hits * (math.log(mean) - math.log(hits)))


def rule_of_three(comparisons: int) -> float | None:
    """The rate that `comparisons` without a hit leave possible at 95 %: 3 / n (Hanley and Lippman-Hand 1983). None for none."""
    return min(1.0, 3.0 / comparisons) if comparisons > 0 else None


def bonferroni(p: float, comparisons: float, share: float = 1.0) -> float:
    """`p` corrected for so many comparisons, which together have `share` of the error."""
    return min(1.0, p * comparisons / share)


# ------------------------------------------------------------------------------------ permutations


class _Sum:
    """A sum of independent whole numbers of known distributions, by convolution: of each stratum one, so the sum is exact."""

    def __init__(self) -> None:
        self.seen = 0
        self._chances = {0: 1.0}

    def _add(self, seen: int, chances: Mapping[int, float]) -> None:
        self.seen += seen
        both: dict[int, float] = defaultdict(float)
        for a, p in self._chances.items():
            for b, q in chances.items():
                both[a + b] += p * q
        self._chances = {value: p for value, p in both.items() if p > 0.0}

    def p(self) -> float:
        """P(at least as large a sum)."""
        return min(1.0, math.fsum(p for value, p in self._chances.items() if value >= self.seen))

    def least(self) -> float:
        """The smallest that `p` could have been with so many values."""
        return self._chances[max(self._chances)]


class MedianTest(_Sum):
    """Whether one group's values lie below another's, over many comparisons (strata): how many of its values are in the lower half.

    Under the null values could change places within a comparison, so this number is hypergeometric in each (Mood 1950), and their sum is
    the convolution, exactly. Keeps the distribution, not the values. Ties count against the finding."""

    def add(self, fast: Sequence[float], slow: Sequence[float]) -> None:
        """One comparison. Empty groups add nothing."""
        if not fast or not slow:
            return
        ranked = sorted([(value, 1) for value in fast] + [(value, 0) for value in slow])
        n, half = len(ranked), len(ranked) // 2
        everything = math.comb(n, half)
        ways = {i: math.comb(len(fast), i) * math.comb(len(slow), half - i) for i in range(half + 1)}
        self._add(sum(mine for _, mine in ranked[:half]), {i: w / everything for i, w in ways.items() if w})


class GroupingTest(_Sum):
    """Whether equal answers come in the same group more often than if answers could change places, over many comparisons (strata).

    The statistic is the number of pairs of equal answers within groups; its permutation distribution is counted exactly, value by
    value: how the copies of one answer fall into the groups, weighted by in how many ways (the multivariate hypergeometric)."""

    def add(self, groups: Sequence[Sequence[Hashable]]) -> None:
        """One comparison: the answers of each group."""
        sizes = tuple(len(group) for group in groups)
        ways: dict[tuple[tuple[int, ...], int], int] = {
            (sizes, 0): 1
        }  # room left in each group, pairs until now
        for copies in Counter(answer for group in groups for answer in group).values():
            more: dict[tuple[tuple[int, ...], int], int] = defaultdict(int)
            for (room, pairs), count in ways.items():
                for fall in _falls(copies, room):
                    left = tuple(r - f for r, f in zip(room, fall, strict=True))
                    within = sum(math.comb(f, 2) for f in fall)
                    more[left, pairs + within] += count * _multinomial(fall)
            ways = more
        everything = _multinomial(sizes)
        seen = sum(math.comb(count, 2) for group in groups for count in Counter(group).values())
        self._add(seen, {pairs: count / everything for (_, pairs), count in ways.items()})


def clearest(sizes: Sequence[int]) -> float:
    """The smallest p of one comparison of groups of these sizes: every group has an answer of its own, and groups of one size could change places."""
    alike = math.prod(math.factorial(groups) for groups in Counter(sizes).values())
    return min(1.0, alike / _multinomial(tuple(sizes)))


def _falls(copies: int, room: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every way to share so many equal things among groups with so much room."""
    if len(room) == 1:
        if copies <= room[0]:
            yield (copies,)
        return
    for first in range(min(copies, room[0]) + 1):
        for rest in _falls(copies - first, room[1:]):
            yield (first, *rest)


def _multinomial(sizes: tuple[int, ...]) -> int:
    """Ways to deal different things into groups of these sizes."""
    ways, left = 1, sum(sizes)
    for size in sizes:
        ways *= math.comb(left, size)
        left -= size
    return ways


def median(values: Iterable[float]) -> float:
    """The middle value; of an even number the mean of the middle two. Raises ValueError for none."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values have no median")
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def cliffs_delta(smaller: Sequence[float], larger: Sequence[float]) -> float:
    """P(a value of `smaller` is below one of `larger`) minus P(above): 1 if all are, 0 if they mix. Cliff 1993."""
    below = sum((a < b) - (a > b) for a in smaller for b in larger)
    return below / (len(smaller) * len(larger)) if smaller and larger else 0.0


__all__ = [
    "GroupingTest",
    "MedianTest",
    "bonferroni",
    "clearest",
    "cliffs_delta",
    "fisher_exact",
    "hypergeometric_tail",
    "median",
    "poisson_bound",
    "rule_of_three",
]
