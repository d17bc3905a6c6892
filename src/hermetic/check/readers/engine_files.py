"""Of which engine an answer, metrics or a log are, and what they say: by what stands in them, never by the name of the file.

The one thing to know: `read_json` and `read_metrics` give None for what is none of theirs, so that the caller can try something else; `read_log`
takes everything, and says of a log of another program that it is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, Protocol

import msgspec

from hermetic.check import facts
from hermetic.check.facts import Sheet
from hermetic.check.readers import hermetic_engine, logs, prometheus, sglang, values, vllm
from hermetic.check.readers.logs import Line
from hermetic.check.readers.reading import Reading

MOST_NOTES = 3  # about lines of one log that could not be read
_MARKS = (
    b'"internal_states"',
    b'"vllm_config"',
    b'"max_model_len"',
    b'"loads"',
    b'"disaggregation_mode"',
    b'"tokenizer_path"',
)
_BOM = b"\xef\xbb\xbf"


# ------------------------------------------------------------------------------------ JSON


def read_json(name: str, body: bytes) -> Reading | None:
    """An engine's answer in JSON, also with the HTTP headers before it, as `curl -i` saves it. None if it is something else."""
    status, body = _without_headers(body)
    if status is not None and status != 200:
        return Reading().failed(
            name, f"is a saved answer with status {status}, which says nothing of the node"
        )
    body = body.removeprefix(_BOM).strip()
    if not body.startswith(b"{"):
        return None
    try:
        told = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        if b"\n{" not in body and any(mark in body for mark in _MARKS):  # a log in JSON has one object a line
            return Reading().failed(name, f"is JSON of an engine, cut or damaged ({error})", damaged=True)
        return None
    return _answer(name, told) if isinstance(told, dict) else None


def _without_headers(body: bytes) -> tuple[int | None, bytes]:
    """(status, body) of a saved HTTP answer; None where there is no header. Of several, as after a redirect, the last counts."""
    status = None
    while body.startswith(b"HTTP/"):
        line = body.split(b"\n", 1)[0]
        code = line.split(b" ")[1:2]
        status = int(code[0]) if code and len(code[0]) == 3 and code[0].isdigit() else 0
        ends = [at + len(end) for end in (b"\r\n\r\n", b"\n\n") if (at := body.find(end)) >= 0]
        body = body[min(ends) :] if ends else b""
    return status, body


def _answer(name: str, told: Mapping[str, Any]) -> Reading | None:
    """By the fields that only that answer has."""
    if "vllm_config" in told:
        return vllm.server_info(name, told)
    if "disaggregation_mode" in told and ("internal_states" in told or "max_total_num_tokens" in told):
        return sglang.server_info(name, told)
    if "internal_states" in told and "model_path" in told:  # before there was disaggregation
        return sglang.server_info(name, told)
    if "model_path" in told and ("is_generation" in told or "weight_version" in told):
        return sglang.model_info(name, told)
    if isinstance(told.get("loads"), list) and "version" in told:
        return sglang.loads(name, told)
    if told.get("object") == "list" and isinstance(told.get("data"), list):
        return _models(name, told["data"])
    if set(told) == {"version"} and values.text(told["version"]):
        sheet = Sheet(sources=[name])
        sheet.add(facts.VERSION, told["version"], f"{name}, version")
        return Reading([sheet])
    return _error(name, told)


def _models(name: str, data: list[Any]) -> Reading:
    """/v1/models: the first entry that is a model of its own, and not an adapter of one."""
    readers: dict[str, Callable[[str, Mapping[str, Any]], Reading]] = {
        sglang.NAME: sglang.models, vllm.NAME: vllm.models, hermetic_engine.NAME: hermetic_engine.models,
    }  # fmt: skip
    entries = [entry for entry in data if isinstance(entry, dict) and entry.get("parent") is None]
    for entry in entries:
        owner = entry.get("owned_by")
        if isinstance(owner, str) and owner in readers:
            return readers[owner](name, entry)
    owners = sorted({str(entry.get("owned_by", "nobody"))[:40] for entry in entries})
    return Reading().failed(
        name, f"is a list of models of {', '.join(owners[:3]) or 'nobody'}, not of SGLang, vLLM or Hermetic"
    )


def _error(name: str, told: Mapping[str, Any]) -> Reading | None:
    """An answer that only says why there is none."""
    why = told.get("error", told.get("detail"))
    if isinstance(why, dict):
        why = why.get("message")
    if isinstance(why, str) and len(told) == 1:
        return Reading().failed(name, f"is an answer that says only: {why[:200]!r}")
    return None


# ------------------------------------------------------------------------------------ metrics


def read_metrics(name: str, body: bytes) -> Reading | None:
    """Prometheus text. None if it is something else."""
    status, body = _without_headers(body)
    if status is not None and status != 200:
        return Reading().failed(
            name, f"is a saved answer with status {status}, which says nothing of the node"
        )
    if not prometheus.looks_like(body):
        return None
    readings = [read(name, body) for prefix, read in _METRICS if b"\n" + prefix in b"\n" + body]
    if not readings:
        return Reading().failed(name, "is Prometheus text, with no metric of SGLang, vLLM or Hermetic")
    reading = Reading()
    for one in readings:
        reading.sheets += one.sheets
        reading.unread += [unread for unread in one.unread if unread not in reading.unread]
    return reading


_METRICS = (
    (b"sglang:", sglang.metrics), (b"vllm:", vllm.metrics), (b"hermetic_", hermetic_engine.metrics),
)  # fmt: skip


# ------------------------------------------------------------------------------------ logs


class _Log(Protocol):
    """Of one engine. `words`: bytes of which a line must have one to be worth reading; `ours`: whether a line showed that it is its log."""

    words: frozenset[bytes]
    ours: bool
    notes: list[str]

    def feed(self, line: Line) -> None: ...
    def sheets(self) -> list[Sheet]: ...


_WORDS = sorted(sglang.Log.words | vllm.Log.words | hermetic_engine.Log.words)


def read_log(name: str, stream: BinaryIO) -> Reading:
    """A log, plain or packed with gzip, of any length. The logs of several services in one file of docker compose are kept apart."""
    readers: dict[str, list[_Log]] = {}
    reading, broken = Reading(), ""
    try:
        for line in logs.lines(stream, _WORDS):
            known = readers.get(line.stream)
            if known is None:
                if len(readers) >= logs.MOST_STREAMS:
                    continue
                known = readers[line.stream] = [sglang.Log(name), vllm.Log(name), hermetic_engine.Log(name)]
            _feed(known, line)
    except logs.Broken as error:
        broken = str(error)
    notes = list[str]()
    for service, logs_read in readers.items():
        for log in logs_read:
            for sheet in log.sheets():
                sheet.name = service
                reading.sheets.append(sheet)
            notes += log.notes if log.ours else []
    if broken:
        notes.insert(0, broken)
    if not reading.sheets:
        return reading.failed(
            name,
            broken or "is not a log of SGLang, vLLM or Hermetic, and nothing else that is known here",
            damaged=bool(broken),
        )
    if notes:
        more = f"; and {len(notes) - MOST_NOTES:,} more" if len(notes) > MOST_NOTES else ""
        reading.failed(name, "; ".join(notes[:MOST_NOTES]) + more, part=True)
    return reading


def _feed(known: list[_Log], line: Line) -> None:
    """To every engine whose line it may be."""
    for log in known:
        if not log.words.isdisjoint(line.words):
            log.feed(line)


__all__ = ["read_json", "read_log", "read_metrics"]
