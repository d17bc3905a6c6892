"""Evidence by time: whether a request is faster because another key sent its prompt before (a prefix cache that is shared).

The one thing to know: the positive control comes first. If the same key's own repeat is not faster, nothing is cached here, or it
cannot be seen from outside, and that the other key's is not faster either says nothing. And where the other key's is neither clearly faster than a new prompt nor clearly slower
than an own repeat, that is not known, and no "nothing found". The test is on medians: how many of the times lie
in the lower half of their comparison, exactly (`chance.MedianTest`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hermetic.audit.chance import MedianTest, bonferroni, cliffs_delta, median
from hermetic.audit.evidence.gathering import ERROR, SHARES, covered
from hermetic.audit.result import Coverage, Finding

CONTROL = 0.05  # p of the same key's repeat, above which there is nothing to see
FASTER = 0.9  # ratio of medians, above which a difference is too small to be told, or used
KEPT = 4096  # comparisons whose effect is kept


@dataclass
class _Times:
    other: MedianTest = field(default_factory=MedianTest)
    own: MedianTest = field(default_factory=MedianTest)
    apart: MedianTest = field(
        default_factory=MedianTest
    )  # whether an own repeat is faster than the other key's
    apart_ratios: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    deltas: list[float] = field(default_factory=list)
    own_ratios: list[float] = field(default_factory=list)
    compared: int = 0
    why: str = ""


class Timing:
    """The timing part of a judge."""

    def __init__(self) -> None:
        self._scenarios: dict[str, _Times] = {}

    def timing(
        self, scenario: str, after_other: Sequence[float], after_nobody: Sequence[float], after_self: Sequence[float], why: str
    ) -> None:  # fmt: skip
        """Seconds to the first token; comparable within one call. A group that is empty compares nothing."""
        if not after_other or not after_nobody:
            return
        one = self._scenarios.setdefault(scenario, _Times())
        one.why = why
        one.other.add(after_other, after_nobody)
        one.own.add(after_self, after_nobody)
        one.apart.add(after_self, after_other)
        one.compared += len(after_other)
        if len(one.ratios) < KEPT and median(after_nobody) > 0:
            one.ratios.append(median(after_other) / median(after_nobody))
            one.deltas.append(cliffs_delta(after_other, after_nobody))
            if after_self:
                one.own_ratios.append(median(after_self) / median(after_nobody))
                one.apart_ratios.append(median(after_self) / max(median(after_other), 1e-9))

    def findings(self) -> list[Finding]:
        return [found for name, one in self._scenarios.items() if (found := self._finding(name, one))]

    def _finding(self, scenario: str, one: _Times) -> Finding | None:
        if not one.ratios or not _visible(one):
            return None
        p = self._corrected(one.other.p())
        ratio = median(one.ratios)
        if p > ERROR or ratio > FASTER:
            return None
        own = median(one.own_ratios)
        return Finding(
            evidence="timing",
            scenario=scenario,
            what=f"the first token comes {1 / ratio:.1f} times as fast when another key has sent the prompt before",
            why=(
                f"{one.why}: the time tells one tenant what another has sent. A key's own repeat is {1 / own:.1f} times as fast; if the other key "
                f"made no difference, so clearly with probability {p:.1e}"
            ),
            p=p,
            detail={"kind": "prefix cache", "ratio": ratio, "own_ratio": own, "cliffs_delta": median(one.deltas), "comparisons": one.compared},
        )  # fmt: skip

    def _corrected(self, p: float) -> float:
        return bonferroni(p, len(self._scenarios), SHARES["timing"])

    def _enough(self, one: _Times) -> bool:
        """Whether the clearest of differences would be a finding, after so many trials."""
        return self._corrected(one.other.least()) <= ERROR

    def coverage(self, scenario: str) -> Coverage:
        """Nothing was compared where a key's own repeat is no faster, where nothing could have been found, or where it is not told apart."""
        one = self._scenarios.get(scenario)
        compared = one.compared if one is not None and not self._open(scenario, one) else 0
        return covered("timing", compared, self.findings(), scenario)

    def _open(self, scenario: str, one: _Times) -> str:
        """Why nothing is known; empty if it is."""
        if not self._enough(one):
            return f"{one.compared} trials are too few to rule out chance, so whether another key's prompt makes a difference is not known; give more with --budget"
        if not _visible(one):
            return "a key's own repeat was not seen to be faster here, so whether another's would be cannot be told by time"
        if self._finding(scenario, one) is None and not _told_apart(one):
            return "a prompt that another key had sent was neither clearly faster than a new one nor clearly slower than one's own, so whether it makes a difference is not known; ask once more on a quiet machine, or give more with --budget"
        return ""

    def notes(self) -> list[str]:
        return [f"{name}: {why}" for name, one in self._scenarios.items() if (why := self._open(name, one))]


def _visible(one: _Times) -> bool:
    """The positive control."""
    return bool(one.own_ratios) and one.own.p() <= CONTROL and median(one.own_ratios) <= FASTER


def _told_apart(one: _Times) -> bool:
    """Whether an own repeat is faster than the other key's, as it has to be where they share nothing."""
    return bool(one.apart_ratios) and one.apart.p() <= CONTROL and median(one.apart_ratios) <= FASTER


__all__ = ["CONTROL", "FASTER", "Timing"]
