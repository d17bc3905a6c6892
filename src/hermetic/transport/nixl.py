"""NIXL over UCX: pages over TCP to another host; by cross-memory attach (CMA) between processes of one host.

What ends a peer's writes. Nothing on the target's side checks addresses, and deregistering stops nobody. Over TCP the
writes are carried out by the target's own progress thread, so destroying the agent that served the peer (each peer has
one of its own) ends them. Over CMA the writer's kernel call goes straight into our memory and needs no help from here:
what ends that is that the memory is gone. So a fence destroys the agent first (else its thread would fault) and then
retires the mapping for ever (`memory.py`): what a stopped writer still sends gets EFAULT, whenever it goes on.

What it listens on. UCX listens on the first address of each interface in UCX_NET_DEVICES, which is set here to the
interface of `host`; a socket filter lets in only the peer's own address if that is known, and nobody on the sender's
side. UCX over TCP has no authentication and no encryption, and whoever may connect can address any memory of this
process: the network between the workers has to be a trusted one.

NIXL has no time-out of its own; the sender's thread has (`staged.py`).
"""

from __future__ import annotations

import atexit
import base64
import binascii
import importlib
import os
import threading
import uuid
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from hermetic.transport import sockets
from hermetic.transport.base import WRITE_TIMEOUT_S, Page, TransportError
from hermetic.transport.memory import AddressedMemory
from hermetic.transport.staged import StagedSender, State

_PROGRESS_US = 1000  # see _Agent
_opening = threading.Lock()


class _Descriptor(NamedTuple):
    """How to reach a segment: the agent's own metadata (opaque), the first address, the bytes."""

    metadata: bytes
    address: int
    size: int

    def text(self) -> str:
        return f"nixl:{base64.b64encode(self.metadata).decode()}:{self.address:x}:{self.size}"

    @classmethod
    def parse(cls, text: str, stride: int) -> _Descriptor:
        try:
            name, metadata, address, size = text.split(":")
            found = cls(base64.b64decode(metadata, validate=True), int(address, 16), int(size))
        except (ValueError, binascii.Error) as error:
            raise TransportError(f"decode's landing descriptor {text!r} is not one of NIXL's") from error
        if name != "nixl" or found.size < 1 or found.size % stride:
            raise TransportError(
                f"decode's landing descriptor {text!r} does not fit pages of stride {stride}: "
                "both workers must use --transport nixl and have the same page layout"
            )
        return found


