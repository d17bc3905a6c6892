"""Taking the model away, by an operator or by itself after repeated integrity failures, and giving it back.

The one thing to know: it fails closed. Disabling takes effect before anything is written; a state file that cannot be read
keeps the gateway from starting; one that cannot be written keeps `enable` from happening.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from hermetic.gateway.backend import Failed, Refused
from hermetic.gateway.options import ClusterOptions
from hermetic.options import OptionError

log = logging.getLogger("hermetic.gateway")

VERSION = 1
MAX_REASON = 500  # characters
_LARGEST = 1 << 16  # bytes of a state file


class Disabled(msgspec.Struct, frozen=True):
    """Who took the model away, why, and when (seconds since 1970, for people only)."""

    reason: str
    by: str
    at: float


class _State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    disabled: Disabled | None


class Switch:
    """`disabled` is None while requests are taken. Raises OptionError for a state file that cannot be read."""

    def __init__(self, options: ClusterOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._options, self._clock = options, clock
        self._path = None if options.state_file is None else Path(options.state_file)
        self._failures: deque[float] = deque()
        self.failures_total = 0
        self.trips_total = 0
        self.disabled = self._load()
        if self.disabled is not None:
            log.critical("the model is disabled since before this start: %s", self.disabled.reason)

    def check(self) -> None:
        """Raises Refused(model_disabled) with the reason."""
        if self.disabled is not None:
            text = f"this model was disabled by {self.disabled.by}: {self.disabled.reason}"
            raise Refused("model_disabled", text, 400)

    def disable(self, reason: str, by: str) -> str | None:
        """From now on. Returns what went wrong with keeping it over a restart, or None."""
        self.disabled = Disabled(reason, by, time.time())
        log.critical("the model is disabled by %s: %s", by, reason)
        try:
            self._save()
        except OSError as error:
            log.critical(
                "the state file %s cannot be written (%s): a restart would enable the model",
                self._path,
                error,
            )
            return f"disabled, but {self._path} cannot be written ({error}): a restart would enable the model"
        return None

    def enable(self, by: str) -> None:
        """Take requests again. Raises Failed(state_not_saved) and stays disabled if that cannot be kept."""
        was, self.disabled = self.disabled, None
        try:
            self._save()
        except OSError as error:
            self.disabled = was
            raise Failed(
                "state_not_saved", f"the state file {self._path} cannot be written: {error}"
            ) from error
        self._failures.clear()
        if was is not None:
            log.critical("the model is enabled by %s", by)

    def integrity_failure(self) -> None:
        """A request met a page that was not its own. Enough of them in a window disable the model."""
        self.failures_total += 1
        limit, seconds = self._options.trip_failures, self._options.trip_seconds
        if limit < 1:
            return
        now = self._clock()
        self._failures.append(now)
        while now - self._failures[0] > seconds:
            self._failures.popleft()
        if len(self._failures) >= limit and self.disabled is None:
            self.trips_total += 1
            self.disable(
                f"{len(self._failures)} requests met KV pages that were not their own within {seconds:.0f} s; "
                "see the log and the counters of the workers before it is enabled again",
                "the server itself",
            )

    def counts(self) -> dict[str, float]:
        return {
            "disabled": float(self.disabled is not None),
            "integrity_failures_total": self.failures_total,
            "disabled_trips_total": self.trips_total,
        }

    def _load(self) -> Disabled | None:
        if self._path is None:
            return None
        try:
            state = msgspec.json.decode(_read(self._path), type=_State)
        except FileNotFoundError:
            if not self._path.parent.is_dir():
                raise OptionError(
                    f"the state file {self._path} has no directory to be in; make it first"
                ) from None
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise OptionError(
                f"the state file {self._path} cannot be read: {error}. Whether the model was disabled is not known, so "
                "nothing is started. Repair the file, or remove it to start with the model enabled"
            ) from error
        if state.version != VERSION:
            raise OptionError(
                f"the state file {self._path} has version {state.version}, and {VERSION} is known here. Remove it to "
                "start with the model enabled"
            )
        if state.disabled is None:
            return None
        reason = "".join(c if c.isprintable() else " " for c in state.disabled.reason[:MAX_REASON])
        return Disabled(reason, state.disabled.by, state.disabled.at)

    def _save(self) -> None:
        """The new file is whole on the disk before it takes the old one's name."""
        if self._path is None:
            return
        new = self._path.with_name(self._path.name + ".new")
        raw = msgspec.json.encode(_State(VERSION, self.disabled))
        # Not blocking: a pipe in its place must not hold the gateway up.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
        handle = os.open(new, flags, 0o600)
        with contextlib.closing(os.fdopen(handle, "wb")) as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self._path)
        directory = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _read(path: Path) -> bytes:
    """A state file's bytes. Raises OSError, also for what is no file or far too large to be one."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError("it is not a file")
        raw = os.read(number, _LARGEST + 1)
    finally:
        os.close(number)
    if len(raw) > _LARGEST:
        raise OSError(f"it has more than {_LARGEST} bytes")
    return raw
