"""A cluster on five hosts apart, over Mooncake TCP, with a proxy on every control port; what it is asked, and what must come.

One gateway, two prefill and two decode workers, all of them the real commands with one cluster file. The one thing to
know: control channels and data go different ways. Each host has two addresses. Workers listen at the second, which is where
Mooncake's data go to, and advertise the first, where the proxy stands; it is also the one that their data come from, and
decode lets in nothing from elsewhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from hermetic.lab.cluster import Cluster, Gateway, Member, Traffic, make_model, prompts, undisturbed
from hermetic.lab.hosts import Network
from hermetic.lab.load import Ask
from hermetic.lab.proxy import Faults, Proxy

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
OFF = "decode-1"  # whose clock is an hour ahead
SILENT = 3.0  # seconds without a sign of life after which an end is given up
DRAIN = 5.0  # seconds until a drain is overdue
VOCAB = 512
PORT = 7001  # of every control port
PROXIED, OWN = 0, 1  # which of a host's addresses
HTTP = "127.0.0.1:8000"  # on the gateway's host
KV = "2MiB"  # for each worker: 170 pages
SLOTS = 16


@dataclass
class Apart:
    """`proxies` stand before each worker's control port, and before the gateway's. `expected`: tokens by prompt."""

    network: Network
    cluster: Cluster
    proxies: Mapping[str, Proxy]
    short: Sequence[Ask]  # quick to answer
    long: Sequence[Ask]  # long answers
    wide: Sequence[Ask]  # long prompts: 57 pages, four times what the slots of a peer hold
    expected: Mapping[tuple[int, ...], list[int]]

    def traffic(self, asks: Sequence[Ask], concurrency: int) -> Traffic:
        """Requests all the time, until it is stopped."""
        return Traffic(self.cluster, asks, concurrency)

    def figure(self, name: str, *workers: str, **labels: str) -> float:
        """A figure of /metrics, without its hermetic_: the sum over these workers, or the gateway's own."""
        values = self.cluster.metrics()
        which = [{"worker": worker} for worker in workers] or [{}]
        return sum(self.cluster.figure_in(values, f"hermetic_{name}", **labels, **one) for one in which)

    def disturb(self, faults: Faults) -> None:
        """On every control channel from now on."""
        for proxy in self.proxies.values():
            proxy.faults = faults

    def heal(self) -> None:
        """Take every fault away."""
        self.disturb(Faults())
        for proxy in self.proxies.values():
            proxy.heal()
        for host in self.network.hosts.values():
            host.heal()
            host.limit(None)
        for one, other in itertools.combinations(self.network.hosts, 2):
            self.network.join(one, other)

    def state(self, worker: str) -> str:
        """As `hermetic status` shows it."""
        return str(self._shown(worker)["state"])

    def open(self, worker: str) -> int:
        """Attempts that the gateway has there."""
        return int(str(self._shown(worker)["open"]))

    def paired(self, prefill: str) -> list[str]:
        found: list[str] = self._shown(prefill)["paired"]  # type: ignore[assignment]
        return found

    def wait_calm(self) -> None:
        """Every worker is there and paired, and nothing is held anywhere. Raises ClusterError."""
        self.cluster.wait_whole(60)
        self.cluster.wait_idle(60)

    def _shown(self, worker: str) -> Mapping[str, object]:
        return next(one for one in self.cluster.status()["workers"] if one["id"] == worker)


def start_apart(folder: Path, stack: ExitStack, words: Mapping[str, str] | None = None) -> Apart:
    """Everything that it starts ends with `stack`. `words`: what is broken in a worker besides (see process.py).

    Raises HostsError, ClusterError."""
    broken = {OFF: "clock=3600"} if words is None else words
    network = stack.enter_context(Network(["gateway", *WORKERS]))
    hosts = network.hosts
    members = [
        Member(
            name, name.partition("-")[0], f"{hosts[name].addresses[OWN]}:{PORT}", hosts[name],
            advertise=hosts[name].addresses[PROXIED], lab=broken.get(name, ""),
            fields={"kv": KV, "threads": 1, "slots": SLOTS, "chunk": 64},
        )
        for name in WORKERS
    ]  # fmt: skip
    for name in WORKERS:  # what a slow link has not taken stays with the process, not in the kernel
        hosts[name].small_buffers()
    own, proxied = hosts["gateway"].addresses[OWN], hosts["gateway"].addresses[PROXIED]
    model = make_model(folder / "model")
    timing = {"silent_seconds": SILENT, "drain_seconds": DRAIN, "transfer_floor": "150kB"}
    cluster = Cluster.write(
        folder, model, Gateway(f"{own}:{PORT}", HTTP, hosts["gateway"], proxied), members, timing,
        transport="mooncake", dtype="float32",
    )  # fmt: skip
    stack.enter_context(cluster.running())
    proxies = {
        name: stack.enter_context(hosts[name].call(lambda name=name, i=i: _proxy(cluster, network, name, i)))  # type: ignore[misc]
        for i, name in enumerate(("gateway", *WORKERS))
    }
    short, long = prompts(12, 1, 300, 24, VOCAB), prompts(8, 20, 120, 250, VOCAB, seed=1)
    wide = prompts(6, 900, 912, 20, VOCAB, seed=2)
    expected = undisturbed(model, [*short, *long, *wide])  # while they start
    cluster.wait_whole()
    return Apart(network, cluster, proxies, short, long, wide, expected)


def _proxy(cluster: Cluster, network: Network, name: str, seed: int) -> Proxy:
    addresses = network[name].addresses
    return Proxy(cluster.keys.curve, (addresses[PROXIED], PORT), f"tcp://{addresses[OWN]}:{PORT}", seed=seed)
