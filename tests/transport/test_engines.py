"""Mooncake and NIXL: what they listen on, what they cost, what they say when something is missing, and why a fence is what it is."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from writing_peer import SLOTS, STRIDE, landing, peers

from hermetic.transport import sockets
from hermetic.transport.base import Receiver, Transport, TransportError, Written
from hermetic.transport.choose import open_transport
from hermetic.transport.mooncake import MooncakeReceiver, MooncakeTransport

ENGINES = ("mooncake", "nixl")
HERE, ELSEWHERE = "127.0.0.1", "127.0.0.2"


@pytest.fixture(params=ENGINES)
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    made = open_transport(request.param, HERE)
    yield made
    made.close()


@contextlib.contextmanager
def opened(
    transport: Transport, peer_pid: int | None = None, **known: str
) -> Iterator[set[sockets.Listener]]:
    """The listeners that one receiver adds to this process."""
    before = sockets.listeners()
    receiver: Receiver = transport.receiver(SLOTS, STRIDE, peer_pid, **known)
    try:
        yield sockets.listeners() - before
    finally:
        receiver.close()
    assert sockets.listeners() <= before


def reached(listener: sockets.Listener, to: str = HERE, source: str = HERE) -> bool:
    """Whether a connection comes about. One that is dropped has no answer, so it is a matter of waiting a little."""
    with contextlib.closing(socket.socket()) as one:
        one.settimeout(0.25)
        one.bind((source, 0))
        try:
            one.connect((to, listener.port))
        except OSError:
            return False
        return True


def test_a_receiver_is_reached_at_its_own_address_and_at_no_other(transport: Transport) -> None:
    with opened(transport) as listeners:
        assert listeners
        for one in listeners:
            assert reached(one)
            assert reached(one, source=ELSEWHERE)  # it is not known who the peer will be
            assert not reached(one, to=ELSEWHERE)


def test_a_receiver_for_a_known_peer_lets_in_nobody_else(transport: Transport) -> None:
    with opened(transport, os.getpid()) as listeners:
        for one in listeners:
            assert reached(one)
            assert not reached(one, source=ELSEWHERE)
    with opened(transport, peer_host=ELSEWHERE) as listeners:
        for one in listeners:
            assert reached(one, source=ELSEWHERE)
            assert not reached(one)


def test_a_pair_works_at_an_address_that_is_not_the_first_of_its_interface() -> None:
    """There the kernel chooses another source address than the one connected to."""
    transport = open_transport("mooncake", ELSEWHERE)
    with opened(transport, os.getpid()) as listeners:
        for one in listeners:
            assert reached(one, to=ELSEWHERE)
            assert not reached(one, to=HERE)
    receiver = transport.receiver(SLOTS, STRIDE, os.getpid())
    sender = transport.sender(receiver.descriptor(), STRIDE)
    sender.write(1, [(np.ones(STRIDE, np.uint8), 0)])
    while not (ended := sender.poll()):
        time.sleep(1e-3)
    assert ended[0].ok
    transport.close()


def test_nobody_reaches_a_sender(transport: Transport) -> None:
    receiver = transport.receiver(SLOTS, STRIDE, os.getpid())
    before = sockets.listeners()
    sender = transport.sender(receiver.descriptor(), STRIDE)
    for one in sockets.listeners() - before:
        assert not reached(one)
    sender.close()
    receiver.close()


def test_a_peer_that_the_network_swallows_holds_up_nobody(transport: Transport) -> None:
    before = sockets.listeners()
    receiver = transport.receiver(SLOTS, STRIDE, os.getpid())
    for one in sockets.listeners() - before:
        sockets.admit(one, HERE, [])  # what a cut link looks like from the other side: no answer
    with peers(transport, write_timeout_s=0.5) as [peer]:
        peer.open(receiver)
        peer.write(1, [(0, 1)])
        assert peer.ended(1) == [Written(1, ok=False, stopped=False)]
        assert peer.ask("close") == "closed"
    receiver.close()


def test_an_idle_pair_does_not_burn_a_core(transport: Transport) -> None:
    receiver = transport.receiver(SLOTS, STRIDE, os.getpid())
    sender = transport.sender(receiver.descriptor(), STRIDE)
    sender.write(1, [(np.ones(STRIDE, np.uint8), 0)])
    while not sender.poll():
        time.sleep(1e-3)
    spent, began = time.process_time(), time.monotonic()
    time.sleep(1)
    share = (time.process_time() - spent) / (time.monotonic() - began)
    assert share < 0.2, "UCX's progress thread spins, or the sender polls in a tight loop"
    sender.close()
    receiver.close()


@pytest.mark.parametrize("name", ENGINES)
def test_a_host_that_peers_cannot_reach_is_refused(name: str) -> None:
    for host, reason in (
        ("0.0.0.0", "every address"),
        ("192.0.2.77", "not an address of this machine"),
        ("no-such-host.invalid", "no IPv4 address"),
    ):
        with pytest.raises(TransportError, match=reason):
            open_transport(name, host)


def test_nixl_refuses_an_address_that_ucx_would_not_listen_on() -> None:
    with pytest.raises(TransportError, match="first address of an interface"):
        open_transport("nixl", ELSEWHERE)


def test_an_unknown_transport_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TransportError, match="shm, mooncake, nixl"):
        open_transport("rdma")


@pytest.mark.parametrize(
    ("name", "module", "line"),
    [
        ("mooncake", "mooncake.engine", r"pip install 'hermetic\[mooncake\]'"),
        ("nixl", "nixl_cu12._bindings", r"pip install --no-deps nixl-cu12==1\.5\.1"),
    ],
)
def test_a_missing_package_is_an_error_with_the_line_that_installs_it(
    name: str, module: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(TransportError, match=line):
        open_transport(name)


def test_a_missing_system_library_is_an_error_with_the_package_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "engine.py").write_text(
        "raise ImportError('libibverbs.so.1: cannot open shared object file: No such file or directory')"
    )
    for loaded in [x for x in sys.modules if x.partition(".")[0] == "mooncake"]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(TransportError, match=r"libibverbs\.so\.1.*apt-get install libibverbs1"):
        open_transport("mooncake")


def test_mooncake_takes_no_protocol_that_it_does_not_have() -> None:
    with pytest.raises(TransportError, match="tcp and rdma"):
        MooncakeTransport(HERE, "carrier pigeon")


@pytest.mark.skipif(any(Path("/sys/class/infiniband").glob("*")), reason="this machine has an RDMA device")
def test_mooncake_over_rdma_needs_a_device() -> None:
    with pytest.raises(TransportError, match="no RDMA device"):
        MooncakeTransport(HERE, "rdma")


def test_mooncake_refuses_the_framing_without_acknowledgements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(TransportError, match="MC_TCP_PROTO"):
        open_transport("mooncake")


def test_a_forked_process_gets_an_error_instead_of_a_hang(transport: Transport) -> None:
    receiver = transport.receiver(SLOTS, STRIDE, None)
    child = os.fork()
    if not child:
        status = 1
        try:
            transport.sender(receiver.descriptor(), STRIDE)
        except TransportError as error:
            status = 0 if "fork" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    receiver.close()


def test_unregistering_alone_is_no_fence_for_mooncake() -> None:
    """Why `fence` destroys the engine: a transfer whose header was accepted goes on into memory that is not registered."""
    transport, size = open_transport("mooncake"), 32 << 20
    with peers(transport) as [peer], landing(transport, peer, 1, size) as receiver:
        assert isinstance(receiver, MooncakeReceiver)
        peer.open(receiver, size)
        peer.tell("write", 1, [(0, 1)])
        while not receiver.memory[0, 0]:
            pass
        peer.stop()
        assert not receiver.memory[0, -1]
        receiver._engine.unregister(receiver._landing)
        peer.resume()
        assert peer.answer() == "written"
        assert peer.ended(1)[0].ok
        assert receiver.memory[0].all()


def test_destroying_a_mooncake_engine_does_not_stop_the_interpreter_for_a_second() -> None:
    """Its destructor waits, with the interpreter's lock, for a thread that looks up when accept() times out."""
    with opened(open_transport("mooncake")) as listeners:
        for one in listeners:
            with contextlib.closing(socket.socket(fileno=os.dup(one.descriptor))) as copy:
                period = copy.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.calcsize("ll"))
            seconds, micros = struct.unpack("ll", period)
            assert 0 < seconds + micros / 1e6 <= 0.1


