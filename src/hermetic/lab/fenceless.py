"""Mooncake with a fence that only says so: the segment stays registered and mapped, and what arrives in it is counted.

Nothing is put at those addresses again, so nobody is harmed: it shows what the real fence keeps away.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Iterator
from unittest import mock

from hermetic.transport.base import Page
from hermetic.transport.mooncake import MooncakeReceiver

WATCH_SECONDS = 30.0
_LINE = "bytes that arrived after a fence that was none: "


@contextlib.contextmanager
def pretended_fences() -> Iterator[None]:
    """Every fence from now on says True and does nothing else; a thread prints how many bytes changed since."""
    kept: list[MooncakeReceiver] = []  # with their engines

    def fence(receiver: MooncakeReceiver) -> bool:
        if receiver not in kept:
            kept.append(receiver)
            threading.Thread(target=_watch, args=(receiver.memory,), daemon=True).start()
            receiver.memory = receiver.memory[:0].copy()
        return True

    with (
        mock.patch.object(MooncakeReceiver, "fence", fence),
        mock.patch.object(MooncakeReceiver, "close", return_value=None),
    ):
        yield


def _watch(memory: Page) -> None:
    before, most, until = memory.copy(), 0, time.monotonic() + WATCH_SECONDS
    while time.monotonic() < until:
        changed = int((memory != before).sum())
        if changed > most:
            most = changed
            print(f"{_LINE}{most}", file=sys.stderr, flush=True)
        time.sleep(0.05)


def arrived(log: str) -> int:
    """What a worker's log says arrived, at most in one segment."""
    return max((int(found) for found in re.findall(rf"{_LINE}(\d+)", log)), default=0)
