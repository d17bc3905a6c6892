"""What a request looks like on the wire, and what its answer says: bodies out, bytes in. No I/O and no clock.

The one thing to know: a server under audit may send anything. Whatever comes, `Reading` says what it is worth: an answer, a
refusal, a failure, or bytes that cannot be read as any of them. It never raises for what came.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from hermetic.audit.exchange import Answer, Ask, Endpoint, How, Token, Usage

MAX_BYTES = 32 * 1024**2  # of one answer; more is not an answer to anything that the audit asks
# Of anything that is counted: below it, what is reckoned with it is exact, and nothing overflows.
MOST = 2**53
EXCERPT = 600  # bytes of an answer that are kept as they came
MAX_ERROR = 500  # characters of an error
PATHS: Mapping[Endpoint, str] = {
    "chat": "/chat/completions",
    "completions": "/completions",
    "generate": "/generate",  # beside /v1, not below it
}


class Dialect(msgspec.Struct):
    """What this server's requests have to look like; learned from what it refuses."""

    include_usage: bool = True  # it takes stream_options
    max_tokens: str = "max_tokens"  # or max_completion_tokens
    rid: bool = False  # it takes SGLang's `rid` on the OpenAI endpoints
    penalty: str = ""  # the field in which it takes a penalty of repeated tokens; 1.0 is none


# ------------------------------------------------------------------------------------ bodies


def body(
    ask: Ask, model: str, dialect: Dialect | None = None, more: Mapping[str, Any] | None = None
) -> bytes:
    """The body of `ask`: its own fields, then `more`, then what `ask.extra` says otherwise. `ask.raw` goes as it is.

    Written by `json`, so that NaN and lone surrogates go out too: an audit sends bad input on purpose. Raises ValueError
    for token ids to chat."""
    if ask.raw is not None:
        return ask.raw
    dialect = dialect or Dialect()
    fields = _generate(ask) if ask.endpoint == "generate" else _openai(ask, model, dialect)
    return json.dumps(_merged(_merged(fields, more or {}), ask.extra)).encode()


def _openai(ask: Ask, model: str, dialect: Dialect) -> dict[str, Any]:
    fields: dict[str, Any] = {"model": model}
    if ask.endpoint == "chat":
        fields["messages"] = _messages(ask)
    else:
        fields["prompt"] = _plain(ask)
    limit = dialect.max_tokens if ask.endpoint == "chat" else "max_tokens"
    fields |= {limit: ask.max_tokens, "temperature": ask.temperature, "stream": ask.stream}
    if ask.stream and dialect.include_usage:
        fields["stream_options"] = {"include_usage": True}
    if ask.logprobs:
        fields["logprobs"] = True if ask.endpoint == "chat" else 1
    if ask.request_id and dialect.rid:
        fields["rid"] = ask.request_id
    if dialect.penalty:
        fields[dialect.penalty] = 1.0
    return fields


def _messages(ask: Ask) -> list[dict[str, str]]:
    if not isinstance(ask.prompt, str):
        raise ValueError("chat takes text, not token ids")
    system = [{"role": "system", "content": ask.system}] if ask.system else []
    return [*system, {"role": "user", "content": ask.prompt}]


def _plain(ask: Ask) -> str | list[int]:
    if not isinstance(ask.prompt, str):
        return list(ask.prompt)
    return f"{ask.system}\n\n{ask.prompt}" if ask.system else ask.prompt


def _generate(ask: Ask) -> dict[str, Any]:
    """SGLang's own endpoint."""
    prompt = _plain(ask)
    fields: dict[str, Any] = {
        "text" if isinstance(prompt, str) else "input_ids": prompt,
        "sampling_params": {"temperature": ask.temperature, "max_new_tokens": ask.max_tokens},
        "stream": ask.stream,
    }
    if ask.logprobs:
        fields |= {"return_logprob": True, "return_text_in_logprobs": True}
    if ask.request_id:
        fields["rid"] = ask.request_id
    return fields


