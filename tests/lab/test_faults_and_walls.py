"""Every fault against every setting of the walls: what comes of it is what was worked out beforehand."""

from __future__ import annotations

import pytest

from hermetic.lab.expected import TABLE_OF_FAULTS
from hermetic.lab.faults import Fault, Incident
from hermetic.lab.scene import BYSTANDER, MARKER, SETTINGS, VICTIM, Setting, Verdict, play, undisturbed
from hermetic.lab.walls import Wall


def breaks(fault: Fault, setting: Setting) -> list[pytest.MarkDecorator]:
    """Bytes that are damaged, and page tables, are not the protocol's to see; these two are."""
    mark = pytest.mark.breaks_the_protocol
    if isinstance(fault, Incident):
        return [mark("prefill computes a placeholder, and takes pages for that only")]
    if Wall.COUNTS in setting.away:
        return [mark("decode takes complete at its word, outside its table")]
    return []


CELLS = [
    pytest.param(fault, setting, verdict, id=f"{fault.name} / {setting.name}", marks=breaks(fault, setting))
    for fault, verdicts in TABLE_OF_FAULTS
    for setting, verdict in zip(SETTINGS, verdicts, strict=True)
]


def reads_are_verified(setting: Setting) -> bool:
    return setting.verify == "read" and Wall.READ not in setting.away


@pytest.mark.parametrize(("fault", "setting", "expected"), CELLS)
def test_the_fault_comes_to_what_this_setting_of_the_walls_allows(
    fault: Fault, setting: Setting, expected: Verdict
) -> None:
    # `play` itself raises when the bystander's answer changes by one token, when it reads one strange row, when a page
    # or a slot is not given back, or when a caught request had emitted a token of which its undisturbed run knows nothing.
    played = play(fault, setting)
    assert played.verdict is expected
    assert played.rows_read > 10_000  # the witness was looking
    if expected is Verdict.LEAK:
        # The planted marker of another tenant, by its bytes, in what attention read: this test can fail.
        assert played.markers
        assert {tenant for tenant, _ in played.markers} <= {VICTIM, BYSTANDER}
        assert {token for _, token in played.markers} <= set(MARKER[VICTIM] + MARKER[BYSTANDER])
    if expected is Verdict.WRONG:
        assert played.strangers
        assert not played.leaked
    if expected is Verdict.HARMLESS:
        assert not played.strangers
    if expected is Verdict.CAUGHT and setting.verify == "tags":
        assert not played.strangers  # identity and counts are compared before anything is read
    if expected is Verdict.CAUGHT and reads_are_verified(setting):
        # Whatever was read before it was found, was read in one step of one worker, and nothing of that step went out.
        assert len({(s.worker, s.step) for s in played.strangers}) <= 1


def test_without_any_wall_no_fault_is_caught_and_every_one_is_seen_by_the_witness() -> None:
    for fault, verdicts in TABLE_OF_FAULTS:
        assert verdicts[-1] in (Verdict.LEAK, Verdict.WRONG), fault.name


def test_with_every_wall_and_verify_read_nothing_strange_is_ever_answered() -> None:
    at = [s.name for s in SETTINGS].index("--verify read")
    for fault, verdicts in TABLE_OF_FAULTS:
        assert verdicts[at] in (Verdict.CAUGHT, Verdict.HARMLESS), fault.name


def test_each_wall_alone_stops_a_fault_that_no_other_wall_stops() -> None:
    """But for counts: what they see, null tags see one step later."""
    alone = [s.name for s in SETTINGS]
    stopped = {
        name: {
            fault.name
            for fault, verdicts in TABLE_OF_FAULTS
            if verdicts[alone.index(name)] in (Verdict.CAUGHT, Verdict.HARMLESS)
        }
        for name in ("ownership alone", "landing alone", "read alone", "exclusivity alone", "counts alone")
    }
    assert stopped["counts alone"] == {"the incident: one placeholder page, all reported complete"}
    assert stopped["counts alone"] < stopped["ownership alone"]
    # Landing heals what happened once; reading it later can only fail.
    assert stopped["landing alone"] < stopped["read alone"]
    assert stopped["exclusivity alone"] == {
        f.name for f, _ in TABLE_OF_FAULTS if f.name.startswith("late write")
    }


def test_an_undisturbed_run_is_the_same_every_time_and_shows_the_witness_nothing_strange() -> None:
    first = undisturbed()
    undisturbed.cache_clear()
    assert undisturbed() == first
