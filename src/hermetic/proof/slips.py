"""Faults of the field as slips in the abstract protocol: a guard that is missing, an effect too early.

Names are those of `mutants/registry.py`. The one thing to know: not every fault has a slip here. What only hangs (a lost
signal), and what is wrong in a gateway or a pool, has no words in this protocol; explorer and simulator find those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hermetic.proof.abstract import ACTIONS, Action


@dataclass(frozen=True)
class Slip:
    """In `action`, the line `was` becomes `now` ("" takes it out)."""

    says: str
    action: str
    was: str
    now: str = ""


_ALL_VERIFIED = "all(verified(t, i) for b, i in needed if b == t)"
_ENDS_BY_PROOF = "quiet(t) or all(fenced(segment(u)) for u, b in granted if b == t)"
_NO_WRITE_BELIEVED = "not any(b == t and not doubtful(t, u) for b, i, u, q in writing)"

SLIPS: dict[str, Slip] = {
    "admit-unless-finished": Slip(
        "a request enters when nothing says that it has ended, whether or not its pages were accepted",
        "enter", _ALL_VERIFIED, "prefill[t] != 'ended'"),
    "trust-complete-count": Slip(
        "prefill's complete is taken for all pages being there", "enter", _ALL_VERIFIED),
    "release-at-abort": Slip(
        "an abort gives the slots back at once, with a write in flight", "decode_ends", _ENDS_BY_PROOF),
    "release-on-other-failure": Slip(
        "the other half's failure gives the slots back at once",
        "decode_ends", _ENDS_BY_PROOF, f"prefill[t] not in ACTIVE or {_ENDS_BY_PROOF}"),
    "time-out-releases-anyway": Slip(
        "slots of a drain that is overdue are given back",
        "decode_ends", _ENDS_BY_PROOF, f"decode[t] == 'quarantined' or {_ENDS_BY_PROOF}"),
    "one-drain-target": Slip(
        "one place for the drain that is waited for: another attempt's drained ends it",
        "drained_received", "say_drained(t)", "any(True for b in say_drained)"),
    "stale-answer-by-reused-id": Slip(
        "an announcement is matched by its slot, not by the use of it",
        "landed_received", "say_landed(t, i, u)",
        "any(b == t and j == i and slot(v) == slot(u) for b, j, v in say_landed)"),
    "source-freed-while-read": Slip(
        "prefill frees its pages when it ends for its client, not when its writes have ended",
        "prefill_aborts", "kept -= [(q, b) for b, i, q in source if b == t and not ready(t, i)]",
        "kept -= [(q, b) for q, b in kept if b == t]"),
    "failed-send-counts-as-drained": Slip(
        "a write that failed counts as one that has stopped", "in_doubt", "prefill[t] = 'stuck'", "prefill[t] = 'draining'"),
    "late-write-between-verify-and-copy": Slip(
        "the slot is hashed, then copied: bytes can change between",
        "verify_good", "lineage(t, i) in holds[p]", "lineage(t, i) in lies[slot(u)]"),
    "credit-before-copy": Slip(
        "a slot is given back when its page is announced, before it is copied out",
        "landed_received", "copying += (t, i, u, p)", "copying += (t, i, u, p)\ngranted -= (u, t)"),
    "drain-before-writes-end": Slip(
        "prefill says drained as soon as it is asked", "prefill_drains", _NO_WRITE_BELIEVED),
    "close-pages-under-copy": Slip(
        "decode's pages go back while a copy into them is to be made",
        "close_pages", "not any(b == t for b, i, u, p in copying)"),
    "credit-of-busy-slot": Slip(
        "a slot is granted while another attempt has it",
        "grant_use", "not any(slot(v) == slot(u) for v, b in granted)"),
    "lease-taken-page": Slip(
        "pages are taken without asking whether somebody holds them",
        "reserve", "not any(p == p2 for i, p in take for p2, b in leased)"),
    "verified-page-overwritten": Slip(
        "an announcement of a page that is verified already is copied over it", "landed_received", "not verified(t, i)"),
    "credit-used-twice": Slip(
        "a credit is used twice", "write", "not spent(t, u)"),
    "fenced-before-the-sender-is-closed": Slip(
        "prefill ends a ticket because of a fence while the sender that writes for it is still open",
        "prefill_fenced", "not any(b == t for b, i, u, q in writing)"),
    "fence-of-nothing": Slip(
        "a segment is called fenced, and bytes still arrive in it", "bytes_arrive", "not fenced(segment(u))"),
    "ack-under-write": Slip(
        "an ack closes the send leases with a resend in flight", "ack_received", _NO_WRITE_BELIEVED),
    "landed-before-written": Slip(
        "a page is announced when its write begins",
        "announce", "wrote(t, i, u)", "any(b == t and j == i and v == u for b, j, v, q in writing)"),
    "verification-skipped": Slip(
        "a page that is not its own passes", "verify_good", "lineage(t, i) in holds[p]"),
    "drain-target-cleared": Slip(
        "asked about an attempt that it forgot before its writes were over, prefill says drained",
        "repeat_drained", "prefill[t] == 'ended'", "prefill[t] not in ACTIVE"),
    "share-unfinished-page": Slip(
        "a source page is shared before it is final",
        "start", "all(final(q) and lineage(t, i) in contains[q] for i, q in take for q2, b in kept if q2 == q)"),
}  # fmt: skip


def mutated(name: str) -> Mapping[str, Action]:
    """All actions, one with the slip in it. Raises KeyError for a name without a slip, ValueError if its line is not there."""
    slip = SLIPS[name]
    action = ACTIONS[slip.action]
    parts = {"guard": action.guard, "does": action.does}
    for part, lines in parts.items():
        if slip.was in lines:
            now = [x for line in lines for x in (slip.now.splitlines() if line == slip.was else [line])]
            return {**ACTIONS, slip.action: replace(action, **{part: tuple(now)})}  # type: ignore[arg-type]
    raise ValueError(f"the slip {name} changes a line that {slip.action} does not have: {slip.was}")
