"""Named points of a handoff at which a worker process ends itself with SIGKILL, for drills.

A drill arms a point by making a file; the worker of that role that passes it next takes the file away and dies. Nothing of
this is in the product: the worker's objects are wrapped when the lab starts it (`points=FOLDER`, see process.py).

The one thing to know: "not yet sent" and "sent" are told apart. What is sent goes through ZeroMQ's own thread, so a worker
that dies after sending waits until that thread has had time to write.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from hermetic.engine.sequence import PagesReady, PromptDone, Reserved, Started
from hermetic.handoff import messages as h
from hermetic.handoff.messages import Key
from hermetic.worker import messages as m
from hermetic.worker.core import Worker
from hermetic.worker.decode import DecodeWorker
from hermetic.worker.prefill import PrefillWorker

FLUSH_SECONDS = 0.03  # for ZeroMQ's thread to write what was sent

RECEIVED = {
    "prefill": {
        m.Submit: "submit",
        h.Grant: "grant",
        h.Credit: "credit",
        h.Resend: "resend",
        h.Ack: "ack",
        m.Cancel: "cancel",
        h.Abort: "abort",
    },
    "decode": {
        m.Submit: "submit",
        h.Started: "started",
        h.Landed: "landed",
        h.Complete: "complete",
        m.Cancel: "cancel",
        h.Abort: "abort",
        h.Drained: "drained",
    },
}
SENT = {
    "prefill": {
        h.Started: "started",
        h.Landed: "landed",
        h.Complete: "complete",
        h.Abort: "our abort",
        h.Drained: "drained",
        m.Ended: "end",
    },
    "decode": {
        h.Grant: "grant",
        h.Credit: "credit",
        h.Resend: "resend",
        h.Ack: "ack",
        h.Abort: "our abort",
        m.Tokens: "tokens",
        m.ChoiceDone: "choice's end",
        m.Ended: "end",
    },
}
WORK = {
    "prefill": (
        "prompt: queued",
        "pages: taken",
        "chunk: not yet computed",
        "chunk: computed, more to come",
        "pages: ready, not yet leased for sending",
        "write: not begun",
        "write: half done",
        "write: done, not yet known",
        "prompt: all computed",
    ),
    "decode": (
        "pages: reserved",
        "copy: not begun",
        "copy: half done",
        "copy: done, not yet verified",
        "copy: verified, not yet tagged",
        "copy: tagged",
        "batch: not yet entered",
        "batch: entered",
        "step: not yet computed",
        "step: computed, not yet told",
        "first token: not yet sent",
        "first token: sent",
    ),
}
POINTS: dict[str, tuple[str, ...]] = {
    role: (
        *(f"{name}: {when}" for name in RECEIVED[role].values() for when in ("received", "taken")),
        *(f"{name}: {when}" for name in SENT[role].values() for when in ("not yet sent", "sent")),
        *WORK[role],
    )
    for role in ("prefill", "decode")
}
# Points that lie on the way of a page that did not verify: while one is armed, pages are spoilt on their way.
RESENDS = {role: tuple(p for p in points if p.startswith("resend")) for role, points in POINTS.items()}


def arm(folder: Path, role: str, point: str) -> None:
    """The next worker of this role that passes `point` dies there."""
    assert point in POINTS[role], f"{point!r} is no point of {role}"
    _file(folder, role, point).touch()


def disarm(folder: Path, role: str, point: str) -> bool:
    """Take a point back. False if a worker has died there meanwhile."""
    try:
        _file(folder, role, point).unlink()
    except FileNotFoundError:
        return False
    return True


def fired(folder: Path, role: str, point: str) -> bool:
    """Whether an armed point was passed."""
    return not _file(folder, role, point).exists()


def _file(folder: Path, role: str, point: str) -> Path:
    return folder / f"{role} {point}"


class Points:
    """Asked at every point of one worker process. A drill in one process overrides `die`."""

    def __init__(self, folder: Path, role: str) -> None:
        self.folder, self.role = folder, role

    def passed(self, point: str) -> None:
        """The worker is at this point now."""
        if self.armed(point) and disarm(self.folder, self.role, point):
            self.die(point)

    def armed(self, point: str) -> bool:
        return _file(self.folder, self.role, point).exists()

    @property
    def spoiling(self) -> bool:
        """Whether pages are to be spoilt on their way, so that one is asked for again."""
        return any(map(self.armed, RESENDS[self.role]))

    def die(self, point: str) -> None:
        if point.endswith(": sent"):
            time.sleep(FLUSH_SECONDS)
        with (self.folder / "log").open("a") as log:
            log.write(f"{self.role} {os.getpid()} {point}\n")
        os.kill(os.getpid(), signal.SIGKILL)


def watch(worker: Worker, points: Points) -> None:
    """Wrap this worker's objects, for good, so that it asks `points` wherever POINTS has a name."""
    _watch_messages(worker, points)
    match worker:
        case PrefillWorker():
            _watch_prefill(worker, points)
        case DecodeWorker():
            _watch_decode(worker, points)


