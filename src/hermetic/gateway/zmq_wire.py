"""The gateway's sockets: one ROUTER at which workers register, one DEALER to each of them.

Implements `wire.GatewayWire`. The one thing to know: nothing waits for a slow reader. What a queue does not take is dropped,
and said again by the link or by whoever needs it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq
import zmq.asyncio

from hermetic.gateway.tasks import Tasks
from hermetic.gateway.wire import Door
from hermetic.worker import wire


class Dialled:
    """A line to a worker."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket

    def put(self, raw: bytes) -> None:
        if not self._socket.closed:
            _forget(self._socket.send(raw, zmq.NOBLOCK))

    def close(self) -> None:
        self._socket.close(linger=0)


class ZmqWire:
    """Every socket of one gateway."""

    def __init__(self, keys: wire.CurveKeys) -> None:
        self._keys = keys
        self._context = zmq.asyncio.Context()
        self._auth = wire.authenticator(self._context, keys)
        self._tasks = Tasks()

    async def listen(self, host: str, port: int, door: Door) -> str:
        """Bind the control port to this address and no other. Raises zmq.ZMQError."""
        router = self._context.socket(zmq.ROUTER)
        try:
            bound = wire.serve(router, self._keys, host, port)
        except zmq.ZMQError:
            router.close(linger=0)
            raise
        self._tasks.spawn(self._refused(wire.strangers(router), door))  # type: ignore[arg-type]
        self._tasks.spawn(self._door(router, door))
        return f"tcp://[{host}]:{bound}" if ":" in host else f"tcp://{host}:{bound}"

    def dial(self, address: str, take: Callable[[bytes], None]) -> Dialled:
        socket = self._context.socket(zmq.DEALER)
        try:
            wire.dial(socket, self._keys, address, wire.new_identity())
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise OSError(str(error)) from error
        self._tasks.spawn(self._read(socket, take))
        return Dialled(socket)

    async def close(self) -> None:
        await self._tasks.cancel()
        self._auth.stop()
        self._context.destroy(linger=0)

    async def _refused(self, monitor: zmq.asyncio.Socket, door: Door) -> None:
        """Connections that had not the cluster's keys. Nothing is known of them, not even where they came from."""
        while True:
            await monitor.recv_multipart()
            door.keyless()

    async def _door(self, router: zmq.asyncio.Socket, door: Door) -> None:
        """Only members of the cluster get this far: others fail at the key."""
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 2:
                door.malformed(len(frames))
                continue
            answer = door.knock(frames[1])
            if answer is not None:
                _forget(router.send_multipart([frames[0], answer], zmq.NOBLOCK))

    async def _read(self, socket: zmq.asyncio.Socket, take: Callable[[bytes], None]) -> None:
        while not socket.closed:
            try:
                raw = await socket.recv()
            except zmq.ZMQError:
                return  # it was closed: the worker has ended
            take(raw)


def _forget(sent: object) -> None:
    """A message that could not be queued now is said again later by whoever needs it: its error is nobody's."""
    if isinstance(sent, asyncio.Future) and sent.done() and not sent.cancelled():
        sent.exception()
