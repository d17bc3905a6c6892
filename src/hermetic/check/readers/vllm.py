"""What vLLM answers and logs: /v1/models, /version, /server_info (developer mode only; as JSON or as text), /metrics, and its log.

The one thing to know: field names, log lines and metrics are those of 0.32.0, whose output and source were read. Where several engines of one
server say a number, the smallest counts, since a request may meet that engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hermetic.check import facts
from hermetic.check.deployment import ALONE
from hermetic.check.facts import Fact, Sheet
from hermetic.check.readers import packages, prometheus, values
from hermetic.check.readers.logs import Line
from hermetic.check.readers.prometheus import Samples
from hermetic.check.readers.reading import Reading

NAME = "vllm"
ENOUGH_TOKENS = 1_000  # a speed over fewer is that of a warm-up
LEASE = 30.0  # seconds; distributed/kv_transfer/kv_connector/v1/nixl/base_scheduler.py of 0.32.0
DEVELOPER_ROUTES = ("/collective_rpc", "/server_info", "/reset_prefix_cache", "/sleep")

_LISTS: tuple[tuple[Fact[Any], str, Any], ...] = (
    (facts.MODEL, "model", values.text),
    (facts.REVISION, "revision", values.text),
    (facts.KV_DTYPE, "kv_cache_dtype", values.kv_dtype),
    (facts.TP, "tensor_parallel_size", values.positive),
    (facts.PP, "pipeline_parallel_size", values.positive),
    (facts.REMOTE_CODE, "trust_remote_code", values.flag),
    (facts.HOST, "host", values.text),
)


# ------------------------------------------------------------------------------------ answers


def models(name: str, entry: Mapping[str, Any]) -> Reading:
    """An entry of /v1/models."""
    sheet = _sheet(name, facts.MODELS)
    sheet.add(facts.SERVED, values.text(entry.get("id")), f"{name}, id")
    sheet.add(facts.MODEL, values.text(entry.get("root")), f"{name}, root")
    sheet.add(facts.CONTEXT, values.positive(entry.get("max_model_len")), f"{name}, max_model_len")
    return Reading([sheet])


def server_info(name: str, told: Mapping[str, Any]) -> Reading:
    """/server_info?config_format=json, and the same as text. That it answers at all shows that developer mode is on."""
    sheet = _sheet(name, facts.SERVER_INFO)
    sheet.add(facts.DEVELOPER, True, name)
    system = told.get("system_env")
    version = values.text(system.get("vllm_version")) if isinstance(system, dict) else None
    sheet.add(facts.VERSION, version, f"{name}, vllm_version")
    config = told.get("vllm_config")
    if isinstance(config, str):
        written = values.fields(config)
        if written is None:
            return Reading([sheet]).failed(name, "its vllm_config is cut", part=True)
        _config_text(sheet, values.literals(_unquoted(written)), name)
    elif isinstance(config, dict):
        _config(sheet, config, name, version)
    environment = told.get("vllm_env")
    if isinstance(environment, dict):
        host = values.text(environment.get("VLLM_NIXL_SIDE_CHANNEL_HOST"))
        if facts.TRANSPORT in sheet and sheet[facts.TRANSPORT] == "nixl":
            sheet.add(facts.INNER_HOST, host, f"{name}, VLLM_NIXL_SIDE_CHANNEL_HOST")
    return Reading([sheet])


def _config(sheet: Sheet, config: Mapping[str, Any], name: str, version: str | None) -> None:
    """The parts that are JSON."""
    model, cache, parallel, handoff = (
        part if isinstance(part := config.get(f"{key}_config"), dict) else {}
        for key in ("model", "cache", "parallel", "kv_transfer")
    )
    _listed(sheet, model, name)
    _listed(sheet, parallel, name)
    sheet.add(facts.SERVED, values.text(model.get("served_model_name")), f"{name}, served_model_name")
    sheet.add(facts.CONTEXT, values.positive(model.get("max_model_len")), f"{name}, max_model_len")
    sheet.add(facts.KV_DTYPE, values.kv_dtype(cache.get("cache_dtype")), f"{name}, cache_dtype")
    sheet.add(facts.PAGE, values.positive(cache.get("block_size")), f"{name}, block_size")
    sheet.add(facts.POOL, values.positive(cache.get("kv_cache_size_tokens")), f"{name}, kv_cache_size_tokens")
    if handoff:
        _handoff(
            sheet, handoff, handoff.get("kv_connector_extra_config"), f"{name}, kv_transfer_config", version
        )
    elif config.get("kv_transfer_config", ...) is None:
        sheet.add(facts.ROLE, ALONE, f"{name}, kv_transfer_config")


def _config_text(sheet: Sheet, told: Mapping[str, object], where: str) -> None:
    """`model='...', ..., max_seq_len=4096, ...`: of /server_info as text, and of the log's line on the engine."""
    _listed(sheet, told, where)
    sheet.add(facts.CONTEXT, values.positive(told.get("max_seq_len")), f"{where}, max_seq_len")
    sheet.add(facts.SERVED, values.text(told.get("served_model_name")), f"{where}, served_model_name")


