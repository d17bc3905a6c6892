"""`hermetic exposure`: after an incident, which past responses fit its signature? From access logs of JSON lines.

The one thing to know: what fits the signature may have held somebody's data, what does not has no reason in these numbers to be suspected. Lines that lack
a field are counted as not judged, and are never taken for innocent. Bounded memory for logs of any size: only ids and hours are kept.
"""

from __future__ import annotations

import gzip
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from hermetic.options import OptionError

Sign = Literal["over the pool and answered", "faster than it can be read", "halves disagree"]
SIGNS: tuple[Sign, ...] = ("over the pool and answered", "faster than it can be read", "halves disagree")
NAMES: Mapping[str, tuple[str, ...]] = {  # fields that are looked for where none is named
    "time": ("time", "timestamp", "ts", "@timestamp", "start_time"),
    "id": ("request_id", "id", "rid", "x_request_id", "req_id"),
    "status": ("status", "status_code", "http_status"),
    "prompt": ("usage.prompt_tokens", "prompt_tokens", "input_tokens"),
    "cached": (
        "usage.prompt_tokens_details.cached_tokens",
        "prompt_tokens_details.cached_tokens",
        "cached_tokens",
    ),
    "prefill_prompt": ("prefill_prompt_tokens", "prefill.usage.prompt_tokens", "prefill.prompt_tokens"),
    "first": ("ttft", "time_to_first_token", "first_token_seconds", "ttft_seconds"),
}
LONGEST_LINE = 1024**2  # bytes
MOST_IDS = 1_000_000
LONGEST_ID = 256  # characters: clients may choose it
LARGEST = 1e30
EARLIEST, LATEST = datetime(1970, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)


class Hit(msgspec.Struct, frozen=True):
    """A response that fits. `where`: file and line."""

    id: str
    time: str
    signs: tuple[str, ...]
    prompt: int | None
    where: str


class Exposure(msgspec.Struct, kw_only=True):
    """`hours`: hits by hour, UTC ("" where a line has no time). `not_judged`: lines by what they lack; `outside`: of another time."""

    pool: int
    lines: int = 0
    judged: int = 0
    outside: int = 0
    hits: list[Hit] = []
    signs: dict[str, int] = {}
    hours: dict[str, int] = {}
    not_judged: dict[str, int] = {}
    not_asked: list[str] = []  # signs that could not be looked for, and why
    unread: list[str] = []


@dataclass(frozen=True)
class ExposureOptions:
    """`fields`: names (dotted for what is nested) by kind, in place of NAMES. `prefill_speed`: tokens a second at best; None: not asked."""

    pool: int
    since: datetime | None = None
    until: datetime | None = None
    prefill_speed: float | None = None
    fields: Mapping[str, str] = field(default_factory=dict)


def read(paths: Sequence[Path], options: ExposureOptions) -> Exposure:
    """Judge every line of every log."""
    found = Exposure(pool=options.pool)
    seconds, signs, hours, lacks = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    if options.prefill_speed is None:
        found.not_asked.append(
            f"{SIGNS[1]}: give --prefill-speed, the tokens a second that one node reads at best"
        )
    for path in paths:
        try:
            with _open(path) as stream:
                for number, line in _lines(stream):
                    _line(line, f"{path}, line {number}", options, found, signs, hours, lacks, seconds)
        except (OSError, EOFError, zlib.error) as error:
            found.unread.append(f"{path}: {getattr(error, 'strerror', None) or error}")
    found.signs, found.not_judged = dict(signs), dict(lacks)
    found.hours = dict(sorted(hours.items()))
    if not seconds["halves"] and found.judged:
        found.not_asked.append(
            f"{SIGNS[2]}: no line says what the prefill half counted (--field prefill_prompt=NAME)"
        )
    if options.prefill_speed is not None and seconds["first"] < seconds["answered"]:
        without = seconds["answered"] - seconds["first"]
        found.not_asked.append(
            f"{SIGNS[1]}: of {without:,} of {seconds['answered']:,} answers no line says the seconds to the first token (--field first=NAME)"
        )
    return found


