"""The prefill worker: computes prompts, seals pages, and writes them into decode's landing slots while it computes on."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec
import numpy as np

from hermetic.engine.sequence import Event, First, Job, PagesReady, PromptDone, Started
from hermetic.handoff.actions import Action, CloseLeases, Enqueue, Report, StopComputing, Write
from hermetic.handoff.actions import Send as SendMessage
from hermetic.handoff.messages import Abort, Drained, Key, Message
from hermetic.handoff.outcome import Aborted, Completed, Failed, Refused
from hermetic.handoff.prefill import PrefillHandoff
from hermetic.kv.pool import I32, Kind, Lease
from hermetic.transport.base import Sender, TransportError
from hermetic.transport.shm import ShmSender
from hermetic.worker import messages as m
from hermetic.worker.core import Connection, Parts, Send, Worker, difference

ENDED_KEPT = 65536  # tickets remembered after their end, so that nothing late can start them again


@dataclass
class Link:
    """A decode worker that this prefill may write to."""

    name: str
    connection: Connection
    asked_by: Connection
    info: m.WorkerInfo | None = None
    sender: Sender | None = None


@dataclass
class Record:
    """One ticket and attempt here. `pages` are the prompt's, in order, once they are taken."""

    machine: PrefillHandoff
    link: Link
    job: Job | None = None
    pages: I32 = field(default_factory=lambda: np.empty(0, np.int32))
    sending: list[Lease] = field(default_factory=list)  # SEND leases, on pages 0..len-1 in order
    leased: int = 0  # how many pages they cover


