"""The whole table: every mutant by everybody who has to find it, and the scopes that are too large for each day."""

from __future__ import annotations

import pytest

from hermetic.proof.mutants.registry import MUTANTS
from hermetic.proof.mutants.table import lines, table
from hermetic.proof.search import explore

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


def test_every_mutant_is_caught_by_everybody_who_has_to() -> None:
    rows = table(MUTANTS)
    assert not [row.mutant.name for row in rows if not row.caught], "\n".join(lines(rows))


def test_without_its_mutant_the_scope_with_a_silence_holds() -> None:
    scope = MUTANTS["stale-answer-by-reused-id"].scope
    assert scope is not None
    result = explore(scope, reduce=False)
    assert result.violation is None
    assert result.complete
