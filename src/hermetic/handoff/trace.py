"""Recording what the protocol does (`--trace FILE`): machines, slots and pages are observed, workers say the rest.

The one thing to know: off, it costs one `is None` at each place. On, a process holds at most FLUSH_SECONDS of its records
back, and writes whole lines only; a process that is killed loses these, and its last line may be cut. What a record is
stands in records.py; `hermetic prove --conform FILE` reads them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from hermetic.handoff import actions as act
from hermetic.handoff import records as r
from hermetic.handoff.actions import Action
from hermetic.handoff.machine import Machine
from hermetic.handoff.messages import Complete, HandoffMessage, Key, Message
from hermetic.handoff.outcome import Completed, Outcome
from hermetic.kv.pool import I32, Kind, Pool
from hermetic.kv.slots import Slots, SlotUse

FLUSH_SECONDS = 0.25
FLUSH_RECORDS = 1000

_encode = msgspec.json.Encoder().encode


class TraceFileError(ValueError):
    """The file of `--trace` cannot be written; the message says why."""


def start(path: str) -> None:
    """Make the file, empty: once, before any process that is to append to it starts. Raises TraceFileError."""
    try:
        Path(path).write_bytes(b"")
    except OSError as error:
        raise TraceFileError(f"--trace {path} cannot be written: {error.strerror}") from error


@dataclass(frozen=True)
class Home:
    """Whose something is: the process, and for slots the segment."""

    p: str
    segment: int = 0


class Journal:
    """What one worker says to the recorder of its process."""

    def __init__(self, recorder: Recorder, p: str) -> None:
        self._recorder, self.p = recorder, p

    def owns(self, pool: Pool) -> None:
        self._recorder.homes[pool] = Home(self.p)

    def begins(self, machine: Machine[Any], peer: str) -> None:
        self._recorder.homes[machine] = Home(self.p)
        self._recorder.add(r.Begin(self.p, name(machine.key), peer))

    def has_segment(self, slots: Slots, peer: str, segment: int) -> None:
        self._recorder.homes[slots] = Home(self.p, segment)
        self._recorder.add(r.Segment(self.p, peer, segment, slots.count))

    def has_fenced(self, segment: int) -> None:
        self._recorder.add(r.Fenced(self.p, segment))

    def opened(self, peer: str, segment: int) -> None:
        self._recorder.add(r.Opened(self.p, peer, segment))

    def closed(self, peer: str, gone: bool) -> None:
        self._recorder.add(r.Closed(self.p, peer, gone))

    def lost(self, peer: str, why: str) -> None:
        self._recorder.add(r.Lost(self.p, peer, why[: r.KEPT_OF_A_REASON]))

    def writes(self, key: Key, batch: int, pages: Iterable[tuple[int, int, int]]) -> None:
        self._recorder.add(r.Write(self.p, name(key), batch, tuple(pages)))

    def written(self, key: Key, batch: int, ok: bool, stopped: bool) -> None:
        self._recorder.add(r.Written(self.p, name(key), batch, ok, stopped))

    def copies(self, round_: Sequence[tuple[Key, act.Copy]], pages: Iterable[int]) -> None:
        """`pages` are those of the pool that these were copied to."""
        named = ((name(key), c.page, int(q), *c.slot) for (key, c), q in zip(round_, pages, strict=True))
        self._recorder.add(r.Copying(self.p, tuple(named)))

    def verified(
        self, round_: Sequence[tuple[Key, act.Copy]], pages: Iterable[int], good: Iterable[bool]
    ) -> None:
        found = zip(round_, pages, good, strict=True)
        named = ((name(key), copy.page, int(q), bool(ok)) for (key, copy), q, ok in found)
        self._recorder.add(r.Verified(self.p, tuple(named)))

    def unknown(self, key: Key, peer: str, message: HandoffMessage, answer: Iterable[HandoffMessage]) -> None:
        self._recorder.add(r.Unknown(self.p, name(key), peer, bare(message), tuple(map(bare, answer))))

    def forged(self, key: Key, message: HandoffMessage) -> None:
        """Tests only (see records.Forged)."""
        self._recorder.add(r.Forged(self.p, name(key), bare(message)))


class Recorder:
    """The recording of one process, of every worker in it. It observes machines, slots and pools while it is installed."""

    current: Recorder | None = None
    """The one that is installed in this process."""

    def __init__(self, path: str) -> None:
        """Raises TraceFileError."""
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise TraceFileError(f"--trace {path} cannot be written: {error.strerror}") from error
        self._lines: list[bytes] = []
        self._flushed = time.monotonic()
        self._processes: list[str] = []
        self.homes: WeakKeyDictionary[object, Home] = WeakKeyDictionary()

    # ---------------------------------------------------------------- life

    def install(self) -> None:
        assert Recorder.current is None, "this process records already"
        Recorder.current = Machine.observer = Slots.observer = Pool.observer = self

    def close(self, ended: bool = True) -> None:
        """Stop, and write what is held back; once. `ended`: in peace, so that the recording is known to be whole."""
        if self._file < 0:
            return
        if Recorder.current is self:
            Recorder.current = Machine.observer = Slots.observer = Pool.observer = None
        for p in self._processes if ended else ():
            self.add(r.End(p))
        self.flush()
        os.close(self._file)
        self._file = -1

    def join(
        self, worker: str, role: str, incarnation: bytes, page_size: int, pages: int, slots: int
    ) -> Journal:
        """A worker of this process begins."""
        p = incarnation.hex()
        self._processes.append(p)
        self.add(r.Process(p, r.VERSION, worker, role, os.getpid(), page_size, pages, slots))
        self.flush()
        return Journal(self, p)

    def add(self, record: r.Record) -> None:
        self._lines.append(_encode(record))
        if len(self._lines) >= FLUSH_RECORDS:
            self.flush()

    def keep(self) -> None:
        """Write what has been held back for long enough; called in every round of the process's loop."""
        if self._lines and time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        # The first newline ends a line that a killed process may have left cut; an empty line is nothing.
        data = b"\n" + b"\n".join(self._lines) + b"\n" if self._lines else b""
        self._lines.clear()
        self._flushed = time.monotonic()
        while data:
            data = data[os.write(self._file, data) :]

    # ----------------------------------------------------------- observing

    def stepped(
        self, machine: Machine[Any], event: str, args: tuple[Any, ...], before: Any, actions: list[Action]
    ) -> None:
        home = self.homes.get(machine)
        if home is None:
            return
        message = bare(args[0]) if args and isinstance(args[0], Message) else None  # type: ignore[arg-type]
        plain = () if message is not None else _plain(event, args)
        done = tuple(map(_done, actions))
        self.add(
            r.Step(home.p, name(machine.key), event, before.name, machine.state.name, message, plain, done)
        )

    def slots_changed(self, slots: Slots, what: str, uses: tuple[SlotUse, ...], key: object) -> None:
        home = self.homes.get(slots)
        if home is not None:
            whose = name(key) if isinstance(key, Key) else ""
            self.add(r.SlotsChanged(home.p, home.segment, what, uses, whose))

    def pages_changed(self, pool: Pool, what: str, kind: Kind, owner: str, pages: I32) -> None:
        home = self.homes.get(pool)
        if home is not None:
            self.add(r.PagesChanged(home.p, what, kind.name, tuple(pages.tolist()), owner))


