"""Every fault of the field that is put back is found, by whoever finds it soonest; and what finds it finds nothing without it."""

from __future__ import annotations

from typing import Any

import pytest

from hermetic.handoff import unknown
from hermetic.handoff.decode import DecodeHandoff
from hermetic.handoff.prefill import PrefillHandoff
from hermetic.handoff.unknown import at_prefill
from hermetic.kv.slots import Slots
from hermetic.proof import halves
from hermetic.proof.mutants.catch import catch
from hermetic.proof.mutants.patching import EXPLORER, MutantError, Patch, patched
from hermetic.proof.mutants.plays import PLAYS
from hermetic.proof.mutants.registry import (
    CATCHERS,
    INDUCTION,
    LAB,
    MUTANTS,
    SEAL,
    SIMULATOR,
    Mutant,
    applied,
    find,
)
from hermetic.proof.mutants.table import HEADER, Row, lines, markdown, table
from hermetic.proof.saved import SavedError
from hermetic.proof.search import explore
from hermetic.proof.slips import SLIPS
from hermetic.proof.story import again

# The list of the proof's issue, and the classes of FAULTS.md that a protocol can have.
ISSUE = (
    "reject-becomes-placeholder", "admit-unless-finished", "trust-complete-count", "release-at-abort",
    "drain-target-cleared", "one-drain-target", "abort-unknown-unanswered", "release-on-other-failure",
    "source-freed-while-read", "failed-send-counts-as-drained", "stale-answer-by-reused-id", "time-out-releases-anyway",
    "double-close", "one-half-cancelled", "batch-bound-over-deadline", "late-write-between-verify-and-copy",
    "credit-before-copy",
)  # fmt: skip
CLASSES = {
    "in-flight reuse", "stale reference", "fail open", "partial state", "id reuse", "slot bleed", "stream order",
    "lost signal", "stuck queue", "leak", "key scope", "layout mismatch",
}  # fmt: skip
QUICK = (EXPLORER, INDUCTION, SEAL, LAB, SIMULATOR)  # who finds something soonest comes first
MANY = 20_000  # states of a mutant's scope; a larger one is searched without the mutant in the soak


def test_the_list_of_the_issue_is_there_under_its_numbers() -> None:
    assert {m.number: m.name for m in MUTANTS.values() if m.number} == dict(enumerate(ISSUE, 1))


def test_every_class_of_faults_that_a_protocol_can_have_has_a_mutant() -> None:
    assert {c for m in MUTANTS.values() for c in m.classes} == CLASSES


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=lambda m: m.name)
def test_what_the_registry_promises_can_be_asked_for(mutant: Mutant) -> None:
    assert mutant.caught_by
    assert set(mutant.caught_by) <= set(CATCHERS)
    assert (EXPLORER in mutant.caught_by) == (mutant.scope is not None)
    assert (INDUCTION in mutant.caught_by) == (mutant.name in SLIPS)
    assert bool({SEAL, LAB} & set(mutant.caught_by)) == (mutant.name in PLAYS)
    assert mutant.fault.endswith(".")


@pytest.mark.parametrize("name", MUTANTS)
def test_each_is_caught(name: str) -> None:
    result = catch(name, next(by for by in QUICK if by in find(name).caught_by))
    assert result.found
    if result.counterexample is not None:
        assert result.counterexample.mutant == name


@pytest.mark.parametrize(
    "name", [m.name for m in MUTANTS.values() if m.scope and not m.scope.faults.get("silence")]
)
def test_without_the_mutant_its_scope_holds(name: str) -> None:
    scope = find(name).scope
    assert scope is not None
    result = explore(scope, processes=1, reduce=False, limit=MANY)
    assert result.violation is None
    assert result.complete


@pytest.mark.parametrize("name", sorted({"release-at-abort", "credit-before-copy", "leases-left"}))
def test_a_counterexample_is_repeated_with_its_mutant_and_not_without(name: str) -> None:
    found = catch(name, EXPLORER).counterexample
    assert found is not None
    with applied(name, EXPLORER):
        repeated = again(found, reduce=False)
    assert repeated is not None
    assert (repeated.kind, repeated.text) == (found.kind, found.text)
    try:
        repeated = again(found, reduce=False)
    except SavedError:  # a move of it is none of the product's
        return
    assert repeated is None


