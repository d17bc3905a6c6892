"""/admin: what operators ask of a running gateway. `hermetic status`, `drain`, `disable`, ... are its clients.

The one thing to know: who may ask. With a key file, whoever sends an operator's key; a tenant's key is not one. Without,
the server is on loopback, and programs of this host may: but not web pages in a browser of this host, so a request that
carries an Origin, or came by another name than the host's own, or posts anything but JSON is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hermetic.gateway.api_fields import parse_object
from hermetic.gateway.backend import Backend
from hermetic.gateway.errors import refuse
from hermetic.gateway.limits import Settings, read_body
from hermetic.gateway.switch import MAX_REASON
from hermetic.gateway.tenants import Tenants, is_loopback

log = logging.getLogger("hermetic.gateway")

Handler = Callable[[Request], Awaitable[Response]]

_HOW = (
    'add [operators.NAME] with key_hashes = ["sha256:..."] to the key file (`hermetic hash-key` makes a key and its hash) '
    "and restart the gateway"
)


class Admin:
    """The handlers."""

    def __init__(self, backend: Backend, tenants: Tenants, settings: Settings) -> None:
        self._backend, self._tenants, self._settings = backend, tenants, settings

    def routes(self) -> list[tuple[str, str, Handler]]:
        return [
            ("/admin/status", "GET", self.status),
            ("/admin/drain", "POST", self.drain),
            ("/admin/undrain", "POST", self.undrain),
            ("/admin/disable", "POST", self.disable),
            ("/admin/enable", "POST", self.enable),
            ("/admin/context", "POST", self.context),
        ]

    async def status(self, request: Request) -> Response:
        self._operator(request)
        return _json(await self._backend.status())

    async def drain(self, request: Request) -> Response:
        who = self._operator(request)
        worker = _text(await self._fields(request, {"worker"}), "worker", 64)
        state = self._backend.drain(worker)
        log.warning("worker %s gets nothing new, says %s", worker, who)
        return _json({"worker": worker, "state": state})

    async def undrain(self, request: Request) -> Response:
        who = self._operator(request)
        worker = _text(await self._fields(request, {"worker"}), "worker", 64)
        state = self._backend.undrain(worker)
        log.warning("worker %s gets work again, says %s", worker, who)
        return _json({"worker": worker, "state": state})

    async def disable(self, request: Request) -> Response:
        who = self._operator(request)
        reason = _text(await self._fields(request, {"reason"}), "reason", MAX_REASON)
        return _json({"disabled": reason, "warning": self._backend.disable(reason, who)})

    async def enable(self, request: Request) -> Response:
        who = self._operator(request)
        await self._fields(request, set())
        self._backend.enable(who)
        return _json({"disabled": None})

    async def context(self, request: Request) -> Response:
        who = self._operator(request)
        fields = await self._fields(request, {"tokens"})
        tokens = fields.get("tokens", False)
        if tokens is not None and (type(tokens) is not int or not 2 <= tokens < 2**31):
            raise refuse(
                "invalid_request",
                "`tokens` must be an integer of at least 2, or null for all that the pools hold",
                "tokens",
            )
        advertised = self._backend.set_context(tokens)
        log.warning("the context is capped at %s, says %s; %d tokens are advertised", tokens, who, advertised)
        return _json({"context_cap": tokens, "context_advertised": advertised})

    # ---------------------------------------------------------------------- the door

    def _operator(self, request: Request) -> str:
        """Who asks. Raises Refused when it is nobody who may."""
        if request.method == "POST":
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise refuse("unsupported_media_type", "send the body as `Content-Type: application/json`")
        if self._tenants.local is not None:
            return self._local(request)
        if not self._tenants.operators:
            raise refuse("operator_key_required", f"the server's key file names no operator: {_HOW}")
        given = request.headers.get("authorization")
        if (who := self._tenants.operator(given)) is not None:
            return f"operator {who}"
        if self._tenants.authenticate(given) is not None:
            raise refuse("operator_key_required", "this is a tenant's key, and /admin is for operators' keys")
        what = "this operator key is not known here" if given else "/admin needs an operator's key"
        raise refuse("invalid_api_key", f"{what}; send `Authorization: Bearer KEY`")

    def _local(self, request: Request) -> str:
        peer = request.client.host if request.client else ""
        if not is_loopback(peer):
            raise refuse(
                "admin_local_only", f"/admin answers this host only, and {peer or 'this'} is another"
            )
        if "origin" in request.headers:
            raise refuse("admin_local_only", "/admin is not for web pages: the request carries an Origin")
        if not is_loopback(host := _host(request.headers.get("host", ""))):
            # A name that somebody else's DNS points to this host would make a page of theirs "the same origin".
            raise refuse(
                "admin_local_only",
                f"/admin is asked as {host[:80]!r}; ask this host as 127.0.0.1 or localhost",
            )
        return "an operator on this host"

    async def _fields(self, request: Request, known: set[str]) -> dict[str, Any]:
        """The body's fields: all of `known`, and no others."""
        fields = parse_object(await read_body(request, self._settings))
        if unknown := sorted(set(fields) - known):
            takes = ", ".join(f"`{name}`" for name in sorted(known)) or "no field"
            raise refuse(
                "unknown_field", f"`{unknown[0][:64]}` is not known here; this takes {takes}", unknown[0][:64]
            )
        if missing := sorted(known - set(fields)):
            raise refuse("invalid_request", f"`{missing[0]}` is missing", missing[0])
        return fields


def _text(fields: dict[str, Any], name: str, longest: int) -> str:
    value = fields[name]
    if (
        not isinstance(value, str)
        or not 0 < len(value.strip()) <= len(value) <= longest
        or not value.isprintable()
    ):
        raise refuse(
            "invalid_request",
            f"`{name}` must be a text of 1 to {longest} printable characters on one line",
            name,
        )
    return value


def _host(header: str) -> str:
    """The host of a Host header, without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if header.count(":") == 1 else header


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
