"""What the other tests of this folder rest on: hosts that come and go without a trace, and a proxy that does what it counts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from hermetic.lab import hosts
from hermetic.lab.hosts import PREFIX, Network, missing_right, remove_leftovers
from hermetic.lab.proxy import Faults, Proxy
from hermetic.worker import wire
from hermetic.worker.wire import CurveKeys

COUNT = 2000


def _needs_hosts() -> None:
    if (why := missing_right()) is not None:
        pytest.skip(why)


def test_what_a_killed_run_leaves_behind_is_removed_by_the_next_one_and_nothing_else() -> None:
    _needs_hosts()
    code = (
        "import os, signal, sys; from hermetic.lab.hosts import Network\n"
        "n = Network(['one']); p = n['one'].start(['sleep', '1000']); print(n['one'].namespace, p.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    namespace, pid = killed.stdout.split()
    assert Path(f"/proc/{pid}").exists()
    with Network(["mine"]) as network:  # it looks for leftovers first
        assert namespace not in os.listdir("/var/run/netns")
        deadline = time.monotonic() + 10
        while Path(f"/proc/{pid}/exe").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert remove_leftovers() == []
        mine = network["mine"].namespace
        assert mine in os.listdir("/var/run/netns")
        assert (
            network["mine"].call(lambda: os.stat("/proc/thread-self/ns/net").st_ino)
            != os.stat("/proc/self/ns/net").st_ino
        )
    assert mine not in os.listdir("/var/run/netns")


def test_a_failure_while_hosts_are_made_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    _needs_hosts()

    def fail(*_: object) -> None:
        raise hosts.HostsError("no more")

    monkeypatch.setattr(Network, "_plug_in", fail)
    before = [name for name in os.listdir("/var/run/netns") if name.startswith(PREFIX)]
    with pytest.raises(hosts.HostsError, match="no more"):
        Network(["one"])
    assert [name for name in os.listdir("/var/run/netns") if name.startswith(PREFIX)] == before


def test_without_the_right_to_make_hosts_the_reason_says_what_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "iproute2" in (missing_right() or "")


@pytest.fixture
def ends() -> Iterator[tuple[zmq.Socket, Proxy, zmq.Socket]]:
    """A dialling end, the proxy, and the end that it stands before."""
    keys, context = CurveKeys.make(), zmq.Context()
    auth = wire.authenticator(context, keys)
    far, near = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    port = wire.serve(far, keys, "127.0.0.1")
    with Proxy(keys, ("127.0.0.1", 0), f"tcp://127.0.0.1:{port}", seed=7) as proxy:
        wire.dial(near, keys, f"tcp://127.0.0.1:{proxy.port}", b"name of the dialling end")
        yield near, proxy, far
    auth.stop()
    context.destroy(linger=0)


def _through(near: zmq.Socket, far: zmq.Socket, count: int) -> tuple[list[int], list[int]]:
    """Numbers sent both ways, and what of them arrived there and here."""
    near.send(b"first")  # so that the far end knows the way back; it may be lost
    for number in range(count):
        near.send(number.to_bytes(4, "big"))
    there = [raw for name, raw in _all(far) if name == b"name of the dialling end"]
    for number in range(count):
        far.send_multipart([b"name of the dialling end", number.to_bytes(4, "big")])
    here = [frames[-1] for frames in _all(near)]
    return [int.from_bytes(raw, "big") for raw in there if raw != b"first"], [
        int.from_bytes(raw, "big") for raw in here
    ]


def _all(socket: zmq.Socket) -> list[list[bytes]]:
    found = []
    while socket.poll(1500 if not found else 500):
        found.append(socket.recv_multipart())
    return found


def test_a_proxy_without_faults_passes_everything_in_order(
    ends: tuple[zmq.Socket, Proxy, zmq.Socket],
) -> None:
    near, proxy, far = ends
    there, here = _through(near, far, COUNT)
    assert there == here == list(range(COUNT))
    counts = proxy.counts
    assert (counts.passed, counts.dropped, counts.duplicated, counts.reordered) == (2 * COUNT + 1, 0, 0, 0)


def test_a_proxy_drops_doubles_and_reorders_as_often_as_it_is_told(
    ends: tuple[zmq.Socket, Proxy, zmq.Socket],
) -> None:
    near, proxy, far = ends
    proxy.faults = Faults(drop=0.2, duplicate=0.1, reorder=0.3, reorder_seconds=0.02)
    there, here = _through(near, far, COUNT)
    counts = proxy.counts
    assert counts.passed + counts.dropped == 2 * COUNT + 1
    arrived = len(there) + len(here)
    assert abs(arrived - (counts.passed + counts.duplicated)) <= 2  # "first" is not in the lists
    for chance, count, of in (
        (0.2, counts.dropped, 2 * COUNT),
        (0.1, counts.duplicated, counts.passed),
        (0.3, counts.reordered, counts.passed),
    ):
        assert chance * 0.8 < count / of < chance * 1.2
    assert there != sorted(there)
    assert len(set(there)) < len(there)
    assert set(there) < set(range(COUNT))


def test_a_proxy_that_delays_keeps_order(ends: tuple[zmq.Socket, Proxy, zmq.Socket]) -> None:
    near, proxy, far = ends
    proxy.faults = Faults(delay=0.05, delay_seconds=0.01)
    there, here = _through(near, far, 500)
    assert there == here == list(range(500))
    assert proxy.counts.delayed > 0


def test_a_cut_proxy_is_silent_and_a_healed_one_passes_again(
    ends: tuple[zmq.Socket, Proxy, zmq.Socket],
) -> None:
    near, proxy, far = ends
    assert _through(near, far, 10) == (list(range(10)), list(range(10)))
    proxy.cut()
    assert _through(near, far, 10) == ([], [])
    assert proxy.counts.cut == 21
    proxy.heal()
    assert _through(near, far, 10) == (list(range(10)), list(range(10)))
