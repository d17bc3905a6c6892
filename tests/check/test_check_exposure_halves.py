"""What the prefill half counted, out of a log of its own. Expected by hand, line by line."""

from __future__ import annotations

import io
import json
import sqlite3
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hermetic.check import exposed, exposure_halves
from hermetic.check.exposure import SIGNS, ExposureOptions, read
from hermetic.check.exposure_halves import Counts
from hermetic.cli import app
from hermetic.options import OptionError

OVER, _, APART = SIGNS
POOL = 1000


def log(folder: Path, name: str, *lines: dict[str, object]) -> Path:
    path = folder / name
    path.write_text("".join(json.dumps({"status": 200, **one}) + "\n" for one in lines))
    return path


def test_answers_are_compared_with_the_other_halfs_log_by_request_id(tmp_path: Path) -> None:
    prefill = log(
        tmp_path,
        "prefill.log",
        {"request_id": "same", "prompt_tokens": 10},
        {"request_id": "apart", "prompt_tokens": 11},
        {"request_id": "longer there", "prompt_tokens": POOL + 1},
        {"request_id": "again", "prompt_tokens": 7},  # one id, two requests
        {"request_id": "again", "prompt_tokens": 8},
        {"request_id": 5, "prompt_tokens": 9},
        {"request_id": "uncounted"},
        {"prompt_tokens": 3},  # whose, is not said
        {"request_id": "huge", "prompt_tokens": 1e29},
    )
    decode = log(
        tmp_path,
        "decode.log",
        {"request_id": "same", "prompt_tokens": 10},
        {"request_id": "apart", "prompt_tokens": 10},
        {"request_id": "longer there", "prompt_tokens": POOL},
        {"request_id": "again", "prompt_tokens": 7},
        {"request_id": "again", "prompt_tokens": 6},
        {"request_id": "5", "prompt_tokens": 9},
        {"request_id": "uncounted", "prompt_tokens": 4},
        {"request_id": "nobody", "prompt_tokens": 4},
        {"prompt_tokens": 3},
        {"request_id": "huge", "prompt_tokens": 3},
        {"request_id": "itself", "prompt_tokens": 3, "prefill_prompt_tokens": 3},
    )
    found = read([decode], ExposureOptions(POOL, prefill_logs=(prefill,)))
    assert [(hit.id, hit.signs) for hit in found.hits] == [
        ("apart", (APART,)),
        ("longer there", (OVER, APART)),
        ("again", (APART,)),
        ("huge", (OVER, APART)),
    ]
    assert (found.lines, found.answered, found.compared) == (11, 11, 8)
    assert f"{APART}: of 3 of 11 answers nothing says what prefill counted" in found.not_asked


def test_more_requests_than_are_written_at_once_are_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exposure_halves, "_AT_ONCE", 7)
    ids = [f"request {number}" for number in range(50)]
    prefill = log(tmp_path, "p", *({"id": one, "prompt_tokens": at} for at, one in enumerate(ids, 1)))
    decode = log(tmp_path, "d", *({"id": one, "prompt_tokens": at} for at, one in enumerate(ids, 1)))
    found = read([decode], ExposureOptions(POOL, prefill_logs=(prefill,)))
    assert (found.compared, found.fits) == (50, 0)


def test_ids_that_are_alike_but_for_their_ends_are_two() -> None:
    with Counts() as counts:
        counts.add("x" * 100_000 + "a", 1)
        counts.add("x" * 100_000 + "b", 2)
        counts.add("\ud800", 3)  # half of a surrogate pair, which JSON can hold
        assert [counts.of("x" * 100_000 + end, 0) for end in "abc"] == [1, 2, None]
        assert counts.of("\ud800", 0) == 3


def test_where_there_is_no_room_the_log_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(counts: Counts) -> None:
        with exposure_halves._room():
            raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Counts, "_write", full)
    monkeypatch.setattr(exposure_halves, "_AT_ONCE", 1)
    one = log(tmp_path, "p", {"id": "a", "prompt_tokens": 1})
    found = read([one], ExposureOptions(POOL, prefill_logs=(one,)))
    assert found.unread == [f"{one}: what prefill counted cannot be kept: database or disk is full"] * 2


@pytest.mark.parametrize("piped", ["the log", "the prefill log"])
def test_either_log_may_be_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], piped: str
) -> None:
    decode = log(tmp_path, "decode.log", {"id": "a", "prompt_tokens": 4})
    prefill = log(tmp_path, "prefill.log", {"id": "a", "prompt_tokens": 5})
    given = (Path("-"), prefill) if piped == "the log" else (decode, Path("-"))
    raw = io.BytesIO((decode if piped == "the log" else prefill).read_bytes())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(raw)))  # type: ignore[type-var]
    assert exposed.main(exposed.Asked((given[0],), POOL, prefill_logs=(given[1],))) == 1
    assert "1 answer: halves disagree" in capsys.readouterr().out


@pytest.mark.parametrize("logs", [("-", "-"), ("a", "-", "-")])
def test_standard_input_is_read_once(logs: tuple[str, ...]) -> None:
    *first, last = map(Path, logs)
    with pytest.raises(OptionError, match="can be read only once"):
        exposed.main(exposed.Asked(tuple(first), POOL, prefill_logs=(last,)))


def test_a_prefill_log_that_is_not_there_is_told(tmp_path: Path) -> None:
    decode = log(tmp_path, "decode.log", {"id": "a", "prompt_tokens": 4})
    asked = ["exposure", str(decode), "--pool", "9", "--prefill-log", str(tmp_path / "gone")]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 2
    assert "gone: No such file or directory" in done.output
