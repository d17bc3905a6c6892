"""What Hermetic itself answers and logs: /v1/models, /metrics (names: telemetry/figures.py), and what its start prints.

The one thing to know: a gateway answers for all its workers. Its smallest pool stands for them, because the context that it advertises has
to fit every one. What Hermetic never does otherwise (code of a model, an open address without keys) is noted as what it
is, with that reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hermetic.check import facts, hosts
from hermetic.check.deployment import ALONE, BOTH, DECODE, PREFILL
from hermetic.check.facts import Sheet
from hermetic.check.readers import prometheus, values
from hermetic.check.readers.logs import Line
from hermetic.check.readers.prometheus import Samples
from hermetic.check.readers.reading import Reading

NAME = "hermetic"

_MODES = {"unified": ALONE, "disaggregated": BOTH, "prefill": PREFILL, "decode": DECODE}


# ------------------------------------------------------------------------------------ answers


def models(name: str, entry: Mapping[str, Any]) -> Reading:
    """An entry of /v1/models."""
    sheet = _sheet(name, facts.MODELS)
    sheet.add(facts.SERVED, values.text(entry.get("id")), f"{name}, id")
    sheet.add(facts.CONTEXT, values.positive(entry.get("max_model_len")), f"{name}, max_model_len")
    own = entry.get("hermetic")
    if not isinstance(own, dict):
        return Reading([sheet])
    mode = own.get("mode")
    sheet.add(facts.ROLE, _MODES.get(mode) if isinstance(mode, str) else None, f"{name}, mode")
    sheet.add(facts.PAGE, values.positive(own.get("page_size")), f"{name}, page_size")
    sheet.add(facts.VERIFY, values.text(own.get("verify")), f"{name}, verify")
    pools = own.get("pool_tokens")
    if isinstance(pools, dict) and pools:
        sizes = {str(worker): values.positive(size) for worker, size in pools.items()}
        worker, size = min(sizes.items(), key=lambda one: one[1] or 0)  # what is not known comes first
        sheet.add(facts.POOL, size, f"{name}, pool_tokens of {worker[:80]}")
    numeric = re.search(r"(?:^| )kv=(\S+)", str(own.get("numeric", "")))
    sheet.add(facts.KV_DTYPE, values.kv_dtype(numeric[1]) if numeric else None, f"{name}, numeric")
    _reached(sheet, name, own)
    return Reading([sheet])


def _reached(sheet: Sheet, name: str, own: Mapping[str, Any]) -> None:
    """Who can connect, and what they are asked for; not said by a gateway of before there was a word for it."""
    keys = own.get("api_keys")
    sheet.add(facts.HOST, values.text(own.get("listens")), f"{name}, listens")
    sheet.add(facts.API_KEY, keys if isinstance(keys, bool) else None, f"{name}, api_keys")
    metrics_open = {"this host": False, "everybody": True}.get(str(own.get("metrics")))
    sheet.add(facts.METRICS_OPEN, metrics_open, f"{name}, metrics")


def _sheet(name: str, kind: str) -> Sheet:
    """`kind`: of source."""
    sheet = Sheet(sources=[name], read={kind})
    itself(sheet, name)
    return sheet


def itself(sheet: Sheet, where: str) -> None:
    """What is known of every Hermetic."""
    sheet.add(facts.ENGINE, NAME, where)
    sheet.add(facts.REMOTE_CODE, False, f"{where}: Hermetic runs no code of a model")


# ------------------------------------------------------------------------------------ metrics

_VERIFIED, _SERVED, _PAGES = "hermetic_requests_verified_total", "hermetic_requests_total", "hermetic_pages"
_RELEASES = "hermetic_releases_total"
METRICS = frozenset({
    _VERIFIED, _SERVED, _PAGES, _RELEASES, "hermetic_disabled", "hermetic_integrity_failures_total",
    "hermetic_context_advertised_tokens",
})  # fmt: skip


def metrics(name: str, body: bytes) -> Reading:
    """/metrics of a gateway."""
    found = prometheus.read(body, METRICS)
    reading = Reading()
    for labels, samples in found.groups("instance"):
        sheet = _sheet(name, facts.METRICS_PAGE)
        sheet.address = values.address(labels.get("instance"))
        _metrics(sheet, name, samples)
        reading.sheets.append(sheet)
    return reading.failed(name, found.why, part=bool(reading.sheets)) if found.why else reading


def _metrics(sheet: Sheet, name: str, samples: Samples) -> None:
    verified = [samples.total(_VERIFIED, level=level) for level in ("landing", "read")]
    most = max((one for one in verified if one is not None), default=None)
    sheet.add(facts.VERIFIED, values.whole(most), f"{name}, {_VERIFIED}")
    for fact, metric, labels in (
        (facts.SERVED_REQUESTS, _SERVED, {"outcome": "completed"}),
        (facts.QUARANTINED, _PAGES, {"state": "quarantined"}),
        (facts.INTEGRITY_FAILURES, "hermetic_integrity_failures_total", {}),
    ):
        sheet.add(fact, values.whole(samples.total(metric, **labels)), f"{name}, {metric}")
    metric = "hermetic_context_advertised_tokens"
    sheet.add(facts.CONTEXT, values.positive(samples.least(metric)), f"{name}, {metric}")
    disabled = samples.most("hermetic_disabled")
    sheet.add(facts.DISABLED, None if disabled is None else disabled > 0, f"{name}, hermetic_disabled")
    outcomes = [samples.total(_RELEASES, outcome=outcome) for outcome in ("drained", "fenced")]
    if ended := [one for one in outcomes if one is not None]:
        sheet.add(facts.RELEASED, values.whole(sum(ended)), f"{name}, {_RELEASES}")


# ------------------------------------------------------------------------------------ log

_GATEWAY = re.compile(
    r"ready (https?://\S+)  model (\S+), context ([\d,]+) tokens \(measured: (.*); model window [\d,]+\), "
    r"pages of (\d+), verify (\w+), (unified|disaggregated)$"
)
_CLUSTER = re.compile(r"ready (https?://\S+)  control \S+, \d+ workers in ")
_WORKER = re.compile(
    r"ready \S+ \S+  (prefill|decode|unified), ([\d,]+) tokens \([\d,]+ pages of (\d+)\), transport (\w+); announcing itself"
)
_EVENT = re.compile(
    r"\d\d:\d\d:\d\d\.\d{3} (?:DEBUG|INFO|WARNING|ERROR|CRITICAL) +(gateway|worker|supervisor) "
)
_JSON = re.compile(r'\{"ts": [\d.]+, "level": "\w+", "logger": "hermetic\.')


class Log:
    """Reads the lines of one log: of a gateway, of a worker on its own, or of `hermetic serve`, which is both."""

    words: frozenset[bytes] = frozenset(
        {
            b"ready ",
            b" gateway ",
            b" worker ",
            b" supervisor ",
            b"hermetic.",
        }
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.ours = False
        self.notes: list[str] = []
        self._sheet = Sheet(sources=[name])

    def feed(self, line: Line) -> None:
        """A line with one of `words` in it."""
        if not line.whole:
            self.notes.append(f"line {line.number} is cut")
            return
        text, where = line.text[:65536].decode("utf-8", "replace"), f"{self.name}, line {line.number}"
        event = _EVENT.match(text) or _JSON.match(text)
        if line.quotes and not event:
            return
        if match := _GATEWAY.search(text):
            sheet = self._begin(match[1], where)
            sheet.add(facts.SERVED, values.text(match[2]), where)
            sheet.add(facts.CONTEXT, values.positive(match[3]), where)
            sizes = [values.positive(size) for size in re.findall(r"(?:^|, )\S+ ([\d,]+) tokens", match[4])]
            sheet.add(facts.POOL, min(filter(None, sizes), default=None), where)
            sheet.add(facts.PAGE, values.positive(match[5]), where)
            sheet.add(facts.VERIFY, match[6], where)
            sheet.add(facts.ROLE, _MODES[match[7]], where)
        elif match := _WORKER.search(text):
            sheet = self._begin(None, where)
            sheet.add(facts.ROLE, _MODES.get(match[1], ALONE), where)
            sheet.add(facts.POOL, values.positive(match[2]), where)
            sheet.add(facts.PAGE, values.positive(match[3]), where)
            sheet.add(facts.TRANSPORT, match[4], where)
        elif match := _CLUSTER.search(text):
            self._begin(match[1], where).add(facts.ROLE, BOTH, where)
        elif event:
            self.ours = True

    def _begin(self, url: str | None, where: str) -> Sheet:
        """It has started, once more perhaps: the last start counts."""
        self.ours = True
        self._sheet = sheet = Sheet(sources=[self.name], address=values.address(url))
        sheet.add(facts.STARTED, True, where)
        if sheet.address is not None:
            sheet.add(facts.HOST, sheet.address[0], where)
            if not hosts.is_loopback(sheet.address[0]):
                sheet.add(facts.API_KEY, True, f"{where}: there Hermetic starts with keys only")
        return sheet

    def sheets(self) -> list[Sheet]:
        """What the log says; nothing if it is not Hermetic's."""
        if self.ours:
            self._sheet.read |= {facts.LOG} | ({facts.START} if facts.STARTED in self._sheet else set())
            itself(self._sheet, self.name)
        return [self._sheet] if self.ours else []


__all__ = ["METRICS", "NAME", "Log", "metrics", "models"]
