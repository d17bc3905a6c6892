"""The test's end of a writing process, and the landing memory that belongs to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from writing_process import content

from hermetic.transport.base import Receiver, Transport, Written

STRIDE = 8192
SLOTS = 6
WRITE_TIMEOUT_S = 120.0  # much more than is usual: some tests stop the writer for a while
PATIENCE_S = 60.0  # how long a test waits for what must happen; a machine under load is slow


class Peer:
    """One prefill worker's process. `receiver` is what decode holds for it."""

    def __init__(self, transport: Transport, write_timeout_s: float) -> None:
        self.transport = transport
        script = Path(__file__).with_name("writing_process.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), transport.name, str(write_timeout_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self, *command: object) -> object:
        self.tell(*command)
        return self.answer()

    def tell(self, *command: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> object:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            kind, _, text = line.partition(" ")
            if kind == "answer":
                return json.loads(text)
        raise AssertionError(f"the writing process ended with {self.process.wait()}")

    def open(self, receiver: Receiver, stride: int = STRIDE) -> None:
        assert self.ask("open", receiver.descriptor(), stride) == "opened"

    def write(self, batch: int, pages: Sequence[tuple[int, int]]) -> None:
        """Pages as (slot, seed of the content)."""
        assert self.ask("write", batch, pages) == "written"

    def ended(self, count: int, seconds: float = PATIENCE_S) -> list[Written]:
        answer = self.ask("poll", count, seconds)
        assert isinstance(answer, list)
        return [Written(*x) for x in answer]

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """Let it finish by itself, as a worker does that is told to stop; its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(PATIENCE_S)

    def clean(self) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:
                continue  # a command that it did not live to read


@contextmanager
def peers(
    transport: Transport, count: int = 1, write_timeout_s: float = WRITE_TIMEOUT_S
) -> Iterator[list[Peer]]:
    """So many writing processes, gone at the end whatever state they are in."""
    made = [Peer(transport, write_timeout_s) for _ in range(count)]
    try:
        yield made
    finally:
        for one in made:
            one.clean()


@contextmanager
def landing(transport: Transport, peer: Peer, slots: int = SLOTS, stride: int = STRIDE) -> Iterator[Receiver]:
    receiver = transport.receiver(slots, stride, peer.pid)
    try:
        yield receiver
    finally:
        receiver.close()


def expected(pages: Sequence[tuple[int, int]], slots: int = SLOTS, stride: int = STRIDE) -> np.ndarray:
    """What landing memory that began as zeros looks like when these (slot, seed) have landed in this order."""
    memory = np.zeros((slots, stride), np.uint8)
    for slot, seed in pages:
        memory[slot] = content(seed, stride)
    return memory
