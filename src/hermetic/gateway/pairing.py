"""Which workers may be members together, and which of them get the next attempt. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from hermetic.gateway.remote import Remote
from hermetic.worker.core import difference
from hermetic.worker.messages import WorkerInfo

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
ROLES = ("prefill", "decode", "unified")

Halves = tuple[Remote, ...]
"""The workers of one attempt: (decode, prefill), or (unified,)."""


@dataclass(frozen=True)
class Need:
    """What an attempt asks of a pair."""

    tokens: int  # prompt and all output, at most
    choices: int


def misfit(info: WorkerInfo, members: Iterable[WorkerInfo]) -> str | None:
    """Why this worker cannot serve beside the members, with the difference named; or None."""
    if info.role not in ROLES:
        return f"its role is {info.role!r}; known are {', '.join(ROLES)}"
    if not _NAME.fullmatch(info.worker) or info.worker == "gateway":
        return "a worker's name has 1 to 64 of the characters A-Z a-z 0-9 . _ - and is not `gateway`"
    if info.page_size != info.geometry.page_size or not 1 <= info.max_tokens <= info.pages * info.page_size:
        return (
            f"its numbers cannot be: {info.pages} pages of {info.page_size} tokens (its geometry says "
            f"{info.geometry.page_size}) for a context of {info.max_tokens}"
        )
    for other in members:
        if other.worker == info.worker:
            continue
        found = difference(info, other)
        if found:
            return f"{info.worker} (here) does not fit {other.worker} (there): {found}"
    return None


def standing(remotes: Collection[Remote]) -> list[Halves]:
    """Every unified worker and every pair that new work may go to now."""
    usable = [remote for remote in remotes if remote.usable]
    found: list[Halves] = [(remote,) for remote in usable if remote.info.role == "unified"]
    decodes = [remote for remote in usable if remote.info.role == "decode"]
    for prefill in usable:
        found += [(decode, prefill) for decode in decodes if prefill.paired_with(decode)]
    return found


def stands(halves: Halves) -> bool:
    """Whether these can still work together, though they may take nothing new."""
    there = all(half.welcomed and half.reachable and not half.ended for half in halves)
    return there and (len(halves) == 1 or halves[1].paired_with(halves[0]))


def may_stand(remotes: Collection[Remote]) -> bool:
    """Whether the workers of a pair are there, and only their connections are not (yet, or again)."""
    roles = {r.info.role for r in remotes if r.state in ("joining", "ready")}
    return "unified" in roles or {"prefill", "decode"} <= roles


def choose(remotes: Collection[Remote], need: Need, avoid: Collection[Halves] = ()) -> Halves | None:
    """The pair with the fewest pages in flight relative to its pools, then the fewest open attempts, then by name.

    One in `avoid` is taken only if there is no other. None when no pair that stands holds what is needed."""
    fitting = [
        halves
        for halves in standing(remotes)
        if all(h.info.max_tokens >= need.tokens and h.info.max_batch >= need.choices for h in halves)
    ]
    others = [halves for halves in fitting if halves not in avoid]
    return min(others or fitting, key=_load, default=None)


def _load(halves: Halves) -> tuple[float, int, tuple[str, ...]]:
    relative = sum(half.pages_in_flight() / half.info.pages for half in halves)
    return relative, sum(len(half.attempts) for half in halves), tuple(h.info.worker for h in halves)
