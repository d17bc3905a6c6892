"""Servers side by side: throughput, time to first token, and what checking costs. Figures for docs/benchmarks.md.

    python benchmarks/serving.py speed [--peer NAME=URL ...]      Hermetic unified (and peers that are running already)
    python benchmarks/serving.py cost --mode unified|disaggregated    verify levels against a build that seals nothing

All servers of a run are up at once and measured in turns, round by round, so that a machine that speeds up or slows
down does so for all of them. Reported: the median over rounds with the smallest and largest, and for `cost` the ratio to
the unsealed lab build round by round, with a 95 % bootstrap interval of its median.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from hermetic.lab.load import Answer, drive, fixed


@dataclass
class Target:
    name: str
    url: str
    model: str = "smollm2"


@contextlib.contextmanager
def serving(name: str, *arguments: str, module: str = "hermetic") -> Iterator[Target]:
    """One of our servers on a free port."""
    command = [sys.executable, "-m", module, "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    log: list[str] = []
    try:
        for line in process.stderr:
            log.append(line)
            if line.startswith("ready http"):
                threading.Thread(target=process.stderr.read, daemon=True).start()
                yield Target(name, line.split()[1])
                return
        raise SystemExit(f"{name} did not start:\n" + "".join(log[-20:]))
    finally:
        process.terminate()
        process.wait(15)


def run(target: Target, count: int, concurrency: int, prompt: int, output: int, seed: int) -> list[Answer]:
    answers = asyncio.run(drive(target.url, target.model, fixed(count, prompt, output, seed), concurrency))
    bad = [a for a in answers if a.status != 200 or a.error]
    if bad:
        raise SystemExit(f"{target.name}: {bad[0].status} {bad[0].error}")
    return answers


def throughput(answers: list[Answer], seconds: float) -> float:
    return sum(a.usage["completion_tokens"] for a in answers) / seconds


def measure(
    target: Target, concurrency: int, rounds: int, seed: int, prompt: int = 256, output: int = 64
) -> dict[str, float]:
    """One turn of one server: tokens/s, ITL and TTFT in ms."""
    import time

    start = time.perf_counter()
    answers = run(target, concurrency * rounds, concurrency, prompt, output, seed)
    seconds = time.perf_counter() - start
    gaps = sorted(g * 1e3 for a in answers for g in a.gaps)
    return {
        "tok/s": throughput(answers, seconds),
        "ITL ms": statistics.fmean(gaps) if gaps else float("nan"),
        "ITL p99 ms": gaps[int(0.99 * (len(gaps) - 1))] if gaps else float("nan"),
        "TTFT ms": statistics.median(a.ttft * 1e3 for a in answers),
    }


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})"


def interval(ratios: list[float]) -> str:
    """Median of the ratios and the bootstrap's 95 % interval of that median."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    return f"{statistics.median(ratios):.3f} [{medians[50]:.3f}, {medians[1949]:.3f}]"


def speed(peers: list[Target], turns: int) -> None:
    cases = [("single stream, 128 in, 128 out", 1, 1, 128, 128), ("c=8, 256 in, 64 out", 8, 2, 256, 64), ("c=32, 256 in, 64 out", 32, 1, 256, 64), ("TTFT at 2,048", 1, 1, 2048, 1)]  # fmt: skip
    with serving("hermetic unified, landing", "--mode", "unified", "--verify", "landing") as ours:
        targets = [ours, *peers]
        for target in targets:
            run(target, 4, 4, 64, 8, 99)  # first use pays for what is made lazily
        for name, concurrency, rounds, prompt, output in cases:
            results: dict[str, list[dict[str, float]]] = {t.name: [] for t in targets}
            for turn in range(turns):
                for target in targets:
                    results[target.name].append(
                        measure(target, concurrency, rounds, 1000 + turn, prompt, output)
                    )
            for who, turns_of in results.items():
                shown = "TTFT ms" if output == 1 else "tok/s"
                other = "" if output == 1 else f", ITL {spread([t['ITL ms'] for t in turns_of])} ms"
                print(f"{name:32} {who:28} {shown} {spread([t[shown] for t in turns_of])}{other}", flush=True)


def cost(mode: str, turns: int, concurrency: int) -> None:
    pools = ("--mode", mode, "--prefill-kv", "192MiB", "--decode-kv", "256MiB")
    levels = ("tags", "landing", "read") if mode == "disaggregated" else ("tags", "read")
    with contextlib.ExitStack() as stack:
        base = stack.enter_context(
            serving("unsealed lab build", *pools, "--verify", "tags", module="hermetic.lab.unsealed")
        )
        targets = [
            base,
            *(stack.enter_context(serving(f"--verify {v}", *pools, "--verify", v)) for v in levels),
        ]
        for target in targets:
            measure(target, concurrency, 1, 99)
        results: dict[str, list[dict[str, float]]] = {t.name: [] for t in targets}
        for turn in range(turns):
            order = targets[turn % len(targets) :] + targets[: turn % len(targets)]
            for target in order:
                results[target.name].append(measure(target, concurrency, 2, 2000 + turn))
        for target in targets:
            mine, reference = results[target.name], results[base.name]
            ratios = {
                k: interval([a[k] / b[k] for a, b in zip(mine, reference, strict=True)]) for k in mine[0]
            }
            text = "  ".join(
                f"{k} {spread([t[k] for t in mine])} x{ratios[k]}" for k in ("tok/s", "ITL ms", "ITL p99 ms")
            )
            print(f"{mode} c={concurrency} {target.name:20} {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["speed", "cost"])
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--mode", choices=["unified", "disaggregated"], default="unified")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=8)
    options = parser.parse_args()
    if options.what == "speed":
        speed([Target(*peer.split("=", 1)) for peer in options.peer], options.turns)
    else:
        cost(options.mode, options.turns, options.concurrency)


if __name__ == "__main__":
    main()
