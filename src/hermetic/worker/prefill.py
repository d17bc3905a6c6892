"""The prefill worker: computes prompts, seals pages, and writes them into decode's landing slots while it computes on.

The one thing to know: a record, with the send leases on its source pages, stays until the machine says *forget*. What the
client is told and when pages may go are two things; an end that leaves a write in flight keeps the pages and says drained
to nobody.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from hermetic.engine.sequence import Event, First, Job, PagesReady, PromptDone, Started
from hermetic.handoff.actions import Action, CloseLeases, Enqueue, Forget, Report, StopComputing, Write
from hermetic.handoff.actions import Send as SendMessage
from hermetic.handoff.messages import Key, Message
from hermetic.handoff.outcome import Aborted, Completed, Failed, Outcome, Refused
from hermetic.handoff.prefill import ACTIVE, PrefillHandoff, State
from hermetic.handoff.unknown import at_prefill
from hermetic.kv.pool import I32, Kind, Lease
from hermetic.transport.base import Sender, Transport, TransportError
from hermetic.worker import messages as m
from hermetic.worker.core import Connection, Parts, Send, Worker, difference
from hermetic.worker.timers import LOOK_SECONDS, Every, Nudge

log = logging.getLogger("hermetic.worker")

ENDED_KEPT = 65536  # tickets remembered after their end, so that nothing late can start them again
_TOUCHED = (
    State.SENDING,
    State.COMPLETE,
    State.DRAINING,
    State.STUCK,
)  # those that may have credit or writes
UNKNOWN = Aborted("unknown_ticket", "prefill does not know this attempt, or not any more")


@dataclass(eq=False)
class Pair:
    """A decode worker that this prefill may write to, in one incarnation; it outlives its sessions."""

    name: str
    incarnation: bytes
    connection: Connection
    asked_by: Connection
    segment: int = -1
    sender: Sender | None = None  # None: not welcomed yet, or not connected now
    writes: dict[int, tuple[Key, int]] = field(
        default_factory=dict
    )  # the sender's batch -> ticket, its batch
    batches: int = 0


@dataclass(eq=False)
class Record:
    """One ticket and attempt here. `pages` are the prompt's, in order, once they are taken."""

    machine: PrefillHandoff
    pair: Pair
    nudge: Nudge
    job: Job | None = None
    pages: I32 = field(default_factory=lambda: np.empty(0, np.int32))
    sending: list[Lease] = field(default_factory=list)  # SEND leases, on pages 0..len-1 in order
    leased: int = 0  # how many pages they cover
    outcome: Outcome | None = None


