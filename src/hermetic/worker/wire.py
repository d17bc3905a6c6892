"""Bytes between processes: ZeroMQ with CURVE keys, one server key for the cluster, one client key for its members.

A peer without the cluster's keys gets nothing of ours: the handshake fails before a message is read, and is counted. (ZeroMQ
itself greets every connection with ten bytes that say ZMTP, and tells a peer that has the server's public key and a
wrong key of its own that it is refused.)
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from hermetic.handoff.messages import MAX_MESSAGE

QUEUE = 100_000  # messages that wait for a slow reader at most


class CurveKeys(msgspec.Struct, frozen=True):
    """Z85 text, 40 characters each. Made at start, handed to workers on their standard input, never in arguments."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    @classmethod
    def make(cls) -> CurveKeys:
        return cls(*zmq.curve_keypair(), *zmq.curve_keypair())

    def __repr__(self) -> str:
        return "CurveKeys(...)"


class _OnlyMembers:
    """ZAP's question "may this key connect?", answered by comparing with the cluster's client key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, _domain: str, key: bytes) -> bool:
        return key == self._public


def authenticator(context: zmq.Context[Any], keys: CurveKeys) -> ThreadAuthenticator:
    """Start answering for this context's servers. The caller stops it."""
    auth = ThreadAuthenticator(context)
    auth.start()
    auth.configure_curve_callback(domain="*", credentials_provider=_OnlyMembers(keys.client_public))
    return auth


def serve(socket: zmq.Socket[Any], keys: CurveKeys, host: str, port: int = 0) -> int:
    """Bind a ROUTER to this address and to no other; port 0 takes a free one. Returns the port. Raises zmq.ZMQError."""
    _common(socket)
    socket.router_handover = (
        True  # a member that reconnects keeps its identity, also before the old connection is found dead
    )
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = keys.server_public, keys.server_secret
    where = f"[{host}]" if ":" in host else host
    if ":" in host:
        socket.ipv6 = True
    if not port:
        return socket.bind_to_random_port(f"tcp://{where}")
    socket.bind(f"tcp://{where}:{port}")
    return port


def dial(socket: zmq.Socket[Any], keys: CurveKeys, address: str, identity: bytes) -> None:
    """Connect a DEALER. `identity` (see `new_identity`) names this end over reconnections."""
    _common(socket)
    if "[" in address:
        socket.ipv6 = True
    socket.routing_id = identity
    socket.reconnect_ivl, socket.reconnect_ivl_max = 100, 2000  # ms
    socket.curve_serverkey = keys.server_public
    socket.curve_publickey, socket.curve_secretkey = keys.client_public, keys.client_secret
    socket.connect(address)


FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def strangers(socket: zmq.Socket[Any]) -> zmq.Socket[Any]:
    """A socket that gets one message for every connection to `socket` that had not the cluster's keys."""
    return socket.get_monitor_socket(FAILED_HANDSHAKES)


def _common(socket: zmq.Socket[Any]) -> None:
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = QUEUE
    # What is too long is refused, said and counted where it is decoded; what is longer still is cut off unread.
    socket.maxmsgsize = 2 * MAX_MESSAGE
    # A cut link is found by TCP after many minutes; these find it in seconds and reconnect.
    socket.heartbeat_ivl, socket.heartbeat_timeout, socket.heartbeat_ttl = 2000, 8000, 10_000  # ms


def new_incarnation() -> bytes:
    return os.urandom(8)


def new_identity() -> bytes:
    """For one dialling socket: never the same twice, and not what ZeroMQ makes itself (that begins with 0)."""
    return b"h" + os.urandom(15)


def host_id() -> str:
    """Which machine, process namespace and network namespace this process belongs to. Two with the same can watch each other
    by pid, and reach each other without a network."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}:{os.stat('/proc/self/ns/net').st_ino}"
