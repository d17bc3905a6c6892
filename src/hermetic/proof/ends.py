"""What of a ticket can never matter again, and is forgotten, so that states which differ only in that are one."""

from __future__ import annotations

from typing import Any

from hermetic.handoff.decode import DecodeHandoff
from hermetic.handoff.machine import Machine
from hermetic.handoff.messages import Drained
from hermetic.handoff.prefill import PrefillHandoff
from hermetic.kv.slots import Slots
from hermetic.proof.codec import GIVEN_BACK, Data, encode
from hermetic.proof.halves import ENDED, DecodeView, PrefillView, key_of
from hermetic.proof.model import Known

ENDED_DATA = encode(ENDED)
DRAINED, ABORT = encode(Drained()), ("M", "Abort", "ended", "")


def quiet_ends(
    p: PrefillView, d: DecodeView, g: Known, up: Data, down: Data
) -> tuple[PrefillView, DecodeView, Known, Data, Data]:
    """What of a ticket can never matter again is forgotten. Each line says why; a test compares with and without.

    A half that has reported takes no cancel. A prefill that has ended answers an abort with *drained*, and everything else
    that it answers at all with *abort, drained* (`unknown.at_prefill`). A decode that has ended takes *drained*, and answers
    some messages with what a prefill that has ended as well only counts (`unknown.at_decode`)."""
    g = g._replace(
        cancel_p=g.cancel_p and g.report_p is None,
        cancel_d=g.cancel_d and (g.report_d is None or d.stage == "entered"),
    )
    p_over = p.machine is None and p.ended is not None and p.submitted
    d_over = d.stage == "over" and d.machine is None
    d_waits = d.machine is not None and machine_state(d.machine) in ("DRAINING", "QUARANTINED")
    if p_over:
        completed = p.ended[1] == "Completed"
        p = PrefillView(
            ended=p.ended if completed else ENDED_DATA, submitted=True, report=p.report and ENDED_DATA
        )
        if d_over or d_waits:
            up = (DRAINED,) if d_waits and DRAINED in up else ()
        if d_over:
            down = ()
        elif d_waits:
            answered = [
                x
                for x in down
                if x[1] == "Abort" or (not completed and x[1] in ("Grant", "Credit", "Resend"))
            ]
            down = (ABORT,) if answered else ()
    if p.machine is not None and machine_state(p.machine) in ("DRAINING", "STUCK"):
        p = p._replace(machine=without(p.machine, PREFILL_OVER), ready=0)
    if d_waits:
        d = d._replace(machine=without(d.machine, DECODE_OVER))
    if d_over:
        d = DecodeView(stage="over", entered=d.entered, report=d.report and ENDED_DATA)
    if p_over and d_over:
        d, g = d._replace(entered=False), g._replace(hurt=False)
    return p, d, g, up, down


def machine_state(machine: Data) -> str:
    """The name of an encoded machine's state."""
    return next(x[2] for x in machine if isinstance(x, tuple) and x[:1] == ("E",))


def _over(blank: Machine[Any], names: set[str]) -> dict[int, Data]:
    kept = sorted(vars(blank).keys() - GIVEN_BACK)
    return {kept.index(n): encode(getattr(blank, n)) for n in names}


def without(machine: Data, blanks: dict[int, Data]) -> Data:
    return tuple(blanks.get(i, x) for i, x in enumerate(machine))


# Attributes that no row of a half that is over reads: what was announced, credited and verified is history then.
PREFILL_OVER = _over(
    PrefillHandoff(key_of(0)),
    {"_grant", "_ready", "_next", "_landed", "_again", "_resent", "_credits", "_numbers", "_confirmed", "_announced",
     "_computed", "_tokens", "_pages", "_batches"},
)  # fmt: skip
DECODE_OVER = _over(
    DecodeHandoff(key_of(0), 1, 1, Slots(1)),
    {"_credited", "_used", "_outstanding", "_resent", "_verified", "_batches", "_complete"},
)
