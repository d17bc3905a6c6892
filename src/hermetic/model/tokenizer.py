"""Text to token ids and back, chat templates, and text that grows token by token.

The one thing to know: decoding works on bytes. Each token stands for some bytes, and text is those bytes decoded as UTF-8,
so a stream and a whole answer are the same text, half a character is never shown, and logprobs can give exact bytes.
Byte-level BPE (Llama 3, SmolLM2, Qwen, newer Mistral) and SentencePiece-like vocabularies with byte fallback (Llama 2,
Mistral 7B) are read; transformers does the encoding. Importing this imports no torch; loading a tokenizer may.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from hermetic.model.errors import ModelError
from hermetic.model.source import ModelSource

_SPACE = "\u2581"  # SentencePiece writes a space so
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class ChatError(ValueError):
    """These messages cannot be put into the model's chat template: the client's mistake, and the message says which."""


class Tokenizer:
    """A model's tokenizer. Encoding and decoding may be called from several threads."""

    def __init__(self, pretrained: Any, name: str = "the model"):
        """`pretrained`: a fast tokenizer of transformers. Raises ModelError when its tokens' bytes cannot be told."""
        self._pretrained, self.name = pretrained, name
        self._backend = pretrained.backend_tokenizer
        self.vocab_size = len(pretrained)
        self.bos_token_id: int | None = pretrained.bos_token_id
        self.eos_token_id: int | None = pretrained.eos_token_id
        self.chat_template: str | None = getattr(pretrained, "chat_template", None)
        self._special: frozenset[int] = frozenset(pretrained.all_special_ids)
        self._bytes, self.leading_space = self._vocabulary_bytes()

    @classmethod
    def load(cls, source: ModelSource) -> Tokenizer:
        """Raises ModelError when the files are missing, damaged, or of a kind that is not read."""
        from transformers import AutoTokenizer

        options: dict[str, Any] = {"gguf_file": source.gguf} if source.gguf else {"local_files_only": True}
        try:
            pretrained = AutoTokenizer.from_pretrained(str(source.folder), **options)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as error:
            reason = (str(error).splitlines() or [repr(error)])[0]
            raise ModelError(
                f"the tokenizer of {source.file} cannot be loaded ({reason}): the folder needs tokenizer.json (or "
                "tokenizer.model) and tokenizer_config.json, undamaged"
            ) from error
        if getattr(pretrained, "backend_tokenizer", None) is None:
            raise ModelError(
                f"the tokenizer of {source.file} has no fast version (tokenizer.json), which is needed"
            )
        return cls(pretrained, source.name)

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        `add_special`: also what the model wants around a text (a BOS for Llama). `parse_special`: "<|im_end|>" in the text
        is that control token; False takes it for plain characters, so that a text cannot forge a turn.
        """
        backend = self._backend if parse_special else self._plain_backend
        ids: list[int] = backend.encode(text, add_special_tokens=add_special).ids
        return ids

    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        """The text of a whole sequence; bytes that are not UTF-8 become U+FFFD."""
        text = b"".join(self.token_bytes(t) for t in tokens if not (skip_special and t in self._special))
        whole = text.decode("utf-8", errors="replace")
        return whole.removeprefix(" ") if self.leading_space else whole

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` stands for; a control token's are its name, those of an id without a token are none."""
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""

    def token_text(self, token: int) -> str:
        """`token` as a string for people; bytes that are no character by themselves become U+FFFD."""
        return self.token_bytes(token).decode("utf-8", errors="replace")

    def is_special(self, token: int) -> bool:
        """Whether `token` is a control token, which is left out of an answer's text."""
        return token in self._special

    def apply_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_values: Any,
    ) -> list[int]:
        """Token ids of a conversation in the model's own template. Raises ChatError as `render_chat`."""
        text = self.render_chat(messages, add_generation_prompt, continue_final_message, **template_values)
        # The template writes BOS and control tokens itself.
        return self.encode(text, add_special=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_values: Any,
    ) -> str:
        """A conversation as the text that the model's own template makes of it; `content` of each message is a string.

        Raises ChatError when the model has no template, or its template refuses the messages.
        """
        from jinja2 import TemplateError

        if not self.chat_template:
            raise ChatError(
                f"{self.name} has no chat template: it is a base model, or its tokenizer_config.json lacks one. "
                "Use /v1/completions with a plain prompt"
            )
        try:
            text: str = self._pretrained.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **template_values,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise ChatError(
                f"the chat template of {self.name} does not take these messages: {error}"
            ) from error
        return text

    @cached_property
    def _plain_backend(self) -> Any:
        """A second tokenizer that does not look for control tokens: the switch is not safe to turn between threads."""
        from tokenizers import Tokenizer as Backend

        plain = Backend.from_str(self._backend.to_str())
        plain.encode_special_tokens = True
        return plain

    def _vocabulary_bytes(self) -> tuple[list[bytes], bool]:
        """(bytes of each token id, whether decoding drops a space at the start of a text)."""
        state = json.loads(self._backend.to_str())
        decoders = _parts(state.get("decoder"))
        kinds = {part["type"] for part in decoders}
        added = {int(entry["id"]): str(entry["content"]) for entry in state.get("added_tokens", [])}
        # Files mark more control tokens than the few that have a role (BOS, EOS, ...), which is all transformers lists.
        self._special |= {int(entry["id"]) for entry in state.get("added_tokens", []) if entry.get("special")}
        byte_level = "ByteLevel" in kinds
        if not byte_level and not kinds & {"Metaspace", "ByteFallback", "Replace"}:
            raise ModelError(
                f"the tokenizer of {self.name} decodes with {', '.join(sorted(kinds)) or 'nothing'}; byte-level BPE and "
                "SentencePiece with byte fallback are supported"
            )
        table: list[bytes] = [b""] * self.vocab_size
        for piece, token in self._backend.get_vocab(with_added_tokens=True).items():
            if token >= len(table):
                table.extend([b""] * (token + 1 - len(table)))
            if token in added:
                table[token] = added[token].encode()
            elif byte_level:
                table[token] = b"".join(_UNICODE_TO_BYTE.get(char, char.encode()) for char in piece)
            elif match := _BYTE_TOKEN.fullmatch(piece):
                table[token] = bytes([int(match[1], 16)])
            else:
                table[token] = piece.replace(_SPACE, " ").encode()
        strips = any(
            (part["type"] == "Strip" and part.get("content") == " " and part.get("start"))
            or (part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never")
            for part in decoders
        )
        return table, strips and not byte_level


class IncrementalDetokenizer:
    """The text of one choice as it grows. Constant work a token; holds back only the bytes of an unfinished character."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, at_start: bool = False):
        """`at_start`: the text stands alone, so a SentencePiece vocabulary's first space is not part of it; False when it
        continues a prompt."""
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._drop_space = at_start and tokenizer.leading_space

    def push(self, token: int) -> str:
        """The text that `token` adds, possibly none. Bytes that can never become a character give U+FFFD."""
        if self._skip_special and self._tokenizer.is_special(token):
            return ""
        text = self._decoder.decode(self._tokenizer.token_bytes(token))
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text

    @property
    def pending(self) -> bytes:
        """Bytes of a character that is not complete yet."""
        held: bytes = self._decoder.getstate()[0]
        return held


def _parts(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """A tokenizer's decoder as a flat list of its steps."""
    if not decoder:
        return []
    if decoder["type"] == "Sequence":
        return [part for inner in decoder["decoders"] for part in _parts(inner)]
    return [decoder]


def _byte_alphabet() -> dict[str, bytes]:
    """GPT-2's printable stand-ins for the 256 bytes (`bytes_to_unicode` in OpenAI's gpt-2 encoder.py), reversed."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("\xa1"), ord("\xac") + 1),
        *range(ord("\xae"), ord("\xff") + 1),
    ]
    table = {chr(byte): bytes([byte]) for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return table | {chr(256 + n): bytes([byte]) for n, byte in enumerate(others)}


_UNICODE_TO_BYTE = _byte_alphabet()
