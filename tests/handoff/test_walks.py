"""Random walks over both machines, the slots and an adversarial network; invariants after every single move."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from handoff_world import World, rows_taken
from hypothesis import given, settings
from hypothesis import strategies as st

from hermetic.handoff.decode import DecodeHandoff
from hermetic.handoff.decode import State as DecodeState
from hermetic.handoff.outcome import Completed
from hermetic.handoff.prefill import PrefillHandoff
from hermetic.handoff.prefill import State as PrefillState

sizes = st.lists(st.integers(1, 80), min_size=1, max_size=3)
FAULTS = (
    "repeat", "lose", "overtake", "lie", "prefill aborts", "submit otherwise", "write badly", "write fails",
    "write in doubt", "bytes arrive", "prefill dies", "decode aborts", "decode dies", "silence", "overdue", "fence",
    "prefill nudges", "decode nudges", "repeat Resend", "repeat Landed", "repeat Ack", "lie about a page",
)  # fmt: skip
BEFORE = {
    "overdue": "decode aborts",
    "repeat Resend": "write badly",
}  # what makes room for a favourite that is seldom possible
# No worker takes these rows: it makes a machine for an event and not before, fences none that has not started, and
# throws queued copies away when a ticket ends. The tests of the tables take them.
NOT_WALKED = {
    (PrefillHandoff, PrefillState.NEW, "fenced"),
    (PrefillHandoff, PrefillState.QUEUED, "fenced"),
    (PrefillHandoff, PrefillState.HAS_REQUEST, "fenced"),
    (PrefillHandoff, PrefillState.HAS_GRANT, "fenced"),
    (PrefillHandoff, PrefillState.NEW, "abort"),
    (PrefillHandoff, PrefillState.NEW, "Abort"),
    (DecodeHandoff, DecodeState.QUARANTINED, "copied"),
}


def walk(
    favourite: str, tokens: list[int], slots: int, budget: int, picks: list[int], fenceable: bool = True
) -> Counter[str]:
    """One walk: one pick in four tries a fault, the favourite where it is possible, else any. Returns the faults met."""
    met: Counter[str] = Counter()
    world = World(tokens, slots, budget, fenceable)
    for pick in picks:
        faults = world.faults(pick >> 2) if pick % 4 == 0 else []
        chosen = [f for f in faults if f[0] == favourite]
        chosen = chosen or [f for f in faults if f[0] == BEFORE.get(favourite)]
        chosen = chosen or (faults if pick % 16 == 0 else [])
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


def evenly(favourite: str, walks: int) -> Counter[str]:
    """Walks drawn evenly, from a seed of their own: these meet the favourite for certain."""
    draw, met = random.Random(favourite), Counter[str]()
    for number in range(walks):
        tokens = [draw.randint(1, 80) for _ in range(draw.randint(1, 3))]
        picks = [draw.randrange(2**16) for _ in range(draw.randint(20, 150))]
        met += walk(favourite, tokens, draw.randint(1, 4), draw.randint(1, 6), picks, number % 3 > 0)
    return met


@pytest.mark.parametrize("favourite", FAULTS)
@settings(max_examples=40)
@given(
    tokens=sizes,
    slots=st.integers(1, 4),
    budget=st.integers(1, 6),
    picks=st.lists(st.integers(0, 2**16), min_size=20, max_size=120),
    fenceable=st.booleans(),
)
def test_no_slot_is_given_away_under_a_write_and_everything_ends_once_and_comes_back(
    favourite: str, tokens: list[int], slots: int, budget: int, picks: list[int], fenceable: bool
) -> None:
    walk(favourite, tokens, slots, budget, picks, fenceable)


@pytest.mark.parametrize("favourite", FAULTS)
def test_the_same_on_walks_that_are_drawn_evenly_and_meet_the_fault_for_certain(favourite: str) -> None:
    assert evenly(favourite, 120)[favourite] >= 10


@settings(max_examples=60)
@given(tokens=sizes, slots=st.integers(1, 4), picks=st.lists(st.integers(0, 2**16), max_size=200))
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


@pytest.mark.parametrize("seed", range(200))
def test_messages_that_are_lost_repeated_or_out_of_order_cost_no_request(seed: int) -> None:
    """Nobody aborts and no write fails; what was lost is repaired by time."""
    draw = random.Random(seed)
    tokens = [draw.randint(1, 80) for _ in range(draw.randint(1, 3))]
    picks = [draw.randrange(2**16) for _ in range(150)]
    world = World(tokens, draw.randint(1, 4), budget=8)
    for pick in picks:
        faults = [f for f in world.faults(pick >> 2) if f[0].startswith(("lose", "repeat", "overtake"))]
        if pick % 3 == 0 and faults:
            world.spend(faults[(pick >> 2) % len(faults)])
        elif moves := world.calm():
            moves[(pick >> 2) % len(moves)][1]()
        world.check()
    world.settle()
    assert all(t.entered == 1 for t in world.tickets)
    world.check_end()


def test_the_walks_take_every_row_of_both_tables_that_a_worker_can_take() -> None:
    with rows_taken() as taken:
        for favourite in FAULTS:
            evenly(favourite, 120)
    rows = {(machine, *row) for machine in (PrefillHandoff, DecodeHandoff) for row in machine.table}
    missing = rows - taken.keys() - NOT_WALKED
    assert not missing, sorted(
        f"{machine.__name__}: {state.name} --{event}" for machine, state, event in missing
    )
