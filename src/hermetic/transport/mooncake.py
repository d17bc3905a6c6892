"""Mooncake's Transfer Engine: pages over TCP to another host, or over RDMA where there is a device for it.

What ends a peer's writes. The target checks an address once, when the header of a transfer arrives; the bytes behind an
accepted header then stream into memory for as long as the connection lives, registered or not (seen with a writer that
was stopped in the middle: after `unregister_memory` its bytes still came). So each peer has an engine of its own, and a fence

1. takes the registration away: no further header is accepted;
2. closes the engine's ports to everybody and hangs up what came in through them;
3. destroys the engine, which joins the threads that copy from sockets into memory;
4. retires the memory for ever (`memory.py`): a later engine that happens to get the same port has other addresses.

What it listens on. The engine opens two ports on every interface, whatever MC_TCP_BIND_ADDRESS says (that is only what it
announces), and serves reads and writes to whoever connects. Socket filters in the kernel (`sockets.py`) let nobody through
but those who speak to `host`, from the peer's own address if that is known. A sender needs no port: nobody gets through.
There is no authentication and no encryption in Mooncake's protocol; the network between the workers has to be a trusted one.
"""

from __future__ import annotations

import atexit
import importlib
import os
import socket
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from hermetic.transport import sockets
from hermetic.transport.base import WRITE_TIMEOUT_S, Page, TransportError
from hermetic.transport.memory import AddressedMemory
from hermetic.transport.staged import StagedSender, State

_PEER_TO_PEER = "P2PHANDSHAKE"  # peers exchange addresses directly, without a metadata server
_LOOK_UP_S, _KNOCK_S = 0.05, 5.0  # see _Engine
_RUNNING, _DONE = 0, 1  # of transfer_check_status; negative is failed or timed out
_opening = threading.Lock()


class _Descriptor(NamedTuple):
    """Where a segment is: the engine that serves it, its first address, its bytes."""

    host: str
    port: int
    address: int
    size: int

    def text(self) -> str:
        return f"mooncake:{self.host}:{self.port}:{self.address:x}:{self.size}"

    @classmethod
    def parse(cls, text: str, stride: int) -> _Descriptor:
        try:
            name, host, port, address, size = text.split(":")
            found = cls(host, int(port), int(address, 16), int(size))
        except ValueError as error:
            raise TransportError(f"decode's landing descriptor {text!r} is not one of Mooncake's") from error
        if name != "mooncake" or found.size < 1 or found.size % stride:
            raise TransportError(
                f"decode's landing descriptor {text!r} does not fit pages of stride {stride}: "
                "both workers must use --transport mooncake and have the same page layout"
            )
        return found


