"""The HTTP application: routes, keys, models, figures.

`create_app` makes it; whoever starts the server provides the backend, the tokenizer and the tenants. The one thing to
know: every handler reads and checks the body itself (bounded, strict, with errors in OpenAI's shape), so FastAPI routes
and nothing more.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import hermetic
from hermetic.gateway.admin import Admin
from hermetic.gateway.api import Api
from hermetic.gateway.app_generate import Generator
from hermetic.gateway.app_middleware import RequestScope
from hermetic.gateway.backend import Backend, Failed, Refused
from hermetic.gateway.chat_format import Json
from hermetic.gateway.errors import error_body, error_headers, refuse
from hermetic.gateway.limits import ClientGone, DrainingResponse, Settings, TextBounds, read_body
from hermetic.gateway.tenants import Tenant, Tenants, is_loopback
from hermetic.telemetry.metrics import CONTENT_TYPE, Account, Metrics

if TYPE_CHECKING:
    from hermetic.model.tokenizer import Tokenizer


def create_app(
    backend: Backend,
    tokenizer: Tokenizer,
    tenants: Tenants,
    settings: Settings | None = None,
    metrics: Metrics | None = None,
    listens: str = "",
) -> FastAPI:
    """The app. It starts and stops nothing: the backend must be running, and is closed by whoever started it.

    `listens`: the address of this API, as /v1/models says it for whoever checks a deployment; empty if it is not known."""
    settings = settings or Settings()
    routes = _Routes(backend, tokenizer, tenants, settings, metrics or Metrics(), listens)
    app = FastAPI(
        title="Hermetic", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False,
        version=hermetic.__version__,
    )  # fmt: skip
    for path, method, handler in (
        ("/v1/chat/completions", "POST", routes.chat),
        ("/v1/completions", "POST", routes.completions),
        ("/v1/models", "GET", routes.models),
        ("/v1/models/{name:path}", "GET", routes.model),
        ("/tokenize", "POST", routes.tokenize),
        ("/detokenize", "POST", routes.detokenize),
        ("/health", "GET", routes.health),
        ("/ready", "GET", routes.ready),
        ("/metrics", "GET", routes.metrics),
        ("/version", "GET", routes.version),
        *Admin(backend, tenants, settings).routes(),
    ):
        app.add_route(path, handler, methods=[method])
    app.add_exception_handler(Refused, routes.on_error)
    app.add_exception_handler(Failed, routes.on_error)
    app.add_exception_handler(ClientGone, routes.on_gone)
    app.add_exception_handler(HTTPException, routes.on_http)
    app.add_middleware(RequestScope)
    return app


class _Routes:
    """The handlers, and what they share."""

    def __init__(
        self, backend: Backend, tokenizer: Tokenizer, tenants: Tenants, settings: Settings, metrics: Metrics, listens: str
    ) -> None:  # fmt: skip
        self._backend, self._tokenizer, self._tenants, self._listens = backend, tokenizer, tenants, listens
        self._settings, self._metrics = settings, metrics
        self._api = Api(tokenizer.vocab_size)
        self._bounds = TextBounds(tokenizer)
        self._generator = Generator(backend, tokenizer, self._bounds, settings)
        self._started = int(time.time())

    async def chat(self, request: Request) -> Response:
        tenant, account = self._enter(request)
        self._backend.accepting()
        body = await read_body(request, self._settings)
        ask = await self._bounds.run(len(body), self._api.chat, body)
        self._known(ask.model)
        return await self._generator.chat(request, ask, tenant, account)

    async def completions(self, request: Request) -> Response:
        tenant, account = self._enter(request)
        self._backend.accepting()
        body = await read_body(request, self._settings)
        ask = await self._bounds.run(len(body), self._api.completion, body)
        self._known(ask.model)
        return await self._generator.complete(request, ask, tenant, account)

    async def models(self, request: Request) -> Response:
        self._authenticate(request)
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._authenticate(request)
        self._known(request.path_params["name"])
        return _json(self._model())

    async def tokenize(self, request: Request) -> Response:
        self._authenticate(request)
        body = await read_body(request, self._settings)
        ask = await self._bounds.run(len(body), self._api.tokenize, body)
        if ask.model is not None:
            self._known(ask.model)
        if ask.prompt is not None:
            tokens = await self._bounds.encode(ask.prompt, None, ask.add_special_tokens, "prompt")
        else:
            tokens = await self._generator.chat_tokens(ask.messages, ask.add_generation_prompt, None)
        strs = [self._tokenizer.token_text(token) for token in tokens] if ask.return_token_strs else None
        limit = self._backend.capacity().max_model_len
        return _json({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": strs})

    async def detokenize(self, request: Request) -> Response:
        self._authenticate(request)
        body = await read_body(request, self._settings)
        ask = await self._bounds.run(len(body), self._api.detokenize, body)
        if ask.model is not None:
            self._known(ask.model)
        text = await self._bounds.run(len(body), self._tokenizer.decode, list(ask.tokens), skip_special=False)
        return _json({"prompt": text})

    async def health(self, request: Request) -> Response:
        """The process lives; see /ready for whether it can work."""
        return _json({"status": "alive"})

    async def ready(self, request: Request) -> Response:
        reason = await self._backend.ready()
        if reason is not None:
            raise Refused("not_ready", reason, 503, retry_after=1)
        if (disabled := self._backend.disabled()) is not None:
            # The workers are fine, and what must reach clients is the 400 with the reason: a load balancer that took
            # this server out would answer them with an error of its own.
            return _json({"status": "disabled", "reason": disabled})
        return _json({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        """For the operator's scraper: it names tenants, so with a key file it answers this host only."""
        peer = request.client.host if request.client else ""
        if self._tenants.by_hash and not is_loopback(peer):
            raise refuse("metrics_local_only", "with --api-keys, /metrics answers requests of this host only")
        return Response(self._metrics.scrape(await self._backend.stats()), media_type=CONTENT_TYPE)

    async def version(self, request: Request) -> Response:
        return _json({"version": hermetic.__version__})

    async def on_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, Refused | Failed)
        request.state.code = error.code
        account = getattr(request.state, "account", None)
        if isinstance(account, Account):
            account.end("refused" if isinstance(error, Refused) else "failed", error.code)
        elif isinstance(error, Refused) and _of_tenants(request.url.path):
            tenant = getattr(request.state, "tenant", "-")
            self._metrics.refusals.labels(tenant, error.code).inc()
        body, headers = error_body(error), error_headers(error)
        if error.code == "request_too_large":
            return DrainingResponse(body, error.status, headers, self._settings.drain)
        return Response(body, error.status, headers, "application/json")

    async def on_gone(self, request: Request, error: Exception) -> Response:
        """Nobody reads this answer; 499 is nginx's word for it, and what the log shows."""
        return Response(status_code=499)

    async def on_http(self, request: Request, error: Exception) -> Response:
        """What routing itself answers: no such path, or not by this method."""
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "")
            refused = refuse(
                "method_not_allowed", f"{request.url.path} does not take {request.method}; it takes {allowed}"
            )
        elif error.status_code == 404:
            refused = refuse("not_found", "there is nothing at this path; the API is under /v1")
        else:
            refused = Refused("invalid_request", str(error.detail), error.status_code)
        response = await self.on_error(request, refused)
        response.headers.update(error.headers or {})
        return response

    def _enter(self, request: Request) -> tuple[Tenant, Account]:
        """Open the request's account, then the door."""
        account = Account(self._metrics, request.url.path)
        request.state.account = account
        tenant = self._authenticate(request)
        account.begin(tenant.name)
        return tenant, account

    def _authenticate(self, request: Request) -> Tenant:
        given = request.headers.get("authorization")
        tenant = self._tenants.authenticate(given)
        if tenant is None:
            what = "this API key is not known here" if given else "this server needs an API key"
            raise refuse(
                "invalid_api_key", f"{what}; send `Authorization: Bearer KEY` with a key from the operator"
            )
        request.state.tenant = tenant.name
        return tenant

    def _known(self, model: str) -> None:
        served = self._backend.capacity().model
        if model != served:
            short = model if len(model) <= 80 else model[:77] + "..."
            raise refuse(
                "model_not_found", f"the model `{short}` is not served here; served is `{served}`", "model"
            )

    def _model(self) -> Json:
        capacity = self._backend.capacity()
        return {
            "id": capacity.model,
            "object": "model",
            "created": self._started,
            "owned_by": "hermetic",
            "root": capacity.model,
            "parent": None,
            "max_model_len": capacity.max_model_len,
            "hermetic": {
                "window": capacity.window,
                "page_size": capacity.page_size,
                "pool_tokens": dict(capacity.pools),
                **capacity.details,
                **self._reached(),
            },
        }

    def _reached(self) -> Json:
        """What keeps others out, or does not."""
        keys = bool(self._tenants.by_hash)
        reached: Json = {"api_keys": keys, "metrics": "this host" if keys else "everybody"}
        return {"listens": self._listens, **reached} if self._listens else reached


def _of_tenants(path: str) -> bool:
    """Refusals elsewhere are not a tenant's requests, and are not counted as such."""
    return path != "/ready" and not path.startswith("/admin/")


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
