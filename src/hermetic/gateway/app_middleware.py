"""Around every request: its id, one log line, and the last answer when something unexpected broke.

The one thing to know: the server mints the request id. A client's X-Request-Id is a label: it is echoed, so that the
client can match answers, and is used for nothing else.
"""

from __future__ import annotations

import logging
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hermetic.gateway.errors import error_body, internal_error
from hermetic.telemetry.logs import event
from hermetic.telemetry.metrics import Account

log = logging.getLogger("hermetic.gateway")
_QUIET = {"/health", "/ready", "/metrics"}
MAX_LABEL = 128


class RequestScope:
    """ASGI middleware. Sets `request.state.request_id`; closes `request.state.account` if nobody did."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = secrets.token_hex(16)
        label = re.sub(r"[^A-Za-z0-9._:@/+=-]", "", Headers(scope=scope).get("x-request-id", ""))[:MAX_LABEL]
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        status = 0
        started = time.perf_counter()

        async def send_with_ids(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = label or request_id
                headers["x-hermetic-request-id"] = request_id
            await send(message)

        account: Account | None = None
        try:
            await self._app(scope, receive, send_with_ids)
        except Exception:
            log.exception(
                "internal_error", extra={"fields": {"request_id": request_id, "path": scope["path"]}}
            )
            if account := state.get("account"):
                account.end("failed", "internal_error")
            if status:
                raise  # the answer has begun: the server can only close the connection
            body = error_body(internal_error(request_id))
            head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send_with_ids({"type": "http.response.start", "status": 500, "headers": head})
            await send({"type": "http.response.body", "body": body})
        finally:
            account = state.get("account")
            if account is not None:
                account.end("aborted")  # nothing, if it ended in another way
            event(
                log,
                "request",
                logging.DEBUG if scope["path"] in _QUIET else logging.INFO,
                request_id=request_id,
                method=scope["method"],
                path=scope["path"],
                status=status,
                ms=round((time.perf_counter() - started) * 1000, 1),
                **({"tenant": account.tenant, "outcome": account.outcome} if account else {}),
                **({"code": state["code"]} if "code" in state else {}),
                **({"label": label} if label else {}),
            )
