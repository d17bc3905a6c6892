"""The recorder: what is in a recording and what never is, when it is written, and that it changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hermetic.handoff import messages as m
from hermetic.handoff import trace
from hermetic.handoff.decode import DecodeHandoff
from hermetic.handoff.machine import Machine
from hermetic.handoff.outcome import Failed
from hermetic.handoff.prefill import PrefillHandoff
from hermetic.handoff.trace import Recorder, TraceFileError, recording, start
from hermetic.kv.geometry import Geometry
from hermetic.kv.pool import Kind, Pool
from hermetic.kv.slots import Slots

KEY = m.Key(b"k" * 16, 3)
NAME = "6b" * 16 + "/3"
SECRET = b"the first tokens"


@pytest.fixture(autouse=True)
def _not_recorded_otherwise() -> None:
    """These tests have recorders of their own."""
    if Recorder.current is not None:
        Recorder.current.close()


def join(recorder: Recorder, role: str = "prefill", p: bytes = b"12345678") -> trace.Journal:
    return recorder.join("worker-0", role, p, 16, 8, 4)


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def test_a_step_is_recorded_with_its_states_its_arguments_and_its_actions(tmp_path: Path) -> None:
    with recording(str(tmp_path / "trace")) as recorder:
        machine = PrefillHandoff(KEY)
        join(recorder).begins(machine, "other")
        machine.submitted(40, 3)
        machine.received(m.Grant(40, 3))
    process, begin, submitted, grant, end = read(tmp_path / "trace")
    p = b"12345678".hex()
    assert process["worker"] == "worker-0"
    assert process["pid"] == os.getpid()
    assert begin == {"k": "begin", "p": p, "key": NAME, "peer": "other"}
    assert submitted == {
        "k": "step", "p": p, "key": NAME, "e": "submitted", "b": "NEW", "s": "HAS_REQUEST", "a": [40, 3],
    }  # fmt: skip
    assert grant == {
        "k": "step", "p": p, "key": NAME, "e": "Grant", "b": "HAS_REQUEST", "s": "QUEUED", "m": ["Grant", 40, 3],
        "do": [["enqueue"]],
    }  # fmt: skip
    assert end == {"k": "end", "p": p}


def test_nothing_that_travels_besides_kv_and_no_token_stands_in_it(tmp_path: Path) -> None:
    with recording(str(tmp_path / "trace")) as recorder:
        sends, lands = PrefillHandoff(KEY), DecodeHandoff(KEY, 16, 1, Slots(2))
        join(recorder).begins(sends, "other")
        join(recorder, "decode", b"abcdefgh").begins(lands, "other")
        sends.submitted(16, 1)
        sends.received(m.Grant(16, 1))
        sends.started()
        sends.received(m.Credit(0, ((0, 1),)))
        sends.pages_ready(1)
        sends.wrote(1, True)
        sends.computed(SECRET)
        lands.reserved()
        lands.received(m.Started(1))
        lands.received(m.Complete(16, 1, 1, SECRET))
    raw = (tmp_path / "trace").read_bytes()
    assert b'"computed"' in raw
    assert raw.count(b'"Complete"') == 3  # sent, and received: its event and its message
    for spelling in (SECRET, SECRET.hex().encode(), b"dGhlIGZpcnN0IHRva2Vucw"):  # the last: base64
        assert spelling not in raw


def test_a_reason_is_kept_short(tmp_path: Path) -> None:
    with recording(str(tmp_path / "trace")) as recorder:
        machine = PrefillHandoff(KEY)
        join(recorder).begins(machine, "other")
        machine.abort(Failed("x", "y" * 10_000))
        machine.fenced("z" * 10_000)
    abort = read(tmp_path / "trace")[2]
    assert abort["a"] == ["Failed", "x", "y" * 200]


def test_slots_and_pages_are_recorded_under_their_process_and_segment(tmp_path: Path) -> None:
    pool, slots = Pool(Geometry.attention(16, 1, 1, 8, "f32"), 4), Slots(2)
    with recording(str(tmp_path / "trace")) as recorder:
        journal = join(recorder, "decode")
        journal.owns(pool)
        journal.has_segment(slots, "other", 7)
        (use,) = slots.grant(KEY, 1)
        slots.consume(KEY, use)
        lease = pool.allocate(2, "somebody", Kind.RECEIVE)
        pool.close(lease)
    _, segment, grant, consume, take, drop, _ = read(tmp_path / "trace")
    assert segment == {"k": "segment", "p": b"12345678".hex(), "peer": "other", "segment": 7, "slots": 2}
    assert (grant["what"], grant["segment"], grant["uses"], grant["key"]) == ("grant", 7, [list(use)], NAME)
    assert consume["what"] == "consume"
    assert (take["what"], take["kind"], take["pages"], take["owner"]) == (
        "take",
        "RECEIVE",
        [0, 1],
        "somebody",
    )
    assert drop["what"] == "drop"


def test_what_belongs_to_no_worker_of_this_recording_is_left_out(tmp_path: Path) -> None:
    with recording(str(tmp_path / "trace")) as recorder:
        PrefillHandoff(KEY).submitted(40, 3)
        Slots(2).grant(KEY, 1)
        join(recorder)
    assert [record["k"] for record in read(tmp_path / "trace")] == ["process", "end"]


def test_without_a_recorder_nothing_observes_and_after_one_nothing_does_either(tmp_path: Path) -> None:
    def observers() -> set[object]:
        return {Machine.observer, Slots.observer, Pool.observer, Recorder.current}

    assert observers() == {None}
    with recording(str(tmp_path / "trace")) as recorder:
        assert observers() == {recorder}
    assert observers() == {None}


def test_who_a_process_is_stands_in_the_file_at_once_and_the_rest_within_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(trace.time, "monotonic", lambda: now[0])
    with recording(str(tmp_path / "trace")) as recorder:
        journal = join(recorder)
        assert len(read(tmp_path / "trace")) == 1
        journal.lost("other", "is gone")
        recorder.keep()
        assert len(read(tmp_path / "trace")) == 1
        now[0] += trace.FLUSH_SECONDS + 0.01
        recorder.keep()
        assert len(read(tmp_path / "trace")) == 2
    assert trace.FLUSH_SECONDS < 1.0


def test_many_records_are_not_held_back_for_long(tmp_path: Path) -> None:
    with recording(str(tmp_path / "trace")) as recorder:
        journal = join(recorder)
        for _ in range(trace.FLUSH_RECORDS):
            journal.has_fenced(1)
        assert len(read(tmp_path / "trace")) == 1 + trace.FLUSH_RECORDS


def test_starting_empties_the_file_and_recording_only_appends(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("what was there before\n")
    start(str(path))
    assert path.read_bytes() == b""
    for p in (b"12345678", b"abcdefgh"):
        with recording(str(path)) as recorder:
            join(recorder, p=p)
    assert [record["p"] for record in read(path)] == [b"12345678".hex()] * 2 + [b"abcdefgh".hex()] * 2


@pytest.mark.parametrize("begin", [start, Recorder])
def test_a_file_that_cannot_be_written_is_refused_with_its_name_and_why(
    tmp_path: Path, begin: object
) -> None:
    with pytest.raises(TraceFileError, match=r"--trace .*nowhere/trace cannot be written: No such file"):
        begin(str(tmp_path / "nowhere" / "trace"))  # type: ignore[operator]
    with pytest.raises(TraceFileError, match="cannot be written: Is a directory"):
        begin(str(tmp_path))  # type: ignore[operator]


def test_a_machine_that_is_recorded_does_what_it_does_otherwise(tmp_path: Path) -> None:
    def run() -> list[object]:
        machine, done = DecodeHandoff(KEY, 40, 3, Slots(4)), []
        if Recorder.current is not None:
            join(Recorder.current, "decode").begins(machine, "other")
        done += machine.reserved() + machine.received(m.Started(3)) + machine.credit(3)
        done += machine.received(m.Landed(1, ((0, 0, 1),))) + machine.copied(0, False) + machine.nudge()
        return [*done, machine.state, machine.stale]

    without = run()
    with recording(str(tmp_path / "trace")):
        assert run() == without


WRITER = """
import os, signal, sys
from hermetic.handoff.trace import Recorder
recorder = Recorder(sys.argv[1])
recorder.install()
journal = recorder.join("worker", "decode", bytes.fromhex(sys.argv[2]), 16, 8, 4)
for number in range(2500):
    journal.lost(str(number), "gone")
    recorder.keep()