def _watch_messages(worker: Any, points: Points) -> None:
    received, sent = RECEIVED[points.role], SENT[points.role]
    handle, send = worker.handle, worker.send

    def handling(source: bytes, key: Key | None, body: m.Body) -> None:
        name = received.get(type(body))
        if name is None:
            handle(source, key, body)
            return
        points.passed(f"{name}: received")
        handle(source, key, body)
        points.passed(f"{name}: taken")

    def sending(to: bytes, key: Key | None, body: m.Body) -> None:
        name = sent.get(type(body))
        if name is None:
            send(to, key, body)
            return
        points.passed(f"{name}: not yet sent")
        send(to, key, body)
        points.passed(f"{name}: sent")

    worker.handle, worker.send = handling, sending


def _watch_prefill(worker: Any, points: Points) -> None:
    other, submit, step = worker._other, worker.engine.submit, worker.engine.step

    def submitting(job: Any) -> None:
        submit(job)
        points.passed("prompt: queued")

    def stepping() -> Any:
        points.passed("chunk: not yet computed")
        events = step()
        if worker.engine.depth()["prefilling"]:
            points.passed("chunk: computed, more to come")
        return events

    def telling(event: Any) -> None:
        match event:
            case Started():
                points.passed("pages: taken")
            case PagesReady():
                points.passed("pages: ready, not yet leased for sending")
            case PromptDone():
                points.passed("prompt: all computed")
        other(event)

    worker.engine.submit, worker.engine.step, worker._other = submitting, stepping, telling
    transport, opening = worker._transport, worker._transport.sender

    def opened(descriptor: str, stride: int) -> Any:
        sender = opening(descriptor, stride)
        _watch_writes(sender, points)
        return sender

    transport.sender = opened


def _watch_writes(sender: Any, points: Points) -> None:
    write = sender.write

    def writing(batch: int, pages: list[tuple[Any, int]]) -> None:
        points.passed("write: not begun")
        if points.armed("write: half done"):
            _write_half(sender, pages)
            points.passed("write: half done")
        write(batch, pages)
        # A page that is sent again travels alone, so it is not spoilt again.
        if points.spoiling and len(pages) > 1:
            sender.memory[pages[0][1]][0] ^= 1
        points.passed("write: done, not yet known")

    sender.write = writing


def _write_half(sender: Any, pages: list[tuple[Any, int]]) -> None:
    """Half of the pages, and half of the next one, as a copy through shared memory leaves them when its process dies."""
    half = len(pages) // 2
    for source, slot in pages[:half]:
        sender.memory[slot][:] = source
    source, slot = pages[half]
    sender.memory[slot][: len(source) // 2] = source[: len(source) // 2]


def _watch_decode(worker: Any, points: Points) -> None:
    engine, land, verify, other = worker.engine, worker._land, worker._verify_landed, worker._other
    reserved, enter, step, send = engine.reserved, engine.enter, engine.step, worker.send
    copies: list[int] | None = None  # while a round lands: how many pages it has looked up
    spoilt: set[tuple[Key, int]] = set()
    silent: set[Key] = set()  # entered, and nothing said yet

    def landing() -> bool:
        nonlocal copies
        if not worker._copies:
            return bool(land())
        points.passed("copy: not begun")
        if points.spoiling:
            key, copy = worker._copies[0]
            if (key, copy.page) not in spoilt:
                spoilt.add((key, copy.page))
                worker._records[key].peer.receiver.memory[copy.slot.slot][0] ^= 1
        copies = []
        worked = bool(land())
        copies = None
        points.passed("copy: tagged")
        return worked

    def looked_up(key: Key) -> Any:
        if copies is not None:
            copies.append(1)
            if len(copies) == 2:  # the first is copied
                points.passed("copy: half done")
        return reserved(key)

    def verifying(*arguments: Any) -> Any:
        points.passed("copy: done, not yet verified")
        good = verify(*arguments)
        points.passed("copy: verified, not yet tagged")
        return good

    def telling(event: Any) -> None:
        if isinstance(event, Reserved):
            points.passed("pages: reserved")
        other(event)

    def entering(key: Key, firsts: Any) -> None:
        points.passed("batch: not yet entered")
        enter(key, firsts)
        silent.add(key)
        points.passed("batch: entered")

    def stepping() -> Any:
        points.passed("step: not yet computed")
        events = step()
        points.passed("step: computed, not yet told")
        return events

    def sending(to: bytes, key: Key | None, body: m.Body) -> None:
        first = isinstance(body, m.Tokens) and not silent.isdisjoint(item.key for item in body.tokens)
        if first:
            points.passed("first token: not yet sent")
        send(to, key, body)
        if first:
            silent.clear()
            points.passed("first token: sent")

    worker._land, worker._verify_landed, worker._other, worker.send = landing, verifying, telling, sending
    engine.reserved, engine.enter, engine.step = looked_up, entering, stepping
