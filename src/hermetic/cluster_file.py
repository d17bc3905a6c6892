"""The cluster file: one TOML file that every machine of a cluster gets, whatever runs there. docs/cluster.md has an example.

The one thing to know: everything is checked when it is read, the whole file on every machine, and whatever is wrong is
said as `FILE:LINE: what, and what would do`. Nothing heavy is imported, and nothing is resolved or opened here.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import re
import socket
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from hermetic.options import (
    DTYPES,
    LOG_FORMATS,
    ON_DISCONNECT,
    ROLES,
    TRANSPORTS,
    VERIFY,
    OptionError,
    ServeOptions,
    parse_size,
)
from hermetic.toml_lines import Path as KeyPath
from hermetic.toml_lines import line_of, lines

T = TypeVar("T")
_DEFAULT = ServeOptions()
_LARGEST = 1024**2  # bytes of a cluster file at most
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?")


@dataclass(frozen=True)
class Address:
    """HOST:PORT. `host` is a name or an IP address, an IPv6 address without its brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class GatewayTable:
    """[gateway]"""

    control: Address  # where workers announce themselves
    http: Address
    advertise: str | None  # the host that workers dial, where it is not that of `control`
    api_keys: Path | None
    served_name: str | None
    on_disconnect: str
    context_length: int | None  # the most that is advertised, whatever the pools allow
    trip_failures: int
    trip_minutes: float
    state_file: Path | None

    @property
    def dialled(self) -> Address:
        """What workers connect to."""
        return Address(self.advertise or self.control.host, self.control.port)


@dataclass(frozen=True)
class WorkerTable:
    """[workers.NAME]"""

    name: str
    role: str
    listen: Address  # the control port's; port 0 takes a free one
    advertise: str | None
    source: str | None  # where its data come from, when that is another address; "any": not known
    kv: int  # bytes
    threads: int | None
    max_batch: int
    chunk: int
    slots: int


@dataclass(frozen=True)
class Timing:
    """[timing]"""

    drain_seconds: float
    silent_seconds: float
    transfer_floor: int  # bytes a second


@dataclass(frozen=True)
class ClusterFile:
    """One cluster, as its operator wrote it down."""

    path: Path
    model: str
    dtype: str
    page_size: int
    verify: str
    transport: str
    log_format: str
    keys: Path
    gateway: GatewayTable
    workers: Mapping[str, WorkerTable]
    timing: Timing
    lines: Mapping[KeyPath, int] = field(repr=False, compare=False)

    def error(self, key: KeyPath, message: str) -> OptionError:
        """An error of the line on which `key` stands, or of what it would stand in."""
        return OptionError(f"{self.path}:{line_of(self.lines, key)}: {message}")

    def on_one_host(self, worker: WorkerTable) -> int:
        """How many workers listen on the host that this one listens on: they share its cores."""
        return sum(other.listen.host == worker.listen.host for other in self.workers.values())


