"""The incident with a real model and text: Alice's words in Bob's answer, unless one wall stands."""

from __future__ import annotations

import pytest

from hermetic.handoff.outcome import Completed, Failed
from hermetic.lab.incident import MARKER, stage
from hermetic.lab.scene import SETTINGS, Verdict

pytestmark = [
    pytest.mark.slow,
    pytest.mark.breaks_the_protocol("prefill computes a placeholder, and takes pages for that only"),
]
BY_NAME = {setting.name: setting for setting in SETTINGS}


@pytest.fixture(scope="module")
def carol() -> str:
    """What the neighbour gets when nothing is wrong."""
    told = stage(BY_NAME["product default"], disturbed=False)
    assert told.verdict is Verdict.HARMLESS
    assert MARKER not in told.text
    return told.other_text


def test_with_no_wall_another_tenants_words_come_back_with_a_200(carol: str) -> None:
    told = stage(BY_NAME["no walls"])
    assert told.verdict is Verdict.LEAK
    assert isinstance(told.outcome, Completed)
    # Proven from bytes: the rows of the tokens that spell Alice's marker were read by Bob's attention,
    # in all 30 layers and 3 heads, K and V.
    assert MARKER in told.marker_read
    assert told.marker_rows > 30 * 3 * 2
    # And to be seen by a person, in the text.
    assert "PELICAN-7731 is Alice" in told.text
    assert told.other_text == carol


@pytest.mark.parametrize("name", ["product default", "ownership alone", "landing alone", "read alone"])
def test_any_of_these_walls_alone_ends_the_request_with_kv_integrity_and_nobody_else(
    name: str, carol: str
) -> None:
    told = stage(BY_NAME[name])
    assert told.verdict is Verdict.CAUGHT
    assert isinstance(told.outcome, Failed)
    assert told.outcome.code == "kv_integrity"
    assert told.other_text == carol
    # The first token that prefill made up from its placeholder may have gone out, and no token that attention made.
    assert "Alice" not in told.text
    if name != "read alone":
        assert told.marker_rows == 0
