"""A log of any size as lines with their numbers, out of what wraps logs: gzip, colours, Docker's and Kubernetes' own files, docker compose.

The one thing to know: memory is bounded whatever the file. Of a line longer than MOST_LINE the rest is dropped, and the line says so;
a last line without an end may be cut, and says so too.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import msgspec

MOST_LINE = 1024**2  # bytes
BLOCK = 256 * 1024
MOST_STREAMS = 256  # services in one file of docker compose

_GZIP = b"\x1f\x8b"
_COLOUR = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")
_DOCKER = b'{"log":"'
_KUBERNETES = re.compile(rb"\d{4}-\d\d-\d\dT\S+ (stdout|stderr) ([PF])\S* ")
_WRAPPED = (b"\n" + _DOCKER, b" stdout F ", b" stdout P ", b" stderr F ", b" stderr P ")
_COMPOSE = re.compile(rb"([A-Za-z0-9][\w.-]*)\s+\| ?")
# Behind them stands what a client chose.
_QUOTES = re.compile(rb"""['"]|Received request |Receive: |Finish: """)
_LEVELS = (b"DEBUG", b"INFO", b"WARNING", b"ERROR", b"CRITICAL")


@dataclass(frozen=True)
class Line:
    """`number` from 1. `stream`: the service that docker compose puts before a line, if any. `whole`: False where some of it is missing.

    `words`: which of the words that were looked for are in it."""

    number: int
    text: bytes
    stream: str = ""
    whole: bool = True
    words: Sequence[bytes] = ()

    @property
    def quotes(self) -> bool:
        """Whether its words stand in something that the line quotes: where requests are logged, a prompt can hold any line of a log."""
        start = min((at for word in self.words if (at := self.text.find(word)) >= 0), default=0)
        return _QUOTES.search(self.text, 0, start) is not None


class Broken(Exception):
    """What is left of the log cannot be unpacked; what came before was given."""


def lines(stream: BinaryIO, words: Sequence[bytes] = ()) -> Iterator[Line]:
    """The lines that have one of these words in them; without words, every line. Raises Broken where packed data ends too early or is
    damaged.

    Words are looked for in many lines at once: most lines of a log are never looked at by themselves."""
    waiting: dict[bytes, bytes] = {}  # beginnings of lines that Docker or Kubernetes wrote in parts
    for first, block, whole in _blocks(stream):
        wrapped = block.startswith(_DOCKER) or any(mark in block for mark in _WRAPPED)
        if words and not wrapped:
            yield from _with_words(first, block, words, whole)
            continue
        for number, text in enumerate(block.removesuffix(b"\n").split(b"\n"), first):
            joined = unwrapped(_plain(text), waiting)
            if joined is not None and (not words or any(word in joined for word in words)):
                yield _line(number, joined, whole, [word for word in words if word in joined])


def _with_words(first: int, block: bytes, words: Sequence[bytes], whole: bool) -> Iterator[Line]:
    """The lines of a block that have a word in them; `first` is the number of the block's first line."""
    spans: dict[tuple[int, int], list[bytes]] = {}
    for word in words:
        at = block.find(word)
        while at >= 0:
            end = block.find(b"\n", at)
            end = len(block) if end < 0 else end
            spans.setdefault((block.rfind(b"\n", 0, at) + 1, end), []).append(word)
            at = block.find(word, end)
    number, counted = first, 0
    for start, end in sorted(spans):
        number, counted = number + block.count(b"\n", counted, start), start
        yield _line(number, block[start:end], whole, spans[start, end])


def _line(number: int, text: bytes, whole: bool, words: list[bytes]) -> Line:
    text = _plain(text).rstrip(b"\r")
    whole, text = whole and len(text) <= MOST_LINE, text[:MOST_LINE]
    match = _COMPOSE.match(text) if b" | " in text[:80] else None
    if match is None or match[1] in _LEVELS:
        return Line(number, text, "", whole, words)
    return Line(number, text[match.end() :], match[1].decode("ascii", "replace"), whole, words)


def _plain(text: bytes) -> bytes:
    return _COLOUR.sub(b"", text) if b"\x1b" in text else text


# ------------------------------------------------------------------------------------ blocks


def _blocks(stream: BinaryIO) -> Iterator[tuple[int, bytes, bool]]:
    """(number of the first line, lines, True), or (number, one line, False) for a line that is too long, or the last one without an end."""
    read = _reader(stream)
    number, rest, skips = 1, b"", False
    while chunk := _next(read, number):
        if skips:  # the rest of a line that is too long
            end = chunk.find(b"\n") + 1
            if not end:
                continue
            number, chunk, skips = number + 1, chunk[end:], False
        data = rest + chunk
        end = data.rfind(b"\n") + 1
        if end:
            yield number, data[:end], True
            number += data.count(b"\n", 0, end)
        rest = data[end:]
        if len(rest) > MOST_LINE:
            yield number, rest, False
            rest, skips = b"", True
    if rest:
        yield number, rest, False


def _next(read: Callable[[int], bytes], number: int) -> bytes:
    try:
        return read(BLOCK)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise Broken(f"line {number} on cannot be unpacked ({error})") from None


def _reader(stream: BinaryIO) -> Callable[[int], bytes]:
    """How to read on, unpacked."""
    source = _Again(stream)
    if not source.start.startswith(_GZIP):
        return source.read
    return gzip.GzipFile(fileobj=source, mode="rb").read1  # type: ignore[call-overload]


class _Again:
    """A stream whose first bytes were looked at, and are read again."""

    def __init__(self, stream: BinaryIO) -> None:
        self.start, self._stream = stream.read(2) or b"", stream

    def read(self, size: int = BLOCK) -> bytes:
        start, self.start = self.start[:size], self.start[size:]
        return start or self._stream.read(size) or b""


# ------------------------------------------------------------------------------------ wrappers


def unwrapped(text: bytes, waiting: dict[bytes, bytes]) -> bytes | None:
    """The line inside a line of Docker's or Kubernetes' own file. None for a part that goes on in the next one."""
    if text.startswith(_DOCKER):
        (text, part), key = _docker(text), _DOCKER
    elif match := _KUBERNETES.match(text):
        text, part, key = text[match.end() :], match[2] == b"P", match[1]
    else:
        return text
    text = waiting.pop(key, b"") + text
    if part and len(text) < MOST_LINE:
        waiting[key] = text
        return None
    return text


def _docker(text: bytes) -> tuple[bytes, bool]:
    """The line inside a line of Docker's json-file, and whether it goes on in the next one."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return text, False
    inner = value.get("log") if isinstance(value, dict) else None
    if not isinstance(inner, str) or value.get("stream", "stdout") not in ("stdout", "stderr"):
        return text, False
    return inner.rstrip("\r\n").encode("utf-8", "replace"), not inner.endswith("\n")


__all__ = ["MOST_LINE", "Broken", "Line", "lines", "unwrapped"]
