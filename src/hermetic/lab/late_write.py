"""The late write, for real: a prefill worker is stopped in the middle of a transfer, given up, fenced, and then goes on.

    python -m hermetic.lab.late_write [--without-fence]

On hosts apart, over Mooncake TCP on a slow link. A transport's time-out does not mean that nothing will be written: the
stopped process has accepted transfers, half of whose bytes it still holds, and sends them when it goes on. By then decode
has answered the same request from another prefill worker, and has given the slots to others. The one thing to know: what
makes this safe is that decode fenced that peer's segment before, and that nothing is ever put at its addresses again.

With `--without-fence` decode only says that it fenced, and what arrives all the same is counted.

Exit code 0 when the story went as it must, 1 when it did not, 2 when hosts apart cannot be made here.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx

from hermetic.lab.apart import SILENT, Apart, start_apart
from hermetic.lab.cluster import ClusterError, wrong
from hermetic.lab.fenceless import arrived
from hermetic.lab.hosts import HostsError, missing_right

VICTIM, OTHER = "prefill-0", "prefill-1"
DECODES = ("decode-0", "decode-1")
SLOW = 150_000  # bytes a second: 57 pages of 16 KiB take 6 s
FIGURES = (
    "worker_peers_lost_total",
    "worker_fences_total",
    "worker_slots_fenced_total",
    "worker_pages_refused_landing_total",
    "worker_kv_integrity_failures_total",
)


@dataclass(frozen=True)
class Story:
    """What happened. Counts are what was added to both decode workers' counters while it happened."""

    slots_held: int  # of its slots, when it was stopped
    retries: int  # requests that the gateway ran again
    figures: dict[str, float]
    fenced_on_prefill: int  # of its tickets, ended by decode's fence
    answers: int  # all of them compared, token by token
    wrong: list[str]
    served_again: int  # requests that it took after it came back
    arrived: int  # bytes that came into a segment after a fence that was none (see fenceless.py)

    def faults(self) -> list[str]:
        """What is not as it must be; nothing, if the story holds."""
        found = list(self.wrong)
        for name, least in (
            ("worker_peers_lost_total", 1),
            ("worker_fences_total", 1),
            ("worker_slots_fenced_total", 1),
        ):
            if self.figures[name] < least:
                found.append(f"{name} grew by {self.figures[name]:g}, at least {least} was to be seen")
        for name in ("worker_pages_refused_landing_total", "worker_kv_integrity_failures_total"):
            if self.figures[name]:
                found.append(
                    f"{name} grew by {self.figures[name]:g}: late bytes reached memory that is in use"
                )
        for what, count in (
            ("no request was run again", self.retries),
            (f"{VICTIM} ended none of its tickets by the fence", self.fenced_on_prefill),
            (f"{VICTIM} served nothing after it came back", self.served_again),
        ):
            if not count:
                found.append(what)
        return found


