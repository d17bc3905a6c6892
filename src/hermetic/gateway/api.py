"""The requests of the API: from a JSON body to frozen data, with every field checked.

The one thing to know: nothing is silently ignored that would change the answer. A field is known, or harmless by name, or
known to other servers and refused unless it has its default, or unknown and refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hermetic.gateway.api_fields import (
    boolean,
    integer,
    listed,
    number,
    parse_object,
    read_fields,
    require,
    shown,
    text,
    token_ids,
    wrong,
)
from hermetic.gateway.errors import refuse
from hermetic.model.params import MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams

MAX_STOPS = 16
MAX_STOP_CHARS = 1024  # a stop string is held back while it is undecided, so it must be short
MAX_STOP_TOKENS = 256
MAX_N = 16
_INT64 = (-(2**63), 2**63 - 1)
_COUNT = (0, 2**31 - 1)

Prompt = str | tuple[int, ...]
Message = dict[str, str]


@dataclass(frozen=True)
class Ask:
    """What chat and completion requests have in common. `sampling` holds SamplingParams' fields but `max_tokens`."""

    model: str
    sampling: Mapping[str, Any]
    max_tokens: int | None
    n: int
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool

    def params(self, max_tokens: int) -> SamplingParams:
        """The sampler's parameters, once it is known what the window leaves. Raises Refused."""
        if self.sampling.get("min_tokens", 0) > max_tokens:
            raise refuse(
                "invalid_request",
                f"`min_tokens` is {self.sampling['min_tokens']}, but at most {max_tokens} tokens can be made",
                "min_tokens",
            )
        return SamplingParams(max_tokens=max_tokens, **self.sampling)


@dataclass(frozen=True)
class CompletionAsk(Ask):
    """/v1/completions: one or more prompts, each a text or token ids."""

    prompts: tuple[Prompt, ...]
    echo: bool
    add_special_tokens: bool


@dataclass(frozen=True)
class ChatAsk(Ask):
    """/v1/chat/completions: a conversation of plain texts."""

    messages: tuple[Message, ...]
    add_generation_prompt: bool


@dataclass(frozen=True)
class TokenizeAsk:
    """/tokenize: a text, or a conversation that goes through the chat template (`messages`)."""

    model: str | None
    prompt: str | None
    messages: tuple[Message, ...]
    add_special_tokens: bool
    add_generation_prompt: bool
    return_token_strs: bool


@dataclass(frozen=True)
class DetokenizeAsk:
    """/detokenize: token ids."""

    model: str | None
    tokens: tuple[int, ...]


# Fields of OpenAI's API that cannot change the answer of this server.
_IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
})  # fmt: skip

# Fields of OpenAI's or vLLM's API that would change it, with the values that ask for nothing.
_UNSUPPORTED_ANY: dict[str, tuple[object, ...]] = {
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "use_beam_search": (False,),
    "repetition_penalty": (1, 1.0),
    "length_penalty": (1, 1.0),
    "prompt_logprobs": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "priority": (0,),
    "return_token_ids": (False,),
}  # fmt: skip
_UNSUPPORTED_COMPLETION = _UNSUPPORTED_ANY | {"suffix": ("",)}
_UNSUPPORTED_CHAT: dict[str, tuple[object, ...]] = _UNSUPPORTED_ANY | {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "prediction": (),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": (),
    "echo": (False,),
}


def _stops(value: object, name: str) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else listed(value, name, MAX_STOPS)
    for item in items:
        if not isinstance(item, str) or not 0 < len(item) <= MAX_STOP_CHARS:
            wanted = (
                f"a string or a list of up to {MAX_STOPS} strings, each of 1 to {MAX_STOP_CHARS} characters"
            )
            raise wrong(name, wanted, item)
    return tuple(dict.fromkeys(items))  # type: ignore[arg-type]


def _stream_options(value: object, name: str) -> bool:
    if not isinstance(value, dict):
        raise wrong(name, "an object", value)
    known = {"include_usage": boolean}
    fields = read_fields(value, known, ignored=frozenset({"include_obfuscation"}), prefix=f"{name}.")
    return bool(fields.get("include_usage", False))


