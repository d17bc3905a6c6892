"""What an audit found, what it covered, and how sure it is: the report as data. Its JSON schema is docs/audit-schema.json."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from hermetic.audit.exchange import Answer, How

Evidence = Literal["marker", "differential", "contrast", "semantics", "liveness", "timing"]
LOST: tuple[How, ...] = ("failed", "silent", "cut", "garbled", "unreachable", "limited")
EVIDENCE: tuple[Evidence, ...] = ("marker", "differential", "contrast", "semantics", "liveness", "timing")


class Highlight(msgspec.Struct, frozen=True):
    """A piece of an answer that is somebody else's. `start`, `end`: characters of `Answer.text`."""

    answer: int  # Answer.number
    start: int
    end: int
    whose: str  # tenant


class Finding(msgspec.Struct, kw_only=True):
    """Something that must not be. `p`: the probability of as much under the null, corrected for all comparisons of the run;
    None where nothing is left to chance. `answers`: the exchanges that show it, the one that is wrong first."""

    evidence: Evidence
    scenario: str
    what: str  # one sentence: what was seen
    why: str  # why that cannot be in order
    p: float | None = None
    answers: list[Answer] = []
    highlights: list[Highlight] = []
    repeat: str = ""  # a command that plays it again
    signature: str = ""  # a known fault's name, see signatures.py
    detail: dict[str, Any] = {}
    times: int = 1  # how often the same was seen (scenario, evidence, signature or kind)


class Coverage(msgspec.Struct, kw_only=True):
    """What one kind of evidence looked at in one scenario. `bound`: the share of requests that could still be wrong without
    having shown, at 95 % (rule of three: 3 / comparisons); None when nothing was compared."""

    evidence: Evidence
    comparisons: int = 0
    findings: int = 0
    bound: float | None = None


class Played(msgspec.Struct, kw_only=True):
    """One scenario. `state`: what became of it; `reason` says why it is not `done`."""

    name: str
    says: str
    state: Literal["done", "cut short", "not run"] = "not run"
    reason: str = ""
    requests: int = 0
    seconds: float = 0.0
    how: dict[str, int] = {}  # answers by `how`
    coverage: list[Coverage] = []

    def compared(self) -> bool:
        """Whether any answer was looked at for other tenants' markers. That a request ended at all compares nothing."""
        return any(cell.comparisons for cell in self.coverage if cell.evidence == "marker")


class Sample(msgspec.Struct, frozen=True):
    """One point of the charts: an answer's time against what was sent, and when."""

    number: int
    scenario: str
    sent: float
    prompt_tokens: int | None
    first: float | None
    seconds: float
    how: str
    wrong: bool = False


class Report(msgspec.Struct, kw_only=True):
    """`verdict`: "findings" as soon as there is one; "could not run" when nothing, or not enough, was compared."""

    version: int = 1
    target: str
    model: str
    profile: str
    seed: int
    started: str  # ISO 8601, UTC
    seconds: float = 0.0
    verdict: Literal["nothing found", "findings", "could not run"] = "could not run"
    reason: str = ""
    complete: bool = False  # every scenario of the profile was played to its end
    requests: int = 0
    limits: dict[str, Any] = {}
    noise: dict[str, Any] = {}
    notes: list[str] = []
    scenarios: list[Played] = []
    findings: list[Finding] = []
    samples: list[Sample] = []
    command: str = ""  # without keys

    def compared(self) -> bool:
        """Whether any answer was looked at for other tenants' markers; else nothing is known, whatever else was seen."""
        return any(played.compared() for played in self.scenarios)

    def lost(self) -> dict[How, int]:
        """How many requests ended in ways in which none is meant to, by how. What they would have shown is not known."""
        ends = {how: sum(played.how.get(how, 0) for played in self.scenarios) for how in LOST}
        return {how: number for how, number in ends.items() if number}

    def mostly_lost(self) -> bool:
        """Fewer requests were answered than ended in ways in which none is meant to."""
        answered = sum(played.how.get("answered", 0) for played in self.scenarios)
        return sum(self.lost().values()) > answered

    def bound(self) -> float | None:
        """The largest share of answers that could hold somebody else's marker without having shown, at 95 %."""
        compared = sum(c.comparisons for s in self.scenarios for c in s.coverage if c.evidence == "marker")
        return min(1.0, 3.0 / compared) if compared else None


__all__ = ["EVIDENCE", "LOST", "Coverage", "Evidence", "Finding", "Highlight", "Played", "Report", "Sample"]