class MooncakeTransport:
    """`host` is the address that peers reach and the only one that answers. `protocol` is tcp or rdma."""

    name = "mooncake"

    def __init__(self, host: str, protocol: str = "tcp", write_timeout_s: float = WRITE_TIMEOUT_S) -> None:
        self._write_timeout_s = write_timeout_s
        try:
            self._host = sockets.reachable_address(host)
        except ValueError as error:
            raise TransportError(f"--transport mooncake cannot listen on {error}") from error
        self._protocol = protocol
        # Checked here: `initialize` says 0 for every protocol, also for those that it has never heard of.
        if protocol not in ("tcp", "rdma"):
            raise TransportError(f"--transport mooncake knows the protocols tcp and rdma, not {protocol!r}")
        if protocol == "rdma" and not any(Path("/sys/class/infiniband").glob("*")):
            raise TransportError("this machine has no RDMA device (/sys/class/infiniband is empty): use tcp")
        for name in ("MC_TCP_PROTO", "MC_USE_TENT", "MC_LEGACY_RPC_PORT_BINDING"):
            # The first makes a write "complete" when it has left the sender; the others are other engines.
            if os.environ.get(name):
                raise TransportError(f"{name} is set in the environment: this transport needs it unset")
        if protocol == "tcp":
            os.environ["MC_FORCE_TCP"] = "1"  # else it prefers an RDMA device if it finds one
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # read when the module is loaded
        self._module = _load()
        self._process = os.getpid()
        self._open: weakref.WeakSet[MooncakeReceiver | StagedSender] = weakref.WeakSet()
        atexit.register(self.close)  # its threads must not outlive the interpreter

    def receiver(
        self, slots: int, stride: int, peer_pid: int | None, peer_host: str | None = None
    ) -> MooncakeReceiver:
        """With a peer in this network namespace, or with `peer_host`, nobody can connect from another address."""
        sources = sockets.sources_of(self._host, peer_pid, peer_host)
        receiver = MooncakeReceiver(self._engine(sources), slots, stride)
        self._open.add(receiver)
        return receiver

    def sender(self, descriptor: str, stride: int) -> StagedSender:
        target = _Descriptor.parse(descriptor, stride)
        stage = AddressedMemory(target.size // stride, stride)
        engine = self._engine([])
        if self._protocol == "rdma":
            engine.register(stage)
        name = f"mooncake-{target.host}:{target.port}"
        sender = StagedSender(stage.pages, _Writer(engine, stage, target), name, self._write_timeout_s)
        self._open.add(sender)
        return sender

    def close(self) -> None:
        """Close what is still open."""
        if os.getpid() == self._process:
            for one in list(self._open):
                one.close()
        atexit.unregister(self.close)

    def _engine(self, sources: Sequence[str] | None) -> _Engine:
        if os.getpid() != self._process:
            raise TransportError(
                "Mooncake does not work in a forked process (it hangs): start workers by exec"
            )
        return _Engine(self._module, self._host, self._protocol, sources)


class _Engine:
    """One TransferEngine and the two ports it listens on: for the handshake, and for the bytes."""

    def __init__(self, module: ModuleType, host: str, protocol: str, sources: Sequence[str] | None) -> None:
        self._host, self._process = host, os.getpid()
        self._raw: Any = module.TransferEngine()
        with _opening:  # so that what is new is ours
            before = sockets.listeners()
            if self._raw.initialize(host, _PEER_TO_PEER, protocol, "") != 0:
                raise TransportError(
                    f"Mooncake cannot start an engine on {host} ({protocol}): see its log lines"
                )
            self.port = int(self._raw.get_rpc_port())
            self._listeners = sockets.listeners() - before
        try:
            # The engine's destructor waits, holding the interpreter's lock, for a thread that sits in accept() and looks
            # up once a second: every fence would stop the whole worker that long. So it is made to look up more often,
            # and woken from the wait that it is in already.
            for one in self._listeners:
                sockets.impatient(one, _LOOK_UP_S)
            socket.create_connection((host, self.port), timeout=_KNOCK_S).close()
            for one in self._listeners:
                sockets.admit(one, host, sources)
        except OSError as error:
            self.close()
            raise TransportError(f"cannot restrict Mooncake's ports to {host}: {error}") from error

    def register(self, memory: AddressedMemory) -> None:
        """Only after initialize: before it, this call ends the process."""
        if self._raw.register_memory(memory.address, memory.size) != 0:
            raise TransportError(f"Mooncake cannot register {memory.size} bytes: see its log lines")

    def unregister(self, memory: AddressedMemory) -> None:
        """Its result does not matter: what a fence rests on is the end of the engine."""
        if self._raw is not None:
            self._raw.unregister_memory(memory.address)

    def submit(self, target: str, source: int, destination: int, length: int) -> int:
        """The id of a transfer, or -1. Blocks while it opens the target for the first time."""
        found = int(self._raw.transfer_submit_write(target, source, destination, length))
        # An id is an address inside the engine. 0 says that the target cannot be opened; asking for its status would end
        # this process (so would -1, which comes as an unsigned number).
        return found if 0 < found < 2**63 else -1

    def check(self, transfer: int) -> int:
        return int(self._raw.transfer_check_status(transfer))

    def close(self) -> bool:
        """Destroy the engine: True when its threads are joined and its sockets are gone."""
        if self._raw is not None and os.getpid() == self._process:
            for one in self._listeners & sockets.listeners():
                sockets.admit(one, self._host, [])
            sockets.hang_up(one.port for one in self._listeners)
        self._raw = None  # the only reference: this runs the destructor, which joins
        return not self._listeners & sockets.listeners()


class MooncakeReceiver:
    """The landing slots for one peer: uint8 [slots, stride], and the engine that serves them."""

    def __init__(self, engine: _Engine, slots: int, stride: int) -> None:
        self._engine = engine
        try:
            self._landing = AddressedMemory(slots, stride)
            engine.register(self._landing)
        except TransportError:
            engine.close()
            raise
        self.memory: Page = self._landing.pages

    def descriptor(self) -> str:
        landing = self._landing
        return _Descriptor(self._engine._host, self._engine.port, landing.address, landing.size).text()

    def fence(self) -> bool:
        """True once nothing in this process writes for that peer any more; takes up to a twentieth of a second."""
        self._engine.unregister(self._landing)
        if not self._engine.close():
            return False
        self.memory = self.memory[:0].copy()
        self._landing.retire()
        return True

    def close(self) -> None:
        """The same as a fence: there is no way to let go of the memory that is not one."""
        self.fence()


class _Flight:
    """The transfers of one batch, a page each."""

    def __init__(self, engine: _Engine, transfers: list[int]) -> None:
        self._engine, self._running = engine, transfers
        self._lost = False

    def state(self) -> State:
        still = []
        for transfer in self._running:
            status = self._engine.check(transfer) if transfer >= 0 else transfer
            if status == _RUNNING:
                still.append(transfer)
            self._lost |= status < 0
        self._running = still
        if still:
            return State.RUNNING
        return State.LOST if self._lost else State.DONE


class _Writer:
    """What the sender's thread drives. It keeps the staging memory until the engine is gone."""

    def __init__(self, engine: _Engine, stage: AddressedMemory, target: _Descriptor) -> None:
        self._engine, self._stage, self._target = engine, stage, target
        self._name = f"{target.host}:{target.port}"
        self._stride = stage.pages.shape[1]

    def start(self, slots: Sequence[int]) -> _Flight:
        # One transfer a page. A batch call would poll in a tight loop, on a core that the transfer itself needs,
        # and gives one -1 for "refused", "failed" and "timed out" alike.
        return _Flight(
            self._engine,
            [
                self._engine.submit(
                    self._name,
                    self._stage.address + slot * self._stride,
                    self._target.address + slot * self._stride,
                    self._stride,
                )
                for slot in slots
            ],
        )

    def close(self) -> None:
        if self._engine.close():
            self._stage.retire()


def _load() -> ModuleType:
    try:
        return importlib.import_module("mooncake.engine")
    except ModuleNotFoundError as error:
        raise TransportError(
            "--transport mooncake needs a package that is not installed: pip install 'hermetic[mooncake]'"
        ) from error
    except ImportError as error:
        raise TransportError(
            f"Mooncake is installed but cannot be loaded ({error}): "
            "apt-get install libibverbs1 (it is needed for TCP as well)"
        ) from error
