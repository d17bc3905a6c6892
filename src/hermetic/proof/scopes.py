"""How much is searched. A scope is never made smaller in silence: its numbers stand in every result.

A scope has parts, each searched to its end (or, `large`, walked at random). The one thing to know: two requests on three
pages and two slots have 27 million states with one each of all six faults in one run, if their prompts have one page each.
If one has two pages there are 41 million with any three of them, and with all six more than this machine's memory holds:
that size is searched with any three.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType

FAULTS = ("crash", "abort", "loss", "duplicate", "late", "deadline", "damage", "silence")
WHAT = MappingProxyType({
    "crash": "a worker ends, and another incarnation begins",
    "abort": "a client leaves",
    "loss": "a message is lost",
    "duplicate": "a message arrives twice, at any two moments",
    "late": "a write fails, or ends in doubt, or its bytes come once more when it is over",
    "deadline": "the drain deadline passes although drained would come",
    "damage": "a byte of a write is wrong",
    "silence": "one side gives the session up, the other has not noticed yet",
})  # fmt: skip


MOST = 64  # requests, pages, slots, workers, faults of a kind


@dataclass(frozen=True)
class Scope:
    """`prompts`: pages of each request's prompt. `pages` and `slots`: of each worker, and of each pair.

    `faults`: how often the adversary may do what in one run (see WHAT), `at_most`: of all kinds together. `fenceable`: whether
    decode can fence a peer that lives (Mooncake, NIXL), or only one that is dead (shared memory)."""

    name: str
    prompts: tuple[int, ...]
    pages: int
    slots: int
    faults: dict[str, int] = field(default_factory=dict)
    prefills: int = 1
    decodes: int = 1
    fenceable: bool = True
    at_most: int = 99

    def __post_init__(self) -> None:
        if not self.prompts or min(self.prompts) < 1 or max(self.prompts) > self.pages:
            raise ValueError(f"prompts of {self.prompts} pages do not fit workers of {self.pages} pages")
        if unknown := self.faults.keys() - set(FAULTS):
            raise ValueError(f"no such fault: {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
        if min(self.slots, self.prefills, self.decodes) < 1 or min((0, *self.faults.values())) < 0:
            raise ValueError("slots and workers are at least 1, faults at least 0")
        numbers = (
            len(self.prompts),
            self.pages,
            self.slots,
            self.prefills,
            self.decodes,
            *self.faults.values(),
        )
        if max(numbers) > MOST:
            raise ValueError(f"a search of more than {MOST} of anything would not end")

    def covered(self) -> str:
        """What a search of this scope covers, for its report."""
        sizes = " and ".join(f"{n} page{'s' * (n > 1)}" for n in self.prompts)
        faults = ", ".join(f"{name} {n}" for name, n in self.faults.items() if n) or "none"
        total = sum(self.faults.values())
        together = f", at most {self.at_most} in one run" if self.at_most < total else ""
        kind = "" if self.fenceable else "; a peer that lives cannot be fenced"
        return (
            f"{len(self.prompts)} request{'s' * (len(self.prompts) > 1)} ({sizes}), {self.prefills} prefill + "
            f"{self.decodes} decode, {self.pages} pages, {self.slots} slots; faults: {faults}{together}{kind}"
        )


_SIX = dict.fromkeys(FAULTS[:6], 1)
_EIGHT = dict.fromkeys(FAULTS, 1)
_NOT_LATE = {name: n for name, n in _EIGHT.items() if name != "late"}
SCOPES = MappingProxyType({
    "small": (
        Scope("one request, all six", (1,), 1, 1, _SIX),
        Scope("two requests, any one", (2, 1), 3, 2, _SIX, at_most=1),
        Scope("two requests, one page", (1, 1), 1, 1, _EIGHT, at_most=1),
        Scope("shared memory", (1,), 1, 1, _NOT_LATE, fenceable=False, at_most=2),
    ),
    "default": (
        Scope("two requests, all six", (1, 1), 3, 2, _SIX),
        Scope("two pages and one, any three", (2, 1), 3, 2, _SIX, at_most=3),
        Scope("one page for two, any three", (1, 1), 1, 1, _SIX, at_most=3),
        Scope("one page for two, any two of eight", (1, 1), 1, 1, _EIGHT, at_most=2),
        Scope("one request, all six", (2,), 2, 2, _SIX),
        Scope("shared memory, any two", (1, 1), 1, 1, _NOT_LATE, fenceable=False, at_most=2),
    ),
    "large": (
        Scope("two and two workers", (2, 1, 2), 4, 3, dict.fromkeys(FAULTS, 2), prefills=2, decodes=2),
        Scope("two and two, shared memory", (1, 2, 1), 3, 2, dict.fromkeys(_NOT_LATE, 2), 2, 2, fenceable=False),
    ),
})  # fmt: skip
