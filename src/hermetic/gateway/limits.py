"""Bounds on what a client can make the gateway do before it is refused: bytes read, text tokenised, time waited.

The one thing to know: an over-long text is refused without tokenising all of it, and one that fits is not refused here.
`TextBounds` holds the argument; exact numbers come from the backend's own admission afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hermetic.gateway.backend import Refused
from hermetic.gateway.errors import refuse

if TYPE_CHECKING:
    from hermetic.model.tokenizer import Tokenizer

T = TypeVar("T")
P = ParamSpec("P")

INLINE_CHARS = 16_384  # a text of this size takes about 5 ms to tokenise; a longer one goes to a thread
PART_CHARS = 131_072  # of a long text tokenised at once: some 0.1 s
PROBE_CHARS_PER_TOKEN = (
    8  # English has about 4 characters a token, code about 3: few texts that fit have more than 8
)


@dataclass(frozen=True)
class Settings:
    """What an operator may bound. Sizes in bytes, times in seconds."""

    max_body: int = 8 * 1024**2
    drain: int = 64 * 1024**2  # read and thrown away after a 413, so that the client gets to read the answer
    body_timeout: float = 60.0
    max_choices: int = 256  # prompts x n of one request


DRAIN_SECONDS = 5.0


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


async def read_body(request: Request, settings: Settings) -> bytes:
    """The body, never more than `max_body` bytes of it. Raises Refused(request_too_large | body_timeout), ClientGone."""
    too_large = f"the body is over the limit of {settings.max_body:,} bytes; send less in one request"
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > settings.max_body:
        raise refuse("request_too_large", too_large)
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                body += message.get("body", b"")
                if len(body) > settings.max_body:
                    raise refuse("request_too_large", too_large)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise refuse("body_timeout", f"the body did not arrive within {settings.body_timeout:g} s") from None


class DrainingResponse(Response):
    """An answer to a body that was not read to its end.

    Many clients send the whole body before they read, and a connection closed on unread data is reset, which can destroy
    the answer on its way. So the answer is sent first, then the rest of the body is thrown away, up to `drain` bytes and
    a few seconds, and only then does the connection end.
    """

    def __init__(self, content: bytes, status_code: int, headers: dict[str, str], drain: int) -> None:
        super().__init__(content, status_code, headers, "application/json")
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        left = self._drain
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while left > 0:
                    message = await receive()
                    left -= len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        break
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled as soon as the client closes its connection (raises ClientGone).

    To be used after the body was read: from then on the only message that can come is the disconnect.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(wait_disconnect(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def wait_disconnect(receive: Callable[[], Awaitable[object]]) -> None:
    """Returns when the client has closed its connection."""
    while True:
        message = await receive()
        if isinstance(message, dict) and message.get("type") == "http.disconnect":
            return


class TextBounds:
    """Tokenises within bounds: `encode` refuses a text that certainly has more than `limit` tokens, early.

    Two lower bounds on a text's tokens, both without tokenising all of it:
    - characters / the longest token's characters;
    - the tokens of a beginning of the text that ends between a visible character and a space. Pre-tokenisers split
      there, and in other vocabularies no token spans it, so that beginning's tokens are also the full text's first.
    A text that passes both is tokenised in full, in one of two threads of its own if it is long: the event loop, and
    with it every other client's stream, never waits for it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._longest = max(len(tokenizer.token_text(token)) for token in range(tokenizer.vocab_size))
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenise")

    async def encode(self, text: str, limit: int | None, add_special: bool, param: str) -> list[int]:
        """The tokens of `text`. Raises Refused(context_length_exceeded) if they are surely more than `limit`.

        Without a limit a long text is tokenised part by part, cut where tokens end (see above): the tokenizer keeps the
        interpreter to itself while it works, and everybody else would wait for a text of megabytes."""
        if limit is not None:
            return await self.run(len(text), self._encode, text, limit, add_special, param)
        tokens: list[int] = []
        while (cut := _word_end(text, PART_CHARS)) is not None:
            tokens += await self.run(cut, self._encode, text[:cut], None, add_special, param)
            text, add_special = text[cut:], False
        if len(text) > PART_CHARS:
            raise refuse(
                "request_too_large",
                f"{len(text):,} characters without a space to cut at; send at most {PART_CHARS:,} of such text",
                param,
            )
        return tokens + await self.run(len(text), self._encode, text, None, add_special, param)

    def _encode(self, text: str, limit: int | None, add_special: bool, param: str) -> list[int]:
        if limit is not None:
            self.check(text, limit, param)
        return self._tokenizer.encode(text, add_special=add_special)

    def check(self, text: str, limit: int, param: str) -> None:
        """Raises Refused(context_length_exceeded) if a lower bound on the text's tokens is over `limit`."""
        at_least = -(-len(text) // self._longest)
        if at_least <= limit and (cut := _word_end(text, limit * PROBE_CHARS_PER_TOKEN)) is not None:
            at_least = len(self._tokenizer.encode(text[:cut], add_special=False))
        if at_least > limit:
            raise over_length(limit, at_least, param)

    async def run(self, chars: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`work`, in a thread if it has more than a few milliseconds' worth of characters."""
        if chars <= INLINE_CHARS:
            return work(*args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: work(*args, **kwargs))


def over_length(limit: int, at_least: int, param: str) -> Refused:
    """The refusal of a text that was not tokenised to its end."""
    return refuse(
        "context_length_exceeded",
        f"this model's maximum context length is {limit} tokens, and the prompt has at least {at_least} tokens; "
        "shorten the prompt",
        param,
    )


def _word_end(text: str, near: int) -> int | None:
    """The last place before `near`, and over half of it, between a visible character and a space; None if none."""
    if len(text) <= near:
        return None
    at = near
    while (at := text.rfind(" ", near // 2, at)) > 0:
        if not text[at - 1].isspace():
            return at
    return None