class PrefillWorker(Worker):
    """One engine in the prefill role and a handoff machine for each ticket."""

    def __init__(self, parts: Parts, send: Send) -> None:
        super().__init__(parts, send)
        self._links: dict[Connection, Link] = {}
        self._records: dict[Key, Record] = {}
        self._ended: OrderedDict[Key, None] = OrderedDict()

    # ------------------------------------------------------------------- pairing

    def dialled(self, connection: Connection, worker: str, asked_by: Connection) -> None:
        """A connection to a decode worker was opened (on the gateway's Connect): introduce ourselves."""
        self._links[connection] = Link(worker, connection, asked_by)
        self.send(connection, None, m.Hello(self.info.worker, self.info))

    def handle(self, source: Connection, key: Key | None, body: m.Body) -> None:
        link = self._links.get(source)
        if link is None:
            super().handle(source, key, body)
            return
        match body:
            case m.Welcome(info=info, landing=landing):
                self._welcomed(link, info, landing)
            case m.Rejected(reason=reason):
                self.send(link.asked_by, None, m.Paired(link.name, reason))
            case Message() if key is not None:
                self._from_decode(link, key, body)
            case _:
                self.counters.messages_rejected += 1

    def _welcomed(self, link: Link, info: m.WorkerInfo, landing: str) -> None:
        error = difference(self.info, info) or ""
        if not error:
            try:
                link.sender = ShmSender(landing, self.info.geometry.stride)
                link.info = info
            except TransportError as problem:
                error = str(problem)
        self.send(link.asked_by, None, m.Paired(link.name, error))

    def lost(self, source: Connection) -> None:
        link = self._links.pop(source, None)
        if link is None:
            super().lost(source)
            return
        for key, record in list(self._records.items()):
            if record.link is link:
                self._perform(key, record, record.machine.peer_gone(f"decode worker {link.name} is gone"))
        if link.sender is not None:
            link.sender.close()

    # -------------------------------------------------------------------- tickets

    def _take(self, key: Key, job: Job, submit: m.Submit) -> Refused | None:
        link = next((x for x in self._links.values() if x.name == submit.peer and x.sender is not None), None)
        if link is None:
            return Refused("no_pair", f"prefill worker {self.info.worker} is not paired with {submit.peer!r}")
        if key in self._ended:
            return Refused("duplicate_attempt", f"attempt {key} has ended here already")
        record = self._records.setdefault(key, Record(PrefillHandoff(), link))
        record.job = job
        pages = self.engine.pool.geometry.pages_for(len(job.tokens))
        self._perform(key, record, record.machine.submitted(len(job.tokens), pages))
        return None

    def _cancel(self, key: Key, cancel: m.Cancel) -> None:
        record = self._records.get(key)
        if record is not None and cancel.choice is None:
            self._perform(key, record, record.machine.abort(Aborted(cancel.code, cancel.reason)))

    def _from_decode(self, link: Link, key: Key, body: m.Body) -> None:
        record = self._records.get(key)
        if record is None:
            if isinstance(body, Abort):
                # Nothing of it is in flight and, being remembered as ended, nothing will start.
                self._remember(key)
                self.send(link.connection, key, Drained())
                return
            if key in self._ended:
                self.counters.messages_stale += 1
                return
            record = self._records[key] = Record(PrefillHandoff(), link)
        if record.link is not link:
            self.counters.messages_rejected += 1
            return
        self._perform(key, record, record.machine.received(body))  # type: ignore[arg-type]

    def _other(self, event: Event) -> None:
        record = self._records.get(event.key)
        if record is None:
            return
        match event:
            case Started(key=key):
                self._perform(key, record, record.machine.started())
            case PagesReady(key=key, count=count):
                self._freeze(key, record, count)
                self._perform(key, record, record.machine.pages_ready(count))
            case PromptDone(key=key, firsts=firsts):
                self._prompt_done(key, record, firsts)

    def _prompt_done(self, key: Key, record: Record, firsts: tuple[First, ...]) -> None:
        self.engine.cancel(key)  # its read leases; our send leases keep the pages
        self._perform(key, record, record.machine.computed(msgspec.msgpack.encode(firsts)))

    def _freeze(self, key: Key, record: Record, count: int) -> None:
        """Send leases on the pages that became final; the tail's unfilled rows carry nobody's old bytes."""
        assert record.job is not None
        record.pages = self.engine.pages(key)
        fresh = record.pages[record.leased : count]
        if not len(fresh):
            return
        pool, tokens = self.engine.pool, len(record.job.tokens)
        if count == pool.geometry.pages_for(tokens) and tokens % pool.geometry.page_size:
            pool.zero_unfilled(int(fresh[-1]), tokens % pool.geometry.page_size)
        record.sending.append(pool.lease(Kind.SEND, str(key), fresh))
        record.leased = count

    def _failed(self, key: Key, failure: Failed) -> None:
        record = self._records.get(key)
        if record is None:
            self._end(key, failure)
        else:
            self._perform(key, record, record.machine.abort(failure))

    # -------------------------------------------------------------------- actions

    def _perform(self, key: Key, record: Record, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendMessage(message=message):
                    self.send(record.link.connection, key, message)
                case Enqueue():
                    assert record.job is not None
                    self.engine.submit(record.job)
                case Write(batch=batch, pages=pages):
                    self._write(key, record, batch, [(page, use.slot) for page, use in pages])
                case StopComputing():
                    self.engine.cancel(key)
                case CloseLeases():
                    self.engine.cancel(key)
                    for lease in record.sending:
                        self.engine.pool.close(lease)
                    self.counters.messages_stale += record.machine.stale
                    del self._records[key]
                    self._remember(key)
                case Report(outcome=outcome):
                    if not isinstance(outcome, Completed):
                        self.engine.cancel(key)
                    self._end(key, outcome)
                case _:
                    raise AssertionError(f"{action} is not for prefill")

    def _write(self, key: Key, record: Record, batch: int, pages: list[tuple[int, int]]) -> None:
        sender = record.link.sender
        assert sender is not None
        memory = self.engine.pool.memory
        sender.write(batch, [(memory[record.pages[page]], slot) for page, slot in pages])
        for written in sender.poll():
            self._perform(key, record, record.machine.wrote(written.batch, written.ok, written.stopped))

    def _remember(self, key: Key) -> None:
        self._ended[key] = None
        while len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)

    def stats(self) -> dict[str, float]:
        stale = sum(r.machine.stale for r in self._records.values())
        return super().stats() | {
            "handoffs_open": len(self._records),
            "pages_sending": self.engine.pool.holds(Kind.SEND),
            "messages_stale": self.counters.messages_stale + stale,
        }