class NixlTransport:
    """`host` is the address that peers reach; it must be the first address of its interface."""

    name = "nixl"

    def __init__(self, host: str, write_timeout_s: float = WRITE_TIMEOUT_S) -> None:
        self._write_timeout_s = write_timeout_s
        try:
            self._host = sockets.reachable_address(host)
        except ValueError as error:
            raise TransportError(f"--transport nixl cannot listen on {error}") from error
        device = sockets.interface(self._host)
        if device is None:
            raise TransportError(
                f"--transport nixl cannot listen on {host!r}: UCX uses the first address of an interface, "
                "and this is not the first of any"
            )
        os.environ["UCX_NET_DEVICES"] = device
        if not any(Path("/sys/class/infiniband").glob("*")):
            # Without a device the RDMA modules do nothing, but unloading them ends the process with a fault.
            os.environ.setdefault("UCX_MODULES", "^ib")
            os.environ.setdefault("UCX_TLS", "tcp,cma")
        self._module = _load()
        self._process = os.getpid()
        self._open: weakref.WeakSet[NixlReceiver | StagedSender] = weakref.WeakSet()
        atexit.register(self.close)  # an agent that is alive at the end of the process aborts it

    def receiver(
        self, slots: int, stride: int, peer_pid: int | None, peer_host: str | None = None
    ) -> NixlReceiver:
        """With a peer in this network namespace, or with `peer_host`, nobody can connect from another address."""
        sources = sockets.sources_of(self._host, peer_pid, peer_host)
        receiver = NixlReceiver(self._agent(sources), slots, stride)
        self._open.add(receiver)
        return receiver

    def sender(self, descriptor: str, stride: int) -> StagedSender:
        target = _Descriptor.parse(descriptor, stride)
        stage = AddressedMemory(target.size // stride, stride)
        agent = self._agent([])
        try:
            agent.register(stage)
        except TransportError:
            agent.close()
            raise
        writer = _Writer(agent, stage, target)
        sender = StagedSender(stage.pages, writer, "nixl", self._write_timeout_s)
        self._open.add(sender)
        return sender

    def close(self) -> None:
        """Close what is still open."""
        if os.getpid() == self._process:
            for one in list(self._open):
                one.close()
        atexit.unregister(self.close)

    def _agent(self, sources: Sequence[str] | None) -> _Agent:
        if os.getpid() != self._process:
            raise TransportError("NIXL does not work in a forked process: start workers by exec")
        return _Agent(self._module, self._host, sources)


class _Agent:
    """One NIXL agent with UCX and its progress thread.

    The bindings are used directly because the wrapper class fixes the progress thread's delay at zero, with which an
    idle agent takes a whole core; with a delay it sleeps until a file descriptor wakes it."""

    def __init__(self, module: ModuleType, host: str, sources: Sequence[str] | None) -> None:
        self._module, self._process = module, os.getpid()
        self.errors = tuple(
            kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Exception)
        )
        config = module.nixlAgentConfig()
        config.useProgThread, config.useListenThread = True, False
        config.pthrDelay = _PROGRESS_US
        config.syncMode = module.NIXL_THREAD_SYNC_STRICT
        with _opening:  # so that what is new is ours
            before = sockets.listeners()
            try:
                self.raw: Any = module.nixlAgent(uuid.uuid4().hex, config)
                self._backend = self.raw.createBackend("UCX", {})
            except self.errors as error:
                raise TransportError(f"NIXL cannot start UCX on {host}: {error}") from error
            self._listeners = sockets.listeners() - before
        try:
            for one in self._listeners:
                if one.host != host:
                    raise TransportError(f"UCX listens on {one.host}:{one.port}, it was to use only {host}")
                sockets.admit(one, host, sources)
        except (OSError, TransportError) as error:
            self.close()
            raise TransportError(f"cannot restrict UCX to {host}: {error}") from error

    def register(self, memory: AddressedMemory) -> None:
        where = [(memory.address, memory.size, 0, "")]
        try:
            self.raw.registerMem(self._module.nixlRegDList(self._module.DRAM_SEG, where), [self._backend])
        except self.errors as error:
            raise TransportError(f"NIXL cannot register {memory.size} bytes: {error}") from error

    def metadata(self) -> bytes:
        return bytes(self.raw.getLocalMD())

    def meet(self, metadata: bytes) -> str:
        """The name of the peer whose metadata this is; raises what is in `errors`.

        It connects, which takes minutes if the network swallows it; other threads go on meanwhile."""
        name = self.raw.loadRemoteMD(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def post(self, peer: str, local: list[tuple[int, int, int]], remote: list[tuple[int, int, int]]) -> int:
        """Start a write; raises what is in `errors`."""
        module = self._module
        here, there = (module.nixlXferDList(module.DRAM_SEG, x) for x in (local, remote))
        request = self.raw.createXferReq(module.NIXL_WRITE, here, there, peer, b"", [self._backend])
        self.raw.postXferReq(request)
        return int(request)

    def state(self, request: int) -> State:
        try:
            status = self.raw.getXferStatus(request)
            if status == self._module.NIXL_IN_PROG:
                return State.RUNNING
            self.raw.releaseXferReq(request)
        except self.errors:
            return State.LOST
        return State.DONE if status == self._module.NIXL_SUCCESS else State.LOST

    def close(self) -> bool:
        """Destroy the agent: True when its threads are joined and its sockets are gone."""
        if os.getpid() != self._process:
            return False
        self.raw = None  # the only reference: this runs the destructor, which joins
        return not self._listeners & sockets.listeners()


class NixlReceiver:
    """The landing slots for one peer: uint8 [slots, stride], and the agent that serves them."""

    def __init__(self, agent: _Agent, slots: int, stride: int) -> None:
        self._agent = agent
        try:
            self._landing = AddressedMemory(slots, stride)
            agent.register(self._landing)
        except TransportError:
            agent.close()
            raise
        self._descriptor = _Descriptor(agent.metadata(), self._landing.address, self._landing.size).text()
        self.memory: Page = self._landing.pages

    def descriptor(self) -> str:
        return self._descriptor

    def fence(self) -> bool:
        """True once nothing, here or in the peer's process, can write to this memory any more."""
        if not self._agent.close():
            return False
        self.memory = self.memory[:0].copy()
        self._landing.retire()
        return True

    def close(self) -> None:
        """The same as a fence: there is no way to let go of the memory that is not one."""
        self.fence()


class _Flight(NamedTuple):
    agent: _Agent
    request: int | None  # None: the engine would not take it

    def state(self) -> State:
        return State.LOST if self.request is None else self.agent.state(self.request)


class _Writer:
    """What the sender's thread drives. It keeps the staging memory until the agent is gone."""

    def __init__(self, agent: _Agent, stage: AddressedMemory, target: _Descriptor) -> None:
        self._agent, self._stage, self._target = agent, stage, target
        self._peer: str | None = None
        self._stride = stage.pages.shape[1]

    def start(self, slots: Sequence[int]) -> _Flight:
        local = [(self._stage.address + slot * self._stride, self._stride, 0) for slot in slots]
        remote = [(self._target.address + slot * self._stride, self._stride, 0) for slot in slots]
        try:
            if self._peer is None:
                self._peer = self._agent.meet(self._target.metadata)
            return _Flight(self._agent, self._agent.post(self._peer, local, remote))
        except self._agent.errors:
            return _Flight(self._agent, None)

    def close(self) -> None:
        if self._agent.close():
            self._stage.retire()


def _load() -> ModuleType:
    try:
        return importlib.import_module("nixl_cu12._bindings")
    except ModuleNotFoundError as error:
        raise TransportError(
            "--transport nixl needs a package that is not installed: pip install --no-deps nixl-cu12==1.5.1"
        ) from error
    except ImportError as error:
        raise TransportError(f"NIXL is installed but cannot be loaded: {error}") from error
