"""What sessions need of whatever carries their bytes: lines to the other ends, and a watch on processes.

ZeroMQ carries them in production (`zmq_wire.py`), a network on virtual time in the simulator. The one thing to know: a line
promises nothing. What is put on it may be lost, come twice, late or out of order; `link.py` makes a session of it.
"""

from __future__ import annotations

from typing import Protocol

from hermetic.worker.core import Connection


class Line(Protocol):
    """One way to one other end."""

    def put(self, raw: bytes) -> None:
        """Send it. Never waits and never fails: what cannot be taken now is lost, and the link says it again."""

    def close(self) -> None:
        """Nothing more is sent, and nothing that still comes over it is handed on. Closing twice is nothing."""


class Watch(Protocol):
    """On one particular process of this host."""

    def ended(self) -> bool:
        """True once that process can run no more code, and from then on."""

    def close(self) -> None:
        """Watch no more."""


class Wire(Protocol):
    """Opens lines for one worker. What comes in is handed to `Sessions.take`."""

    def dial(self, address: str, connection: Connection, backlog: int | None = None) -> Line:
        """A line to whoever listens at `address` (tcp://HOST:PORT), also if nobody does yet, and again after it broke.

        What comes back over it is taken as `connection`'s, never before this returns. At most `backlog` messages wait
        while nobody reads there (None: very many). Raises OSError when there can be no such address."""

    def watch(self, pid: int) -> Watch:
        """Raises OSError when there is no such process (any more)."""
