"""Evidence by contrast: one and the same request, after one victim and after another.

The one thing to know: no marker is needed. If answers to the same request group by who came before, they depend on who came before. The
null: within a comparison, answers could change places between the groups (the scenario asks after each victim in turn, so that drift
falls on all alike). The permutation test is exact, over all comparisons of the scenario (`chance.GroupingTest`), and
corrected for the scenarios; where there are logprobs, answers must also lie further apart than arithmetic moves them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hermetic.audit.chance import GroupingTest, bonferroni, clearest
from hermetic.audit.evidence.differential import apart, move_limit
from hermetic.audit.evidence.gathering import ERROR, SHARES, SHOWN, covered
from hermetic.audit.exchange import Answer
from hermetic.audit.learned import Learned
from hermetic.audit.result import Coverage, Finding


@dataclass
class _Contrasts:
    test: GroupingTest = field(default_factory=GroupingTest)
    comparisons: int = 0
    answers: int = 0
    least: float = 1.0  # the smallest p that so many answers could have had
    shown: list[Answer] = field(default_factory=list)
    why: str = ""


class Contrast:
    """The contrast part of a judge."""

    def __init__(self, learned: Learned) -> None:
        self._limit = move_limit(learned)
        self._scenarios: dict[str, _Contrasts] = defaultdict(_Contrasts)

    def contrast(self, scenario: str, after: Mapping[str, Sequence[Answer]], why: str) -> None:
        """`after`: answers to one request, by who came before. Less than two groups with an answer compare nothing."""
        groups = [[a for a in answers if a.how == "answered"] for answers in after.values()]
        groups = [group for group in groups if group]
        if len(groups) < 2 or sum(map(len, groups)) < 3:
            return
        one = self._scenarios[scenario]
        every = [answer for group in groups for answer in group]
        one.answers += len(every)
        one.comparisons += 1
        one.least *= clearest([len(group) for group in groups])
        if not self._far(every):
            return
        one.test.add([[answer.text for answer in group] for group in groups])
        one.why = why
        if len(one.shown) < SHOWN:
            one.shown += [answer for group in groups for answer in group[:1]]

    def _far(self, answers: list[Answer]) -> bool:
        """Whether some two answers lie further apart than arithmetic moves them, or cannot be measured."""
        for i, a in enumerate(answers):
            for b in answers[i + 1 :]:
                found = apart(a, b)
                if found.at is not None and (found.moved is None or found.moved > self._limit):
                    return True
        return False

    def findings(self) -> list[Finding]:
        return [found for name, one in self._scenarios.items() if (found := self._finding(name, one))]

    def _finding(self, scenario: str, one: _Contrasts) -> Finding | None:
        p = self._corrected(one.test.p())
        if p > ERROR:
            return None
        return Finding(
            evidence="contrast",
            scenario=scenario,
            what="the same request is answered otherwise after another tenant's requests",
            why=(
                f"{one.why}: over {one.comparisons} comparisons of {one.answers} answers they group by who came before; if that "
                f"made no difference, so clearly with probability {p:.1e}"
            ),
            p=p,
            answers=list(one.shown),
            detail={"kind": "grouped", "comparisons": one.comparisons},
        )

    def _corrected(self, p: float) -> float:
        return bonferroni(p, len(self._scenarios), SHARES["contrast"])

    def _enough(self, one: _Contrasts) -> bool:
        """Whether answers that group as clearly as can be would be a finding."""
        return self._corrected(one.least) <= ERROR

    def coverage(self, scenario: str) -> Coverage:
        """Answers that were compared with others; none where so few could not have been a finding."""
        one = self._scenarios.get(scenario)
        answers = one.answers if one is not None and self._enough(one) else 0
        return covered("contrast", answers, self.findings(), scenario)

    def notes(self) -> list[str]:
        return [
            f"{name}: {one.answers} answers are too few to rule out chance, so whether they depend on who came before is not known: "
            "a longer --profile asks more"
            for name, one in self._scenarios.items()
            if not self._enough(one)
        ]


__all__ = ["Contrast"]
