"""One request of the audit and what came back for it.

The one thing to know: nothing here is a judgement. An `Answer` holds what was seen on the wire, with times on the audit's own
monotonic clock; whether that is as it should be is decided in `evidence/`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

KEPT = 20_000  # characters, or token ids, of a prompt in a report
Endpoint = Literal["chat", "completions", "generate"]
How = Literal[
    "answered",  # 200, with an end that says why it ended
    "refused",  # a 4xx, or an error event with a 4xx code before any token
    "failed",  # a 5xx, or an error event
    "left",  # the audit hung up, as it meant to
    "silent",  # neither an answer nor an error within the bound
    "cut",  # the connection ended before the answer did
    "garbled",  # what came cannot be read as an answer
    "unreachable",  # no connection
    "limited",  # still told to slow down after having waited
]


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A request. `prompt`: text, or token ids (completions and generate only). `key`: which API key, counted from 0.

    `leave_tokens`, `leave_seconds`: hang up after so many tokens, or seconds. `raw`: a body that is sent as it is."""

    tenant: str
    prompt: str | tuple[int, ...]
    system: str = ""
    endpoint: Endpoint = "chat"
    max_tokens: int = 32
    temperature: float = 0.0
    stream: bool = True
    logprobs: bool = False
    key: int = 0
    request_id: str = ""  # sent as X-Request-Id and, to SGLang, as rid
    extra: dict[str, Any] = {}  # more fields of the body
    headers: dict[str, str] = {}
    raw: bytes | None = None
    leave_tokens: int | None = None
    leave_seconds: float | None = None
    within: float = 60.0  # seconds until it counts as silent


class Token(msgspec.Struct, frozen=True):
    """`logprob` natural; None if the server gave none. `at`: seconds after the request was sent."""

    text: str
    at: float
    logprob: float | None = None


class Usage(msgspec.Struct, frozen=True):
    """What the server says it counted. A hint, never proof."""

    prompt: int | None = None
    completion: int | None = None
    cached: int | None = None


class Answer(msgspec.Struct, kw_only=True):
    """What came back. `number` counts the audit's requests from 1; `sent` is in seconds since the audit began.

    `tokens` are the pieces as they came (one event may hold several tokens). `prefill` is the other half's answer, where
    the target is a pair without a router."""

    ask: Ask
    number: int
    sent: float
    how: How
    status: int | None = None
    text: str = ""
    tokens: list[Token] = []
    first: float | None = None  # seconds until the first token
    seconds: float = 0.0  # until the end
    finish: str | None = None
    usage: Usage = Usage()
    error: str = ""
    server: str = ""  # which one answered, where the target is several
    server_id: str = ""
    excerpt: str = ""  # the beginning of what came, as it came
    prefill: Answer | None = None
    retries: int = 0


def shortened(answer: Answer) -> Answer:
    """The same, with no more of what was sent than KEPT characters or token ids; an over-long prompt has megabytes."""
    ask = answer.ask
    if len(ask.prompt) <= KEPT and len(ask.raw or b"") <= KEPT:
        return answer
    prompt = (
        f"{ask.prompt[:KEPT]} ... ({len(ask.prompt) - KEPT:,} more characters)"
        if isinstance(ask.prompt, str) and len(ask.prompt) > KEPT
        else ask.prompt[:KEPT]
    )
    raw = None if ask.raw is None else ask.raw[:KEPT]
    return msgspec.structs.replace(answer, ask=msgspec.structs.replace(ask, prompt=prompt, raw=raw))


__all__ = ["Answer", "Ask", "Endpoint", "How", "Token", "Usage", "shortened"]
