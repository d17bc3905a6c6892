"""What prefill counted, by request id: the other half of a pair writes a log of its own.

The one thing to know: it lies in a temporary file of SQLite, so that memory does not grow with the log. An id that was used again has several
counts; it fits an answer if one of them does.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from types import TracebackType

_AT_ONCE = 10_000  # rows that are written together
_CACHE = 64 * 1024  # KiB


class Counts:
    """Use as a context; the file is gone behind it."""

    def __init__(self) -> None:
        self._waiting: list[tuple[bytes, float]] = []
        self._file = sqlite3.connect("")  # a temporary file of its own (sqlite.org/inmemorydb.html)
        self._file.execute(f"PRAGMA cache_size = -{_CACHE}")
        self._file.execute("PRAGMA journal_mode = OFF")
        self._file.execute("CREATE TABLE counts (id BLOB, tokens REAL, PRIMARY KEY (id, tokens)) WITHOUT ROWID")  # fmt: skip

    def __enter__(self) -> Counts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, name: str, tokens: float) -> None:
        """One request. Raises OSError where there is no room."""
        self._waiting.append((_key(name), float(tokens)))
        if len(self._waiting) >= _AT_ONCE:
            self._write()

    def of(self, name: str, answered: float) -> tuple[float | None, bool]:
        """(what prefill counted for the request of which `answered` tokens were answered, None if it is not there; whether the id has several counts).
        Raises OSError."""
        self._write()
        with _room():
            rows = self._file.execute("SELECT tokens FROM counts WHERE id = ?", (_key(name),)).fetchall()
        found = [row[0] for row in rows]
        return float(answered) if float(answered) in found else max(found, default=None), len(found) > 1

    def _write(self) -> None:
        if self._waiting:
            with _room():
                self._file.executemany("INSERT OR IGNORE INTO counts VALUES (?, ?)", self._waiting)
            self._waiting.clear()


@contextmanager
def _room() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise OSError(f"what prefill counted cannot be kept: {error}") from None


def _key(name: str) -> bytes:
    """Of any length: clients may choose an id."""
    return blake2b(name.encode("utf-8", "backslashreplace"), digest_size=16).digest()


__all__ = ["Counts"]
