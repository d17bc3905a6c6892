"""What a machine asks of the process around it. Performed in order, each exactly once."""

from __future__ import annotations

from dataclasses import dataclass

from hermetic.handoff.messages import HandoffMessage
from hermetic.handoff.outcome import Outcome
from hermetic.kv.slots import SlotUse


@dataclass(frozen=True)
class Send:
    """Give this message to the other half."""

    message: HandoffMessage


@dataclass(frozen=True)
class Enqueue:
    """Prefill: request and grant are both here; queue the prompt for computing."""


@dataclass(frozen=True)
class Write:
    """Prefill: write these pages (index in the prompt -> slot) as batch `batch`; answer with `wrote`."""

    batch: int
    pages: tuple[tuple[int, SlotUse], ...]


@dataclass(frozen=True)
class StopComputing:
    """Prefill: take the prompt out of the queue or the running batch; its pages stay until CloseLeases."""


@dataclass(frozen=True)
class Copy:
    """Decode: copy slot -> page `page`, hash the page copied to, answer with `copied`."""

    page: int
    slot: SlotUse


@dataclass(frozen=True)
class Enter:
    """Decode: every page is tagged and verified, counts agree: the request may enter a batch."""

    state: bytes


@dataclass(frozen=True)
class CloseLeases:
    """Every lease that this half holds on *its own pages* for the ticket can be closed now."""


@dataclass(frozen=True)
class Report:
    """This half has ended for its client; tell the gateway. What it still holds for the other half's sake stays."""

    outcome: Outcome


@dataclass(frozen=True)
class Forget:
    """Nothing is held for this ticket any more: no lease, no slot, no write. The record can go."""


Action = Send | Enqueue | Write | StopComputing | Copy | Enter | CloseLeases | Report | Forget
