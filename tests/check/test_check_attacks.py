"""Whole deployments that once were told to be clean, and what somebody can put into a source to make them look so."""

from __future__ import annotations

from pathlib import Path

from hermetic.check import check
from hermetic.check.check import CheckOptions
from hermetic.check.result import Report

CAPTURES = Path(__file__).parent / "captures"


def checked(*sources: Path | str, select: tuple[str, ...] = ()) -> Report:
    return check.run(CheckOptions(tuple(map(str, sources)), select=select))


def states(report: Report) -> dict[str, str]:
    return {f"{verdict.code} {verdict.subject}": verdict.state for verdict in report.verdicts}


def test_of_two_machines_that_listen_everywhere_each_has_its_own_pool(tmp_path: Path) -> None:
    """Their logs were taken for one node's, whose pool was then not known."""
    log = (CAPTURES / "sglang-0.5.23-pd/prefill.log").read_text().replace("127.0.0.1", "0.0.0.0")
    for number, pool in enumerate((9_000, 2_048)):
        (tmp_path / f"prefill-{number}.log").write_text(
            log.replace("max_total_num_tokens=2048", f"max_total_num_tokens={pool}")
        )
    report = checked(tmp_path, select=("CAP001", "SRC001"))
    assert states(report) == {
        "CAP001 prefill 0.0.0.0:31100": "passed", "CAP001 prefill 0.0.0.0:31100 (2)": "finding",
        "SRC001 prefill 0.0.0.0:31100": "passed", "SRC001 prefill 0.0.0.0:31100 (2)": "passed",
    }  # fmt: skip
    assert "prefill-0.log, prefill-1.log" in report.notes[0]
    assert "a=prefill-0.log for this file" in report.notes[0]
