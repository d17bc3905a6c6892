"""What the production objects do in the explorer is what the abstract protocol does, step by step."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from hermetic.handoff.actions import Action, CloseLeases, Forget, Send
from hermetic.handoff.decode import DecodeHandoff
from hermetic.handoff.messages import Drained
from hermetic.handoff.prefill import PrefillHandoff, State
from hermetic.kv.slots import Slots
from hermetic.proof.refinement import refine
from hermetic.proof.scopes import SCOPES, Scope

CALM = Scope("one page, no faults", (1,), 1, 1, {})
HURT = Scope("two pages, damage", (2,), 2, 2, {"damage": 1, "abort": 1})


def test_a_request_without_faults_is_a_run_of_the_abstract_protocol() -> None:
    result = refine(CALM, every=True)
    (part,) = result.parts
    assert (part.violation, part.complete) == (None, True)
    assert part.proved == part.distinct > 15
    assert {
        "reserve",
        "write",
        "copy",
        "verify_good",
        "enter",
        "ack_received",
        "finish",
    } <= part.actions.keys()


def test_every_step_with_crash_abort_loss_duplicate_late_write_and_deadline_is_one() -> None:
    six = SCOPES["small"][0]
    result = refine(six, states=1000)
    assert result.violation is None, result.violation
    assert {"in_doubt", "fence", "drop", "prefill_dies", "decode_dies", "quarantine"} <= result.actions.keys()


def test_a_damaged_page_is_asked_for_again_in_the_abstract_protocol_as_well() -> None:
    result = refine(HURT, states=1500, z3_steps=0)
    assert result.violation is None, result.violation
    assert {"verify_bad", "ask_again", "write_again"} <= result.actions.keys()


@pytest.mark.soak
def test_every_state_of_the_small_scope_is_tied() -> None:
    result = refine(SCOPES["small"], states=10**9)
    assert result.violation is None, result.violation
    assert all(part.complete and part.proved == part.distinct for part in result.parts)


def _refused(scope: Scope) -> str:
    found = refine(scope, z3_steps=0, mutant="a test's").violation
    assert found is not None
    assert found.kind == "refinement", found
    return found.text


def test_drained_that_is_said_under_a_write_is_refused_where_it_is_said() -> None:
    def at_once(self: PrefillHandoff) -> list[Action]:
        self.state = State.ENDED
        return [CloseLeases(), Send(Drained()), Forget()]

    with mock.patch.object(PrefillHandoff, "_drained_if_idle", at_once):
        scope = Scope("abort", (1,), 1, 1, {"abort": 1})
        found = refine(scope, z3_steps=0, mutant="a test's").violation
    assert found is not None
    assert found.kind in ("refinement", "I3")


def test_slots_that_are_not_given_back_when_a_request_enters_are_seen() -> None:
    def keep(self: Slots, key: object) -> int:
        return 0

    with mock.patch.object(Slots, "release", keep):
        text = _refused(Scope("two requests, one leaves", (2, 1), 3, 2, {"abort": 1}))
    assert text.startswith("granted holds for")


def test_a_request_that_enters_before_it_knows_that_all_is_said_is_seen() -> None:
    real = DecodeHandoff._copied

    def early(self: DecodeHandoff, page: int, good: bool) -> Any:
        actions = real(self, page, good)
        if self._complete is None and len(self._verified) == self._pages:
            self._complete = mock.Mock(state=b"first token")
            return [*actions, *self._enter_if_whole()]
        return actions

    with mock.patch.object(DecodeHandoff, "_copied", early):
        text = _refused(CALM)
    assert "enter(t=0)" in text
    assert "heard(t)" in text
