"""Shared memory between processes of one host: the landing slots are an anonymous memory file that the peer maps.

The file has no name in any directory: it is a memfd, reached through /proc/PID/fd by processes of the same user, and
gone when the last of them ends, also after SIGKILL. A write is a plain copy, over when `write` returns; so the only
way in which bytes can come late is a peer that was stopped in the middle, and what ends that is its confirmed death.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence

import numpy as np

from hermetic.transport.base import Page, TransportError, Written, usable
from hermetic.transport.process import ProcessWatch


class ShmTransport:
    """Between processes of one user on one host. It listens nowhere."""

    name = "shm"

    def receiver(
        self, slots: int, stride: int, peer_pid: int | None, peer_host: str | None = None
    ) -> ShmReceiver:
        if peer_pid is None:
            raise TransportError(
                "shared memory needs both workers on one host: use --transport mooncake or --transport nixl"
            )
        return ShmReceiver(slots, stride, peer_pid)

    def sender(self, descriptor: str, stride: int) -> ShmSender:
        return ShmSender(descriptor, stride)

    def close(self) -> None:
        """Receivers and senders close for themselves; whatever is left goes with the process."""


class ShmReceiver:
    """The landing slots for one peer: uint8 [slots, stride]."""

    def __init__(self, slots: int, stride: int, peer_pid: int) -> None:
        self._size = slots * stride
        try:
            self._fd = os.memfd_create("hermetic-landing", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, self._size)
            self._map = mmap.mmap(self._fd, self._size)
        except (AttributeError, OSError) as error:
            raise TransportError(
                f"cannot make a landing segment of {self._size} bytes (needs Linux): {error}"
            ) from error
        self.memory: Page = np.frombuffer(self._map, np.uint8).reshape(slots, stride)
        try:
            self._peer = ProcessWatch(peer_pid)
        except OSError as error:
            self.close()
            raise TransportError(f"the peer's process {peer_pid} is not there: {error}") from error

    def descriptor(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}:{self._size}"

    def fence(self) -> bool:
        """True when the peer's process has ended: nothing else stops a process that has our memory mapped."""
        return self._peer.ended()

    def close(self) -> None:
        """Unmap. Views of `memory` that are still alive keep the mapping, not the file, alive."""
        if hasattr(self, "_peer"):
            self._peer.close()
        self.memory = self.memory[:0].copy()
        _unmap(self._map)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class ShmSender:
    """Writes into the slots of one decode worker."""

    def __init__(self, descriptor: str, stride: int) -> None:
        path, _, digits = descriptor.rpartition(":")
        if not digits.isdecimal() or int(digits) < 1 or int(digits) % stride:
            raise TransportError(
                f"decode's landing descriptor {descriptor!r} does not fit pages of stride {stride}: "
                "both workers must have the same page layout"
            )
        size = int(digits)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TransportError(
                f"cannot open decode's landing segment: {error}; both must run as one user on one host"
            ) from error
        try:
            if os.fstat(fd).st_size != size:
                raise TransportError(
                    f"decode's landing segment has {os.fstat(fd).st_size} bytes, {size} were announced: pair again"
                )
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self.memory: Page = np.frombuffer(self._map, np.uint8).reshape(-1, stride)
        self._done: list[Written] = []

    def write(self, batch: int, pages: Sequence[tuple[Page, int]]) -> None:
        if not usable([slot for _, slot in pages], len(self.memory)):
            self._done.append(Written(batch, ok=False, stopped=True))
            return
        for source, slot in pages:
            np.copyto(self.memory[slot], source)
        self._done.append(Written(batch, ok=True, stopped=True))

    def poll(self) -> list[Written]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Unmap; nothing can be written through this object any more."""
        self._done.clear()
        self.memory = self.memory[:0].copy()
        _unmap(self._map)


def _unmap(segment: mmap.mmap) -> None:
    """Unmap now; or, while somebody still has a view of it, when the last view goes."""
    with contextlib.suppress(BufferError):
        segment.close()
