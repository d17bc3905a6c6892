"""`hermetic chat`: talk to a server from the terminal, over any OpenAI-compatible endpoint.

The one thing to know: it needs only the base install (httpx, rich), and it prints the answer as it arrives. At a prompt it
keeps the conversation; with a message as argument, or with standard input that is not a terminal, it answers once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import httpx
import msgspec
from rich.console import Console
from rich.markup import escape

HELP = "/reset forgets the conversation, /system TEXT sets the system message, /quit (or Ctrl-D) ends"


@dataclass(frozen=True)
class ChatOptions:
    """What `hermetic chat` was asked to do. `model` None: the first that the server names."""

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    api_key: str | None = None
    system: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    timeout: float = 600.0


class ChatError(Exception):
    """The server cannot be reached, or said no; the message says what to do."""


@dataclass
class Client:
    """One server, one conversation."""

    options: ChatOptions
    http: httpx.Client
    messages: list[dict[str, str]] = field(default_factory=list)
    model: str = ""

    def connect(self) -> str:
        """Learn the model's name. Raises ChatError."""
        with _plain_errors(self.options):
            response = self.http.get("models")
            if response.status_code != 200:
                raise ChatError(_said(response.status_code, response.content))
            try:
                served = [str(entry["id"]) for entry in response.json()["data"]]
            except (ValueError, KeyError, TypeError):
                raise ChatError(
                    f"{self.options.url} answers, but not as an OpenAI-compatible server does"
                ) from None
        if self.options.model is not None:
            self.model = self.options.model
        elif served:
            self.model = served[0]
        else:
            raise ChatError(f"{self.options.url} serves no model now; is it ready? (GET /ready)")
        self.cut = False  # whether the last answer ended at a limit of tokens
        self.reset()
        return self.model

    def reset(self) -> None:
        """Forget the conversation, but not the system message."""
        self.messages = [{"role": "system", "content": self.options.system}] if self.options.system else []

    def ask(self, text: str) -> Iterator[str]:
        """The answer to one message, piece by piece. The conversation keeps both if the answer was completed."""
        messages = [*self.messages, {"role": "user", "content": text}]
        body: dict[str, Any] = {"model": self.model, "messages": messages, "stream": True}
        if self.options.temperature is not None:
            body["temperature"] = self.options.temperature
        if self.options.max_tokens is not None:
            body["max_tokens"] = self.options.max_tokens
        answer, self.cut = "", False
        with (
            _plain_errors(self.options),
            self.http.stream("POST", "chat/completions", json=body) as response,
        ):
            if response.status_code != 200:
                raise ChatError(_said(response.status_code, response.read()))
            for piece, finish in _pieces(response.iter_lines()):
                self.cut = finish == "length"
                answer += piece
                yield piece
        self.messages = [*messages, {"role": "assistant", "content": answer}]


def _pieces(lines: Iterator[str]) -> Iterator[tuple[str, str | None]]:
    """The texts of an event stream, and why it ended beside the last. Raises ChatError if it holds an error or breaks off."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            chunk = msgspec.json.decode(data)
        except msgspec.DecodeError:
            raise ChatError("the server sent an event that is not JSON") from None
        if "error" in chunk:
            raise ChatError(_error_text(chunk))
        for choice in chunk.get("choices", ()):
            text, finish = choice.get("delta", {}).get("content") or "", choice.get("finish_reason")
            if text or finish:
                yield text, finish
    raise ChatError("the answer broke off: the server closed the stream before its end")


class _plain_errors:
    """Turns httpx's exceptions into ChatError."""

    def __init__(self, options: ChatOptions) -> None:
        self._options = options

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        url = self._options.url
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            raise ChatError(
                f"no server answers at {url}; start one with `hermetic serve`, or give --url"
            ) from error
        if isinstance(error, httpx.TimeoutException):
            raise ChatError(f"{url} did not answer within {self._options.timeout:g} s") from error
        if isinstance(error, httpx.InvalidURL | httpx.UnsupportedProtocol):
            raise ChatError(f"{url} is not a URL; write it like http://127.0.0.1:8000") from error
        if isinstance(error, httpx.HTTPError):
            raise ChatError(f"the connection to {url} broke: {error}") from error


def _said(status: int, body: bytes) -> str:
    try:
        return _error_text(msgspec.json.decode(body))
    except msgspec.DecodeError:
        return (
            f"the server answered HTTP {status} without an explanation; does --url point at the right place?"
        )


def _error_text(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return f"the server sent an error of an unknown shape: {str(body)[:200]}"
    hint = _HINTS.get(str(error.get("code")), "")
    return f"{error.get('message')} [{error.get('code')}]{hint}"


_HINTS = {
    "invalid_api_key": " (give --api-key, or set HERMETIC_API_KEY)",
    "context_length_exceeded": " (/reset begins a new conversation)",
}


def api_base(url: str) -> str:
    """The place of the API: `http://host:8000` and `http://host:8000/v1/` both mean http://host:8000/v1."""
    base = url.rstrip("/")
    return base if base.endswith("/v1") else base + "/v1"


def main(options: ChatOptions, message: Sequence[str] = (), stdin: IO[str] | None = None) -> int:
    """Runs the client; returns the exit code (0, or 1 when the server could not answer)."""
    source = stdin or sys.stdin
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    try:
        with _plain_errors(options):
            timeout = httpx.Timeout(options.timeout, connect=10.0)
            http = httpx.Client(base_url=api_base(options.url), headers=headers, timeout=timeout)
        with http:
            client = Client(options, http)
            client.connect()
            if message:
                return _once(client, " ".join(message), out)
            if not source.isatty():
                return _once(client, source.read().strip(), out)
            return _converse(client, out, err)
    except ChatError as error:
        err.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 130


def _once(client: Client, text: str, out: Console) -> int:
    if not text:
        raise ChatError("there is no message: give one as an argument or on standard input")
    _print(client, text, out, Console(stderr=True, highlight=False))
    return 0


def _converse(client: Client, out: Console, err: Console) -> int:
    out.print(
        f"[bold]{escape(client.model)}[/bold] at {escape(client.options.url)}. {escape(HELP)}", soft_wrap=True
    )
    while True:
        try:
            line = out.input("[bold cyan]> [/bold cyan]").strip()
        except (EOFError, KeyboardInterrupt):
            out.print()
            return 0
        command, _, rest = line.partition(" ")
        if not line:
            continue
        if command in ("/quit", "/exit"):
            return 0
        if command == "/reset":
            client.reset()
            out.print("[dim]forgotten[/dim]")
        elif command == "/system":
            kept = [message for message in client.messages if message["role"] != "system"]
            client.messages = [{"role": "system", "content": rest}, *kept] if rest else kept
            out.print("[dim]system message set[/dim]" if rest else "[dim]system message removed[/dim]")
        elif command.startswith("/"):
            out.print(f"[dim]{escape(HELP)}[/dim]")
        else:
            try:
                _print(client, line, out, err)
            except KeyboardInterrupt:  # the connection is closed, which cancels the request on the server
                out.print("\n[dim]stopped; neither message nor answer is kept[/dim]")
            except ChatError as error:
                err.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)


def _print(client: Client, text: str, out: Console, err: Console) -> None:
    for piece in client.ask(text):
        # A model's text is data: control characters could rewrite the terminal.
        shown = "".join(char for char in piece if char in "\n\t" or char.isprintable())
        out.print(shown, end="", markup=False, soft_wrap=True)
    out.print()
    if client.cut:
        err.print("[dim](cut: the limit of tokens was reached)[/dim]")
