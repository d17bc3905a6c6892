"""Sockets that a transfer engine opened in this process behind our back: who may reach them, and how to end them.

Mooncake 0.3.13 and UCX listen on more than they are told to, and answer whoever asks. A socket filter in the kernel puts
that right from outside: a segment that it drops gets no answer, as if nothing were there. Connections that are accepted
inherit the filter of their listener.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from hermetic.transport.base import TransportError

_SO_ATTACH_FILTER = 26
_SIOCGIFADDR = 0x8915
# Classic BPF (linux/filter.h). An offset from SKF_NET_OFF reads the IP header, wherever the filter starts.
_NET = 0x100000000 - 0x100000
_LOAD_BYTE, _LOAD_WORD, _SHIFT_RIGHT, _IF_EQUAL, _RETURN = 0x30, 0x20, 0x74, 0x15, 0x06
_EVERYTHING, _NOTHING = 0xFFFFFFFF, 0


class Listener(NamedTuple):
    """A listening TCP socket of this process. The inode tells it from a later socket with the same descriptor."""

    descriptor: int
    inode: int
    host: str
    port: int


def reachable_address(host: str) -> str:
    """`host` as the one IPv4 address that peers reach. Raises ValueError, which says what is wrong with it."""
    try:
        found = socket.gethostbyname(host)
    except OSError as error:
        raise ValueError(f"{host!r} has no IPv4 address: {error}") from error
    if ipaddress.IPv4Address(found).is_unspecified:
        raise ValueError(f"{host!r} stands for every address: name the one that peers reach")
    try:
        with contextlib.closing(socket.socket()) as one:
            one.bind((found, 0))
    except OSError as error:
        raise ValueError(f"{host!r} is not an address of this machine: {error}") from error
    return found


def interface(address: str) -> str | None:
    """The network interface whose first address this is."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as one:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(one, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def sources_of(address: str, peer_pid: int | None, peer_host: str | None) -> list[str] | None:
    """The addresses that a peer's connections to our own `address` can come from; None if that is not known.

    A process of this host in our network namespace connects from an address of ours, whatever it is called elsewhere."""
    with contextlib.suppress(OSError):  # it is gone, or another user's
        if peer_pid is not None and os.path.samefile(f"/proc/{peer_pid}/ns/net", "/proc/self/ns/net"):
            with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as one:
                one.connect((address, 9))  # sends nothing: it asks for the route
                return [address, one.getsockname()[0]]
    if peer_host is None:
        return None
    try:
        return [socket.gethostbyname(peer_host)]
    except OSError as error:
        raise TransportError(f"the peer's address {peer_host!r} is not known here: {error}") from error


def listeners() -> set[Listener]:
    """Every listening TCP socket of this process."""
    return {
        Listener(fd, os.fstat(one.fileno()).st_ino, *one.getsockname()[:2])
        for fd, one in _sockets()
        if _listening(one)
    }


def admit(listener: Listener, host: str, sources: Sequence[str] | None = None) -> None:
    """Only segments to the address `host` reach this listener from now on; only those from `sources`, if given.

    No sources at all means that nobody reaches it. Raises OSError."""
    with contextlib.closing(socket.socket(fileno=os.dup(listener.descriptor))) as one:
        _attach(one, _program(host, sources))


def impatient(listener: Listener, seconds: float) -> None:
    """A thread that sits in accept() on this listener looks up this often. Raises OSError."""
    whole = int(seconds)
    with contextlib.closing(socket.socket(fileno=os.dup(listener.descriptor))) as one:
        period = struct.pack("ll", whole, int((seconds - whole) * 1e6))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, period)


def hang_up(ports: Iterable[int]) -> None:
    """End every connection that came in through these ports: whoever reads from one reads its end at once."""
    wanted = set(ports)
    for _, one in _sockets():
        with contextlib.suppress(OSError):  # not connected any more, as it should be
            if one.getsockname()[1] in wanted and not _listening(one):
                one.shutdown(socket.SHUT_RDWR)


def _listening(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """TCP sockets of this process, each as (its descriptor, a duplicate that is closed when the loop goes on)."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            copy = os.dup(int(name))
        except OSError:  # closed by its owner since the list was made
            continue
        with contextlib.closing(socket.socket(fileno=copy)) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                yield int(name), one


def _program(host: str, sources: Sequence[str] | None) -> list[tuple[int, int, int, int]]:
    """(operation, skip if true, skip if false, operand): the last two are `let it in` and `drop it`."""
    senders = [int(ipaddress.IPv4Address(x)) for x in sources or ()]
    if sources is not None and not senders:
        return [(_RETURN, 0, 0, _NOTHING)]
    tail = 1 + len(senders) if senders else 0
    code = [
        (_LOAD_BYTE, 0, 0, _NET),
        (_SHIFT_RIGHT, 0, 0, 4),
        (_IF_EQUAL, 0, 3 + tail, 4),  # IP version
        (_LOAD_WORD, 0, 0, _NET + 16),
        (_IF_EQUAL, 0, 1 + tail, int(ipaddress.IPv4Address(host))),  # destination address
    ]
    if senders:
        code.append((_LOAD_WORD, 0, 0, _NET + 12))
        for i, sender in enumerate(senders):
            left = len(senders) - 1 - i
            code.append((_IF_EQUAL, left, 0 if left else 1, sender))  # source address
    return [*code, (_RETURN, 0, 0, _EVERYTHING), (_RETURN, 0, 0, _NOTHING)]


def _attach(one: socket.socket, program: list[tuple[int, int, int, int]]) -> None:
    code = b"".join(struct.pack("HBBI", *step) for step in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    one.setsockopt(
        socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(program), ctypes.addressof(buffer))
    )
