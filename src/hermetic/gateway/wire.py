"""What the gateway needs of whatever carries its bytes: a port at which workers register, and lines to them.

ZeroMQ carries them in production (`zmq_wire.py`), a network on virtual time in the simulator. A line (`worker/lines.py`)
promises nothing: `worker/link.py` makes sessions of what comes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hermetic.worker.lines import Line

Entropy = Callable[[int], bytes]
"""So many random bytes. `os.urandom`, but for the simulator: there a run is a function of its seed."""


class Door(Protocol):
    """Who answers at the control port (`members.Members`)."""

    def knock(self, raw: bytes) -> bytes | None:
        """One message of somebody with the cluster's keys; returns what to answer."""

    def malformed(self, parts: int) -> None:
        """Somebody with the cluster's keys sent a message of another number of parts than there may be."""

    def keyless(self) -> None:
        """A connection without the cluster's keys was refused."""


class GatewayWire(Protocol):
    """Opens the port and the lines of one gateway. Everything is called, and calls back, in one event loop."""

    async def listen(self, host: str, port: int, door: Door) -> str:
        """Open the control port and hand what comes there to `door`; returns what workers dial, tcp://HOST:PORT.

        Raises what the carrier raises when the port cannot be had (ZeroMQ: zmq.ZMQError)."""

    def dial(self, address: str, take: Callable[[bytes], None]) -> Line:
        """A line to the worker at `address`, also if nobody is there yet, and again after it broke. `take` gets what comes
        back, never before this returns and never after the line was closed. Raises OSError when there can be no such
        address."""

    async def close(self) -> None:
        """Close the port and every line."""
