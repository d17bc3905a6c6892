"""What a worker does, without sockets: messages in, messages out, and a `tick` that moves work.

The process around it (process.py) carries bytes; tests and the lab drive the same objects by hand. One worker owns one
engine, and for a handoff the machines of `hermetic.handoff`, whose actions it performs in order.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hermetic.engine.engine import Engine
from hermetic.engine.sequence import Done, Emit, Event, Job, JobDone, JobFailed, Preempted
from hermetic.handoff.messages import Key
from hermetic.handoff.outcome import Aborted, Completed, Failed, Outcome, Refused
from hermetic.handoff.trace import Journal, Recorder
from hermetic.kv.geometry import differences
from hermetic.kv.lineage import Hasher, Scope
from hermetic.worker import messages as m
from hermetic.worker.releases import Releases

Connection = bytes
"""Opaque id of whoever is at the other end of a connection."""

Send = Callable[[Connection, Key | None, m.Body], None]


@dataclass
class WorkerCounters:
    """What came in and could not be used, and how work ended."""

    messages_rejected: int = 0  # not decodable, of another version or from nobody we know
    peers_refused: int = 0  # connections without the cluster's keys
    messages_stale: int = 0  # for a session, ticket, attempt or slot use that is over, or said before
    messages_resent: int = 0  # said again because no acknowledgement came
    peers_lost: int = 0  # workers or gateways that ended or fell silent
    refused: int = 0
    completed: int = 0
    failed: int = 0
    aborted: int = 0


@dataclass
class Parts:
    """What every worker is made of."""

    info: m.WorkerInfo
    engine: Engine
    hasher: Hasher
    clock: Callable[[], float] = time.monotonic  # seconds; never compared with anybody else's
    counters: WorkerCounters = field(default_factory=WorkerCounters)


class Worker:
    """Common part: hello, submit, cancel, statistics, and relaying what the engine says."""

    def __init__(self, parts: Parts, send: Send) -> None:
        self.info, self.engine, self.counters = parts.info, parts.engine, parts.counters
        self._hasher, self.clock, self.send = parts.hasher, parts.clock, send
        self.releases = Releases()
        self._asked: dict[Key, Connection] = {}  # who submitted each job that has not ended
        self.journal = self._join(Recorder.current)

    def _join(self, recorder: Recorder | None) -> Journal | None:
        """With --trace: what this worker says to the recording."""
        if recorder is None:
            return None
        info = self.info
        journal = recorder.join(
            info.worker, info.role, info.incarnation, info.page_size, info.pages, info.slots
        )
        journal.owns(self.engine.pool)
        return journal

    # ------------------------------------------------------------------ messages

    def handle(self, source: Connection, key: Key | None, body: m.Body) -> None:
        """One message. Anything that does not belong here is counted and dropped."""
        match body:
            case m.Hello(info=None):
                self.send(source, None, m.Welcome(self.info, "", 0))
            case m.Submit() if key is not None:
                self._submit(source, key, body)
            case m.Cancel() if key is not None:
                if self._asked.get(key) == source:
                    self._cancel(key, body)
                else:
                    self.counters.messages_stale += 1
            case m.AskStats():
                self.send(source, None, m.Stats(body.number, self.stats()))
            case _:
                self.counters.messages_rejected += 1

    def lost(self, source: Connection, why: str = "is gone") -> None:
        """A session is over, because the other end has ended, fell silent or forgot it: nobody waits for its answers."""
        self.counters.peers_lost += 1
        for key in [k for k, who in self._asked.items() if who == source]:
            self._cancel(key, m.Cancel("gateway_lost", f"the gateway {why}"))

    @property
    def serving(self) -> bool:
        """Whether somebody waits for an answer."""
        return bool(self._asked)

    @property
    def waiting(self) -> bool:
        """Whether something ends by itself soon (a write in flight): do not sleep for long."""
        return False

    def tick(self) -> bool:
        """Do one round of work. False when there was nothing to do."""
        if not self.engine.busy:
            return False
        self._relay(self.engine.step())
        return True

    # --------------------------------------------------------------- for each role

    def _take(self, key: Key, job: Job, submit: m.Submit) -> Refused | None:
        """Take an admitted job; or refuse it."""
        self.engine.submit(job)
        return None

    def _cancel(self, key: Key, cancel: m.Cancel) -> None:
        if self.engine.cancel(key, cancel.choice) and cancel.choice is None:
            self._end(key, Aborted(cancel.code, cancel.reason))

    def _other(self, event: Event) -> None:
        """An engine event that only one role knows."""

    # --------------------------------------------------------------------- private

    def _submit(self, source: Connection, key: Key, submit: m.Submit) -> None:
        if len(submit.tokens) % 4:
            self.counters.messages_rejected += 1
            return
        tokens = np.frombuffer(submit.tokens, "<i4").astype(np.int64)
        job = Job(
            key,
            tokens,
            submit.prompt,
            submit.params,
            submit.n,
            submit.choice,
            submit.seed,
            self._root(submit),
            submit.age,
        )
        if key in self._asked:
            self.counters.messages_stale += 1
            return
        refusal = self.engine.admit(job)
        if refusal is None:
            self._asked[key] = source  # first: what is taken may end at once, and its end must be told
            refusal = self._take(key, job, submit)
        if refusal is not None:
            self._asked.pop(key, None)
            self.counters.refused += 1
            self.send(source, key, m.Ended(refusal))

    def _root(self, submit: m.Submit) -> bytes:
        info = self.info
        scope = Scope(
            tenant=submit.scope,
            salt=submit.salt,
            model=info.model,
            numeric=info.numeric,
            adapter="",
            layout=info.geometry.fingerprint(),
            position=info.position,
            key_id=info.key_id,
        )
        return self._hasher.root(scope)

    def _relay(self, events: list[Event]) -> None:
        """Tell the gateways what happened; a step's tokens travel in one message to each."""
        tokens: dict[Connection, list[m.TokenOut]] = {}
        rest: list[Event] = []
        for event in events:
            if isinstance(event, Emit):
                source = self._asked.get(event.key)
                if source is not None:
                    out = m.TokenOut(event.key, event.choice, event.token, event.logprob, event.top)
                    tokens.setdefault(source, []).append(out)
            else:
                rest.append(event)
        for source, items in tokens.items():
            self.send(source, None, m.Tokens(tuple(items)))
        for event in rest:
            source = self._asked.get(event.key)
            match event:
                case Done(key=key, choice=choice, reason=reason, stop_token=stop):
                    if source is not None:
                        self.send(source, key, m.ChoiceDone(choice, reason, stop))
                case Preempted(key=key, choice=choice):
                    if source is not None:
                        self.send(source, key, m.Preempted(choice))
                case JobDone(key=key):
                    self._end(key, Completed())
                case JobFailed(key=key, code=code, reason=reason):
                    self._failed(key, Failed(code, reason))
                case _:
                    self._other(event)

    def _failed(self, key: Key, failure: Failed) -> None:
        self._end(key, failure)

    def _end(self, key: Key, outcome: Outcome) -> None:
        """Report how this half ended, once."""
        source = self._asked.pop(key, None)
        if source is None:
            return
        match outcome:
            case Completed():
                self.counters.completed += 1
            case Refused():
                self.counters.refused += 1
            case Failed():
                self.counters.failed += 1
            case Aborted():
                self.counters.aborted += 1
        self.send(source, key, m.Ended(outcome))

    def stats(self) -> dict[str, float]:
        """Counters and gauges, flat."""
        pool, engine = self.engine.pool, self.engine
        pages = pool.counts()
        values: dict[str, float] = {
            "pages_total": pool.count,
            "pages_free": pages.free,
            "pages_leased": pages.leased,
            "pages_quarantined": pages.quarantined,
            "lease_double_closes": pool.counters.double_closes,
            "tag_mismatches": pool.counters.tag_mismatches,
            "pages_quarantined_ever": pool.counters.quarantined_total,
        }
        values |= {f"sequences_{name}": count for name, count in engine.depth().items()}
        for counters in (engine.counters, self.counters):
            values |= {name: float(value) for name, value in vars(counters).items()}
        return values | self.releases.stats()


def numeric_mode(dtype: str) -> str:
    """The scope's name for how numbers are computed: weights, arithmetic and pages."""
    return f"weights={dtype} compute={dtype} kv={dtype}"


def difference(ours: m.WorkerInfo, theirs: m.WorkerInfo) -> str | None:
    """Why two workers cannot be a pair, or None. Every field that goes into a lineage has to agree."""
    found = [
        f"{name}: {getattr(ours, name)} here, {getattr(theirs, name)} there"
        for name in ("model", "numeric", "position", "key_id")
        if getattr(ours, name) != getattr(theirs, name)
    ]
    if ours.role != theirs.role and ours.transport != theirs.transport:
        found.append(f"transport: {ours.transport} here, {theirs.transport} there")
    found += differences(ours.geometry, theirs.geometry)
    return "; ".join(found) or None


__all__ = ["Connection", "Parts", "Send", "Worker", "WorkerCounters", "difference", "numeric_mode"]