def _unquoted(written: dict[str, str]) -> dict[str, str]:
    """That line leaves out the quotes of some names."""
    plain = ("kv_cache_dtype", "served_model_name", "revision")
    return {
        name: repr(value) if name in plain and value != "None" and value[:1] not in "'\"" else value
        for name, value in written.items()
    }


def _listed(sheet: Sheet, told: Mapping[str, object], where: str) -> None:
    for fact, name, reads in _LISTS:
        sheet.add(fact, reads(told.get(name)), f"{where}, {name}")


def _handoff(
    sheet: Sheet, told: Mapping[str, object], extra: object, where: str, version: str | None
) -> None:
    """KVTransferConfig. `extra`: its kv_connector_extra_config; what is no mapping could not be read."""
    moves = values.transport(told.get("kv_connector"))
    sheet.add(facts.TRANSPORT, moves, f"{where}, kv_connector")
    if (
        moves is None and values.text(told.get("kv_connector")) is not None
    ):  # it hands nothing to another node
        sheet.add(facts.ROLE, ALONE, f"{where}, kv_connector")
    else:
        sheet.add(facts.ROLE, values.role(told.get("kv_role")), f"{where}, kv_role")
    policy = values.text(told.get("kv_load_failure_policy"))
    sheet.add(facts.LOAD_FAILURE, policy, f"{where}, kv_load_failure_policy")
    if isinstance(extra, dict):
        for one in _connectors(told, extra):
            _lease(sheet, one, where, version)


def _connectors(told: Mapping[str, object], extra: Mapping[str, object]) -> list[Mapping[str, object]]:
    """The connector, or those that a MultiConnector holds."""
    inner = extra.get("connectors")
    if isinstance(inner, list):
        return [one for one in inner if isinstance(one, dict)]
    return [{**told, "kv_connector_extra_config": extra}]


def _lease(sheet: Sheet, connector: Mapping[str, object], where: str, version: str | None) -> None:
    extra = connector.get("kv_connector_extra_config")
    lease = extra.get("kv_lease_duration") if isinstance(extra, dict) else None
    sheet.add(facts.LEASE, values.number(lease), f"{where}, kv_lease_duration")
    nixl = values.transport(connector.get("kv_connector")) == "nixl"
    if lease is None and nixl and re.match(r"v?0\.32\.0(?!\d)", version or ""):
        sheet.add(facts.LEASE, LEASE, "default of 0.32.0")


def _sheet(name: str, kind: str) -> Sheet:
    """`kind`: of source."""
    sheet = Sheet(sources=[name], read={kind})
    sheet.add(facts.ENGINE, NAME, name)
    return sheet


# ------------------------------------------------------------------------------------ metrics

