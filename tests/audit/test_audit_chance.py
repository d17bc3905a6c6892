"""The probabilities against enumeration by hand, over all that can happen."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermetic.audit import chance


@given(st.integers(1, 9), st.data())
def test_the_hypergeometric_tail_is_the_share_of_all_draws(population: int, data: st.DataObject) -> None:
    marked, drawn = data.draw(st.integers(0, population)), data.draw(st.integers(0, population))
    hits = data.draw(st.integers(-1, population + 1))
    draws = list(itertools.combinations(range(population), drawn))
    share = Fraction(sum(sum(i < marked for i in d) >= hits for d in draws), len(draws))
    assert chance.hypergeometric_tail(population, marked, drawn, hits) == pytest.approx(
        float(share), abs=1e-12
    )


def test_impossible_draws_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot mark 5 and draw 2 of 4"):
        chance.hypergeometric_tail(4, 5, 2, 1)


def test_fisher_s_tea_tasting() -> None:
    """Four of four cups told right, of eight: 1 in 70 (Fisher 1935); three or more: 17 in 70."""
    assert chance.fisher_exact(4, 4, 0, 4) == pytest.approx(1 / 70)
    assert chance.fisher_exact(3, 4, 1, 4) == pytest.approx(17 / 70)


@given(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=9), st.integers(0, 10))
def test_the_poisson_bound_is_never_below_the_truth(rates: list[float], hits: int) -> None:
    true = sum(
        math.prod(r if x else 1 - r for r, x in zip(rates, xs, strict=True))
        for xs in itertools.product((0, 1), repeat=len(rates))
        if sum(xs) >= hits
    )
    assert chance.poisson_bound(sum(rates), hits) >= true - 1e-12


def test_the_rule_of_three_bounds_what_nothing_seen_leaves() -> None:
    assert chance.rule_of_three(300) == 0.01
    assert chance.rule_of_three(2) == 1.0
    assert chance.rule_of_three(0) is None


@given(st.lists(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=2, max_size=3), max_size=2))
def test_the_grouping_test_is_the_share_of_all_orders(strata: list[list[list[int]]]) -> None:
    def pairs(groups: list[list[int]]) -> int:
        return sum(a == b for g in groups for a, b in itertools.combinations(g, 2))

    test, sums = chance.GroupingTest(), [0]
    for groups in strata:
        groups = [g[:2] for g in groups]
        test.add(groups)
        every = [answer for g in groups for answer in g]
        mine = []
        for order in itertools.permutations(every):
            cut = iter(order)
            mine.append(pairs([list(itertools.islice(cut, len(g))) for g in groups]))
        sums = [a + b for a in sums for b in mine]
    assert test.p() == pytest.approx(sum(s >= test.seen for s in sums) / len(sums))


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (2, 2), (3, 3), (2, 4), (1, 2, 2), (1, 1, 3)])
def test_groups_are_at_their_clearest_when_each_has_an_answer_of_its_own(sizes: tuple[int, ...]) -> None:
    """The share of all orders in which every group is of one kind, and no answers of any other kinds are clearer."""

    def p(answers: tuple[int, ...]) -> Fraction:
        def pairs(order: tuple[int, ...]) -> int:
            cut = iter(order)
            groups = [list(itertools.islice(cut, size)) for size in sizes]
            return sum(a == b for g in groups for a, b in itertools.combinations(g, 2))

        orders = [pairs(order) for order in itertools.permutations(answers)]
        return Fraction(sum(one >= pairs(answers) for one in orders), len(orders))

    own = tuple(number for number, size in enumerate(sizes) for _ in range(size))
    every = {p(answers) for answers in itertools.product(range(len(sizes)), repeat=len(own))}
    assert chance.clearest(sizes) == pytest.approx(float(p(own)))
    assert p(own) == min(every)


@given(st.lists(st.tuples(st.lists(st.integers(0, 20), max_size=3), st.lists(st.integers(0, 20), max_size=3)), max_size=3))  # fmt: skip
def test_the_median_test_is_the_share_of_all_arrangements(strata: list[tuple[list[int], list[int]]]) -> None:
    test = chance.MedianTest()
    arrangements: list[list[int]] = []
    for fast, slow in strata:
        test.add(fast, slow)
        if fast and slow:
            n = len(fast) + len(slow)
            arrangements.append(
                [sum(i < n // 2 for i in c) for c in itertools.combinations(range(n), len(fast))]
            )
    sums = [sum(one) for one in itertools.product(*arrangements)]
    assert test.p() == pytest.approx(sum(s >= test.seen for s in sums) / len(sums))


def test_equal_times_are_no_difference() -> None:
    test = chance.MedianTest()
    test.add([1.0] * 8, [1.0] * 8)
    assert test.p() == 1.0


def test_median_and_cliff() -> None:
    assert chance.median([3, 1, 2]) == 2
    assert chance.median([4, 1, 2, 3]) == 2.5
    with pytest.raises(ValueError, match="no median"):
        chance.median([])
    assert chance.cliffs_delta([1, 2], [3, 4]) == 1.0
    assert chance.cliffs_delta([1, 3], [1, 3]) == 0.0
