"""The decode worker: reserves pages, has them filled through landing slots, verifies, and streams tokens.

Only the landing segments, one for each prefill peer, can be written from outside. A page is copied slot -> pool as a
block, then the page in the pool is what is hashed; only a page that verified gets its tag, and only a request whose
pages are all tagged enters the batch.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec
import numpy as np

from hermetic.engine.sequence import Event, First, Job, Reserved
from hermetic.handoff.actions import Action, CloseLeases, Copy, Enter, Report
from hermetic.handoff.actions import Send as SendMessage
from hermetic.handoff.decode import DecodeHandoff
from hermetic.handoff.messages import Key, Message
from hermetic.handoff.outcome import Aborted, Completed, Failed, Refused
from hermetic.kv.slots import Slots
from hermetic.transport.base import Receiver, TransportError
from hermetic.transport.shm import ShmReceiver
from hermetic.worker import messages as m
from hermetic.worker.core import Connection, Parts, Send, Worker, difference

LANDING_SLOTS = 64  # for each peer
PAGES_A_ROUND = 16  # copied and verified between two steps at most, so that landing does not stall decoding
_firsts = msgspec.msgpack.Decoder(tuple[First, ...])


@dataclass
class Peer:
    """A prefill worker that may write into our slots. `tickets` in the order in which they wait for slots."""

    info: m.WorkerInfo
    connection: Connection
    receiver: Receiver
    slots: Slots
    tickets: deque[Key] = field(default_factory=deque)


@dataclass
class Record:
    """One ticket and attempt here, from its reservation to the end of its handoff."""

    peer: Peer
    machine: DecodeHandoff | None = None  # None until the pages are reserved


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


class DecodeWorker(Worker):
    """One engine in the decode role and a handoff machine for each ticket that is landing."""

    def __init__(self, parts: Parts, send: Send, verify_landing: bool, slots: int = LANDING_SLOTS) -> None:
        super().__init__(parts, send)
        self._verify, self._slot_count = verify_landing, slots
        self._peers: dict[Connection, Peer] = {}
        self._records: dict[Key, Record] = {}
        self._copies: deque[tuple[Key, Copy]] = deque()
        self.landing = LandingCounters()

    # ------------------------------------------------------------------- pairing

    def handle(self, source: Connection, key: Key | None, body: m.Body) -> None:
        match body:
            case m.Hello(info=m.WorkerInfo() as info):
                self._greet(source, info)
            case Message() if source in self._peers and key is not None:
                self._from_prefill(self._peers[source], key, body)
            case _:
                super().handle(source, key, body)

    def _greet(self, source: Connection, info: m.WorkerInfo) -> None:
        """Pair with a prefill worker, if its pages would be ours; say what differs if not."""
        problem = difference(self.info, info)
        if info.role != "prefill":
            problem = f"a {info.role} worker cannot be paired with this decode worker"
        if problem is None:
            try:
                receiver = ShmReceiver(self._slot_count, info.geometry.stride, info.pid)
            except TransportError as error:
                problem = str(error)
        if problem is not None:
            self.send(source, None, m.Rejected(problem))
            return
        self._peers[source] = Peer(info, source, receiver, Slots(self._slot_count))
        self.send(source, None, m.Welcome(self.info, receiver.descriptor(), self._slot_count))

    def lost(self, source: Connection) -> None:
        """The peer's connection is gone for good. Its slots come back only if its process is proven dead."""
        peer = self._peers.get(source)
        if peer is None:
            super().lost(source)
            return
        reason = f"prefill worker {peer.info.worker} is gone"
        fenced = peer.receiver.fence()
        for key, record in list(self._records.items()):
            if record.peer is not peer:
                continue
            if record.machine is None:
                self.engine.cancel(key)
                del self._records[key]
                self._end(key, Failed("worker_lost", reason))
            else:
                self._perform(
                    key, record, record.machine.fenced(reason) if fenced else record.machine.lost(reason)
                )
        if fenced:
            self.landing.slots_fenced += peer.slots.fence()
            peer.receiver.close()
            del self._peers[source]

    # -------------------------------------------------------------------- tickets

    def _take(self, key: Key, job: Job, submit: m.Submit) -> Refused | None:
        peer = next((p for p in self._peers.values() if p.info.worker == submit.peer), None)
        if peer is None:
            return Refused("no_pair", f"decode worker {self.info.worker} is not paired with {submit.peer!r}")
        self._records[key] = Record(peer)
        self.engine.submit(job)
        return None

    def _cancel(self, key: Key, cancel: m.Cancel) -> None:
        record = self._records.get(key)
        if cancel.choice is not None:
            if record is None:
                self.engine.cancel(key, cancel.choice)
        elif record is not None and record.machine is not None:
            self._perform(key, record, record.machine.abort(Aborted(cancel.code, cancel.reason)))
        else:
            self._records.pop(key, None)
            super()._cancel(key, cancel)

    def _from_prefill(self, peer: Peer, key: Key, body: m.Body) -> None:
        record = self._records.get(key)
        if record is None or record.machine is None or record.peer is not peer:
            self.counters.messages_stale += 1
            return
        self._perform(key, record, record.machine.received(body))  # type: ignore[arg-type]

    def _other(self, event: Event) -> None:
        match event:
            case Reserved(key=key):
                record = self._records[key]
                job = self.engine.reserved(key).job
                pages = self.engine.pool.geometry.pages_for(len(job.tokens))
                record.machine = DecodeHandoff(key, len(job.tokens), pages, record.peer.slots)
                record.peer.tickets.append(key)
                self._perform(key, record, record.machine.reserved())

    def _failed(self, key: Key, failure: Failed) -> None:
        record = self._records.get(key)
        if record is not None and record.machine is not None:
            self._perform(key, record, record.machine.abort(failure))
        else:
            self._end(key, failure)

    # ----------------------------------------------------------------------- work

    def tick(self) -> bool:
        """Land a bounded number of pages, hand out slots, then one step of the engine."""
        worked = self._land()
        self._share_slots()
        return super().tick() or worked

    def _land(self) -> bool:
        """Copy up to PAGES_A_ROUND pages out of their slots, hash the copies, tag those that are what we expect."""
        if not self._copies:
            return False
        round_ = [self._copies.popleft() for _ in range(min(PAGES_A_ROUND, len(self._copies)))]
        pool, size = self.engine.pool, self.engine.size
        pages = np.empty(len(round_), np.int32)
        fills = np.empty(len(round_), np.int32)
        words, binds = np.empty(len(round_), np.uint64), np.empty(len(round_), np.uint64)
        lineages = np.empty((len(round_), 2), np.uint64)
        for i, (key, copy) in enumerate(round_):
            seq, page = self.engine.reserved(key), copy.page
            pages[i], fills[i] = seq.pages[page], min(size, len(seq.tokens) - page * size)
            words[i], binds[i], lineages[i] = (
                seq.chain.words[page],
                seq.chain.binds[page],
                seq.chain.lineages[page],
            )
            np.copyto(pool.memory[pages[i]], self._records[key].peer.receiver.memory[copy.slot.slot])
        good = self._verify_landed(pages, fills, words, binds)
        pool.set_tags(pages[good], lineages[good], fills[good])
        self.landing.pages_landed += int(good.sum())
        self.landing.pages_refused_landing += int((~good).sum())
        self.landing.bytes_landed += len(round_) * pool.geometry.stride
        for (key, copy), ok in zip(round_, good.tolist(), strict=True):
            record = self._records.get(key)
            if record is not None and record.machine is not None:
                self._perform(key, record, record.machine.copied(copy.page, ok))
        return True

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

    def _perform(self, key: Key, record: Record, actions: list[Action]) -> None:
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
                    self._close(key, record)
                case Report(outcome=Completed()):
                    self._close(key, record)  # of the handoff; the request goes on in the engine
                case Report(outcome=outcome):
                    self._abandon(key, record)
                    self._end(key, outcome)
                case _:
                    raise AssertionError(f"{action} is not for decode")

    def _enter(self, key: Key, record: Record, state: bytes) -> None:
        try:
            firsts = _firsts.decode(state)
        except msgspec.MsgspecError:
            self.engine.fail(key, "kv_integrity", "the state that came with the pages cannot be read")
            return
        self.landing.requests_verified_landing += self._verify
        self.engine.enter(key, firsts)

    def _abandon(self, key: Key, record: Record) -> None:
        """Our own copies of this ticket that are still queued will not be made."""
        assert record.machine is not None
        mine = [c for k, c in self._copies if k == key]
        self._copies = deque((k, c) for k, c in self._copies if k != key)
        for copy in mine:
            self._perform(key, record, record.machine.copied(copy.page, good=False))

    def _close(self, key: Key, record: Record) -> None:
        if self._records.pop(key, None) is not None and record.machine is not None:
            self.landing.resends += record.machine.resends
            self.counters.messages_stale += record.machine.stale

    def stats(self) -> dict[str, float]:
        slots = [p.slots.counts() for p in self._peers.values()]
        return super().stats() | vars(self.landing) | {
            "handoffs_open": len(self._records),
            "slots_total": sum(p.slots.count for p in self._peers.values()),
            "slots_free": sum(c.free for c in slots),
            "slots_granted": sum(c.granted for c in slots),
            "slots_quarantined": sum(c.quarantined for c in slots),
        }  # fmt: skip


__all__ = ["LANDING_SLOTS", "PAGES_A_ROUND", "DecodeWorker"]
