"""How long pages and slots were kept for the other half's sake, and what ended the wait. Figures only."""

from __future__ import annotations

from dataclasses import dataclass, field

from hermetic.handoff.messages import Key

BUCKETS = (0.01, 0.1, 1.0, 10.0, 60.0)  # seconds


@dataclass
class Releases:
    """Deferred releases: tickets that ended and still hold what the other half might touch."""

    drained: int = 0
    fenced: int = 0
    quarantined: int = 0  # passed through quarantine; they end as drained or fenced, if ever
    seconds: float = 0.0
    _open: dict[Key, float] = field(default_factory=dict)
    _buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))

    def defer(self, key: Key, now: float) -> None:
        """The ticket has ended for its client and is kept."""
        self._open.setdefault(key, now)

    def since(self, key: Key) -> float | None:
        """When its wait began (seconds of the worker's clock); None when it does not wait."""
        return self._open.get(key)

    def end(self, key: Key, fenced: bool, now: float) -> None:
        """Nothing is kept for the ticket any more. One that never waited is not counted."""
        began = self._open.pop(key, None)
        if began is None:
            return
        waited = now - began
        self.fenced += fenced
        self.drained += not fenced
        self.seconds += waited
        self._buckets[sum(waited > bound for bound in BUCKETS)] += 1

    def stats(self) -> dict[str, float]:
        """As /metrics shows them; the buckets are cumulative, by their upper bound in seconds."""
        names = [*(f"{bound:g}" for bound in BUCKETS), "inf"]
        sums = [sum(self._buckets[: i + 1]) for i in range(len(names))]
        return {
            "releases_deferred": len(self._open),
            "releases_drained_total": self.drained,
            "releases_fenced_total": self.fenced,
            "releases_quarantined_total": self.quarantined,
            "release_seconds_sum": self.seconds,
            "release_seconds_count": sum(self._buckets),
        } | {f"release_seconds_bucket_{name}": count for name, count in zip(names, sums, strict=True)}
