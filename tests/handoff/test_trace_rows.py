"""Recorded, the tests of the handoff take every row of both tables (the recording itself is judged in tests/conftest.py)."""

from __future__ import annotations

from collections import Counter

import pytest

from hermetic.proof.conform import ROWS


@pytest.mark.after_all_others
def test_together_the_tests_of_the_handoff_take_every_row_of_both_tables(
    rows_taken_so_far: Counter[tuple[str, str, str]],
) -> None:
    missing = ROWS - rows_taken_so_far.keys()
    assert not missing, sorted(missing)
