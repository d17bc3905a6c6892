"""Sessions of one worker: how they begin, how they are lost, who begins the next one, and what the worker is told of it."""

from __future__ import annotations

import logging
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from session_world import ELSEWHERE, GATE, SILENT_SECONDS, Line, Peer, World, info, ours

from hermetic.options import OptionError
from hermetic.worker import messages as m
from hermetic.worker.link import BEAT_SECONDS, RESEND_SECONDS
from hermetic.worker.sessions import FORGET_SECONDS, STRANGER_SECONDS, STRANGERS

OLD, NEW = b"1" * 8, b"2" * 8


def sessions_said(line: Line) -> list[tuple[str, int]]:
    return [(type(e.body).__name__, e.session) for e in line.read() if not isinstance(e.body, m.Beat)]


# -------------------------------------------------------------------------------------- those who dialled us
def test_a_hello_begins_a_session_and_the_worker_answers_on_the_same_line() -> None:
    world = World()
    peer = Peer(world).hello()
    assert world.heard() == [("handle", b"rpeer", m.Hello("gateway", None))]
    world.worker.send(b"rpeer", None, m.Stats(1, {}))
    (answer,) = peer.line.read()
    assert (answer.session, answer.sequence, answer.ack) == (1, 1, 1)
    assert answer.incarnation == world.info.incarnation
    assert answer.body == m.Stats(1, {})


def test_what_does_not_begin_with_a_hello_is_not_taken_and_after_a_moment_told_so() -> None:
    world = World()
    peer = Peer(world, session=4)
    peer.say(m.AskStats(1))
    world.now += 0.9 * STRANGER_SECONDS
    peer.say(m.AskStats(2))
    assert not peer.line.sent  # its Hello may have been overtaken
    world.now += 0.2 * STRANGER_SECONDS
    peer.beat()
    (reset,) = peer.line.read()
    assert (reset.body, reset.session, reset.sequence) == (m.Reset(), 4, 0)
    assert world.heard() == []
    assert world.worker.counters.messages_stale == 3


def test_a_hello_that_was_overtaken_begins_its_session_and_what_came_before_it_comes_again() -> None:
    world = World()
    peer = Peer(world)
    hello = peer.link.wrap(None, m.Hello("gateway", None), world.now)
    peer.say(m.AskStats(1))
    peer.raw(hello)
    for raw in peer.link.due(world.now + RESEND_SECONDS):
        peer.raw(raw)
    assert [told[2] for told in world.heard()] == [m.Hello("gateway", None), m.AskStats(1)]
    world.passes(2 * STRANGER_SECONDS)
    assert m.Reset() not in peer.line.bodies()


def test_every_session_that_is_not_known_has_its_moment() -> None:
    world = World()
    Peer(world).beat()
    Peer(world).hello()
    world.now += 2 * STRANGER_SECONDS
    later = Peer(world, session=2)
    later.beat()
    assert not later.line.sent


def test_strangers_are_remembered_up_to_a_bound() -> None:
    world = World()
    first = Peer(world, b"rfirst")
    first.beat()
    for i in range(STRANGERS):
        Peer(world, b"r%d" % i).beat()
    world.now += 2 * STRANGER_SECONDS
    first.beat()
    assert not first.line.sent  # it counts as new


def test_a_newer_session_ends_the_former_one_and_what_is_late_of_that_changes_nothing() -> None:
    world = World()
    Peer(world).hello()
    late = Peer(world)
    late.link.wrap(None, m.Hello("gateway", None), world.now)
    world.heard()
    again = Peer(world, session=2).hello()
    assert world.heard() == [
        ("lost", b"rpeer", "has begun a new session"),
        ("handle", b"rpeer", m.Hello("gateway", None)),
    ]
    late.say(m.AskStats(7))
    assert world.heard() == []
    world.worker.send(b"rpeer", None, m.Stats(1, {}))
    assert [e.session for e in again.line.read()] == [2]


