"""A worker's sockets: one ROUTER that others dial, one DEALER for each line that we open.

Implements `lines.Wire`. The one thing to know: nothing here knows of sessions. Bytes that came are handed to `take` with the
name of the connection and, for those who dialled us, the way back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import zmq

from hermetic.transport.process import ProcessWatch
from hermetic.worker import wire
from hermetic.worker.core import Connection
from hermetic.worker.lines import Line

MAX_READ = 256  # messages taken in before the next step at most, and as many again over our own lines

log = logging.getLogger("hermetic.worker")

Take = Callable[[Connection, bytes, Line | None], None]


class Dialled:
    """A line that we opened."""

    def __init__(self, wire_: ZmqWire, socket: zmq.Socket[Any]) -> None:
        self._wire, self._socket = wire_, socket

    def put(self, raw: bytes) -> None:
        if not self._socket.closed:
            _put(self._socket, [raw])

    def close(self) -> None:
        self._wire.hang_up(self._socket)


class Answer:
    """The way back to one who dialled us."""

    def __init__(self, router: zmq.Socket[Any], identity: bytes) -> None:
        self._router, self._identity = router, identity

    def put(self, raw: bytes) -> None:
        _put(self._router, [self._identity, raw])

    def close(self) -> None:
        """Theirs to close."""


class ZmqWire:
    """Every socket of one worker. Raises zmq.ZMQError when its port cannot be had.

    `poller` may be given more to look at."""

    def __init__(self, keys: wire.CurveKeys, host: str, port: int) -> None:
        self._keys = keys
        self._context: zmq.Context[Any] = zmq.Context()
        self._auth = wire.authenticator(self._context, keys)
        self._router = self._context.socket(zmq.ROUTER)
        self.port = wire.serve(self._router, keys, host, port)
        self._keyless = wire.strangers(self._router)
        self._dialled: dict[zmq.Socket[Any], Connection] = {}
        self.poller = zmq.Poller()
        self.poller.register(self._router, zmq.POLLIN)
        self.poller.register(self._keyless, zmq.POLLIN)

    def dial(self, address: str, connection: Connection, backlog: int | None = None) -> Dialled:
        socket = self._context.socket(zmq.DEALER)
        try:
            wire.dial(socket, self._keys, address, wire.new_identity())
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise OSError(str(error)) from error
        if backlog is not None:
            socket.sndhwm = backlog
        self._dialled[socket] = connection
        self.poller.register(socket, zmq.POLLIN)
        return Dialled(self, socket)

    def hang_up(self, socket: zmq.Socket[Any]) -> None:
        """Close one of the sockets that were dialled."""
        if self._dialled.pop(socket, None) is not None:
            self.poller.unregister(socket)
            socket.close(linger=0)

    def watch(self, pid: int) -> ProcessWatch:
        return ProcessWatch(pid)

    def read(
        self,
        ready: dict[Any, int],
        take: Take,
        complain: Callable[[str], None],
        keyless: Callable[[], None],
    ) -> bool:
        """Hand on what has come; `ready` is what the poller said. False when nothing had."""
        read = 0
        if self._router in ready:
            while read < MAX_READ and (frames := _next(self._router)) is not None:
                read += 1
                if len(frames) != 2:
                    complain("a message of another number of frames")
                    continue
                take(b"r" + frames[0], frames[1], Answer(self._router, frames[0]))
        for socket, connection in list(self._dialled.items()):
            while socket in ready and not socket.closed and read < 2 * MAX_READ:
                frames = _next(socket)
                if frames is None:
                    break
                read += 1
                take(connection, frames[0], None)
        while self._keyless in ready and _next(self._keyless) is not None:
            keyless()
        return read > 0

    def close(self) -> None:
        self._auth.stop()
        self._context.destroy(linger=0)


def _next(socket: zmq.Socket[Any]) -> list[bytes] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


def _put(socket: zmq.Socket[Any], frames: list[bytes]) -> None:
    try:
        socket.send_multipart(frames, zmq.NOBLOCK)
    except zmq.Again:
        return  # its queue is full; the link says it again
    except zmq.ZMQError as error:
        log.debug("a message could not be sent: %s", error)
