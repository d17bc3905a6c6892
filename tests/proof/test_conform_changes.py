"""A good recording conforms; with one thing in it changed it does not, and what is said is what was changed."""

from __future__ import annotations

import copy
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import CHANGES, Lines, record, save

from hermetic.handoff import records as r
from hermetic.lab.tiny import make_tiny
from hermetic.proof.chart import draw
from hermetic.proof.conform import conform
from hermetic.proof.conformance.half import short
from hermetic.proof.conformance.recording import Recording
from hermetic.proof.conformance.telling import steps


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    folder = tmp_path_factory.mktemp("recorded")
    return record(make_tiny(folder / "tiny"), folder / "trace")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("changed") / "trace"


def test_a_recording_of_two_workers_conforms_and_is_counted(good: Lines, scratch: Path) -> None:
    found = conform(save(good, scratch))
    assert found.conforms, found.lines()
    assert (found.tickets, found.open, found.killed, found.exit_code) == (6, 0, (), 0)
    assert found.processes == ("prefill", "decode")
    assert found.records == len(good) - 2  # without the two first lines, which say who records
    assert found.actions["enter"] == 5
    assert found.actions["ask_again"] == found.actions["write_again"] == 1
    assert found.actions["verify_bad"] >= 1
    assert found.actions["drop_copy"] == 3


@pytest.mark.parametrize("name", CHANGES)
@settings(max_examples=6)
@given(seed=st.integers(0, 2**32))
def test_a_change_that_matters_is_found_and_named(good: Lines, scratch: Path, name: str, seed: int) -> None:
    made, said = copy.deepcopy(good), CHANGES[name][1]
    CHANGES[name][0](made, random.Random(seed))
    assert made != good
    found = conform(save(made, scratch))
    assert not found.conforms
    assert found.exit_code == 1
    assert found.violation is not None
    assert found.violation.kind == "conformance"
    assert re.search(said, f"{found.violation.text}; {found.allowed}"), (found.violation.text, found.allowed)
    assert 1 <= found.line <= len(made)
    assert found.violation.steps[-1].move == f"line {found.line}"


def test_what_is_wrong_is_drawn_in_the_protocols_words(good: Lines, scratch: Path) -> None:
    made = copy.deepcopy(good)
    CHANGES["one use of a slot is written twice"][0](made, random.Random(1))
    violation = conform(save(made, scratch)).violation
    assert violation is not None
    told = [(s.actor, s.what, s.to) for s in violation.steps]
    for step in (
        ("decode", "reserves its pages", ""),
        ("gateway", "Submit", "prefill"),
        ("decode", "Grant", "prefill"),
        ("prefill", "Started", "decode"),
        ("decode", "gives it slots", ""),
        ("decode", "Credit", "prefill"),
    ):
        assert step in told, told
    assert re.search(r"begins batch \d+: page \d+ -> slot \d use \d+", violation.steps[-1].detail)
    chart = draw(violation)
    assert "{" not in chart
    assert '"' not in chart


def test_every_record_of_a_ticket_has_words(good: Lines, scratch: Path) -> None:
    """Whatever a story consists of: each is told, whose it is, and nothing is told as it stands in the file."""
    recording = Recording(save(good, scratch))
    names = {p: header.worker for p, header in recording.headers.items()}
    prefill, decode = sorted(names, key=names.__getitem__, reverse=True)
    lines = sorted(line for p in names for line in recording.lines(p))
    keys = {line.record.key for line in lines if isinstance(line.record, r.Begin)}
    assert len(keys) == 6
    for key in keys:
        told = list(steps(lines, key, (prefill, decode), names))
        assert {step.actor for step in told} == {"gateway", "prefill", "decode"}
        assert {step.key for step in told} == {short(key)}
        assert not [step for step in told if "{" in step.what + step.detail or not step.what]


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_however_the_processes_are_mixed_in_the_file_it_conforms(
    good: Lines, scratch: Path, seed: int
) -> None:
    """Each process writes what it held back when it likes; its own order is all that the file keeps."""
    rng = random.Random(seed)
    parts = [[line for line in good if line["p"] == p] for p in {line["p"]: None for line in good}]
    mixed: Lines = []
    while any(parts):
        part = rng.choice([p for p in parts if p])
        for _ in range(rng.choice([1, 3, 200])):
            if part:
                mixed.append(part.pop(0))
    assert conform(save(mixed, scratch)).conforms
