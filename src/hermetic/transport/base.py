"""What a transport is: one side owns landing slots, the other writes whole pages into them.

Contract, the same for every transport and held by one conformance suite (tests/transport/).

- Only a landing segment is ever addressable by a peer, never a pool; one segment, and whatever serves it, for each peer.
- `Sender.write` starts a batch and `Sender.poll` says how each ended. `ok` means that every byte is in its slot.
  `stopped` means that no byte of the batch can arrive any more. A batch that is neither is *in doubt*: its slots must not
  be given to anybody until `Receiver.fence` has said True. A transport's own time-out never makes a batch stopped.
- `Receiver.fence` returns True only when no byte of that peer can reach memory that is still in use, whatever the peer
  does. After True the receiver is spent: close it, and make a new one if the peer is to write again.
- Order between batches, and between pages of a batch, is not promised. Nothing here knows what a page means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Page = npt.NDArray[np.uint8]

WRITE_TIMEOUT_S = 10.0
"""A batch that has not ended after this long is in doubt: its peer is frozen or gone, or the network is."""


class TransportError(RuntimeError):
    """A transport is not installed, or a segment cannot be made, opened or written; the message says what to do."""


class Written(NamedTuple):
    """How a batch ended. Neither ok nor stopped: its bytes may still arrive, only a fence ends that."""

    batch: int
    ok: bool
    stopped: bool


class Receiver(Protocol):
    """Decode's side for one peer. `memory` uint8 [slots, stride]."""

    memory: Page

    def descriptor(self) -> str:
        """What the peer needs to open this segment; not a secret that opens anything else."""
        ...

    def fence(self) -> bool:
        """See above. Takes at most a tenth of a second; False means `not yet`, ask again."""
        ...

    def close(self) -> None:
        """Let go of everything. What the peer still sends reaches nothing that is in use."""
        ...


class Sender(Protocol):
    """Prefill's side for one peer."""

    def write(self, batch: int, pages: Sequence[tuple[Page, int]]) -> None:
        """Start writing pages (uint8 [stride] each) into slots. Returns soon; never raises for what the peer did.

        A batch with a slot that does not exist, or twice the same, is refused whole: not ok, and stopped.

        The sources must not change until `poll` reports the batch, or `close` has returned."""
        ...

    def poll(self) -> list[Written]:
        """Batches that have ended since the last call, each exactly once."""
        ...

    def close(self) -> None:
        """Let go: no source is read after this returns. Says nothing about bytes that are on their way."""
        ...


class Transport(Protocol):
    """What one worker process moves bytes with. Receivers and senders are per peer."""

    name: str
    """shm, mooncake or nixl."""

    def receiver(
        self, slots: int, stride: int, peer_pid: int | None, peer_host: str | None = None
    ) -> Receiver:
        """Landing slots for one peer. `peer_pid` is its process if that runs on this host, else None.

        `peer_host` is the IPv4 address that its connections come from, if known: no other will be let in.
        Raises TransportError."""
        ...

    def sender(self, descriptor: str, stride: int) -> Sender:
        """Open a peer's landing slots for writing. Raises TransportError."""
        ...

    def close(self) -> None: ...


def usable(slots: Sequence[int], count: int) -> bool:
    """Whether these are different slots of a segment that has `count`."""
    return len(set(slots)) == len(slots) and all(0 <= slot < count for slot in slots)
