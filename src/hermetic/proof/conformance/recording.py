"""Reading a recording (`--trace`): every process's records in its own order, however they are mixed in the file.

The one thing to know: the file is read twice. The first pass finds where each process's lines are and what is no record at
all; then each process is read by itself, so that one that has to wait for another keeps nothing in memory. A line that a
killed process left cut ends that process; anything else that cannot be read is an error with its line number.
"""

from __future__ import annotations

import mmap
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from hermetic.handoff import records as r

_BEGINNING = re.compile(rb'\{"k":"[a-z]+","p":"([0-9a-f]{16})"[,}]')
_PREFIX, _LONGEST_BEGINNING = b'{"k":"', 48  # bytes
_decoder = msgspec.json.Decoder(r.AnyRecord)


class TraceError(ValueError):
    """The file is not a whole recording; the message says where and what is wrong with it. Exit code 2."""


class Line(NamedTuple):
    number: int  # in the file, from 1
    record: r.Record


class Source:
    """Where one process's lines are: stretches of the file, each (offset, end, number of its first line)."""

    def __init__(self) -> None:
        self.stretches = array("Q")
        self.last = 0  # line number
        self.cut = 0  # the line that it left cut; 0: none

    def add(self, offset: int, end: int, number: int, before: int) -> None:
        """`before`: where the line before this one in the file ended."""
        if self.stretches and self.stretches[-2] == before and self.last == number - 1:
            self.stretches[-2] = end
        else:
            self.stretches.extend((offset, end, number))
        self.last = number


class Recording:
    """A file of records. Raises TraceError when it is made, or while it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sources: dict[str, Source] = {}
        self.cuts: list[int] = []  # numbers of lines that were cut
        try:
            if path.exists() and not path.is_file():
                raise TraceError(f"{path} is no file that a recording could stand in")
            with path.open("rb") as file:
                self._index(file)
                self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise TraceError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:  # what mmap says of an empty file
            if isinstance(error, TraceError):
                raise
            raise TraceError(f"{path} is empty: nothing was recorded") from error
        if not self.sources:
            raise TraceError(f"{path} has no records: nothing was recorded")
        self.headers = {p: self._header(p) for p in self.sources}

    def lines(self, p: str) -> Iterator[Line]:
        """The process's records after its header."""
        source = self.sources[p]
        skipped = False
        for at in range(0, len(source.stretches), 3):
            offset, end, number = source.stretches[at : at + 3]
            while offset < end:
                to = self._memory.find(b"\n", offset, end)
                to = end if to < 0 else to
                if number == source.cut:
                    return
                if skipped and to > offset:
                    record = self._decode(self._memory[offset:to], number, source)
                    if record is None:
                        return
                    yield Line(number, record)
                skipped, offset, number = True, to + 1, number + 1

    # ------------------------------------------------------------------ private

    def _index(self, file: object) -> None:
        offset = before = 0
        loose = 0  # a line that may be one that was cut so short that its process is not known
        for number, line in enumerate(file, start=1):  # type: ignore[arg-type,var-annotated]
            end = offset + len(line)
            if line == b"\n":
                loose = 0
            elif loose:
                raise self._no_record(loose)
            elif found := _BEGINNING.match(line):
                source = self.sources.setdefault(found[1].decode(), Source())
                if source.cut:
                    raise TraceError(
                        f"{self.path}, line {number}: its process goes on after line {source.cut}, which is cut off"
                    )
                source.add(offset, end, number, before)
                if not line.endswith(b"}\n"):
                    source.cut = number
                    self.cuts.append(number)
            elif _cut_short(line.rstrip(b"\n")):
                loose = number
                self.cuts.append(number)
            else:
                raise self._no_record(number)
            before = offset = end

    def _header(self, p: str) -> r.Process:
        source = self.sources[p]
        offset, end, number = source.stretches[:3]
        to = self._memory.find(b"\n", offset, end)
        raw = self._memory[offset : end if to < 0 else to]
        record = None if number == source.cut else self._decode(raw, number, source)
        if not isinstance(record, r.Process):
            raise TraceError(
                f"{self.path}, line {number}: the first record of process {p} does not say who it is; the beginning of "
                "its recording is missing"
            )
        if record.version != r.VERSION:
            raise TraceError(
                f"{self.path}, line {number}: recorded as version {record.version}; this hermetic reads version {r.VERSION}"
            )
        return record

    def _decode(self, raw: bytes, number: int, source: Source) -> r.Record | None:
        """None: it is the last of a process, cut where it happens to end with a bracket."""
        try:
            return _decoder.decode(raw)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            if number == source.last and not isinstance(error, msgspec.ValidationError):
                source.cut = number
                self.cuts.append(number)
                return None
            raise TraceError(f"{self.path}, line {number} is no record: {error}") from error

    def _no_record(self, number: int) -> TraceError:
        return TraceError(
            f"{self.path}, line {number} is no record of a process; this is not a file that --trace wrote, or "
            "something else has written into it"
        )


def _cut_short(line: bytes) -> bool:
    """Whether this can be the beginning of a record, without the name of its process."""
    if line.startswith(_PREFIX):
        return len(line) < _LONGEST_BEGINNING and not line.endswith(b"}")
    return _PREFIX.startswith(line)


__all__ = ["Line", "Recording", "Source", "TraceError"]
