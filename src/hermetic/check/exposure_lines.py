"""The lines of an access log, out of what wraps them: Docker's and Kubernetes' own files, and what kubectl, docker compose and syslog put before a line.

The one thing to know: only what a wrapper is known to write is taken away, and only before an object. What stands behind other text may be what a client
sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from hermetic.check.readers.logs import unwrapped

LONGEST_LINE = 1024**2  # bytes
_DOCKER = b'{"log":"'
_BEFORE = re.compile(
    rb"""
    (?: \[pod/[^\]\s]{1,400}\]\ # kubectl logs --prefix
      | [A-Za-z0-9][\w.-]{0,200}\ {1,80}\|\ # docker compose logs
      | (?:<\d{1,3}>)?[A-Z][a-z]{2}\ [ \d]\d\ [\d:]{8}\ (?:[^\s{]{1,255}\ )?[^\s{]{1,255}:\ # syslog, journalctl
      | \d{4}-\d\d-\d\dT[\d:.,Z+-]{8,30}\ (?:[^\s{]{1,255}\ [^\s{]{1,255}\[\d{1,10}\]:\ )? # kubectl logs --timestamps, journalctl -o short-iso
    ){1,3}(?=\{)
    """,
    re.VERBOSE,
)


def lines(stream: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Numbered from 1; None for one that is too long. What was written in parts has the number of the last one."""
    waiting: dict[bytes, bytes] = {}
    at = 0
    for at, line in _numbered(stream):
        if line is None or (line.startswith(b"{") and not line.startswith(_DOCKER)):
            yield at, line
        elif (inner := _inside(line, waiting)) is not None:
            yield at, inner if len(inner) <= LONGEST_LINE else None
    for cut in waiting.values():  # the log ends before the line does
        yield at, cut


def _numbered(stream: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    at = 0
    while line := stream.readline(LONGEST_LINE):
        at += 1
        if line.endswith(b"\n") or len(line) < LONGEST_LINE:
            yield at, line
            continue
        while (rest := stream.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
            pass
        yield at, None


def _inside(line: bytes, waiting: dict[bytes, bytes]) -> bytes | None:
    """What a wrapper was given. None for a part that goes on in the next line."""
    if line.startswith(_DOCKER) and not _is_docker(line):
        return line  # an object of its own, with a field of that name
    inner = unwrapped(line.rstrip(b"\r\n"), waiting)
    if inner is None:
        return None
    before = _BEFORE.match(inner)
    return (inner[before.end() :] if before is not None else inner) or b"\n"


class _Docker(msgspec.Struct, forbid_unknown_fields=True):
    """A line of Docker's json-file."""

    log: str
    stream: str
    time: str
    attrs: dict[str, str] = {}


def _is_docker(line: bytes) -> bool:
    try:
        msgspec.json.decode(line, type=_Docker)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


__all__ = ["LONGEST_LINE", "lines"]
