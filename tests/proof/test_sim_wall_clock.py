"""The simulator's deployment over Mooncake's real TCP transport, in real time."""

from __future__ import annotations

import pytest

from hermetic.proof.simulation.options import Rates
from hermetic.proof.simulation.plan import Asked
from hermetic.proof.simulation.wall_clock import run_real

pytest.importorskip("mooncake.engine", exc_type=ImportError)


@pytest.mark.soak
def test_answers_over_mooncake_are_right_while_clients_leave_workers_freeze_and_messages_are_lost() -> None:
    landed = 0
    for seed in range(1, 9):
        result = run_real(seed, Asked(60, Rates(freeze=8.0, abort=0.3)))
        assert result.found is None, result.found
        landed += result.pages_sent
    assert landed > 0
