"""Findings as they come in, one for each thing that is wrong, and what was looked at. Bounded, however long the audit runs.

The one thing to know: a fault that is seen a thousand times is one Finding with `times` = 1,000 and the first few exchanges that
show it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from hermetic.audit.chance import rule_of_three
from hermetic.audit.exchange import Answer
from hermetic.audit.result import Coverage, Evidence, Finding

ERROR = 0.001  # the probability, under the null, that a whole run has any finding that is left to chance
SHARES: dict[Evidence, float] = {
    "marker": 0.4,
    "differential": 0.2,
    "contrast": 0.2,
    "timing": 0.2,
}  # of ERROR
SHOWN = 6  # exchanges kept of one finding


class Gathering:
    """The findings of one kind of evidence in which nothing is left to chance, and its counts."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.compared: Counter[str] = Counter()
        self._found: dict[tuple[str, str], Finding] = {}

    def add(
        self, scenario: str, kind: str, what: str, why: str, answers: Iterable[Answer], **detail: Any
    ) -> Finding:
        """The first of its scenario and kind is the finding; a further one counts, and is kept as an exchange that shows it."""
        found = self._found.get((scenario, kind))
        if found is None:
            found = Finding(
                evidence=self.evidence,
                scenario=scenario,
                what=what,
                why=why,
                answers=list(answers),
                detail={"kind": kind, **detail},
            )
            self._found[scenario, kind] = found
            return found
        found.times += 1
        if len(found.answers) < SHOWN:
            known = {answer.number for answer in found.answers}
            found.answers += [answer for answer in answers if answer.number not in known]
        return found

    def copy(self) -> Gathering:
        """The same, to which more can be added; its findings are its own."""
        other = Gathering(self.evidence)
        other.compared = self.compared
        for key, found in self._found.items():
            other._found[key] = msgspec.structs.replace(found, answers=list(found.answers))
        return other

    def findings(self) -> list[Finding]:
        return list(self._found.values())

    def coverage(self, scenario: str) -> Coverage:
        """Of one scenario; `findings` counts how often, `bound` is the rule of three where there was none."""
        return covered(self.evidence, self.compared[scenario], self.findings(), scenario)


def covered(evidence: Evidence, compared: int, findings: Iterable[Finding], scenario: str) -> Coverage:
    """What was looked at, how often something was found, and what that leaves possible."""
    times = sum(f.times for f in findings if f.scenario == scenario)
    return Coverage(
        evidence=evidence,
        comparisons=compared,
        findings=times,
        bound=None if times else rule_of_three(compared),
    )


__all__ = ["ERROR", "SHARES", "SHOWN", "Gathering", "covered"]