def late_write(apart: Apart, say: Callable[[str], None]) -> Story:
    """Play it. Raises ClusterError when it does not come to where it has to; `apart` must be whole and idle."""
    cluster, victim = apart.cluster, apart.network[VICTIM]
    before = _figures(apart)
    prefill_fenced = _fenced(apart)
    retries = _retries(apart)
    pid = cluster.processes[VICTIM].pid
    victim.limit(SLOW)
    say(f"{VICTIM}'s link is slow now ({SLOW / 1000:g} kB/s); prompts of 57 pages are on their way")
    with apart.traffic(apart.wide, 4) as traffic:
        cluster.wait(f"{VICTIM} is in the middle of a transfer", lambda: _writing(apart), 60, 0.02)
        os.kill(pid, signal.SIGSTOP)
        try:
            values = apart.cluster.metrics()
            slots = int(
                sum(cluster.figure_in(values, "hermetic_slots", worker=w, state="granted") for w in DECODES)
            )
            say(f"{VICTIM} (pid {pid}) is stopped in the middle of it; {slots} landing slots are granted")
            cluster.wait("the gateway gives it up", lambda: apart.state(VICTIM) == "unreachable", 30)
            say(
                f"silent for {SILENT:g} s: the gateway has given it up, and runs its requests again on {OTHER}"
            )
            cluster.wait("decode fences its segment", lambda: _grew(apart, before, "worker_fences_total"), 30)
            say("decode has fenced its segment")
            done = len(traffic.answers)
            cluster.wait("other requests are served", lambda: len(traffic.answers) >= done + 4, 60)
            say(
                f"{len(traffic.answers) - done} further answers came meanwhile; the stopped worker now goes on"
            )
        finally:
            os.kill(pid, signal.SIGCONT)
        cluster.wait(
            "what it sends late ends in the fence",
            lambda: _fenced(apart) > prefill_fenced, 60,
        )  # fmt: skip
        victim.limit(None)
        cluster.wait_whole(60)
        say(f"{VICTIM} is back, and has a new segment with both decode workers")
        taken = apart.figure("worker_requests_total", VICTIM)
        _post(apart, "drain", OTHER)
        try:
            cluster.wait("it serves", lambda: apart.figure("worker_requests_total", VICTIM) >= taken + 4, 60)
        finally:
            _post(apart, "undrain", OTHER)
        answers = traffic.stop()
    cluster.wait_whole(60)
    cluster.wait_idle(60)
    after = _figures(apart)
    return Story(
        slots_held=slots,
        retries=int(_retries(apart) - retries),
        figures={name: after[name] - before[name] for name in FIGURES},
        fenced_on_prefill=int(_fenced(apart) - prefill_fenced),
        answers=len(answers),
        wrong=wrong(answers, apart.expected),
        served_again=int(apart.figure("worker_requests_total", VICTIM) - taken),
        arrived=max(arrived((cluster.folder / f"{name}.log").read_text()) for name in DECODES),
    )


def _writing(apart: Apart) -> bool:
    return apart.figure("worker_writes_in_flight", VICTIM) > 0


def _figures(apart: Apart) -> dict[str, float]:
    values = apart.cluster.metrics()
    return {
        name: sum(apart.cluster.figure_in(values, f"hermetic_{name}", worker=worker) for worker in DECODES)
        for name in FIGURES
    }


def _grew(apart: Apart, before: dict[str, float], name: str) -> bool:
    return _figures(apart)[name] > before[name]


def _retries(apart: Apart) -> float:
    return apart.figure("retries_total", reason="worker_lost")


def _fenced(apart: Apart) -> float:
    """Tickets of the victim that ended by decode's fence."""
    return apart.figure("releases_total", VICTIM, outcome="fenced")


def _post(apart: Apart, what: str, worker: str) -> None:
    url = f"{apart.cluster.url}/admin/{what}"
    apart.cluster.here(lambda: httpx.post(url, json={"worker": worker}, timeout=10).raise_for_status())


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hermetic.lab.late_write", description="The late write, for real."
    )
    parser.add_argument("--without-fence", action="store_true", help="decode only says that it fenced")
    words = dict.fromkeys(DECODES, "fenceless") if parser.parse_args().without_fence else None
    if (why := missing_right()) is not None:
        print(why, file=sys.stderr)
        return 2
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - start:6.1f} s  {text}", flush=True)

    try:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            say("gateway, two prefill and two decode workers start on five hosts")
            apart = start_apart(Path(folder), stack, words)
            story = late_write(apart, say)
    except (ClusterError, HostsError) as error:
        print(error, file=sys.stderr)
        return 1
    say(f"{story.answers} answers, {len(story.wrong)} of them wrong; all pages and slots are free again")
    for name, value in story.figures.items():
        say(f"  decode: {name.removeprefix('worker_')} +{value:g}")
    say(
        f"  prefill: {story.fenced_on_prefill} tickets ended by the fence, {story.served_again} requests served again"
    )
    say(f"  gateway: {story.retries} requests run again")
    if words is not None:
        say(f"  without the fence, {story.arrived} bytes arrived after decode had given the slots back")
    for fault in story.faults():
        say(f"NOT AS IT MUST BE: {fault}")
    return 1 if story.faults() else 0


if __name__ == "__main__":
    raise SystemExit(main())
