"""From the backend's token events to text: what a client may see, choice by choice.

The one thing to know: `Answer.pieces` is the only way from tokens to an answer, streamed or whole. It detokenises, holds
back what may become a stop string, cancels a choice whose stop string came, and fails closed: a choice that ends without
a `Finish` ends the whole answer with an error.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from hermetic.gateway.backend import Failed, Finish, Generate, Token, TokenStream
from hermetic.gateway.detok import Released, StopMatcher
from hermetic.model.tokenizer import IncrementalDetokenizer, Tokenizer
from hermetic.telemetry.metrics import Account

log = logging.getLogger("hermetic.gateway")


@dataclass(frozen=True)
class TokenInfo:
    """A token that was asked about: `offset` is where its text begins in the choice's text, `top` (id, logprob)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    offset: int


@dataclass(frozen=True)
class Piece:
    """More of choice `index`: text that may be shown, the tokens it came from, and how the choice ended, if it did."""

    index: int
    text: str
    infos: tuple[TokenInfo, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Choice:
    """One choice's way from tokens to text."""

    def __init__(
        self, index: int, job: Generate, tokenizer: Tokenizer, stops: Sequence[str], at_start: bool
    ) -> None:
        self.index, self.tokens, self.done = index, 0, False
        self._min_tokens = job.params.min_tokens
        # What may be a stop token and also has text; other end tokens of a model are control tokens, without text.
        self._ends = frozenset(job.params.stop_token_ids) | {tokenizer.eos_token_id}
        self._detokenizer = IncrementalDetokenizer(tokenizer, at_start=at_start)
        self._matcher = StopMatcher(stops)
        self._undecided: Token | None = None  # may be the stop token, which is not text: the next event tells
        self._seen = self._released = 0  # characters detokenised, characters released
        self._infos: deque[TokenInfo] = deque()

    def token(self, event: Token) -> Piece | None:
        """The piece that this token makes visible; None if nothing yet."""
        self.tokens += 1
        released, self._undecided = self._flush(), event
        if event.token not in self._ends and released.stop is None:
            more = self._flush()
            released = Released(released.text + more.text, more.stop)
        if released.stop is not None:
            return self._end(released.text, "stop", released.stop)
        if not released.text:
            return None
        return Piece(self.index, released.text, self._infos_of_released())

    def finish(self, event: Finish) -> Piece:
        """The last piece of a choice that the backend ended."""
        if event.stop_token is not None:
            if self._undecided is None and self._infos and self._infos[-1].token == event.stop_token:
                self._infos.pop()  # an end token that only the worker knew of
            self._undecided = None
        released = self._flush()
        if released.stop is not None:
            return self._end(released.text, "stop", released.stop)
        rest = self._matcher.finish()
        self._released += len(rest)
        infos = tuple(self._infos)  # also those without text of their own, such as half a character
        self._infos.clear()
        self.done = True
        return Piece(self.index, released.text + rest, infos, event.reason, event.stop_token)

    def _flush(self) -> Released:
        """Turn the undecided token into text."""
        event, self._undecided = self._undecided, None
        if event is None:
            return Released("")
        if event.logprob is not None:
            self._infos.append(TokenInfo(event.token, event.logprob, event.top or (), self._seen))
        return self._match(self._detokenizer.push(event.token))

    def _match(self, text: str) -> Released:
        self._seen += len(text)
        # As in vLLM, stop strings count from min_tokens on; nothing is held back before.
        released = Released(text) if self.tokens <= self._min_tokens else self._matcher.push(text)
        self._released += len(released.text)
        return released

    def _end(self, text: str, reason: str, stop: str) -> Piece:
        infos = self._infos_of_released()
        self._infos.clear()  # tokens of the stop string itself
        self.done = True
        return Piece(self.index, text, infos, reason, stop)

    def _infos_of_released(self) -> tuple[TokenInfo, ...]:
        infos = []
        while self._infos and self._infos[0].offset < self._released:
            infos.append(self._infos.popleft())
        return tuple(infos)


class Answer:
    """The answer to one HTTP request: all choices of all its prompts.

    Choice `i` of prompt `p` has the index p * n + i, as in OpenAI's API. Iterate `pieces` once; `aclose` in any case:
    it ends whatever is still being computed. `at_start`: the texts stand alone, rather than continue a prompt's text.
    """

    def __init__(
        self,
        jobs: Sequence[Generate],
        streams: Sequence[TokenStream],
        tokenizer: Tokenizer,
        stops: Sequence[str],
        account: Account,
        page_size: int,
        at_start: bool,
    ) -> None:
        self._jobs, self._streams, self._account, self._page_size = jobs, streams, account, page_size
        self._choices = [
            [Choice(at * job.n + index, job, tokenizer, stops, at_start) for index in range(job.n)]
            for at, job in enumerate(jobs)
        ]
        self._started = [False] * len(jobs)
        self.pieces = self._run()

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counts once, however many choices continue it."""
        return sum(len(job.tokens) for job in self._jobs)

    @property
    def completion_tokens(self) -> int:
        """All tokens made, stop tokens and the tokens of a stop string included, those after it not."""
        return sum(choice.tokens for choices in self._choices for choice in choices)

    async def _run(self) -> AsyncGenerator[Piece, None]:
        """Pieces as they come; ends when every choice has ended. Raises Refused and Failed."""
        async with aclosing(merge(self._streams)) as events:
            async for at, event in events:
                choices = self._choices[at]
                if not 0 <= event.index < len(choices):
                    raise Failed(
                        "internal_error", f"the backend named choice {event.index} of {len(choices)}"
                    )
                choice = choices[event.index]
                if choice.done:
                    continue  # on its way when the choice was cancelled
                piece = (
                    self._finish(at, choice, event)
                    if isinstance(event, Finish)
                    else self._token(at, choice, event)
                )
                if piece is not None:
                    yield piece
                if choice.done and isinstance(event, Token):
                    await self._stop(at, event.index)
                if all(choice.done for choices in self._choices for choice in choices):
                    return
        unfinished = [choice.index for choices in self._choices for choice in choices if not choice.done]
        raise Failed("internal_error", f"the backend ended without finishing the choices {unfinished}")

    def _token(self, at: int, choice: Choice, event: Token) -> Piece | None:
        if not self._started[at]:
            self._started[at] = True
            self._account.hold(self._shared_pages(at) + len(self._choices[at]) * self._own_pages(at, 0))
        pages = self._own_pages(at, choice.tokens)
        piece = choice.token(event)
        self._account.token(choice.index)
        self._account.hold(-pages if choice.done else self._own_pages(at, choice.tokens) - pages)
        return piece

    def _finish(self, at: int, choice: Choice, event: Finish) -> Piece:
        if self._started[at]:
            self._account.hold(-self._own_pages(at, choice.tokens))
        return choice.finish(event)

    def _shared_pages(self, at: int) -> int:
        """Full pages of the prompt: all its choices read the same ones."""
        return len(self._jobs[at].tokens) // self._page_size

    def _own_pages(self, at: int, tokens: int) -> int:
        return -(-(len(self._jobs[at].tokens) % self._page_size + tokens) // self._page_size)

    async def _stop(self, at: int, index: int) -> None:
        """A stop string came: nothing more of this choice is wanted, and nothing of a prompt without open choices."""
        if all(choice.done for choice in self._choices[at]):
            await self._streams[at].aclose()
        else:
            await self._streams[at].cancel(index)

    async def aclose(self) -> None:
        """Cancels whatever is still being computed, on every worker, even if the caller is being cancelled."""
        await asyncio.shield(self._close())

    async def _close(self) -> None:
        await self.pieces.aclose()
        await close_all(self._streams)


async def close_all(streams: Sequence[TokenStream]) -> None:
    """Close every stream; a failure to close one is logged and does not keep the others open."""
    results = await asyncio.gather(*(stream.aclose() for stream in streams), return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            log.error("closing a token stream failed", exc_info=result)


async def merge(streams: Sequence[TokenStream]) -> AsyncGenerator[tuple[int, Token | Finish], None]:
    """The events of all streams as they come, with the stream's place. The first error ends it.

    The queue has no bound of its own: what can be in it is bounded by the requests' max_tokens.
    """
    if len(streams) == 1:
        async for event in streams[0]:
            yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Token | Finish | None]] = asyncio.Queue()

    async def pump(at: int) -> None:
        try:
            async for event in streams[at]:
                queue.put_nowait((at, event))
        finally:
            queue.put_nowait((at, None))

    pumps = [asyncio.create_task(pump(at)) for at in range(len(streams))]
    try:
        left = len(pumps)
        while left:
            at, item = await queue.get()
            if item is not None:
                yield at, item
            else:
                await pumps[at]  # raises what ended it
                left -= 1
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
