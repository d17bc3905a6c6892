"""What `hermetic serve` was asked to do, as plain data, and how sizes are written. Imports nothing heavy."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}ib"] = _UNITS[f"{_letter}i"] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[_letter] = 1024**_power


class OptionError(ValueError):
    """An option's value cannot be used; the message says which, and what would do. Exit code 2."""


def parse_size(text: str) -> int:
    """Bytes meant by `256MiB`, `1GiB`, `512MB`, `64m` or a plain number. Raises OptionError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise OptionError(f"cannot read the size {text!r}: write it like 256MiB, 1GiB or 500MB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_size(count: int) -> str:
    """A size for people: 368640 -> '360.0 KiB'."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


@dataclass(frozen=True)
class ServeOptions:
    """One `hermetic serve`. Sizes in bytes; `context_length` None means: what the pools and the model allow."""

    model: str = "smollm2"
    mode: str = "disaggregated"  # or "unified"
    host: str = "127.0.0.1"
    port: int = 8000
    context_length: int | None = None
    prefill_kv: int = 256 * 1024**2
    decode_kv: int = 512 * 1024**2
    page_size: int = 16
    verify: str = "landing"  # tags | landing | read
    dtype: str = "bf16"  # or float32
    api_keys: str | None = None
    served_name: str | None = None
    max_batch: int = 64
    chunk: int = 512  # prompt tokens computed in one step at most
    threads: int | None = None  # per worker; None: the cores this process may use
    log_format: str = "text"  # or json
