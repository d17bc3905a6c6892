"""Workers killed at named points of the handoff, under load: every answer is right, and nothing is lost.

Two prefill and two decode workers of a tiny model, so that a pair is left whatever dies: then no request may fail.
`make test` plays a few points of each role, `make soak` all of them (lab/points.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from serving import Here, here

from hermetic.gateway import supervisor
from hermetic.lab.cluster import make_model, undisturbed
from hermetic.lab.points import POINTS, arm, fired
from hermetic.lab.process import COMMAND, VARIABLE
from hermetic.lab.storm import Traffic, with_common_beginnings
from hermetic.options import ServeOptions
from hermetic.proof.conform import conform

CLIENTS = 6
FIRE_SECONDS, BACK_SECONDS = 120.0, 180.0  # "no hang" on a machine that does much else
VOCAB, OUTPUT = 512, 32

Round = dict[str, str]
"""Role -> the point at which one worker of this role dies in this round."""

SOME: list[Round] = [
    {"prefill": "chunk: computed, more to come", "decode": "copy: verified, not yet tagged"},
    {"prefill": "write: half done", "decode": "ack: sent"},
    {"prefill": "complete: sent", "decode": "first token: sent"},
]
ALL: list[Round] = [
    {role: point for role, point in zip(POINTS, points, strict=True) if point is not None}
    for points in itertools.zip_longest(*POINTS.values())
]


def options(model: str, **more: Any) -> ServeOptions:
    return ServeOptions(
        model=model,
        served_name="tiny",
        dtype="float32",
        prefill_kv=2 << 20,
        decode_kv=2 << 20,
        prefill_workers=2,
        decode_workers=2,
        threads=1,
        chunk=64,
        landing_slots=16,
        on_disconnect="cancel",
        **more,
    )


@contextlib.asynccontextmanager
async def under_load(served: Here, model: str) -> AsyncIterator[Traffic]:
    """Requests without a pause; afterwards every one of them was right, and every page and slot is free."""
    asks = with_common_beginnings(24, OUTPUT, VOCAB, seed=3)
    traffic, stop = Traffic(served.client, "tiny", undisturbed(model, asks)), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(traffic.keep_asking(asks, CLIENTS, stop))
        try:
            yield traffic
        finally:
            stop.set()
    await served.wait_all_free()
    tally = traffic.tally
    assert not tally.wrong, tally
    assert not tally.hung, tally
    assert not tally.failed, tally  # a pair was left every time
    assert tally.right


async def drill(folder: Path, monkeypatch: pytest.MonkeyPatch, rounds: list[Round]) -> None:
    control = folder / "points"
    control.mkdir()
    monkeypatch.setenv(VARIABLE, f"points={control}")
    monkeypatch.setattr(supervisor, "FIRST_WAIT", 0.05)
    monkeypatch.setattr(supervisor, "LONGEST_WAIT", 0.05)
    model = make_model(folder / "model", vocab_size=VOCAB)
    trace = folder / "trace"
    async with here(options(model, trace=str(trace)), commands=lambda _config: COMMAND) as served:
        async with under_load(served, model) as traffic:
            for deaths in rounds:
                await kill_at(served, traffic, control, deaths)
                print(f"{deaths}: {traffic.tally}", flush=True)
        assert len((control / "log").read_text().splitlines()) == sum(map(len, rounds))
        assert (await served.cluster.stats())["gateway"]["retries_worker_lost"] > 0
    found = conform(trace)
    assert found.conforms, found.lines()
    assert len(found.killed) == sum(map(len, rounds))  # as far as they recorded it; the others' part is whole


async def kill_at(served: Here, traffic: Traffic, control: Path, deaths: Round) -> None:
    """Have a worker of each role die there; returns when they have, and others have taken their places in every pair.

    Traffic is light meanwhile: the new ones need the machine to start."""
    before = served.incarnations()
    for role, point in deaths.items():
        arm(control, role, point)

    def dead() -> bool:
        return all(fired(control, role, point) for role, point in deaths.items())

    def back() -> bool:
        now = served.incarnations()
        return len(now - before) == len(deaths) and len(now) == len(before) and served.pairs() == 4

    await served.wait(f"a death at each of {deaths}", dead, FIRE_SECONDS)
    traffic.pause = 1.0
    await served.wait(f"workers in the place of those killed at {deaths}", back, BACK_SECONDS)
    traffic.pause = 0.0


async def test_a_worker_killed_at_any_of_these_points_costs_no_request_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await drill(tmp_path, monkeypatch, SOME)


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_a_worker_killed_at_every_point_there_is_costs_no_request_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert min(len(POINTS["prefill"]), len(POINTS["decode"])) >= 20
    await drill(tmp_path, monkeypatch, ALL)


@pytest.mark.soak  # make test has tests/hosts/test_hosts.py: a link that is cut and heals
async def test_frozen_workers_are_left_out_cost_no_request_anything_and_serve_again(tmp_path: Path) -> None:
    """One of each role, one after the other, for longer than the others wait for it; then it goes on in the middle."""
    model = make_model(tmp_path / "model", vocab_size=VOCAB)
    trace = tmp_path / "trace"
    async with here(options(model, silent_after=4.0, drain_deadline=4.0, trace=str(trace))) as served:
        before = served.incarnations()
        async with under_load(served, model):
            for name in ("prefill-0", "decode-0"):
                handle = next(h for h in served.running.handles if h.config.name == name)
                remote = served.cluster.members.remotes[name]
                os.kill(handle.process.pid, signal.SIGSTOP)
                try:
                    await served.wait(f"{name} left out", lambda r=remote: r.state == "unreachable", 30)  # type: ignore[misc]
                    await asyncio.sleep(4.0)  # the other half has given it up as well
                finally:
                    os.kill(handle.process.pid, signal.SIGCONT)
                await served.wait(f"{name} back in every pair", lambda: served.pairs() == 4, BACK_SECONDS)
        assert served.incarnations() == before  # nobody was restarted
        figures = await served.cluster.stats()
        assert figures["gateway"]["retries_worker_lost"] > 0
        assert sum(values.get("peers_lost", 0) for values in figures.values()) > 0
    found = conform(trace)
    assert found.conforms, found.lines()
    assert not found.killed