_CACHE, _QUEUE = "vllm:cache_config_info", "vllm:request_queue_time_seconds"
_PROMPTS, _PREFILLS = "vllm:request_prefill_kv_computed_tokens", "vllm:request_prefill_time_seconds"
_SOURCES, _NIXL = "vllm:prompt_tokens_by_source_total", "vllm:nixl_num"
_TAKEN = "vllm:nixl_xfer_time_seconds_count"
METRICS = frozenset({
    _CACHE, f"{_QUEUE}_bucket", f"{_PROMPTS}_sum", f"{_PREFILLS}_sum", _SOURCES,
    f"{_NIXL}_failed_transfers_total", f"{_NIXL}_failed_notifications_total", f"{_NIXL}_kv_expired_reqs_total",
    f"{_NIXL}_notifications_after_expiry_total", "vllm:nixl_bytes_transferred_sum", "vllm:nixl_xfer_time_seconds_sum",
    _TAKEN,
})  # fmt: skip


def metrics(name: str, body: bytes) -> Reading:
    """/metrics."""
    found = prometheus.read(body, METRICS)
    reading = Reading()
    for labels, samples in found.groups("instance"):
        sheet = _sheet(name, facts.METRICS_PAGE)
        sheet.address = values.address(labels.get("instance"))
        _cache(sheet, name, samples)
        _waited(sheet, name, samples)
        _nixl(sheet, name, samples)
        _speed(sheet, name, samples)
        reading.sheets.append(sheet)
    return reading.failed(name, found.why, part=bool(reading.sheets)) if found.why else reading


def _cache(sheet: Sheet, name: str, samples: Samples) -> None:
    """The configuration of the cache is in labels. Where the tokens are not, they are blocks times the block's size."""
    pools = list[int]()
    for sample in samples.of(_CACHE):
        size, tokens = (
            values.positive(sample.labels.get(key)) for key in ("block_size", "kv_cache_size_tokens")
        )
        blocks = values.positive(sample.labels.get("num_gpu_blocks"))
        sheet.add(facts.PAGE, size, f"{name}, {_CACHE} block_size")
        sheet.add(
            facts.KV_DTYPE, values.kv_dtype(sample.labels.get("cache_dtype")), f"{name}, {_CACHE} cache_dtype"
        )
        if tokens or (size and blocks):
            pools.append(tokens or (size or 0) * (blocks or 0))
    sheet.add(facts.POOL, min(pools, default=None), f"{name}, {_CACHE}")


def _waited(sheet: Sheet, name: str, samples: Samples) -> None:
    """The upper end of the last part of the histogram in which there is a request: nobody waited longer. Of those beyond all ends only
    that they waited longer is known."""
    ends = dict[float, float]()
    for sample in samples.of(f"{_QUEUE}_bucket"):
        end, below = values.bound(sample.labels.get("le")), values.number(sample.value)
        if end is None or below is None:
            return
        ends[end] = ends.get(end, 0.0) + below
    everybody = ends.pop(float("inf"), None)
    if not everybody or not ends:
        return
    longest = next((end for end, below in sorted(ends.items()) if below >= everybody), max(ends))
    sheet.add(facts.WAITED, values.number(longest), f"{name}, {_QUEUE} (at most)")


def _nixl(sheet: Sheet, name: str, samples: Samples) -> None:
    """Failed notifications are among the failed transfers in 0.32, and were not always: the larger of both is certain."""
    for fact, kinds in (
        (facts.FAILED_TRANSFERS, ("failed_transfers", "failed_notifications")),
        (facts.EXPIRED, ("kv_expired_reqs",)),
        (facts.READ_LATE, ("notifications_after_expiry",)),
    ):
        counts = [
            (count, kind)
            for kind in kinds
            if (count := values.whole(samples.total(f"{_NIXL}_{kind}_total"))) is not None
        ]
        if counts:
            count, kind = max(counts, key=lambda one: one[0])
            sheet.add(fact, count, f"{name}, {_NIXL}_{kind}_total")
    taken = values.whole(samples.total(_TAKEN))
    sheet.add(facts.TRANSFERS, taken, f"{name}, {_TAKEN}")
    size, took = (
        samples.total("vllm:nixl_bytes_transferred_sum"),
        samples.total("vllm:nixl_xfer_time_seconds_sum"),
    )
    if size and took:
        where = f"{name}, vllm:nixl_bytes_transferred over vllm:nixl_xfer_time_seconds (transfers: {taken or 0:,})"
        sheet.add(facts.TRANSFER_SPEED, size / took, where)


