"""The workers of a cluster: how they join, what is known of them, how they are lost, and the messages to and from them.

A worker announces itself (`Register`, again and again) at the gateway's control port. The first time its numbers are
compared with the other members'; if it fits, the gateway dials the worker's own control port, and everything else goes
over that connection, in sessions (`worker/link.py`). The one thing to know: there are three ways in which a member stops
serving, and they differ in what may come back.

    unreachable   it gave no sign of life for too long. It may be alive and writing; heard again, it is back in.
    forgotten     it answered Reset: it lives, but knows nothing of this session. The next session begins at once.
    ended         its process is gone (its supervisor, or another process at its address, says so), or it left, or a newer
                  process of its name took over. Nothing of that incarnation is listened to any more.

Whoever listens (`runs.py`) is told of each, with whether the worker may still be working on what it was given.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hermetic.gateway.options import ClusterOptions
from hermetic.gateway.pairing import misfit, standing
from hermetic.gateway.remote import STATES, Remote
from hermetic.gateway.tasks import Tasks
from hermetic.gateway.window import Window
from hermetic.gateway.wire import Entropy, GatewayWire
from hermetic.handoff.messages import Key
from hermetic.worker import messages as m
from hermetic.worker.link import Link

log = logging.getLogger("hermetic.gateway")
K = TypeVar("K")
V = TypeVar("V")

TICK_SECONDS = 0.05
TAKEOVER_SECONDS = (
    5.0  # of silence after which a newer process may take a member's name (a member beats every second)
)
AWAY_SECONDS = 60.0  # of silence for which a member that is away still says what others must be like
REFUSED_SECONDS = 60.0  # for which a refused worker that registers no more is shown
GONE_SECONDS = 600.0  # for which one that ended is shown
KEPT = 1024  # incarnations of the past, refused workers and logged lines that are remembered
_ADDRESS = re.compile(r"tcp://(\[[0-9A-Fa-f:.%A-Za-z]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


@dataclass
class RefusedWorker:
    """One that may not join. `seen` is when it last asked."""

    info: m.WorkerInfo
    reason: str
    seen: float


@dataclass
class MemberCounters:
    """What came and was not used."""

    messages_stale: int = 0
    messages_rejected: int = 0
    peers_refused: int = 0  # connections without the cluster's keys
    registrations_rejected: int = 0  # once for each (incarnation, reason)
    messages_resent: int = 0  # of links that are over


class Members:
    """`handle` gets every message that is about requests, `lost` every worker that stops serving: (worker, why, whether it
    knows nothing any more of what it was given)."""

    def __init__(
        self,
        wire: GatewayWire,
        options: ClusterOptions,
        clock: Callable[[], float],
        entropy: Entropy,
        handle: Callable[[Remote, Key | None, m.Body], None],
        lost: Callable[[Remote, str, bool], None],
    ) -> None:
        self._wire, self._options, self._clock = wire, options, clock
        self._handle, self._lost = handle, lost
        self.incarnation = entropy(8)
        self.remotes: dict[str, Remote] = {}
        self.refused: OrderedDict[str, RefusedWorker] = OrderedDict()
        self.window = Window(options.context)
        self.counters = MemberCounters()
        self._past: OrderedDict[bytes, str] = OrderedDict()  # incarnations that ended, and how
        self._logged: OrderedDict[tuple[object, ...], None] = OrderedDict()
        self._tasks = Tasks()
        self.last: m.WorkerInfo | None = None  # of any member, for what all of them have in common

    # ------------------------------------------------------------- life of the gateway

    async def listen(self, host: str, port: int) -> str:
        """Open the control port; returns what workers dial. Raises what the wire raises when it cannot be had."""
        address = await self._wire.listen(host, port, self)
        self._tasks.spawn(self._watch())
        return address

    async def close(self) -> None:
        await self._tasks.cancel()
        await self._wire.close()

    # ------------------------------------------------------------------- registration

    def keyless(self) -> None:
        """A connection without the cluster's keys was refused."""
        self.counters.peers_refused += 1
        if self._once("strangers"):
            log.warning(
                "a connection to the control port without this cluster's keys was refused (said once)"
            )

    def malformed(self, parts: int) -> None:
        """A message to the control port that is none of ours."""
        self._reject(("frames",), f"a message of {parts} parts came to the control port")

    def knock(self, raw: bytes) -> bytes | None:
        """Answer whoever registers."""
        answer = self._knock(raw)
        return None if answer is None else m.datagram(self.incarnation, answer)

    def _knock(self, raw: bytes) -> m.Body | None:
        try:
            envelope = m.decode(raw)
        except m.ProtocolError as error:
            self._reject(("door", str(error)), f"a message to the control port was rejected: {error}")
            return m.Rejected(str(error))
        match envelope.body:
            case m.Register(info=info, leaving=leaving) if info.incarnation == envelope.incarnation:
                return self.register(info, leaving)
            case body:
                name = type(body).__name__
                self._reject(("door", name), f"a {name} that does not belong there came to the control port")
                return m.Rejected(
                    "this is a gateway's control port; a worker registers here, in its own incarnation"
                )

    def register(self, info: m.WorkerInfo, leaving: bool) -> m.Body:
        """The answer to one Register."""
        if (how := self._past.get(info.incarnation)) is not None:
            if leaving or how == "left":
                return m.Leave()
            self.counters.messages_stale += 1
            return m.Rejected(f"this incarnation of {info.worker} {how}; a newer one may join")
        known = self.remotes.get(info.worker)
        if known is not None and not known.ended and known.info.incarnation == info.incarnation:
            if leaving:
                return self._leave(known)
            return m.Registered()
        if leaving:
            self._refuse_no_more(info)
            return m.Leave()  # nothing of it is here
        if (reason := self._why_not(info, known)) is not None:
            return self._refuse(info, reason)
        if known is not None and not known.ended:
            self.end(known, "was replaced by a newer process of its name")
        return self._join(info)

    def _why_not(self, info: m.WorkerInfo, known: Remote | None) -> str | None:
        if not (found := _ADDRESS.fullmatch(info.address)) or not 0 < int(found[2]) < 65536:
            return f"its address {info.address[:80]!r} is not tcp://HOST:PORT"
        if known is not None and not known.ended and known.reachable:
            silent = self._clock() - known.heard
            if silent < min(TAKEOVER_SECONDS, self._options.silent_seconds):
                return (
                    f"another process is {info.worker} here: pid {known.info.pid} on {known.info.host}, at "
                    f"{known.info.address}. Give one of them another name, or end that one"
                )
        return self._unfit(info)

    def _unfit(self, info: m.WorkerInfo) -> str | None:
        """Why this worker cannot serve beside those that are here, or were a moment ago: while the network is cut, nobody of
        another model takes their place. One that has been away for long keeps nobody out."""
        since = self._clock() - AWAY_SECONDS
        there = [r for r in self.remotes.values() if not r.ended and (r.reachable or r.heard > since)]
        there.sort(key=lambda r: not r.reachable)
        return misfit(info, [r.info for r in there]) or self.window.refuse(info)

    def _refuse(self, info: m.WorkerInfo, reason: str) -> m.Rejected:
        if self._once("refused", info.incarnation, reason):
            self.counters.registrations_rejected += 1
            log.error("worker %s may not join: %s", info.worker, reason)
        self.refused.pop(info.worker, None)
        self.refused[info.worker] = RefusedWorker(info, reason, self._clock())
        _bounded(self.refused)
        return m.Rejected(reason)

    def _refuse_no_more(self, info: m.WorkerInfo) -> None:
        shown = self.refused.get(info.worker)
        if shown is not None and shown.info.incarnation == info.incarnation:
            del self.refused[info.worker]

    def _join(self, info: m.WorkerInfo) -> m.Body:
        try:
            line = self._wire.dial(info.address, lambda raw: self._take(remote, raw))
        except OSError as error:
            return self._refuse(info, f"its address {info.address} cannot be dialled: {error}")
        now = self._clock()
        remote = Remote(info, line, Link(self.incarnation, 1, now), self._clock, now)
        former = self.remotes.get(info.worker)
        if former is not None:
            # A worker that was drained and died is drained still; one that left has done what it was drained for.
            remote.draining = former.draining and former.reason != "left"
        self._refuse_no_more(info)
        self.refused.pop(info.worker, None)
        self.remotes[info.worker] = remote
        self.last = info
        self.window.join(info.worker, info.role, info.max_tokens)
        log.info("worker %s (%s, pid %d) joins from %s", info.worker, info.role, info.pid, info.address)
        self._greet(remote)
        if info.role == "decode":
            for other in self.of_role("prefill"):
                self._connect(other, remote)
        return m.Registered()

    def _greet(self, remote: Remote) -> None:
        """Begin a session: the first words of every one."""
        remote.welcomed = False
        remote.paired.clear()
        remote.send(None, m.Hello("gateway", None))
        if remote.info.role == "prefill":
            for decode in self.of_role("decode"):
                self._connect(remote, decode)

    def _connect(self, prefill: Remote, decode: Remote) -> None:
        prefill.send(None, m.Connect(decode.info.address, decode.info.worker, decode.info.incarnation))

    def of_role(self, role: str) -> list[Remote]:
        """Members that have not ended."""
        return [r for r in self.remotes.values() if r.info.role == role and not r.ended]

    # ----------------------------------------------------------------- leaving and loss

    def _leave(self, remote: Remote) -> m.Body:
        """A worker that wants to go may, as soon as nothing that it was given is open."""
        if remote.ended:
            return m.Leave()
        if not remote.leaving:
            remote.leaving, remote.reason = True, "it asked to leave"
            log.info("worker %s is leaving", remote.info.worker)
        if remote.attempts:
            return m.Registered()
        self.end(remote, "left")
        return m.Leave()

    def end(self, remote: Remote, why: str, may_join_again: bool = False) -> None:
        """Nothing of this incarnation counts any more. What ran on it is told."""
        if remote.ended:
            return
        remote.ended, remote.reason, remote.since = True, why, self._clock()
        if not may_join_again:
            self._past[remote.info.incarnation] = why
            _bounded(self._past)
        self.counters.messages_resent += remote.link.resent
        self.counters.messages_stale += remote.link.stale
        remote.line.close()
        for prefill in self.of_role("prefill"):
            prefill.paired.pop(remote.info.worker, None)
        self.window.gone(remote.info.worker)
        (log.info if why == "left" else log.error)("worker %s %s", remote.info.worker, why)
        self._lost(remote, why, True)

    def _unreachable(self, remote: Remote, why: str) -> None:
        remote.reachable, remote.reason = False, why
        log.error("worker %s %s", remote.info.worker, why)
        self.window.gone(remote.info.worker)
        self._lost(remote, why, False)

    def _next_session(self, remote: Remote) -> None:
        self.counters.messages_resent += remote.link.resent
        self.counters.messages_stale += remote.link.stale
        remote.link = Link(self.incarnation, remote.link.session + 1, self._clock())
        self._greet(remote)

    async def _watch(self) -> None:
        """Repeat what may be lost, say that we are there, and notice who is not."""
        last = self._clock()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = self._clock()
            late = now - last - TICK_SECONDS
            last = now
            for remote in list(self.remotes.values()):
                if remote.ended:
                    if now - remote.since > GONE_SECONDS:
                        del self.remotes[remote.info.worker]
                    continue
                if late > TICK_SECONDS:
                    remote.heard += late  # it was we who did not listen
                self._look_at(remote, now)
            for name, refused in list(self.refused.items()):
                if now - refused.seen > REFUSED_SECONDS:
                    del self.refused[name]

    def _look_at(self, remote: Remote, now: float) -> None:
        for raw in remote.link.due(now):
            remote.line.put(raw)
        silent, broken = now - remote.heard, remote.link.broken
        if remote.reachable and (broken or silent > self._options.silent_seconds):
            why = (
                "has more messages waiting for its acknowledgement than are kept"
                if broken
                else f"has not answered for {silent:.1f} s at {remote.info.address}"
            )
            self._unreachable(remote, why)
        if broken:
            self._next_session(remote)

    # --------------------------------------------------------------------- reading

    def _take(self, remote: Remote, raw: bytes) -> None:
        if remote.ended:
            return
        name = remote.info.worker
        try:
            envelope = m.decode(raw)
        except m.ProtocolError as error:
            self._reject((name, str(error)), f"a message of {name} was rejected: {error}")
            return
        if envelope.incarnation != remote.info.incarnation:
            self.counters.messages_stale += 1
            if isinstance(envelope.body, m.Reset):
                self.end(remote, "ended: another process answers at its address")
            return
        now = self._clock()
        if isinstance(envelope.body, m.Reset):
            if envelope.session != remote.link.session:
                self.counters.messages_stale += 1
                return
            self._heard(remote, now)
            if not remote.ended:
                log.warning("worker %s knows nothing of this session; a new one begins", name)
                self._next_session(remote)  # first: what runs again may go there
                self._lost(remote, "gave up its session with this gateway", True)
            return
        items = remote.link.accept(envelope, now)
        if remote.link.heard == now:
            self._heard(remote, now)
        for key, body in items:
            if remote.ended:
                return
            match body:
                case m.Welcome(info=info):
                    remote.welcomed = info.incarnation == remote.info.incarnation
                    remote.reason = ""
                case m.Paired():
                    self._paired(remote, body)
                case m.Rejected(reason=reason):
                    remote.reason = f"it rejects this gateway: {reason}"
                    log.error("worker %s rejects this gateway: %s", name, reason)
                case _:
                    self._handle(remote, key, body)

    def _heard(self, remote: Remote, now: float) -> None:
        remote.heard = now
        if remote.reachable:
            return
        info = remote.info
        if (reason := self._unfit(info)) is not None:
            # The others went on without it. Its next Register is answered as a stranger's, with the reason.
            self.end(remote, f"is back and fits no more: {reason}", may_join_again=True)
            return
        remote.reachable, remote.reason = True, ""
        self.window.join(info.worker, info.role, info.max_tokens)
        log.warning("worker %s answers again", info.worker)

    def _paired(self, prefill: Remote, paired: m.Paired) -> None:
        decode = self.remotes.get(paired.worker)
        named = decode is not None and paired.incarnation in (b"", decode.info.incarnation)
        if decode is None or decode.ended or not named:
            self.counters.messages_stale += 1
            return
        was = prefill.paired_with(decode)
        if paired.error:
            prefill.paired.pop(paired.worker, None)
            if was or self._once("paired", prefill.info.incarnation, decode.info.incarnation, paired.error):
                log.error("%s and %s are not a pair: %s", prefill.info.worker, paired.worker, paired.error)
        else:
            prefill.paired[paired.worker] = decode.info.incarnation
            if not was:
                log.info("%s and %s are a pair", prefill.info.worker, paired.worker)

    # --------------------------------------------------------------------- answers

    def why_none(self) -> str | None:
        """None when work can go somewhere; else what is in the way, worker by worker."""
        if standing(self.remotes.values()):
            return None
        troubles = [
            f"{name} is {r.state}{f' ({r.reason})' if r.reason else ''}"
            for name, r in sorted(self.remotes.items())
            if not r.usable
        ]
        troubles += [f"{name} may not join: {r.reason}" for name, r in self.refused.items()]
        roles = {r.info.role for r in self.remotes.values() if r.usable}
        if roles >= {"prefill", "decode"}:
            troubles.append("no prefill and decode worker reach each other")
        else:
            missing = {"prefill", "decode"} - roles
            troubles.append(f"there is no {' and no '.join(sorted(missing))} worker ready")
        return "; ".join(troubles)

    def counts(self) -> dict[str, float]:
        """Figures for /metrics."""
        states = [r.state for r in self.remotes.values()] + ["refused"] * len(self.refused)
        live = [r.link for r in self.remotes.values() if not r.ended]
        return {
            **{f"workers_{state}": float(states.count(state)) for state in STATES},
            "workers_alive": float(sum(r.reachable and not r.ended for r in self.remotes.values())),
            "peers_refused": self.counters.peers_refused,
            "registrations_rejected": self.counters.registrations_rejected,
            "messages_rejected": self.counters.messages_rejected,
            "messages_stale": self.counters.messages_stale + sum(link.stale for link in live),
            "messages_resent": self.counters.messages_resent + sum(link.resent for link in live),
            "context_advertised": self.window.tokens,
        }

    def _reject(self, what: tuple[object, ...], text: str) -> None:
        self.counters.messages_rejected += 1
        if self._once(*what):
            log.warning("%s", text)

    def _once(self, *what: object) -> bool:
        """True the first time for each `what`, as long as it is remembered."""
        if what in self._logged:
            return False
        self._logged[what] = None
        _bounded(self._logged)
        return True


def _bounded(remembered: OrderedDict[K, V]) -> None:
    while len(remembered) > KEPT:
        remembered.popitem(last=False)