@contextmanager
def recording(path: str, ended: bool = True) -> Iterator[Recorder]:
    """Everything that workers made in the block do is appended to the file."""
    recorder = Recorder(path)
    recorder.install()
    try:
        yield recorder
    finally:
        recorder.close(ended)


def name(key: Key) -> str:
    return f"{key.ticket.hex()}/{key.attempt}"


def bare(message: HandoffMessage) -> HandoffMessage:
    """The message without what is not the protocol's: the state that travels with *complete*."""
    if isinstance(message, Complete) and message.state:
        return msgspec.structs.replace(message, state=b"")
    return message


def _plain(event: str, args: tuple[Any, ...]) -> tuple[bool | int | str, ...]:
    match event:
        case "computed":
            return ()
        case "abort":
            return _outcome(args[0])
        case "fenced":
            return (args[0][: r.KEPT_OF_A_REASON],)
        case _:
            return args


def _outcome(outcome: Outcome) -> tuple[str, str, str]:
    if isinstance(outcome, Completed):
        return "Completed", "", ""
    return type(outcome).__name__, outcome.code, outcome.reason[: r.KEPT_OF_A_REASON]


def _done(action: Action) -> r.Done:
    match action:
        case act.Send(message=message):
            return r.Sent(bare(message))
        case act.Write(batch=batch, pages=pages):
            return r.Writes(batch, tuple((page, use.slot, use.use) for page, use in pages))
        case act.Copy(page=page, slot=use):
            return r.Copies(page, use.slot, use.use)
        case act.Report(outcome=outcome):
            return r.Reported(*_outcome(outcome))
        case act.Enqueue():
            return r.Enqueued()
        case act.StopComputing():
            return r.Stopped()
        case act.Enter():
            return r.Entered()
        case act.CloseLeases():
            return r.LeasesClosed()
        case act.Forget():
            return r.Forgotten()


__all__ = ["Home", "Journal", "Recorder", "TraceFileError", "bare", "name", "recording", "start"]
