"""Where a server stops accepting prompts: a search that asks as rarely as it can.

The one thing to know: an accepted probe costs the server a whole prefill, a refused one nothing; a length that gets neither is
remembered, walked around, and not tried again.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from hermetic.audit.learned import Edge

Verdict = Literal[
    "accepted",
    "refused",
    "cut short",  # answered, but not all of it was read
    "silent",  # neither answered nor refused
    "unknown",  # it could not be tried
]
MAX_SILENT = 3  # lengths that may get neither; each costs its whole bound
NEAR = 20  # parts of what is left to search: a hint in the outermost of them is near what was tried
MAX_WALKED = 4  # lengths right beside the last one that are tried because a refusal named them
MAX_PROBES = 48  # of one search: doubling to 2**20 and halving back takes 40


@dataclass(frozen=True)
class Tried:
    """What became of one length."""

    verdict: Verdict
    said: str = ""


@dataclass
class Search:
    """What is known of an edge, in units of the prompt (tokens or words). `why`: what ended the search before its end."""

    accepted: int
    refused: int | None = None
    cut_short: int | None = None  # the shortest that was answered without having been read whole
    silent: list[int] = field(default_factory=list)
    said: str = ""
    why: str = ""
    probes: int = 0
    walked_down: int = 0  # hints that were tried although they are near the upper end, and near the lower
    walked_up: int = 0

    @property
    def end(self) -> int | None:
        """The shortest length that is known not to be served whole."""
        return min((length for length in (self.refused, self.cut_short) if length is not None), default=None)

    def edge(self, tokens: Callable[[int], int]) -> Edge:
        """In tokens."""
        return Edge(
            accepted=tokens(self.accepted),
            refused=None if self.refused is None else tokens(self.refused),
            silent=tuple(tokens(length) for length in sorted(self.silent)),
            cut=None if self.cut_short is None else tokens(self.cut_short),
            said=self.said,
        )


async def find_edge(
    probe: Callable[[int], Awaitable[Tried]],
    good: int,
    start: int,
    most: int,
    hints: Iterable[int] = (),
    told: Callable[[str], list[int]] = lambda said: [],
    can: Callable[[int], str] = lambda length: "",
) -> Search:
    """The longest length that is accepted and the shortest that is refused.

    `good` is known to be accepted; `start` is tried first, then twice as much and so on up to `most`; then halving between
    the two. `hints` are lengths worth trying before the middle; `told` reads more of them out of a refusal; `can` says why a
    length cannot be tried now ("": it can)."""
    search = Search(good)
    worth = list(hints)
    length = start
    while search.end is None and not search.silent:
        if length > most or not await _try(search, probe, length, worth, told, can):
            search.why = search.why or f"nothing up to {search.accepted} was refused"
            break
        length = max(length + 1, 2 * length)
    await _halve(search, probe, worth, told, can)
    return search


async def _halve(
    search: Search,
    probe: Callable[[int], Awaitable[Tried]],
    worth: list[int],
    told: Callable[[str], list[int]],
    can: Callable[[int], str],
) -> None:
    """First up to where accepting ends, then down to where refusing begins, with silent lengths in between."""
    while True:
        end = search.end
        top = min([*search.silent, end or max(search.silent, default=search.accepted)])
        length = _between(search, search.accepted, top, worth)
        if length is None and search.silent and end is not None:
            length = _between(search, max(search.silent), end, worth)
        if length is None or not await _try(search, probe, length, worth, told, can):
            return


def _between(search: Search, low: int, high: int, worth: list[int]) -> int | None:
    """The next length inside: one worth trying, else the middle. A server whose refusals name the length it was sent would be walked down
    step by step (by its own count, which may be a little less than ours): so only the first few that are near either end are taken."""
    if high - low < 2:
        return None
    for length in worth:
        if low < length < high:
            down = high - low > 4 and high - length <= max(2, (high - low) // NEAR)
            up = high - low > 4 and length - low <= 2
            if (down and search.walked_down >= MAX_WALKED) or (up and search.walked_up >= MAX_WALKED):
                continue
            search.walked_down += down
            search.walked_up += up
            return length
    return (low + high) // 2


async def _try(
    search: Search,
    probe: Callable[[int], Awaitable[Tried]],
    length: int,
    worth: list[int],
    told: Callable[[str], list[int]],
    can: Callable[[int], str],
) -> bool:
    """Probe one length. False: the search ends here."""
    search.why = can(length) or (f"{MAX_PROBES} lengths were tried" if search.probes >= MAX_PROBES else "")
    if search.why:
        return False
    search.probes += 1
    tried = await probe(length)
    if tried.verdict == "accepted":
        search.accepted = max(search.accepted, length)
        search.silent = [silent for silent in search.silent if silent > search.accepted]
    elif tried.verdict == "refused":
        search.refused = length if search.refused is None else min(length, search.refused)
        search.said = tried.said
        worth[:] = [*told(tried.said), *worth]
    elif tried.verdict == "cut short":
        search.cut_short = length if search.cut_short is None else min(length, search.cut_short)
        search.said = search.said if search.refused is not None else tried.said
        worth[:] = [*told(tried.said), *worth]
    elif tried.verdict == "unknown":
        search.why = tried.said
        return False
    else:
        search.silent.append(length)
        if len(search.silent) >= MAX_SILENT:
            search.why = f"{MAX_SILENT} lengths got neither an answer nor an error"
            return False
    return True


def numbers(said: str) -> list[int]:
    """The numbers in a refusal, in their order: one of them is often the limit."""
    return [int(found.replace(",", "")) for found in re.findall(r"\d[\d,]{0,11}(?![\d.])", said)]


__all__ = ["MAX_SILENT", "Search", "Tried", "Verdict", "find_edge", "numbers"]
