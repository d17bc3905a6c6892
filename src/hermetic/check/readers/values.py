"""Values as engines write them, brought to one spelling: numbers, roles, dtypes, transports, addresses, and Python's own notation in logs.

The one thing to know: what is not surely what it should be becomes None, and None is no fact.
"""

from __future__ import annotations

import ast
import math
import re
import warnings
from urllib.parse import urlsplit

from hermetic.check.deployment import ALONE, BOTH, DECODE, PREFILL

MOST = 2**53  # no count of tokens or bytes is larger, and floats are exact up to it
LONGEST_TEXT = 4096

_ROLES = {
    "prefill": PREFILL, "decode": DECODE, "null": ALONE, "unified": ALONE,
    "kv_producer": PREFILL, "kv_consumer": DECODE, "kv_both": BOTH,
}  # fmt: skip
_DTYPES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "float": "float32", "fp32": "float32",
    "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2",
}  # fmt: skip
_NO_TRANSPORT = ("Offloading", "SimpleCPUOffload", "HiSparse", "DecodeBench")  # move nothing to another node
_TOKEN = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[][(){},:=]""")


def whole(value: object) -> int | None:
    """A count: 2048, "2048", "46,592", or 8192.0 as metrics have it."""
    if isinstance(value, str):
        value = value.replace(",", "")
        value = int(value) if value.isascii() and value.isdigit() and len(value) < 20 else None
    if isinstance(value, float):
        value = int(value) if value.is_integer() else None
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST else None


def positive(value: object) -> int | None:
    """A count of something that there is at least one of."""
    return whole(value) or None


def number(value: object) -> float | None:
    """A finite number from 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < MOST and math.isfinite(value) else None


def bound(value: object) -> float | None:
    """The upper end of a part of a histogram, of its label `le`: a number from 0, or infinity."""
    try:
        end = float(value) if isinstance(value, str) else math.nan
    except ValueError:
        return None
    return end if end >= 0 else None


def text(value: object) -> str | None:
    """Some characters that can be printed."""
    if isinstance(value, str) and value.isprintable() and value.strip() and len(value) <= LONGEST_TEXT:
        return value
    return None


def flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def key_is_set(value: object) -> bool | None:
    """Whether a key is asked for, by the option that holds it: null, a key, or a list of keys. The key itself is kept nowhere."""
    if isinstance(value, str | list):
        return bool(value)
    return False if value is None else None


def role(mode: object) -> str | None:
    """Of SGLang's disaggregation mode and engine type, and of vLLM's kv_role."""
    return _ROLES.get(mode) if isinstance(mode, str) else None


def kv_dtype(value: object) -> str | None:
    """`torch.float8_e4m3fn` in a log is the option `fp8_e4m3`. None for `auto`: it is the model's, and that is not said.

    `float8_e4m3fnuz` is another format with other values, and stays what it is."""
    name = text(value)
    if name is None or name.lower() in ("auto", "none", ""):
        return None
    name = name.lower().removeprefix("torch.")
    return _DTYPES.get(name, name)


def transport(connector: object) -> str | None:
    """What a vLLM connector moves KV with: NixlConnector, NixlPullConnector -> nixl. None where nothing goes to another node."""
    name = text(connector)
    if name is None:
        return None
    for known in ("Nixl", "MooncakeStore", "Mooncake"):
        if name.startswith(known):
            return known.lower()
    short = re.sub(r"Connector(V\d+)?$", "", name)
    return None if short in _NO_TRANSPORT else short.lower()


def backend(name: object) -> str | None:
    """SGLang's --disaggregation-transfer-backend. It takes mooncake_tcp for mooncake itself (arg_groups/pd_disaggregation_hook.py), and says so."""
    given = text(name)
    return "mooncake" if given == "mooncake_tcp" else given


def address(url: object) -> tuple[str, int] | None:
    """(host, port) of http://127.0.0.1:31100, or of 127.0.0.1:8998 as logs have it."""
    given = text(url)
    if given is None:
        return None
    try:
        parts = urlsplit(given if "//" in given else f"//{given}")
        return None if not parts.hostname or not parts.port else (parts.hostname, parts.port)
    except ValueError:
        return None


def host_port(host: object, port: object) -> tuple[str, int] | None:
    name, number = text(host), positive(port)
    return (name, number) if name is not None and number is not None and number < 2**16 else None


# ------------------------------------------------------------------------------------ Python's own notation


def fields(notation: str) -> dict[str, str] | None:
    """The fields of `{'a': 1, 'b': [2, 3]}`, `Name(a=1, b=[2, 3])` or `a=1, b=[2, 3]`, each as it is written.

    None where a bracket or a quote is never closed: something is missing, and what is there may be cut short. What follows the
    closing bracket is not looked at."""
    opened = re.match(r"\s*[A-Za-z_][\w.]*\s*\(|\s*\{", notation)
    depth, at = (1, opened.end()) if opened else (0, 0)
    bottom, found, name, start = depth, dict[str, str](), "", at
    for token in _TOKEN.finditer(notation, at):
        mark = token[0]
        if mark in "([{":
            depth += 1
        elif mark in ")]}":
            depth -= 1
            if depth < bottom:
                if opened is None:
                    return None
                _keep(found, name, notation[start : token.start()])
                return found
        elif depth == bottom and mark == ",":
            _keep(found, name, notation[start : token.start()])
            name, start = "", token.end()
        elif depth == bottom and mark in ":=" and not name:
            name, start = notation[start : token.start()].strip().strip("'\""), token.end()
    if opened is not None or depth != bottom or not _quotes_closed(notation):
        return None
    _keep(found, name, notation[start:])
    return found


def _keep(found: dict[str, str], name: str, value: str) -> None:
    """The first of two fields of one name counts."""
    if name.isidentifier():
        found.setdefault(name, value.strip())


def _quotes_closed(notation: str) -> bool:
    return not set("'\"") & set(_TOKEN.sub("", notation))


def nested(written: str | None) -> object:
    """What `{'a': [{'b': 1}]}` means; an Ellipsis for what is no plain value at some depth, is very long, or is not there."""
    if written is None or len(written) > LONGEST_TEXT:
        return ...
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what Python only warns of is nothing that an engine writes
            return ast.literal_eval(written)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return ...


def literal(written: str | None) -> object:
    """The same for `None`, `True`, `512`, `0.7` and `'name'` only."""
    value = nested(written)
    return value if value is None or isinstance(value, bool | int | float | str) else ...


def literals(written: dict[str, str]) -> dict[str, object]:
    """The fields that are plain values."""
    return {name: value for name, one in written.items() if (value := literal(one)) is not ...}


__all__ = [
    "address", "backend", "bound", "fields", "flag", "host_port", "key_is_set", "kv_dtype", "literal", "literals", "nested", "number", "positive", "role", "text",
    "transport", "whole",
]  # fmt: skip
