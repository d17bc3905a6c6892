"""Counterexamples as files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermetic.proof.conform import TraceError, conform
from hermetic.proof.replay import as_test, replay
from hermetic.proof.saved import SOURCES, Counterexample, SavedError, Step, check_place, load
from hermetic.proof.story import scope_of

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
        (b'{"version": 1, "x": ' + b"[" * 100_000, "is not a saved counterexample"),
    ],
)
def test_another_file_is_refused_and_the_message_says_why(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(SavedError, match=says):
        load(path)


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    for path in (Path("/dev/zero"), tmp_path):
        with pytest.raises(SavedError, match="is no file that a counterexample"):
            load(path)
        with pytest.raises(TraceError, match="is no file that a recording"):
            conform(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"at_most": "x"}, {"at_most": [1]}, {"decodes": -1}, {"prefills": 0}, {"slots": -1}, {"faults.abort": -1}, {"pages": -1},
        {"prompts": []}, {"prompts": ["1"]}, {"pages": 10**12}, {"slots": 10**12}, {"prefills": 10**12}, {"decodes": 65},
        {"faults.flood": 1}, {"name": 3}, {"fenceable": "no"},
    ],
)  # fmt: skip
def test_a_scope_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    scope = {"name": "x", "prompts": [1], "pages": 1, "slots": 1, "prefills": 1, "decodes": 1, "fenceable": True,
             "at_most": 9, "faults.abort": 1}  # fmt: skip
    assert scope_of(Counterexample("I1", "", scope=scope)).prompts == (1,)
    with pytest.raises(SavedError, match="has no scope of the explorer"):
        scope_of(Counterexample("I1", "", scope=scope | changes))


def test_a_path_of_no_steps_breaks_nothing_and_is_refused() -> None:
    scope = {"name": "x", "prompts": [1], "pages": 1, "slots": 1}
    with pytest.raises(SavedError, match="has no step"):
        replay(Counterexample("I1", "", scope=scope))


def test_a_mutant_that_is_not_there_is_refused_whatever_found_it() -> None:
    for source in ("explorer", "simulator", "induction"):
        with pytest.raises(SavedError, match="it was found with a mutant"):
            replay(Counterexample("I1", "", (Step("a", "b"),), source=source, mutant="nope"))


@pytest.mark.parametrize("text", ['ends in a "quote"', '"""', "a \\ and a \\n", "'"])
def test_whatever_was_found_its_test_is_python(text: str) -> None:
    compile(as_test(Counterexample("I1", text), 'a "file".json'), "test", "exec")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SavedError, match=r"gone\.json cannot be read: No such file"):
        load(tmp_path / "gone.json")


@pytest.mark.parametrize("ask", [FOUND.save, check_place], ids=["saved", "asked before"])
def test_a_place_that_cannot_be_written_is_named_and_nothing_is_left_there(
    tmp_path: Path, ask: Callable[[Path], None]
) -> None:
    (tmp_path / "folder.json").mkdir()
    for path, why in (
        (tmp_path / "folder.json", "it is no file"),
        (Path("/"), "it is no file"),
        (tmp_path / "nowhere" / "found.json", "No such file or directory"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        with pytest.raises(SavedError, match=f"^{re.escape(str(path))} cannot be written: {why}$"):
            ask(path)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.json"]


def test_a_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "found.json"
    os.mkfifo(pipe)
    with pytest.raises(SavedError, match="it is no file"):
        FOUND.save(pipe)
    assert pipe.is_fifo()


def test_to_ask_whether_a_place_can_be_written_changes_nothing_there(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    check_place(path)
    assert not list(tmp_path.iterdir())
    FOUND.save(path)
    check_place(path)
    assert load(path) == FOUND
    assert list(tmp_path.iterdir()) == [path]
