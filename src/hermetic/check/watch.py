"""`hermetic check --watch 60s --metrics-port P`: the same check again and again, as figures for alerts.

The one thing to know: the age of the last run is a figure as well (hermetic_check_last_run_timestamp_seconds): alert on it, since a check that
has stopped finds nothing. A run that could not read a source says so in hermetic_check_unread.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hermetic.check.result import Report
from hermetic.options import OptionError


class Figures(Collector):
    """What the last run found. Safe to read while the next one goes on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._report: Report | None = None
        self._ended, self._seconds, self._runs, self._failed = 0.0, 0.0, 0, 0

    def ran(self, report: Report, seconds: float) -> None:
        with self._lock:
            self._report, self._seconds, self._ended = report, seconds, time.time()
            self._runs += 1

    def failed(self) -> None:
        """A run that gave no report."""
        with self._lock:
            self._failed += 1

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            report, ended, seconds, runs, failed = (
                self._report,
                self._ended,
                self._seconds,
                self._runs,
                self._failed,
            )
        yield CounterMetricFamily("hermetic_check_runs", "Checks that gave a report", runs)
        yield CounterMetricFamily("hermetic_check_runs_failed", "Checks that gave none", failed)
        if report is None:
            return
        yield GaugeMetricFamily(
            "hermetic_check_last_run_timestamp_seconds", "When the last check ended", ended
        )
        yield GaugeMetricFamily("hermetic_check_run_seconds", "How long the last check took", seconds)
        yield GaugeMetricFamily("hermetic_check_nodes", "Nodes that were read", len(report.nodes))
        found = GaugeMetricFamily(
            "hermetic_check_finding", "1 for each finding", labels=["code", "severity", "subject"]
        )
        for verdict in report.of("finding"):
            found.add_metric([verdict.code, verdict.severity, verdict.subject], 1)
        unknown = GaugeMetricFamily("hermetic_check_unknown", "1 for each rule that could not be answered", labels=["code", "subject"])  # fmt: skip
        for verdict in report.of("unknown"):
            unknown.add_metric([verdict.code, verdict.subject], 1)
        unread = GaugeMetricFamily("hermetic_check_unread", "1 for each source that could not be read", labels=["source"])  # fmt: skip
        for source in dict.fromkeys(one.source for one in report.unread if not one.part):
            unread.add_metric([source], 1)
        yield from (found, unknown, unread)


def serve(figures: Figures, host: str, port: int) -> int:
    """/metrics on `host`:`port` (0: a free one, which is given back). Raises OptionError."""
    registry = CollectorRegistry()
    registry.register(figures)
    try:
        server, _ = start_http_server(port, host, registry)
    except (OSError, OverflowError) as error:
        raise OptionError(f"--metrics-port {port}: cannot listen on {host}: {error}") from None
    return int(server.server_port)


def watch(
    check: Callable[[], Report], every: float, told: Callable[[Report], None], figures: Figures
) -> None:
    """Until Ctrl-C. Runs do not overlap: a slow one puts the next off. Raises OptionError only from the first run; later ones are told on standard
    error."""
    first = True
    while True:
        began = time.monotonic()
        try:
            report = check()
            took = time.monotonic() - began
            figures.ran(report, took)
            told(report)
        except OptionError as error:
            if first:
                raise
            figures.failed()
            now = datetime.now(UTC).isoformat(timespec="seconds")
            print(f"no report at {now}: {error}", file=sys.stderr, flush=True)
        first = False
        time.sleep(max(0.0, every - (time.monotonic() - began)))


__all__ = ["Figures", "serve", "watch"]