if sys.argv[3] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
recorder.close()
"""


def test_processes_that_share_a_file_leave_every_line_whole_though_one_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    names = [bytes([i] * 8).hex() for i in range(3)]
    running = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), p, how])
        for p, how in zip(names, ("lives", "killed", "lives"), strict=True)
    ]
    for process in running:
        process.wait(timeout=120)
    records = read(path)  # every line is JSON
    for p, whole in zip(names, (True, False, True), strict=True):
        mine = [record for record in records if record["p"] == p]
        numbers = [int(str(record["peer"])) for record in mine if record["k"] == "lost"]
        assert numbers == list(range(len(numbers)))
        assert (len(numbers) == 2500) is whole
        assert (mine[-1]["k"] == "end") is whole


def test_copies_and_verdicts_are_recorded_in_plain_numbers(tmp_path: Path) -> None:
    from hermetic.handoff.actions import Copy
    from hermetic.kv.slots import SlotUse

    with recording(str(tmp_path / "trace")) as recorder:
        journal = join(recorder, "decode")
        round_ = [(KEY, Copy(2, SlotUse(1, 9)))]
        journal.copies(round_, np.array([5], np.int32))
        journal.verified(round_, np.array([5], np.int32), np.array([True]))
    _, copying, verified, _ = read(tmp_path / "trace")
    assert copying["pages"] == [[NAME, 2, 5, 1, 9]]
    assert verified["pages"] == [[NAME, 2, 5, True]]