def _speed(sheet: Sheet, name: str, samples: Samples) -> None:
    """How fast a request's own prompt was prefilled, beside whatever ran with it. Not where prompts came from another node."""
    tokens, took = samples.total(f"{_PROMPTS}_sum"), samples.total(f"{_PREFILLS}_sum")
    elsewhere = samples.total(_SOURCES, source="external_kv_transfer")
    if tokens and took and tokens >= ENOUGH_TOKENS and elsewhere == 0:
        where = f"{name}, {_PROMPTS} over {_PREFILLS} ({tokens:,.0f} tokens)"
        sheet.add(facts.PREFILL_SPEED, tokens / took, where)


# ------------------------------------------------------------------------------------ log

_VERSION = re.compile(rb"(?:\bversion |vLLM API server version |V\d LLM engine \(v)(\d+\.\d+[^\s),]{0,40})")
_POOL = re.compile(rb"\b(?:GPU|CPU|XPU|TPU|HPU)[^:]{0,12} KV cache size: ([\d,]+) tokens")
_CONTEXT = re.compile(rb"Using max model len (\d+)")
_ADDRESS = re.compile(rb"(?:Starting vLLM (?:API )?server (?:\d+ )?on|Uvicorn running on) (https?://\S+)")
_ROUTE = re.compile(rb"Route: (/\S*), Methods")


# Nothing of the kind in a log says nothing: it may end before. Only /metrics says that there was none.
EXPIRIES: Mapping[bytes, Fact[int]] = {
    b"Releasing expired KV blocks": facts.EXPIRED,
    b"Potentially invalid KV blocks": facts.READ_LATE,
}


