"""The compiled search sees what the plain one sees: the same states, the same ends, the same faults."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from hermetic.handoff.actions import Action
from hermetic.handoff.decode import DecodeHandoff
from hermetic.handoff.outcome import Outcome
from hermetic.handoff.prefill import PrefillHandoff
from hermetic.proof import compiled
from hermetic.proof.compiled import Rank, _search, explore_exactly, row_of
from hermetic.proof.model import State
from hermetic.proof.part import Env
from hermetic.proof.parts import Parts
from hermetic.proof.scopes import Scope
from hermetic.proof.search import explore
from hermetic.proof.story import again
from hermetic.proof.tables import Filled
from hermetic.proof.world import World

SCOPES = (
    Scope("one, many faults", (1,), 1, 1, {"crash": 1, "loss": 1, "late": 1, "deadline": 1}),
    Scope("one of two pages", (2,), 2, 2, {"duplicate": 1, "late": 1}),
    Scope("two, one slot", (1, 1), 1, 1, {"late": 1}),
    Scope("two, calm", (2, 1), 3, 2),
    Scope("silence", (1,), 1, 1, {"silence": 1, "abort": 1, "damage": 1}),
    Scope("silence, shared memory", (1,), 1, 1, {"silence": 1, "crash": 1}, fenceable=False),
)


def _everything(world: World) -> set[State]:
    seen, frontier = {world.initial()}, [world.initial()]
    while frontier:
        following = {after for state in frontier for _, _, after in world.expand(state)} - seen
        seen |= following
        frontier = list(following)
    return seen


def _rows(ranks: list[Rank]) -> set[tuple[int, ...]]:
    return {tuple(row) for r in ranks for row in r.rows[: r.count].tolist()}


@pytest.mark.parametrize("scope", SCOPES, ids=lambda s: s.name)
def test_its_rows_are_exactly_the_states_of_the_world(scope: Scope) -> None:
    # Slots in the world's order: then nothing more can happen, and nothing less.
    found, filled, ranks, end = _search(scope, 2, False, None)
    told = {tuple(row_of(filled, state).tolist()) for state in _everything(filled.parts.world)}
    assert end is None
    assert found.complete
    assert _rows(ranks) == told


def test_when_any_free_slot_may_be_granted_nothing_that_could_happen_before_is_missing() -> None:
    scope = SCOPES[3]
    _, filled, ranks, _ = _search(scope, 2, True, None)
    told = {tuple(row_of(filled, state).tolist()) for state in _everything(filled.parts.world)}
    assert told <= _rows(ranks)


def test_equal_requests_and_names_of_slots_make_no_difference() -> None:
    equal = Scope("equal", (1, 1), 2, 2)
    assert explore_exactly(equal).states < explore_exactly(equal, any_slot=False).states
    assert explore_exactly(equal, any_slot=False).states < explore(equal, processes=1).states


def test_one_request_without_faults_has_the_states_that_the_plain_search_counts() -> None:
    scope = Scope("calm", (1,), 1, 1)
    ours, plain = explore_exactly(scope), explore(scope, processes=1)
    assert (ours.states, ours.transitions, ours.depth, ours.good) == (
        plain.states, plain.transitions, plain.depth, plain.good,
    )  # fmt: skip
    assert ours.rows == plain.rows


def test_the_number_of_threads_makes_no_difference() -> None:
    scope = SCOPES[0]
    assert (
        len(
            {
                (f.states, f.transitions, f.good)
                for f in (explore_exactly(scope, threads=n) for n in (1, 2, 3))
            }
        )
        == 1
    )


def test_progress_is_said_on_the_way_back_from_the_good_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "SLICE", 64)
    said = list[int]()
    found = explore_exactly(SCOPES[0], progress=lambda e: said.append(e.ending))
    back = [ending for ending in said if ending]
    assert len(back) > found.states / 64 / 2
    assert back == sorted(back)
    assert back[-1] == found.states, "from every state a good end is reachable"


def test_slots_released_at_the_abort_are_found_by_a_shortest_path_that_replays() -> None:
    end = DecodeHandoff._end

    def broken(self: DecodeHandoff, cause: Outcome) -> list[Action]:
        self._slots.release(self.key)
        return end(self, cause)

    scope = Scope("abort", (1,), 1, 1, {"abort": 1})
    with mock.patch.object(DecodeHandoff, "_end", broken):
        ours, plain = explore_exactly(scope).violation, explore(scope, processes=1).violation
        assert ours is not None
        assert plain is not None
        assert (ours.kind, len(ours.steps)) == ("I3", len(plain.steps))
        once_more = again(ours)
        assert once_more is not None
        assert once_more.kind == "I3"


def test_a_prefill_that_says_nothing_again_is_found_as_a_request_that_never_ends() -> None:
    scope = Scope("loss", (1,), 1, 1, {"loss": 1})
    with (
        mock.patch.object(PrefillHandoff, "nudge", return_value=[]),
        mock.patch.object(DecodeHandoff, "nudge", return_value=[]),
    ):
        violation = explore_exactly(scope).violation
    assert violation is not None
    assert violation.kind == "L1"
    assert explore_exactly(scope).violation is None


def test_uses_of_slots_are_numbered_anew_and_in_order() -> None:
    parts = Parts(Scope("uses", (1,), 1, 1, {"abort": 1}))
    seen, frontier = {parts.begun(1)}, [parts.begun(1)]
    while frontier:
        following = {made.to for number in frontier for made in parts.moves(number, Env())[0]} - seen
        seen |= following
        frontier = list(following)
    for number in seen:
        part = parts.parts[number]
        named = {use for six in part.six for _, use in parts._uses(six)} | {use for _, use in part.granted}
        assert named == set(range(1, part.uses[0] + 1))


def test_budgets_end_with_the_last_fault_that_is_allowed() -> None:
    filled = Filled(Scope("two of three", (1,), 1, 1, {"abort": 1, "loss": 1, "late": 1}, at_most=2))
    # All, three with one spent, none: after the second nothing is left, whichever it was.
    assert len(filled.budgets) == 1 + 3 + 1
    assert int(np.count_nonzero(filled.tables.none_left)) == 1


def test_a_scope_that_the_tables_have_no_room_for_is_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        explore_exactly(Scope("long", (5,), 5, 1))
    with pytest.raises(ValueError, match="one pair"):
        explore_exactly(Scope("two pairs", (1,), 1, 1, prefills=2))