class _Common:
    """The readers that both kinds of request share, for one vocabulary."""

    def __init__(self, vocab: int) -> None:
        def stop_tokens(value: object, name: str) -> tuple[int, ...]:
            return token_ids(listed(value, name, MAX_STOP_TOKENS), name, vocab)

        def logit_bias(value: object, name: str) -> dict[int, float]:
            if not isinstance(value, dict):
                raise wrong(name, "an object of token ids and numbers", value)
            if len(value) > MAX_LOGIT_BIAS:
                raise refuse(
                    "invalid_request",
                    f"`{name}` has {len(value)} entries; at most {MAX_LOGIT_BIAS} are taken",
                    name,
                )
            biases = {}
            for key, bias in value.items():
                if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20):
                    raise refuse(
                        "invalid_token_id", f"`{name}` has the key {shown(key)}; its keys are token ids", name
                    )
                (token,) = token_ids([int(key)], name, vocab)
                biases[token] = number(-100, 100)(bias, f"{name}.{key}")
            return biases

        at_least_one = integer(1, 2**31 - 1, "an integer of at least 1")
        self.sampling = {
            "temperature": number(0, 2),
            "top_p": number(0, 1, low_open=True),
            "top_k": integer(-1, _COUNT[1], "an integer of at least 0 (0 and -1: off)"),
            "min_p": number(0, 1),
            "seed": integer(*_INT64),
            "presence_penalty": number(-2, 2),
            "frequency_penalty": number(-2, 2),
            "logit_bias": logit_bias,
            "stop_token_ids": stop_tokens,
            "ignore_eos": boolean,
            "min_tokens": integer(*_COUNT, "an integer of at least 0"),
        }
        self.known = self.sampling | {
            "model": text,
            "max_tokens": at_least_one,
            "n": integer(1, MAX_N),
            "stop": _stops,
            "stream": boolean,
            "stream_options": _stream_options,
        }

    def ask(self, fields: Mapping[str, Any], logprobs: int | None, max_tokens: int | None) -> dict[str, Any]:
        """The arguments of `Ask`."""
        sampling = {name: fields[name] for name in self.sampling if name in fields}
        if sampling.get("top_k") == -1:  # vLLM's way to say "off"
            sampling["top_k"] = 0
        if logprobs is not None:
            sampling["logprobs"] = logprobs
        stream = fields.get("stream", False)
        if "stream_options" in fields and not stream:
            raise refuse("invalid_request", "`stream_options` needs `stream: true`", "stream_options")
        return {
            "model": require(fields, "model"),
            "sampling": sampling,
            "max_tokens": max_tokens,
            "n": fields.get("n", 1),
            "stop": fields.get("stop", ()),
            "stream": stream,
            "include_usage": fields.get("stream_options", False),
        }


