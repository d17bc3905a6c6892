"""Gateway, two prefill and two decode workers on five hosts apart, over Mooncake TCP, while the network between them fails.

All the time requests at temperature 0 are being served, one worker's clock is an hour ahead of the others', and every
answer is compared with what an undisturbed engine in this process says.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from hermetic.lab.apart import OFF, OWN, PORT, PROXIED, SILENT, WORKERS, Apart
from hermetic.lab.cluster import wrong
from hermetic.lab.hosts import Host
from hermetic.lab.proxy import Faults


def test_answers_over_hosts_are_those_of_a_single_process_whatever_a_clock_says(apart: Apart) -> None:
    answers = apart.cluster.ask([*apart.short, *apart.long, *apart.wide], concurrency=10)
    assert not wrong(answers, apart.expected)
    for worker in WORKERS:  # all of them had a part in it, the one whose clock is an hour off as well
        assert apart.figure("worker_requests_total", worker) > 0
        assert apart.figure("worker_failed_total", worker) == 0
    assert apart.figure("worker_pages_landed_total", OFF) > 0
    # A wait that two clocks had measured would have been over at once, or would last an hour.
    assert apart.figure("worker_peers_lost_total", *WORKERS) == 0
    assert apart.figure("releases_total", OFF, outcome="quarantined") == 0
    assert apart.figure("release_seconds_sum", OFF) < 60


def test_a_cut_link_moves_streams_elsewhere_and_a_healed_one_brings_the_worker_back(apart: Apart) -> None:
    network, cluster = apart.network, apart.cluster
    retried = apart.figure("retries_total", reason="worker_lost")
    served = apart.figure("worker_requests_total", "decode-0")
    with apart.traffic([*apart.long, *apart.short], 10) as traffic:
        cluster.wait("decode-0 is in the middle of streams", lambda: apart.open("decode-0") >= 2, 30, 0.02)
        network["decode-0"].cut()
        cluster.wait("the gateway misses decode-0", lambda: apart.state("decode-0") == "unreachable", 30)
        time.sleep(SILENT)
        network["decode-0"].heal()
        cluster.wait_whole(60)
        cluster.wait(
            "decode-0 serves again", lambda: apart.figure("worker_requests_total", "decode-0") > served, 60
        )
        assert not wrong(traffic.stop(), apart.expected)
    assert apart.figure("retries_total", reason="worker_lost") > retried
    apart.wait_calm()
    assert not wrong(cluster.ask([*apart.short, *apart.short]), apart.expected)
    assert apart.figure("worker_peers_lost_total", "decode-0") > 0


def test_a_pair_that_cannot_reach_each_other_is_no_pair_until_it_can_again(apart: Apart) -> None:
    network, cluster = apart.network, apart.cluster

    def paired() -> bool:
        return "decode-0" in apart.paired("prefill-0")

    with apart.traffic([*apart.short, *apart.long], 8) as traffic:
        network.part("prefill-0", "decode-0")
        cluster.wait("the two are no pair", lambda: not paired(), 30)
        assert {apart.state(name) for name in WORKERS} == {"ready"}  # everybody else reaches them
        network.join("prefill-0", "decode-0")
        cluster.wait("the two are a pair again", paired, 60)
        assert not wrong(traffic.stop(), apart.expected)


def test_lost_doubled_late_and_reordered_messages_change_no_token(apart: Apart) -> None:
    before = {worker: _repaired(apart, worker) for worker in ("gateway", *WORKERS)}
    apart.disturb(
        Faults(drop=0.05, duplicate=0.1, delay=0.1, delay_seconds=0.2, reorder=0.2, reorder_seconds=0.1)
    )
    with apart.traffic(apart.short, 10) as traffic:
        time.sleep(10)
        answers = traffic.stop()
    apart.heal()
    assert not wrong(answers, apart.expected)
    assert len(answers) >= 10
    apart.wait_calm()
    for proxy in apart.proxies.values():
        assert min(proxy.counts.dropped, proxy.counts.duplicated, proxy.counts.reordered) > 0
    for worker, (resent, stale) in before.items():
        resent_now, stale_now = _repaired(apart, worker)
        assert resent_now > resent, f"{worker} had nothing to say again"
        assert stale_now > stale, f"{worker} was told nothing twice"


def test_ports_answer_at_the_addresses_that_they_were_given_and_at_no_other(apart: Apart) -> None:
    """Mooncake opens its ports on all addresses; whoever is not meant to reach them gets no answer there."""
    network = apart.network
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: _look_at_ports(network[name], network["gateway"]), WORKERS))
    own, proxy = network["gateway"].addresses[OWN], network["gateway"].addresses[PROXIED]
    assert _listening(network["gateway"].namespace) == {(own, PORT), (proxy, PORT), ("127.0.0.1", 8000)}


def _look_at_ports(host: Host, client: Host) -> None:
    """Of one worker, and its proxy, which is this process. `client` is no peer of it."""
    own, proxy = host.addresses[OWN], host.addresses[PROXIED]
    found = _listening(host.namespace)
    assert (own, PORT) in found
    data = found - {(own, PORT), (proxy, PORT)}
    assert {address for address, _ in data} <= {"0.0.0.0", "*"}, f"{host.name} listens on {data}"
    ports = [port for _, port in data]
    for there in (own, proxy):
        assert not client.call(lambda there=there: _answering(there, ports)), host.name
    assert not host.call(lambda: _answering("127.0.0.1", ports) + _answering("::1", ports)), host.name
    assert client.call(lambda: _answering(own, [PORT])) == [PORT]  # what is to be reached answers


def _repaired(apart: Apart, worker: str) -> tuple[float, float]:
    """Messages that it said again, and messages that it was told twice or too late."""
    if worker == "gateway":
        return apart.figure("gateway_messages_resent_total"), apart.figure("gateway_messages_stale_total")
    resent, stale = "worker_messages_resent_total", "worker_messages_stale_total"
    return apart.figure(resent, worker), apart.figure(stale, worker)


def _listening(namespace: str) -> set[tuple[str, int]]:
    command = ["ip", "netns", "exec", namespace, "ss", "-ltnH"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = set()
    for line in lines:
        address, _, port = line.split()[3].rpartition(":")
        found.add((address, int(port)))
    return found


def _answering(host: str, ports: Sequence[int]) -> list[int]:
    """Those of the ports that take a connection within a second."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as stack:
        tried = {port: stack.enter_context(socket.socket(family)) for port in ports}
        for port, one in tried.items():
            one.setblocking(False)
            one.connect_ex((host, port))
        time.sleep(1)
        return [port for port, one in tried.items() if _connected(one)]


def _connected(one: socket.socket) -> bool:
    try:
        one.getpeername()
    except OSError:
        return False
    return True
