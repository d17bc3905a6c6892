"""What a command was asked to do, as plain data, and how sizes are written. Imports nothing heavy."""

from __future__ import annotations

import re
from dataclasses import dataclass

MODES = ("disaggregated", "unified")
ROLES = ("prefill", "decode", "unified")
DTYPES = ("bf16", "float32")
VERIFY = ("tags", "landing", "read")
TRANSPORTS = ("shm", "mooncake", "nixl")
ON_DISCONNECT = ("drain", "cancel")
LOG_FORMATS = ("text", "json")

# How long a thread of a worker that waits for the others of its parallel section spins before it sleeps (some 0.3 ms
# here). GNU OpenMP's own 13 ms make a step 10-30 times as long as soon as another process wants the core; sleeping at
# once costs a quiet machine 60 %. Whoever knows better sets the variable. Read when torch is loaded.
WORKER_ENVIRONMENT = {"GOMP_SPINCOUNT": "10000"}

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


_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|)")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
LONGEST_TIME = 30 * 24 * 3600.0  # seconds; a longer time is a slip of the keyboard


def parse_time(option: str, text: str) -> float:
    """`90`, `90s`, `5m`, `2h`, in seconds. Raises OptionError."""
    found = _TIME.fullmatch(text.strip())
    if found is None or not 0 < float(found[1]) * _SECONDS[found[2]] <= LONGEST_TIME:
        raise OptionError(f"{option} is {text!r}; it must be a time like 90s, 5m or 2h, 720h at most")
    return float(found[1]) * _SECONDS[found[2]]


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
    threads: int | None = None  # per worker; None: the cores this process may use, shared out
    log_format: str = "text"  # or json
    prefill_workers: int = 1
    decode_workers: int = 1  # or unified ones
    transport: str = "shm"  # shm | mooncake | nixl
    on_disconnect: str = "drain"  # or cancel: what becomes of a running transfer when its client leaves
    drain_deadline: float = 30.0  # seconds that decode waits for *drained* before it fences or quarantines
    silent_after: float = 30.0  # seconds without a sign of life after which a worker is left out
    landing_slots: int = 64  # for each prefill worker, in each decode worker
    transfer_floor: int = 50_000_000  # bytes a second of the slowest transfer that is still accepted
    trip_failures: int = 3  # integrity failures within `trip_minutes` that disable the model; 0: never
    trip_minutes: float = 10.0
    state_file: str | None = None  # where "disabled" survives a restart of the gateway
    trace: str | None = None  # file that every worker records the protocol's events in
