"""What a reader gives back."""

from __future__ import annotations

from dataclasses import dataclass, field

from hermetic.check.deployment import Proxy
from hermetic.check.facts import Sheet
from hermetic.check.result import Unread


@dataclass
class Reading:
    """Of one source: nodes, proxies, and what could not be read. A source may speak of several nodes, or of none.

    `damaged`: it is of a deployment, or may be, and could not be read: not a file of something else. `file`: where it is from, if that is a file."""

    sheets: list[Sheet] = field(default_factory=list)
    proxies: list[Proxy] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)
    damaged: bool = False
    file: str = ""

    def failed(self, source: str, why: str, part: bool = False, damaged: bool = False) -> Reading:
        """Note that a source could not be read, or only in part."""
        self.unread.append(Unread(source=source, why=why, part=part))
        self.damaged = self.damaged or damaged
        return self


__all__ = ["Reading"]
