"""The decode worker: reserves pages, has them filled through landing slots, verifies, and streams tokens.

Only the landing segments, one for each prefill peer, can be written from outside. A page is copied slot -> pool as a
block, then the page in the pool is what is hashed; only a page that verified gets its tag, and only a request whose
pages are all tagged enters the batch.

The one thing to know about ends: pages of our pool are ours alone and go back at once. Slots that a peer may still write
into stay with their ticket until the peer says *drained* or its segment is fenced; a segment that was fenced is thrown
away, and a peer that is still there gets a new one.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import msgspec
import numpy as np

from hermetic.engine.sequence import Event, First, Job, Reserved
from hermetic.handoff.actions import Action, CloseLeases, Copy, Enter, Forget, Report
from hermetic.handoff.actions import Send as SendMessage
from hermetic.handoff.decode import OPEN, DecodeHandoff, State
from hermetic.handoff.messages import Key, Message
from hermetic.handoff.outcome import Aborted, Completed, Failed, Refused
from hermetic.handoff.unknown import UNKNOWN, at_decode
from hermetic.kernels.numba_cpu import ALONE
from hermetic.kv.slots import Slots
from hermetic.transport.base import Receiver, Transport, TransportError
from hermetic.worker import messages as m
from hermetic.worker.core import Connection, Parts, Send, Worker, difference
from hermetic.worker.timers import LOOK_SECONDS, Every, Nudge
from hermetic.worker.wire import host_id

log = logging.getLogger("hermetic.worker")

LANDING_SLOTS = 64  # for each peer
PAGES_A_ROUND = 16  # copied and verified between two steps at most, so that landing does not stall decoding
DRAIN_SECONDS = 30.0  # how long a peer has to say *drained*
ENTERED_KEPT = 65536  # tickets of which more may be said when they are over here: an ack or abort was lost
_WAITING = (State.DRAINING, State.QUARANTINED)
_firsts = msgspec.msgpack.Decoder(tuple[First, ...])


@dataclass(eq=False)
class Peer:
    """A prefill worker, in one incarnation, that may write into our slots; it outlives its sessions.

    `tickets` are in the order in which they wait for slots."""

    info: m.WorkerInfo
    connection: Connection
    receiver: Receiver
    slots: Slots
    segment: int = 0
    tickets: deque[Key] = field(default_factory=deque)
    unfenced: bool = False  # a fence was asked for and said "not yet"


@dataclass(eq=False)
class Record:
    """One ticket and attempt here, from its reservation until nothing is held for its handoff."""

    peer: Peer
    nudge: Nudge
    machine: DecodeHandoff | None = None  # None until the pages are reserved
    leaving: m.Cancel | None = None  # to be cancelled after its first token


@dataclass
class LandingCounters:
    """What landed and how it was checked."""

    pages_landed: int = 0
    tiles_verified_landing: int = 0
    requests_verified_landing: int = 0
    pages_refused_landing: int = 0
    resends: int = 0
    bytes_landed: int = 0
    slots_fenced: int = 0
    fences_total: int = 0


class DecodeWorker(Worker):
    """One engine in the decode role and a handoff machine for each ticket that is landing, or waits to be drained."""

    def __init__(
        self,
        parts: Parts,
        send: Send,
        transport: Transport,
        verify_landing: bool,
        slots: int = LANDING_SLOTS,
        drain_seconds: float = DRAIN_SECONDS,
    ) -> None:
        super().__init__(parts, send)
        self._transport = transport
        self._verify, self._slot_count, self._drain_seconds = verify_landing, slots, drain_seconds
        self._peers: dict[Connection, Peer] = {}  # those with a session
        self._silent: list[Peer] = []  # without one, and slots that are not proven safe
        self._records: dict[Key, Record] = {}
        self._copies: deque[tuple[Key, Copy]] = deque()
        self._entered: OrderedDict[Key, None] = OrderedDict()
        self._over: OrderedDict[Key, None] = OrderedDict()  # tickets that ended here without entering
        self._complained: set[tuple[bytes, str]] = set()
        self._leaving: dict[Key, m.Cancel] = {}  # entered, to be cancelled after the first token
        self._segments = 0
        self._look = Every(LOOK_SECONDS)
        self.landing = LandingCounters()

    # ------------------------------------------------------------------- pairing

    def handle(self, source: Connection, key: Key | None, body: m.Body) -> None:
        match body:
            case m.Hello(info=m.WorkerInfo() as info, to=to):
                if to in (b"", self.info.incarnation):
                    self._greet(source, info)
                else:  # on a line to our predecessor; answering it would take the pair from the line that is ours
                    self.counters.messages_stale += 1
                    self.send(source, None, m.Rejected(f"{self.info.worker} has been restarted"))
            case Message() if source in self._peers and key is not None:
                self._from_prefill(self._peers[source], key, body)
            case _:
                super().handle(source, key, body)

    def _greet(self, source: Connection, info: m.WorkerInfo) -> None:
        """Pair with a prefill worker, if its pages would be ours; say what differs if not."""
        problem = difference(self.info, info)
        if info.role != "prefill":
            problem = f"a {info.role} worker cannot be paired with this decode worker"
        if problem is not None:
            log.warning("%s is refused as a peer: %s", info.worker, problem)
            self.send(source, None, m.Rejected(problem))
            return
        for other in [c for c, p in self._peers.items() if p.info.worker == info.worker]:
            self.lost(other, "has greeted anew")  # its former session or incarnation: a name is one worker
        peer = next((p for p in self._silent if p.info.incarnation == info.incarnation), None)
        if peer is not None:  # it was only silent, and nothing but its death could have fenced it
            self._silent.remove(peer)
            peer.connection = source
        else:
            try:
                receiver = self._new_receiver(info)
            except TransportError as error:
                self.send(source, None, m.Rejected(str(error)))
                return
            peer = Peer(info, source, receiver, Slots(self._slot_count), self._segments)
            self._note_segment(peer)
        self._peers[source] = peer
        self.send(source, None, m.Welcome(self.info, peer.receiver.descriptor(), peer.segment))
        for key, record in self._of(peer):
            if record.machine is not None:
                record.nudge.heard(self.clock())  # it is given time to answer
                self._perform(key, record, record.machine.nudge())

    def _new_receiver(self, info: m.WorkerInfo) -> Receiver:
        # A peer on this host is known by its process, one elsewhere by the address that it says its data comes from.
        pid = info.pid if info.host == host_id() else None
        receiver = self._transport.receiver(self._slot_count, info.geometry.stride, pid, info.source or None)
        self._segments += 1
        return receiver

    def lost(self, source: Connection, why: str = "is gone") -> None:
        """The peer's session is over. Its slots come back when it drains after all, or is proven unable to write."""
        peer = self._peers.pop(source, None)
        if peer is None:
            super().lost(source, why)
            return
        self.counters.peers_lost += 1
        if self.journal is not None:
            self.journal.lost(peer.info.incarnation.hex(), why)
        reason = f"prefill worker {peer.info.worker} {why}"
        for key, record in self._of(peer):
            if record.machine is None:
                self.engine.cancel(key)
                del self._records[key]
                self._end(key, Failed("worker_lost", reason))
            else:
                if record.machine.state in OPEN:
                    self._perform(key, record, record.machine.abort(Failed("worker_lost", reason)))
                self._overdue(key, record)
        if not self._fence(peer, reason):
            self._silent.append(peer)

    def _fence(self, peer: Peer, reason: str) -> bool:
        """Prove that nothing of the peer can arrive any more, and throw the segment away. False if that cannot be proven."""
        if not peer.receiver.fence():
            return False
        self.landing.fences_total += 1
        if self.journal is not None:
            self.journal.has_fenced(peer.segment)
        self.landing.slots_fenced += peer.slots.count - peer.slots.free
        for key, record in self._of(peer):
            if record.machine is not None:
                self._perform(key, record, record.machine.fenced(reason), fenced=True)
        peer.slots.fence()
        peer.receiver.close()
        return True

    def _overdue(self, key: Key, record: Record) -> None:
        """*Drained* is not to be expected, or did not come in time: slots go to quarantine."""
        machine = record.machine
        if machine is not None and machine.state is State.DRAINING:
            self.releases.quarantined += 1
            self._perform(key, record, machine.overdue())

    def _of(self, peer: Peer) -> list[tuple[Key, Record]]:
        return [(key, record) for key, record in self._records.items() if record.peer is peer]

    # -------------------------------------------------------------------- tickets

    def _take(self, key: Key, job: Job, submit: m.Submit) -> Refused | None:
        peer = next((p for p in self._peers.values() if p.info.worker == submit.peer), None)
        if peer is None:
            return Refused("no_pair", f"decode worker {self.info.worker} is not paired with {submit.peer!r}")
        if key in self._records or key in self._entered or key in self._over:
            return Refused("duplicate_attempt", f"attempt {key} has been here already")
        self._records[key] = Record(peer, Nudge(self.clock()))
        self.engine.submit(job)
        return None

    def _cancel(self, key: Key, cancel: m.Cancel) -> None:
        record = self._records.get(key)
        if cancel.choice is not None:
            if record is None:
                self.engine.cancel(key, cancel.choice)
        elif record is None:
            super()._cancel(key, cancel)
        elif record.machine is None:
            del self._records[key]
            super()._cancel(key, cancel)
        elif cancel.drain and record.machine.state is State.LANDING:
            record.leaving = cancel
        elif record.machine.state in OPEN:
            self._perform(key, record, record.machine.abort(Aborted(cancel.code, cancel.reason)))

    def _from_prefill(self, peer: Peer, key: Key, body: m.Body) -> None:
        record = self._records.get(key)
        if record is not None and record.machine is not None and record.peer is peer:
            record.nudge.heard(self.clock())
            self._perform(key, record, record.machine.received(body))  # type: ignore[arg-type]
            return
        self.counters.messages_stale += 1
        if record is not None:
            return
        answer = at_decode(key in self._entered, body)  # type: ignore[arg-type]
        if self.journal is not None:
            self.journal.unknown(key, peer.info.incarnation.hex(), body, answer.send)  # type: ignore[arg-type]
        if UNKNOWN in answer.send:
            self._complain_of_unknown(peer, key, body)
        for message in answer.send:
            self.send(peer.connection, key, message)

    def _complain_of_unknown(self, peer: Peer, key: Key, body: Message) -> None:
        """Once for each peer and kind of message; what crossed our own abort on the way is nobody's fault."""
        what = (peer.info.incarnation, type(body).__name__)
        if key not in self._over and what not in self._complained:
            self._complained.add(what)
            log.warning("%s of %s for the unknown attempt %s (said once)", what[1], peer.info.worker, key)

    def _other(self, event: Event) -> None:
        match event:
            case Reserved(key=key):
                record = self._records[key]
                job = self.engine.reserved(key).job
                pages = self.engine.pool.geometry.pages_for(job.prompt)
                record.machine = DecodeHandoff(key, job.prompt, pages, record.peer.slots)
                if self.journal is not None:
                    self.journal.begins(record.machine, record.peer.info.incarnation.hex())
                record.nudge = Nudge(self.clock())
                record.peer.tickets.append(key)
                self._perform(key, record, record.machine.reserved())

    def _failed(self, key: Key, failure: Failed) -> None:
        record = self._records.get(key)
        if record is None or record.machine is None:
            self._records.pop(key, None)
            self._end(key, failure)
        elif record.machine.state in OPEN:
            self._perform(key, record, record.machine.abort(failure))

    # ----------------------------------------------------------------------- work

    def tick(self) -> bool:
        """Land a bounded number of pages, hand out slots, then one step of the engine."""
        worked = self._land()
        self._share_slots()
        now = self.clock()
        if self._look.due(now):
            self._look_at_waits(now)
        worked |= super().tick()
        for key in list(self._leaving):
            # Its first token was in what this step said; now its client has had what it was to have.
            super()._cancel(key, self._leaving.pop(key))
        return worked

    def _look_at_waits(self, now: float) -> None:
        """What time alone brings: things to say again, drains that are overdue, silent peers that have died."""
        late: dict[Peer, None] = {}  # in an order that is the same in every process
        for key, record in list(self._records.items()):
            machine = record.machine
            if machine is None:
                continue
            since = self.releases.since(key)
            if since is not None and now - since > self._drain_seconds and machine.state is State.DRAINING:
                log.warning("attempt %s did not drain within %.0f s", key, self._drain_seconds)
                self._overdue(key, record)
                late[record.peer] = None
            due = record.peer.connection in self._peers and record.nudge.due(now)
            if machine.state is State.QUARANTINED and (due or record.peer.unfenced):
                late[record.peer] = None  # still no answer, or no fence was possible yet
            if due:
                self._perform(key, record, machine.nudge())
        for peer in late:
            if self._peers.get(peer.connection) is peer:  # a silent one is asked below
                self._replace(peer)
        for peer in list(self._silent):
            if self._fence(peer, f"prefill worker {peer.info.worker} has ended"):
                self._silent.remove(peer)

    def _replace(self, peer: Peer) -> None:
        """The peer is there and does not drain: fence its segment, if its transport can, and give it a new one."""
        reason = f"prefill worker {peer.info.worker} did not drain within {self._drain_seconds:g} s"
        peer.unfenced = not self._fence(peer, reason)
        if peer.unfenced:
            return
        try:
            peer.receiver = self._new_receiver(peer.info)
        except TransportError as error:
            log.error("%s cannot be given a new segment: %s", peer.info.worker, error)
            del self._peers[peer.connection]
            self.send(peer.connection, None, m.Rejected(str(error)))
            return
        peer.slots, peer.segment, peer.tickets = Slots(self._slot_count), self._segments, deque()
        self._note_segment(peer)
        self.send(peer.connection, None, m.Welcome(self.info, peer.receiver.descriptor(), peer.segment))

    def _note_segment(self, peer: Peer) -> None:
        if self.journal is not None:
            self.journal.has_segment(peer.slots, peer.info.incarnation.hex(), peer.segment)

    def _land(self) -> bool:
        """Land up to PAGES_A_ROUND pages, few at a time: they are hashed while they are still in the cache, by this thread."""
        left = min(PAGES_A_ROUND, len(self._copies))
        worked = left > 0
        few = max(1, ALONE // self.engine.pool.geometry.stride)
        while left > 0 and self._copies:
            self._land_few([self._copies.popleft() for _ in range(min(few, left, len(self._copies)))])
            left -= few
        return worked

    def _land_few(self, round_: list[tuple[Key, Copy]]) -> None:
        """Copy these pages out of their slots, hash the copies, tag those that are what we expect."""
        pool, size = self.engine.pool, self.engine.size
        pages = np.empty(len(round_), np.int32)
        fills = np.empty(len(round_), np.int32)
        words, binds = np.empty(len(round_), np.uint64), np.empty(len(round_), np.uint64)
        lineages = np.empty((len(round_), 2), np.uint64)
        for i, (key, copy) in enumerate(round_):
            seq, page = self.engine.reserved(key), copy.page
            pages[i], fills[i] = seq.pages[page], min(size, seq.job.prompt - page * size)
            words[i], binds[i], lineages[i] = (
                seq.chain.words[page],
                seq.chain.binds[page],
                seq.chain.lineages[page],
            )
            np.copyto(pool.memory[pages[i]], self._records[key].peer.receiver.memory[copy.slot.slot])
        if self.journal is not None:
            self.journal.copies(round_, pages)
        good = self._verify_landed(pages, fills, words, binds)
        if self.journal is not None:
            self.journal.verified(round_, pages, good)
        pool.set_tags(pages[good], lineages[good], fills[good])
        self.landing.pages_landed += int(good.sum())
        self.landing.pages_refused_landing += int((~good).sum())
        self.landing.bytes_landed += len(round_) * pool.geometry.stride
        for (key, copy), ok in zip(round_, good.tolist(), strict=True):
            record = self._records.get(key)
            if record is not None and record.machine is not None:
                self._perform(key, record, record.machine.copied(copy.page, ok))

    def _verify_landed(
        self, pages: np.ndarray, fills: np.ndarray, words: np.ndarray, binds: np.ndarray
    ) -> np.ndarray:
        if not self._verify:
            return np.ones(len(pages), np.bool_)
        tiles = self.engine.runner.kernels.verify_pages(self.engine.pool.memory, pages, fills, words, binds)
        self.landing.tiles_verified_landing += tiles.size
        return np.asarray(tiles.all((1, 2)))

    def _share_slots(self) -> None:
        """Give free slots to the tickets that can use them, one turn each."""
        for peer in self._peers.values():
            for _ in range(len(peer.tickets)):
                key = peer.tickets.popleft()
                record = self._records.get(key)
                if record is None or record.machine is None:
                    continue
                peer.tickets.append(key)
                if peer.slots.free and record.machine.wants():
                    self._perform(key, record, record.machine.credit(peer.slots.free))

    # -------------------------------------------------------------------- actions

    def _perform(self, key: Key, record: Record, actions: list[Action], fenced: bool = False) -> None:
        for action in actions:
            match action:
                case SendMessage(message=message):
                    self.send(record.peer.connection, key, message)
                case Copy():
                    self._copies.append((key, action))
                case Enter(state=state):
                    self._enter(key, record, state)
                case CloseLeases():
                    self.engine.cancel(key)
                case Report(outcome=Completed()):
                    pass  # of the handoff; the request goes on in the engine
                case Report(outcome=outcome):
                    self._end(key, outcome)
                    self._abandon(key, record)
                case Forget():
                    self._forget(key, record, fenced)
                case _:
                    raise AssertionError(f"{action} is not for decode")
        if key in self._records and record.machine is not None and record.machine.state in _WAITING:
            self.releases.defer(key, self.clock())

    def _enter(self, key: Key, record: Record, state: bytes) -> None:
        self._entered[key] = None
        while len(self._entered) > ENTERED_KEPT:
            self._entered.popitem(last=False)
        try:
            firsts = _firsts.decode(state)
        except msgspec.MsgspecError:
            self.engine.fail(key, "kv_integrity", "the state that came with the pages cannot be read")
            return
        self.landing.requests_verified_landing += self._verify
        self.engine.enter(key, firsts)
        if record.leaving is not None:
            self._leaving[key] = record.leaving

    def _abandon(self, key: Key, record: Record) -> None:
        """Our own copies of this ticket that are still queued will not be made."""
        assert record.machine is not None
        mine = [c for k, c in self._copies if k == key]
        self._copies = deque((k, c) for k, c in self._copies if k != key)
        for copy in mine:
            self._perform(key, record, record.machine.copied(copy.page, good=False))

    def _forget(self, key: Key, record: Record, fenced: bool) -> None:
        if self._records.pop(key, None) is None:
            return
        assert record.machine is not None
        if key not in self._entered:
            self._over[key] = None
            while len(self._over) > ENTERED_KEPT:
                self._over.popitem(last=False)
        self.landing.resends += record.machine.resends
        self.counters.messages_stale += record.machine.stale
        self.releases.end(key, fenced, self.clock())

    def stats(self) -> dict[str, float]:
        peers = [*self._peers.values(), *self._silent]
        slots = [p.slots.counts() for p in peers]
        states = [r.machine.state for r in self._records.values() if r.machine is not None]
        return super().stats() | vars(self.landing) | {
            "handoffs_open": len(self._records),
            "drains_outstanding": sum(state in _WAITING for state in states),
            "peers_silent": len(self._silent),
            "slots_total": sum(p.slots.count for p in peers),
            "slots_free": sum(c.free for c in slots),
            "slots_granted": sum(c.granted for c in slots),
            "slots_quarantined": sum(c.quarantined for c in slots),
        }  # fmt: skip


__all__ = ["LANDING_SLOTS", "PAGES_A_ROUND", "DecodeWorker"]
