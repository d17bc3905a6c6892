"""What is made of answers: six kinds of evidence, which together are a `stage.Judge`.

The one thing to know: under the null (nobody's data reaches anybody else) a whole run has any finding that is left to chance
with probability ERROR = 0.001 at most; marker, differential, contrast and timing each have a share of it, corrected for all that
they compare. Semantics and liveness leave nothing to chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hermetic.audit.evidence.contrast import Contrast
from hermetic.audit.evidence.differential import Differential, move_limit
from hermetic.audit.evidence.gathering import ERROR, SHARES
from hermetic.audit.evidence.liveness import Liveness
from hermetic.audit.evidence.marker import Markers
from hermetic.audit.evidence.semantics import Semantics
from hermetic.audit.evidence.timing import Timing
from hermetic.audit.exchange import Answer
from hermetic.audit.learned import Learned
from hermetic.audit.markers import Plant
from hermetic.audit.result import Coverage, Finding


class Evidence:
    """A judge (stage.Judge) with everything it has found. `plant` is whose markers are looked for."""

    def __init__(self, learned: Learned, plant: Plant) -> None:
        self._markers, self._differential = Markers(plant, move_limit(learned)), Differential(learned)
        self._contrast, self._semantics = Contrast(learned), Semantics(learned)
        self._liveness, self._timing = Liveness(), Timing()
        self._counts_cached = learned.counts_cached

    def seen(self, scenario: str, answer: Answer) -> None:
        self._markers.seen(scenario, answer)
        self._semantics.seen(scenario, answer)
        self._liveness.seen(scenario, answer)

    def same(self, scenario: str, alone: Answer, again: Answer, why: str) -> None:
        self._differential.same(scenario, alone, again, why)
        self._semantics.same(scenario, alone, again)

    def contrast(self, scenario: str, after: Mapping[str, Sequence[Answer]], why: str) -> None:
        self._contrast.contrast(scenario, after, why)

    def must_refuse(self, scenario: str, answer: Answer, tokens: int, why: str) -> None:
        self._semantics.must_refuse(scenario, answer, tokens, why)

    def must_serve(self, scenario: str, answer: Answer, why: str) -> None:
        self._semantics.must_serve(scenario, answer, why)

    def expects(self, scenario: str, answer: Answer, own: str, others: Iterable[str], why: str) -> None:
        self._markers.expects(scenario, answer, own, others, why)

    def timing(
        self, scenario: str, after_other: Sequence[float], after_nobody: Sequence[float], after_self: Sequence[float], why: str
    ) -> None:  # fmt: skip
        self._timing.timing(scenario, after_other, after_nobody, after_self, why)

    def _parts(self) -> tuple[Markers, Differential, Contrast, Semantics, Liveness, Timing]:
        return (
            self._markers,
            self._differential,
            self._contrast,
            self._semantics,
            self._liveness,
            self._timing,
        )

    def findings(self) -> list[Finding]:
        """All until now, corrected for what has been compared until now; markers first."""
        return [finding for part in self._parts() for finding in part.findings()]

    def coverage(self, scenario: str) -> list[Coverage]:
        """Of each kind of evidence, what it compared in this scenario; kinds that compared nothing are left out."""
        return [c for part in self._parts() if (c := part.coverage(scenario)).comparisons or c.findings]

    def noise(self) -> dict[str, Any]:
        """How the search went for decoys, and how far answers moved without being findings."""
        return {**self._markers.noise(), **self._differential.noise()}

    def notes(self) -> list[str]:
        """What a reader of the report should know about how sure it is."""
        seen = self.noise()
        notes = [
            f"The same search for {seen['decoys']} decoys, whom nobody ever sent, called {seen['decoys_called_findings']} of "
            f"{seen['decoy_pairs']} pairs of answer and decoy a finding (family-wise error {ERROR:g}).",
        ]
        if seen["tipped"]:
            notes.append(
                f"Answers that differed in company, all within arithmetic: {seen['tipped']}; log-odds moved by {seen['largest_move']:.2f} at most "
                f"(limit {seen['limit']:.2f})."
            )
        if self._liveness.slow:
            notes.append(
                f"Answers that were slow, of which tokens still came when their bound was over: {self._liveness.slow}."
            )
        if not self._counts_cached:
            notes.append(
                "This server's count of a prompt leaves out what it took from its cache, so no count was called too small, and counts of one "
                "prompt were not compared."
            )
        return notes + self._differential.notes() + self._contrast.notes() + self._timing.notes()


__all__ = ["ERROR", "SHARES", "Evidence"]
