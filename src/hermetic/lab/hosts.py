"""Hosts apart on one machine: network namespaces joined by a bridge, whose links can be cut, slowed and healed.

The one thing to know: nothing of it shows outside. The bridge has a namespace of its own, so this machine's own network
is not touched, and two runs at once cannot meet. Namespaces are called after the process that made them; those of a
process that was killed before it could clean up are removed by the next run.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

T = TypeVar("T")

PREFIX = "hermetic-lab-"
_SUBNET = "10.77.0"
_NOWHERE = "02:00:00:00:de:ad"  # a hardware address that no interface has
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count()


class HostsError(RuntimeError):
    """A namespace or a link could not be made or changed; the message has the command and what it said."""


def missing_right() -> str | None:
    """Why namespaces cannot be made here, with what would do; None when they can."""
    probe = f"{PREFIX}{_me()}-probe{next(_numbers)}"
    try:
        _ip("netns", "add", probe)
    except HostsError as error:
        return (
            f"network namespaces cannot be made here ({error}): it takes root, or CAP_SYS_ADMIN and CAP_NET_ADMIN, and the "
            "`ip` command of iproute2"
        )
    _ip("netns", "del", probe)
    return None


def remove_leftovers() -> list[str]:
    """End what runs in namespaces of processes that are gone, and remove those namespaces. Returns their names."""
    removed = []
    for name in _names():
        owner = re.match(rf"{PREFIX}(\d+)\.(\d+)-", name)
        if owner is not None and _started(int(owner[1])) != owner[2]:
            _remove(name)
            removed.append(name)
    return removed


@dataclass
class Host:
    """One host: a namespace with loopback and one link to the bridge. `addresses` are all its own, the first is the
    one that its connections come from."""

    name: str
    namespace: str
    addresses: tuple[str, ...]
    port: str  # of the bridge, at the other end of its link
    switch: str  # the bridge's namespace
    _running: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return self.addresses[0]

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        stdout: int | IO[str] = subprocess.DEVNULL,
        stderr: int | IO[str] = subprocess.DEVNULL,
    ) -> subprocess.Popen[str]:
        """Run a command on this host. Its pid is the command's own, and its group's; it ends with the network at the latest."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *command],
            stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, text=True, start_new_session=True,
            env=None if environment is None else {**os.environ, **environment},
        )  # fmt: skip
        self._running.append(process)
        return process

    def call(self, what: Callable[[], T]) -> T:
        """Do this in a thread on this host: sockets that it makes, and threads that it starts, belong here."""
        with ThreadPoolExecutor(1, f"on {self.name}") as thread:
            thread.submit(self._enter).result()
            return thread.submit(what).result()

    def _enter(self) -> None:
        """From here on, what this thread does is done on this host."""
        with open(f"/var/run/netns/{self.namespace}") as file:
            if _libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
                raise HostsError(f"cannot enter {self.namespace}: {os.strerror(ctypes.get_errno())}")

    def cut(self) -> None:
        """Pull the cable: nothing arrives and nothing leaves, and nobody is told."""
        _ip("-n", self.switch, "link", "set", self.port, "down")

    def heal(self) -> None:
        _ip("-n", self.switch, "link", "set", self.port, "up")

    def limit(self, bytes_a_second: int | None) -> None:
        """What leaves this host goes no faster than this; None takes the limit away."""
        with contextlib.suppress(HostsError):  # there was none
            _run("ip", "netns", "exec", self.namespace, "tc", "qdisc", "del", "dev", "eth0", "root")
        if bytes_a_second is not None:
            shape = ("rate", f"{8 * bytes_a_second}bit", "burst", "16kb", "latency", "400ms")
            _run(
                "ip", "netns", "exec", self.namespace, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *shape
            )  # fmt: skip

    def small_buffers(self) -> None:
        """TCP connections made here from now on hold 16 KiB at most in the kernel, in each direction."""
        for name in ("tcp_wmem", "tcp_rmem"):
            self.call(lambda name=name: Path(f"/proc/sys/net/ipv4/{name}").write_text("4096 16384 16384"))  # type: ignore[misc]

    def end(self) -> None:
        """End what was started here, by the groups that it was started in."""
        for process in self._running:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._running.clear()


