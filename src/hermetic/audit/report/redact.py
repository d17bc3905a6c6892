"""No key leaves with a report, wherever a server may have echoed it.

The one thing to know: a key is replaced by signs of the same number, so that highlights keep their places. Besides the keys
that were given, values of headers that carry credentials and `user:password@` in URLs are replaced.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from hermetic.audit.result import Report

SHORTEST = 4  # characters; a shorter key is no secret, and stands in half of all words
SIGN = "\u2588"
_HEADERS = re.compile(r"authorization|api-?key|token|cookie|secret", re.IGNORECASE)
_USERINFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")
# Fields that hold our own words; a key that happens to be one of them must not make a report unreadable.
_OURS = frozenset({"verdict", "evidence", "state", "how", "endpoint"})

T = TypeVar("T")


def without_keys(report: Report, keys: Iterable[str | None]) -> Report:
    """A copy of the report that holds none of the keys, as they are, percent-encoded, in JSON, or in base64."""
    forms: set[str] = set()
    for key in keys:
        if key is not None and len(key) >= SHORTEST:
            raw = key.encode("utf-8", "replace")
            forms |= {
                key,
                quote(key, safe=""),
                quote(key),
                json.dumps(key)[1:-1],
                base64.b64encode(raw).decode(),
            }
    found = (
        re.compile("|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True)))
        if forms
        else None
    )
    return _struct(report, found)


def _struct(value: T, keys: re.Pattern[str] | None) -> T:
    assert isinstance(value, msgspec.Struct)
    changed = {
        name: _walk(getattr(value, name), keys) for name in value.__struct_fields__ if name not in _OURS
    }
    if isinstance(headers := changed.get("headers"), dict):
        changed["headers"] = {n: _cover(v) if _HEADERS.search(n) else v for n, v in headers.items()}
    return msgspec.structs.replace(value, **changed)


def _walk(value: Any, keys: re.Pattern[str] | None) -> Any:
    if isinstance(value, str):
        return _text(value, keys)
    if isinstance(value, bytes):
        text = value.decode("utf-8", "surrogateescape")
        clean = _text(text, keys)
        return value if clean == text else clean.encode("utf-8", "surrogateescape")
    if isinstance(value, msgspec.Struct):
        return _struct(value, keys)
    if isinstance(value, Mapping):
        return {_walk(name, keys): _walk(item, keys) for name, item in value.items()}
    if isinstance(value, list):
        return [_walk(item, keys) for item in value]
    if isinstance(value, tuple):
        return value if all(isinstance(item, int) for item in value) else tuple(_walk(i, keys) for i in value)
    return value


def _text(text: str, keys: re.Pattern[str] | None) -> str:
    if keys is not None:
        text = keys.sub(lambda found: _cover(found[0]), text)
    return _USERINFO.sub(lambda found: _cover(found[0]), text) if "://" in text else text


def _cover(text: str) -> str:
    return SIGN * len(text)


__all__ = ["without_keys"]
