"""The gateway killed under load: its workers give everything back, and serve the next gateway without being restarted.

Real commands from one cluster file: `hermetic gateway`, `hermetic prefill`, `hermetic decode`. The workers' figures are
asked for over their own control ports, so that they are seen while no gateway is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from lone_workers import Dialler
from serving import held

from hermetic.lab.cluster import Cluster, Gateway, Member, make_model, undisturbed
from hermetic.lab.load import Ask, send
from hermetic.lab.storm import Traffic, with_common_beginnings
from hermetic.worker import messages as m

SILENT = 3.0  # seconds after which a worker takes the gateway for gone
BOUND = SILENT + 30.0  # generous: what must not happen is never
LONG = Ask(tuple(range(3, 203)), 700)


def ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    control, http = ports(2)
    model = make_model(tmp_path / "tiny")
    fields = {"kv": "4MiB", "threads": 1, "chunk": 64, "slots": 16}
    made = Cluster.write(
        tmp_path,
        model,
        Gateway(f"127.0.0.1:{control}", f"127.0.0.1:{http}"),
        [
            Member("prefill-0", "prefill", "127.0.0.1:0", fields=fields),
            Member("decode-0", "decode", "127.0.0.1:0", fields=fields),
        ],
        {"silent_seconds": SILENT, "drain_seconds": 5.0},
        dtype="float32",
        page_size=16,
    )
    with made.running():
        made.wait_whole()
        yield made


def kill(cluster: Cluster) -> None:
    process = cluster.processes["gateway"]
    process.send_signal(signal.SIGKILL)
    process.wait()


def identities(cluster: Cluster) -> dict[str, tuple[int, str]]:
    """Every worker's process and incarnation."""
    return {one["id"]: (one["pid"], one["incarnation"]) for one in cluster.status()["workers"]}


@contextlib.contextmanager
def asking(cluster: Cluster, addresses: dict[str, str]) -> Iterator[dict[str, Dialler]]:
    """Connections of our own to the workers' control ports, as a member of the cluster."""
    channels = {name: Dialler(address, cluster.keys.curve) for name, address in addresses.items()}
    try:
        for channel in channels.values():
            channel.hear(m.Welcome)
        yield channels
    finally:
        for channel in channels.values():
            channel.close()


def wait_until_nothing_is_held(cluster: Cluster, addresses: dict[str, str]) -> None:
    deadline = time.monotonic() + BOUND
    with asking(cluster, addresses) as channels:
        while still := {name: holds for name, one in channels.items() if (holds := held(one.stats()))}:
            assert time.monotonic() < deadline, still
            time.sleep(0.1)
        for name, one in channels.items():
            stats = one.stats()
            assert stats["pages_free"] == stats["pages_total"], name
            assert stats.get("slots_free") == stats.get("slots_total"), name


async def begin(client: httpx.AsyncClient, count: int) -> list[asyncio.Task[object]]:
    """Long answers, some of which have said something when this returns."""
    first = asyncio.Event()

    async def watch() -> None:
        body = {"model": "tiny", "prompt": list(LONG.prompt), "max_tokens": LONG.max_tokens, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    first.set()

    tasks = [
        asyncio.create_task(watch()),
        *(asyncio.create_task(send(client, "tiny", LONG)) for _ in range(count - 1)),
    ]
    await asyncio.wait_for(first.wait(), 60)
    return tasks


async def test_workers_give_everything_back_and_serve_the_next_gateway(cluster: Cluster) -> None:
    asks = with_common_beginnings(12, 24, 512, seed=21)
    expected = undisturbed(str(cluster.folder / "tiny"), asks)
    before = identities(cluster)
    addresses = {one["id"]: one["address"] for one in cluster.status()["workers"]}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
        for stays_away in (True, False):
            running = await begin(client, 8)
            with asking(cluster, addresses) as channels:
                assert any([held(one.stats()) for one in channels.values()])
            kill(cluster)
            ends = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 30)
            assert all(isinstance(end, httpx.HTTPError) for end in ends), ends
            if stays_away:
                await asyncio.to_thread(wait_until_nothing_is_held, cluster, addresses)
            cluster.start("gateway")
            await asyncio.to_thread(cluster.wait_whole)
            assert identities(cluster) == before
            traffic = Traffic(client, "tiny", expected)
            await asyncio.gather(*(traffic.ask(ask) for ask in asks))
            assert traffic.tally.right == len(asks), traffic.tally
            await asyncio.to_thread(wait_until_nothing_is_held, cluster, addresses)
    with asking(cluster, addresses) as channels:
        assert all(one.stats()["peers_lost"] >= 2 for one in channels.values())
