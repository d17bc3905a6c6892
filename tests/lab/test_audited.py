"""The table of audits: what counts as found, as a false alarm, and as nothing at all."""

from __future__ import annotations

import pytest

from hermetic.audit.result import Finding, Report
from hermetic.lab.audited import CLEAN, Row, code, main, summary


def report(*evidence: str, verdict: str = "nothing found") -> Report:
    found = [
        Finding(evidence=one, scenario="mixing", what="words of tenant-1 | and more", why="")  # type: ignore[arg-type]
        for one in evidence
    ]
    return Report(
        target="", model="", profile="quick", seed=1, started="", findings=found, requests=30, seconds=12.4,
        verdict="findings" if found else verdict,  # type: ignore[arg-type]
    )  # fmt: skip


def test_a_row_says_what_found_it_and_after_how_many_requests() -> None:
    row = Row("first-token", 1, 3, report("marker", "differential", "marker"))
    assert row.cells() == [
        "first-token", "1 in 20", "3", "marker, differential", "mixing", "30", "12", "words of tenant-1 / and more",
    ]  # fmt: skip


def test_fifty_clean_audits_bound_false_alarms_by_three_in_fifty() -> None:
    told = summary([Row(CLEAN, seed, 0, report()) for seed in range(50)])
    assert told == "0 of 50 audits of a clean server found something: at most 6.0% do (95 %, rule of three)"


def test_an_audit_that_could_not_run_counts_neither_way() -> None:
    rows = [
        Row(CLEAN, 1, 0, report(verdict="could not run")),
        Row(CLEAN, 2, 0, report(verdict="could not run")),
        Row(CLEAN, 3, 0, report("timing")),
        Row("truncated", 1, 1, report("semantics")),
        Row("placeholder", 1, 9, report()),
    ]
    told = summary(rows)
    assert "1 of 2 leaky servers found" in told
    assert "1 of 1 audits of a clean server found something" in told
    assert "2 could not run" in told
    assert "at most" not in told


def test_a_clean_server_that_could_not_be_audited_is_no_success() -> None:
    assert code([Row(CLEAN, 1, 0, report()), Row("truncated", 1, 1, report("semantics"))]) == 0
    assert code([Row(CLEAN, 1, 0, report()), Row(CLEAN, 2, 0, report(verdict="could not run"))]) == 2
    assert code([Row(CLEAN, 1, 0, report("timing"))]) == 1
    assert code([Row("truncated", 1, 1, report())]) == 1


def test_a_folder_for_reports_that_is_none_is_refused_before_anything_is_started(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["none", "--json", "/nowhere/at/all"]) == 2
    assert "it must be a folder" in capsys.readouterr().err


def test_an_unknown_fault_is_refused_before_anything_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["placeholder", "nonsense"]) == 2
    assert "there is no leaky fault 'nonsense'" in capsys.readouterr().err
