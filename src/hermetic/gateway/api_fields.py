"""Reading one JSON value as one field: small readers that return the value or raise an error that names the field.

The one thing to know: JSON's `true` is not the number 1 here, `5.0` is not an integer, and null stands for "the default"
wherever a field is optional; what a client gets never depends on a silent conversion.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from hermetic.gateway.backend import Refused
from hermetic.gateway.errors import refuse

T = TypeVar("T")
Reader = Callable[[object, str], T]
"""From (value, the field's name) to what it means. Raises Refused."""

_KINDS = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises Refused(invalid_json), or invalid_request for a number that JSON cannot hold."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _not_json(body, error) from None
    if not isinstance(value, dict):
        raise refuse("invalid_json", f"the body must be one JSON object, not {kind(value)}")
    return value


def _not_json(body: bytes, error: Exception) -> Refused:
    """Python clients write NaN and Infinity as such, which is not JSON: name the field rather than the byte."""
    if isinstance(error, RecursionError):
        return refuse("invalid_json", "the body is nested too deeply")
    if b"NaN" in body or b"Infinity" in body or isinstance(error, msgspec.ValidationError):
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            for name, item in value.items():
                if isinstance(item, float) and not math.isfinite(item):
                    return wrong(name, "a finite number", item)
    if not body.strip():
        return refuse("invalid_json", "the body is empty; send one JSON object")
    return refuse("invalid_json", f"the body is not valid JSON: {error}")


def kind(value: object) -> str:
    """What a JSON value is, in a reader's words."""
    return "null" if value is None else _KINDS.get(type(value), type(value).__name__)


def shown(value: object) -> str:
    """A value for a message: short, on one line, safe whatever a client sent."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    text = json.dumps(value, ensure_ascii=True) if not isinstance(value, list | dict) else kind(value)
    return text if len(text) <= 60 else text[:57] + "..."


def wrong(name: str, wanted: str, value: object) -> Refused:
    """The error for a field that has another type or value than `wanted`."""
    return refuse("invalid_request", f"`{name}` must be {wanted}, not {shown(value)}", name)


def text(value: object, name: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise wrong(name, "a string", value)
    return value


def boolean(value: object, name: str) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise wrong(name, "true or false", value)
    return value


def integer(low: int, high: int, wanted: str | None = None) -> Reader[int]:
    """An integer in low..high."""
    meaning = wanted or f"an integer from {low} to {high}"

    def read(value: object, name: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise wrong(name, meaning, value)
        return value

    return read


def number(low: float, high: float, low_open: bool = False) -> Reader[float]:
    """A finite number in low..high, `low` itself left out with `low_open`."""
    meaning = (
        f"a number {'over' if low_open else 'from'} {low:g} {'and at most' if low_open else 'to'} {high:g}"
    )

    def read(value: object, name: str) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise wrong(name, meaning, value)
        if not (low < value if low_open else low <= value) or not value <= high:  # NaN fails both
            raise wrong(name, meaning, value)
        return float(value)

    return read


def listed(value: object, name: str, at_most: int) -> list[object]:
    """A list of at most so many items."""
    if not isinstance(value, list):
        raise wrong(name, "a list", value)
    if len(value) > at_most:
        raise refuse(
            "invalid_request", f"`{name}` has {len(value)} entries; at most {at_most} are taken", name
        )
    return value


def token_ids(value: Sequence[object], name: str, vocab: int) -> tuple[int, ...]:
    """Token ids of a vocabulary of `vocab` tokens. Raises Refused(invalid_token_id) with the first that is none."""
    if all(type(token) is int for token in value):  # type(): bool is an int to isinstance
        ids: tuple[int, ...] = tuple(value)  # type: ignore[arg-type]
        if not ids or (min(ids) >= 0 and max(ids) < vocab):
            return ids
    for at, token in enumerate(value):
        if not isinstance(token, int) or isinstance(token, bool):
            raise refuse(
                "invalid_token_id", f"`{name}`[{at}] is {shown(token)}; a token id is an integer", name
            )
        if not 0 <= token < vocab:
            raise refuse(
                "invalid_token_id",
                f"`{name}`[{at}] is the token id {shown(token)}, but the vocabulary has the ids 0 to {vocab - 1} "
                f"({vocab} tokens)",
                name,
            )
    raise AssertionError("unreachable: some token was wrong")


def read_fields(
    body: Mapping[str, object],
    known: Mapping[str, Reader[Any]],
    ignored: frozenset[str] = frozenset(),
    unsupported: Mapping[str, tuple[object, ...]] | None = None,
    prefix: str = "",
) -> dict[str, Any]:
    """The fields of `body` that are there and not null, each read by its reader.

    `ignored` may hold anything; `unsupported` maps a field to the values it may have besides null (its defaults).
    Raises Refused(unknown_field | unsupported_parameter), and what the readers raise.
    """
    unsupported = unsupported or {}
    values: dict[str, Any] = {}
    for name, value in body.items():
        if reader := known.get(name):
            if value is not None:
                values[name] = reader(value, prefix + name)
        elif name in unsupported:
            if value is not None and not any(
                type(value) is type(same) and value == same for same in unsupported[name]
            ):
                raise refuse(
                    "unsupported_parameter",
                    f"`{prefix}{name}` is not supported by this server; leave it out",
                    prefix + name,
                )
        elif name not in ignored:
            short = name if len(name) <= 60 else name[:57] + "..."
            raise refuse(
                "unknown_field", f"this server knows no field `{prefix}{short}`; leave it out", prefix + short
            )
    return values


def require(values: Mapping[str, Any], name: str) -> Any:
    """A field that must be there. Raises Refused."""
    if name not in values:
        raise refuse("invalid_request", f"`{name}` is missing", name)
    return values[name]