class Log:
    """Reads the lines of one log. What a node was started with is of its last start in the log; what went wrong is of all of it."""

    words: frozenset[bytes] = frozenset({
        b"non-default args: ", b"version ", b"LLM engine (v", b"Using max model len ", b"KV cache size: ", b"Starting vLLM ",
        b"Available routes are", b"Route: /", b"Application startup complete", b"Uvicorn running on", b"Successfully installed",
        *EXPIRIES, *packages.words(NAME),
    })  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.ours = False
        self.notes: list[str] = []
        self._sheet = Sheet()
        self._begin()

    def _begin(self) -> None:
        before, self._sheet = self._sheet, Sheet(sources=[self.name])
        for fact in EXPIRIES.values():
            for seen in before.take_out(fact):
                self._sheet.add(fact, seen.value, seen.where)
        self._version: str | None = None
        self._arguments: tuple[dict[str, str], str] | None = None
        self._developer: str | None = None
        self._routes = ""
        self._listed = False

    def feed(self, line: Line) -> None:
        """A line with one of `words` in it."""
        text, where = line.text, f"{self.name}, line {line.number}"
        if not line.whole:
            self.notes.append(f"line {line.number} is cut")
            self._evidence(text, where)
        elif line.quotes:
            self._evidence(text, where)
        elif b"non-default args: " in text:
            self._started(line, where)
        elif b"LLM engine (v" in text:
            self._versioned(text, where)
            self._engine(line, where)
        elif match := _CONTEXT.search(text):
            self.ours = True
            self._least(facts.CONTEXT, values.positive(match[1].decode()), where)
        elif match := _POOL.search(text):
            self.ours = True
            self._least(facts.POOL, values.positive(match[1].decode()), where)
        elif match := _ADDRESS.search(text):
            self._address(match[1], where, b"vLLM" in text)
        elif b"Available routes are" in text:
            self._routes = where
        elif match := _ROUTE.search(text):
            if match[1].decode("utf-8", "replace") in DEVELOPER_ROUTES:
                self._developer = self._developer or where
        elif b"Application startup complete" in text:
            self._listed = bool(self._routes)
            self._sheet.replace(facts.STARTED, True, where)
        elif packages.listed(self._sheet, NAME, text, where):
            self.ours = True
        elif b"Successfully installed" in text:
            packages.transports(self._sheet, text, where)
        elif b"  version " in text or b"vLLM API server version " in text:
            self._versioned(text, where)
        else:
            self._evidence(text, where)

    def _evidence(self, text: bytes, where: str) -> None:
        """What went wrong; it counts also where it is only quoted."""
        found = [fact for words, fact in EXPIRIES.items() if words in text]
        if found:
            self._sheet.count(found[0], where)

    def _versioned(self, text: bytes, where: str) -> None:
        match = _VERSION.search(text)
        if match is None:
            return
        self.ours = True
        if b"LLM engine" not in text and (
            self._arguments or self._version
        ):  # it prints it first: this is another start
            self._begin()
        self._version = match[1].decode("utf-8", "replace")
        self._sheet.add(facts.VERSION, values.text(self._version), where)

    def _started(self, line: Line, where: str) -> None:
        """The options that are not the defaults."""
        self.ours = True
        if self._arguments is not None:
            self._begin()
        written = values.fields(line.text.split(b"non-default args: ", 1)[1].decode("utf-8", "replace"))
        if written is None:
            self.notes.append(f"line {line.number} lists the options and is cut")
            return
        self._arguments = written, where
        told = values.literals(written)
        _listed(self._sheet, told, where)
        self._sheet.add(facts.CONTEXT, values.positive(told.get("max_model_len")), f"{where}, max_model_len")
        self._sheet.add(facts.PAGE, values.positive(told.get("block_size")), f"{where}, block_size")
        if written.get("api_key", "None") not in ("None", "[]", "''"):
            self._sheet.add(facts.API_KEY, True, f"{where}, api_key")
        self._sheet.address = values.host_port(told.get("host"), told.get("port"))

    def _engine(self, line: Line, where: str) -> None:
        """The engine's whole configuration."""
        _, found, config = line.text.partition(b"with config: ")
        written = values.fields(config.decode("utf-8", "replace")) if found else None
        if written is not None:
            _config_text(self._sheet, values.literals(_unquoted(written)), where)

    def _address(self, url: bytes, where: str, ours: bool) -> None:
        self.ours = self.ours or ours
        at = values.address(url.decode("utf-8", "replace"))
        if at is not None:
            self._sheet.address = self._sheet.address or at
            self._sheet.add(facts.HOST, at[0], where)

    def _least(self, fact: Fact[int], value: int | None, where: str) -> None:
        known = self._sheet.values(fact)
        if value is not None and (not known or value < min(known)):
            self._sheet.replace(fact, value, where)

    def sheets(self) -> list[Sheet]:
        """What the log says; nothing if it is not vLLM's."""
        if not self.ours:
            return []
        sheet = self._sheet
        sheet.read |= {facts.LOG} | ({facts.START} if self._arguments is not None else set())
        sheet.add(facts.ENGINE, NAME, self.name)
        if self._arguments is not None:
            self._transfer(sheet, *self._arguments)
            if facts.STARTED not in sheet:
                sheet.add(facts.STARTED, False, self.name)
        if self._developer is not None:
            sheet.add(facts.DEVELOPER, True, self._developer)
        elif self._listed:
            sheet.add(facts.DEVELOPER, False, f"{self._routes}: no such route")
        return [sheet]

    def _transfer(self, sheet: Sheet, written: dict[str, str], where: str) -> None:
        """How it hands KV over. Not listed means that it does not."""
        config = written.get("kv_transfer_config", "None")
        if config == "None":
            sheet.add(facts.ROLE, ALONE, f"{where}: no kv_transfer_config")
            return
        told = values.fields(config) or {}
        extra = values.nested(told.get("kv_connector_extra_config", "None"))
        _handoff(sheet, values.literals(told), extra, f"{where}, kv_transfer_config", self._version)


__all__ = ["METRICS", "NAME", "Log", "metrics", "models", "server_info"]
