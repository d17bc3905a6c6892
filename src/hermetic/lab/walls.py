"""Each wall of the design, taken away alone: patches of the running objects of a pair, undone when the block is left.

The product has no switch for any of this (but for `--verify`, which chooses how much evidence is taken). What "without"
means for each wall is the docstring of its function; together they leave a server that trusts whatever prefill says.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np

from hermetic.handoff.actions import Action, Enter, Forget, Report, Send
from hermetic.handoff.decode import DecodeHandoff, State
from hermetic.handoff.messages import Ack, Complete, HandoffMessage
from hermetic.handoff.outcome import Completed
from hermetic.kv.pool import Pool
from hermetic.lab.pair import LabPair
from hermetic.worker.core import Worker
from hermetic.worker.decode import DecodeWorker


class Wall(enum.Enum):
    """What stands between a fault and an answer. Evidence is two: what is checked on landing, and at every read."""

    OWNERSHIP = "ownership"
    COUNTS = "counts"
    LANDING = "landing"
    READ = "read"
    EXCLUSIVITY = "exclusivity"


@contextmanager
def _all(*managers: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for manager in managers:
            stack.enter_context(manager)
        yield


def without_ownership(worker: Worker) -> AbstractContextManager[None]:
    """No tag is compared before a read, and no lease before a write: whoever has a page number may use the page."""
    pool: Pool = worker.engine.pool
    return _all(
        mock.patch.object(pool, "check_read", return_value=None),
        mock.patch.object(pool, "writable", side_effect=lambda pages, _first: np.ones(len(pages), np.bool_)),
    )


class Uncounted(DecodeHandoff):
    """Asks "is it finished?" and not "did it succeed?": *complete* lets a request enter, whatever numbers it carries
    and however many pages were announced. Pages that were announced are still waited for."""

    def received(self, message: HandoffMessage) -> list[Action]:
        if isinstance(message, Complete) and self.state is State.LANDING and self._complete is None:
            self._complete = message
            return self._enter_if_whole()
        return super().received(message)

    def _enter_if_whole(self) -> list[Action]:
        if self._complete is None or self._copying or self._resent:
            return []
        self.state = State.ENTERED
        self._slots.release(self.key)
        return [Send(Ack()), Enter(self._complete.state), Report(Completed()), Forget()]


def without_counts() -> AbstractContextManager[None]:
    """Decode takes *complete* at its word (see Uncounted). For every decode worker of this process."""
    return _all(mock.patch("hermetic.worker.decode.DecodeHandoff", Uncounted))


def without_landing(decode: DecodeWorker) -> AbstractContextManager[None]:
    """Whatever was copied out of a slot counts as verified, and gets its tag."""

    def believe(pages: np.ndarray, *_: np.ndarray) -> np.ndarray:
        return np.ones(len(pages), np.bool_)

    return _all(mock.patch.object(decode, "_verify_landed", believe))


def without_read(worker: Worker) -> AbstractContextManager[None]:
    """Attention hashes nothing of what it reads."""
    return _all(mock.patch.object(worker.engine.runner, "verify", False))


@contextmanager
def without_exclusivity(pair: LabPair) -> Iterator[None]:
    """A slot stays the address of the page that it was copied to, until it is granted again: what a peer writes late
    reaches the live page, as it would if the pool were registered for remote access."""
    decode = pair.decode
    live: dict[int, int] = {}  # slot -> page
    (paired,), (peer,) = pair.prefill._pairs.values(), decode._peers.values()
    sender: Any = paired.sender
    land, write, grant = decode._land, sender.write, peer.slots.grant

    def landing() -> bool:
        for key, copy in decode._copies:
            live[copy.slot.slot] = int(decode.engine.reserved(key).pages[copy.page])
        return land()

    def granting(key: object, number: int) -> Any:
        taken = grant(key, number)
        for use in taken:
            live.pop(use.slot, None)
        return taken

    def writing(batch: int, pages: Any) -> None:
        write(batch, pages)
        for source, slot in pages:
            if slot in live:
                np.copyto(decode.engine.pool.memory[live[slot]], source)

    with (
        mock.patch.object(decode, "_land", landing),
        mock.patch.object(peer.slots, "grant", granting),
        mock.patch.object(sender, "write", writing),
    ):
        yield


def without(pair: LabPair, walls: set[Wall]) -> AbstractContextManager[None]:
    """Take these walls of a pair away, and leave the others standing."""
    workers: tuple[Worker, ...] = (pair.prefill, pair.decode)
    makers: dict[Wall, Callable[[], list[AbstractContextManager[None]]]] = {
        Wall.OWNERSHIP: lambda: [without_ownership(w) for w in workers],
        Wall.COUNTS: lambda: [without_counts()],
        Wall.LANDING: lambda: [without_landing(pair.decode)],
        Wall.READ: lambda: [without_read(w) for w in workers],
        Wall.EXCLUSIVITY: lambda: [without_exclusivity(pair)],
    }
    return _all(*(manager for wall, make in makers.items() if wall in walls for manager in make()))