class Api:
    """Parses bodies for a model with a vocabulary of `vocab` tokens. Every method raises Refused."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._common = _Common(vocab)
        at_least_one = integer(1, 2**31 - 1, "an integer of at least 1")
        self._completion = self._common.known | {
            "prompt": lambda value, name: value,
            "echo": boolean,
            "logprobs": integer(0, MAX_LOGPROBS),
            "best_of": at_least_one,
            "add_special_tokens": boolean,
        }
        self._chat = self._common.known | {
            "messages": _messages,
            "max_completion_tokens": at_least_one,
            "logprobs": boolean,
            "top_logprobs": integer(0, MAX_LOGPROBS),
            "add_generation_prompt": boolean,
        }
        self._tokenize = {
            "model": text,
            "prompt": text,
            "messages": _messages,
            "add_special_tokens": boolean,
            "add_generation_prompt": boolean,
            "return_token_strs": boolean,
        }

    def completion(self, body: bytes) -> CompletionAsk:
        """A body of /v1/completions."""
        fields = read_fields(parse_object(body), self._completion, _IGNORED, _UNSUPPORTED_COMPLETION)
        common = self._common.ask(fields, fields.get("logprobs"), fields.get("max_tokens"))
        if fields.get("best_of", common["n"]) != common["n"]:
            raise refuse(
                "unsupported_parameter", "`best_of` other than `n` is not supported; leave it out", "best_of"
            )
        echo = fields.get("echo", False)
        if echo and "logprobs" in fields:
            raise refuse(
                "unsupported_parameter", "`echo` with `logprobs` is not supported; leave one out", "echo"
            )
        prompts = self._prompts(require(fields, "prompt"))
        return CompletionAsk(
            **common, prompts=prompts, echo=echo, add_special_tokens=fields.get("add_special_tokens", True)
        )

    def chat(self, body: bytes) -> ChatAsk:
        """A body of /v1/chat/completions."""
        fields = read_fields(parse_object(body), self._chat, _IGNORED, _UNSUPPORTED_CHAT)
        if fields.get("top_logprobs") and not fields.get("logprobs"):
            raise refuse("invalid_request", "`top_logprobs` needs `logprobs: true`", "top_logprobs")
        limits = {fields[name] for name in ("max_tokens", "max_completion_tokens") if name in fields}
        if len(limits) > 1:
            raise refuse(
                "invalid_request",
                "`max_tokens` and `max_completion_tokens` mean the same and differ; send one",
                "max_completion_tokens",
            )
        logprobs = fields.get("top_logprobs", 0) if fields.get("logprobs") else None
        return ChatAsk(
            **self._common.ask(fields, logprobs, limits.pop() if limits else None),
            messages=require(fields, "messages"),
            add_generation_prompt=fields.get("add_generation_prompt", True),
        )

    def tokenize(self, body: bytes) -> TokenizeAsk:
        """A body of /tokenize, in vLLM's shape."""
        fields = read_fields(parse_object(body), self._tokenize, _IGNORED, _UNSUPPORTED_CHAT)
        if ("prompt" in fields) == ("messages" in fields):
            raise refuse("invalid_request", "send either `prompt` or `messages`", "prompt")
        return TokenizeAsk(
            fields.get("model"),
            fields.get("prompt"),
            fields.get("messages", ()),
            fields.get("add_special_tokens", True),
            fields.get("add_generation_prompt", True),
            fields.get("return_token_strs", False),
        )

    def detokenize(self, body: bytes) -> DetokenizeAsk:
        """A body of /detokenize, in vLLM's shape."""
        known = {"model": text, "tokens": lambda value, name: listed(value, name, 2**31 - 1)}
        fields = read_fields(parse_object(body), known, _IGNORED)
        return DetokenizeAsk(fields.get("model"), token_ids(require(fields, "tokens"), "tokens", self._vocab))

    def _prompts(self, value: object) -> tuple[Prompt, ...]:
        wanted = "a string, a list of strings, a list of token ids or a list of such lists"
        if isinstance(value, str):
            items: list[object] = [value]
        elif not isinstance(value, list):
            raise wrong("prompt", wanted, value)
        elif value and not isinstance(value[0], str | list):
            items = [value]
        else:
            items = value
        if not items:
            raise _empty("prompt")
        if len({type(item) for item in items}) > 1:
            raise refuse("invalid_request", f"`prompt` must be {wanted}, not a mixture", "prompt")
        prompts: list[Prompt] = []
        for item in items:
            if not item:
                raise _empty("prompt")
            if isinstance(item, str):
                prompts.append(item)
            elif isinstance(item, list):
                prompts.append(token_ids(item, "prompt", self._vocab))
            else:
                raise wrong("prompt", wanted, item)
        return tuple(prompts)


def _empty(name: str) -> Exception:
    return refuse("empty_prompt", f"`{name}` is empty: there is no token to continue", name)


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXTS = {"role": text, "content": lambda value, name: value, "name": text}
_NO_TOOLS: dict[str, tuple[object, ...]] = {
    "tool_calls": ([],), "tool_call_id": (), "function_call": (), "audio": (), "refusal": ("",), "annotations": ([],),
    "reasoning": ("",), "reasoning_content": ("",),
}  # fmt: skip


def _messages(value: object, name: str) -> tuple[Message, ...]:
    """A conversation: role and text of each message. `developer` is OpenAI's newer word for `system`."""
    items = listed(value, name, 100_000)
    if not items:
        raise _empty(name)
    messages = []
    for at, item in enumerate(items):
        where = f"{name}[{at}]"
        if not isinstance(item, dict):
            raise wrong(where, "an object with role and content", item)
        role = item.get("role")
        if role in ("tool", "function"):
            raise refuse(
                "unsupported_content",
                f"`{where}` is a {role} message: this server calls no tools",
                f"{where}.role",
            )
        if not isinstance(role, str) or role not in _ROLES:
            raise wrong(f"{where}.role", "one of system, developer, user, assistant", role)
        fields = read_fields(item, _TEXTS, frozenset(), _NO_TOOLS, prefix=f"{where}.")
        messages.append(
            {"role": _ROLES[role], "content": _content(fields.get("content"), f"{where}.content")}
        )
    return tuple(messages)


def _content(value: object, name: str) -> str:
    """A message's text: a string, or text parts that belong together."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise wrong(name, "a string or a list of text parts", value)
    parts = []
    for at, part in enumerate(value):
        where = f"{name}[{at}]"
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise wrong(where, "an object with a type", part)
        if part["type"] != "text":
            raise refuse(
                "unsupported_content",
                f"`{where}` is of type {shown(part['type'])}: this model reads text only",
                where,
            )
        fields = read_fields(
            part, {"type": text, "text": text}, frozenset({"cache_control"}), prefix=f"{where}."
        )
        if "text" not in fields:
            raise wrong(f"{where}.text", "a string", None)
        parts.append(fields["text"])
    return "".join(parts)
