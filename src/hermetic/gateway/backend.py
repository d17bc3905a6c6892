"""What the HTTP side asks of the inference side: admission, a stream of tokens, figures.

The gateway's HTTP code knows requests, tenants and text; the backend knows tickets, workers and pages. Everything that
crosses is in this file. Outcomes are types: a stream ends in `Finish` events or raises `Refused` or `Failed`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from hermetic.model.params import SamplingParams


class Refused(Exception):
    """The request was not taken, by the gateway or by a worker; nothing was computed and nothing is held.

    `code` is stable and documented (docs/errors.md), `status` the HTTP status, `retry_after` seconds or None.
    """

    def __init__(
        self,
        code: str,
        message: str,
        status: int = 400,
        param: str | None = None,
        retry_after: float | None = None,
    ):
        super().__init__(message)
        self.code, self.message, self.status, self.param, self.retry_after = (
            code,
            message,
            status,
            param,
            retry_after,
        )


class Failed(Exception):
    """The request was taken and could not be completed (`kv_integrity`, `worker_lost`, `deadline_exceeded`, ...)."""

    def __init__(self, code: str, message: str, status: int = 500, retry_after: float | None = None):
        super().__init__(message)
        self.code, self.message, self.status, self.retry_after = code, message, status, retry_after


@dataclass(frozen=True)
class Generate:
    """One prompt to be continued `n` ways. `scope` is the tenant's KV scope, `tenant` only labels metrics."""

    tokens: tuple[int, ...]
    params: SamplingParams
    tenant: str
    scope: str
    n: int = 1


@dataclass(frozen=True)
class Token:
    """One output token of choice `index`; logprobs are natural logs, present only where asked for."""

    index: int
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] | None = None


@dataclass(frozen=True)
class Finish:
    """Choice `index` ended: `reason` is "stop" (end-of-sequence or a stop token: `stop_token`) or "length".

    A stop token, like end-of-sequence, has also been sent as a Token before; the gateway leaves it out of the text."""

    index: int
    reason: str
    stop_token: int | None = None


@dataclass(frozen=True)
class Capacity:
    """What the measured pools allow. `max_model_len` tokens = prompt + output; derived, never configured beside them."""

    model: str
    max_model_len: int
    window: int
    page_size: int
    pools: Mapping[str, int] = field(default_factory=dict)  # worker id -> tokens its pool holds
    details: Mapping[str, object] = field(
        default_factory=dict
    )  # fingerprint, verify, dtype, ... for /v1/models


class TokenStream(Protocol):
    """The answer of `Backend.generate`. Iterate it; `aclose` (idempotent) cancels every half at once."""

    def __aiter__(self) -> AsyncIterator[Token | Finish]: ...
    async def aclose(self) -> None: ...
    async def cancel(self, index: int) -> None:
        """Stop producing choice `index` (a stop string was met); the other choices go on. It yields no Finish."""
        ...


class Backend(Protocol):
    """The inference side."""

    def capacity(self) -> Capacity: ...

    def accepting(self) -> None:
        """Raises Refused when no request at all is taken now: "model_disabled" (400), or "no_workers" (503) before any
        worker has joined. Instant; asked before anything else is done for a request."""
        ...

    def disabled(self) -> str | None:
        """Why the model is disabled, or None."""
        ...

    def admit(self, prompt_tokens: int, max_tokens: int, n: int = 1) -> None:
        """Raises Refused("context_length_exceeded", 400) with the numbers if it can never fit. Instant."""
        ...

    async def generate(self, request: Generate) -> TokenStream:
        """Take the request or raise Refused (also 429/503 when busy). Iterating may raise Refused (a worker's own
        refusal, before any token) or Failed (any time)."""
        ...

    async def ready(self) -> str | None:
        """None when work moves (a probe went through within its bound), else why not."""
        ...

    async def stats(self) -> Mapping[str, Mapping[str, float]]:
        """Counters and gauges by worker id, flat: e.g. {"prefill-0": {"pages_free": 12, "tiles_verified_landing": 90, ...}};
        those of the gateway's own part are under "gateway"."""
        ...

    # What only an operator may ask for.

    async def status(self) -> Mapping[str, object]:
        """{"gateway": {...}, "workers": [...]}, as JSON can hold it (docs/errors.md says where it is shown)."""
        ...

    def drain(self, worker: str) -> str:
        """Give this worker nothing new; returns its state. Raises Refused(worker_not_found)."""
        ...

    def undrain(self, worker: str) -> str:
        """Give it work again; returns its state. Raises Refused(worker_not_found)."""
        ...

    def disable(self, reason: str, by: str) -> str | None:
        """Refuse every new request with this reason. Returns a warning, or None."""
        ...

    def enable(self, by: str) -> None:
        """Take requests again. Raises Failed(state_not_saved) if that cannot be kept over a restart."""
        ...

    def set_context(self, tokens: int | None) -> int:
        """Advertise at most so many tokens (None: what the pools hold); returns what is advertised now."""
        ...
