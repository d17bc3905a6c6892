"""`hermetic exposure` and numbers that cannot be meant: none of them makes an answer innocent, and no client writes the report."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from hermetic.check import exposed
from hermetic.check.exposure import ExposureOptions, read
from hermetic.check.exposure_fields import in_time
from hermetic.options import OptionError

POOL = 681_280


def log(folder: Path, *lines: dict[str, object]) -> Path:
    path = folder / "access.log"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


@pytest.mark.parametrize(
    "prompt", [-700_000, "-700000", 0, "0", "1_000", "\u0661\u0662", True, "nan", "1e999"]
)
def test_what_is_no_count_of_tokens_is_not_judged(tmp_path: Path, prompt: object) -> None:
    path = log(tmp_path, {"status": 200, "prompt_tokens": prompt})
    found = read([path], ExposureOptions(POOL))
    assert (found.judged, [one.why for one in found.not_judged]) == (0, ["no prompt tokens"])
    assert exposed.main(exposed.Asked((path,), POOL)) == 2


def test_more_cached_tokens_than_there_are_excuse_no_early_token(tmp_path: Path) -> None:
    path = log(tmp_path, {"status": 200, "prompt_tokens": 100, "cached_tokens": 9_999, "ttft": 0.001})
    found = read([path], ExposureOptions(POOL, prefill_speed=10))
    assert any(one.startswith("faster than it can be read: of 1 of 1 answers") for one in found.not_asked)


def test_fewer_than_no_cached_tokens_make_no_prompt_longer(tmp_path: Path) -> None:
    """100 tokens at 10 a second take 10 s, and it took 11."""
    path = log(tmp_path, {"status": 200, "prompt_tokens": 100, "cached_tokens": -9_999, "ttft": 11})
    assert read([path], ExposureOptions(POOL, prefill_speed=10)).fits == 0


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([{"status": 200}, {"status": 400}], 2),  # no answer was judged, so nothing is known of answers
        ([{"status": 200}, {"status": 200, "prompt_tokens": 5}], 0), ([{"status": 400}], 0), ([{"status": 400}, {}], 2),
    ],
)  # fmt: skip
def test_refusals_alone_do_not_tell_that_nothing_fits(
    tmp_path: Path, lines: list[dict[str, object]], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exposed.main(exposed.Asked((log(tmp_path, *lines),), POOL)) == code
    assert ("nothing could be judged" in capsys.readouterr().out) == (code == 2)


@pytest.mark.parametrize("speed", [float("nan"), float("inf")])
def test_a_speed_with_which_nothing_could_be_found_is_refused(tmp_path: Path, speed: float) -> None:
    with pytest.raises(OptionError, match="--prefill-speed"):
        exposed.main(exposed.Asked((log(tmp_path),), POOL, prefill_speed=speed))


@pytest.mark.parametrize(
    "value", [20261129140500, "20261129140500", "2026-11-29T14:05:00+00:00", 1795961100000]
)
def test_a_time_in_digits_is_not_of_another_millennium(value: object) -> None:
    """1,795,961,100 s: 56 years with 14 leap days and 332 days of 2026 since 1970 (20,786 days), and 14:05:00."""
    assert in_time(value) == datetime(2026, 11, 29, 14, 5, tzinfo=UTC)


@pytest.mark.parametrize("value", [0, 0.35, "12.5", -1, 20261399999999])
def test_a_number_that_says_how_long_something_took_is_no_time(value: object) -> None:
    assert in_time(value) is None


def test_an_id_that_a_client_chose_begins_no_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a workflow of GitHub a line that begins so is a command."""
    path = log(tmp_path, {"id": "\u202e::error::x\n::stop-commands::y", "status": 200, "prompt_tokens": 700_000})  # fmt: skip
    assert exposed.main(exposed.Asked((path,), POOL)) == 1
    out = capsys.readouterr().out
    assert not [line for line in out.splitlines() if line.lstrip().startswith("::")]
    assert "\u202e" not in out


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_log_whose_name_is_no_text_is_read(
    tmp_path: Path, form: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.log"))
    path.write_text(json.dumps({"status": 200, "prompt_tokens": 700_000}))
    assert exposed.main(exposed.Asked((path,), POOL, format=form)) == 1
    assert b"xff.log, line 1" in capfdbinary.readouterr().out
