"""What is no whole recording is never called one: empty, foreign, cut, mixed up, a process missing; and long ones stay small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recordings import Lines, record, save

from hermetic.lab.tiny import make_tiny
from hermetic.proof.conform import TraceError, conform
from hermetic.proof.conformance import follow
from hermetic.proof.conformance.recording import Recording


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    folder = tmp_path_factory.mktemp("recorded")
    return record(make_tiny(folder / "tiny"), folder / "trace")


def text(lines: Lines) -> str:
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"),
        ("\n\n", "has no records"),
        ('{"a": 1}\n', "line 1 is no record"),
        ("[1, 2]\n", "line 1 is no record"),
        ("hello\n", "line 1 is no record"),
        (
            '{"k":"process","p":"0011223344556677","version":1}\n',
            "line 1 is no record: .*missing required field",
        ),
        ('{"k":"end","p":"0011223344556677"}\n', "the beginning of its recording is missing"),
        ('{"k":"other","p":"0011223344556677"}\n', "line 1 is no record"),
        (
            '{"k":"process","p":"0011223344556677","version":7,"worker":"a","role":"decode","pid":1,"page_size":16,'
            '"pages":1,"slots":1}\n',
            "recorded as version 7; this hermetic reads version 1",
        ),
    ],
)
def test_what_is_no_recording_is_an_error_that_says_where(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "trace").write_text(content)
    with pytest.raises(TraceError, match=said):
        conform(tmp_path / "trace")


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        conform(tmp_path / "nowhere")


def test_something_else_between_the_records_is_an_error(tmp_path: Path, good: Lines) -> None:
    (tmp_path / "trace").write_text(
        text(good[:50]) + "Traceback (most recent call last):\n" + text(good[50:])
    )
    with pytest.raises(TraceError, match="line 51 is no record"):
        conform(tmp_path / "trace")


def test_bytes_that_are_no_text_are_an_error(tmp_path: Path, good: Lines) -> None:
    (tmp_path / "trace").write_bytes(text(good[:50]).encode() + b"\xff\x00\xfe\n" + text(good[50:]).encode())
    with pytest.raises(TraceError, match="line 51 is no record"):
        conform(tmp_path / "trace")


def test_a_process_that_others_dealt_with_has_to_be_there(tmp_path: Path, good: Lines) -> None:
    p = good[0]["p"]
    with pytest.raises(
        TraceError, match="whose recording is not here; put the files of all workers together"
    ):
        conform(save([line for line in good if line["p"] != p], tmp_path / "trace"))


def test_two_files_put_one_behind_the_other_are_a_recording(tmp_path: Path, good: Lines) -> None:
    p = good[0]["p"]
    for first in (True, False):
        apart = sorted(good, key=lambda line: (line["p"] == p) is first)
        assert conform(save(apart, tmp_path / "trace")).conforms


@pytest.mark.parametrize("kept", [20, 100, 150, 200, 250, 300])
@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_what_a_killed_process_did_last_is_missing_and_said_and_the_rest_is_checked(
    tmp_path: Path, good: Lines, kept: int, victim: str
) -> None:
    """Its last line is cut; the other half goes on with what it was told and is nowhere in the file."""
    p = next(line["p"] for line in good if line.get("worker") == victim)
    rest = [line for line in good[kept:] if line["p"] != p]
    cut = json.dumps(next(line for line in good[kept:] if line["p"] == p), separators=(",", ":"))[:-9]
    (tmp_path / "trace").write_text(text(good[:kept]) + cut + "\n\n" + text(rest))
    found = conform(tmp_path / "trace")
    assert found.conforms, found.lines()
    assert found.killed == (victim,)
    assert found.cuts == (kept + 1,)
    assert any("without an end" in line and "cut off" in line for line in found.lines())


def test_a_process_does_not_go_on_after_a_line_that_is_cut(tmp_path: Path, good: Lines) -> None:
    whole = text(good).splitlines(keepends=True)
    p = good[40]["p"]
    assert any(line["p"] == p for line in good[41:])
    (tmp_path / "trace").write_text("".join([*whole[:40], whole[40][:-12] + "\n", *whole[41:]]))
    with pytest.raises(TraceError, match="goes on after line 41, which is cut off"):
        conform(tmp_path / "trace")


def test_the_end_of_the_file_may_be_cut_before_the_process_is_named(tmp_path: Path, good: Lines) -> None:
    (tmp_path / "trace").write_text(text(good[:100]) + '{"k":"st')
    found = conform(tmp_path / "trace")
    assert found.conforms
    assert found.cuts == (101,)


def test_requests_that_are_open_at_the_end_are_counted_and_it_conforms_as_far_as_it_goes(
    tmp_path: Path, good: Lines
) -> None:
    found = conform(save(good[:120], tmp_path / "trace"))
    assert found.conforms
    assert found.open > 0
    assert any("are open at its end: it conforms as far as it goes" in line for line in found.lines())


def many(good: Lines, times: int) -> Lines:
    """The first request alone, over and over: other tickets, and each time the next uses of its slots."""
    key = next(line["key"] for line in good if line["k"] == "begin")
    owner = key[:12] + key[key.index("/") :]
    told = [line for line in good if line["k"] in ("process", "segment", "opened", "end")]

    def of_it(line: dict[str, object]) -> bool:
        pages = line.get("pages") or [[""]]
        return (
            key in (line.get("key"), pages[0][0] if isinstance(pages[0], list) else "")
            or line.get("owner") == owner
        )  # type: ignore[index]

    mine = [line for line in good if line not in told and of_it(line)]
    raw = text(mine)
    out = told[:-2]
    most: dict[int, int] = {}
    for slot, use in (use for line in mine if line["k"] == "slots" for use in line["uses"]):
        most[slot] = max(most.get(slot, 0), use)
    assert most
    for number in range(times):
        ticket = number.to_bytes(6, "big").hex() + "0" * 20
        copies = [
            json.loads(x)
            for x in raw.replace(key, ticket + "/1").replace(owner, ticket[:12] + "/1").splitlines()
        ]
        for line in copies:
            _later(line, {slot: number * uses for slot, uses in most.items()})
        out += copies
    return out + told[-2:]


def _later(line: dict[str, object], by: dict[int, int]) -> None:
    """Slot uses of this line, so many later. Pages are (page, slot, use), uses (slot, use)."""

    def pages(found: list[list[int]]) -> None:
        for use in found:
            use[-1] += by[use[-2]]

    if line["k"] == "slots":
        pages(line["uses"])  # type: ignore[arg-type]
    if line["k"] == "copying":
        pages(line["pages"])  # type: ignore[arg-type]
    messages = [line["m"]] if "m" in line else []
    for action in line.get("do", []):  # type: ignore[attr-defined]
        if action[0] == "send":
            messages.append(action[1])
        elif action[0] == "write":
            pages(action[2])
        elif action[0] == "copy":
            action[3] += by[action[2]]
    for message in messages:
        if message[0] in ("Credit", "Landed"):  # type: ignore[index]
            pages(message[2])  # type: ignore[index]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """One request alone."""
    folder = tmp_path_factory.mktemp("one")
    return record(make_tiny(folder / "tiny"), folder / "trace", only_one=True)


def test_of_a_long_recording_only_what_is_open_is_kept(
    tmp_path: Path, one: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "LATE_KEPT", 20)
    follower = follow.Follower(Recording(save(many(one, 300), tmp_path / "trace")))
    follower.run()
    assert follower.seen == 300
    assert not follower.tickets
    assert len(follower.late) == len(follower.pairs) == 20
    assert follower.dropped == 280
    assert follower.abstract is not None
    assert not follower.abstract.states
    for name in ("used", "given", "granted", "leased", "kept"):
        assert not any(shared.get(name) for shared in follower.abstract._shared.values()), name
