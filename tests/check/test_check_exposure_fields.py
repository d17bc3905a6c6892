"""`hermetic exposure` over what proxies write: whose fields are known, in which unit, and what a time of a proxy proves."""

from __future__ import annotations

import gzip
import io
import json
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from hermetic.check import exposed
from hermetic.check.exposure import SIGNS, Exposure, ExposureOptions, read
from hermetic.check.exposure_fields import Plans, in_time, named
from hermetic.check.exposure_times import MOST, ROWS, STEPS, TimeLine
from hermetic.options import OptionError

OVER, FAST, APART = SIGNS
POOL = 681_280
SPEED = 10_000.0  # tokens a second: 100,000 tokens take 10 s
DOCS = Path(__file__).parents[2] / "docs"

# As nginx writes with log_format ... escape=json: numbers as text, "-" for what there is not, all servers that were asked.
NGINX = {
    "time_iso8601": "2026-11-29T14:05:00+00:00", "request_id": "n1", "status": "200", "request": "POST /v1/chat/completions HTTP/1.1",
    "request_time": "9.500", "upstream_header_time": "0.004", "upstream_response_time": "9.490", "prompt_tokens": "100000",
}  # fmt: skip
# As Envoy Gateway writes: milliseconds.
ENVOY = {
    "start_time": "2026-11-29T14:05:00.123Z", "x_request_id": "e1", "response_code": 200, "response_flags": "-", "method": "POST",
    "path": "/v1/completions", "duration": 9500, "upstream_service_time": "4", "genai_tokens_input": 100_000,
}  # fmt: skip
# As Traefik writes: nanoseconds.
TRAEFIK = {
    "StartUTC": "2026-11-29T14:05:00.123456789Z", "request_id": "t1", "DownstreamStatus": 200, "RequestMethod": "POST",
    "RequestPath": "/v1/completions", "Duration": 9_500_000_000, "prompt_tokens": 100_000,
}  # fmt: skip


def log(folder: Path, *lines: object, name: str = "access.log") -> Path:
    path = folder / name
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
    return path


def judged(folder: Path, *lines: object, **options: object) -> Exposure:
    return read([log(folder, *lines)], ExposureOptions(POOL, prefill_speed=SPEED, **options))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------ whose fields, in which unit


@pytest.mark.parametrize("line", [NGINX, ENVOY, TRAEFIK])
def test_an_answer_that_was_whole_before_its_prompt_can_be_read_is_a_hit(
    tmp_path: Path, line: dict[str, object]
) -> None:
    """9.5 s for 100,000 tokens that take 10 s, in the unit of each proxy; 110,000 tokens in a minute are none."""
    (hit,) = judged(tmp_path, line).hits
    assert hit.signs == (FAST,)
    assert hit.time.startswith("2026-11-29T14:05:00")
    assert hit.id == next(value for key, value in line.items() if "request_id" in key)


@pytest.mark.parametrize(
    ("line", "slower"),
    [
        (NGINX, {"request_time": "60.000", "upstream_response_time": "59.990"}),
        (ENVOY, {"duration": 60_000}),
        (TRAEFIK, {"Duration": 60_000_000_000}),
    ],
)
def test_an_answer_that_took_its_time_is_no_hit_and_its_first_token_is_not_known(
    tmp_path: Path, line: dict[str, object], slower: dict[str, object]
) -> None:
    found = judged(tmp_path, {**line, **slower})
    assert found.hits == []
    assert "of 1 of 1 answers no field says the seconds to the first token" in found.not_asked[0]


def test_an_early_header_proves_nothing_and_a_late_one_does(tmp_path: Path) -> None:
    slow = {"request_time": "60.000", "upstream_response_time": "59.990"}
    early = judged(tmp_path, {**NGINX, **slow})
    assert any("1 of them say when the header came" in one for one in early.not_asked)
    late = judged(tmp_path, {**NGINX, **slow, "upstream_header_time": "10.500"})
    assert [one for one in late.not_asked if one.startswith(FAST)] == []
    assert late.hits == []
    named_so = judged(tmp_path, {**NGINX, **slow}, fields={"first": "upstream_header_time"})
    assert [hit.signs for hit in named_so.hits] == [(FAST,)]


def test_of_several_servers_the_last_one_answered(tmp_path: Path) -> None:
    line = {**NGINX, "request_time": "-", "upstream_response_time": "0.001, 11.000"}
    assert judged(tmp_path, line).hits == []
    assert len(judged(tmp_path, {**line, "upstream_response_time": "30.000 : 0.500"}).hits) == 1