def test_a_stranger_that_says_nothing_does_not_hold_up_a_fence() -> None:
    """The engine's destructor waits for its handshake thread, and that one waits five seconds for a stranger's words."""
    transport = open_transport("mooncake")
    before = sockets.listeners()
    receiver = transport.receiver(SLOTS, STRIDE, None)
    strangers = [socket.create_connection((HERE, one.port)) for one in sockets.listeners() - before]
    time.sleep(0.3)  # until the thread waits for what the stranger will say
    began = time.monotonic()
    assert receiver.fence()
    assert time.monotonic() - began < 3.5
    for one in strangers:
        one.close()


def test_a_first_write_to_a_segment_that_is_gone_is_a_failed_batch_and_not_the_end_of_the_process() -> None:
    """Mooncake says 0 for a transfer that it could not begin, and does not survive the question how transfer 0 went."""
    code = """
import time
import numpy as np
from hermetic.transport.mooncake import MooncakeTransport

transport = MooncakeTransport("127.0.0.1")
receiver = transport.receiver(4, 4096, None)
descriptor = receiver.descriptor()
receiver.close()
sender = transport.sender(descriptor, 4096)
sender.write(1, [(np.ones(4096, np.uint8), 0)])
deadline = time.monotonic() + 20
while not (ended := sender.poll()) and time.monotonic() < deadline:
    time.sleep(0.01)
print([written.ok for written in ended])
transport.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[False]"), done.stderr
