"""Minutes of every fault that a network and a host can have, at random, under load: what must hold all the same."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from hermetic.lab.apart import SILENT, WORKERS, Apart
from hermetic.lab.cluster import wrong
from hermetic.lab.proxy import Faults

MINUTES = 3.0
LOST = '"worker_lost"', '"no_workers"'  # in the error of an answer: there was nobody left to go on with it


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_fails_every_answer_is_right_or_says_that_nobody_was_left(apart: Apart, seed: int) -> None:
    rng = random.Random(seed)
    faults: list[Callable[[Apart, random.Random], contextlib.AbstractContextManager[str]]] = [
        _link_cut, _pair_parted, _channels_bad, _channel_black, _stopped, _killed, _slow,
    ]  # fmt: skip
    until = time.monotonic() + 60 * MINUTES
    story = []
    with apart.traffic([*apart.short, *apart.long, *apart.wide], 10) as traffic:
        while time.monotonic() < until:
            with contextlib.ExitStack() as now:
                for fault in rng.sample(faults, rng.choice([1, 1, 2])):
                    story.append(now.enter_context(fault(apart, rng)))
                time.sleep(rng.uniform(0.3, 2.5 * SILENT))
            time.sleep(rng.choice([0.1, 1.0, 2 * SILENT]))
        apart.heal()
        apart.cluster.wait_whole(120)
        answers = traffic.stop()
    given_up = [a for a in answers if a.error and any(code in a.error for code in LOST)]
    bad = wrong([a for a in answers if a not in given_up], apart.expected)
    assert not bad, f"{bad} in {story}"
    assert len(answers) - len(given_up) > 100
    for answer in given_up:  # and up to there it was right
        said = [int(word) for word in answer.text.split()]
        assert said == apart.expected[answer.ask.prompt][: len(said)]
    apart.wait_calm()


@contextlib.contextmanager
def _link_cut(apart: Apart, rng: random.Random) -> Iterator[str]:
    name = rng.choice(["gateway", *WORKERS])
    apart.network[name].cut()
    yield f"{name}'s link is cut"
    apart.network[name].heal()


@contextlib.contextmanager
def _pair_parted(apart: Apart, rng: random.Random) -> Iterator[str]:
    one, other = rng.sample(["gateway", *WORKERS], 2)
    if rng.random() < 0.5:
        apart.network.part(one, other)
    else:
        apart.network.block(one, other, rng.choice([slice(0, 1), slice(1, 2), slice(None)]))
    yield f"{one} does not reach {other}"
    apart.network.join(one, other)


@contextlib.contextmanager
def _channels_bad(apart: Apart, rng: random.Random) -> Iterator[str]:
    chances = [rng.choice([0, 0.02, 0.2]) for _ in range(4)]
    apart.disturb(Faults(chances[0], chances[1], chances[2], 0.5, chances[3], 0.3))
    yield f"control channels are bad {chances}"
    apart.disturb(Faults())


@contextlib.contextmanager
def _channel_black(apart: Apart, rng: random.Random) -> Iterator[str]:
    name = rng.choice(["gateway", *WORKERS])
    apart.proxies[name].cut()
    yield f"{name}'s control port hears and says nothing"
    apart.proxies[name].heal()


@contextlib.contextmanager
def _stopped(apart: Apart, rng: random.Random) -> Iterator[str]:
    name = rng.choice(WORKERS)
    pid = apart.cluster.processes[name].pid
    os.kill(pid, signal.SIGSTOP)
    yield f"{name} is stopped"
    os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def _killed(apart: Apart, rng: random.Random) -> Iterator[str]:
    name = rng.choice(WORKERS)
    process = apart.cluster.processes[name]
    process.kill()
    process.wait()
    apart.cluster.start(name)
    yield f"{name} was killed and started again"


@contextlib.contextmanager
def _slow(apart: Apart, rng: random.Random) -> Iterator[str]:
    name = rng.choice(WORKERS)
    apart.network[name].limit(200_000)
    yield f"{name}'s link is slow"
    apart.network[name].limit(None)
