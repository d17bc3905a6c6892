"""The figures that workers and the gateway's cluster report, and how /metrics shows each: one table.

They report flat names with numbers (`{"pages_free": 12, ...}`); a rule here turns a name into a metric, its labels and its
help. The one thing to know: a figure without a rule is shown all the same, as hermetic_worker_NAME (a counter if the name
ends in _total, else a gauge), so that nothing that a worker counts is lost; it only has no help of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

GATEWAY = "gateway"  # the name under which the gateway's own part reports


@dataclass(frozen=True)
class Group:
    """Figures that differ in one label: PREFIX + VALUE -> metric{label=VALUE}. No `values`: any."""

    prefix: str
    metric: str
    label: str
    help: str
    counts: bool = False
    values: tuple[str, ...] = ()


GROUPS = (
    Group("pages_", "hermetic_pages", "state", "KV pages by state; together they are all pages of a worker",
          values=("free", "leased", "cached", "quarantined")),
    Group("slots_", "hermetic_slots", "state", "Landing slots by state; together they are all slots of a worker",
          values=("free", "granted", "quarantined")),
    Group("sequences_", "hermetic_sequences", "phase", "Sequences in a worker by phase",
          values=("waiting", "reserved", "prefilling", "running")),
    Group("tiles_verified_", "hermetic_tiles_verified", "level", "Seal tiles verified", counts=True),
    Group("requests_verified_", "hermetic_requests_verified", "level", "Requests verified", counts=True),
    Group("releases_", "hermetic_releases", "outcome",
          "Releases of pages and slots that had to wait, by what ended the wait; quarantined: the drain deadline passed first",
          counts=True, values=("drained", "fenced", "quarantined")),
)  # fmt: skip

GATEWAY_GROUPS = (
    Group("workers_", "hermetic_workers", "state", "Workers by state, as hermetic status shows them",
          values=("joining", "ready", "draining", "drained", "unreachable", "gone", "refused")),
    Group("retries_", "hermetic_retries", "reason",
          "Times that choices were run again on a pair of workers, by the code of what was lost", counts=True),
)  # fmt: skip


@dataclass(frozen=True)
class Single:
    """One figure. `metric` is without hermetic_; without the worker_ in front that most have, it is the gateway's."""

    metric: str
    help: str
    counts: bool = False


def _counter(name: str, text: str) -> tuple[str, Single]:
    return name, Single(f"worker_{name.removesuffix('_total')}", text, True)


def _gauge(name: str, text: str) -> tuple[str, Single]:
    return name, Single(f"worker_{name}", text)


SINGLES: Mapping[str, Single] = dict([
    ("pages_total", Single("pages_capacity", "KV pages of a worker")),
    ("slots_total", Single("slots_capacity", "Landing slots of a worker, for all its peers")),
    ("drains_outstanding", Single("drains_outstanding", "Tickets that wait for the other half's drained, or for a fence")),
    ("releases_deferred", Single("releases_deferred", "Tickets that ended and still hold pages or slots, now")),
    _counter("lease_double_closes", "Leases that were closed twice: contained, and a fault"),
    _counter("slot_double_closes", "Landing slots that were given back twice: contained, and a fault"),
    _counter("tag_mismatches", "Pages whose tag was not what a reader expected"),
    _counter("tag_checks", "Page tables compared with the tags before a step"),
    _counter("pages_quarantined_ever", "Pages that were ever taken out of use as suspect"),
    _counter("pages_landed", "Pages that came from a peer and verified"),
    _counter("pages_refused_landing", "Pages that came from a peer and did not verify"),
    _counter("bytes_landed", "Bytes copied out of landing slots"),
    _counter("resends", "Pages that were asked for once more because they did not verify"),
    _counter("kv_integrity_failures", "Requests ended because a page was not their own"),
    _counter("peers_refused", "Connections to the control port without the cluster's keys"),
    _counter("peers_lost", "Times that a peer was given up: it was silent, or its process ended"),
    _counter("fences_total", "Segments that a lost peer can write to no more"),
    _counter("slots_fenced", "Landing slots that came back by a fence"),
    _counter("messages_stale", "Messages that were repeated, late, or of an attempt that is over: ignored"),
    _counter("messages_resent", "Messages said again because no acknowledgement came"),
    _counter("messages_rejected", "Messages that could not be read or did not belong here: ignored"),
    _counter("preemptions", "Choices that gave their pages back to others and ran again"),
    _counter("forks", "Pages copied for a further choice of a prompt"),
    _counter("steps", "Steps of the engine"),
    _counter("requests", "Requests taken by a worker"),
    _counter("prompt_tokens", "Prompt tokens computed by a worker"),
    _counter("output_tokens", "Tokens made by a worker"),
    _counter("prefix_pages_shared", "Prompt pages that were read instead of computed"),
    _counter("prefix_tokens_shared", "Prompt tokens that were read instead of computed"),
    _counter("sequence_steps_verified_read", "Sequences whose reads were verified in a step"),
    _counter("refused", "Halves of requests that a worker refused by its own numbers"),
    _counter("completed", "Halves of requests that a worker completed"),
    _counter("failed", "Halves of requests that failed in a worker"),
    _counter("aborted", "Halves of requests that were cancelled in a worker"),
    _gauge("handoffs_open", "Handoffs that hold something on a worker"),
    _gauge("pages_sending", "KV pages that a peer may still be sent"),
    _gauge("peers_silent", "Peers that give no sign of life and are not fenced"),
    _gauge("writes_in_flight", "Batches of pages that are being written to a peer"),
    _gauge("writes_in_doubt", "Handoffs that wait for a fence because a write neither completed nor stopped"),
])  # fmt: skip

