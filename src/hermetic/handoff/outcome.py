"""How a request can end. There is no boolean "finished": only Completed moves forward (I4)."""

from __future__ import annotations

import msgspec


class Completed(msgspec.Struct, frozen=True, tag=True):
    """This half did all of its work."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Never taken: it cannot fit, or not now. Nothing was allocated."""

    code: str
    reason: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Taken, and ended by a fault. Its pages are never reused as a cache."""

    code: str
    reason: str


class Aborted(msgspec.Struct, frozen=True, tag=True):
    """Ended because somebody asked: the client left, a deadline, the other half's failure."""

    code: str
    reason: str


Outcome = Completed | Refused | Failed | Aborted
"""Every end of a request; `match` on it."""