def test_one_that_is_silent_for_too_long_is_lost_and_what_is_sent_to_it_goes_nowhere() -> None:
    world = World()
    peer = Peer(world).hello()
    world.heard()
    world.passes(0.9 * SILENT_SECONDS)
    peer.beat()
    world.passes(0.9 * SILENT_SECONDS)
    assert world.heard() == []
    world.passes(0.2 * SILENT_SECONDS)
    assert world.heard() == [("lost", b"rpeer", f"has been silent for {SILENT_SECONDS:.0f} s")]
    peer.line.read()
    world.worker.send(b"rpeer", None, m.Stats(1, {}))
    world.passes(3.0)
    assert not peer.line.sent


def test_a_worker_that_was_stopped_itself_takes_nobody_for_silent() -> None:
    world = World()
    peer = Peer(world).hello()
    world.heard()
    world.passes(0.6 * SILENT_SECONDS)
    world.passes(2 * SILENT_SECONDS, step=2 * SILENT_SECONDS)
    world.passes(0.9 * SILENT_SECONDS)
    assert world.heard() == []
    peer.beat()
    world.passes(1.1 * SILENT_SECONDS)
    assert [told[0] for told in world.heard()] == ["lost"]


def test_one_that_acknowledges_nothing_is_lost_when_too_much_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hermetic.worker.link.MAX_UNACKED", 5)
    world = World()
    peer = Peer(world).hello()
    world.heard()
    for i in range(6):
        world.worker.send(b"rpeer", None, m.Stats(i, {}))
    peer.beat()
    world.passes(1.0)
    assert [told[0] for told in world.heard()] == ["lost"]


def test_a_process_of_this_host_that_ends_is_lost_at_once_and_one_elsewhere_can_only_be_silent() -> None:
    world = World()
    Peer(world, b"rnear").hello(info("near", "prefill", pid=11))
    Peer(world, b"rfar").hello(info("far", "prefill", pid=12, host=ELSEWHERE))
    assert world.wire.watched == [11]
    world.heard()
    world.wire.dead |= {11, 12}
    world.passes(1.0)
    assert world.heard() == [("lost", b"rnear", "has ended")]
    assert world.wire.watched == []


def test_a_process_that_cannot_be_watched_has_a_session_all_the_same() -> None:
    world = World()
    world.wire.unknown.add(11)
    peer = Peer(world).hello(info("near", "prefill", pid=11))
    assert len(world.heard()) == 1
    world.passes(1.0)
    peer.say(m.AskStats(1))
    assert world.heard() == [("handle", b"rpeer", m.AskStats(1))]


def test_however_often_one_introduces_itself_it_is_watched_once() -> None:
    world = World()
    peer = Peer(world).hello(info("near", "prefill", pid=11))
    peer.hello(info("near", "prefill", pid=11))
    assert world.wire.watched == [11]


def test_what_is_not_acknowledged_is_said_again_and_counted() -> None:
    world = World()
    peer = Peer(world).hello()
    world.worker.send(b"rpeer", None, m.Stats(1, {}))
    peer.line.read()
    world.passes(RESEND_SECONDS + 0.5)
    assert peer.line.bodies() == [m.Stats(1, {})]
    assert world.worker.counters.messages_resent == 1


def test_what_cannot_be_used_is_counted_every_time_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    peer = Peer(world)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            peer.raw(b"\xc1 rubbish")
            world.sessions.keyless()
    assert world.worker.counters.messages_rejected == world.worker.counters.peers_refused == 3
    assert [r.message.partition(":")[0] for r in caplog.records] == [
        "a message was rejected",
        "a connection without this cluster's keys was refused (said once)",
    ]
    assert not peer.line.sent