GATEWAY_SINGLES: Mapping[str, Single] = {
    "requests_open": Single("gateway_requests_open", "Requests being served or waiting"),
    "attempts_open": Single("gateway_attempts_open", "Attempts whose halves have not both ended"),
    "reruns": Single("gateway_reruns", "Attempts after a request's first: preempted, or a worker was lost", True),
    "ends_missed": Single("gateway_ends_missed", "Halves that did not say their end in time", True),
    "messages_stale": Single("gateway_messages_stale", "Messages of workers that are late or repeated: ignored", True),
    "messages_rejected": Single("gateway_messages_rejected", "Messages that could not be read: ignored", True),
    "messages_resent": Single("gateway_messages_resent", "Messages said again to workers", True),
    "peers_refused": Single("peers_refused", "Connections to the control port without the cluster's keys", True),
    "registrations_rejected": Single("registrations_rejected", "Workers that may not join, by incarnation and reason", True),
    "workers_alive": Single("workers_alive", "Workers that give signs of life"),
    "context_advertised": Single("context_advertised_tokens", "Tokens of prompt and answer that are advertised"),
    "disabled": Single("disabled", "1 while the model is disabled, else 0"),
    "integrity_failures_total": Single("integrity_failures", "Requests that met a page that was not their own", True),
    "disabled_trips_total": Single("disabled_trips", "Times that integrity failures disabled the model", True),
}  # fmt: skip

_DURATION = "release_seconds_"
_DURATION_HELP = "How long releases of pages and slots waited for drained or a fence"


def families(stats: Mapping[str, Mapping[str, float]]) -> Iterable[Metric]:
    """Everything that was reported, as metrics. `stats`: by worker, and under GATEWAY."""
    found: dict[str, Metric] = {}
    for worker, figures in stats.items():
        _durations(found, worker, figures)
        for name, value in figures.items():
            if not name.startswith(_DURATION):
                _add(found, worker, name, value)
    return found.values()


def _add(found: dict[str, Metric], worker: str, name: str, value: float) -> None:
    ours = worker == GATEWAY
    single = (GATEWAY_SINGLES if ours else SINGLES).get(name)
    if single is None:
        for group in GATEWAY_GROUPS if ours else GROUPS:
            label = name.removeprefix(group.prefix)
            if name.startswith(group.prefix):
                label = label.removesuffix("_total") if group.counts else label
                if not group.values or label in group.values:
                    labels, values = (
                        ([group.label], [label]) if ours else (["worker", group.label], [worker, label])
                    )
                    _sample(found, group.metric, group.help, group.counts, labels, values, value)
                    return
        short = re.sub(r"[^a-zA-Z0-9_]", "_", name.removesuffix("_total"))
        kind = "gateway" if ours else "worker"
        single = Single(f"{kind}_{short}", f"The {kind}'s {short.replace('_', ' ')}", name.endswith("_total"))
    labels, values = ([], []) if ours else (["worker"], [worker])
    _sample(found, f"hermetic_{single.metric}", single.help, single.counts, labels, values, value)


def _sample(
    found: dict[str, Metric],
    metric: str,
    text: str,
    counts: bool,
    labels: list[str],
    values: list[str],
    value: float,
) -> None:
    kind = CounterMetricFamily if counts else GaugeMetricFamily
    family = found.setdefault(metric, kind(metric, text, labels=labels))
    assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
    family.add_metric(values, value)


def _durations(found: dict[str, Metric], worker: str, figures: Mapping[str, float]) -> None:
    """The histogram that a worker reports as release_seconds_bucket_BOUND (cumulative), _sum and _count."""
    prefix = f"{_DURATION}bucket_"
    bounds = {name.removeprefix(prefix): value for name, value in figures.items() if name.startswith(prefix)}
    if "inf" not in bounds:
        return
    ordered = sorted(bounds.items(), key=lambda one: float(one[0]))
    buckets = [("+Inf" if bound == "inf" else bound, count) for bound, count in ordered]
    metric = "hermetic_release_seconds"
    family = found.setdefault(metric, HistogramMetricFamily(metric, _DURATION_HELP, labels=["worker"]))
    assert isinstance(family, HistogramMetricFamily)
    family.add_metric([worker], buckets, figures.get(f"{_DURATION}sum", 0.0))
