"""`hermetic exposure`: which lines of an access log fit the incident's signature. Expected by hand, line by line."""

from __future__ import annotations

import gzip
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermetic.check import exposed
from hermetic.check.exposure import SIGNS, ExposureOptions, read
from hermetic.options import OptionError

OVER, FAST, APART = SIGNS
POOL = 681_280  # tokens, as in the incident


def line(**fields: object) -> dict[str, object]:
    return {"time": "2026-11-29T14:05:00Z", "request_id": "r", "status": 200, "prompt_tokens": 100, **fields}


def log(folder: Path, *lines: object, name: str = "access.log") -> Path:
    path = folder / name
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
    return path


def test_each_line_is_judged_by_its_own_numbers(tmp_path: Path) -> None:
    path = log(
        tmp_path,
        line(request_id="small"),
        line(request_id="fits", prompt_tokens=POOL),
        line(request_id="over", prompt_tokens=POOL + 1),
        line(request_id="refused", prompt_tokens=POOL + 1, status=400),
        line(request_id="fast", prompt_tokens=100_000, ttft=9.9),  # 100,000 tokens at 10,000 a second: 10 s
        line(
            request_id="cached",
            prompt_tokens=100_000,
            ttft=0.1,
            usage={"prompt_tokens_details": {"cached_tokens": 99_500}},
        ),
        line(request_id="slow", prompt_tokens=100_000, ttft=10.0),
        line(request_id="halves", prompt_tokens=100_000, prefill_prompt_tokens=1),
        line(request_id="same", prompt_tokens=100_000, prefill_prompt_tokens=100_000),
        line(request_id="all", prompt_tokens=900_000, prefill_prompt_tokens=1, ttft=0.2),
    )
    found = read([path], ExposureOptions(POOL, prefill_speed=10_000))
    assert {hit.id: set(hit.signs) for hit in found.hits} == {
        "over": {OVER}, "fast": {FAST}, "halves": {APART}, "all": {OVER, FAST, APART},
    }  # fmt: skip
    assert (found.lines, found.judged, found.not_judged) == (10, 10, [])
    # without a time, or without what prefill counted, they are not innocent
    assert [one.partition(" answers")[0].partition(": ")[2] for one in found.not_asked] == ["of 5 of 9", "of 6 of 9"]  # fmt: skip
    assert found.signs == {OVER: 2, FAST: 2, APART: 2}
    assert found.hits[0].where == f"{path}, line 3"


def test_what_lacks_a_number_is_counted_and_not_taken_for_innocent(tmp_path: Path) -> None:
    path = log(
        tmp_path, "no json", "[1]", "", {"status": 200}, {"prompt_tokens": 5}, line(prompt_tokens="many"), "x" * (2 * 1024**2),
        line(),
    )  # fmt: skip
    found = read([path], ExposureOptions(POOL))
    assert (found.lines, found.judged) == (7, 1)
    assert {one.why: one.lines for one in found.not_judged} == {
        "is no JSON object": 2, "no prompt tokens": 2, "no status": 1, "is longer than 1,048,576 bytes": 1,
    }  # fmt: skip
    lacking = {one.why: (one.first, one.fields) for one in found.not_judged}
    assert lacking["is no JSON object"] == (f"{path}, line 1", [])
    assert lacking["no prompt tokens"] == (f"{path}, line 4", ["status"])
    assert len(found.not_asked) == 2  # no --prefill-speed, and nothing of the other half


def test_only_the_time_that_was_asked_for_counts(tmp_path: Path) -> None:
    over = POOL + 1
    path = log(
        tmp_path,
        line(time="2026-11-29T13:59:59Z", prompt_tokens=over),
        line(time="2026-11-29T15:00:00+01:00", prompt_tokens=over, request_id="first"),  # 14:00 UTC
        line(time=1795961100, prompt_tokens=over, request_id="seconds"),  # 14:05 UTC
        line(time=1795961100_000, prompt_tokens=over, request_id="milliseconds"),
        line(time="2026-11-29T16:00:00Z", prompt_tokens=over),
        line(time="noon", prompt_tokens=over),
    )
    since, until = datetime(2026, 11, 29, 14, tzinfo=UTC), datetime(2026, 11, 29, 16, tzinfo=UTC)
    found = read([path], ExposureOptions(POOL, since, until))
    assert [hit.id for hit in found.hits] == ["first", "seconds", "milliseconds"]
    assert (found.outside, [(one.why, one.lines) for one in found.not_judged]) == (2, [("no time", 1)])
    assert [(one.start, one.hits) for one in found.times] == [
        ("2026-11-29T14:00Z", 1), ("2026-11-29T14:01Z", 0), ("2026-11-29T14:02Z", 0), ("2026-11-29T14:03Z", 0),
        ("2026-11-29T14:04Z", 0), ("2026-11-29T14:05Z", 2),
    ]  # fmt: skip


