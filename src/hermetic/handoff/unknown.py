"""What a half says about a ticket that has no machine here: it has ended, has not come yet, or is nobody's.

Pure, like the machines: what the half remembers and the message in, what to do out. The one thing to know: an abort is
always answered with *drained*, and remembered, so that nothing that comes later can start what was ended.
"""

from __future__ import annotations

from typing import NamedTuple

from hermetic.handoff.messages import (
    Abort,
    Ack,
    Complete,
    Credit,
    Drained,
    Grant,
    HandoffMessage,
    Landed,
    Resend,
    Started,
)
from hermetic.handoff.outcome import Aborted, Completed, Outcome

UNKNOWN = Abort("unknown_ticket", "decode does not know this attempt, or not any more")


class Answer(NamedTuple):
    """`send` these; `begin` a machine that takes the message; `remember` how the ticket ended; `stale`: only count it."""

    send: tuple[HandoffMessage, ...] = ()
    begin: bool = False
    remember: Outcome | None = None
    stale: bool = False


def at_prefill(ended: Outcome | None, message: HandoffMessage) -> Answer:
    """Decode's message for a ticket without a machine at prefill, which ended as `ended` (None: it was not here yet)."""
    match message:
        case Abort(code=code, reason=reason):
            # Nothing of it is in flight and, being remembered as ended, nothing will start.
            return Answer(send=(Drained(),), remember=Aborted(code, reason) if ended is None else None)
        case Grant() if ended is None:
            return Answer(begin=True)
        case Grant() | Credit() | Resend() if ended is not None and not isinstance(ended, Completed):
            # It missed how this half ended.
            return Answer(send=(Abort(ended.code, ended.reason), Drained()))
        case _:
            return Answer(stale=True)


def at_decode(entered: bool, message: HandoffMessage) -> Answer:
    """Prefill's message for a ticket without a machine at decode. `entered`: its request went on from here."""
    if not isinstance(message, Started | Landed | Complete):
        return Answer(stale=True)
    # It does not know that this has ended here: what it asks with is what it missed.
    return Answer(send=(Ack() if entered else UNKNOWN,), stale=True)


__all__ = ["UNKNOWN", "Answer", "at_decode", "at_prefill"]
