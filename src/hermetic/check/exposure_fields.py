"""The fields of an access log's line, by what they mean: usual names of nginx, Envoy, Traefik and gateways of models, and in which unit they are.

The one thing to know: a name of which the unit differs from one program to another (`duration`) is taken only where another field shows whose line it is.
All lines of a log have the same few sets of fields, so what to look for in a set is found once (`Plans`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from typing import Any

from hermetic.options import OptionError

UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
LARGEST = 1e30
SOONEST = 946_684_800  # 2000, in seconds since 1970: a smaller number says how long something took
_DIGITS = 1.97e13, 3e13
EARLIEST, LATEST = datetime(1970, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)
MOST_PLANS = 1_000  # sets of fields that are remembered
_ENVOY = frozenset({
    "response_flags", "upstream_response_flags", "upstream_service_time", "x_envoy_upstream_service_time", "genai_tokens_input",
})  # fmt: skip


@dataclass(frozen=True)
class Name:
    """A field's name, dotted for what is nested. `unit`: in seconds, of a time that something took. `envoy`: only in a line of Envoy's."""

    text: str
    unit: float = 1.0
    envoy: bool = False


def _names(*texts: str, unit: str = "s", envoy: bool = False) -> tuple[Name, ...]:
    return tuple(Name(text, UNITS[unit], envoy) for text in texts)


# nginx: seconds with three digits (ngx_http_core_module, ngx_http_upstream_module). Envoy: whole milliseconds (%DURATION%, %RESPONSE_DURATION%,
# x-envoy-upstream-service-time). Traefik: nanoseconds (Duration).
KINDS: Mapping[str, tuple[Name, ...]] = {
    "time": _names(
        "time", "time_iso8601", "timestamp", "ts", "@timestamp", "start_time", "StartUTC", "msec", "time_local"
    ),
    "id": _names("request_id", "id", "rid", "x_request_id", "req_id"),
    "status": _names("status", "status_code", "http_status", "response_code", "DownstreamStatus"),
    "prompt": _names(
        "usage.prompt_tokens", "prompt_tokens", "usage.input_tokens", "input_tokens", "gen_ai.usage.input_tokens", "genai_tokens_input"
    ),
    "cached": _names(
        "usage.prompt_tokens_details.cached_tokens", "prompt_tokens_details.cached_tokens", "cached_tokens"
    ),
    "prefill_prompt": _names("prefill_prompt_tokens", "prefill.usage.prompt_tokens", "prefill.prompt_tokens"),
    "first": _names("ttft", "time_to_first_token", "first_token_seconds", "ttft_seconds")
    + _names("ttft_ms", "time_to_first_token_ms", unit="ms"),
    "header": _names("upstream_header_time")
    + _names("upstream_service_time", "x_envoy_upstream_service_time", "response_duration", unit="ms"),
    "whole": _names("request_time", "upstream_response_time", "duration", unit="ms", envoy=True)
    + _names("request_time", "upstream_response_time")
    + _names("duration_ms", unit="ms")
    + _names("Duration", unit="ns"),
    "method": _names("method", "request_method", "RequestMethod"),
    "path": _names("path", "uri", "request_uri", "request_path", "RequestPath"),
    "request": _names("request"),
}  # fmt: skip
TIMES = ("first", "header", "whole")  # kinds that have a unit


def named(kind: str, text: str) -> Name:
    """A name that somebody gave, with `:ms` behind it where it is not in seconds. Raises OptionError."""
    name, colon, unit = text.rpartition(":")
    if not colon or unit not in UNITS:
        return Name(text)
    if kind not in TIMES:
        raise OptionError(f"--field {kind}={text}: only {', '.join(TIMES)} have a unit")
    return Name(name, UNITS[unit])


@dataclass(frozen=True)
class _Step:
    """Where to look: the keys one below the other, and the unit."""

    path: tuple[str, ...]
    unit: float


_Plan = Mapping[str, tuple[_Step, ...]]


@dataclass(frozen=True)
class Found:
    """One line's fields, by kind."""

    value: Mapping[str, Any]
    plan: _Plan

    def get(self, kind: str) -> Any:
        """The first of the names that is there; None if none is."""
        for step in self.plan[kind]:
            if (found := _at(self.value, step.path)) is not None:
                return found
        return None

    def seconds(self, kind: str) -> float | None:
        """A time that something took; None where no name has a number that is one."""
        for step in self.plan[kind]:
            found = _at(self.value, step.path)
            took = number(_last(found) if isinstance(found, str) else found)
            if took is not None and took >= 0:
                return took * step.unit
        return None