@pytest.mark.parametrize("name", ["nothing-differs", "lineage-without-tenant", "firsts-by-slot"])
def test_without_the_mutant_its_play_is_uneventful(name: str) -> None:
    assert PLAYS[name]() == ""


# ----------------------------------------------------------------------------------------------- patches
def _same(original: Any) -> Any:
    return original


def test_what_is_not_there_any_more_is_an_error_and_not_a_mutant_that_nobody_finds() -> None:
    for target in (
        "hermetic.kv.slots:Slots.release_all",
        "hermetic.kv.slots:Slot.release",
        "hermetic.kv.slots:nothing",
    ):
        with pytest.raises(MutantError, match="is not there any more"), patched([Patch(target, _same)]):
            pass


def test_a_method_that_a_class_only_inherits_is_not_patched_by_mistake() -> None:
    target = "hermetic.handoff.decode:DecodeHandoff._ignored"
    with pytest.raises(MutantError, match="is not there any more"), patched([Patch(target, _same)]):
        pass


def test_code_that_was_not_reached_is_told() -> None:
    target = "hermetic.kv.slots:Slots.fence"
    with patched([Patch(target, _same)]) as reached:
        assert reached.missed(EXPLORER) == [target]
        Slots(1).fence()
        assert reached.missed(EXPLORER) == []


def test_a_mutant_whose_code_is_not_reached_is_not_caught_but_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    aside = Patch("hermetic.proof.draft:Draft.silence", _same, EXPLORER)
    mutant = find("time-out-releases-anyway")
    monkeypatch.setitem(
        MUTANTS, mutant.name, Mutant(mutant.name, mutant.fault, (), (aside,), (EXPLORER,), mutant.scope)
    )
    with pytest.raises(MutantError, match="was never reached"):
        catch(mutant.name, EXPLORER)


def test_reaching_is_seen_across_processes_that_are_forked() -> None:
    name = "time-out-releases-anyway"
    assert catch(name, EXPLORER, processes=2).found == catch(name, EXPLORER, processes=1).found


def test_a_function_is_patched_wherever_it_was_imported_and_put_back() -> None:
    with applied("abort-unknown-unanswered", EXPLORER):
        assert unknown.at_prefill is halves.at_prefill
        assert unknown.at_prefill is not at_prefill
    assert unknown.at_prefill is halves.at_prefill is at_prefill


@pytest.mark.parametrize("name", MUTANTS)
def test_nothing_is_left_behind(name: str) -> None:
    classes = (DecodeHandoff, PrefillHandoff, Slots)
    before = [dict(vars(c)) for c in classes]
    with applied(name):
        pass
    assert [dict(vars(c)) for c in classes] == before


def test_unknown_names_are_answered_with_those_that_there_are() -> None:
    with pytest.raises(MutantError, match=r"no mutant 'nonsense'.*time-out-releases-anyway"):
        find("nonsense")


# ----------------------------------------------------------------------------------------------- the table
def test_the_table_has_a_line_for_each_and_says_who_caught_it() -> None:
    rows = table(["release-at-abort", "nudge-says-nothing"], catchers=[EXPLORER], processes=1)
    assert [row.caught for row in rows] == [True, True]
    text = markdown(rows)
    assert text.splitlines()[0] == "| " + " | ".join(HEADER) + " |"
    assert "| 4 release-at-abort |" in text
    assert "| I3 | 11 |" in text
    assert lines(rows)[-1] == "2 of 2 mutants are caught"


def test_one_that_passes_is_shown_as_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = find("release-at-abort")
    harmless = Mutant(
        "harmless",
        "Nothing.",
        (),
        (Patch("hermetic.kv.slots:Slots.grant", _same),),
        (EXPLORER,),
        mutant.scope,
    )
    monkeypatch.setitem(MUTANTS, "harmless", harmless)
    row: Row = table(["harmless"], processes=1)[0]
    assert row.missed == (EXPLORER,)
    assert not row.caught
    assert "NOT FOUND" in markdown([row])
    assert lines([row])[-1] == "0 of 1 mutants are caught"
