"""A counterexample: what explorer, simulator, induction and conformance find, as a file that a person can read and replay.

The one thing to know: a replay needs nothing but this file and the code. `scope` (with `seed`) rebuilds the world, `move` of
each step names the move to make in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

VERSION = 1
SAVED = "hermetic-counterexample.json"  # where one goes if nothing else is said
MOST_BYTES = 64 << 20
SOURCES = ("explorer", "simulator", "induction", "conformance")


class SavedError(ValueError):
    """A file that is not a counterexample of this version, or a place where none can be saved; the message says why."""


class Step(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One move. `actor` and `to` are lanes: gateway, prefill-0, decode-0, network, adversary ("" as `to`: nobody else)."""

    actor: str
    what: str
    to: str = ""
    key: str = ""  # whose: request and attempt, like A/1
    detail: str = ""
    move: str = ""  # its name among the moves that are possible where it is made; what a replay looks for
    fate: str = ""  # of a message: "lost", "twice" (it arrives and will once more), "late"


class Counterexample(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How a promise was broken. `scope` holds everything that a replay needs besides the moves."""

    kind: str  # I1 .. I6, L1, L2, refinement, induction, conformance, handoff (product code raised)
    text: str
    steps: tuple[Step, ...] = ()
    scope: dict[str, int | float | str | bool | list[int | str]] = {}
    mutant: str = ""
    seed: int | None = None
    source: str = "explorer"  # one of SOURCES
    shows: tuple[str, ...] = ()  # slots, pages and writes as they are before the last step, one a line
    version: int = VERSION

    def save(self, path: Path) -> None:
        """Raises SavedError when it cannot be written. A file that is there is replaced as a whole, or not at all."""
        # `version` and `source` stand in every file, also where they are the defaults.
        put(path, {"version": self.version, "source": self.source} | msgspec.to_builtins(self))


def put(path: Path, found: dict[str, Any]) -> None:
    """Save it as JSON: a file that is there is replaced as a whole, or not at all. Raises SavedError."""
    _written(path, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def check_place(path: Path) -> None:
    """Raises SavedError if nothing can be saved there: to be asked before minutes of search, not after them."""
    _written(path, None)


def _written(path: Path, text: bytes | None) -> None:
    """First into a file beside it, which then takes its name. None: only see whether that would go, and leave nothing."""
    try:
        if path.exists() and not path.is_file():  # a folder; a device, which would be replaced by a file
            raise SavedError(f"{path} cannot be written: it is no file")
        beside = path.with_name(f".{path.name}.new")
        beside.write_bytes(text or b"")
        if text is None:
            beside.unlink()
        else:
            beside.replace(path)
    except OSError as error:
        raise SavedError(f"{path} cannot be written: {error.strerror}") from error


def load(path: Path) -> Counterexample:
    """Raises SavedError."""
    try:
        if path.exists() and not path.is_file():
            raise SavedError(f"{path} is no file that a counterexample could stand in")
        if path.stat().st_size > MOST_BYTES:
            raise SavedError(f"{path} has more than {MOST_BYTES >> 20} MiB; no counterexample has")
        raw = path.read_bytes()
    except OSError as error:
        raise SavedError(f"{path} cannot be read: {error.strerror}") from error
    try:
        version = msgspec.json.decode(raw, type=_Versioned).version
    except (msgspec.MsgspecError, RecursionError) as error:
        raise SavedError(f"{path} is not a saved counterexample: {error}") from error
    if version != VERSION:
        raise SavedError(f"{path} has version {version}; this hermetic reads version {VERSION}")
    try:
        found = msgspec.json.decode(raw, type=Counterexample)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise SavedError(f"{path} is not a saved counterexample: {error}") from error
    if found.source not in SOURCES:
        raise SavedError(f"{path} was found by {found.source!r}; known are {', '.join(SOURCES)}")
    return found


class _Versioned(msgspec.Struct):
    """Read first, so that a file of another version is told from one that is no counterexample."""

    version: int


__all__ = [
    "SAVED",
    "SOURCES",
    "VERSION",
    "Counterexample",
    "SavedError",
    "Step",
    "check_place",
    "load",
    "put",
]
