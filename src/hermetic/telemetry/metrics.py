"""What /metrics shows: the gateway's own counts by tenant, and the workers' figures as they report them.

The one thing to know: the gateway counts what it saw with its own eyes (requests, tokens, refusals, times); pages, slots
and verified tiles are the workers' figures, read when somebody scrapes, never kept beside them. `figures.py` is the table
of how they are shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from hermetic.telemetry.figures import families

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
_ITL = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_FULL = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 600.0)


class Metrics:
    """The gateway's counters, in a registry of their own, so that two servers in one process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter(
            "hermetic_requests",
            "Generation requests by how they ended",
            ("tenant", "endpoint", "outcome"),
            registry=registry,
        )
        self.refusals = Counter(
            "hermetic_refusals", "Requests refused, by code", ("tenant", "code"), registry=registry
        )
        self.failures = Counter(
            "hermetic_failures",
            "Requests that were taken and not completed, by code",
            ("tenant", "code"),
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "hermetic_prompt_tokens", "Prompt tokens of requests taken", ("tenant",), registry=registry
        )
        self.completion_tokens = Counter(
            "hermetic_completion_tokens", "Tokens made", ("tenant",), registry=registry
        )
        self.running = Gauge(
            "hermetic_requests_running", "Generation requests that are open", ("tenant",), registry=registry
        )
        self.pages = Gauge(
            "hermetic_tenant_pages_held",
            "KV pages that a tenant's running requests account for: prompt and output so far, in whole pages",
            ("tenant",),
            registry=registry,
        )
        self.ttft = Histogram(
            "hermetic_time_to_first_token_seconds",
            "From the request's arrival to its first token",
            buckets=_TTFT,
            registry=registry,
        )
        self.itl = Histogram(
            "hermetic_inter_token_latency_seconds",
            "Between two tokens of one choice",
            buckets=_ITL,
            registry=registry,
        )
        self.duration = Histogram(
            "hermetic_request_duration_seconds",
            "From arrival to the end of a completed request",
            buckets=_FULL,
            registry=registry,
        )
        self._workers = _Workers()
        self.registry.register(self._workers)

    def scrape(self, stats: Mapping[str, Mapping[str, float]]) -> bytes:
        """Everything in Prometheus's text format, with the workers' figures `stats` by worker id."""
        self._workers.stats = stats
        return generate_latest(self.registry)


class Account:
    """One generation request's entries in the metrics. `end` counts once, whoever calls it first."""

    def __init__(
        self, metrics: Metrics, endpoint: str, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._metrics, self._endpoint, self._clock = metrics, endpoint, clock
        self._started = clock()
        self._last: dict[int, float] = {}
        self._held = 0
        self._open = True
        self.tenant = "-"  # until the key is known
        self.outcome: str | None = None

    def taken(self, prompt_tokens: int) -> None:
        """The backend took the request."""
        self._metrics.prompt_tokens.labels(self.tenant).inc(prompt_tokens)

    def begin(self, tenant: str) -> None:
        """It is known who asks."""
        self.tenant = tenant
        self._metrics.running.labels(tenant).inc()

    def token(self, choice: int) -> None:
        """A token of a choice came."""
        now = self._clock()
        if not self._last:
            self._metrics.ttft.observe(now - self._started)
        if choice in self._last:
            self._metrics.itl.observe(now - self._last[choice])
        self._last[choice] = now
        self._metrics.completion_tokens.labels(self.tenant).inc()

    def hold(self, pages: int) -> None:
        """The request accounts for so many pages more (or fewer)."""
        if pages and self._open:
            self._held += pages
            self._metrics.pages.labels(self.tenant).inc(pages)

    def end(self, outcome: str, code: str | None = None) -> None:
        """`outcome` is completed, refused, failed or aborted; `code` says why it was refused or failed."""
        if not self._open:
            return
        self._open = False
        self.outcome = outcome
        self._metrics.requests.labels(self.tenant, self._endpoint, outcome).inc()
        if outcome == "refused" and code:
            self._metrics.refusals.labels(self.tenant, code).inc()
        elif outcome == "failed" and code:
            self._metrics.failures.labels(self.tenant, code).inc()
        elif outcome == "completed":
            self._metrics.duration.observe(self._clock() - self._started)
        if self._held:
            self._metrics.pages.labels(self.tenant).dec(self._held)
        if self.tenant != "-":
            self._metrics.running.labels(self.tenant).dec()


class _Workers(Collector):
    """The workers' figures of the last scrape."""

    stats: Mapping[str, Mapping[str, float]] = {}

    def collect(self) -> Iterable[Metric]:
        return families(self.stats)
