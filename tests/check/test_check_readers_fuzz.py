"""Damaged captures: nothing is raised, and what is cut or lost makes no new facts.

What can be promised, and is tested. Cut at the end, or with lines lost: every fact is one of the whole capture's, but for what is counted over
lines (never more), for how far the log reaches, and for the longest wait (never shorter). Cut within a line: that is said. JSON that is cut
says nothing at all. A changed digit is a changed number and cannot be told; so of changed bytes only the kinds of values are promised.
"""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermetic.check import facts
from hermetic.check.facts import FACTS, Fact, Sheet
from hermetic.check.readers import engine_files
from hermetic.check.readers.reading import Reading

CAPTURES = Path(__file__).parent / "captures"
WHOLE = {
    str(path.relative_to(CAPTURES)): path.read_bytes()
    for path in sorted(CAPTURES.rglob("*"))
    if path.is_file()
}
METRICS = sorted(name for name in WHOLE if "metrics" in name)
LOGS = sorted(name for name in WHOLE if name.endswith("log"))
JSON = sorted(set(WHOLE) - set(METRICS) - set(LOGS))

COUNTED: tuple[Fact[int], ...] = (
    facts.CHECKSUM_SKIPPED,
    facts.CHECKSUM_WRONG,
    facts.CANARY_WARM_UP,
    facts.CANARY_WRONG,
    facts.EXPIRED,
    facts.READ_LATE,
    facts.SERVED_REQUESTS,
)
KINDS = {
    **dict.fromkeys(("engine", "version", "role", "model", "revision", "served", "kv_dtype", "transport", "transport_version", "canary",
                     "host", "inner_host", "load_failure", "verify"), str),
    **dict.fromkeys(("context", "pool", "page", "longest", "reserve", "tp", "pp", "released", "released_by_timeout", "checksum_skipped",
                     "checksum_wrong", "canary_checked", "canary_wrong", "canary_warm_up", "expired", "read_late", "transfers", "failed_transfers", "verified",
                     "integrity_failures", "quarantined", "served_requests"), int),
    **dict.fromkeys(("memory_fraction", "kv_bytes", "transfer_speed", "prefill_speed", "lease", "waited"), float),
    **dict.fromkeys(("truncates", "checksum", "started", "api_key", "admin_key", "remote_code", "developer", "disabled", "restores"),
                    bool),
}  # fmt: skip


def read(name: str, content: bytes) -> Reading:
    """As `hermetic check FILE` does, and every reader once."""
    readings = [engine_files.read_json(name, content), engine_files.read_metrics(name, content)]
    log = engine_files.read_log(name, io.BytesIO(content))
    return next((reading for reading in readings if reading is not None), log)


def told(reading: Reading) -> set[tuple[str, Any]]:
    return {
        (name, seen.value)
        for sheet in reading.sheets
        for name, all_seen in sheet.facts()
        for seen in all_seen
    }


BEFORE = {name: told(read(name, content)) for name, content in WHOLE.items()}
ADDRESSES = {name: {sheet.address for sheet in read(name, content).sheets} for name, content in WHOLE.items()}


def values_of(facts_told: set[tuple[str, Any]], fact: Fact[Any]) -> list[Any]:
    return [value for name, value in facts_told if name == fact.name]


def assert_nothing_new(name: str, reading: Reading) -> None:
    now, before = told(reading), BEFORE[name]
    for fact in COUNTED:
        assert all(value <= max(values_of(before, fact)) for value in values_of(now, fact))
    assert all(value >= max(values_of(before, facts.WAITED)) for value in values_of(now, facts.WAITED))
    of_their_own = {fact.name for fact in (*COUNTED, facts.STARTED, facts.WAITED)}
    assert {one for one in now if one[0] not in of_their_own} <= before
    assert {sheet.address for sheet in reading.sheets} <= ADDRESSES[name] | {None}


def assert_sound(sheet: Sheet) -> None:
    for name, all_seen in sheet.facts():
        assert name in FACTS
        for seen in all_seen:
            assert type(seen.value) is KINDS[name], (name, seen)
            assert seen.where
    if sheet.address is not None:
        assert sheet.address[0]
        assert 0 < sheet.address[1] < 65536


def test_every_capture_is_of_one_of_the_three_kinds_and_says_something_or_why_not() -> None:
    assert len(METRICS) >= 8
    assert len(LOGS) >= 9
    for name, content in WHOLE.items():
        reading = read(name, content)
        assert reading.sheets or reading.unread, name


# ------------------------------------------------------------------------------------ cut at the end


@pytest.mark.parametrize("name", JSON)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_json_that_is_cut_says_nothing_at_all(name: str, data: st.DataObject) -> None:
    content = WHOLE[name].rstrip()
    at = data.draw(st.integers(0, len(content) - 1))
    reading = read(name, content[:at])
    assert reading.sheets == []
    assert reading.unread != []


