"""Counterexamples as files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermetic.proof.saved import SOURCES, Counterexample, SavedError, Step, load

FOUND = Counterexample(
    "I3",
    "slot 0 is free",
    (
        Step("gateway", "Submit", "prefill-0", "A/1", move="('submit prefill', 0)"),
        Step("adversary", "leaves", fate=""),
    ),
    {"name": "tiny", "prompts": [2, 1], "fenceable": True, "rate": 0.5},
    mutant="release-at-abort",
    seed=7,
    shows=("slot 0: free",),
)


def test_what_is_saved_is_loaded_again(tmp_path: Path) -> None:
    FOUND.save(tmp_path / "found.json")
    assert load(tmp_path / "found.json") == FOUND


WORD = st.text(max_size=8)


@given(
    st.builds(
        Counterexample,
        kind=WORD,
        text=WORD,
        steps=st.lists(st.builds(Step, actor=WORD, what=WORD, move=WORD, fate=WORD), max_size=3).map(tuple),
        scope=st.dictionaries(
            WORD, st.integers(0, 9) | st.booleans() | WORD | st.lists(st.integers(0, 3)), max_size=3
        ),
        seed=st.none() | st.integers(0, 2**63 - 1),
        source=st.sampled_from(SOURCES),
        shows=st.lists(WORD, max_size=2).map(tuple),
    )
)
def test_any_counterexample_survives_its_file(
    tmp_path_factory: pytest.TempPathFactory, found: Counterexample
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    found.save(path)
    assert load(path) == found


def test_a_file_reads_well_without_us(tmp_path: Path) -> None:
    FOUND.save(tmp_path / "found.json")
    raw = json.loads((tmp_path / "found.json").read_text())
    assert list(raw)[:4] == ["version", "source", "kind", "text"]
    assert raw["version"] == 1
    assert raw["source"] == "explorer"
    assert raw["steps"][0]["move"] == "('submit prefill', 0)"
    assert max(map(len, (tmp_path / "found.json").read_text().splitlines())) < 100


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not a saved counterexample"),
        (b"\x00\xff", "is not a saved counterexample"),
        (b"[]", "is not a saved counterexample"),
        (
            b'{"kind": "I1", "text": ""}',
            "is not a saved counterexample: Object missing required field `version`",
        ),
        (b'{"version": 2, "kind": "I1"}', "has version 2; this hermetic reads version 1"),
        (b'{"version": 1, "kind": "I1"}', "missing required field `text`"),
        (b'{"version": 1, "kind": "I1", "text": "", "stpes": []}', "unknown field `stpes`"),
        (b'{"version": 1, "kind": "I1", "text": "", "steps": [{"actor": 1}]}', r"\$.steps\[0\].actor"),
        (b'{"version": 1, "kind": "I1", "text": "", "source": "a dream"}', "was found by 'a dream'"),
    ],
)
def test_another_file_is_refused_and_the_message_says_why(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(SavedError, match=says):
        load(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SavedError, match=r"gone\.json cannot be read: No such file"):
        load(tmp_path / "gone.json")


def test_a_place_that_cannot_be_written_is_named_and_nothing_is_left_there(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(SavedError, match=r"folder\.json cannot be written: Is a directory"):
        FOUND.save(tmp_path / "folder.json")
    with pytest.raises(SavedError, match=r"found\.json cannot be written: No such file"):
        FOUND.save(tmp_path / "nowhere" / "found.json")