def _line(
    line: bytes | None, where: str, options: ExposureOptions, found: Exposure,
    signs: Counter[str], hours: Counter[str], lacks: Counter[str], seen: Counter[str],
) -> None:  # fmt: skip
    if line is not None and not line.strip():
        return
    found.lines += 1
    value = _object(line)
    if value is None:
        lacks["is no JSON object" if line is not None else f"is longer than {LONGEST_LINE:,} bytes"] += 1
        return
    when = _time(_pick(value, "time", options))
    if options.since is not None or options.until is not None:
        if when is None:
            lacks["no time"] += 1
            return
        if (options.since and when < options.since) or (options.until and when >= options.until):
            found.outside += 1
            return
    status, prompt = _number(_pick(value, "status", options)), _number(_pick(value, "prompt", options))
    if status is None or prompt is None:
        lacks["no status" if status is None else "no prompt tokens"] += 1
        return
    found.judged += 1
    if not 200 <= status < 300:
        return
    other = _number(_pick(value, "prefill_prompt", options))
    first = _number(_pick(value, "first", options))
    seen["halves"] += other is not None
    seen["first"] += first is not None and first >= 0
    seen["answered"] += 1
    cached = _number(_pick(value, "cached", options)) or 0
    fits = _signs(prompt, cached, other, first, options)
    if not fits:
        return
    signs.update(fits)
    hours[when.astimezone(UTC).strftime("%Y-%m-%dT%H:00Z") if when else ""] += 1
    if len(found.hits) < MOST_IDS:
        name = str(_pick(value, "id", options) or "")[:LONGEST_ID]
        stamp = when.astimezone(UTC).isoformat() if when else ""
        found.hits.append(Hit(name, stamp, tuple(fits), int(prompt), where))


def _signs(
    prompt: float, cached: float, other: float | None, first: float | None, options: ExposureOptions
) -> list[Sign]:
    fits: list[Sign] = []
    if max(prompt, other or 0) > options.pool:
        fits.append(SIGNS[0])
    if (
        options.prefill_speed is not None
        and first is not None
        and 0 <= first < (prompt - cached) / options.prefill_speed  # what was cached was not read again
    ):
        fits.append(SIGNS[1])
    if other is not None and other != prompt:
        fits.append(SIGNS[2])
    return fits


# ------------------------------------------------------------------------------------ small readers


def _open(path: Path) -> BinaryIO:
    stream = path.open("rb")
    magic = stream.read(2)
    stream.seek(0)
    return gzip.open(stream) if magic == b"\x1f\x8b" else stream  # type: ignore[return-value]


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Numbered from 1; None for one that is too long."""
    number = 0
    while line := stream.readline(LONGEST_LINE):
        number += 1
        if line.endswith(b"\n") or len(line) < LONGEST_LINE:
            yield number, line
            continue
        while (rest := stream.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
            pass
        yield number, None


def _object(line: bytes | None) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(line) if line is not None else None
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _pick(value: Mapping[str, Any], kind: str, options: ExposureOptions) -> Any:
    """The first of the names that is there: as it stands, else dotted."""
    for name in (options.fields[kind],) if kind in options.fields else NAMES[kind]:
        if (found := _at(value, name)) is not None:
            return found
    return None


def _at(value: Any, name: str) -> Any:
    if isinstance(value, dict) and name in value:
        return value[name]
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return value


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        return None  # no number, not finite, or no count of anything
    return value


def _time(value: Any) -> datetime | None:
    """ISO 8601 (without a zone: UTC), or seconds, milliseconds, ... since 1970."""
    number = _number(value)
    if number is not None:
        while number > 1e11:  # milliseconds, microseconds, nanoseconds
            number /= 1000
        return datetime.fromtimestamp(number, UTC) if number >= 0 else None
    if not isinstance(value, str):
        return None
    try:
        when = datetime.fromisoformat(value.strip())
    except ValueError:
        return None
    when = when if when.tzinfo is not None else when.replace(tzinfo=UTC)
    return when if EARLIEST <= when < LATEST else None


def moment(option: str, text: str) -> datetime:
    """A time of the command line. Raises OptionError."""
    when = _time(text)
    if when is None:
        raise OptionError(
            f"{option} is {text!r}; it must be a time like 2026-11-29T14:00Z (without a zone: UTC)"
        )
    return when


def gaps(hours: Iterable[str]) -> list[str]:
    """All hours from the first to the last, so that a time line shows the quiet ones as well; at most 31 days of them."""
    known = sorted(hour for hour in hours if hour)
    if not known:
        return []
    form = "%Y-%m-%dT%H:00Z"
    first, last = datetime.strptime(known[0], form), datetime.strptime(known[-1], form)
    count = int((last - first).total_seconds() // 3600) + 1
    return known if count > 31 * 24 else [(first + timedelta(hours=n)).strftime(form) for n in range(count)]


__all__ = ["NAMES", "SIGNS", "Exposure", "ExposureOptions", "Hit", "gaps", "moment", "read"]
