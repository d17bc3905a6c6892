"""One worker as the gateway sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hermetic.handoff.messages import Key
from hermetic.worker import messages as m
from hermetic.worker.lines import Line
from hermetic.worker.link import Link

if TYPE_CHECKING:
    from hermetic.gateway.runs import Attempt

STATES = ("joining", "ready", "draining", "drained", "unreachable", "gone", "refused")


@dataclass(eq=False, repr=False)  # they name each other: a repr would be the whole cluster
class Remote:
    """A member. Times are those of `clock`, the gateway's own."""

    info: m.WorkerInfo
    line: Line
    link: Link
    clock: Callable[[], float]
    heard: float  # when it last gave a sign of life
    welcomed: bool = False  # it has answered our Hello in this session
    reachable: bool = True  # it gives signs of life
    ended: bool = False  # its process is gone, or it has left; it does not come back in this incarnation
    draining: bool = False  # the operator asked for it
    leaving: bool = False  # the worker itself asked for it
    reason: str = ""  # why it is not ready
    since: float = 0.0  # when it ended
    paired: dict[str, bytes] = field(default_factory=dict)  # prefill: decode worker -> its incarnation
    attempts: dict[Attempt, None] = field(
        default_factory=dict
    )  # whose half here has not ended, the oldest first

    @property
    def state(self) -> str:
        if self.ended:
            return "gone"
        if not self.reachable:
            return "unreachable"
        if self.draining or self.leaving:
            return "draining" if self.attempts else "drained"
        return "ready" if self.welcomed else "joining"

    @property
    def usable(self) -> bool:
        """New work may go to it."""
        return self.state == "ready"

    def paired_with(self, decode: Remote) -> bool:
        return self.paired.get(decode.info.worker) == decode.info.incarnation

    def pages_in_flight(self) -> int:
        """Pages that the attempts on it account for: the prompt, and on the side that decodes the tokens made so far."""
        pages_for = self.info.geometry.pages_for
        prefill = self.info.role == "prefill"
        return sum(pages_for(a.length if prefill else a.tokens_so_far) for a in self.attempts)

    def send(self, key: Key | None, body: m.Body) -> None:
        """Give it a message: in order, once, and again until it is acknowledged."""
        if not self.ended:
            self.line.put(self.link.wrap(key, body, self.clock()))
