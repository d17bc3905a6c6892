"""A real HTTP server inside the test process, whose every answer a test scripts: it streams, refuses, hangs, cuts, or lies.

The one thing to know: it is HTTP/1.1 by hand over asyncio, so that a test can also send what no HTTP library would. It notes
what came (`requests`), how many requests were open at once (`most_open`) and which clients hung up (`left`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int  # counts connections from 1

    @property
    def json(self) -> dict[str, Any]:
        value = json.loads(self.body)
        assert isinstance(value, dict)
        return value


class Wire:
    """What a script answers with."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.streaming = False

    async def raw(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def json(self, value: object, status: int = 200, **headers: str) -> None:
        await self.text(json.dumps(value), status, "application/json", **headers)

    async def text(self, text: str, status: int = 200, kind: str = "text/html", **headers: str) -> None:
        data = text.encode()
        lines = [f"HTTP/1.1 {status} X", f"content-type: {kind}", f"content-length: {len(data)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self.raw("\r\n".join([*lines, "", ""]).encode() + data)

    async def stream(self) -> None:
        """Begin a stream of events."""
        self.streaming = True
        await self.raw(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )

    async def event(self, value: object) -> None:
        data = f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()
        await self.raw(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def done(self) -> None:
        """[DONE], and the end of the stream."""
        await self.event("[DONE]")
        await self.end()

    async def end(self) -> None:
        await self.raw(b"0\r\n\r\n")

    def cut(self) -> None:
        """Close the connection, now."""
        self._writer.transport.abort()


Script = Callable[[Request, Wire], Awaitable[None]]


@dataclass
class ScriptedEndpoint:
    """Answers as `script` does. Model lists are answered by themselves unless `models` is None."""

    script: Script
    models: tuple[str, ...] | None = ("m",)
    entry: dict[str, Any] = field(default_factory=dict)  # more fields of each entry of the model list
    url: str = ""
    requests: list[Request] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # paths whose client hung up before the answer was over
    now_open: int = 0
    most_open: int = 0
    connections: int = 0

    @property
    def posts(self) -> list[Request]:
        return [request for request in self.requests if request.method == "POST"]

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        try:
            while (request := await _read(reader, number)) is not None:
                self.requests.append(request)
                self.now_open += 1
                self.most_open = max(self.most_open, self.now_open)
                try:
                    if not await self._answer(request, reader, Wire(writer)):
                        return
                finally:
                    self.now_open -= 1
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            pass
        finally:
            writer.close()

    async def _answer(self, request: Request, reader: asyncio.StreamReader, wire: Wire) -> bool:
        """False: the connection is over."""
        if request.path.endswith("/models") and self.models is not None:
            entries = [{"id": name, "object": "model", **self.entry} for name in self.models]
            await wire.json({"object": "list", "data": entries})
            return True
        answering = asyncio.ensure_future(self.script(request, wire))
        watching = asyncio.ensure_future(reader.read(1))  # nothing comes while we answer, but the end
        try:
            await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self.left.append(request.path)
                return False
            answering.result()
            return True
        finally:
            for task in (answering, watching):
                task.cancel()
            await asyncio.gather(answering, watching, return_exceptions=True)


async def _read(reader: asyncio.StreamReader, connection: int) -> Request | None:
    head = await reader.readline()
    if not head:
        return None
    method, path, _ = head.decode().split(" ", 2)
    headers = {}
    while line := (await reader.readline()).decode().strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Request(method, path, headers, body, connection)


@contextlib.asynccontextmanager
async def serving(
    script: Script | ScriptedEndpoint, tls: ssl.SSLContext | None = None
) -> AsyncIterator[ScriptedEndpoint]:
    """The endpoint on a free port of this host, until the block ends."""
    endpoint = script if isinstance(script, ScriptedEndpoint) else ScriptedEndpoint(script)
    open_ones: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_ones.add(task)
        try:
            await endpoint.connected(reader, writer)
        except asyncio.CancelledError:  # the test is over; asyncio's streams would report it
            pass
        finally:
            open_ones.discard(task)

    server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls, limit=64 * 1024**2)
    port = server.sockets[0].getsockname()[1]
    endpoint.url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    try:
        yield endpoint
    finally:
        server.close()
        for task in list(open_ones):
            task.cancel()
        await asyncio.gather(*open_ones, return_exceptions=True)


# ------------------------------------------------------------------------------------ an engine, as far as it matters


def chat_event(text: str | None = None, finish: str | None = None, **more: object) -> dict[str, Any]:
    delta = {} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": finish, **more}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [choice]}


def usage_event(prompt: int, completion: int) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {"id": "chatcmpl-1", "choices": [], "usage": usage}


async def say(wire: Wire, *pieces: str) -> None:
    """A whole chat stream."""
    await wire.stream()
    for piece in pieces:
        await wire.event(chat_event(piece))
    await wire.event(chat_event(finish="stop"))
    await wire.done()


@dataclass
class SmallEngine:
    """A server with one token a word, a limit, and a speed; it says the prompt's last words. Lengths in tokens.

    `limit`: prompt + max_tokens must not be more. `hangs`: lengths of prompt that get no answer until the client leaves."""

    limit: int = 1000
    chat: bool = True
    completions: bool = True
    template: int = 10  # tokens that chat adds
    usage: bool = True
    streams: bool = True
    logprobs: bool = True
    ids: bool = True
    seconds_a_token: float = 0.0
    reads: int = 1 << 40  # a longer prompt is not read at all, and answered at once
    hangs: tuple[int, ...] = ()
    stuck_after: bool = False  # after such a length nobody is served any more
    key: str = ""
    said: str = "This model's maximum context length is {limit} tokens, and your prompt has {tokens} tokens."
    stuck: bool = False
    accepted: list[int] = field(default_factory=list)

    async def __call__(self, request: Request, wire: Wire) -> None:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return await self._no(wire, 401, f"bad key {request.headers.get('authorization')}")
        chat = request.path.endswith("/chat/completions")
        if request.method != "POST" or not (
            (chat and self.chat) or (request.path == "/v1/completions" and self.completions)
        ):
            return await self._no(wire, 404, "no such path")
        fields = request.json
        prompt = " ".join(part["content"] for part in fields["messages"]) if chat else fields["prompt"]
        if isinstance(prompt, list) and not self.ids:
            return await self._no(wire, 400, "prompt must be text")
        words = prompt.split() if isinstance(prompt, str) else [str(token) for token in prompt]
        tokens = len(words) + (self.template if chat else 0)
        if tokens + fields["max_tokens"] > self.limit:
            return await self._no(wire, 400, self.said.format(limit=self.limit, tokens=tokens))
        if tokens in self.hangs or self.stuck:
            self.stuck = self.stuck or self.stuck_after
            await asyncio.Event().wait()
        self.accepted.append(tokens)
        await asyncio.sleep(tokens * self.seconds_a_token if tokens <= self.reads else 0.0)
        await self._answer(wire, chat, fields, words[-fields["max_tokens"] :], tokens)

    async def _no(self, wire: Wire, status: int, message: str) -> None:
        kind = "BadRequestError" if status == 400 else "NotFoundError"
        await wire.json({"error": {"message": message, "type": kind, "code": status}}, status)

    async def _answer(
        self, wire: Wire, chat: bool, fields: dict[str, Any], words: list[str], tokens: int
    ) -> None:
        usage = usage_event(tokens, len(words))
        probs = self.logprobs and bool(fields.get("logprobs"))
        finish = "length" if len(words) == fields["max_tokens"] else "stop"
        if not (fields.get("stream") and self.streams):
            text = " ".join(words)
            body: dict[str, Any] = {"index": 0, "finish_reason": finish}
            body |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            return await wire.json(
                {"id": "x", "choices": [body], **({"usage": usage["usage"]} if self.usage else {})}
            )
        await wire.stream()
        for word in words:
            event = chat_event(word + " ", **({"logprobs": self._probs(word, chat)} if probs else {}))
            if not chat:
                event["choices"][0]["text"] = event["choices"][0].pop("delta")["content"]
            await wire.event(event)
        await wire.event(chat_event(finish=finish))
        if self.usage and fields.get("stream_options", {}).get("include_usage"):
            await wire.event(usage)
        await wire.done()

    def _probs(self, word: str, chat: bool) -> dict[str, Any]:
        if chat:
            return {"content": [{"token": word + " ", "logprob": -0.25}]}
        return {"tokens": [word + " "], "token_logprobs": [-0.25]}


async def _apart() -> None:
    """A SmallEngine in a process of its own, for tests that kill or stop it; its URL is the first line of what it says."""
    async with serving(SmallEngine(seconds_a_token=0.0005)) as endpoint:
        print(endpoint.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_apart())
