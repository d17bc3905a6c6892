"""Random walks over both machines, the slots and an adversarial network; invariants after every single move."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from handoff_world import World
from hypothesis import given, settings
from hypothesis import strategies as st

from hermetic.handoff.outcome import Completed

sizes = st.lists(st.integers(1, 80), min_size=1, max_size=3)
FAULTS = (
    "repeat", "lose a credit", "lie", "prefill aborts", "submit otherwise", "write badly", "write fails",
    "write hangs", "bytes arrive", "prefill dies", "decode aborts", "decode dies", "silence",
)  # fmt: skip


def walk(favourite: str, tokens: list[int], slots: int, budget: int, picks: list[int]) -> Counter[str]:
    """One walk: one pick in four tries a fault, the favourite where it is possible, else any. Returns the faults met."""
    met: Counter[str] = Counter()
    world = World(tokens, slots, budget)
    for pick in picks:
        faults = world.faults(pick >> 2) if pick % 4 == 0 else []
        chosen = [f for f in faults if f[0] == favourite] or (faults if pick % 16 == 0 else [])
        if chosen:
            move = chosen[(pick >> 2) % len(chosen)]
            met[move[0]] += 1
            world.spend(move)
        elif moves := world.calm():
            moves[(pick >> 2) % len(moves)][1]()
        world.check()
    world.settle()
    world.check_end()
    return met


@pytest.mark.parametrize("favourite", FAULTS)
@settings(max_examples=60, deadline=None)
@given(
    tokens=sizes,
    slots=st.integers(1, 5),
    budget=st.integers(1, 6),
    picks=st.lists(st.integers(0, 2**16), min_size=20, max_size=120),
)
def test_no_slot_is_given_away_under_a_write_and_everything_ends_once(
    favourite: str, tokens: list[int], slots: int, budget: int, picks: list[int]
) -> None:
    walk(favourite, tokens, slots, budget, picks)


@pytest.mark.parametrize("favourite", FAULTS)
def test_the_same_on_walks_that_are_drawn_evenly_and_meet_the_fault_for_certain(favourite: str) -> None:
    draw, met = random.Random(favourite), Counter[str]()
    for _ in range(60):
        tokens = [draw.randint(1, 80) for _ in range(draw.randint(1, 3))]
        picks = [draw.randrange(2**16) for _ in range(draw.randint(20, 150))]
        met += walk(favourite, tokens, draw.randint(1, 5), draw.randint(1, 6), picks)
    assert met[favourite] >= 10


@settings(max_examples=60, deadline=None)
@given(tokens=sizes, slots=st.integers(1, 5), picks=st.lists(st.integers(0, 2**16), max_size=200))
def test_without_faults_every_request_enters_in_whatever_order_things_happen(
    tokens: list[int], slots: int, picks: list[int]
) -> None:
    world = World(tokens, slots, budget=0)
    for pick in picks:
        if moves := world.calm():
            moves[pick % len(moves)][1]()
            world.check()
    world.settle()
    assert all(t.entered == 1 for t in world.tickets)
    assert all(t.reports == {"prefill": [Completed()], "decode": [Completed()]} for t in world.tickets)
    world.check_end()