def test_a_duration_of_nobody_knows_whose_unit_is_not_used(tmp_path: Path) -> None:
    line = {"time": "2026-11-29T14:05:00Z", "status": 200, "prompt_tokens": 100_000, "duration": 5}
    assert judged(tmp_path, line).hits == []


def test_request_time_of_an_envoy_is_in_milliseconds(tmp_path: Path) -> None:
    """Its names are chosen by whoever writes its configuration; the flags of its answers are nobody else's."""
    line = {"status": 200, "prompt_tokens": 100_000, "request_time": 9500}
    assert judged(tmp_path, line).hits == []
    assert len(judged(tmp_path, {**line, "upstream_response_flags": "-"}).hits) == 1


def test_a_field_that_is_named_may_have_its_unit(tmp_path: Path) -> None:
    line = {"status": 200, "prompt_tokens": 100_000, "took": 9500}
    assert len(judged(tmp_path, line, fields={"first": "took:ms"}).hits) == 1
    assert judged(tmp_path, line, fields={"first": "took"}).hits == []
    assert named("first", "a:b").text == "a:b"  # no unit
    with pytest.raises(OptionError, match="only first, header, whole have a unit"):
        named("prompt", "tokens:ms")


def test_nginx_writes_its_own_times_too() -> None:
    when = datetime(2026, 11, 29, 14, 5, tzinfo=UTC)
    assert in_time("29/Nov/2026:15:05:00 +0100") == when
    assert in_time("1795961100.000") == when
    assert in_time("29 Nov 2026") is None


def test_a_line_with_other_fields_is_looked_at_anew() -> None:
    plans = Plans({})
    assert plans.of({"usage": {"prompt_tokens": 5}}).get("prompt") == 5
    assert plans.of({"usage": {"other": 1}, "prompt_tokens": 6}).get("prompt") == 6
    assert plans.of({"usage": None}).get("prompt") is None
    assert plans.of({"usage.prompt_tokens": 7}).get("prompt") == 7


# ------------------------------------------------------------------------------------ lines that are passed over


@pytest.mark.parametrize(
    "asked",
    [
        {"request": "GET /version HTTP/1.1"}, {"method": "GET", "path": "/v1/models"}, {"request_method": "HEAD", "uri": "/"},
        {"method": "POST", "path": "/health/?full=1"}, {"RequestMethod": "OPTIONS"}, {"request": "POST /healthz HTTP/1.1"},
    ],
)  # fmt: skip
def test_requests_that_send_no_prompt_are_passed_over(tmp_path: Path, asked: dict[str, object]) -> None:
    found = judged(tmp_path, {"status": 200, **asked}, NGINX)
    assert (found.passed_over, found.judged, found.not_judged) == (1, 1, [])


@pytest.mark.parametrize("path", ["/healthcare/v1/chat/completions", "/v1/chat/completions?x=/health"])
def test_a_path_that_only_begins_like_a_health_check_is_not_passed_over(tmp_path: Path, path: str) -> None:
    found = judged(tmp_path, {"status": 200, "method": "POST", "path": path})
    assert (found.passed_over, [one.why for one in found.not_judged]) == (0, ["no prompt tokens"])


def test_what_has_prompt_tokens_is_judged_whatever_its_path_is(tmp_path: Path) -> None:
    assert judged(tmp_path, {**NGINX, "request": "GET /version HTTP/1.1"}).passed_over == 0


def test_a_post_without_tokens_is_not_judged_and_its_fields_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = {key: value for key, value in NGINX.items() if key != "prompt_tokens"} | {"toks": 5}
    path = log(tmp_path, line)
    assert exposed.main(exposed.Asked((path,), POOL)) == 2
    out = capsys.readouterr().out
    assert f"1 line not judged: no prompt tokens (the first: {path}, line 1, which has time_iso8601, " in out
    assert "toks; --field prompt=NAME says which it is)" in out


def test_what_was_refused_needs_no_tokens_to_be_judged(tmp_path: Path) -> None:
    found = judged(tmp_path, {"status": 400}, {"status": 503, "prompt_tokens": 10**7})
    assert (found.judged, found.hits, found.not_judged) == (2, [], [])


# ------------------------------------------------------------------------------------ as an operator reads it


COMBINED = '10.0.0.1 - - [29/Nov/2026:14:05:00 +0000] "POST /v1/completions HTTP/1.1" 200 512 "-" "curl"'


def test_a_log_that_is_not_in_json_is_told_how_to_become_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exposed.main(exposed.Asked((log(tmp_path, COMBINED, COMBINED),), POOL)) == 2
    assert "2 lines not judged: none is a JSON object; let nginx (log_format ... escape=json)" in capsys.readouterr().out  # fmt: skip


