"""An asyncio event loop whose time is virtual: it jumps to the next timer as soon as nothing else is to be done.

The one thing to know: no waiting and no input. Whatever waits for a real file, thread or process waits for ever.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Mapping
from typing import Any

RESOLUTION = 1e-9  # seconds: timers this near to each other are due together


class _NoInput(selectors.BaseSelector):
    """Moves the clock on by what the loop is willing to wait. Nothing ever becomes ready."""

    def __init__(self) -> None:
        self.now = 0.0
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(
            fileobj, fileobj if isinstance(fileobj, int) else fileobj.fileno(), events, data
        )
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("the simulation waits for something that can never come")
        self.now += max(timeout, 0.0)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` is in virtual seconds from 0."""

    def __init__(self) -> None:
        self._virtual = _NoInput()
        super().__init__(self._virtual)
        self._clock_resolution = RESOLUTION

    def time(self) -> float:
        return self._virtual.now


__all__ = ["VirtualLoop"]
