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


def test_what_prefill_counted_is_told_of_a_hit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefill = log(tmp_path, "p", {"id": "a", "prompt_tokens": 5000})
    decode = log(tmp_path, "d", {"id": "a", "prompt_tokens": 100})
    assert exposed.main(exposed.Asked((decode,), POOL, prefill_logs=(prefill,))) == 1
    assert "100 tokens (prefill: 5,000)" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["", " ", "-", None, True, ["a"], {"a": 1}])
def test_what_is_no_id_is_not_compared(tmp_path: Path, name: object) -> None:
    """nginx writes an empty text where a request has none, Envoy a dash: all such requests would be one."""
    prefill = log(tmp_path, "p", {"id": name, "prompt_tokens": 5000}, {"id": "a", "prompt_tokens": 1})
    decode = log(tmp_path, "d", {"id": name, "prompt_tokens": 100})
    found = read([decode], ExposureOptions(POOL, prefill_logs=(prefill,)))
    assert (found.fits, found.compared) == (0, 0)
    assert any("1 of 2 lines of the prefill half have no request id" in one for one in found.not_asked)


def test_an_id_nested_too_deep_for_words_is_none(tmp_path: Path) -> None:
    deep = tmp_path / "d"
    for depth in range(900, 1000):
        deep.write_text(
            f'{{"id": {"[" * depth}1{"]" * depth}, "status": 200, "prompt_tokens": {POOL + 1}}}\n'
        )
        read([deep], ExposureOptions(POOL, prefill_logs=(deep,)))


@pytest.mark.parametrize("count", [10.5, 0.5, 1e20, 10**20])
def test_odd_counts_agree_with_themselves(tmp_path: Path, count: float) -> None:
    both = [log(tmp_path, name, {"id": "a", "prompt_tokens": count}) for name in "pd"]
    found = read(both[1:], ExposureOptions(10**21, prefill_logs=(both[0],)))
    assert (found.compared, found.fits) == (1, 0)


def test_ids_of_several_lengths_are_counted(tmp_path: Path) -> None:
    prefill = log(tmp_path, "p", *({"id": "a", "prompt_tokens": n} for n in (50, 100)))
    decode = log(tmp_path, "d", {"id": "a", "prompt_tokens": 100})
    found = read([decode], ExposureOptions(POOL, prefill_logs=(prefill,)))
    assert any(
        "the ids of 1 answers were used for prompts of several lengths" in one for one in found.not_asked
    )


@pytest.mark.parametrize("text", ["", "no json\n", '{"prompt_tokens": 5}\n'])
def test_a_prefill_log_of_which_nothing_could_be_used_is_not_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "p").write_text(text)
    decode = log(tmp_path, "d", {"id": "a", "prompt_tokens": 100})
    found = read([decode], ExposureOptions(POOL, prefill_logs=(tmp_path / "p",)))
    assert found.unread == ["the prefill half: no line has a request id and prompt tokens"]


def test_one_file_as_both_logs_is_refused(tmp_path: Path) -> None:
    both = log(tmp_path, "both.log", {"id": "a", "prompt_tokens": 100})
    again = tmp_path / "again.log"
    again.symlink_to(both)
    with pytest.raises(OptionError, match="compared with itself"):
        exposed.main(exposed.Asked((both,), POOL, prefill_logs=(again,)))


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
        assert [counts.of("x" * 100_000 + end, 0)[0] for end in "abc"] == [1, 2, None]
        assert counts.of("\ud800", 0) == (3, False)


def test_where_there_is_no_room_the_log_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(counts: Counts) -> None:
        with exposure_halves._room():
            raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Counts, "_write", full)
    monkeypatch.setattr(exposure_halves, "_AT_ONCE", 1)
    one = log(tmp_path, "p", {"id": "a", "prompt_tokens": 1})
    found = read([one], ExposureOptions(POOL, prefill_logs=(one,)))
    full_disk = f"{one}: what prefill counted cannot be kept: database or disk is full"
    assert [why for why in found.unread if why.startswith(str(one))] == [full_disk] * 2


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
