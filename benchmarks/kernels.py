"""What the kernels cost on this machine: SmolLM2-135M's shapes, 30 layers, medians; ratios from interleaved runs.

    python benchmarks/kernels.py [--runs 15] [--dtype bf16]

The one thing to know: a fork and join on a busy core waits for that core. Look at the load that is printed first;
`cpu ms` is the CPU time of the calling thread in a serial run, which a busy neighbour disturbs least.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import numba
import numpy as np
import torch

from hermetic.kernels.base import TORCH, Dtype, ReadPlan, WritePlan
from hermetic.kernels.numba_cpu import ALONE, NumbaKernels
from hermetic.kv.geometry import Geometry, empty_pages
from hermetic.kv.lineage import Secret
from hermetic.kv.seals import SealKey

LAYERS, KV_HEADS, HEADS, DIM, PAGE = 30, 3, 9, 64, 16
NEVER, ALWAYS = 1 << 62, -1


def middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def together(runs: int, *calls: Callable[[], object]) -> list[list[float]]:
    """Seconds of each call, `runs` times, the calls taking turns."""
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(runs):
        for slot, call in zip(times, calls, strict=True):
            began = time.perf_counter()
            call()
            slot.append(time.perf_counter() - began)
    return times


class Bench:
    def __init__(self, runs: int, dtype: Dtype) -> None:
        self.runs, self.dtype = runs, dtype
        self.geometry = Geometry.attention(PAGE, LAYERS, KV_HEADS, DIM, dtype)
        self.key = SealKey(Secret.random(), self.geometry)
        self.kernels = NumbaKernels(self.geometry, self.key, HEADS, DIM**-0.5, dtype)
        self.rng = np.random.default_rng(0)

    def words(self, *shape: int) -> np.ndarray:
        return self.rng.integers(0, 2**64, shape, dtype=np.uint64)

    def pool(self, pages: int) -> np.ndarray:
        memory = empty_pages(self.geometry, pages)
        values = torch.randn(self.geometry.seals_offset // self.kernels.item).to(TORCH[self.dtype])
        memory[:, : self.geometry.seals_offset] = values.view(torch.uint8).numpy()
        return memory

    def attention(self, batch: int, context: int) -> None:
        held = -(-context // PAGE)
        memory = self.pool(batch * held)
        table = self.rng.permutation(batch * held).astype(np.int32).reshape(batch, held)
        words, binds = self.words(batch, held), self.words(batch, held)
        fills = np.minimum(context - np.arange(held) * PAGE, PAGE)
        for b in range(batch):
            for i in range(held):
                page = memory[table[b, i] : table[b, i] + 1]
                self.key.seal(page, [fills[i]], words[b, i : i + 1], binds[b, i : i + 1])
        tiles = np.zeros((batch, KV_HEADS), np.int64)
        bad = np.full(batch, -1, np.int32)
        plan = ReadPlan(table, np.full(batch, context, np.int32), words, binds, bad, tiles)
        q = torch.randn(batch, HEADS, DIM).to(TORCH[self.dtype])
        out = torch.empty_like(q)

        def step(verify: bool, alone: int) -> None:
            self.kernels.alone = alone
            for layer in range(LAYERS):
                self.kernels.attend(memory, layer, q, out, plan, verify)

        plain, checked = together(self.runs, lambda: step(False, ALONE), lambda: step(True, ALONE))
        cpu: list[list[float]] = [[], []]
        for _ in range(self.runs):
            for verify in (False, True):
                began = time.thread_time()
                step(verify, NEVER)
                cpu[verify].append(time.thread_time() - began)
        if (bad >= 0).any():
            raise SystemExit(f"a good page did not verify: {bad.tolist()}")
        ratio = middle([c / p for p, c in zip(plain, checked, strict=True)])
        serial = middle([c / p for p, c in zip(*cpu, strict=True)])
        speed = batch * context * self.geometry.token_bytes / middle(plain) / 1e9
        print(
            f"| {batch} x {context} | {middle(plain) * 1e3:.2f} | {middle(checked) * 1e3:.2f} | {ratio:.3f} "
            f"| {speed:.1f} | {middle(cpu[0]) * 1e3:.2f} | {serial:.3f} |"
        )

    def pages(self, count: int = 400) -> None:
        memory, target = self.pool(count), empty_pages(self.geometry, count)
        pages, fills = self.rng.permutation(count).astype(np.int32), np.full(count, PAGE, np.int32)
        words, size = self.words(count), count * self.geometry.seals_offset
        kernels, most = self.kernels, numba.get_num_threads()
        kernels.alone = ALWAYS
        for threads in (1, most):
            numba.set_num_threads(threads)
            verify, copy = together(
                self.runs,
                lambda: kernels.verify_pages(memory, pages, fills, words, words),
                lambda: kernels.copy_rows(memory, pages, target, pages, fills),
            )
            print(f"| {threads} | {size / middle(verify) / 1e9:.1f} | {size / middle(copy) / 1e9:.1f} |")
        numba.set_num_threads(most)
        kernels.alone = ALONE

    def write(self, tokens: int, decode: bool) -> None:
        segments = tokens if decode else tokens // PAGE
        memory = self.pool(segments)
        k, v = (torch.randn(tokens, KV_HEADS, DIM).to(TORCH[self.dtype]) for _ in range(2))
        at = np.arange(segments, dtype=np.int32)
        each = 1 if decode else PAGE
        first, count = np.full(segments, 5 if decode else 0, np.int32), np.full(segments, each, np.int32)
        plan = WritePlan(at, first, count, at * np.int32(each), self.words(segments), self.words(tokens))
        bare = Unsealed(self.geometry, self.key, HEADS, DIM**-0.5, self.dtype)

        def step(kernels: NumbaKernels) -> None:
            for layer in range(LAYERS):
                kernels.write(memory, layer, k, v, plan)

        sealed, plain = together(self.runs, lambda: step(self.kernels), lambda: step(bare))
        kind = "one row each" if decode else "one prompt"
        print(f"| {tokens}, {kind} | {middle(plain) * 1e3:.2f} | {middle(sealed) * 1e3:.2f} |")

    def prefill(self, count: int, start: int) -> None:
        length = start + count
        held = -(-length // PAGE)
        memory, pages, words = self.pool(held), np.arange(held, dtype=np.int32), self.words(held)
        q = torch.randn(count, HEADS, DIM).to(TORCH[self.dtype])
        out = torch.empty_like(q)

        def step(verify: bool) -> None:
            for layer in range(LAYERS):
                self.kernels.prefill_attend(memory, layer, q, out, pages, start, words, words, verify)

        plain, checked = together(max(3, self.runs // 3), lambda: step(False), lambda: step(True))
        print(f"| {count} after {start} | {middle(plain) * 1e3:.1f} | {middle(checked) * 1e3:.1f} |")


class Unsealed(NumbaKernels):
    """Writes rows and no seals: what sealing is compared with."""

    seals = False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--dtype", choices=("bf16", "f32"), default="bf16")
    options = parser.parse_args()
    torch.set_num_threads(numba.get_num_threads())
    bench = Bench(options.runs, options.dtype)
    began = time.perf_counter()
    bench.kernels.warm()
    print(
        f"{options.dtype}, {numba.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}, "
        f"kernels ready in {time.perf_counter() - began:.1f} s\n"
    )
    print("| decode attention | ms a step | verified | ratio | GB/s | cpu ms, serial | its ratio |")
    print("|---|---|---|---|---|---|---|")
    for batch, context in ((1, 512), (8, 512), (8, 2048), (32, 512)):
        bench.attention(batch, context)
    print("\n| threads | verify pages, GB/s | copy pages, GB/s |\n|---|---|---|")
    bench.pages()
    print("\n| rows written, all layers | ms without seals | ms with |\n|---|---|---|")
    for tokens, decode in ((1, True), (8, True), (64, True), (512, False)):
        bench.write(tokens, decode)
    print("\n| prefill attention, all layers | ms | verified |\n|---|---|---|")
    for count, start in ((512, 0), (512, 512), (512, 1536)):
        bench.prefill(count, start)


if __name__ == "__main__":
    main()
