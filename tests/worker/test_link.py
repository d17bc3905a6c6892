"""Two links over a channel that loses, repeats, reorders and delays: in order, each once, when it stops doing so."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from hermetic.handoff.messages import PROTOCOL, Key
from hermetic.worker import link as links
from hermetic.worker import messages as m
from hermetic.worker.link import AHEAD, BEAT_SECONDS, BURST, MAX_UNACKED, RESEND_MOST, RESEND_SECONDS, Link

HERE, THERE = b"h" * 8, b"t" * 8


@dataclass
class End:
    """A link, what was given to it, and what it handed on."""

    link: Link
    sent: list[int] = field(default_factory=list)
    got: list[int] = field(default_factory=list)


@dataclass
class Channel:
    """Both ends, and what is on its way: (when it arrives, to which end, the bytes)."""

    now: float = 0.0
    flying: list[tuple[float, int, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ends = (End(Link(HERE, 1, 0.0)), End(Link(THERE, 1, 0.0)))

    def say(self, end: int) -> None:
        me = self.ends[end]
        me.sent.append(len(me.sent))
        self.fly(end, [me.link.wrap(None, m.AskStats(me.sent[-1]), self.now)])

    def fly(self, end: int, raws: list[bytes], delay: float = 0.0) -> None:
        self.flying += [(self.now + delay, 1 - end, raw) for raw in raws]

    def arrive(self) -> None:
        due = [x for x in self.flying if x[0] <= self.now]
        self.flying = [x for x in self.flying if x[0] > self.now]
        for _, end, raw in due:
            me = self.ends[end]
            for _, body in me.link.accept(m.decode(raw), self.now):
                assert isinstance(body, m.AskStats)
                me.got.append(body.number)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for end in (0, 1):
            self.fly(end, self.ends[end].link.due(self.now))

    def check(self) -> None:
        for end in (0, 1):
            got, sent = self.ends[end].got, self.ends[1 - end].sent
            assert got == sent[: len(got)], "out of order, or twice"
            assert len(self.ends[end].link._early) < AHEAD

    def settle(self) -> None:
        """Nothing is lost any more."""
        for _ in range(600):
            self.arrive()
            self.pass_time(0.05)


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.integers(0, 80), st.integers(0, 3))
def test_everything_arrives_in_order_and_once_when_the_channel_is_whole_again(
    seed: int, moves: int, late: int
) -> None:
    draw, channel = random.Random(seed), Channel()
    for _ in range(moves):
        match draw.randrange(7):
            case 0 | 1:
                channel.say(draw.randrange(2))
            case 2:
                channel.arrive()
            case 3:  # lost
                if channel.flying:
                    channel.flying.pop(draw.randrange(len(channel.flying)))
            case 4:  # said twice, the second much later
                if channel.flying:
                    _, end, raw = draw.choice(channel.flying)
                    channel.flying.append((channel.now + draw.random() * 5 * late, end, raw))
            case 5:
                draw.shuffle(channel.flying)
            case 6:
                channel.pass_time(draw.choice([0.01, 0.06, 1.1, 9.0]))
        channel.check()
    channel.settle()
    channel.check()
    for end in (0, 1):
        assert channel.ends[end].got == channel.ends[1 - end].sent
        link = channel.ends[end].link
        assert not link._unacked
        assert not link._early
        assert link._bytes == 0
        assert not link.broken


def alone(now: float = 0.0) -> Link:
    return Link(HERE, 3, now)


def envelope(sequence: int, ack: int = 0, session: int = 3, incarnation: bytes = THERE) -> m.Envelope:
    body: m.Body = m.AskStats(sequence) if sequence else m.Beat()
    return m.Envelope(PROTOCOL, incarnation, session, sequence, ack, None, body)


def numbers(ready: list[tuple[Key | None, m.Body]]) -> list[int]:
    return [body.number for _, body in ready if isinstance(body, m.AskStats)]


def test_what_comes_early_waits_for_what_is_missing() -> None:
    link = alone()
    assert numbers(link.accept(envelope(3), 0)) == []
    assert numbers(link.accept(envelope(2), 0)) == []
    assert numbers(link.accept(envelope(1), 0)) == [1, 2, 3]
    assert numbers(link.accept(envelope(2), 0)) == []
    assert link.stale == 1


def test_a_message_too_far_ahead_is_dropped_so_that_what_waits_is_bounded() -> None:
    link = alone()
    assert link.accept(envelope(AHEAD + 1), 0) == []
    assert link.accept(envelope(AHEAD), 0) == []
    assert (link.stale, len(link._early)) == (1, 1)


def test_another_session_and_another_incarnation_are_ignored_and_counted_and_are_no_sign_of_life() -> None:
    link = alone()
    link.wrap(None, m.AskStats(1), 0)
    assert numbers(link.accept(envelope(1), 1.0)) == [1]
    for other in (
        envelope(2, ack=1, session=2),
        envelope(2, ack=1, session=4),
        envelope(2, ack=1, incarnation=b"o" * 8),
    ):
        assert link.accept(other, 5.0) == []
    assert link.stale == 3
    assert link.silent(5.0) == 4.0
    assert len(link._unacked) == 1  # nor is what they acknowledge believed
    assert numbers(link.accept(envelope(2), 6.0)) == [2]


def test_a_quiet_end_says_that_it_is_there_and_a_busy_one_does_not_need_to() -> None:
    link = alone()
    assert link.due(0.9 * BEAT_SECONDS) == []
    (beat,) = link.due(BEAT_SECONDS)
    assert m.decode(beat) == envelope(0, session=3, incarnation=HERE)
    link.wrap(None, m.AskStats(1), BEAT_SECONDS + 0.5)
    link.accept(envelope(0, ack=1), BEAT_SECONDS + 0.5)
    assert link.due(2 * BEAT_SECONDS) == []


def test_a_message_is_acknowledged_by_the_next_one_or_else_soon_by_a_beat_of_its_own() -> None:
    link = alone()
    link.accept(envelope(1), 0)
    assert link.due(0.0) == []
    (beat,) = link.due(links.ACK_SECONDS)
    assert m.decode(beat).ack == 1
    link.accept(envelope(2), 0.1)
    assert m.decode(link.wrap(None, m.AskStats(1), 0.1)).ack == 2
    assert link.due(0.1 + links.ACK_SECONDS) == []


def test_a_repeated_message_is_acknowledged_again_for_its_acknowledgement_was_lost() -> None:
    link = alone()
    link.accept(envelope(1), 0)
    link.due(links.ACK_SECONDS)
    assert link.accept(envelope(1), 1.0) == []
    (beat,) = link.due(1.0 + links.ACK_SECONDS)
    assert m.decode(beat).ack == 1


def test_repetitions_wait_longer_each_time_up_to_a_bound_and_are_few_at_once() -> None:
    link, now, times = alone(), 0.0, []
    first = [link.wrap(None, m.AskStats(i), 0) for i in range(BURST + 10)]
    while len(times) < 7:
        now += 0.25
        again = [raw for raw in link.due(now) if m.decode(raw).sequence]
        if again:
            assert again == first[:BURST]
            times.append(now)
    waits = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert waits == [RESEND_SECONDS * 2**i for i in range(3)] + [RESEND_MOST] * 4
    assert link.resent == 7 * BURST
    link.accept(envelope(0, ack=BURST), now)  # progress: soon again
    assert [m.decode(raw).sequence for raw in link.due(now + RESEND_SECONDS)][:2] == [BURST + 1, BURST + 2]


def test_an_acknowledgement_of_what_was_never_sent_is_not_kept_for_later() -> None:
    link = alone()
    link.accept(envelope(0, ack=1000), 0)
    link.wrap(None, m.AskStats(1), 0)
    assert len(link._unacked) == 1


def test_an_end_that_acknowledges_nothing_is_taken_for_lost_before_memory_runs_out() -> None:
    link = alone()
    for i in range(MAX_UNACKED):
        link.wrap(None, m.AskStats(i), 0)
    assert not link.broken
    link.wrap(None, m.AskStats(0), 0)
    assert link.broken
    fat = alone()
    for _ in range(4):
        fat.wrap(None, m.Rejected("x" * (links.MAX_BYTES // 4)), 0)
    assert fat.broken
    fat.accept(envelope(0, ack=4), 0)
    assert not fat.broken


def test_silence_counts_from_what_was_last_heard_or_from_when_we_came_back_ourselves() -> None:
    link = alone(10.0)
    assert link.silent(15.0) == 5.0
    link.accept(envelope(0), 16.0)
    assert link.silent(18.0) == 2.0
    link.forgive(100.0)
    assert link.silent(101.0) == 1.0


def test_an_acknowledgement_of_what_was_never_sent_makes_nothing_forgotten() -> None:
    link = Link(b"i" * 8, 1, 0.0)
    raw = link.wrap(None, m.AskStats(1), 0.0)
    link.accept(m.decode(m.datagram(b"p" * 8, m.Beat(), session=1, ack=7)), 0.1)
    assert raw in link.due(60.0)