class Plans:
    """For each set of fields, where the names of each kind would stand."""

    def __init__(self, fields: Mapping[str, str]) -> None:
        self._names = {**KINDS, **{kind: (named(kind, text),) for kind, text in fields.items()}}
        self._known: dict[tuple[str, ...], _Plan] = {}

    def of(self, value: Mapping[str, Any]) -> Found:
        keys = tuple(value)
        plan = self._known.get(keys)
        if plan is None:
            plan = self._made(frozenset(keys))
            if len(self._known) < MOST_PLANS:
                self._known[keys] = plan
        return Found(value, plan)

    def _made(self, keys: frozenset[str]) -> _Plan:
        envoy = not keys.isdisjoint(_ENVOY)
        return {
            kind: tuple(
                step for name in names if envoy or not name.envoy for step in _steps(name, keys)
            )
            for kind, names in self._names.items()
        }  # fmt: skip


def _steps(name: Name, keys: frozenset[str]) -> list[_Step]:
    """As the name stands, else by its dots; none where it cannot be there."""
    parts = tuple(name.text.split("."))
    found = [_Step((name.text,), name.unit)] if name.text in keys else []
    return found + ([_Step(parts, name.unit)] if len(parts) > 1 and parts[0] in keys else [])


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        if not isinstance(value, dict):
            return None
        value = value.get(part)
    return value


def _last(text: str) -> str:
    """nginx lists the servers that it asked ("0.001, 0.250", "0.1 : 0.2"); the last one's answer is what the client got."""
    return text.replace(":", ",").rpartition(",")[2].strip()


def number(value: Any) -> float | None:
    """None for what is no number, not finite, or no count of anything. Python alone takes 1_000 for one."""
    if type(value) is str:
        if "_" in value or not value.isascii():
            return None
        try:
            value = float(value)
        except ValueError:
            return None
    if (type(value) is not int and type(value) is not float) or not abs(value) < LARGEST:
        return None
    return value


def tokens(value: Any) -> float | None:
    """How many tokens a prompt has. None also for 0, which is written where nobody counted, and for less."""
    count = number(value)
    return count if count is not None and count > 0 else None


def in_time(value: Any) -> datetime | None:
    """ISO 8601 (without a zone: UTC), nginx's own (29/Nov/2026:14:05:00 +0000), 20261129140500, or seconds, milliseconds, ... since 1970."""
    since = number(value)
    if since is not None:
        if _DIGITS[0] <= since < _DIGITS[1]:  # milliseconds would be of the years 2594 to 2918
            return _parsed(str(int(since)), "%Y%m%d%H%M%S", UTC)
        while since > 1e11:  # milliseconds, microseconds, nanoseconds
            since /= 1000
        return datetime.fromtimestamp(since, UTC) if since >= SOONEST else None
    if not isinstance(value, str):
        return None
    when = _written(value.strip())
    if when is None:
        return None
    when = when if when.tzinfo is not None else when.replace(tzinfo=UTC)
    return when if EARLIEST <= when < LATEST else None


def _written(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        pass
    return _parsed(text, "%d/%b/%Y:%H:%M:%S %z")


def _parsed(text: str, form: str, zone: tzinfo | None = None) -> datetime | None:
    try:
        when = datetime.strptime(text, form)
    except ValueError:
        return None
    return when if zone is None else when.replace(tzinfo=zone)


__all__ = ["KINDS", "TIMES", "UNITS", "Found", "Name", "Plans", "in_time", "named", "number", "tokens"]
