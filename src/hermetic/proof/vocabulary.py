"""The words of the abstract protocol: sorts, phases, relations, and how a person says each.

The one thing to know: a relation is named by what it says in a guard (`granted(u, t)`, `t in quiet`), and its sentence is
what a counterexample prints.
"""

from __future__ import annotations

from dataclasses import dataclass

PREFILL = ("new", "has_request", "has_grant", "queued", "sending", "complete", "draining", "stuck", "ended")
DECODE = ("none", "reserved", "landing", "draining", "quarantined", "entered", "ended")
BEFORE = PREFILL[:5]
ACTIVE = PREFILL[:6]
OPEN = ("reserved", "landing")
WAITING = ("draining", "quarantined")
GROUPS = {"BEFORE": BEFORE, "ACTIVE": ACTIVE, "OPEN": OPEN, "WAITING": WAITING}


@dataclass(frozen=True)
class Relation:
    """`sorts` of its places, and how a person says that it holds; {0}, {1}.. are its places."""

    sorts: tuple[str, ...]
    says: str


def _r(sorts: str, says: str) -> Relation:
    return Relation(tuple(sorts.split()), says)


# What never changes: which slot a use is of, whose an attempt is, what a page of a prompt should contain.
FUNCTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "slot": (("use",), "slot"),
    "segment": (("use",), "segment"),
    "owner": (("segment",), "decoder"),
    "prefiller": (("attempt",), "prefiller"),
    "decoder": (("attempt",), "decoder"),
    "lineage": (("attempt", "index"), "rows"),
}
PHASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "prefill": ("attempt", PREFILL),
    "decode": ("attempt", DECODE),
}
FIXED = {"needed": _r("attempt index", "page {1} belongs to the prompt of {0}")}

MESSAGES: dict[str, Relation] = {
    "say_grant": _r("attempt", "decode has said: pages are reserved for {0}"),
    "say_started": _r("attempt", "prefill has said: pages are taken for {0}"),
    "say_credit": _r("attempt use", "decode has said: {0} may write into {1}"),
    "say_resend": _r("attempt index use", "decode has said: page {1} of {0} once more, into {2}"),
    "say_landed": _r("attempt index use", "prefill has said: page {1} of {0} is in {2}"),
    "say_complete": _r("attempt", "prefill has said: everything of {0} is written"),
    "say_ack": _r("attempt", "decode has said: everything of {0} is verified"),
    "say_drained": _r("attempt", "prefill has said: no write for {0} is in flight, none will start"),
}
RELATIONS: dict[str, Relation] = {
    # decode's pages
    "leased": _r("page attempt", "decode page {0} is leased by {1}"),
    "table": _r("attempt index page", "decode page {2} is in the page table of {0}, for page {1}"),
    "holds": _r("page rows", "decode page {0} contains {1}"),
    "verified": _r("attempt index", "page {1} of {0} is verified and tagged"),
    "copying": _r(
        "attempt index use page", "a copy of page {1} of {0} from {2} to decode page {3} is to be made"
    ),
    "checking": _r(
        "attempt index use page", "page {1} of {0} is copied from {2} to decode page {3} and not hashed yet"
    ),
    # decode's slots
    "used": _r("use", "{0} has been granted, now or before"),
    "given": _r("use attempt", "{0} was granted to {1} and to nobody else"),
    "granted": _r("use attempt", "{0} is granted to {1}"),
    "quarantined": _r("use", "{0} is out of use"),
    "credited": _r("attempt use", "decode gave {1} to {0} as credit"),
    "asked": _r("attempt index use", "decode waits for page {1} of {0} once more, in {2}"),
    "lies": _r("slot rows", "{0} contains {1}"),
    "fenced": _r("segment", "{0} is fenced: nothing that is written to it arrives"),
    # what decode knows
    "heard": _r("attempt", "decode knows that prefill has written everything of {0}"),
    "quiet": _r("attempt", "decode knows that prefill has drained {0}"),
    "went_on": _r("attempt", "the request of {0} has entered a batch, now or before"),
    # prefill's pages
    "kept": _r("source attempt", "source page {0} is held for {1}"),
    "source": _r("attempt index source", "source page {2} is in the page table of {0}, for page {1}"),
    "contains": _r("source rows", "source page {0} contains {1}"),
    "final": _r("source", "source page {0} is written, and stays as it is until nobody holds it"),
    "ready": _r("attempt index", "page {1} of {0} is computed and leased for sending"),
    # prefill's writes
    "known": _r("attempt use", "prefill has {1} as credit for {0}"),
    "spent": _r("attempt use", "prefill has begun a write of {0} into {1}"),
    "writing": _r(
        "attempt index use source",
        "a write of page {1} of {0}, from source page {3}, may still arrive in {2}",
    ),
    "doubtful": _r("attempt use", "the write of {0} into {1} has failed and may still be running"),
    "wrote": _r("attempt index use", "the write of page {1} of {0} into {2} has ended well"),
    "written": _r("attempt index", "page {1} of {0} is written and not asked for again"),
    **MESSAGES,
}
CONTENTS = ("holds", "lies", "contains")  # r[x] is the set of rows that lie in x
SORTS = ("attempt", "index", "page", "source", "use", "slot", "segment", "rows", "prefiller", "decoder")
