"""What a transport is: one side owns landing slots, the other writes whole pages into them.

Contract. Only the landing segment is ever addressable by the peer, never a pool; one segment per peer. `Sender.write`
starts a batch and `Sender.poll` says how each ended; until a batch is reported, the receiver must assume that bytes
may still arrive. `Receiver.fence` returns True only when no byte of that peer can arrive any more, whatever it does.
Order between batches is not promised. Nothing here knows what a page means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Page = npt.NDArray[np.uint8]


class TransportError(RuntimeError):
    """A segment cannot be made, opened or written; the message says what to do."""


class Written(NamedTuple):
    """How a batch ended. Not ok and not stopped: its bytes may still arrive, only a fence ends that."""

    batch: int
    ok: bool
    stopped: bool


class Receiver(Protocol):
    """Decode's side for one peer. `memory` uint8 [slots, stride]."""

    memory: Page

    def descriptor(self) -> str:
        """What the peer needs to open this segment; not a secret that opens anything else."""
        ...

    def fence(self) -> bool: ...

    def close(self) -> None: ...


class Sender(Protocol):
    """Prefill's side for one peer."""

    def write(self, batch: int, pages: Sequence[tuple[Page, int]]) -> None:
        """Start writing pages (uint8 [stride] each) into slots. The sources must not change until `poll` reports."""
        ...

    def poll(self) -> list[Written]: ...

    def close(self) -> None: ...
