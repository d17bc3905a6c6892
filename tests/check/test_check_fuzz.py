"""Whole checks of damaged captures: nothing is raised, and a finding never becomes a pass because something could no longer be read.

The one thing to know: a changed digit is another number, and no reader can tell; so a rule may pass where it found something before only if some
fact is now said to be something else than in the whole capture. Where another source still says the old value, the two disagree,
and the rule is unknown.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hermetic.check.check import CheckOptions, run
from hermetic.check.result import Report

HERE = Path(__file__).parent / "captures"
NODES = {  # files of each node, by deployment and name
    "sglang-0.5.20-pd": {
        role: tuple(f"{role}.{end}" for end in ("server_info.json", "log", "metrics.prom"))
        for role in ("prefill", "decode")
    },
    "sglang-0.5.23-pd": {
        role: tuple(f"{role}.{end}" for end in ("server_info.json", "log", "metrics.prom", "v1_loads.json"))
        for role in ("prefill", "decode")
    },
    "sglang-0.5.23-single": {"server": ("server_info.json", "log", "metrics.prom", "v1_loads.json")},
    "vllm-0.32.0-single": {"engine": ("eager.startup.log", "metrics_idle_eager.txt", "models.http", "version.http")},
    "vllm-0.32.0-nixl-pd": {"p": ("nixl_p.startup.log",), "d": ("nixl_d.startup.log", "metrics_nixl_d.txt")},
}  # fmt: skip
FILES = [
    (deployment, file) for deployment, nodes in NODES.items() for files in nodes.values() for file in files
]


def checked(deployment: str, file: str, content: bytes | None) -> Report:
    """The check of a deployment in which one file has this content."""
    with tempfile.TemporaryDirectory() as folder:
        words = []
        for node, files in NODES[deployment].items():
            for name in files:
                path = Path(folder) / name
                shutil.copy(HERE / deployment / name, path)
                if name == file and content is not None:
                    path.write_bytes(content)
                words.append(f"{node}={path}")
        return run(CheckOptions(sources=tuple(words)))


def facts_of(report: Report) -> dict[tuple[str, str], set[str]]:
    return {
        (node.name, fact): {str(seen["value"]) for seen in said}
        for node in report.nodes
        for fact, said in node.facts.items()
    }


WHOLE = {deployment: checked(deployment, "", None) for deployment in NODES}
SAID = {deployment: facts_of(report) for deployment, report in WHOLE.items()}


def assert_no_finding_is_lost(deployment: str, report: Report) -> None:
    now = {(verdict.code, verdict.subject): verdict.state for verdict in report.verdicts}
    new = {place for place, values in facts_of(report).items() if values - SAID[deployment].get(place, set())}
    for verdict in WHOLE[deployment].of("finding"):
        state = now.get((verdict.code, verdict.subject))
        if state == "passed":
            assert any(node in verdict.subject for node, _ in new), (verdict.code, verdict.message)
        elif (
            state is None
        ):  # no longer asked there: of what engine or role it is has changed, or the file is told as not read
            assert report.unread or new or set(now.values()) & {"unknown"}, verdict.code


def test_the_whole_captures_have_findings_to_lose() -> None:
    assert {name: bool(report.of("finding")) for name, report in WHOLE.items()} == {
        "sglang-0.5.20-pd": True, "sglang-0.5.23-pd": True, "sglang-0.5.23-single": True, "vllm-0.32.0-single": False,
        "vllm-0.32.0-nixl-pd": True,
    }  # fmt: skip
    assert not any(report.unread for report in WHOLE.values())


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(FILES), st.floats(0, 1))
def test_a_capture_that_was_cut_off_loses_no_finding(which: tuple[str, str], part: float) -> None:
    deployment, file = which
    content = (HERE / deployment / file).read_bytes()
    assert_no_finding_is_lost(deployment, checked(deployment, file, content[: int(part * len(content))]))


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(FILES), st.data())
def test_a_capture_with_damaged_bytes_loses_no_finding(which: tuple[str, str], data: st.DataObject) -> None:
    deployment, file = which
    content = bytearray((HERE / deployment / file).read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, max(len(content) - 1, 0)))
        what = data.draw(st.sampled_from(("change", "lose", "insert", "lose many")))
        if what == "change" and content:
            content[at] = data.draw(st.integers(0, 255))
        elif what == "insert":
            content[at:at] = data.draw(st.binary(max_size=30))
        else:
            del content[at : at + (1 if what == "lose" else 400)]
    assert_no_finding_is_lost(deployment, checked(deployment, file, bytes(content)))