class PrefillWorker(Worker):
    """One engine in the prefill role and a handoff machine for each ticket."""

    def __init__(self, parts: Parts, send: Send, transport: Transport) -> None:
        super().__init__(parts, send)
        self._transport = transport
        self._pairs: dict[Connection, Pair] = {}
        self._up: dict[Connection, None] = {}  # those with a session and a sender
        self._records: dict[Key, Record] = {}
        self._ended: OrderedDict[Key, Outcome] = OrderedDict()
        self._look = Every(LOOK_SECONDS)

    # ------------------------------------------------------------------- pairing

    def dialled(self, connection: Connection, worker: str, incarnation: bytes, asked_by: Connection) -> None:
        """A session with a decode worker begins (on the gateway's Connect, or again after it was lost): introduce
        ourselves."""
        pair = self._pairs.get(connection)
        if pair is None:
            pair = self._pairs[connection] = Pair(worker, incarnation, connection, asked_by)
        pair.asked_by = asked_by
        self.send(connection, None, m.Hello(self.info.worker, self.info, incarnation))

    def paired_with(self, connection: Connection) -> bool:
        """Whether pages can be sent over this connection now."""
        return connection in self._up

    def holds_for(self, connection: Connection) -> bool:
        """Whether a ticket of this pair has not ended: silence alone must not make anybody forget it."""
        return any(record.pair.connection == connection for record in self._records.values())

    def tell_paired(self, connection: Connection, asked_by: Connection) -> None:
        """A gateway asks for a pair that stands already."""
        pair = self._pairs[connection]
        pair.asked_by = asked_by
        self.send(asked_by, None, m.Paired(pair.name, "", pair.incarnation))

    def handle(self, source: Connection, key: Key | None, body: m.Body) -> None:
        pair = self._pairs.get(source)
        if pair is None:
            super().handle(source, key, body)
            return
        match body:
            case m.Welcome(info=info, landing=landing, segment=segment):
                self._welcomed(pair, info, landing, segment)
            case m.Rejected(reason=reason):
                self._unpair(pair, reason)
                self.send(pair.asked_by, None, m.Paired(pair.name, reason, pair.incarnation))
            case Message() if key is not None:
                self._from_decode(pair, key, body)
            case _:
                self.counters.messages_rejected += 1

    def _welcomed(self, pair: Pair, info: m.WorkerInfo, landing: str, segment: int) -> None:
        error = difference(self.info, info) or ""
        if info.incarnation != pair.incarnation:
            error = f"another incarnation of {pair.name} answers at its address"
        if not error and (pair.sender is None or segment != pair.segment):
            self._drop_segment(pair, f"decode worker {pair.name} fenced its segment")
            try:
                pair.sender = self._transport.sender(landing, self.info.geometry.stride)
            except TransportError as problem:
                error = str(problem)
            else:
                if self.journal is not None:
                    self.journal.opened(info.incarnation.hex(), segment)
        if error:
            self._unpair(pair, error)
        else:
            pair.segment = segment
            self._up[pair.connection] = None
        self.send(pair.asked_by, None, m.Paired(pair.name, error, pair.incarnation))

    def _unpair(self, pair: Pair, reason: str) -> None:
        """Nothing can be sent to this decode worker now: what has not ended does, and nothing new is taken."""
        self._up.pop(pair.connection, None)
        for key, record in list(self._records.items()):
            if record.pair is pair and record.machine.state in ACTIVE:
                self._perform(key, record, record.machine.abort(Failed("worker_lost", reason)))

    def _drop_segment(self, pair: Pair, reason: str, gone: bool = False) -> None:
        """Decode says that nothing can reach the former segment (or is dead): close the sender, end what waited for it."""
        if pair.sender is not None:
            pair.sender.close()
            pair.sender = None
            if self.journal is not None:
                self.journal.closed(pair.incarnation.hex(), gone)
        pair.writes.clear()
        for key, record in list(self._records.items()):
            if record.pair is pair and record.machine.state in _TOUCHED:
                self._perform(key, record, record.machine.fenced(reason))

    def lost(self, source: Connection, why: str = "is gone") -> None:
        pair = self._pairs.get(source)
        if pair is None:
            super().lost(source, why)
            return
        self.counters.peers_lost += 1
        if self.journal is not None:
            self.journal.lost(pair.incarnation.hex(), why)
        reason = f"decode worker {pair.name} {why}"
        self.send(pair.asked_by, None, m.Paired(pair.name, reason, pair.incarnation))
        self._unpair(pair, reason)

    def gone(self, source: Connection) -> None:
        """The decode worker's process has ended, or another incarnation took its name: nothing of it comes back."""
        pair = self._pairs.get(source)
        if pair is not None:
            self.lost(source)
            self._drop_segment(pair, f"decode worker {pair.name} is gone", gone=True)
            del self._pairs[source]

    # -------------------------------------------------------------------- tickets

    def _take(self, key: Key, job: Job, submit: m.Submit) -> Refused | None:
        pair = next((self._pairs[c] for c in self._up if self._pairs[c].name == submit.peer), None)
        if pair is None:
            return Refused("no_pair", f"prefill worker {self.info.worker} is not paired with {submit.peer!r}")
        ended = self._ended.get(key)
        if isinstance(ended, Completed):
            return Refused("duplicate_attempt", f"attempt {key} has ended here already")
        if ended is not None:  # decode's abort overtook the request: its cause is the first one
            self._end(key, ended)
            return None
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = self._new_record(key, pair)
        elif record.pair is not pair:
            return Refused("duplicate_attempt", f"attempt {key} was granted by another decode worker")
        elif record.job is not None:
            return Refused("duplicate_attempt", f"attempt {key} has been here already")
        # Output tokens of an earlier attempt are for decode: what it makes of them has to have the bits of the first time.
        record.job = replace(job, tokens=job.tokens[: job.prompt])
        pages = self.engine.pool.geometry.pages_for(job.prompt)
        self._perform(key, record, record.machine.submitted(job.prompt, pages))
        return None

    def _cancel(self, key: Key, cancel: m.Cancel) -> None:
        record = self._records.get(key)
        if record is None or cancel.choice is not None:
            return
        if cancel.drain and record.machine.state in (State.SENDING, State.COMPLETE):
            return  # the transfer finishes; decode ends its half after the first token
        if record.machine.state in ACTIVE:
            self._perform(key, record, record.machine.abort(Aborted(cancel.code, cancel.reason)))

    def _new_record(self, key: Key, pair: Pair) -> Record:
        machine = PrefillHandoff(key)
        if self.journal is not None:
            self.journal.begins(machine, pair.incarnation.hex())
        return Record(machine, pair, Nudge(self.clock()))

    def _from_decode(self, pair: Pair, key: Key, body: m.Body) -> None:
        record = self._records.get(key)
        if record is None:
            self._about_unknown(pair, key, body)
            return
        if record.pair is not pair:
            self.counters.messages_rejected += 1
            return
        record.nudge.heard(self.clock())
        self._perform(key, record, record.machine.received(body))  # type: ignore[arg-type]

    def _about_unknown(self, pair: Pair, key: Key, body: m.Body) -> None:
        """A ticket that is not here: it has ended, or its request has not come yet, or it is nobody's."""
        answer = at_prefill(self._ended.get(key), body)  # type: ignore[arg-type]
        if answer.remember is not None:
            self._remember(key, answer.remember)
        if self.journal is not None and not answer.begin:
            self.journal.unknown(key, pair.incarnation.hex(), body, answer.send)  # type: ignore[arg-type]
        for message in answer.send:
            self.send(pair.connection, key, message)
        if answer.begin:
            self._records[key] = self._new_record(key, pair)
            self._perform(key, self._records[key], self._records[key].machine.received(body))  # type: ignore[arg-type]
        self.counters.messages_stale += answer.stale

    def _other(self, event: Event) -> None:
        record = self._records.get(event.key)
        if record is None or record.outcome is not None:  # it may have ended by an event of this very step
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
        elif record.machine.state in ACTIVE:
            self._perform(key, record, record.machine.abort(failure))

    # ----------------------------------------------------------------------- work

    @property
    def waiting(self) -> bool:
        return any(pair.writes for pair in self._pairs.values())

    def tick(self) -> bool:
        worked = False
        for pair in list(self._pairs.values()):
            worked |= self._poll_writes(pair)
        now = self.clock()
        if self._look.due(now):
            for key, record in list(self._records.items()):
                if record.pair.connection in self._up and record.nudge.due(now):
                    self._perform(key, record, _quietly(record.machine))
        return super().tick() or worked

    def _poll_writes(self, pair: Pair) -> bool:
        if pair.sender is None or not pair.writes:
            return False
        ended = pair.sender.poll()
        for written in ended:
            key, batch = pair.writes.pop(written.batch)
            if self.journal is not None:
                self.journal.written(key, batch, written.ok, written.stopped)
            record = self._records.get(key)
            if record is not None:
                self._perform(key, record, record.machine.wrote(batch, written.ok, written.stopped))
        return bool(ended)

    # -------------------------------------------------------------------- actions

    def _perform(self, key: Key, record: Record, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendMessage(message=message):
                    self.send(record.pair.connection, key, message)
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
                    record.sending = []
                case Report(outcome=outcome):
                    record.outcome = outcome
                    if not isinstance(outcome, Completed):
                        self.engine.cancel(key)
                        if isinstance(outcome, Failed) or outcome.code == "kv_integrity":
                            self.engine.withhold(record.pages)  # nobody is offered what failed
                    self._end(key, outcome)
                case Forget():
                    self._forget(key, record)
                case _:
                    raise AssertionError(f"{action} is not for prefill")
        if record.outcome is not None and key in self._records:
            self.releases.defer(key, self.clock())

    def _forget(self, key: Key, record: Record) -> None:
        self.counters.messages_stale += record.machine.stale
        self.releases.end(key, fenced=record.pair.sender is None, now=self.clock())
        del self._records[key]
        self._remember(key, record.outcome or UNKNOWN)

    def _write(self, key: Key, record: Record, batch: int, pages: list[tuple[int, int]]) -> None:
        pair, memory = record.pair, self.engine.pool.memory
        assert pair.sender is not None
        pair.batches += 1
        pair.writes[pair.batches] = (key, batch)
        if self.journal is not None:
            self.journal.writes(key, batch, [(page, int(record.pages[page]), slot) for page, slot in pages])
        pair.sender.write(pair.batches, [(memory[record.pages[page]], slot) for page, slot in pages])
        self._poll_writes(pair)  # shared memory has written already

    def _remember(self, key: Key, outcome: Outcome) -> None:
        self._ended[key] = outcome
        while len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)

    def stats(self) -> dict[str, float]:
        stale = sum(r.machine.stale for r in self._records.values())
        states = [r.machine.state for r in self._records.values()]
        return super().stats() | {
            "handoffs_open": len(self._records),
            "pages_sending": self.engine.pool.holds(Kind.SEND),
            "messages_stale": self.counters.messages_stale + stale,
            "writes_in_flight": sum(len(p.writes) for p in self._pairs.values()),
            "writes_in_doubt": states.count(State.STUCK),
        }


def _quietly(machine: PrefillHandoff) -> list[Action]:
    """Nudge where there is something to say again; waiting for our own engine or the gateway is no reason."""
    return machine.nudge() if machine.state in (State.SENDING, State.COMPLETE) else []
