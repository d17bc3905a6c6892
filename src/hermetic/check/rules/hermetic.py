"""Hermetic: the same questions about itself.

The one thing to know: Hermetic derives its context from its workers' pools and refuses to pair workers that do not match, so most rules about others
cannot find anything here. These look at what can still be wrong: a setting that verifies less, and counters that say that something happened.
"""

from __future__ import annotations

from hermetic.check import facts
from hermetic.check.facts import Sheet
from hermetic.check.rules.registry import Answer, rule

_HERMETIC = ("hermetic",)


@rule(
    "HRM001",
    "the advertised context is larger than a worker's pool",
    engines=_HERMETIC,
    why="max_model_len is derived from the pools of the workers that are members. If it is larger than one of them, the two were not read at the same "
    "time, or something stands between that changes it.",
    fix="Read /v1/models again from the gateway itself. If it stays so, report it: the gateway must not admit what a worker cannot hold.",
    source="docs/design.md: admission against the measured capacity.",
)
def context_over_pool(node: Sheet) -> Answer:
    context, pool = node[facts.CONTEXT], node[facts.POOL]
    return (
        f"a context of {context:,} tokens is advertised and a pool holds {pool:,}" if context > pool else None
    )


@rule(
    "HRM002",
    "bytes that arrive are not verified",
    engines=_HERMETIC,
    why="With --verify tags pages are compared by identity and counts alone. A page whose bytes are not what they are announced to be is read.",
    fix="Serve with --verify landing (the default) or --verify read.",
    source="docs/incident.md: the column 'tags'.",
)
def verify_low(node: Sheet) -> Answer:
    mode = node[facts.VERIFY]
    return (
        f"--verify is {mode}: the bytes of pages that arrive are not verified"
        if mode not in ("landing", "read")
        else None
    )


@rule(
    "HRM003",
    "the model is disabled",
    severity="warning",
    engines=_HERMETIC,
    why="An operator took the model away, or it did so itself after repeated integrity failures. It answers nothing.",
    fix="Read the reason (`hermetic status`), then `hermetic enable`.",
    source="hermetic_disabled in /metrics.",
)
def disabled(node: Sheet) -> Answer:
    return "the model is disabled and answers nothing" if node[facts.DISABLED] else None


@rule(
    "HRM004",
    "pages are in quarantine",
    severity="warning",
    engines=_HERMETIC,
    why="A page is quarantined when it did not verify, or when a peer that could still write to it has not been fenced. It is lost to the pool until then.",
    fix="Look for kv_integrity and for lost peers in the workers' logs; restart the worker when its cause is known.",
    source='hermetic_pages{state="quarantined"} in /metrics; docs/lifecycle.md.',
)
def quarantined(node: Sheet) -> Answer:
    count = node[facts.QUARANTINED]
    return f"{count:,} page{' is' if count == 1 else 's are'} in quarantine" if count > 0 else None


@rule(
    "HRM005",
    "requests met pages that were not their own",
    engines=_HERMETIC,
    why="They were ended before anything of these pages was sent, so nobody has seen foreign data; but something wrote or named a wrong page.",
    fix="Find the worker by its counters, keep its log, and audit it (`hermetic audit`) before it serves on.",
    source="hermetic_integrity_failures_total in /metrics; docs/errors.md, kv_integrity.",
)
def integrity(node: Sheet) -> Answer:
    count = node[facts.INTEGRITY_FAILURES]
    return (
        f"{count:,} request{'' if count == 1 else 's'} met a page that was not {'its' if count == 1 else 'their'} own, and {'was' if count == 1 else 'were'} ended"
        if count > 0
        else None
    )


@rule(
    "HRM006",
    "requests were served and none was verified",
    engines=_HERMETIC,
    why="Verification that runs counts what it verifies. Requests without a count mean a build or a path without it.",
    fix="Read hermetic_requests_verified by level in /metrics; serve with the released build and --verify landing or read.",
    source="docs/design.md: evidence that checking really happened.",
)
def none_verified(node: Sheet) -> Answer:
    served, verified = node[facts.SERVED_REQUESTS], node[facts.VERIFIED]
    return (
        f"{served:,} request{' was' if served == 1 else 's were'} served and none was verified"
        if served > 0 and verified == 0
        else None
    )
