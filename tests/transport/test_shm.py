"""Landing slots in shared memory, with real processes at the other end: what is written, what fences, what is left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from hermetic.transport.base import TransportError, Written
from hermetic.transport.process import ProcessWatch
from hermetic.transport.shm import ShmReceiver, ShmSender

STRIDE = 4096


@contextmanager
def process(code: str = "import time; time.sleep(1000)", *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A real process; it is killed at the end, whatever state it is in."""
    child = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def page(value: int) -> np.ndarray:
    return np.full(STRIDE, value, np.uint8)


def mappings() -> list[str]:
    return [x for x in Path("/proc/self/maps").read_text().splitlines() if "hermetic-landing" in x]


@pytest.fixture
def receiver() -> Iterator[ShmReceiver]:
    made = ShmReceiver(3, STRIDE, os.getpid())
    yield made
    made.close()


def test_pages_arrive_in_their_slots_and_each_batch_is_reported_once(receiver: ShmReceiver) -> None:
    sender = ShmSender(receiver.descriptor(), STRIDE)
    sender.write(1, [(page(7), 2), (page(8), 0)])
    sender.write(2, [(page(9), 1)])
    assert sender.poll() == [Written(1, True, True), Written(2, True, True)]
    assert sender.poll() == []
    assert receiver.memory.shape == (3, STRIDE)
    assert [set(slot.tolist()) for slot in receiver.memory] == [{8}, {9}, {7}]
    sender.close()


@pytest.mark.parametrize("slot", [-1, 3, 1000])
def test_a_slot_outside_the_segment_is_never_written(receiver: ShmReceiver, slot: int) -> None:
    sender = ShmSender(receiver.descriptor(), STRIDE)
    sender.write(1, [(page(7), slot)])
    assert sender.poll() == [Written(1, ok=False, stopped=True)]
    assert not receiver.memory.any()
    sender.close()


def test_a_segment_of_another_size_than_announced_is_refused(receiver: ShmReceiver) -> None:
    path, _, size = receiver.descriptor().rpartition(":")
    for other in (int(size) - STRIDE, int(size) + STRIDE):
        with pytest.raises(TransportError, match="bytes"):
            ShmSender(f"{path}:{other}", STRIDE)
    with pytest.raises(TransportError, match="stride"):
        ShmSender(f"{path}:{size}", STRIDE + 8)
    with pytest.raises(TransportError, match="descriptor"):
        ShmSender(f"{path}:many", STRIDE)


def test_a_segment_or_peer_that_is_not_there_is_refused_with_a_reason() -> None:
    with pytest.raises(TransportError, match="cannot open"):
        ShmSender("/proc/self/fd/9999:4096", STRIDE)
    with process("pass") as child:
        child.wait()
        with pytest.raises(TransportError, match=str(child.pid)):
            ShmReceiver(1, STRIDE, child.pid)


WRITER = """
import sys, numpy as np
from hermetic.transport.shm import ShmSender
sender = ShmSender(sys.argv[1], 4096)
value = 0
while True:
    value = value % 255 + 1
    sender.write(value, [(np.full(4096, value, np.uint8), 0)])
    assert sender.poll()[0].ok
    if value == 1:
        print("writing", flush=True)
"""


@contextmanager
def writer(slots: int = 1) -> Iterator[tuple[ShmReceiver, subprocess.Popen[str]]]:
    """A process that writes into slot 0 without end. (The segment is for its parent's pid until it exists.)"""
    held = ShmReceiver(slots, STRIDE, os.getpid())
    with process(WRITER, held.descriptor()) as child:
        held._peer.close()
        held._peer = ProcessWatch(child.pid)
        assert line(child) == "writing"
        yield held, child
    held.close()


def test_a_peer_is_fenced_by_its_death_and_not_before() -> None:
    with writer() as (receiver, child):
        assert not receiver.fence()
        assert receiver.memory.any()
        child.kill()
        # Death is what the fence waits for; a zombie that nobody has waited for runs no more code.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert receiver.fence()
        child.wait()
        assert receiver.fence()  # also when the number may belong to another process by now


def test_a_stopped_peer_is_not_fenced_for_it_can_go_on_in_the_middle_of_a_write() -> None:
    with writer() as (receiver, child):
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert not receiver.fence()
        child.send_signal(signal.SIGCONT)
        assert line(child) == "writing"  # and it does
        assert not receiver.fence()


def test_the_segments_of_two_peers_are_separate() -> None:
    one, two = ShmReceiver(2, STRIDE, os.getpid()), ShmReceiver(2, STRIDE, os.getpid())
    assert one.descriptor() != two.descriptor()
    a, b = ShmSender(one.descriptor(), STRIDE), ShmSender(two.descriptor(), STRIDE)
    a.write(1, [(page(1), 0), (page(1), 1)])
    assert set(one.memory.ravel().tolist()) == {1}
    assert not two.memory.any()
    one.close()
    b.write(1, [(page(2), 1)])  # closing one disturbs no other
    assert b.poll() == [Written(1, True, True)]
    assert set(two.memory[1].tolist()) == {2}
    a.close()
    b.close()
    two.close()


def test_nothing_is_left_behind_in_a_directory_and_the_memory_goes_with_its_last_user() -> None:
    gc.collect()
    files, maps, descriptors = os.listdir("/dev/shm"), len(mappings()), len(os.listdir("/proc/self/fd"))
    receiver = ShmReceiver(4, STRIDE, os.getpid())
    sender = ShmSender(receiver.descriptor(), STRIDE)
    sender.write(1, [(page(3), 0)])
    assert os.listdir("/dev/shm") == files
    assert len(mappings()) == maps + 2
    receiver.close()
    assert len(mappings()) == maps + 1  # the sender's own
    sender.write(2, [(page(4), 0)])
    sender.close()
    assert len(mappings()) == maps
    assert len(os.listdir("/proc/self/fd")) == descriptors
    receiver.close()  # closing twice does no harm
    sender.close()


def test_a_view_that_is_still_in_use_keeps_its_memory_and_no_other() -> None:
    receiver = ShmReceiver(2, STRIDE, os.getpid())
    view = receiver.memory[1]
    view[:] = 5
    receiver.close()
    assert set(view.tolist()) == {5}


def test_a_killed_writer_leaves_no_segment_behind() -> None:
    with writer() as (receiver, child):
        inode = os.stat(receiver.descriptor().rpartition(":")[0]).st_ino
        child.kill()
        child.wait()
        receiver.close()
        assert not any(str(inode) in x.split() for x in mappings())


def test_a_watch_needs_a_process_and_sees_its_end() -> None:
    with process() as child:
        watch = ProcessWatch(child.pid)
        assert not watch.ended()
        child.kill()
        child.wait()
        assert watch.ended()
        watch.close()
        watch.close()
        with pytest.raises(OSError, match="process"):
            ProcessWatch(child.pid)
