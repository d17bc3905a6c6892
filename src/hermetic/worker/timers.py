"""When to say things again, and when a wait is too long: one record's timer, on the worker's own clock."""

from __future__ import annotations

NUDGE_SECONDS = (
    2.0  # without a message of the other half before the first repetition; doubles up to NUDGE_MOST
)
NUDGE_MOST = 30.0
LOOK_SECONDS = 0.25  # between two looks at all records


class Nudge:
    """Due when nothing has come for a while; waits longer each time, so that a frozen peer is not shouted at."""

    def __init__(self, now: float) -> None:
        self._wait = NUDGE_SECONDS
        self._at = now + self._wait

    def heard(self, now: float) -> None:
        """The other half said something about this ticket."""
        self._wait = NUDGE_SECONDS
        self._at = now + self._wait

    def due(self, now: float) -> bool:
        """True once each time that the wait is over."""
        if now < self._at:
            return False
        self._wait = min(2 * self._wait, NUDGE_MOST)
        self._at = now + self._wait
        return True


class Every:
    """True at most once in `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._next = seconds, 0.0

    def due(self, now: float) -> bool:
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True
