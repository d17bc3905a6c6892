"""What a recording of the protocol consists of: one record a line, JSON, in the order in which its process did things.

The one thing to know: a record says what happened and never with which content. No token, no byte of KV and nothing of
what travels besides it stands here: `Complete` is recorded with an empty state, `computed` without arguments.

Every record names its process by `p`, its incarnation. Processes that share a file append whole lines to it.
"""

from __future__ import annotations

import msgspec

from hermetic.handoff.messages import HandoffMessage

VERSION = 1
KEPT_OF_A_REASON = 200  # characters

Use = tuple[int, int]  # slot, use


class Record(msgspec.Struct, frozen=True, tag_field="k", omit_defaults=True):
    """Base of all. `p` comes first, so that a line can be given to its process unread."""

    p: str


class Process(Record, frozen=True, tag="process"):
    """First of each process: who it is, and what it has."""

    version: int
    worker: str
    role: str  # prefill | decode | unified
    pid: int
    page_size: int  # tokens
    pages: int  # of its pool
    slots: int  # that it offers to each peer


class End(Record, frozen=True, tag="end"):
    """Last of a process that ended in peace. Without it the process was killed, and what it did last is not known."""


# ------------------------------------------------------------------------------------------- peers and segments
class Segment(Record, frozen=True, tag="segment"):
    """Decode: landing slots for one prefill process."""

    peer: str
    segment: int
    slots: int


class Fenced(Record, frozen=True, tag="fenced"):
    """Decode: nothing can reach memory in use through this segment any more; its slots come back."""

    segment: int


class Opened(Record, frozen=True, tag="opened"):
    """Prefill: it can write to this segment of a decode process."""

    peer: str
    segment: int


class Closed(Record, frozen=True, tag="closed"):
    """Prefill: its sender to this decode process is closed. `gone`: because that process has ended."""

    peer: str
    gone: bool = False


class Lost(Record, frozen=True, tag="lost"):
    """A session with a peer is over; what was on its way is lost."""

    peer: str
    why: str = ""


# ----------------------------------------------------------------------------------------------------- machines
class Sent(msgspec.Struct, frozen=True, tag="send", array_like=True):
    message: HandoffMessage


class Enqueued(msgspec.Struct, frozen=True, tag="enqueue", array_like=True):
    pass


class Writes(msgspec.Struct, frozen=True, tag="write", array_like=True):
    batch: int
    pages: tuple[tuple[int, int, int], ...]  # page, slot, use


class Stopped(msgspec.Struct, frozen=True, tag="stop", array_like=True):
    pass


class Copies(msgspec.Struct, frozen=True, tag="copy", array_like=True):
    page: int
    slot: int
    use: int


class Entered(msgspec.Struct, frozen=True, tag="enter", array_like=True):
    pass


class LeasesClosed(msgspec.Struct, frozen=True, tag="close", array_like=True):
    pass


class Reported(msgspec.Struct, frozen=True, tag="report", array_like=True):
    outcome: str  # Completed | Refused | Failed | Aborted
    code: str = ""
    reason: str = ""


class Forgotten(msgspec.Struct, frozen=True, tag="forget", array_like=True):
    pass


Done = (
    Sent | Enqueued | Writes | Stopped | Copies | Entered | LeasesClosed | Reported | Forgotten
)  # an action of a machine


class Begin(Record, frozen=True, tag="begin"):
    """A machine is made, for its ticket and attempt, towards this process."""

    key: str
    peer: str


class Step(Record, frozen=True, tag="step"):
    """A machine took an event: `b` is its state before, `s` the state after. `m`: the message, when the event is one."""

    key: str
    e: str
    b: str
    s: str
    m: HandoffMessage | None = None
    a: tuple[bool | int | str, ...] = ()
    do: tuple[Done, ...] = ()


class Unknown(Record, frozen=True, tag="unknown"):
    """A message for a ticket without a machine here, and what was said about it."""

    key: str
    peer: str
    m: HandoffMessage
    send: tuple[HandoffMessage, ...] = ()


class Forged(Record, frozen=True, tag="forged"):
    """Tests only: somebody who is no worker of ours put this message on the wire, as if it were from `p`."""

    key: str
    m: HandoffMessage


# ----------------------------------------------------------------------------------------- pages, slots and bytes
class SlotsChanged(Record, frozen=True, tag="slots"):
    """Decode: grant, quarantine, consume, release or fence (then `key` is empty)."""

    segment: int
    what: str
    uses: tuple[Use, ...]
    key: str = ""


class PagesChanged(Record, frozen=True, tag="pages"):
    """take (they were free), share, drop (one hold of this kind fewer) or quarantine. `owner` is the ticket's short name."""

    what: str
    kind: str
    pages: tuple[int, ...]
    owner: str = ""


class Write(Record, frozen=True, tag="write"):
    """Prefill: a batch is given to the transport. pages: index in the prompt, page of the pool, slot."""

    key: str
    batch: int
    pages: tuple[tuple[int, int, int], ...]


class Written(Record, frozen=True, tag="written"):
    """Prefill: the transport says how a batch ended."""

    key: str
    batch: int
    ok: bool
    stopped: bool


class Copying(Record, frozen=True, tag="copying"):
    """Decode: these are copied out of their slots. pages: ticket, index, page of the pool, slot, use."""

    pages: tuple[tuple[str, int, int, int, int], ...]


class Verified(Record, frozen=True, tag="verified"):
    """Decode: these copies were checked (or believed, with --verify tags). pages: ticket, index, page of the pool, good."""

    pages: tuple[tuple[str, int, int, bool], ...]


AnyRecord = (
    Process | End | Segment | Fenced | Opened | Closed | Lost | Begin | Step | Unknown | Forged
    | SlotsChanged | PagesChanged | Write | Written | Copying | Verified
)  # fmt: skip
