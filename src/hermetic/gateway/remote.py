"""One worker as the gateway sees it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import zmq
import zmq.asyncio

from hermetic.handoff.messages import Key
from hermetic.worker import messages as m
from hermetic.worker.link import Link

if TYPE_CHECKING:
    from hermetic.gateway.runs import Attempt

STATES = ("joining", "ready", "draining", "drained", "unreachable", "gone", "refused")


@dataclass(eq=False, repr=False)  # they name each other: a repr would be the whole cluster
class Remote:
    """A member. `heard` is local monotonic time, as is everything about time here."""

    info: m.WorkerInfo
    socket: zmq.asyncio.Socket
    link: Link
    heard: float
    welcomed: bool = False  # it has answered our Hello in this session
    reachable: bool = True  # it gives signs of life
    ended: bool = False  # its process is gone, or it has left; it does not come back in this incarnation
    draining: bool = False  # the operator asked for it
    leaving: bool = False  # the worker itself asked for it
    reason: str = ""  # why it is not ready
    since: float = 0.0  # when it ended
    paired: dict[str, bytes] = field(default_factory=dict)  # prefill: decode worker -> its incarnation
    attempts: set[Attempt] = field(default_factory=set)  # whose half here has not ended

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
            self.put(self.link.wrap(key, body, time.monotonic()))

    def put(self, raw: bytes) -> None:
        """Onto the wire as it is. What the queue does not take is repeated by the link."""
        if not self.socket.closed:
            forget(self.socket.send(raw, zmq.NOBLOCK))


def forget(sent: object) -> None:
    """A message that could not be queued now is said again later by whoever needs it: its error is nobody's."""
    if isinstance(sent, asyncio.Future) and sent.done() and not sent.cancelled():
        sent.exception()