# ---------------------------------------------------------------------------------------------- those we dial
class Dialling:
    """A prefill worker, the gateway that asks it to pair, and the line that it opens."""

    def __init__(self) -> None:
        self.world = World("prefill")
        self.gateway = Peer(self.world, b"rgateway").hello()
        self.world.heard()

    def connect(self, incarnation: bytes = OLD, address: str = "tcp://decode:1") -> bytes:
        self.gateway.say(m.Connect(address, "decode-0", incarnation))
        return b"ddecode-0/" + incarnation

    def welcome(self, to: bytes, session: int = 1, sequence: int = 1, incarnation: bytes = OLD) -> None:
        body = m.Welcome(info("decode-0", incarnation=incarnation, pid=21), "segment", 1)
        self.world.sessions.take(to, ours(body, session, sequence, incarnation))
        self.world.worker.up_now.add(to)

    def line(self) -> Line:
        (line,) = self.world.wire.open
        return line

    def passes(self, seconds: float) -> None:
        """The gateway lives."""
        until = self.world.now + seconds
        while self.world.now < until:
            self.world.passes(min(5.0, until - self.world.now))
            self.gateway.beat()


def test_who_is_to_be_paired_with_is_dialled_and_greeted_once() -> None:
    d = Dialling()
    to = d.connect()
    assert d.world.heard() == [("dialled", to, b"rgateway")]
    assert (d.line().address, d.line().dialled) == ("tcp://decode:1", to)
    assert sessions_said(d.line()) == [("Hello", 1)]
    d.connect()
    assert d.world.heard() == []  # it does not stand yet: whoever asked will hear
    d.welcome(to)
    assert [told[0] for told in d.world.heard()] == ["handle"]
    assert d.world.wire.watched == [21]
    d.connect()
    assert d.world.heard() == [("tell_paired", to, b"rgateway")]
    assert len(d.world.wire.lines) == 1


def test_a_decode_worker_does_not_dial() -> None:
    world = World("decode")
    Peer(world).hello().say(m.Connect("tcp://decode:1", "decode-1", OLD))
    assert not world.wire.lines
    assert [type(told[2]) for told in world.heard()] == [m.Hello, m.Connect]  # the worker counts it


def test_a_newer_incarnation_under_the_same_name_takes_the_place_of_the_former_one() -> None:
    d = Dialling()
    old = d.connect(OLD)
    d.welcome(old)
    former = d.line()
    d.world.heard()
    new = d.connect(NEW)
    assert d.world.heard() == [("gone", old), ("dialled", new, b"rgateway")]
    assert former.closed
    assert d.line().dialled == new
    assert d.world.wire.watched == []


def test_an_address_that_cannot_be_dialled_is_said_to_whoever_asked() -> None:
    d = Dialling()
    d.world.wire.impossible.add("tcp://[fe80::1%nowhere]:1")
    d.gateway.line.read()
    d.connect(address="tcp://[fe80::1%nowhere]:1")
    text = "its address tcp://[fe80::1%nowhere]:1 cannot be dialled: No such device"
    assert d.gateway.line.bodies() == [m.Paired("decode-0", text, OLD)]
    assert d.world.heard() == []
    d.connect()  # somewhere else
    assert len(d.world.wire.open) == 1


def test_one_that_has_forgotten_the_session_gets_the_next_one_on_the_same_line() -> None:
    d = Dialling()
    to = d.connect()
    d.welcome(to)
    d.world.heard()
    d.line().read()
    reset = m.datagram(OLD, m.Reset(), session=1)
    d.world.sessions.take(to, reset)
    assert d.world.heard() == [("lost", to, "does not know this session"), ("dialled", to, b"rgateway")]
    assert sessions_said(d.line()) == [("Hello", 2)]
    d.world.sessions.take(to, reset)  # said twice, or late
    assert d.world.heard() == []
    assert sessions_said(d.line()) == []
    assert d.world.wire.watched == []
    d.welcome(to, session=2)
    assert d.world.wire.watched == [21]


def test_a_session_that_never_stood_is_begun_again_without_telling_the_worker_that_it_was_lost() -> None:
    d = Dialling()
    to = d.connect()
    d.welcome(to)
    d.world.worker.up_now.clear()  # it did not fit
    d.world.heard()
    d.passes(1.2 * SILENT_SECONDS)
    assert d.world.heard() == [("dialled", to, b"rgateway")]
    assert d.world.wire.watched == []  # the former session's watch is let go too


