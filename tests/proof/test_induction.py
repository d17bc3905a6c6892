"""The induction closes for any number of anything; without a conjunct, or with a slip in an action, it does not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from hermetic.proof import induction as module
from hermetic.proof.abstract import ACTIONS
from hermetic.proof.induction import Induction, InductionResult, prove_induction
from hermetic.proof.invariant import CONJUNCTS, MOMENTS, PROMISES
from hermetic.proof.slips import SLIPS, mutated


@cache
def proved() -> InductionResult:
    return prove_induction()


def test_every_action_keeps_every_conjunct_and_they_imply_the_promises() -> None:
    result = proved()
    assert result.closed, result.counterexample
    assert {q.verdict for q in result.queries} == {"holds"}
    assert result.implied.keys() == PROMISES.keys()
    assert {c.promise for c in PROMISES.values()} == {"I1", "I2", "I3"}
    moments = {q.conjunct for q in result.queries} - CONJUNCTS.keys()
    assert moments == {m.name for m in MOMENTS.values()}


def test_each_pair_of_action_and_conjunct_was_asked_or_shares_nothing() -> None:
    result = proved()
    assert len(result.queries) - len(MOMENTS) + result.untouched == len(ACTIONS) * len(CONJUNCTS)


def test_every_action_can_happen_in_a_state_of_the_invariant() -> None:
    result = proved()
    assert set(result.possible) == ACTIONS.keys()
    assert not result.impossible


def test_no_conjunct_can_be_taken_out() -> None:
    needs = {need.conjunct: need.breaks for need in proved().needs}
    assert needs.keys() == CONJUNCTS.keys()
    assert not [name for name, breaks in needs.items() if not breaks or "does not know" in breaks]


@pytest.mark.parametrize("name", sorted(SLIPS))
def test_a_slip_breaks_what_is_promised_and_is_told_in_words(name: str) -> None:
    result = prove_induction(name)
    assert not result.closed
    assert result.failed is not None
    action, broken = result.failed
    assert action == SLIPS[name].action
    told = result.counterexample or ""
    assert ACTIONS[action].says in told
    said = CONJUNCTS[broken].says if broken in CONJUNCTS else MOMENTS[action].says
    assert told.splitlines()[-1].endswith(said)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "release-at-abort",
            ("may still arrive in slot 0 (use 1)", "no longer: slot 0 (use 1) is granted to A"),
        ),
        (
            "credit-before-copy",
            ("a copy of page 0 of A from slot 0 (use 1) to decode page d0 is to be made",),
        ),
        ("lease-taken-page", ("decode page d0 is leased by B", "decode page d0 is leased by A")),
    ],
)
def test_a_counterexample_names_attempts_slots_and_pages(name: str, words: tuple[str, ...]) -> None:
    told = prove_induction(name).counterexample or ""
    assert all(word in told for word in words), told


def test_a_name_without_a_slip_is_an_error() -> None:
    with pytest.raises(KeyError):
        mutated("no-such-slip")


def test_a_slip_in_a_line_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SLIPS, "gone", replace(SLIPS["credit-used-twice"], was="no such line"))
    with pytest.raises(ValueError, match="a line that write does not have"):
        mutated("gone")


def test_an_action_that_can_never_happen_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    never = replace(ACTIONS["finish"], guard=("decode[t] == 'entered'", "decode[t] == 'ended'"))
    monkeypatch.setattr(module, "ACTIONS", {"finish": never})
    result = prove_induction(full=False)
    assert result.impossible == ["finish"]
    assert not result.closed


def test_what_z3_does_not_know_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    result = replace(proved(), queries=[*proved().queries, module.Query("copy", "read-whole", "unknown")])
    assert not result.closed


def test_a_beginning_that_breaks_a_conjunct_is_no_proof() -> None:
    never = replace(CONJUNCTS["source-is-kept"], holds="all(kept(q, t) for t, i in needed for q, b in kept)")
    assert Induction(ACTIONS, {"x": never}).beginning()  # vacuous: nothing is kept yet
    broken = replace(never, holds="any(True for t, i, p in table)")
    assert not Induction(ACTIONS, {"x": broken}).beginning()
