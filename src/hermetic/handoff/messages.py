"""What the two halves say to each other. Typed, versioned, bounded; no pickle, no field that the peer may leave out."""

from __future__ import annotations

import msgspec

PROTOCOL = 2
MAX_MESSAGE = 64 * 1024 * 1024  # bytes; a longer one is not decoded


class Key(msgspec.Struct, frozen=True, array_like=True):
    """One attempt of one request. The gateway mints tickets (16 random bytes) and never reuses an attempt."""

    ticket: bytes
    attempt: int

    def __str__(self) -> str:
        return f"{self.ticket.hex()[:12]}/{self.attempt}"


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of everything that travels under a ticket."""


# decode -> prefill
class Grant(Message, frozen=True, tag=True, array_like=True):
    """Decode holds `pages` pages for a prompt of `tokens` tokens; prefill may start."""

    tokens: int
    pages: int


class Credit(Message, frozen=True, tag=True, array_like=True):
    """Landing slots number first, first+1, ... ever granted to this ticket; each is (slot, use).

    Cumulative: it holds every one from the first in which nothing has landed, so that a repeated or late credit is
    recognised by its numbers and a lost one is repaired by the next."""

    first: int
    slots: tuple[tuple[int, int], ...]


class Resend(Message, frozen=True, tag=True, array_like=True):
    """Page `page` did not verify: send it once more, into this slot."""

    page: int
    slot: tuple[int, int]


class Ack(Message, frozen=True, tag=True, array_like=True):
    """Every page is tagged and verified: prefill may close its send leases."""


# prefill -> decode
class Started(Message, frozen=True, tag=True, array_like=True):
    """Prefill holds its pages for this ticket and can use slots."""

    pages: int


class Landed(Message, frozen=True, tag=True, array_like=True):
    """Batch `sequence` (from 1) is written: pages (index in the prompt, slot, use). Repeated as it was."""

    sequence: int
    pages: tuple[tuple[int, int, int], ...]


class Complete(Message, frozen=True, tag=True, array_like=True):
    """All of the prompt is computed and announced, in batches 1 to `batches`. `state` is what is not KV (first tokens),
    under the same ticket."""

    tokens: int
    pages: int
    batches: int
    state: bytes


class Drained(Message, frozen=True, tag=True, array_like=True):
    """No write for this ticket and attempt is in flight, and none will start."""


# both ways
class Abort(Message, frozen=True, tag=True, array_like=True):
    """The sender's half has ended. `code` and `reason` are the first cause, for the client."""

    code: str
    reason: str


HandoffMessage = Grant | Credit | Resend | Ack | Started | Landed | Complete | Drained | Abort