def _merged(fields: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` with `more` over them; sampling_params are merged one by one."""
    merged = fields | dict(more)
    ours, theirs = fields.get("sampling_params"), more.get("sampling_params")
    if isinstance(ours, dict) and isinstance(theirs, dict):
        merged["sampling_params"] = ours | theirs
    return merged


# ------------------------------------------------------------------------------------ events


class EventParser:
    """Server-sent events (WHATWG HTML, 9.2.6) from bytes that may be cut anywhere: gives the data of whole events.

    Beyond the standard, a field `error` is data that holds one: llama.cpp's server said its errors so until late in 2025."""

    def __init__(self) -> None:
        self._rest = bytearray()  # the beginning of a line
        self._data: list[bytes] = []  # of the event that is not over
        self._after_cr = self._started = False

    def feed(self, data: bytes) -> list[bytes]:
        """The events that are over with these bytes."""
        if self._after_cr and data:
            data, self._after_cr = data.removeprefix(b"\n"), False
        if self._started and b"\n" not in data and b"\r" not in data:
            self._rest += data  # a long line costs what it is long, however it is cut
            return []
        data = bytes(self._rest) + data
        if not self._started:
            if len(data) < 3 and b"\xef\xbb\xbf".startswith(data):
                self._rest = bytearray(data)
                return []
            self._started, data = True, data.removeprefix(b"\xef\xbb\xbf")
        lines = data.splitlines(keepends=True)  # of bytes: \n, \r and \r\n only
        self._rest = bytearray(lines.pop() if lines and not lines[-1].endswith((b"\n", b"\r")) else b"")
        self._after_cr = not self._rest and data.endswith(b"\r")
        return [event for line in lines if (event := self._line(line.rstrip(b"\r\n"))) is not None]

    def close(self) -> list[bytes]:
        """What is left when the stream ends. The standard drops it; here a last event without its blank line counts."""
        event = self._line(bytes(self._rest)) if self._rest else None
        last = self._line(b"")
        self._rest = bytearray()
        return [found for found in (event, last) if found is not None]

    def _line(self, line: bytes) -> bytes | None:
        if not line:
            data, self._data = self._data, []
            return b"\n".join(data) if data else None
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        elif name == b"error":
            self._data.append(b'{"error":' + value + b"}")
        return None


# ------------------------------------------------------------------------------------ answers


class Reading:
    """One response as it comes. `at`: seconds since the request was sent.

    `error`: what the server says is wrong; `code`: the status that goes with it. `garbled`: why this is no answer.
    `transfer`: vLLM's kv_transfer_params. `ended`: nothing more is to come, the server said so."""

    def __init__(self, endpoint: Endpoint, status: int, content_type: str = "") -> None:
        self.endpoint, self.status = endpoint, status
        self.tokens: list[Token] = []
        self.first: float | None = None
        self.last = 0.0  # when something came last
        self.finish: str | None = None
        self.usage = Usage()
        self.error = self.garbled = self.server_id = ""
        self.code: int | None = None
        self.transfer: dict[str, Any] | None = None
        self.ended = self.streamed = False
        self._texts: dict[int, list[str]] = {}  # by choice
        self._finished: set[int] = set()
        self._native = ""  # SGLang's cumulative text
        self._native_tokens = 0
        self._raw = bytearray()
        self._size = 0
        self._fine = 200 <= status < 300
        stream = self._fine and content_type.lower().startswith("text/event-stream")
        self._events = EventParser() if stream else None
        self._known = False  # something came that belongs to an answer

    # -- bytes

    def feed(self, data: bytes, at: float) -> None:
        """More of the response."""
        if self.garbled or not data:
            return
        self.last = at
        self._size += len(data)
        if self._size > MAX_BYTES:
            self.garbled = f"more than {MAX_BYTES // 1024**2} MiB came"
            return
        if self._events is None or len(self._raw) < EXCERPT:
            self._raw += data if self._events is None else data[: EXCERPT - len(self._raw)]
        if self._events is not None:
            self.streamed = True
            for event in self._events.feed(data):
                self._event(event, at)

    def end(self, at: float) -> None:
        """The response is over."""
        if self._events is not None:
            for event in self._events.close():
                self._event(event, at)
        elif not self._fine:
            self._say(_loads(bytes(self._raw)), self.status)
        elif not self.garbled:
            self._whole(at)
        if self._fine and not (self._known or self.garbled or self.error):
            self.garbled = "nothing that belongs to an answer came" if self._size else "the answer is empty"

    def _event(self, data: bytes, at: float) -> None:
        if self.garbled:
            return
        if data.strip() == b"[DONE]":
            self.ended = self._known = True
            return
        value = _loads(data)
        if not isinstance(value, dict):
            self.garbled = (
                f"an event of the stream is not a JSON object: {_short(data.decode(errors='replace'), 80)}"
            )
        elif self.ended:
            self.garbled = (
                f"the stream went on after [DONE]: {_short(data.decode(errors='replace'), MAX_ERROR)}"
            )
        else:
            self._object(value, at, whole=False)

    def _whole(self, at: float) -> None:
        """A body that is no stream, or does not say that it is one."""
        if self._raw.lstrip().startswith(b"data:"):
            self.streamed, events = True, EventParser()
            for event in [*events.feed(bytes(self._raw)), *events.close()]:
                self._event(event, at)
            return
        value = _loads(bytes(self._raw))
        if not isinstance(value, dict):
            self.garbled = f"the answer is not a JSON object: {_short(self.excerpt, 80)}"
            return
        self._object(value, at, whole=True)
        if self._known and not self.error:
            self.ended = True

    # -- objects

    def _object(self, value: dict[str, Any], at: float, whole: bool) -> None:
        if value.get("error") or value.get("object") == "error":
            self._say(value, None)
            return
        meta = _dict(value.get("meta_info"))
        self.server_id = self.server_id or _text(value.get("id")) or _text(meta.get("id"))
        if isinstance(value.get("kv_transfer_params"), dict):
            self.transfer = value["kv_transfer_params"]
        self._count(_dict(value.get("usage")) or meta)
        if "meta_info" in value:
            self._known = True
            self._native_object(value, meta, at, whole)
        if isinstance(choices := value.get("choices"), list):
            self._known = self._known or bool(choices)
            for choice in choices:
                self._choice(_dict(choice), at, whole)

    def _choice(self, choice: dict[str, Any], at: float, whole: bool) -> None:
        index = choice.get("index") if isinstance(choice.get("index"), int) else 0
        text = _said(choice)
        probs = _logprobs(choice.get("logprobs"))
        self._pieces(index or 0, text, probs, at, whole)
        self._reason(index or 0, choice.get("finish_reason"))

    def _native_object(self, value: dict[str, Any], meta: dict[str, Any], at: float, whole: bool) -> None:
        """SGLang's /generate: text, ids and logprobs grow from event to event, unless the server was told otherwise."""
        text, made = _text(value.get("text")), meta.get("completion_tokens")
        ids, probs = _list(value.get("output_ids")), _list(meta.get("output_token_logprobs"))
        grows = text.startswith(self._native) and not (ids and isinstance(made, int) and len(ids) < made)
        new = text[len(self._native) :] if grows else text
        self._native = text if grows else self._native + text
        fresh = probs[self._native_tokens :] if len(probs) == made else probs
        self._native_tokens += len(fresh)
        reason = _dict(meta.get("finish_reason"))
        if reason.get("type") != "abort":  # with which a placeholder token comes
            pairs = [_native_prob(entry) for entry in fresh]
            if pairs and not any(text for text, _ in pairs):
                pairs[0] = new, pairs[0][1]
            self._pieces(0, new, pairs, at, whole)
        self._reason(0, meta.get("finish_reason"))

    def _pieces(
        self, index: int, text: str, probs: list[tuple[str, float | None]], at: float, whole: bool
    ) -> None:
        if not text and not probs:
            return
        self._texts.setdefault(index, []).append(text)
        if self.first is None and not whole:
            self.first = at
        self.tokens += [Token(piece, at, logprob) for piece, logprob in probs] or [Token(text, at)]

    def _reason(self, index: int, reason: object) -> None:
        if reason is None or reason == "":  # TGI's completions say "" until they end
            return
        details = _dict(reason)
        name = _text(details.get("type")) or _text(reason) or _short(str(reason), 40)
        self._finished.add(index)
        if self.finish is None or index == 0:
            self.finish = name
        if name in ("abort", "error"):
            self.error = self.error or _short(
                _text(details.get("message")) or f"finish_reason {name}", MAX_ERROR
            )
            status = details.get("status_code")
            self.code = self.code or (status if isinstance(status, int) else None)

    def _count(self, usage: dict[str, Any]) -> None:
        if not usage:
            return
        cached = _dict(usage.get("prompt_tokens_details")).get("cached_tokens", usage.get("cached_tokens"))
        self.usage = Usage(
            prompt=_number(usage.get("prompt_tokens"), self.usage.prompt),
            completion=_number(usage.get("completion_tokens"), self.usage.completion),
            cached=_number(cached, self.usage.cached),
        )

    def _say(self, value: object, status: int | None) -> None:
        """An error: as a body of its own, or in the middle of a stream."""
        self._known = True
        message, code = _complaint(value)
        self.error = _short(message or self.excerpt.strip() or f"status {status}", MAX_ERROR)
        self.code = status or code

    # -- what it is

    @property
    def text(self) -> str:
        """Of all choices, in their order."""
        return "\n".join("".join(pieces) for _, pieces in sorted(self._texts.items()))

    @property
    def excerpt(self) -> str:
        return bytes(self._raw[:EXCERPT]).decode(errors="replace")

    @property
    def finished(self) -> bool:
        """Every choice that was begun has said why it ended."""
        return bool(self._finished) and self._finished >= set(self._texts)

    def how(self) -> How:
        """What has come so far amounts to this. `cut` if it is not over."""
        if self.status == 429 or (self._fine and self.code == 429):
            return "limited"
        if not self._fine:
            return "failed" if self.status >= 500 else "refused" if self.status >= 400 else "garbled"
        if self.garbled:
            return "garbled"
        if self.error:
            refusal = self.code is not None and 400 <= self.code < 500 and not self.text
            return "refused" if refusal else "failed"
        return "answered" if self.ended or self.finished else "cut"

    def into(self, answer: Answer) -> None:
        """Put what came into `answer`; `how` and the times of the whole are the caller's."""
        answer.status, answer.text, answer.tokens, answer.first = (
            self.status,
            self.text,
            self.tokens,
            self.first,
        )
        answer.finish, answer.usage, answer.server_id = self.finish, self.usage, self.server_id
        answer.error, answer.excerpt = self.garbled or self.error, self.excerpt


# ------------------------------------------------------------------------------------ small readers


def _loads(data: bytes) -> object:
    """None for what is no JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _number(value: object, otherwise: int | None) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= MOST:
        return otherwise
    return value


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        return None
    return float(value) if math.isfinite(value) else None


def _short(text: str, limit: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _said(choice: dict[str, Any]) -> str:
    """Everything that a choice says: also what it reasons, calls or declines, for all of it was made from a prompt."""
    part = _dict(choice.get("delta")) or _dict(choice.get("message"))
    content = part.get("content")
    words = [_text(part.get("reasoning_content")) or _text(part.get("reasoning")), _text(choice.get("text"))]
    words += [_text(_dict(item).get("text")) for item in _list(content)] or [_text(content)]
    words.append(_text(part.get("refusal")))
    words += [
        _text(_dict(_dict(call).get("function")).get("arguments")) for call in _list(part.get("tool_calls"))
    ]
    return "".join(words)


def _logprobs(value: object) -> list[tuple[str, float | None]]:
    """(token, logprob) of a choice's `logprobs`: chat's `content`, or completions' parallel lists."""
    fields = _dict(value)
    if entries := _list(fields.get("content")):
        return [(_text(_dict(one).get("token")), _finite(_dict(one).get("logprob"))) for one in entries]
    tokens, probs = _list(fields.get("tokens")), _list(fields.get("token_logprobs"))
    return [(_text(token), _finite(prob)) for token, prob in zip(tokens, probs, strict=False)]


def _native_prob(entry: object) -> tuple[str, float | None]:
    """SGLang: [logprob, token id, text or null]."""
    values = [*_list(entry), None, None, None]
    return _text(values[2]), _finite(values[0])


_CLIENT_FAULTS = (
    "badrequest",
    "bad_request",
    "invalid",
    "notfound",
    "not_found",
    "context_length",
    "unprocessable",
    "validation",
)


def _complaint(value: object) -> tuple[str, int | None]:
    """An error's message and status, as the engines write them: {"error": {...}}, {"error": "..."}, {"message": ...},
    {"detail": ...}. A kind that is a client's fault by name, without a number, counts as 400, and one that is overloaded as 429."""
    fields = _dict(value)
    inner = fields.get("error") if fields.get("error") else fields
    if isinstance(inner, str):
        return inner, _status(fields)
    details = _dict(inner)
    message = _text(details.get("message")) or _text(details.get("detail"))
    if not message and details.get("detail"):
        message = json.dumps(details["detail"])
    return message, _status(details)


def _status(details: dict[str, Any]) -> int | None:
    for name in ("code", "status", "status_code", "http_code"):
        value = details.get(name)
        number = int(value) if isinstance(value, str) and re.fullmatch("[0-9]{3}", value) else value
        if isinstance(number, int) and 400 <= number <= 599:
            return number
    kind = f"{_text(details.get('type'))} {_text(details.get('code'))} {_text(details.get('error_type'))}".lower()
    if "overloaded" in kind:
        return 429
    return 400 if any(word in kind for word in _CLIENT_FAULTS) else None


__all__ = ["MAX_BYTES", "MOST", "PATHS", "Dialect", "EventParser", "Reading", "body"]
