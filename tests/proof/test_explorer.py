"""The explorer: it finds what is there, finds nothing where nothing is, and its reductions change neither."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hermetic.handoff import messages as m
from hermetic.handoff.actions import Action, CloseLeases
from hermetic.handoff.decode import DecodeHandoff
from hermetic.handoff.machine import Machine
from hermetic.handoff.outcome import Outcome
from hermetic.handoff.prefill import PrefillHandoff
from hermetic.handoff.unknown import Answer, at_prefill
from hermetic.kv.pool import Kind
from hermetic.kv.slots import Slots, SlotUse
from hermetic.proof import draft, halves, search
from hermetic.proof.codec import decode, decode_machine, decode_slots, encode, encode_machine, encode_slots
from hermetic.proof.model import GT, MASK, State
from hermetic.proof.pages import PageBook, empty
from hermetic.proof.saved import SavedError, Step, load
from hermetic.proof.scopes import FAULTS, SCOPES, Scope
from hermetic.proof.search import explore
from hermetic.proof.story import Taken, again, told
from hermetic.proof.walks import walk
from hermetic.proof.world import World, label

ONE = {name: Scope(name, (1,), 1, 1, {name: 1}) for name in FAULTS}
TWO = Scope("two", (1, 1), 1, 1, {"abort": 1})


# ---------------------------------------------------------------------- product code, broken
@contextmanager
def slots_are_released_at_the_abort() -> Iterator[None]:
    end = DecodeHandoff._end

    def broken(self: DecodeHandoff, cause: Outcome) -> list[Action]:
        self._slots.release(self.key)
        return end(self, cause)

    with mock.patch.object(DecodeHandoff, "_end", broken):
        yield


@contextmanager
def sources_are_closed_at_the_abort() -> Iterator[None]:
    end = PrefillHandoff._end

    def broken(self: PrefillHandoff, cause: Outcome) -> list[Action]:
        report, *rest = end(self, cause)
        return [report, CloseLeases(), *rest]

    with mock.patch.object(PrefillHandoff, "_end", broken):
        yield


@contextmanager
def a_write_in_doubt_is_taken_for_one_that_stopped() -> Iterator[None]:
    wrote = PrefillHandoff._wrote

    def broken(self: PrefillHandoff, batch: int, ok: bool, stopped: bool) -> list[Action]:
        return wrote(self, batch, ok, True)

    with mock.patch.object(PrefillHandoff, "_wrote", broken):
        yield


@contextmanager
def an_abort_of_an_unknown_ticket_is_not_answered() -> Iterator[None]:
    def broken(ended: Outcome | None, message: m.HandoffMessage) -> Answer:
        return Answer(stale=True) if isinstance(message, m.Abort) else at_prefill(ended, message)

    with mock.patch.object(halves, "at_prefill", broken):
        yield


@contextmanager
def decode_says_nothing_again() -> Iterator[None]:
    with mock.patch.object(DecodeHandoff, "nudge", return_value=[]):
        yield


@contextmanager
def the_slot_is_hashed_and_then_copied() -> Iterator[None]:
    """Wall 3 the wrong way round: what was hashed is not what is read."""

    def verified(self: draft.Draft, t: int) -> None:
        page, (_, slot, _) = self.decode(t).checking
        pair = self.known(t).pair
        before = self.contents[self.ids[self.world.dpool_at(pair)]]
        table = next(pages for ticket, pages, _ in before[2] if ticket == t)
        good = before[3][table[page]] == ("K", t, page, True)
        self.page_op(
            self.world.dpool_at(pair), "land", t, page, self.contents[self.ids[self.world.mem_at(pair)]][slot]
        )
        self.checked(t, page, good)

    with mock.patch.object(draft.Draft, "verify", verified):
        yield


BROKEN: dict[Callable[[], AbstractContextManager[None]], tuple[Scope, str]] = {
    slots_are_released_at_the_abort: (ONE["abort"], "I3"),
    sources_are_closed_at_the_abort: (ONE["abort"], "I3"),
    a_write_in_doubt_is_taken_for_one_that_stopped: (ONE["late"], "I3"),
    an_abort_of_an_unknown_ticket_is_not_answered: (
        Scope("abort and loss", (1,), 1, 1, {"abort": 1, "loss": 1}),
        "L2",
    ),
    decode_says_nothing_again: (ONE["loss"], "L1"),
    the_slot_is_hashed_and_then_copied: (Scope("two late", (1, 1), 2, 1, {"late": 1}), "I1"),
}


# ------------------------------------------------------------------------------------ searching
@pytest.mark.parametrize("scope", SCOPES["small"], ids=lambda scope: scope.name)
def test_the_protocol_keeps_every_promise_in_the_small_scope(scope: Scope) -> None:
    found = explore(scope)
    assert found.violation is None, found.violation
    assert found.complete
    assert found.good > 0


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
@pytest.mark.parametrize("reduce", [True, False], ids=["reduced", "whole"])
def test_what_is_broken_in_product_code_is_found_with_and_without_reductions(
    broken: Callable[[], AbstractContextManager[None]], reduce: bool
) -> None:
    scope, kind = BROKEN[broken]
    with broken():
        found = explore(scope, reduce=reduce)
    assert found.violation is not None
    assert found.violation.kind == kind, found.violation.text
    if kind in ("L1", "L2"):
        with broken():
            assert _stays(World(scope, reduce), found.violation.steps)


def _stays(world: World, steps: Sequence[Step]) -> bool:
    """Whether these moves lead to where time and delivery alone always lead back to."""
    state = world.initial()
    for step in steps:
        state = next(after for move, _, after in world.expand(state) if label(move) == step.move)
    return all(state in set(_calm(world, after)) for after in _calm(world, state))


def _calm(world: World, state: State) -> set[State]:
    seen, left = {state}, [state]
    while left:
        left += [s for _, calm, s in world.expand(left.pop()) if calm and s not in seen and not seen.add(s)]  # type: ignore[func-returns-value]
    return seen


def test_a_shortest_path_is_found_whatever_the_number_of_processes() -> None:
    with slots_are_released_at_the_abort():
        lengths = {len(explore(ONE["abort"], processes=n).violation.steps) for n in (1, 2, 3)}  # type: ignore[union-attr]
    # submit x 2, reserve, Grant, start, compute, Started, credit, Credit (the write begins), the client leaves, cancel
    assert lengths == {11}


@pytest.mark.parametrize("scope", [ONE["abort"], ONE["crash"], TWO], ids=lambda scope: scope.name)
def test_one_process_and_three_see_the_same_states(scope: Scope) -> None:
    counts = {
        (found.states, found.transitions, found.good)
        for found in (explore(scope, processes=n) for n in (1, 3))
    }
    assert len(counts) == 1


def outcomes(scope: Scope, reduce: bool) -> set[tuple[Any, ...]]:
    """Every pair of reports that the gateway can get for a request, by their kind."""
    world = World(scope, reduce)
    seen, frontier, found = {world.initial()}, [world.initial()], set()
    while frontier:
        following: list[State] = []
        for state in frontier:
            for t in range(world.tickets):
                known = world.store.contents[state[6 * t + GT]]
                found.add((t, *(report and report[1:3] for report in known[5:7])))
            for _, _, after in world.expand(state):
                if after not in seen:
                    seen.add(after)
                    following.append(after)
        frontier = following
    return found


@pytest.mark.parametrize("name", ["abort", "loss", "late", "damage", "duplicate"])
def test_reductions_lose_no_outcome(name: str) -> None:
    assert outcomes(ONE[name], True) == outcomes(ONE[name], False)


def test_every_fault_is_met_and_changes_what_can_be_reached() -> None:
    calm = explore(Scope("calm", (1,), 1, 1)).states
    for name in FAULTS:
        if name != "deadline":  # it needs an abort before it
            assert explore(ONE[name]).states > calm, name
    late = Scope("late drain", (1,), 1, 1, {"abort": 1, "deadline": 1})
    assert explore(late).states > explore(ONE["abort"]).states


def test_without_faults_a_request_has_one_end_and_it_is_good() -> None:
    found = explore(Scope("calm", (1,), 1, 1))
    assert found.complete
    assert found.good == 1


# ------------------------------------------------------------------------------- one writer (I2)
def landing() -> PageBook:
    """A page of A/1 that was copied to once."""
    book = PageBook(empty(2))
    book.allocate(0, 1, Kind.RECEIVE)
    book.land(0, 0, ("K", 0, 0, True))
    assert book.check() is None
    return book


def test_a_page_that_was_verified_is_copied_to_no_more() -> None:
    book = landing()
    book.tag(0, 0)
    book.land(0, 0, ("K", 0, 0, True))  # the same bytes: nothing else would tell
    assert book.check() == "I2: page 0 of A/1 is copied to, and it was verified already"


def test_a_page_that_somebody_else_holds_is_not_copied_to() -> None:
    book = landing()
    book.held[2] = [book.pool.lease(Kind.READ, "B", book.held[0][0].pages)]
    book.land(0, 0, None)
    assert book.check() == "I2: page 0 of A/1 is copied to, and it is leased for receive, read"


def test_a_page_is_computed_once() -> None:
    book = PageBook(empty(2))
    book.allocate(0, 1, Kind.APPEND)
    book.made(0, 0)
    assert book.check() is None
    book.made(0, 0)
    assert str(book.check()).startswith("I2: page 0 of A/1 is computed: a write to a page without its only")


# -------------------------------------------------------------------------------------- replaying
def test_a_saved_counterexample_is_found_again_and_is_gone_when_the_code_is_mended(tmp_path: Path) -> None:
    with slots_are_released_at_the_abort():
        found = explore(ONE["abort"]).violation
        assert found is not None
        found.save(tmp_path / "found.json")
        once_more = again(load(tmp_path / "found.json"))
    assert once_more is not None
    assert (once_more.kind, once_more.text) == (found.kind, found.text)
    assert again(load(tmp_path / "found.json")) is None


def test_a_step_that_does_not_exist_any_more_is_named() -> None:
    with decode_says_nothing_again():
        found = explore(ONE["loss"]).violation
    assert found is not None
    with (
        mock.patch.object(DecodeHandoff, "reserved", return_value=[]),
        pytest.raises(SavedError, match="step"),
    ):
        again(found)


def test_a_chart_names_the_workers_that_an_attempt_is_on() -> None:
    world = World(Scope("two decodes", (1,), 1, 1, decodes=2))
    state, taken = world.initial(), list[Taken]()
    for kind in ("begin", "submit decode", "submit prefill", "reserve", "down"):
        move, after = [(move, after) for move, _, after in world.expand(state) if move[0] == kind][-1]
        taken.append((move, state))
        state = after
    steps = told(world, "", "I3", "a test's", taken).steps
    assert steps[0].detail == "at prefill-0 and decode-1"
    assert [(step.actor, step.to) for step in steps[1:]] == [
        ("gateway", "decode-1"), ("gateway", "prefill-0"), ("decode-1", ""), ("decode-1", "prefill-0"),
    ]  # fmt: skip


# --------------------------------------------------------------------------------------- progress
@pytest.mark.parametrize("processes", [1, 2])
def test_progress_is_said_within_a_level_and_grows(processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[tuple[int, int]]()
    monkeypatch.setattr(search, "SAY_SECONDS", -1.0)  # after every state
    found = explore(
        ONE["abort"], processes=processes, progress=lambda e: said.append((e.depth, e.transitions))
    )
    assert len(said) > 3 * found.depth
    assert [depth for depth, _ in said] == sorted(depth for depth, _ in said)
    assert said[-1] == (found.depth, found.transitions)


# -------------------------------------------------------------------------------------- encoding
def test_everything_of_a_machine_is_encoded_and_comes_back() -> None:
    slots = Slots(3)
    machine = DecodeHandoff(m.Key(b"\0" * 16, 1), 5, 3, slots)
    machine.received(m.Started(3))
    machine.credit(2)
    machine.received(m.Landed(1, ((1, 2, 1),)))
    again_ = decode_machine(
        DecodeHandoff(machine.key, 5, 3, decode_slots(encode_slots(slots, halves.ticket_of), halves.key_of)),
        encode_machine(machine),
    )
    for name, value in vars(machine).items():
        if name not in ("_slots", "stale", "resends", "_cause"):  # of a cause only what decides is kept
            assert getattr(again_, name) == value, name
            assert type(getattr(again_, name)) is type(value), name
    assert vars(again_).keys() == vars(machine).keys()


@pytest.mark.parametrize("kind", [PrefillHandoff, DecodeHandoff])
def test_an_attribute_that_a_machine_gets_one_day_is_encoded_or_refused(kind: type[Machine[Any]]) -> None:
    key = m.Key(b"\0" * 16, 1)
    machine: Any = kind(key) if kind is PrefillHandoff else DecodeHandoff(key, 1, 1, Slots(1))
    before = encode_machine(machine)
    machine.added = 7
    assert encode_machine(machine) != before
    machine.added = object()
    with pytest.raises(TypeError, match="object has no encoding"):
        encode_machine(machine)


@pytest.mark.parametrize(
    "value",
    [
        None, 3, True, b"x", "x", SlotUse(1, 2), (1, (2, b"")), [SlotUse(0, 1)], {SlotUse(0, 1): 4, SlotUse(1, 1): 5},
        {3, 1, 2}, m.Credit(2, ((0, 1), (1, 4))), m.Landed(1, ((0, 1, 2),)), m.Resend(1, (0, 2)), m.Ack(), m.Drained(),
        m.Complete(3, 2, 1, b"s"), m.Grant(3, 2), m.Started(2), m.Abort("kv_integrity", ""),
    ],
)  # fmt: skip
def test_a_value_comes_back_as_it_was(value: object) -> None:
    assert decode(encode(value)) == value


# ---------------------------------------------------------------------------------- scopes, walks
@pytest.mark.parametrize(
    "wrong",
    [
        {"prompts": (3,)}, {"prompts": ()}, {"prompts": (0,)}, {"faults": {"abrot": 1}}, {"faults": {"abort": -1}},
        {"slots": 0}, {"prefills": 0},
    ],
)  # fmt: skip
def test_a_scope_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"fit|fault|at least"):
        Scope(**({"name": "wrong", "prompts": (1,), "pages": 2, "slots": 1} | wrong))


def test_a_scope_says_what_it_covers() -> None:
    scope = Scope("x", (2, 1), 3, 2, {"crash": 1, "abort": 2}, at_most=2, fenceable=False)
    assert scope.covered() == (
        "2 requests (2 pages and 1 page), 1 prefill + 1 decode, 3 pages, 2 slots; faults: crash 1, abort 2, at most 2 in "
        "one run; a peer that lives cannot be fenced"
    )


def test_walks_of_one_seed_are_the_same_and_meet_nothing_wrong() -> None:
    scope = SCOPES["large"][0]
    (first, states), (second, same) = walk(scope, 3, 12), walk(scope, 3, 12)
    assert first.violation is None
    assert (first.steps, states) == (second.steps, same)
    assert first.ended == 12
    assert all(state <= MASK for state in states)


def test_walks_find_what_is_broken() -> None:
    with slots_are_released_at_the_abort():
        found, _ = walk(SCOPES["large"][0], 1, 200)
    assert found.violation is not None
    assert found.violation.kind == "I3"