def load(path: Path) -> ClusterFile:
    """Read and check a cluster file. Raises OptionError with file and line. Paths in it are relative to its folder."""
    try:
        with path.open("rb") as file:
            raw = file.read(_LARGEST + 1)
    except FileNotFoundError:
        raise OptionError(f"the cluster file {path} is not there; docs/cluster.md has an example") from None
    except (OSError, ValueError) as error:
        raise OptionError(f"cannot read the cluster file {path}: {error}") from error
    if len(raw) > _LARGEST:
        raise OptionError(f"the cluster file {path} has more than {_LARGEST} bytes, so it is not one")
    try:
        text = raw.decode("utf-8")
        document, index = tomllib.loads(text), lines(text)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise OptionError(
            f"{path}:{line}: byte {raw[error.start]:#04x} is not UTF-8, which TOML is written in"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise OptionError(_syntax(path, text, error)) from error
    except ValueError as error:  # tomllib lets through what Python says of a number of thousands of digits
        raise OptionError(f"the cluster file {path} holds a value that cannot be read: {error}") from error
    except RecursionError:
        raise OptionError(f"the cluster file {path} is nested too deep to be one") from None
    return _cluster(path, _Table(path, index, (), document))


def _syntax(path: Path, text: str, error: tomllib.TOMLDecodeError) -> str:
    """tomllib's own words with its line in front; at the end of the document, the last line."""
    message = str(error)
    place = re.search(r" \(at line (\d+), column (\d+)\)$", message)
    if place is None:
        return f"{path}:{text.rstrip().count(chr(10)) + 1}: not TOML: {message.removesuffix(' (at end of document)')}"
    return f"{path}:{place[1]}: not TOML: {message[: place.start()]} (column {place[2]})"


class _Wrong(ValueError):
    """What is wrong with one value, in words that follow its key."""


class _Table:
    """A table being read: each known key is taken once, with a check; `end` refuses what is left."""

    def __init__(
        self, file: Path, index: Mapping[KeyPath, int], where: KeyPath, values: dict[str, object]
    ) -> None:
        self._file, self._index, self.where, self._values = file, index, where, values

    def fail(self, message: str, *key: str) -> OptionError:
        return OptionError(f"{self._file}:{line_of(self._index, (*self.where, *key))}: {message}")

    def known(self, *names: str) -> None:
        """Refuse any other key; first of all, so that a name with a slip is not taken for a missing one."""
        for key in self._values:
            if key not in names:
                close = difflib.get_close_matches(key, names, 1)
                hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(names)}"
                raise self.fail(f"there is no key {key!r} {self._in()}; {hint}", key)

    def _in(self) -> str:
        return f"in [{'.'.join(map(str, self.where))}]" if self.where else "at the top of the file"

    def has(self, key: str) -> bool:
        return key in self._values

    def need(self, key: str, read: Callable[[object], T], example: str) -> T:
        if key not in self._values:
            raise self.fail(f"{key} is missing {self._in()}; write it like {key} = {example}")
        return self._read(key, read)

    def get(self, key: str, read: Callable[[object], T], default: T) -> T:
        return self._read(key, read) if key in self._values else default

    def _read(self, key: str, read: Callable[[object], T]) -> T:
        try:
            return read(self._values[key])
        except (_Wrong, OptionError) as error:
            raise self.fail(f"{key} {error}", key) from error

    def tables(self, key: str) -> dict[str, _Table]:
        """The tables inside a table of tables."""
        return {
            name: self._sub((*self.where, key, name), value)
            for name, value in self.table(key)._values.items()
        }

    def table(self, key: str) -> _Table:
        return self._sub((*self.where, key), self._values.get(key, {}))

    def _sub(self, where: KeyPath, value: object) -> _Table:
        if not isinstance(value, dict):
            name = ".".join(map(str, where))
            raise OptionError(
                f"{self._file}:{line_of(self._index, where)}: {name} is {_shown(value)}; it must be a table, [{name}]"
            )
        return _Table(self._file, self._index, where, value)


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _text(value: object) -> str:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise _Wrong(f"is {_shown(value)}; it must be a text in quotes")
    return value


def _one_of(allowed: tuple[str, ...]) -> Callable[[object], str]:
    def read(value: object) -> str:
        if value not in allowed or not isinstance(value, str):
            raise _Wrong(f"is {_shown(value)}; it must be one of {', '.join(allowed)}")
        return value

    return read