def test_fields_are_found_by_name_nested_or_with_dots(tmp_path: Path) -> None:
    path = log(
        tmp_path,
        {"ts": 1795961100, "resp": {"code": 200, "n": POOL + 1}, "x.id": "dotted"},
        {"status_code": "200", "usage": {"prompt_tokens": str(POOL + 1)}, "rid": "usual"},
    )
    named = {"status": "resp.code", "prompt": "resp.n", "id": "x.id"}
    assert [hit.id for hit in read([path], ExposureOptions(POOL, fields=named)).hits] == ["dotted"]
    assert [hit.id for hit in read([path], ExposureOptions(POOL)).hits] == ["usual"]


def test_packed_logs_are_read_and_broken_ones_are_told(tmp_path: Path) -> None:
    packed = tmp_path / "access.log.gz"
    packed.write_bytes(gzip.compress(json.dumps(line(prompt_tokens=POOL + 1)).encode() + b"\n"))
    broken = tmp_path / "broken.gz"
    broken.write_bytes(packed.read_bytes()[:40])
    found = read([packed, broken, tmp_path / "gone"], ExposureOptions(POOL))
    assert len(found.hits) == 1
    assert [one.partition(":")[0] for one in found.unread] == [str(broken), str(tmp_path / "gone")]


@given(st.lists(st.binary(max_size=200), max_size=20))
def test_no_bytes_break_it(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("log") / "access.log"
    path.write_bytes(b"\n".join(lines))
    found = read([path], ExposureOptions(10, prefill_speed=1.0))
    assert found.judged + found.passed_over + sum(one.lines for one in found.not_judged) == found.lines


def test_the_command_tells_by_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clean = log(tmp_path, line(), name="clean.log")
    hit = log(tmp_path, line(prompt_tokens=POOL + 1, request_id="victim\x1b[31m"), name="hit.log")
    empty = log(tmp_path, "nothing", name="empty.log")
    ids = tmp_path / "ids"
    assert exposed.main(exposed.Asked((clean,), POOL)) == 0
    assert exposed.main(exposed.Asked((clean, hit), POOL, ids=ids)) == 1
    assert exposed.main(exposed.Asked((empty,), POOL)) == 2
    assert exposed.main(exposed.Asked((hit, tmp_path / "gone"), POOL)) == 2
    out = capsys.readouterr().out
    assert "\x1b" not in out  # a log is somebody else's text
    assert "over the pool and answered" in out
    assert ids.read_text() == "victim [31m\n"
    assert exposed.main(exposed.Asked((hit,), POOL, format="json")) == 1
    assert json.loads(capsys.readouterr().out)["signs"] == {OVER: 1}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (exposed.Asked((), POOL, since="then"), "--since is 'then'"),
        (exposed.Asked((), POOL, since="2026-11-29", until="2026-11-28"), "not before"),
        (exposed.Asked((), POOL, fields=("who=x",)), "KIND=NAME"),
        (exposed.Asked((), POOL, format="yaml"), "one of text, json"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(asked: exposed.Asked, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        exposed.main(asked)


@pytest.mark.parametrize("time", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "0005-01-01T00:00:00Z", -62135596800, 1e300])  # fmt: skip
def test_a_time_that_no_log_can_have_is_none(tmp_path: Path, time: str | float, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    path = log(tmp_path, line(prompt_tokens=POOL + 1, time=time))
    assert exposed.main(exposed.Asked((path,), POOL)) == 1
    assert "no time" in capsys.readouterr().out


@pytest.mark.parametrize("tokens", ["1" + "0" * 400, "1e999", "-1e300"])
def test_a_number_that_counts_nothing_is_not_judged(tmp_path: Path, tokens: str) -> None:
    path = log(tmp_path, f'{{"status": 200, "prompt_tokens": {tokens}}}')
    assert read([path], ExposureOptions(POOL)).judged == 0


def test_a_log_that_is_packed_and_damaged_is_not_read_to_its_end(tmp_path: Path) -> None:
    data = bytearray(gzip.compress((json.dumps(line()) * 50).encode()))
    data[12] ^= 0xFF
    path = tmp_path / "access.log.gz"
    path.write_bytes(data)
    assert read([path], ExposureOptions(POOL)).unread


def test_an_id_that_a_client_chose_takes_little_room(tmp_path: Path) -> None:
    (hit,) = read([log(tmp_path, line(prompt_tokens=POOL + 1, request_id="x" * 100_000))], ExposureOptions(POOL)).hits  # fmt: skip
    assert len(hit.id) < 1000
