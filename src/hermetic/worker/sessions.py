"""Every session of one worker: with gateways that dial it, with decode workers that it dials, with prefill workers that dial it.

Bytes come in through `take`, go out over lines (`lines.py`), and `keep` does what time asks for; no socket and no clock of
its own, so the process (`process.py`) and the simulator run the same object. A session ends when the other end's process has
ended, is silent for too long, or has forgotten it. The one thing to know: whoever dialled begins the next one, with its next
number; whoever was dialled drops the former one when that comes.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hermetic.handoff.messages import Key
from hermetic.worker import messages as m
from hermetic.worker.core import Connection, Send, Worker
from hermetic.worker.lines import Line, Watch, Wire
from hermetic.worker.link import Link
from hermetic.worker.prefill import PrefillWorker
from hermetic.worker.registration import Registration
from hermetic.worker.timers import Every

LOOK_SECONDS = 0.2  # between two looks at peers' processes and at who is silent
LINKS_SECONDS = 0.02  # between two looks at what links have to repeat
STRANGER_SECONDS = (
    0.5  # a session's first message may be overtaken; one that does not come within this is unknown here
)
STRANGERS = 1024
COMPLAINTS = 1000  # different complaints that are logged; every one is counted
FORGET_SECONDS = 600.0  # a decode worker that does not answer for so long is dialled no more

Clock = Callable[[], float]


@dataclass
class _Session:
    """Where to send, what was said, and whose process is at the other end (None: not known)."""

    line: Line
    link: Link
    watch: Watch | None = None


@dataclass
class _Dialled:
    """A line that we opened: to a decode worker in one incarnation. Its sessions come and go."""

    line: Line
    name: str
    incarnation: bytes
    asked_by: Connection
    up: float  # when it last stood


class Sessions:
    """Builds its worker with `make`, which is given the worker's `send`, and from then on drives all but its `tick`.

    `clock` is the worker's own, monotonic, in seconds from a number that is not negative. `over`: the worker has left its
    gateways and may end."""

    def __init__(
        self,
        make: Callable[[Send], Worker],
        wire: Wire,
        clock: Clock,
        gateways: Iterable[str] = (),
        silent_seconds: float = 30.0,
    ) -> None:
        self._wire, self._clock, self._silent_seconds = wire, clock, silent_seconds
        self._sessions: dict[Connection, _Session] = {}
        self._dialled: dict[Connection, _Dialled] = {}
        self._strangers: OrderedDict[Connection, float] = OrderedDict()
        self._complaints: set[str] = set()
        self.worker = make(self.send)
        self._log = logging.getLogger(f"hermetic.{self.worker.info.worker}")
        self._kept = now = clock()
        self._registration = Registration(self.worker, wire, gateways, self.complain, now, self._log)
        self._look, self._repeat = Every(LOOK_SECONDS), Every(LINKS_SECONDS)

    @property
    def over(self) -> bool:
        return self._registration.over

    def leave(self) -> bool:
        """Ask the gateways to be let go, once. False when nobody needs to be asked, or somebody has been already."""
        return self._registration.leave(self._clock())

    # ------------------------------------------------------------------- in and out

    def take(self, connection: Connection, raw: bytes, answer: Line | None = None) -> None:
        """One message. `connection` is what it was dialled with, or names whoever dialled us; then `answer` is the way back.

        Ids of those who dialled us must not begin with `d` or `g`."""
        now = self._clock()
        try:
            envelope = m.decode(raw)
        except m.ProtocolError as error:
            self.complain(str(error))
            return
        if self._registration.owns(connection):
            self._registration.heard(connection, envelope.body, now)
            return
        session = self._sessions.get(connection)
        if connection in self._dialled:
            if isinstance(envelope.body, m.Reset):
                if session is not None and envelope.session == session.link.session:
                    self._redial(connection, "does not know this session", now)
                return
        elif answer is None:  # came over a line that was closed meanwhile
            self.worker.counters.messages_stale += 1
            return
        elif session is None or envelope.session > session.link.session:
            if envelope.sequence != 1 or not isinstance(envelope.body, m.Hello):
                self._stranger(connection, envelope, answer, now)
                return
            session = self._open(connection, envelope, answer, now)
        assert session is not None
        self._accept(connection, session, envelope, now)

    def _accept(self, connection: Connection, session: _Session, envelope: m.Envelope, now: float) -> None:
        stale = session.link.stale
        for key, body in session.link.accept(envelope, now):
            match body:
                case m.Hello(info=m.WorkerInfo() as info) | m.Welcome(info=info):
                    self._watch(session, info)
                case m.Connect() if isinstance(self.worker, PrefillWorker):
                    self._dial(self.worker, connection, body, now)
                    continue
            self.worker.handle(connection, key, body)
        self.worker.counters.messages_stale += session.link.stale - stale

    def send(self, to: Connection, key: Key | None, body: m.Body) -> None:
        """The worker's `Send`. What is for a session that is over goes nowhere: its worker has been told."""
        session = self._sessions.get(to)
        if session is not None:
            session.line.put(session.link.wrap(key, body, self._clock()))

    def complain(self, text: str) -> None:
        """Count what cannot be used; log each kind once."""
        self.worker.counters.messages_rejected += 1
        if text not in self._complaints and len(self._complaints) < COMPLAINTS:
            self._complaints.add(text)
            self._log.warning("a message was rejected: %s (said once)", text)

    def keyless(self) -> None:
        """A connection without the cluster's keys was refused."""
        self.worker.counters.peers_refused += 1
        if self.worker.counters.peers_refused == 1:
            self._log.warning("a connection without this cluster's keys was refused (said once)")

    # -------------------------------------------------------------------------- time

    def keep(self, now: float) -> None:
        """What time asks for. To be called again and again, at least as often as the shortest of the times here."""
        if now - self._kept > self._silent_seconds / 2:
            for session in self._sessions.values():  # we were away ourselves (stopped, or in a long step)
                session.link.forgive(now)
        self._kept = now
        if self._repeat.due(now):
            for session in self._sessions.values():
                before = session.link.resent
                for raw in session.link.due(now):
                    session.line.put(raw)
                self.worker.counters.messages_resent += session.link.resent - before
        if self._look.due(now):
            self._look_at_sessions(now)
        self._registration.keep(now)

    def _look_at_sessions(self, now: float) -> None:
        for connection, session in list(self._sessions.items()):
            ended = session.watch is not None and session.watch.ended()
            if ended and connection in self._dialled:
                self._hang_up(connection)
            elif ended:
                self._drop(connection, "has ended")
            elif session.link.broken or session.link.silent(now) > self._silent_seconds:
                why = f"has been silent for {session.link.silent(now):.0f} s"
                if connection in self._dialled:
                    self._redial(connection, why, now)
                else:
                    self._drop(connection, why)

    # ------------------------------------------------------------ those who dialled us

    def _open(self, connection: Connection, envelope: m.Envelope, answer: Line, now: float) -> _Session:
        """Somebody begins a session; what was open on the former one is over."""
        if connection in self._sessions:
            self._drop(connection, "has begun a new session")
        self._strangers.pop(connection, None)
        session = _Session(answer, Link(self.worker.info.incarnation, envelope.session, now))
        self._sessions[connection] = session
        return session

    def _stranger(self, connection: Connection, envelope: m.Envelope, answer: Line, now: float) -> None:
        """A session that is not known here. Its Hello may still be on its way; after a while, ask for a new one."""
        self.worker.counters.messages_stale += 1
        first = self._strangers.setdefault(connection, now)
        while len(self._strangers) > STRANGERS:
            self._strangers.popitem(last=False)
        if now - first < STRANGER_SECONDS:
            return
        self._strangers.pop(connection, None)
        answer.put(m.datagram(self.worker.info.incarnation, m.Reset(), envelope.session))

    def _drop(self, connection: Connection, why: str) -> None:
        """A session is over: tell the worker."""
        self._close(connection)
        self._log.warning("the other end of a connection %s", why)
        self.worker.lost(connection, why)

    def _close(self, connection: Connection) -> None:
        session = self._sessions.pop(connection, None)
        if session is not None and session.watch is not None:
            session.watch.close()

    def _watch(self, session: _Session, info: m.WorkerInfo) -> None:
        """A process of this host can be seen to end; one elsewhere can only be silent."""
        if info.host != self.worker.info.host or session.watch is not None:
            return
        try:
            session.watch = self._wire.watch(info.pid)
        except OSError as error:
            self._log.debug("process %d cannot be watched: %s", info.pid, error)

    # ------------------------------------------------------------------ those we dial

    def _dial(self, worker: PrefillWorker, asked_by: Connection, connect: m.Connect, now: float) -> None:
        connection = b"d" + connect.worker.encode() + b"/" + connect.incarnation
        known = self._dialled.get(connection)
        if known is not None:
            known.asked_by = asked_by
            if worker.paired_with(connection):
                worker.tell_paired(connection, asked_by)
            return
        for other, dialled in list(self._dialled.items()):
            if dialled.name == connect.worker:  # an incarnation that the gateway no longer knows
                self._hang_up(other)
        try:
            line = self._wire.dial(connect.address, connection)
        except OSError as error:
            text = f"its address {connect.address} cannot be dialled: {error}"
            self.send(asked_by, None, m.Paired(connect.worker, text, connect.incarnation))
            return
        self._dialled[connection] = _Dialled(line, connect.worker, connect.incarnation, asked_by, now)
        self._begin(connection, 1, now)

    def _begin(self, connection: Connection, number: int, now: float) -> None:
        dialled = self._dialled[connection]
        self._sessions[connection] = _Session(dialled.line, Link(self.worker.info.incarnation, number, now))
        assert isinstance(self.worker, PrefillWorker)
        self.worker.dialled(connection, dialled.name, dialled.incarnation, dialled.asked_by)

    def _redial(self, connection: Connection, why: str, now: float) -> None:
        """The session with a decode worker is over; begin the next."""
        assert isinstance(self.worker, PrefillWorker)
        number = self._sessions[connection].link.session
        if self.worker.paired_with(connection):
            self._dialled[connection].up = now
            self._drop(connection, why)
        elif now - self._dialled[connection].up > FORGET_SECONDS and not self.worker.holds_for(connection):
            self._hang_up(connection)
            return
        else:
            self._close(connection)
        self._begin(connection, number + 1, now)

    def _hang_up(self, connection: Connection) -> None:
        """Nothing of this decode worker's incarnation will come back."""
        dialled = self._dialled.pop(connection)
        self._close(connection)
        assert isinstance(self.worker, PrefillWorker)
        self.worker.gone(connection)
        dialled.line.close()
