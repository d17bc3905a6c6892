"""Bytes between processes: ZeroMQ with CURVE keys, one server key for the cluster, one client key for its members.

A peer without the client key gets no answer of any kind: the handshake fails before a message is read.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from hermetic.handoff.messages import MAX_MESSAGE, PROTOCOL, Key
from hermetic.worker import messages as m

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


def serve(socket: zmq.Socket[Any], keys: CurveKeys, host: str) -> int:
    """Bind a ROUTER to a free port of this address and to no other; returns the port."""
    _common(socket)
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = keys.server_public, keys.server_secret
    return socket.bind_to_random_port(f"tcp://{host}")


def dial(socket: zmq.Socket[Any], keys: CurveKeys, address: str) -> None:
    """Connect a DEALER to a worker."""
    _common(socket)
    socket.curve_serverkey = keys.server_public
    socket.curve_publickey, socket.curve_secretkey = keys.client_public, keys.client_secret
    socket.connect(address)


def _common(socket: zmq.Socket[Any]) -> None:
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = QUEUE
    socket.maxmsgsize = MAX_MESSAGE


def new_incarnation() -> bytes:
    return os.urandom(8)


class Outgoing:
    """Numbers the envelopes of one connection."""

    def __init__(self, incarnation: bytes) -> None:
        self._incarnation, self._sequence = incarnation, 0

    def wrap(self, key: Key | None, body: m.Body) -> bytes:
        self._sequence += 1
        return m.encode(m.Envelope(PROTOCOL, self._incarnation, self._sequence, key, body))


class Incoming:
    """What has come over one connection: a repeated or older envelope, or another incarnation, is stale."""

    def __init__(self) -> None:
        self._incarnation: bytes | None = None
        self._sequence = 0

    def accept(self, envelope: m.Envelope) -> bool:
        if self._incarnation is None:
            self._incarnation = envelope.incarnation
        if envelope.incarnation != self._incarnation or envelope.sequence <= self._sequence:
            return False
        self._sequence = envelope.sequence
        return True
