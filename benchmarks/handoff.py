"""What a handoff moves, verification included, against the bare transport, in one interleaved run.

    python benchmarks/handoff.py [--transport shm|mooncake|nixl] [--repeats 9] [--pages 1024]

Two processes. The writer sends sealed pages of SmolLM2-135M's layout (372,736 bytes) in batches of 16 through a window of
64 landing slots. Bare: a slot is free again when its write has ended. Handoff: the reader copies the slots into its pool,
verifies the seals of the copies, tags them, and gives the slots back; the clock stops when the last page is tagged.

The one thing to know: both ends, the transfer engine and the check share this machine's cores. Where they do not (two
hosts), the check costs the transport nothing until it is the slower of the two. NIXL uses cross-memory attach between
processes of one host; UCX_TLS=tcp shows it over TCP.
"""

from __future__ import annotations

import argparse
import os
import select
import statistics
import struct
import subprocess
import sys
import time
from collections import deque
from typing import NamedTuple

import numpy as np

from hermetic.kernels.numba_cpu import ALONE, NumbaKernels
from hermetic.kv.geometry import Geometry, empty_pages
from hermetic.kv.lineage import Secret
from hermetic.kv.pool import Pool
from hermetic.kv.seals import SealKey
from hermetic.options import WORKER_ENVIRONMENT
from hermetic.transport.base import Receiver, Sender
from hermetic.transport.choose import NAMES, open_transport

