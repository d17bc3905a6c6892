"""/v1/chat/completions and /v1/completions: from a checked request to its answer.

The one thing to know: nothing is answered before the first piece is there. So every refusal, also one that a worker makes
by its own numbers, has its right HTTP status, streaming or not; an error after that is an `error` event that ends the
stream without `[DONE]`. When the client goes, the backend is told at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hermetic.gateway.api import Ask, ChatAsk, CompletionAsk, Message
from hermetic.gateway.app_stream import EventStream, Frames
from hermetic.gateway.backend import Backend, Capacity, Failed, Generate, Refused
from hermetic.gateway.chat_format import ChatFormat, CompletionFormat, Format, Json, usage
from hermetic.gateway.errors import error_body, internal_error, refuse
from hermetic.gateway.limits import Settings, TextBounds, until_gone
from hermetic.gateway.stream import Answer, Piece, close_all
from hermetic.gateway.tenants import Tenant
from hermetic.model.tokenizer import ChatError, Tokenizer
from hermetic.telemetry.metrics import Account

log = logging.getLogger("hermetic.gateway")


@dataclass(frozen=True)
class Opened:
    """An answer whose first piece is there."""

    answer: Answer
    first: Piece


class Generator:
    """Turns asks into answers. One for the app."""

    def __init__(
        self, backend: Backend, tokenizer: Tokenizer, bounds: TextBounds, settings: Settings
    ) -> None:
        self._backend, self._tokenizer, self._bounds, self._settings = backend, tokenizer, bounds, settings

    async def chat(self, request: Request, ask: ChatAsk, tenant: Tenant, account: Account) -> Response:
        """Raises Refused, Failed, ClientGone; nothing is held then."""
        limit = self._backend.capacity().max_model_len
        tokens = await self.chat_tokens(ask.messages, ask.add_generation_prompt, limit)
        shape = ChatFormat(self._tokenizer, ask.sampling.get("logprobs"))
        return await self._respond(request, ask, [tokens], "messages", shape, tenant, account)

    async def complete(
        self, request: Request, ask: CompletionAsk, tenant: Tenant, account: Account
    ) -> Response:
        """Raises Refused, Failed, ClientGone; nothing is held then."""
        if len(ask.prompts) * ask.n > self._settings.max_choices:
            raise refuse(
                "invalid_request",
                f"{len(ask.prompts)} prompts x n={ask.n} are {len(ask.prompts) * ask.n} choices; one request may ask for "
                f"{self._settings.max_choices}",
                "prompt",
            )
        limit = self._backend.capacity().max_model_len
        prompts: list[Sequence[int]] = []
        for prompt in ask.prompts:
            if isinstance(prompt, str):
                prompts.append(await self._bounds.encode(prompt, limit, ask.add_special_tokens, "prompt"))
            else:
                prompts.append(prompt)
        echoes = [
            prompt if isinstance(prompt, str) else self._tokenizer.decode(list(prompt)) if ask.echo else ""
            for prompt in ask.prompts
        ]
        shape = CompletionFormat(
            self._tokenizer, ask.sampling.get("logprobs"), echoes if ask.echo else (), ask.n
        )
        return await self._respond(request, ask, prompts, "prompt", shape, tenant, account)

    async def chat_tokens(
        self, messages: Sequence[Message], add_generation_prompt: bool, limit: int | None
    ) -> list[int]:
        """The conversation's tokens through the model's chat template. Raises Refused."""
        chars = sum(len(message["content"]) for message in messages)
        try:
            text = await self._bounds.run(
                chars, self._tokenizer.render_chat, messages, add_generation_prompt=add_generation_prompt
            )
        except ChatError as error:
            code = "invalid_request" if self._tokenizer.chat_template else "no_chat_template"
            raise refuse(code, str(error), "messages") from error
        return await self._bounds.encode(text, limit, add_special=False, param="messages")

    async def _respond(
        self,
        request: Request,
        ask: Ask,
        prompts: Sequence[Sequence[int]],
        field: str,
        shape: Format,
        tenant: Tenant,
        account: Account,
    ) -> Response:
        capacity = self._backend.capacity()
        jobs = [self._job(ask, tokens, field, tenant, capacity) for tokens in prompts]
        head: Json = {
            "id": shape.id_prefix + request.state.request_id,
            "object": shape.chunk_object if ask.stream else shape.whole_object,
            "created": int(time.time()),
            "model": capacity.model,
            "system_fingerprint": _fingerprint(capacity),
        }
        answers: list[Answer] = []  # what must be closed if this is not answered by a stream
        streaming = False
        try:
            opened = await until_gone(request, self._open(jobs, ask, account, capacity, answers))
            if ask.stream:
                frames = self._frames(head, opened, ask, shape, account, request)
                streaming = True
                return EventStream(frames, opened.answer.aclose)
            whole = await until_gone(request, self._whole(head, opened, shape))
        finally:
            if not streaming:
                for answer in answers:
                    await answer.aclose()
        account.end("completed")
        return Response(msgspec.json.encode(whole), media_type="application/json")

    def _job(
        self, ask: Ask, tokens: Sequence[int], field: str, tenant: Tenant, capacity: Capacity
    ) -> Generate:
        """What the backend is asked for, admitted by its measured capacity. Raises Refused."""
        if not tokens:
            raise refuse("empty_prompt", "the prompt has no token to continue", field)
        max_tokens = ask.max_tokens or max(1, capacity.max_model_len - len(tokens))
        try:
            self._backend.admit(len(tokens), max_tokens, ask.n)
        except Refused as refused:
            if refused.code == "context_length_exceeded":  # name the field that this client can change
                refused.param = "max_tokens" if len(tokens) < capacity.max_model_len else field
            raise
        return Generate(tuple(tokens), ask.params(max_tokens), tenant.name, tenant.scope, ask.n)

    async def _open(
        self, jobs: Sequence[Generate], ask: Ask, account: Account, capacity: Capacity, answers: list[Answer]
    ) -> Opened:
        """Start every job and wait for the first piece. All of them are closed if one is refused."""
        streams = []
        try:
            for job in jobs:
                streams.append(await self._backend.generate(job))
        except BaseException:
            await close_all(streams)
            raise
        answer = Answer(
            jobs,
            streams,
            self._tokenizer,
            ask.stop,
            account,
            capacity.page_size,
            at_start=isinstance(ask, ChatAsk),
        )
        answers.append(answer)
        account.taken(answer.prompt_tokens)
        return Opened(answer, await anext(answer.pieces))

    async def _whole(self, head: Json, opened: Opened, shape: Format) -> Json:
        by_choice: dict[int, list[Piece]] = {opened.first.index: [opened.first]}
        async for piece in opened.answer.pieces:
            by_choice.setdefault(piece.index, []).append(piece)
        choices = [shape.whole(index, by_choice[index]) for index in sorted(by_choice)]
        return head | {
            "choices": choices,
            "usage": usage(opened.answer.prompt_tokens, opened.answer.completion_tokens),
        }

    async def _frames(
        self, head: Json, opened: Opened, ask: Ask, shape: Format, account: Account, request: Request
    ) -> Frames:
        no_usage: Json = {"usage": None} if ask.include_usage else {}
        begun: set[int] = set()

        def chunks(piece: Piece) -> bytes:
            parts = []
            if piece.index not in begun:
                begun.add(piece.index)
                if (opening := shape.opening(piece.index)) is not None:
                    parts.append(_data(head | {"choices": [opening]} | no_usage))
            parts.append(_data(head | {"choices": [shape.chunk(piece)]} | no_usage))
            return b"".join(parts)

        try:
            yield chunks(opened.first)
            async for piece in opened.answer.pieces:
                yield chunks(piece)
        except (Refused, Failed) as error:
            account.end("refused" if isinstance(error, Refused) else "failed", error.code)
            request.state.code = error.code
            yield b"data: " + error_body(error) + b"\n\n"
        except Exception:
            request_id = request.state.request_id
            log.exception("internal_error", extra={"fields": {"request_id": request_id}})
            account.end("failed", "internal_error")
            yield b"data: " + error_body(internal_error(request_id)) + b"\n\n"
        else:
            account.end("completed")
            if ask.include_usage:
                counts = usage(opened.answer.prompt_tokens, opened.answer.completion_tokens)
                yield _data(head | {"choices": [], "usage": counts})
            yield b"data: [DONE]\n\n"


def _data(chunk: Json) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def _fingerprint(capacity: Capacity) -> str | None:
    """Changes when the model or its arithmetic does, as far as the backend says what they are."""
    fingerprint = capacity.details.get("fingerprint")
    return f"hermetic-{fingerprint}"[:32] if isinstance(fingerprint, str) else None