def test_a_silent_decode_worker_is_asked_again_and_again_until_it_is_forgotten() -> None:
    d = Dialling()
    to = d.connect()
    d.welcome(to)
    d.world.heard()
    d.passes(1.1 * SILENT_SECONDS)
    assert [told[0] for told in d.world.heard()] == ["lost", "dialled"]
    d.passes(0.9 * FORGET_SECONDS)
    assert {told[0] for told in d.world.heard()} == {"dialled"}
    d.passes(0.2 * FORGET_SECONDS)
    assert d.world.heard()[-1] == ("gone", to)
    assert not d.world.wire.open


def test_one_that_still_has_tickets_is_never_forgotten_for_silence_alone() -> None:
    d = Dialling()
    to = d.connect()
    d.world.worker.holding.add(to)
    d.passes(2 * FORGET_SECONDS)
    assert ("gone", to) not in d.world.heard()
    assert len(d.world.wire.open) == 1


def test_a_dialled_process_that_ends_is_gone_for_good() -> None:
    d = Dialling()
    to = d.connect()
    d.welcome(to)
    line = d.line()
    d.world.heard()
    d.world.wire.dead.add(21)
    d.passes(1.0)
    assert d.world.heard() == [("gone", to)]
    assert line.closed
    d.welcome(to, sequence=2)  # what was on its way
    assert d.world.heard() == []
    assert d.world.worker.counters.messages_stale == 1


# ---------------------------------------------------------------------------------------------------- gateways
def test_a_worker_says_to_every_gateway_each_beat_that_it_is_there() -> None:
    world = World(gateways=(GATE, "tcp://127.0.0.1:2", GATE))
    assert [line.address for line in world.gates()] == [GATE, "tcp://127.0.0.1:2"]
    assert {line.backlog for line in world.gates()} == {2}
    world.passes(3.5 * BEAT_SECONDS)
    for line in world.gates():
        assert line.bodies() == [m.Register(world.info, leaving=False)] * 4


def test_a_worker_leaves_when_every_gateway_that_knows_it_has_let_it_go() -> None:
    world = World(gateways=(GATE, "tcp://127.0.0.1:2"))
    assert not world.sessions.leave()  # nobody knows it
    first, second = world.gates()
    for line in (first, second):
        world.gateway_says(line, m.Registered())
        world.gateway_says(line, m.Leave())  # not asked for
    assert not world.sessions.over
    assert world.sessions.leave()
    assert not world.sessions.leave()  # asked already
    first.read()
    world.passes(1.1 * BEAT_SECONDS)
    assert first.bodies()[-1] == m.Register(world.info, leaving=True)
    world.gateway_says(first, m.Leave())
    assert not world.sessions.over
    world.gateway_says(second, m.Rejected("your incarnation is not known here"))
    assert world.sessions.over


def test_a_leaving_worker_waits_for_a_deaf_gateway_only_while_it_serves() -> None:
    world = World(gateways=(GATE,))
    world.gateway_says(world.gates()[0], m.Registered())
    world.worker.busy = True
    world.sessions.leave()
    world.passes(60.0)
    assert not world.sessions.over
    world.worker.busy = False
    world.passes(1.0)
    assert world.sessions.over


def test_a_leaving_worker_does_not_wait_for_ever() -> None:
    world = World(gateways=(GATE,))
    world.worker.busy = True
    world.gateway_says(world.gates()[0], m.Registered())
    world.sessions.leave()
    world.passes(590.0, step=1.0)
    assert not world.sessions.over
    world.passes(20.0, step=1.0)
    assert world.sessions.over


def test_a_new_worker_that_no_gateway_answers_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        World(gateways=(GATE,)).passes(60.0)
        answered = World(gateways=(GATE,))
        answered.gateway_says(answered.gates()[0], m.Rejected("no"))
        answered.passes(60.0)
    assert [r.message for r in caplog.records if "no gateway answers" in r.message] == [
        f"no gateway answers at {GATE}: does it run, and with the same key file?"
    ]