@pytest.mark.parametrize("name", METRICS + LOGS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_what_is_cut_makes_no_new_facts(name: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(WHOLE[name])))
    assert_nothing_new(name, read(name, WHOLE[name][:at]))


@pytest.mark.parametrize("name", METRICS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_metrics_that_are_cut_within_a_sample_say_so(name: str, data: st.DataObject) -> None:
    content = WHOLE[name]
    at = data.draw(st.integers(1, len(content)))
    start = content.rfind(b"\n", 0, at) + 1
    if content[start:at].strip() and not content[start:at].startswith(b"#"):
        assert read(name, content[:at]).unread != []


@pytest.mark.parametrize("name", LOGS)
def test_a_log_that_is_cut_within_a_line_that_matters_says_so(name: str) -> None:
    content = WHOLE[name]
    words = b"max_total_num_tokens=" if name.startswith("sglang") else b" KV cache size: "
    at = content.index(b"\n", content.index(words))
    for cut in (at, at - 1, at - 7):
        reading = read(name, content[:cut])
        assert facts.POOL not in reading.sheets[0]
        assert [unread.part for unread in reading.unread] == [True]


# ------------------------------------------------------------------------------------ lines lost


@pytest.mark.parametrize("name", METRICS + LOGS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_lines_that_are_lost_make_no_new_facts(name: str, data: st.DataObject) -> None:
    lines = WHOLE[name].splitlines(keepends=True)
    lost = data.draw(st.sets(st.integers(0, len(lines) - 1), max_size=len(lines)))
    assert_nothing_new(name, read(name, b"".join(line for at, line in enumerate(lines) if at not in lost)))


# ------------------------------------------------------------------------------------ bytes changed


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes changed, taken out, put in, moved, and doubled."""
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(content)))
        end = min(len(content), at + draw(st.sampled_from((0, 1, 2, 10, 100, 5000))))
        put = draw(
            st.one_of(
                st.binary(max_size=8),
                st.sampled_from(
                    (
                        b"\n",
                        b"\x00",
                        b'"',
                        b"'",
                        b"{",
                        b"}",
                        b"(",
                        b"\\",
                        b"\xff",
                        b"=",
                        b",",
                        b":",
                        b"NaN",
                        b"9" * 5000,
                        b"-1",
                        b"[" * 2000,
                    )
                ),
                st.just(content[at:end] * 2),
            )
        )
        content = content[:at] + put + content[end:]
    return content


@pytest.mark.parametrize("name", sorted(WHOLE))
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_damage_of_any_kind_raises_nothing_and_values_keep_their_kind(name: str, data: st.DataObject) -> None:
    content = data.draw(damaged(WHOLE[name]))
    for reading in (
        engine_files.read_json(name, content),
        engine_files.read_metrics(name, content),
        engine_files.read_log(name, io.BytesIO(content)),
    ):
        for sheet in reading.sheets if reading is not None else ():
            assert_sound(sheet)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(LOGS), data=st.data())
def test_damaged_packed_logs_raise_nothing_and_make_no_new_facts_where_they_are_cut(
    name: str, data: st.DataObject
) -> None:
    packed = gzip.compress(WHOLE[name], mtime=0)
    assert_nothing_new(
        name, engine_files.read_log(name, io.BytesIO(packed[: data.draw(st.integers(2, len(packed)))]))
    )
    engine_files.read_log(name, io.BytesIO(packed[:2] + data.draw(damaged(packed))[2:]))


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.binary(max_size=300), st.text(max_size=300).map(str.encode)))
def test_anything_at_all_raises_nothing(content: bytes) -> None:
    for head in (
        b"",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"\x1f\x8b",
        b'{"log":"',
        b"# TYPE sglang:page_size gauge\nsglang:page_size{",
        b"server_args={",
    ):
        reading = read("anything", head + content)
        assert reading.sheets or reading.unread


# ------------------------------------------------------------------------------------ JSON with other values

VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**63),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=5),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@pytest.mark.parametrize("name", [name for name in JSON if BEFORE[name]])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_fields_with_values_of_another_kind_are_no_facts(name: str, data: st.DataObject) -> None:
    import msgspec

    body = WHOLE[name][WHOLE[name].index(b"{") :]
    told_json = msgspec.json.decode(body)
    places = list(_places(told_json))
    for _ in range(data.draw(st.integers(1, 3))):
        holder, key = data.draw(st.sampled_from(places))
        holder[key] = data.draw(VALUES)
    reading = engine_files.read_json(name, msgspec.json.encode(told_json))
    for sheet in reading.sheets if reading is not None else ():
        assert_sound(sheet)


def _places(value: Any) -> Any:
    """(holder, key) of every field, at any depth."""
    items = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))
        if isinstance(value, list)
        else []
    )
    for key, inner in items:
        yield value, key
        yield from _places(inner)