LAYERS, KV_HEADS, HEADS, DIM, PAGE = 30, 3, 9, 64, 16  # SmolLM2-135M in bf16
BATCH, WINDOW, HELD = 16, 64, 256
GROUPS = WINDOW // BATCH
GEOMETRY = Geometry.attention(PAGE, LAYERS, KV_HEADS, DIM, "bf16")
# Few enough pages that the check stays in the calling thread: the others have the transfer to do. And they are still in
# the cache when they are hashed.
A_CALL = max(1, ALONE // GEOMETRY.stride)
MESSAGE = struct.Struct("<q")
BARE, HANDOFF = 0, 1


def expected() -> tuple[SealKey, np.ndarray, np.ndarray]:
    """What both processes know: the key, and the words and bind sums of the pages, uint64 [HELD]."""
    rng = np.random.default_rng(1)
    words, binds = rng.integers(0, 2**64, (2, HELD), dtype=np.uint64)
    return SealKey(Secret(bytes(range(32))), GEOMETRY), words, binds


def tell(pipe: int, value: int) -> None:
    os.write(pipe, MESSAGE.pack(value))


def hear(pipe: int) -> int:
    got = os.read(pipe, MESSAGE.size)
    if len(got) != MESSAGE.size:
        raise SystemExit("the other process is gone: its message is above")
    return int(MESSAGE.unpack(got)[0])


# ------------------------------------------------------------------------------------------------------------ writer


def write_pages(name: str, descriptor: str) -> None:
    key, words, binds = expected()
    source = empty_pages(GEOMETRY, HELD)
    values = np.random.default_rng(2).integers(1, 255, (HELD, GEOMETRY.seals_offset), dtype=np.uint8)
    source[:, : GEOMETRY.seals_offset] = values
    for i in range(HELD):
        key.seal(source[i : i + 1], [PAGE], words[i : i + 1], binds[i : i + 1])
    transport = open_transport(name)
    sender = transport.sender(descriptor, GEOMETRY.stride)
    tell(1, 0)
    while (order := hear(0)) >= 0:
        pages, mode = divmod(order, 2)
        spent, seconds = time.process_time(), send(sender, source, pages, mode)
        tell(1, int(seconds * 1e9))
        tell(1, int((time.process_time() - spent) * 1e9))
    sender.close()
    transport.close()


def send(sender: Sender, source: np.ndarray, pages: int, mode: int) -> float:
    """Write so many pages, a group of slots for each batch; returns the seconds until the last write had ended."""
    began = time.perf_counter()
    free, ended, batch, batches = deque(range(GROUPS)), 0, 0, pages // BATCH
    flying: dict[int, int] = {}
    while ended < batches:
        if free and batch < batches:
            group = free.popleft()
            sender.write(
                batch,
                [(source[(batch * BATCH + i) % HELD], group * BATCH + i) for i in range(BATCH)],
            )
            flying[batch] = group
            batch += 1
        done = sender.poll()
        for written in done:
            if not written.ok:
                raise SystemExit(f"batch {written.batch} did not arrive")
            group = flying.pop(written.batch)
            ended += 1
            if mode == HANDOFF:
                tell(1, written.batch * GROUPS + group)
            else:
                free.append(group)
        if mode == HANDOFF:
            nap = 0.0 if done or (free and batch < batches) else 1e-4
            while select.select([0], [], [], nap)[0]:
                free.append(hear(0))
                nap = 0.0
        elif not done and not (free and batch < batches):
            time.sleep(5e-5)
    seconds = time.perf_counter() - began
    while mode == HANDOFF and len(free) < GROUPS:
        free.append(hear(0))
    return seconds


# ------------------------------------------------------------------------------------------------------------ reader


class Reader:
    """What decode does with a landed batch: copy, verify the copy, tag it."""

    def __init__(self, receiver: Receiver) -> None:
        key, self.words, self.binds = expected()
        self.receiver, self.pool = receiver, Pool(GEOMETRY, HELD)
        self.kernels = NumbaKernels(GEOMETRY, key, HEADS, DIM**-0.5, "bf16")
        self.pool.allocate(HELD, "benchmark")
        self.lineages = np.random.default_rng(3).integers(1, 2**63, (HELD, 2), dtype=np.uint64)
        self.fills = np.full(A_CALL, PAGE, np.int32)

    def land(self, batch: int, group: int) -> None:
        memory, slots = self.pool.memory, self.receiver.memory
        first, slot = batch * BATCH % HELD, group * BATCH
        for i in range(0, BATCH, A_CALL):
            pages = np.arange(first + i, first + i + A_CALL, dtype=np.int32)
            np.copyto(memory[first + i : first + i + A_CALL], slots[slot + i : slot + i + A_CALL])
            words, binds = self.words[pages], self.binds[pages]
            good = self.kernels.verify_pages(memory, pages, self.fills, words, binds)
            if not good.all():
                raise SystemExit("a page did not verify")
            self.pool.set_tags(pages, self.lineages[pages], self.fills)


class Run(NamedTuple):
    """One run: GB/s, and seconds of CPU that both processes spent on a GB."""

    speed: float
    cpu: float


def read_pages(reader: Reader, to: int, out: int, pages: int, mode: int) -> Run:
    """Have so many pages written, and land them in mode HANDOFF."""
    began, spent = time.perf_counter(), time.process_time()
    tell(to, pages * 2 + mode)
    for _ in range(pages // BATCH if mode == HANDOFF else 0):
        batch, group = divmod(hear(out), GROUPS)
        reader.land(batch, group)
        tell(to, group)
    ours = time.perf_counter() - began
    theirs, cpu = hear(out) / 1e9, hear(out) / 1e9
    size = pages * GEOMETRY.stride / 1e9
    return Run(size / (theirs if mode == BARE else ours), (cpu + time.process_time() - spent) / size)


def measure(name: str, repeats: int, pages: int) -> None:
    transport = open_transport(name)
    writer = subprocess.Popen(
        [sys.executable, __file__, "--transport", name, "--write"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert writer.stdin is not None
    assert writer.stdout is not None
    try:
        to, out = writer.stdin.fileno(), writer.stdout.fileno()
        receiver = transport.receiver(WINDOW, GEOMETRY.stride, writer.pid)
        writer.stdin.write(receiver.descriptor().encode() + b"\n")
        writer.stdin.flush()
        hear(out)
        reader = Reader(receiver)
        runs: list[list[Run]] = [[], []]
        for repeat in range(-1, repeats):  # the first warms up and compiles
            for mode in (BARE, HANDOFF):
                run = read_pages(reader, to, out, pages, mode)
                if repeat >= 0:
                    runs[mode].append(run)
        tell(to, -1)
        writer.wait(30)
        receiver.close()
    finally:
        writer.kill()
        writer.wait()
        transport.close()
    pairs = list(zip(*runs, strict=True))
    columns = (
        [bare.speed for bare, _ in pairs],
        [handoff.speed for _, handoff in pairs],
        [handoff.speed / bare.speed for bare, handoff in pairs],
        [bare.cpu for bare, _ in pairs],
        [handoff.cpu for _, handoff in pairs],
    )
    print(f"| {name} | " + " | ".join(spread(x) for x in columns) + " |")


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transport", choices=NAMES, help="default: all of them")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--pages", type=int, default=1024)
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if any(name not in os.environ for name in WORKER_ENVIRONMENT):  # read when the libraries are loaded
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | WORKER_ENVIRONMENT)
    if options.write:
        write_pages(options.transport, sys.stdin.buffer.raw.readline().decode().strip())
        return
    load = os.getloadavg()[0]
    print(
        f"{os.cpu_count()} cores, load {load:.1f}; {options.repeats} repeats of {options.pages} pages each way"
    )
    print(
        "| transport | bare GB/s: median (min-max) | handoff GB/s | ratio | bare CPU s/GB | handoff CPU s/GB |"
    )
    print("|---|---|---|---|---|---|")
    for name in [options.transport] if options.transport else NAMES:
        measure(name, options.repeats, options.pages // BATCH * BATCH)


if __name__ == "__main__":
    main()