def test_a_gateway_speaks_of_membership_only_where_it_is_announced_to(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(gateways=(GATE,))
    with caplog.at_level(logging.WARNING):
        world.gateway_says(world.gates()[0], m.Reset())
    assert world.worker.counters.messages_rejected == 1
    assert "Reset from a gateway's control port" in caplog.text
    assert world.heard() == []


def test_a_refusal_is_logged_once_for_each_reason(caplog: pytest.LogCaptureFixture) -> None:
    world = World(gateways=(GATE,))
    for reason in ("too small", "too small", "another model", "too small"):
        world.gateway_says(world.gates()[0], m.Rejected(reason))
    logged = [
        r.message.rpartition(": ")[2] for r in caplog.records if "does not take this worker" in r.message
    ]
    assert logged == ["too small", "another model"]


def test_a_gateways_address_that_cannot_be_one_is_said_before_anything_runs() -> None:
    with pytest.raises(OptionError, match=r"address tcp://nowhere:0 cannot be dialled: No such device"):
        World(gateways=(GATE, "tcp://nowhere:0"), impossible=("tcp://nowhere:0",))


# ------------------------------------------------------------------------------------------- all of it at once
@settings(max_examples=80)
@given(st.integers(0, 2**32), st.integers(1, 120))
def test_whatever_comes_lines_and_watches_are_those_of_open_sessions_and_the_worker_knows_each_end(
    seed: int, moves: int
) -> None:
    draw, world = random.Random(seed), World("prefill", (GATE,))
    peers: dict[bytes, Peer] = {}
    open_: set[bytes] = set()  # as the worker was told
    for _ in range(moves):
        name = draw.choice([b"ra", b"rb", b"rc"])
        dialled = draw.choice(
            [line.dialled for line in world.wire.lines if line.dialled[:1] == b"d"] or [b"d-/"]
        )
        match draw.randrange(9):
            case 0:
                former = peers.get(name)
                session = 1 if former is None else former.link.session + draw.randrange(2)
                peers[name] = Peer(world, name, session)
                peers[name].hello(draw.choice([None, info("peer", "prefill", pid=draw.randrange(30, 33))]))
            case 1 if name in peers:
                peers[name].say(m.AskStats(1))
            case 2 if name in peers:
                peers[name].say(m.Connect("tcp://x:1", draw.choice(["x", "y"]), draw.choice([OLD, NEW])))
            case 3:
                welcome = m.Welcome(info("x", incarnation=dialled[-8:], pid=draw.randrange(30, 33)), "", 1)
                number = draw.randrange(1, 4)
                world.sessions.take(dialled, ours(welcome, number, 1, dialled[-8:]))
                if draw.random() < 0.5 and any(line.dialled == dialled for line in world.wire.open):
                    world.worker.up_now.add(dialled)
            case 4:
                world.sessions.take(dialled, m.datagram(dialled[-8:], m.Reset(), draw.randrange(1, 4)))
            case 5:
                world.wire.dead ^= {draw.randrange(30, 33)}
            case 6:
                world.passes(draw.choice([0.3, 1.0, 40.0]))
            case 7:
                world.sessions.take(draw.choice([name, dialled]), draw.randbytes(20), Line())
            case 8:
                world.passes(FORGET_SECONDS + 100.0, step=10.0)
        for told in world.heard():
            match told[0], told[1]:
                case "dialled", who:
                    open_.add(who)
                case "handle", who if isinstance(told[2], m.Hello):
                    open_.add(who)
                case "handle", who:
                    assert who in open_, "a message of a session that is over"
                case (("lost" | "gone"), who):
                    assert who in open_ or told[0] == "gone", "lost twice"
                    open_.discard(who)
        assert {line.dialled for line in world.wire.open} == {c for c in open_ if c[:1] == b"d"}
        assert len(world.wire.open) == len({line.dialled for line in world.wire.open})
        assert set(world.sessions._sessions) == open_
        held = [s.watch for s in world.sessions._sessions.values() if s.watch is not None]
        assert [w for w in world.wire.watches if not w.closed] == sorted(held, key=world.wire.watches.index)
