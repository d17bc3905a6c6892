"""What SGLang answers and logs: /server_info (and /get_server_info), /model_info, /v1/loads, /v1/models, /metrics, and its log.

The one thing to know: field names, log lines and metrics are those of 0.5.20 and 0.5.23, whose output and source were read. Where several
ranks say a number, the smallest counts, since a request may meet that rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hermetic.check import facts
from hermetic.check.deployment import DECODE, PREFILL
from hermetic.check.facts import Fact, Seen, Sheet
from hermetic.check.readers import defaults, packages, prometheus, values
from hermetic.check.readers.logs import Line
from hermetic.check.readers.prometheus import Samples
from hermetic.check.readers.reading import Reading

NAME = "sglang"
ENOUGH_TOKENS = 1_000  # a speed over fewer is that of a warm-up
GIB = 1024**3
MOST_RANKS = 4096
MOST_ROOMS = 100_000  # of which a log says that they were released by time-out

_OPTIONS: tuple[tuple[Fact[Any], str, Any], ...] = (
    (facts.MODEL, "model_path", values.text),
    (facts.REVISION, "revision", values.text),
    (facts.SERVED, "served_model_name", values.text),
    (facts.ROLE, "disaggregation_mode", values.role),
    (facts.CONTEXT, "context_length", values.positive),
    (facts.PAGE, "page_size", values.positive),
    (facts.RESERVE, "num_reserved_decode_tokens", values.whole),
    (facts.TRUNCATES, "allow_auto_truncate", values.flag),
    (facts.MEMORY_FRACTION, "mem_fraction_static", values.number),
    (facts.KV_DTYPE, "kv_cache_dtype", values.kv_dtype),
    (facts.TP, "tp_size", values.positive),
    (facts.PP, "pp_size", values.positive),
    (facts.CHECKSUM, "disaggregation_enable_kv_checksum", values.flag),
    (facts.CANARY, "kv_canary", values.text),
    (facts.HOST, "host", values.text),
    (facts.REMOTE_CODE, "trust_remote_code", values.flag),
)
_RESTORES = ("disaggregation_decode_enable_radix_cache", "enable_hierarchical_cache")  # needs both


def _options(sheet: Sheet, told: Mapping[str, object], where: str) -> None:
    """The options that a node runs with, as /server_info and the first line of its log list them."""
    for fact, name, reads in _OPTIONS:
        sheet.add(fact, reads(told.get(name)), f"{where}, {name}")
    for key, name in ((facts.API_KEY, "api_key"), (facts.ADMIN_KEY, "admin_api_key")):
        if name in told:
            sheet.add(key, values.key_is_set(told[name]), f"{where}, {name}")
    if sheet.values(facts.ROLE) in ([PREFILL], [DECODE]):  # else it is a default that moves nothing
        name = "disaggregation_transfer_backend"
        sheet.add(facts.TRANSPORT, values.backend(told.get(name)), f"{where}, {name}")
    if sheet.values(facts.ROLE) == [DECODE]:
        on = [values.flag(told.get(name)) for name in _RESTORES]
        restores = False if False in on else None if None in on else True
        sheet.add(facts.RESTORES, restores, f"{where}, {_RESTORES[0]} and {_RESTORES[1]}")
    sheet.address = sheet.address or values.host_port(told.get("host"), told.get("port"))


# ------------------------------------------------------------------------------------ answers


def server_info(name: str, told: Mapping[str, Any]) -> Reading:
    """/server_info and /get_server_info."""
    sheet = _sheet(name, facts.SERVER_INFO)
    states = [state for state in _list(told.get("internal_states")) if isinstance(state, dict)]
    options = {**(states[0] if states else {}), **told}
    _options(sheet, options, name)
    version = values.text(told.get("version"))
    sheet.add(facts.VERSION, version, f"{name}, version")
    sheet.add(facts.LONGEST, values.positive(options.get("max_req_input_len")), f"{name}, max_req_input_len")
    memory = [state.get("memory_usage") for state in states]
    pools = [values.positive(options.get("max_total_num_tokens"))]
    pools += [values.positive(one.get("token_capacity")) for one in memory if isinstance(one, dict)]
    sheet.add(facts.POOL, min(filter(None, pools), default=None), f"{name}, max_total_num_tokens")
    if "kv_canary" in told:  # all options are there
        for one in defaults.options(NAME, (version or "").removeprefix("v")):
            if not one.exists and one.fact not in sheet:
                sheet.add(one.fact, one.value, f"{name}: {one.says(version or '')}")
    return Reading([sheet])


def model_info(name: str, told: Mapping[str, Any]) -> Reading:
    """/model_info and /get_model_info."""
    sheet = _sheet(name, facts.MODEL_INFO)
    sheet.add(facts.MODEL, values.text(told.get("model_path")), f"{name}, model_path")
    sheet.add(facts.SERVED, values.text(told.get("served_model_name")), f"{name}, served_model_name")
    sheet.add(facts.ROLE, values.role(told.get("disaggregation_mode")), f"{name}, disaggregation_mode")
    return Reading([sheet])


def loads(name: str, told: Mapping[str, Any]) -> Reading:
    """/v1/loads: one entry for each data parallel rank."""
    sheet = _sheet(name, facts.LOADS)
    sheet.add(facts.VERSION, values.text(told.get("version")), f"{name}, version")
    tokens = microseconds = 0
    pools, speeds = list[int](), list[float]()
    for load in (one for one in _list(told.get("loads")) if isinstance(one, dict)):
        if pool := values.positive(load.get("max_total_num_tokens")):
            pools.append(pool)
        tokens += values.whole(load.get("total_prefill_uncached_tokens")) or 0
        microseconds += values.whole(load.get("total_prefill_busy_us")) or 0
        handoff = load.get("disaggregation")
        if isinstance(handoff, dict):
            sheet.add(facts.ROLE, values.role(handoff.get("mode")), f"{name}, disaggregation.mode")
            if speed := values.number(handoff.get("kv_transfer_speed_gb_s")):
                speeds.append(speed * GIB)
    sheet.add(facts.POOL, min(pools, default=None), f"{name}, max_total_num_tokens")
    sheet.add(facts.TRANSFER_SPEED, min(speeds, default=None), f"{name}, kv_transfer_speed_gb_s")
    if tokens >= ENOUGH_TOKENS and microseconds:
        where = f"{name}, total_prefill_uncached_tokens over total_prefill_busy_us ({tokens:,} tokens)"
        sheet.add(facts.PREFILL_SPEED, tokens / (microseconds / 1e6), where)
    return Reading([sheet])


def models(name: str, entry: Mapping[str, Any]) -> Reading:
    """An entry of /v1/models."""
    sheet = _sheet(name, facts.MODELS)
    sheet.add(facts.SERVED, values.text(entry.get("id")), f"{name}, id")
    sheet.add(facts.CONTEXT, values.positive(entry.get("max_model_len")), f"{name}, max_model_len")
    return Reading([sheet])


def _sheet(name: str, kind: str) -> Sheet:
    """`kind`: of source."""
    sheet = Sheet(sources=[name], read={kind})
    sheet.add(facts.ENGINE, NAME, name)
    return sheet


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


# ------------------------------------------------------------------------------------ metrics

_RELEASES = "sglang:decode_deferred_kv_release"
METRICS = frozenset({
    "sglang:max_total_num_tokens", "sglang:context_len", "sglang:page_size", "sglang:num_transfer_failed_reqs_total", "sglang:num_requests_total",
    "sglang:kv_cache_memory_usage_gb", f"{_RELEASES}_total", f"{_RELEASES}_seconds_count",
    "sglang:kv_transfer_total_mb_sum", "sglang:kv_transfer_latency_ms_sum", "sglang:kv_transfer_latency_ms_count",
})  # fmt: skip


def metrics(name: str, body: bytes) -> Reading:
    """/metrics, also of several nodes in one file, where the labels tell them apart."""
    found = prometheus.read(body, METRICS)
    reading = Reading()
    for labels, samples in found.groups("instance", "engine_type"):
        sheet = _sheet(name, facts.METRICS_PAGE)
        sheet.address = values.address(labels.get("instance"))
        sheet.add(facts.ROLE, values.role(labels.get("engine_type")), f"{name}, engine_type")
        _metrics(sheet, name, samples)
        reading.sheets.append(sheet)
    return reading.failed(name, found.why, part=bool(reading.sheets)) if found.why else reading


def _metrics(sheet: Sheet, name: str, samples: Samples) -> None:
    for fact, metric in (
        (facts.POOL, "sglang:max_total_num_tokens"),
        (facts.CONTEXT, "sglang:context_len"),
        (facts.PAGE, "sglang:page_size"),
    ):
        sheet.add(fact, values.positive(samples.least(metric)), f"{name}, {metric}")
    for fact, metric in (
        (facts.FAILED_TRANSFERS, "sglang:num_transfer_failed_reqs_total"),
        (facts.SERVED_REQUESTS, "sglang:num_requests_total"),
    ):
        sheet.add(fact, values.whole(samples.total(metric)), f"{name}, {metric}")
    metric = "sglang:kv_cache_memory_usage_gb"
    if size := samples.most(metric):
        sheet.add(facts.KV_BYTES, size * GIB, f"{name}, {metric} (of one rank)")
    _transfers(sheet, name, samples)
    _releases(sheet, name, samples)


def _transfers(sheet: Sheet, name: str, samples: Samples) -> None:
    """Megabytes are of 1024 * 1024 bytes: observability/req_time_stats.py of 0.5.23."""
    size, took = (
        samples.total("sglang:kv_transfer_total_mb_sum"),
        samples.total("sglang:kv_transfer_latency_ms_sum"),
    )
    count = values.whole(samples.total("sglang:kv_transfer_latency_ms_count"))
    if size and took and count:
        where = (
            f"{name}, sglang:kv_transfer_total_mb over sglang:kv_transfer_latency_ms (transfers: {count:,})"
        )
        sheet.add(facts.TRANSFER_SPEED, size * 1024**2 / (took / 1000), where)


def _releases(sheet: Sheet, name: str, samples: Samples) -> None:
    """An outcome that never happened has no line. Only where the outcomes add up to the number of releases is a missing one a zero."""
    ended = samples.total(f"{_RELEASES}_total")
    by_timeout = samples.total(f"{_RELEASES}_total", outcome="timeout")
    where = f"{name}, {_RELEASES}_total"
    if ended is not None and ended == samples.total(f"{_RELEASES}_seconds_count"):
        sheet.add(facts.RELEASED, values.whole(ended), where)
        by_timeout = by_timeout or 0.0
    sheet.add(facts.RELEASED_BY_TIMEOUT, values.whole(by_timeout), where)


# ------------------------------------------------------------------------------------ log

_POOL = re.compile(rb"max_total_num_tokens=(\d+), .{0,400}?context_len=(\d+)")
_DTYPE = re.compile(rb"(?:^|\] |sizing: )KV [Cc]ache (?:is )?allocated\. dtype: (\S+?),")
_UVICORN = re.compile(rb"Uvicorn running on (https?://\S+)")
_BOOTSTRAP = re.compile(rb"BootstrapServer started successfully on (\S+)")
_PREFILL = (
    re.compile(rb"Prefill batch, #"), re.compile(rb"#new-token: (\d{1,15}),"), re.compile(rb"#pending-token: (\d{1,15}),"),
    re.compile(rb"input throughput \(token/s\): (\d{1,15}\.?\d{0,6})"),
)  # one behind the other  # fmt: skip
_RANK = re.compile(rb"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d([^\]]{0,40})\]")
_CHECKED = re.compile(rb"\[canary\] step=\d+ protected_tokens=(\d+)")
_WRONG = re.compile(rb"KV checksum mismatch (?:on a peer rank )?req=")
_RELEASED = re.compile(rb"Deferred KV release for room (\S{1,40}) timed out after ")
_EVIDENCE: Mapping[bytes, tuple[Fact[int], ...]] = {
    b"KV checksum": (facts.CHECKSUM_SKIPPED, facts.CHECKSUM_WRONG),
    b"canary": (facts.CANARY_WARM_UP, facts.CANARY_WRONG),
}
_COUNTED = (facts.CHECKSUM_SKIPPED, facts.CHECKSUM_WRONG, facts.CANARY_WARM_UP, facts.CANARY_WRONG)


class Log:
    """Reads the lines of one log. What a node was started with is of its last start in the log; what went wrong is of all of it."""

    words: frozenset[bytes] = frozenset({
        b"server_args=", b"max_total_num_tokens=", b"allocated. dtype", b"KV checksum", b"canary", b"ready to roll",
        b"Uvicorn running on", b"BootstrapServer started", b"Prefill batch, ", b"Decode batch, ", b"Successfully installed",
        b"Deferred KV release", *packages.words(NAME),
    })  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.ours = False
        self.notes: list[str] = []
        self._sheet = Sheet(sources=[name])
        self._starts: dict[tuple[str, int], Sheet] = {}
        self._mixed = False
        self._begun = self._ready = False
        self._wrong = Sheet()  # what the detectors said, over all starts
        self._doubtful: set[Fact[int]] = set()  # of which no line is no zero
        self._rooms: set[bytes] = set()
        self._pending: dict[bytes, int] = {}
        self._tokens, self._seconds = 0, 0.0

    def feed(self, line: Line) -> None:
        """A line with one of `words` in it."""
        text = line.text
        if not line.whole:
            self._cut(line, text)
        elif (b"Prefill batch, #" in text or b"Decode batch, #" in text) and not line.quotes:
            self.ours = True
            if self._pending or b"#pending-token: 0," not in text:  # the most frequent line by far is neither
                self._prefill(text)
        else:
            self._told(line, text, f"{self.name}, line {line.number}")

    def _cut(self, line: Line, text: bytes) -> None:
        """The last line without an end, or one that is too long. What it says of something wrong counts; what it may have said of it is not known."""
        self.notes.append(f"line {line.number} is cut")
        before = {fact: self._wrong.values(fact) for fact in _COUNTED}
        self._evidence(text, f"{self.name}, line {line.number}", quoted=True)
        if before == {fact: self._wrong.values(fact) for fact in _COUNTED}:
            self._doubtful.update(*(about for words, about in _EVIDENCE.items() if words in text))

    def _told(self, line: Line, text: bytes, where: str) -> None:
        """Lines that are rare. Of what is only quoted, evidence of something wrong counts all the same."""
        if line.quotes:
            self._evidence(text, where, quoted=True)
        elif b"server_args=" in text:
            self._start(line, where)
        elif match := _POOL.search(text):
            self.ours = True
            self._least(facts.POOL, values.positive(match[1].decode()), where)
            self._least(facts.CONTEXT, values.positive(match[2].decode()), where)
        elif match := _DTYPE.search(text):
            self.ours = True
            self._sheet.add(facts.KV_DTYPE, values.kv_dtype(match[1].decode("utf-8", "replace")), where)
        elif b"The server is fired up and ready to roll!" in text:
            if not (self._begun or self._ready):  # the log begins after the node did, within its start
                self._warmed_up()
            self.ours = self._ready = True
        elif match := _UVICORN.search(text):
            self._address(match[1], where)
        elif match := _BOOTSTRAP.search(text):
            self.ours = True
            at = values.address(match[1].decode("utf-8", "replace"))
            self._sheet.add(facts.INNER_HOST, at[0] if at else None, where)
        elif packages.listed(self._sheet, NAME, text, where):
            self.ours = True
        elif b"Successfully installed" in text:
            packages.transports(self._sheet, text, where)
        else:
            self._evidence(text, where)

    def _evidence(self, text: bytes, where: str, quoted: bool = False) -> None:
        """What the detectors say."""
        if b"KV checksum skipped" in text:
            self._count(facts.CHECKSUM_SKIPPED, where)
        elif _WRONG.search(text):
            self._count(facts.CHECKSUM_WRONG, where)
        elif match := _RELEASED.search(text):
            if match[1] not in self._rooms and len(self._rooms) < MOST_ROOMS:  # every rank says it
                self._rooms.add(match[1])
                self._count(facts.RELEASED_BY_TIMEOUT, where)
        elif b"kv_canary violation: launch_tag=" in text:
            self._count(
                facts.CANARY_WARM_UP if self._begun and not self._ready else facts.CANARY_WRONG, where
            )
        elif not quoted and (match := _CHECKED.search(text)):
            self.ours = True
            self._most(facts.CANARY_CHECKED, values.whole(match[1].decode()), where)

    def _start(self, line: Line, where: str) -> None:
        """The line that lists all options: a node starts here."""
        written = line.text.split(b"server_args=", 1)[1].decode("utf-8", "replace")
        if not re.match(r"\{|ServerArgs\(", written):
            return
        self.ours = True
        told = values.fields(written)
        if told is None:
            self.notes.append(f"line {line.number} lists the options and is cut")
            return
        sheet = Sheet(sources=[self.name])
        _options(sheet, values.literals(told), where)
        self._mixed = self._mixed or self._of_another(sheet)
        self._sheet, self._begun, self._ready = sheet, True, False
        self._pending.clear()
        if sheet.address is not None:
            kept = Sheet(sources=[self.name], address=sheet.address)
            kept.take(sheet)
            self._starts[sheet.address] = kept

    def _of_another(self, sheet: Sheet) -> bool:
        """Whether this is the start of a second node, and not the same one again: then lines of two nodes are mixed."""
        role, before = sheet.values(facts.ROLE), self._sheet.values(facts.ROLE)
        return self._begun and sheet.address != self._sheet.address and role != before

    def _warmed_up(self) -> None:
        """The violations that were seen until now were of the warm-up."""
        for seen in self._wrong.take_out(facts.CANARY_WRONG):
            self._wrong.count(facts.CANARY_WARM_UP, seen.where, seen.value)

    def _address(self, url: bytes, where: str) -> None:
        at = values.address(url.decode("utf-8", "replace"))
        if at is not None:
            self._sheet.address = self._sheet.address or at
            self._sheet.add(facts.HOST, at[0], where)

    def _prefill(self, text: bytes) -> None:
        """The throughput is that since the last such line. It is a speed only where that line left tokens of a prompt pending."""
        at, figures, rank = 0, list[bytes](), _RANK.search(text)
        for pattern in _PREFILL:
            if (match := pattern.search(text, at)) is None:
                return
            at = match.end()
            figures += match.groups()
        new, pending, speed = int(figures[0]), int(figures[1]), float(figures[2])
        key = rank[1] if rank else b""
        if self._pending.get(key) and speed > 0:
            self._tokens += new
            self._seconds += new / speed
        self._pending.pop(key, None)
        if pending and len(self._pending) < MOST_RANKS:
            self._pending[key] = pending

    def _least(self, fact: Fact[int], value: int | None, where: str) -> None:
        known = self._sheet.values(fact)
        if value is not None and (not known or value < min(known)):
            self._sheet.replace(fact, value, where)

    def _most(self, fact: Fact[int], value: int | None, where: str) -> None:
        known = self._sheet.values(fact)
        if value is not None and (not known or value > max(known)):
            self._sheet.replace(fact, value, where)

    def _count(self, fact: Fact[int], where: str) -> None:
        self.ours = True
        self._wrong.count(fact, where)

    def sheets(self) -> list[Sheet]:
        """What the log says; nothing if it is not SGLang's."""
        if not self.ours:
            return []
        found = [self._sheet]
        if self._mixed:
            for seen in self._wrong.take_out(facts.CANARY_WARM_UP):  # whose warm-up it was is not known
                self._wrong.count(facts.CANARY_WRONG, seen.where, seen.value)
            self.notes.append(
                "the lines of several nodes are mixed; only what each was started with is read, and what was found wrong"
            )
            found = list(self._starts.values())
        else:
            self._measured(self._sheet)
        for sheet in found:
            sheet.read |= {facts.LOG} | ({facts.START} if self._begun else set())
            sheet.add(facts.ENGINE, NAME, self.name)
            for fact in _COUNTED:
                none = [] if fact in self._doubtful else [Seen(0, self.name)]
                for seen in self._wrong.seen(fact) or none:
                    sheet.add(fact, seen.value, seen.where)
            # no line is no zero: the log may begin later
            for seen in self._wrong.seen(facts.RELEASED_BY_TIMEOUT):
                sheet.add(facts.RELEASED_BY_TIMEOUT, seen.value, seen.where)
        return found

    def _measured(self, sheet: Sheet) -> None:
        if self._begun or self._ready:
            sheet.add(facts.STARTED, self._ready, self.name)
        if self._tokens >= ENOUGH_TOKENS and self._seconds > 0:
            where = f"{self.name}, input throughput ({self._tokens:,} tokens of prompts in several chunks)"
            sheet.add(facts.PREFILL_SPEED, self._tokens / self._seconds, where)


__all__ = ["METRICS", "NAME", "Log", "loads", "metrics", "model_info", "models", "server_info"]