class Network:
    """Hosts by name, joined by one bridge. Ends everything on the way out, also after a failure."""

    def __init__(self, names: Sequence[str], addresses: int = 2) -> None:
        """Each host gets this many addresses. Raises HostsError, and leaves nothing behind then."""
        remove_leftovers()
        stem = f"{PREFIX}{_me()}-{next(_numbers)}"
        self._switch = f"{stem}-switch"
        self.hosts: dict[str, Host] = {}
        try:
            self._bridge()
            for i, name in enumerate(names):
                mine = tuple(f"{_SUBNET}.{10 + addresses * i + k}" for k in range(addresses))
                self.hosts[name] = Host(name, f"{stem}-{name}", mine, f"port{i}", self._switch)
                self._plug_in(self.hosts[name])
        except HostsError:
            self.close()
            raise

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def close(self) -> None:
        for host in self.hosts.values():
            host.end()
            _remove(host.namespace)
        _remove(self._switch)

    def part(self, one: str, other: str) -> None:
        """These two reach each other no more, in either direction; everybody else does. Nobody is told."""
        for here, there in ((one, other), (other, one)):
            self.block(here, there)

    def block(self, here: str, there: str, addresses: slice = slice(None)) -> None:
        """What `here` sends to these addresses of `there` is lost.

        A neighbour entry that points nowhere needs no packet filter, which not every kernel has."""
        for address in self[there].addresses[addresses]:
            entry = ("replace", address, "lladdr", _NOWHERE, "dev", "eth0", "nud", "permanent")
            _ip("-n", self[here].namespace, "neigh", *entry)

    def join(self, one: str, other: str) -> None:
        """What `part` or `block` did to these two is over."""
        for here, there in ((one, other), (other, one)):
            for address in self[there].addresses:
                with contextlib.suppress(HostsError):  # it was not blocked
                    _ip("-n", self[here].namespace, "neigh", "del", address, "dev", "eth0")

    def _bridge(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")

    def _plug_in(self, host: Host) -> None:
        inside = ("-n", host.namespace)
        _ip("netns", "add", host.namespace)
        _ip(*inside, "link", "add", "eth0", "type", "veth", "peer", "name", host.port, "netns", self._switch)
        _ip("-n", self._switch, "link", "set", host.port, "master", "bridge", "up")
        for address in host.addresses:
            _ip(*inside, "address", "add", f"{address}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            _ip(*inside, "link", "set", interface, "up")


def _me() -> str:
    """This process, so that no later one with the same pid is taken for it."""
    return f"{os.getpid()}.{_started(os.getpid())}"


def _started(pid: int) -> str | None:
    """When a process started (clock ticks since boot), None when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _names() -> list[str]:
    folder = Path("/var/run/netns")
    return sorted(entry.name for entry in folder.glob(f"{PREFIX}*")) if folder.is_dir() else []


def _remove(namespace: str) -> None:
    """With whatever still runs in it: only the lab starts anything there."""
    if namespace not in _names():
        return
    for pid in _run("ip", "netns", "pids", namespace).split():
        # A thread of this very process may be inside (a proxy's, say), which is not to be killed for it.
        if int(pid) != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    deadline = time.monotonic() + 5
    while (error := _deleted(namespace)) is not None:
        if time.monotonic() > deadline:
            raise error
        time.sleep(0.05)


def _deleted(namespace: str) -> HostsError | None:
    try:
        _ip("netns", "del", namespace)
    except HostsError as error:
        return error
    return None


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    """Standard output. Raises HostsError."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except OSError as error:
        raise HostsError(f"{command[0]} cannot be run: {error.strerror}") from error
    if done.returncode != 0:
        said: Any = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        raise HostsError(f"`{' '.join(command)}` failed: {said[0]}")
    return done.stdout


__all__ = ["PREFIX", "Host", "HostsError", "Network", "missing_right", "remove_leftovers"]
