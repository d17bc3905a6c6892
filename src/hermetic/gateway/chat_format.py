"""OpenAI's shapes for answers: chat and completion, whole and streamed.

The one thing to know: a `Format` knows the request it answers and nothing of how the pieces came about, so that the
streamed and the whole answer of a request cannot differ in content.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hermetic.gateway.stream import Piece, TokenInfo

if TYPE_CHECKING:
    from hermetic.model.tokenizer import Tokenizer

Json = dict[str, Any]
MIN_LOGPROB = -9999.0  # OpenAI's stand-in for log 0, which JSON cannot hold


class Format(Protocol):
    """How one endpoint writes its answer."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def opening(self, index: int) -> Json | None:
        """The choice part of a chunk that comes before the first piece of a choice, if there is one."""
        ...

    def chunk(self, piece: Piece) -> Json:
        """The choice part of a chunk."""
        ...

    def whole(self, index: int, pieces: Sequence[Piece]) -> Json:
        """A complete choice."""
        ...


class ChatFormat:
    """/v1/chat/completions."""

    id_prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, logprobs: int | None) -> None:
        self._tokenizer, self._logprobs = tokenizer, logprobs

    def opening(self, index: int) -> Json:
        return {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def chunk(self, piece: Piece) -> Json:
        choice = {
            "index": piece.index,
            "delta": {"content": piece.text} if piece.text else {},
            "logprobs": self._content(piece.infos) if piece.infos else None,
            "finish_reason": piece.finish_reason,
        }
        return choice | ({"stop_reason": piece.stop_reason} if piece.finish_reason else {})

    def whole(self, index: int, pieces: Sequence[Piece]) -> Json:
        infos = [info for piece in pieces for info in piece.infos]
        content = "".join(piece.text for piece in pieces)
        return {
            "index": index,
            "message": {"role": "assistant", "content": content, "refusal": None},
            "logprobs": None if self._logprobs is None else self._content(infos),
            "finish_reason": pieces[-1].finish_reason,
            "stop_reason": pieces[-1].stop_reason,
        }

    def _content(self, infos: Sequence[TokenInfo]) -> Json:
        content = []
        for info in infos:
            top = [self._entry(token, logprob) for token, logprob in info.top[: self._logprobs or 0]]
            content.append(self._entry(info.token, info.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Json:
        return {
            "token": self._tokenizer.token_text(token),
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }


class CompletionFormat:
    """/v1/completions. `echoes` holds the text to be shown before each choice, by prompt; choices are n a prompt."""

    id_prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, tokenizer: Tokenizer, logprobs: int | None, echoes: Sequence[str], n: int) -> None:
        self._tokenizer, self._logprobs, self._echoes, self._n = tokenizer, logprobs, echoes, n

    def opening(self, index: int) -> Json | None:
        echo = self._echo(index)
        return {"index": index, "text": echo, "logprobs": None, "finish_reason": None} if echo else None

    def chunk(self, piece: Piece) -> Json:
        choice = {
            "index": piece.index,
            "text": piece.text,
            "logprobs": self._table(piece.infos) if piece.infos else None,
            "finish_reason": piece.finish_reason,
        }
        return choice | ({"stop_reason": piece.stop_reason} if piece.finish_reason else {})

    def whole(self, index: int, pieces: Sequence[Piece]) -> Json:
        infos = [info for piece in pieces for info in piece.infos]
        return {
            "index": index,
            "text": self._echo(index) + "".join(piece.text for piece in pieces),
            "logprobs": None if self._logprobs is None else self._table(infos),
            "finish_reason": pieces[-1].finish_reason,
            "stop_reason": pieces[-1].stop_reason,
        }

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._n] if self._echoes else ""

    def _table(self, infos: Sequence[TokenInfo]) -> Json:
        text = self._tokenizer.token_text
        tops = []
        for info in infos:
            top: dict[str, float] = {}
            for token, logprob in (*info.top[: self._logprobs or 0], (info.token, info.logprob)):
                top.setdefault(text(token), max(logprob, MIN_LOGPROB))  # of two with one text, the likelier
            tops.append(top)
        return {
            "tokens": [text(info.token) for info in infos],
            "token_logprobs": [max(info.logprob, MIN_LOGPROB) for info in infos],
            "top_logprobs": tops,
            "text_offset": [info.offset for info in infos],
        }


def usage(prompt_tokens: int, completion_tokens: int) -> Json:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
