"""One end of one session of the control channel: numbers, acknowledgements, repetition, order, signs of life.

TCP and ZeroMQ lose what was on its way whenever a connection breaks, and say so to nobody. So every message has a number
that the other end acknowledges; what is not acknowledged is sent again, what comes twice is dropped, what comes early
waits. Above a link, messages arrive in order and exactly once for as long as both ends remember the session. If one
forgets it (it was restarted, or gave the other up for silence), it answers *Reset*, and the dialling side begins the
next session with *Hello*; whatever was open on the old one has to be settled by those who opened it.

Pure: no socket, no clock. `now` is any monotonic clock's seconds; two ends never compare theirs.
"""

from __future__ import annotations

from collections import OrderedDict

from hermetic.handoff.messages import PROTOCOL, Key
from hermetic.worker import messages as m

ACK_SECONDS = 0.05  # a message that nothing else answers is acknowledged after this
BEAT_SECONDS = 1.0  # a quiet end says at least this often that it is there
RESEND_SECONDS = 1.0  # without an acknowledgement before the first repetition; doubles up to RESEND_MOST
RESEND_MOST = 8.0
BURST = 64  # messages repeated at once at most
AHEAD = 4096  # messages that may wait for an earlier one
MAX_UNACKED = 50_000
MAX_BYTES = 256 * 1024 * 1024


class Link:
    """`incarnation` is ours; `session` as in the envelopes."""

    def __init__(self, incarnation: bytes, session: int, now: float) -> None:
        self.incarnation, self.session = incarnation, session
        self.peer: bytes | None = None  # the other end's incarnation, from its first message
        self.heard = now  # when anything last came
        self.stale = 0  # repeated, too old, or of another incarnation
        self.resent = 0
        self._sequence = 0
        self._received = 0
        self._early: dict[int, tuple[Key | None, m.Body]] = {}
        self._unacked: OrderedDict[int, bytes] = OrderedDict()
        self._bytes = 0
        self._wait = RESEND_SECONDS
        self._resend_at = now
        self._ack_at: float | None = None
        self._said = now  # when we last sent anything

    @property
    def broken(self) -> bool:
        """More waits for an acknowledgement than this end keeps: the other one must be taken for lost."""
        return len(self._unacked) > MAX_UNACKED or self._bytes > MAX_BYTES

    def wrap(self, key: Key | None, body: m.Body, now: float) -> bytes:
        """The next message, to be sent now; kept until it is acknowledged."""
        self._sequence += 1
        envelope = m.Envelope(
            PROTOCOL, self.incarnation, self.session, self._sequence, self._received, key, body
        )
        raw = m.encode(envelope)
        if not self._unacked:
            self._resend_at = now + self._wait
        self._unacked[self._sequence] = raw
        self._bytes += len(raw)
        self._ack_at, self._said = None, now
        return raw

    def accept(self, envelope: m.Envelope, now: float) -> list[tuple[Key | None, m.Body]]:
        """What can be handed on now that this envelope of our session came: in order, each message once."""
        if self.peer is None:
            self.peer = envelope.incarnation
        if envelope.incarnation != self.peer or envelope.session != self.session:
            self.stale += 1
            return []
        self.heard = now
        self._acknowledged(envelope.ack, now)
        if envelope.sequence == 0:
            return []
        if self._ack_at is None:
            self._ack_at = now + ACK_SECONDS
        if (
            envelope.sequence <= self._received
            or envelope.sequence in self._early
            or envelope.sequence > self._received + AHEAD
        ):
            self.stale += 1
            return []
        self._early[envelope.sequence] = (envelope.key, envelope.body)
        ready = []
        while self._received + 1 in self._early:
            self._received += 1
            ready.append(self._early.pop(self._received))
        return ready

    def due(self, now: float) -> list[bytes]:
        """What time asks for: repetitions, an acknowledgement, a sign of life. Send them all."""
        out: list[bytes] = []
        if self._unacked and now >= self._resend_at:
            out = list(self._unacked.values())[:BURST]
            self.resent += len(out)
            self._wait = min(2 * self._wait, RESEND_MOST)
            self._resend_at = now + self._wait
            self._said = now
        if (self._ack_at is not None and now >= self._ack_at) or now - self._said >= BEAT_SECONDS:
            out.append(m.datagram(self.incarnation, m.Beat(), self.session, self._received))
            self._ack_at, self._said = None, now
        return out

    def silent(self, now: float) -> float:
        """Seconds since anything came from the other end."""
        return now - self.heard

    def forgive(self, now: float) -> None:
        """We were away ourselves and cannot tell how long the other end was silent: count from now."""
        self.heard = now

    def _acknowledged(self, ack: int, now: float) -> None:
        if ack > self._sequence:
            return  # nothing of the kind was sent
        before = len(self._unacked)
        while self._unacked and next(iter(self._unacked)) <= ack:
            self._bytes -= len(self._unacked.popitem(last=False)[1])
        if len(self._unacked) != before:
            self._wait = RESEND_SECONDS
            self._resend_at = now + self._wait