def test_the_gravest_sign_comes_first_and_a_hit_is_one_line_with_its_parts_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = log(tmp_path, NGINX, {**NGINX, "request_id": "n2", "prompt_tokens": POOL + 1}, COMBINED)
    assert exposed.main(exposed.Asked((path,), POOL, prefill_speed=SPEED)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"1 answer: {OVER}", f"2 answers: {FAST}"]
    assert f"2026-11-29T14:05:00+00:00  n2  681,281 tokens  {OVER}, {FAST}  {path}, line 2" in lines
    assert f"1 line not judged: is no JSON object (the first: {path}, line 3)" in lines


# ------------------------------------------------------------------------------------ where from, and in which order


def over(time: str, name: str) -> dict[str, object]:
    return {"time": time, "request_id": name, "status": 200, "prompt_tokens": POOL + 1}


def test_hits_are_in_the_order_of_time_and_those_without_come_last(tmp_path: Path) -> None:
    one = log(tmp_path, over("2026-11-29T15:00:00+01:00", "second"), over("?", "none"), name="a.log")
    two = log(tmp_path, over("2026-11-29T13:00:00Z", "first"), over("2026-11-29T14:30:00Z", "third"), name="b.log")  # fmt: skip
    found = read([one, two], ExposureOptions(POOL))
    assert [hit.id for hit in found.hits] == ["first", "second", "third", "none"]
    assert (found.fits, found.no_time) == (4, 1)


@pytest.mark.parametrize("packed", [False, True])
def test_a_log_may_come_from_standard_input(
    tmp_path: Path, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = json.dumps(over("2026-11-29T13:00:00Z", "piped")).encode() + b"\n"
    raw = io.BytesIO(gzip.compress(data) if packed else data)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(raw)))  # type: ignore[type-var]
    (hit,) = read([Path("-")], ExposureOptions(POOL)).hits
    assert (hit.id, hit.where) == ("piped", "standard input, line 1")


def test_no_standard_input_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert read([Path("-")], ExposureOptions(POOL)).unread == ["standard input: there is none"]


# ------------------------------------------------------------------------------------ the time line


BEGAN = datetime(2026, 11, 29, 14, 0, tzinfo=UTC)


def line_of(*offsets: timedelta) -> TimeLine:
    line = TimeLine()
    for offset in offsets:
        line.add(BEGAN + offset)
    return line


@pytest.mark.parametrize(
    ("span", "step"),
    [
        (timedelta(0), 60), (timedelta(minutes=47), 60), (timedelta(minutes=48), 300), (timedelta(hours=4), 900),
        (timedelta(hours=13), 3600), (timedelta(days=5), 6 * 3600), (timedelta(days=30), 86_400), (timedelta(days=3650), 364 * 86_400),
    ],
)  # fmt: skip
def test_the_steps_fit_the_span(span: timedelta, step: int) -> None:
    assert line_of(timedelta(0), span).shown()[0] == step


def test_quiet_times_are_shown_too() -> None:
    _, buckets = line_of(timedelta(0), timedelta(minutes=3), timedelta(minutes=3)).shown()
    assert [(one.start, one.hits) for one in buckets] == [
        ("2026-11-29T14:00Z", 1), ("2026-11-29T14:01Z", 0), ("2026-11-29T14:02Z", 0), ("2026-11-29T14:03Z", 2),
    ]  # fmt: skip
    assert TimeLine().shown() == (0, [])


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=50))
def test_no_hit_is_lost_in_longer_steps(offsets: list[int]) -> None:
    step, buckets = line_of(*(timedelta(seconds=one) for one in offsets)).shown()
    assert sum(bucket.hits for bucket in buckets) == len(offsets)
    assert len(buckets) <= ROWS or step == STEPS[-1]


def test_a_log_with_every_minute_of_a_month_takes_little_room() -> None:
    line = line_of(*(timedelta(minutes=one) for one in range(MOST + 1)))
    assert len(line._counts) <= MOST // 4
    assert sum(bucket.hits for bucket in line.shown()[1]) == MOST + 1


# ------------------------------------------------------------------------------------ JSON


def test_the_json_fits_its_published_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = log(tmp_path, NGINX, over("2026-11-29T13:00:00Z", "x"), "no json", {"status": 200})
    assert exposed.main(exposed.Asked((path,), POOL, format="json", prefill_speed=SPEED)) == 1
    made = json.loads(capsys.readouterr().out)
    published = (DOCS / "exposure-schema.json").read_bytes()
    assert not list(Draft202012Validator(json.loads(published)).iter_errors(made))
    assert made["fits"] == 2
    assert published == exposed.schema(), "run: python -m hermetic.check.exposed docs/exposure-schema.json"
