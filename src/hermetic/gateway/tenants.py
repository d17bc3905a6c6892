"""Who is asking: API keys -> tenant -> KV scope.

The file is TOML and holds hashes of keys, never keys:

    [tenants.alice]
    key_hashes = ["sha256:..."]     # hermetic hash-key makes such a line
    scope = "alice"                 # optional; default: the tenant's own, "tenant:alice"
    share_scope = true              # optional; see below

    [operators.carol]               # may ask for /admin (hermetic status, drain, disable, ...), and for nothing else
    key_hashes = ["sha256:..."]

The one thing to know: the scope enters every page's lineage, so two tenants with one scope can reuse each other's KV
pages, and a timing can tell one what the other sent. Equal scopes are therefore refused unless every tenant that uses
the scope says `share_scope = true`.

Without a file there is one tenant, `local`, that needs no key; it is only for loopback addresses.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from hermetic.options import OptionError

T = TypeVar("T")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_FIELDS = {"key_hashes", "scope", "share_scope"}
_HOW = "run `hermetic hash-key` for a key and its hash"


class TenantError(OptionError):
    """The tenant file, or its absence, does not allow to start; the message says what to change. Exit code 2."""


@dataclass(frozen=True)
class Tenant:
    """`name` labels metrics and logs, `scope` enters the lineage."""

    name: str
    scope: str


def hash_key(key: str) -> str:
    """The form in which the tenant file holds a key.

    A plain SHA-256: keys are long random strings, so a slow hash would add nothing but a way to load the server.
    """
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


@dataclass(frozen=True)
class Tenants:
    """All tenants. `by_hash` is empty for the local tenant, which needs no key."""

    by_hash: Mapping[str, Tenant]
    local: Tenant | None = None
    operators: Mapping[str, str] = field(default_factory=dict)  # key hash -> the operator's name

    def authenticate(self, authorization: str | None) -> Tenant | None:
        """The tenant of an Authorization header, or None if the key is missing or unknown.

        Every known hash is compared, in constant time each: how long it takes says nothing about the keys.
        """
        return self.local if self.local is not None else _lookup(self.by_hash, authorization)

    def operator(self, authorization: str | None) -> str | None:
        """The operator of an Authorization header, or None if the key is missing or not an operator's."""
        return _lookup(self.operators, authorization)


def _lookup(hashes: Mapping[str, T], authorization: str | None) -> T | None:
    scheme, _, key = (authorization or "").partition(" ")
    presented = hash_key(key.strip())
    found = None
    for known, who in hashes.items():
        if hmac.compare_digest(known, presented):
            found = who
    return found if scheme.lower() == "bearer" and key.strip() else None


def local_tenants() -> Tenants:
    """The single tenant of a server that only this machine can reach."""
    return Tenants({}, Tenant("local", "tenant:local"))


def tenants_for(path: str | None, host: str) -> Tenants:
    """The tenants of a server that listens on `host`. Raises TenantError."""
    if path is not None:
        return load_tenants(path)
    if not is_loopback(host):
        raise TenantError(
            f"--host {host} can be reached from other machines, so the server needs API keys: {_HOW}, put the hash "
            "into a file as [tenants.NAME] key_hashes = [...], and start with --api-keys FILE; or stay on --host 127.0.0.1"
        )
    return local_tenants()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server on `host`. Names other than localhost are not resolved."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def load_tenants(path: str) -> Tenants:
    """Reads a tenant file. Raises TenantError with the place and what to write there."""
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TenantError(f"the API key file {path} is not there: {_HOW}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TenantError(f"cannot read the API key file {path}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise TenantError(f"the API key file {path} is not TOML: {error}") from error

    def wrong(what: str) -> TenantError:
        return TenantError(f"{path}: {what}")

    if unknown := set(document) - {"tenants", "operators"}:
        raise wrong(
            f"unknown key {min(unknown)!r}; the file has only [tenants.NAME] and [operators.NAME] tables"
        )
    tables = document.get("tenants")
    if not isinstance(tables, dict) or not tables:
        raise wrong(f'it names no tenant; write [tenants.NAME] and key_hashes = ["sha256:..."] ({_HOW})')

    by_hash: dict[str, Tenant] = {}
    owners: dict[str, str] = {}  # of every key, tenant's or operator's
    scopes: dict[str, list[tuple[str, bool]]] = {}

    def keys_of(kind: str, name: str, table: object, fields: set[str]) -> list[str]:
        """The key hashes of one table, which must look as it should."""
        where = f"[{kind}.{name}]"
        if not _NAME.fullmatch(name):
            raise wrong(
                f"{where}: a name has 1 to 64 of the characters A-Z a-z 0-9 . _ - and starts with a letter or digit"
            )
        if not isinstance(table, dict):
            raise wrong(f"{where} must be a table with key_hashes")
        if unknown := set(table) - fields:
            raise wrong(f"{where}: unknown key {min(unknown)!r}; known are {', '.join(sorted(fields))}")
        hashes = table.get("key_hashes")
        if not isinstance(hashes, list) or not hashes:
            raise wrong(f'{where}: key_hashes must be a list like ["sha256:..."] ({_HOW})')
        for number, hashed in enumerate(hashes, start=1):
            if not isinstance(hashed, str) or not _HASH.fullmatch(hashed):
                # Not echoed: it may be a key that was pasted in by mistake, and messages end up in logs.
                raise wrong(
                    f"{where}: entry {number} of key_hashes is not sha256: and 64 hex digits ({_HOW})"
                )
            if hashed in owners:
                raise wrong(
                    f"{where}: entry {number} of key_hashes is already a key of {owners[hashed]}; make a new key"
                )
            owners[hashed] = name
        return hashes

    for name, table in tables.items():
        hashes = keys_of("tenants", name, table, _FIELDS)
        where = f"[tenants.{name}]"
        scope, shares = table.get("scope", f"tenant:{name}"), table.get("share_scope", False)
        if not isinstance(scope, str) or not 0 < len(scope.encode()) <= 256:
            raise wrong(f"{where}: scope must be a text of 1 to 256 bytes")
        if not isinstance(shares, bool):
            raise wrong(f"{where}: share_scope must be true or false")
        tenant = Tenant(name, scope)
        scopes.setdefault(scope, []).append((name, shares))
        by_hash |= dict.fromkeys(hashes, tenant)
    operators = document.get("operators", {})
    if not isinstance(operators, dict):
        raise wrong("operators must be tables: [operators.NAME]")
    by_operator: dict[str, str] = {}
    for name, table in operators.items():
        by_operator |= {hashed: name for hashed in keys_of("operators", name, table, {"key_hashes"})}
    for scope, users in scopes.items():
        if len(users) > 1 and not all(shares for _, shares in users):
            names = ", ".join(name for name, _ in users)
            raise wrong(
                f"the tenants {names} have the same scope {scope!r}: they could reuse each other's KV pages. Give each "
                "its own scope, or write share_scope = true for all of them if that is meant"
            )
    return Tenants(by_hash, operators=by_operator)
