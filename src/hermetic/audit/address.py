"""Where an audit's requests go: from what was written on the command line to addresses.

The one thing to know: a pair without a router is one target. Its two halves are spoken to as a router would, and the answer
of the decode half is the answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal
from urllib.parse import SplitResult, parse_qs, urlsplit

import httpx
import msgspec

from hermetic.options import OptionError

Kind = Literal["plain", "several", "sglang-pd", "vllm-pd"]
BOOTSTRAP_PORT = 8998  # SGLang's --disaggregation-bootstrap-port
_PAIRS: tuple[Kind, ...] = ("sglang-pd", "vllm-pd")
_ENDINGS = ("/chat/completions", "/completions", "/models", "/generate")
_SETTINGS = ("bootstrap_port", "bootstrap_host")
_EXAMPLES = "http://127.0.0.1:8000, sglang-pd://HOST:PORT,HOST:PORT or vllm-pd://HOST:PORT,HOST:PORT"


class TargetError(OptionError):
    """The target cannot be audited as it was named; the message says what to change. Exit code 2."""


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """`servers`: URLs without a slash at the end; of a pair: prefill, then decode."""

    kind: Kind
    servers: tuple[str, ...]
    bootstrap_host: str = ""
    bootstrap_port: int = BOOTSTRAP_PORT

    @property
    def name(self) -> str:
        """For people and reports: there is never a key in it."""
        if self.kind in _PAIRS:
            return f"{self.kind}://{','.join(self.servers)}"
        return ", ".join(self.servers)

    @property
    def pair(self) -> bool:
        return self.kind in _PAIRS


def read_address(urls: Sequence[str]) -> Address:
    """The address that these URLs mean. Raises TargetError."""
    if not urls:
        raise TargetError(f"name a server to audit, such as {_EXAMPLES}")
    schemes = [url.strip().partition("://")[0].lower() for url in urls]
    if any(scheme in _PAIRS for scheme in schemes):
        if len(urls) > 1:
            raise TargetError("a prefill/decode pair is audited by itself: give one URL")
        return _pair(urls[0].strip(), schemes[0])
    servers = tuple(dict.fromkeys(_server(url.strip()) for url in urls))
    return Address(kind="plain" if len(servers) == 1 else "several", servers=servers)


def shown(url: str) -> str:
    """A URL as it may stand in messages and reports, usable or not: without what could be a password or a key."""
    bare = re.sub(r"(?:(?<=://)|(?<=,)|^)[^/,]*@", "", url.strip())
    base, _, query = bare.partition("#")[0].partition("?")
    kept = [field for field in query.split("&") if field.partition("=")[0] in _SETTINGS]
    return f"{base}?{'&'.join(kept)}" if kept else base


def _pair(url: str, scheme: str) -> Address:
    kind: Kind = "sglang-pd" if scheme == "sglang-pd" else "vllm-pd"
    halves, _, query = url.partition("://")[2].partition("?")
    url = shown(url)
    servers = [_server(half if "://" in half else f"http://{half}") for half in halves.split(",") if half]
    if len(servers) != 2 or servers[0] == servers[1]:
        raise TargetError(
            f"{url}: a pair is two different servers, prefill first: {kind}://HOST:PORT,HOST:PORT"
        )
    fields = parse_qs(query, keep_blank_values=True)
    allowed = _SETTINGS if kind == "sglang-pd" else ()
    if unknown := sorted(set(fields) - set(allowed)):
        known = " and ".join(allowed) or "no settings"
        raise TargetError(f"{url}: {kind} knows {known}, not {unknown[0]!r}: leave it out")
    port = fields.get("bootstrap_port", [str(BOOTSTRAP_PORT)])[-1]
    if not (re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 65536):
        raise TargetError(f"{url}: bootstrap_port must be a port from 1 to 65535, not {port!r}")
    host = fields.get("bootstrap_host", [""])[-1] or urlsplit(servers[0]).hostname or ""
    return Address(kind=kind, servers=tuple(servers), bootstrap_host=host, bootstrap_port=int(port))


def _server(url: str) -> str:
    """One HTTP server's URL, checked. The path of an endpoint at its end is taken off: people paste those."""
    parts = _split(url)
    if parts.scheme not in ("http", "https"):
        if "://" not in url:
            raise TargetError(f"{shown(url)!r} is not a URL: write http:// or https:// before it")
        raise TargetError(f"{shown(url)}: no such kind of target as {parts.scheme!r}; use {_EXAMPLES}")
    if not parts.hostname or any(char.isspace() for char in url):
        raise TargetError(
            f"{shown(url)!r} is not a URL: it names no host; write it like http://127.0.0.1:8000"
        )
    if parts.username is not None or parts.password is not None:
        raise TargetError(
            "the URL has a user or password in it: leave them out and give a key with --api-key"
        )
    if parts.query or parts.fragment:
        raise TargetError("the URL has a part after ? or #: give only the base URL, a key with --api-key")
    path = parts.path.rstrip("/")
    for ending in _ENDINGS:
        path = path.removesuffix(ending)
    return f"{parts.scheme}://{parts.netloc}{path}"


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port  # read here, because it raises
        httpx.URL(url)  # more exacting: control characters, names that no DNS can hold
    except (ValueError, httpx.InvalidURL) as error:
        raise TargetError(
            f"{shown(url)!r} is not a URL ({error}); write it like http://127.0.0.1:8000"
        ) from None
    return parts


__all__ = ["BOOTSTRAP_PORT", "Address", "Kind", "TargetError", "read_address", "shown"]
