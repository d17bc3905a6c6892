"""Stop strings over text that arrives in pieces.

The one thing to know: text that could be the beginning of a stop string is held back until it is decided, so that no
client ever sees a part of a stop string. The match that is complete first wins (of two that end at the same character,
the longer): that rule, unlike "the one that begins first", gives the same answer however the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Released:
    """`text` may be shown now; `stop` is the stop string that ended the answer, or None."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Holds the undecided end of one choice's text.

    `push` costs O(held + piece) for each stop string, and never holds more than the longest stop string less one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> Released:
        """Add a piece of text. After a match, nothing may be pushed any more."""
        if not self._stops:
            return Released(piece)
        text = self._held + piece
        matches = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            _, at, stop = min(matches)
            self._held = ""
            return Released(text[:at], stop)
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return Released(text[: len(text) - keep])

    def finish(self) -> str:
        """The text that was held back when the answer ended without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`, `stop` itself not included."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