def _count(least: int, most: int = 2**31) -> Callable[[object], int]:
    def read(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            bounds = f"at least {least}" if most == 2**31 else f"from {least} to {most}"
            raise _Wrong(f"is {_shown(value)}; it must be a whole number, {bounds}")
        return value

    return read


def _duration(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise _Wrong(f"is {_shown(value)}; it must be a number above 0")
    return float(value)


def _bytes(value: object) -> int:
    size = parse_size(value) if isinstance(value, str) else value
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size < 2**62:
        raise _Wrong(f'is {_shown(value)}; it must be a size of at least one byte, like "256MiB"')
    return size


def host(value: object) -> str:
    """A host name or IP address without brackets; an address that stands for every address is refused."""
    name = _text(value)
    inner = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    try:
        if ipaddress.ip_address(inner).is_unspecified:
            raise _Wrong(
                f"is {name!r}, which stands for every address of the machine; name the one that others dial"
            )
        return inner
    except ValueError as error:
        if isinstance(error, _Wrong):
            raise
    if not _HOST.fullmatch(inner) or _old_number(inner):
        raise _Wrong(f"is {name!r}, which is neither a host name nor an IP address")
    return inner


def _old_number(name: str) -> bool:
    """Whether C libraries would read this as an IPv4 address though it has not the usual form: 0, 0x7f.1, 127.1."""
    try:
        socket.inet_aton(name)
    except OSError:
        return False
    return True


def _address(least_port: int, wildcard: bool = False) -> Callable[[object], Address]:
    def read(value: object) -> Address:
        text = _text(value)
        name, colon, port = text.rpartition(":")
        if (
            not colon
            or not name
            or not (port.isascii() and port.isdigit())
            or not least_port <= int(port) <= 65535
        ):
            raise _Wrong(f"is {text!r}; it must be HOST:PORT with a port from {least_port} to 65535")
        if ":" in name and not (name.startswith("[") and name.endswith("]")):
            raise _Wrong(f"is {text!r}; an IPv6 address stands in brackets: [{name}]:{port}")
        inner = name.strip("[]")
        return Address(inner if wildcard and inner in ("0.0.0.0", "::") else host(name), int(port))

    return read


def _cluster(path: Path, top: _Table) -> ClusterFile:
    top.known(
        "model", "dtype", "page_size", "verify", "transport", "log_format", "keys", "gateway", "workers", "timing"
    )  # fmt: skip
    if not top.has("gateway"):
        raise top.fail('there is no [gateway]; it needs at least control = "HOST:PORT"')

    def beside(value: object) -> Path:
        text = _text(value)
        try:
            return path.parent / Path(text).expanduser()
        except RuntimeError:  # ~somebody who is not known here
            raise _Wrong(f"is {_shown(text)}; there is no such user") from None

    def model(value: object) -> str:
        """A name, or a path; one that begins with a dot is relative to the file, like every path in it."""
        text = _text(value)
        return str(path.parent / text) if text.startswith((".", "~")) else text

    workers = {name: _worker(name, table) for name, table in top.tables("workers").items()}
    cluster = ClusterFile(
        path=path,
        model=top.need("model", model, '"smollm2"'),
        dtype=top.get("dtype", _one_of(DTYPES), _DEFAULT.dtype),
        page_size=top.get("page_size", _count(1, 512), _DEFAULT.page_size),
        verify=top.get("verify", _one_of(VERIFY), _DEFAULT.verify),
        transport=top.get("transport", _one_of(TRANSPORTS), _DEFAULT.transport),
        log_format=top.get("log_format", _one_of(LOG_FORMATS), _DEFAULT.log_format),
        keys=top.need("keys", beside, '"cluster.keys"'),
        gateway=_gateway(top.table("gateway"), beside),
        workers=workers,
        timing=_timing(top.table("timing")),
        lines=top._index,
    )
    _fits_together(cluster)
    return cluster


def _gateway(table: _Table, beside: Callable[[object], Path]) -> GatewayTable:
    table.known(
        "control", "http", "advertise", "api_keys", "served_name", "on_disconnect", "context_length", "trip_failures",
        "trip_minutes", "state_file",
    )  # fmt: skip
    return GatewayTable(
        control=table.need("control", _address(1), '"10.0.0.1:7000"'),
        http=table.get("http", _address(0, wildcard=True), Address(_DEFAULT.host, _DEFAULT.port)),
        advertise=table.get("advertise", host, None),
        api_keys=table.get("api_keys", beside, None),
        served_name=table.get("served_name", _text, None),
        on_disconnect=table.get("on_disconnect", _one_of(ON_DISCONNECT), _DEFAULT.on_disconnect),
        context_length=table.get("context_length", _count(2), None),
        trip_failures=table.get("trip_failures", _count(0), _DEFAULT.trip_failures),
        trip_minutes=table.get("trip_minutes", _duration, _DEFAULT.trip_minutes),
        state_file=table.get("state_file", beside, None),
    )


def _worker(name: str, table: _Table) -> WorkerTable:
    if not _NAME.fullmatch(name) or name == "gateway":
        raise table.fail(
            f"a worker cannot be called {name!r}: a name has 1 to 64 of the characters A-Z a-z 0-9 . _ - and starts with a "
            "letter or digit, and `gateway` is taken"
        )
    table.known("role", "listen", "advertise", "source", "kv", "threads", "max_batch", "chunk", "slots")
    role = table.need("role", _one_of(ROLES), '"decode"')
    return WorkerTable(
        name=name,
        role=role,
        listen=table.need("listen", _address(0), '"10.0.0.2:7001"'),
        advertise=table.get("advertise", host, None),
        source=table.get("source", host, None),
        kv=table.get("kv", _bytes, _DEFAULT.prefill_kv if role == "prefill" else _DEFAULT.decode_kv),
        threads=table.get("threads", _count(1, 4096), None),
        max_batch=table.get("max_batch", _count(1, 4096), _DEFAULT.max_batch),
        chunk=table.get("chunk", _count(1), _DEFAULT.chunk),
        slots=table.get("slots", _count(1, 2**16), _DEFAULT.landing_slots),
    )


def _timing(table: _Table) -> Timing:
    table.known("drain_seconds", "silent_seconds", "transfer_floor")
    return Timing(
        drain_seconds=table.get("drain_seconds", _duration, _DEFAULT.drain_deadline),
        silent_seconds=table.get("silent_seconds", _duration, _DEFAULT.silent_after),
        transfer_floor=table.get("transfer_floor", _bytes, _DEFAULT.transfer_floor),
    )


def _fits_together(cluster: ClusterFile) -> None:
    """What no single value shows. Raises OptionError."""
    workers = list(cluster.workers.values())
    where = ("workers",)
    if not workers:
        raise cluster.error(where, "there are no workers; write [workers.NAME] with role and listen for each")
    by_role = {role: [w for w in workers if w.role == role] for role in ROLES}
    if by_role["unified"]:
        if other := by_role["prefill"] + by_role["decode"]:
            raise cluster.error(
                (*where, other[0].name, "role"),
                f"{other[0].name} is a {other[0].role} worker and {by_role['unified'][0].name} a unified one; a cluster has "
                "unified workers, or prefill and decode workers, not both",
            )
    else:
        for role, missing in (("prefill", "decode"), ("decode", "prefill")):
            if by_role[role] and not by_role[missing]:
                raise cluster.error(
                    (*where, by_role[role][0].name),
                    f"there is no {missing} worker, so {by_role[role][0].name} can serve nobody; add one with role = "
                    f'"{missing}"',
                )
    if cluster.transport == "shm" and not by_role["unified"]:
        first = workers[0]
        for worker in workers[1:]:
            if not _same_host(first.listen.host, worker.listen.host):
                raise cluster.error(
                    (*where, worker.name, "listen"),
                    f"{worker.name} listens on {worker.listen.host} and {first.name} on {first.listen.host}, but the transport "
                    'shm needs all workers on one machine, under one address; use transport = "mooncake" or "nixl"',
                )
    taken = {cluster.gateway.control: "the gateway's control"}
    if cluster.gateway.http.port:
        if cluster.gateway.http in taken:
            raise cluster.error(
                ("gateway", "http"), f"http is {cluster.gateway.http}, which is control's already"
            )
        taken[cluster.gateway.http] = "the gateway's http"
    for worker in workers:
        if worker.listen.port and worker.listen in taken:
            raise cluster.error(
                (*where, worker.name, "listen"),
                f"listen is {worker.listen}, which is {taken[worker.listen]} already; give another port, or 0 for a free one",
            )
        taken[worker.listen] = f"{worker.name}'s"


def _same_host(one: str, other: str) -> bool:
    return one.lower() == other.lower() or (_loopback(one) and _loopback(other))


def _loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name.lower() == "localhost"
