"""The workers' control channels: each worker refuses by its own numbers, strangers get nothing, and no message from a
member, however wrong, does more than be counted or end its own request."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import zmq
from lone_workers import Dialler, FakeDecode, LoneWorker, config, start

from hermetic.handoff import messages as h
from hermetic.handoff.messages import MAX_MESSAGE, PROTOCOL, Key
from hermetic.handoff.outcome import Aborted, Failed, Refused
from hermetic.kv.geometry import Geometry
from hermetic.lab.tiny import make_tiny
from hermetic.model.params import SamplingParams
from hermetic.worker import messages as m
from hermetic.worker import wire

KEYS = wire.CurveKeys.make()
PAGES = 64


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LoneWorker]]:
    """One prefill and one decode worker of a tiny model, that no gateway has introduced to each other."""
    model = make_tiny(tmp_path_factory.mktemp("tiny") / "model")
    running: dict[str, LoneWorker] = {}
    try:
        for role in ("prefill", "decode"):
            running[role] = start(config(role, model, KEYS, kv_bytes=PAGES * stride()))
        yield running
    finally:
        for worker in running.values():
            worker.stop()


def stride() -> int:
    """Of a page of 16 tokens of the tiny model in float32."""
    return Geometry.attention(16, 3, 2, 16, "f32").stride


@pytest.fixture(params=["prefill", "decode"])
def worker(request: pytest.FixtureRequest, workers: dict[str, LoneWorker]) -> LoneWorker:
    return workers[request.param]


@pytest.fixture
def dial() -> Iterator[Callable[..., Dialler]]:
    """Dial a worker; hung up after the test."""
    made: list[Dialler] = []

    def dialled(worker: LoneWorker, **more: Any) -> Dialler:
        made.append(Dialler(worker.address, KEYS, **more))
        return made[-1]

    yield dialled
    for channel in made:
        channel.close()


@pytest.fixture
def gateway(worker: LoneWorker, dial: Callable[..., Dialler]) -> Dialler:
    """Greeted by the worker."""
    channel = dial(worker)
    assert channel.hear(m.Welcome).info == worker.info
    return channel


def submit(tokens: int, max_tokens: int, peer: str) -> m.Submit:
    ids = np.full(tokens, 100, "<i4").tobytes()
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return m.Submit(ids, tokens, params, 1, 0, 7, "tenant", "", 10**9, peer)


def fresh_key(attempt: int = 1) -> Key:
    return Key(os.urandom(16), attempt)


def like_prefill(worker: LoneWorker, **fields: Any) -> m.WorkerInfo:
    """A prefill worker that fits this decode worker and lives in this process."""
    own = {
        "worker": f"fake-prefill-{os.urandom(2).hex()}",
        "role": "prefill",
        "incarnation": wire.new_incarnation(),
        "pid": os.getpid(),
    }
    return msgspec.structs.replace(worker.info, **(own | fields))


MOVING = (
    "pages_free",
    "pages_leased",
    "slots_free",
    "slots_granted",
    "steps",
    "requests",
    "handoffs_open",
    "sequences_waiting",
)


# ------------------------------------------------------------------------------------------ refusals by own numbers
def test_each_worker_refuses_what_its_own_pool_cannot_hold(worker: LoneWorker, gateway: Dialler) -> None:
    before, limit = gateway.stats(), PAGES * 16
    asked = [(limit, 1), (limit + 1, 1), (limit - 15, 16), (limit * 3, 16), (8000, 500)]
    for tokens, most in asked:
        key = fresh_key()
        gateway.send(key, submit(tokens, most, "whoever"))
        outcome = gateway.hear(m.Ended, key).outcome
        assert isinstance(outcome, Refused)
        assert outcome.code == "context_length_exceeded"
        assert str(limit) in outcome.reason
        assert str(tokens) in outcome.reason
    after = gateway.stats()
    assert {k: after.get(k) for k in MOVING} == {k: before.get(k) for k in MOVING}
    assert after["refused"] == before["refused"] + len(asked)


def test_a_request_for_a_pair_that_does_not_stand_is_refused(gateway: Dialler) -> None:
    key = fresh_key()
    gateway.send(key, submit(8, 4, "nobody-7"))
    outcome = gateway.hear(m.Ended, key).outcome
    assert isinstance(outcome, Refused)
    assert outcome.code == "no_pair"


# ----------------------------------------------------------------------------------------------------- strangers
@pytest.mark.parametrize("keys", [None, wire.CurveKeys.make()], ids=["no keys", "other keys"])
def test_a_peer_without_the_clusters_key_gets_no_answer_at_all(
    worker: LoneWorker, gateway: Dialler, keys: wire.CurveKeys | None
) -> None:
    before = gateway.stats()
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    if keys is None:
        socket.connect(worker.address)
    else:  # the right server key, but a client key of its own
        own = wire.CurveKeys(KEYS.server_public, b"", keys.client_public, keys.client_secret)
        wire.dial(socket, own, worker.address, wire.new_identity())
    hello = m.encode(m.Envelope(PROTOCOL, b"8 bytes!", 1, 1, 0, None, m.Hello("stranger", None)))
    socket.send(hello)
    assert not socket.poll(1000), socket.recv()
    context.destroy(linger=0)
    after = gateway.stats()
    assert {k: after[k] for k in MOVING if k in after} == {k: before[k] for k in MOVING if k in before}
    assert after["peers_refused"] > before["peers_refused"]


# ------------------------------------------------------------------------------------------- what is no message
def envelope(**fields: Any) -> bytes:
    """A message that is right but for `fields`."""
    values: dict[str, Any] = {
        "version": PROTOCOL,
        "incarnation": b"8 bytes!",
        "session": 1,
        "sequence": 9,
        "ack": 0,
        "key": None,
        "body": m.AskStats(1),
    }
    return m.encode(m.Envelope(**(values | fields)))


_versions = itertools.count(PROTOCOL + 1000)


def read_log(worker: LoneWorker, gateway: Dialler) -> None:
    """Returns when the worker's log has been read up to now: it is made to complain of something new, last."""
    version = next(_versions)
    gateway.put(envelope(version=version))
    deadline = time.monotonic() + 20
    while not worker.said(f"protocol {version} is spoken there"):
        assert time.monotonic() < deadline, worker.log[-5:]
        gateway.poll()


WHOLE = envelope()
UNUSABLE = {
    "nothing": b"",
    "zeros": b"\x00" * 100,
    "noise": bytes(random.Random(1).randrange(256) for _ in range(4000)),
    "cut off": WHOLE[:-3],
    "too much": WHOLE + b"\x01",
    "another version": envelope(version=PROTOCOL + 1),
    "a short incarnation": envelope(incarnation=b"7 bytes"),
    "a short ticket": envelope(key=Key(b"short", 1)),
    "attempt 0": envelope(key=Key(b"t" * 16, 0)),
    "a negative acknowledgement": envelope(ack=-1),
    "a beat in the sequence": envelope(body=m.Beat()),
    "a request outside it": envelope(sequence=0),
    "a kind that nobody knows": msgspec.msgpack.encode(
        [PROTOCOL, b"8 bytes!", 1, 9, 0, None, ["Obey", "me"]]
    ),
    "a field too few": msgspec.msgpack.encode([PROTOCOL, b"8 bytes!", 1, 9, 0, None, ["AskStats"]]),
    "a field of another type": msgspec.msgpack.encode(
        [PROTOCOL, b"8 bytes!", 1, 9, 0, None, ["AskStats", "one"]]
    ),
    "a temperature that is no number": envelope(key=Key(b"t" * 16, 1), body=submit(4, 4, "p")).replace(
        msgspec.msgpack.encode("temperature") + b"\xcb" + bytes(8),
        msgspec.msgpack.encode("temperature") + b"\xcb\x7f\xf8" + bytes(6),
    ),
    "nested deeply": b"\x91" * 100_000,
    "a length that lies": b"\x97" + b"\xdd\xff\xff\xff\xff" * 4,
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_what_is_no_message_of_this_protocol_is_counted_logged_once_and_answered_by_nothing(
    worker: LoneWorker, gateway: Dialler, what: str
) -> None:
    read_log(worker, gateway)
    before, logged = gateway.stats()["messages_rejected"], worker.said("a message was rejected")
    for _ in range(3):
        gateway.put(UNUSABLE[what])
    assert gateway.stats()["messages_rejected"] == before + 3
    assert gateway.quiet(0.1)
    read_log(worker, gateway)
    assert worker.said("a message was rejected") <= logged + 2  # of which one is that it was read to here


@pytest.mark.parametrize("frames", [[], [b""], [b"", WHOLE], [WHOLE, WHOLE, WHOLE]])
def test_a_message_of_another_number_of_frames_is_counted(
    worker: LoneWorker, gateway: Dialler, frames: list[bytes]
) -> None:
    before = gateway.stats()["messages_rejected"]
    gateway.socket.send_multipart([b"one", *frames])
    assert gateway.stats()["messages_rejected"] == before + 1


def test_a_message_that_is_too_long_is_not_taken_and_others_are_served(
    worker: LoneWorker, gateway: Dialler, dial: Callable[..., Dialler]
) -> None:
    before = gateway.stats()
    big = dial(worker)
    big.hear(m.Welcome)
    big.put(bytes(MAX_MESSAGE + 1))
    after = gateway.stats()
    deadline = time.monotonic() + 20
    while after["messages_rejected"] == before["messages_rejected"] and time.monotonic() < deadline:
        after = gateway.stats()
    assert after["messages_rejected"] == before["messages_rejected"] + 1
    read_log(worker, gateway)
    assert worker.said(f"a message of {MAX_MESSAGE + 1} bytes") == 1


def test_a_repeated_message_is_taken_once(worker: LoneWorker, gateway: Dialler) -> None:
    before = gateway.stats()["messages_stale"]
    raw = gateway.link.wrap(None, m.AskStats(5), time.monotonic())
    for _ in range(3):
        gateway.put(raw)
    assert gateway.hear(m.Stats).number == 5
    assert gateway.stats()["messages_stale"] == before + 2


def test_messages_out_of_order_are_taken_in_order(worker: LoneWorker, gateway: Dialler) -> None:
    raws = [gateway.link.wrap(None, m.AskStats(number), time.monotonic()) for number in range(10, 15)]
    for raw in reversed(raws):
        gateway.put(raw)
    assert [gateway.hear(m.Stats).number for _ in raws] == [10, 11, 12, 13, 14]


def test_a_session_that_is_not_known_is_told_so_after_a_moment(
    worker: LoneWorker, dial: Callable[..., Dialler]
) -> None:
    stranger = dial(worker, hello=False)
    stranger.link.session = 4
    deadline = time.monotonic() + 20
    while not any(isinstance(e.body, m.Reset) for e in stranger.datagrams):
        assert time.monotonic() < deadline
        stranger.put(envelope(session=4))
        stranger.poll(100)
    assert {e.session for e in stranger.datagrams} == {4}


# ------------------------------------------------------------------------------------------------ who may pair
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "f" * 32}, "model"),
        ({"numeric": "weights=bf16 compute=bf16 kv=bf16"}, "numeric"),
        ({"geometry": Geometry.attention(32, 3, 2, 16, "f32")}, "page_size: 16 here, 32 there"),
        ({"geometry": Geometry.attention(16, 4, 2, 16, "f32")}, "layers"),
        ({"key_id": "0" * 16}, "key_id"),
        ({"position": "elsewhere"}, "position"),
        ({"transport": "nixl"}, "transport: shm here, nixl there"),
        ({"role": "decode"}, "cannot be paired"),
        ({"role": "unified"}, "cannot be paired"),
    ],
)
def test_a_worker_of_another_kind_is_not_paired_and_told_what_differs(
    workers: dict[str, LoneWorker], dial: Callable[..., Dialler], changes: dict[str, Any], named: str
) -> None:
    answer = dial(workers["decode"], info=like_prefill(workers["decode"], **changes)).hear(m.Rejected)
    assert named in answer.reason


@pytest.mark.parametrize("pid", [0, -1, 2**22 + 1, 2**31, 2**63])
def test_a_worker_that_lies_about_its_process_harms_nobody(
    workers: dict[str, LoneWorker], dial: Callable[..., Dialler], pid: int
) -> None:
    decode = workers["decode"]
    dial(decode, info=like_prefill(decode, pid=pid)).hear(m.Rejected)
    assert dial(decode, hello=True).hear(m.Welcome).info == decode.info


# --------------------------------------------------------------------------------- decode, and a prefill that lies
class Landing(NamedTuple):
    """A request of 5 pages on the decode worker that has been granted, started and credited."""

    gateway: Dialler
    prefill: Dialler
    key: Key
    slots: tuple[tuple[int, int], ...]


@pytest.fixture
def landing(workers: dict[str, LoneWorker], dial: Callable[..., Dialler]) -> Iterator[Landing]:
    decode = workers["decode"]
    gateway, info = dial(decode), like_prefill(decode)
    prefill = dial(decode, info=info)
    prefill.hear(m.Welcome)
    key = fresh_key()
    gateway.send(key, submit(70, 8, info.worker))
    assert prefill.hear(h.Grant, key) == h.Grant(70, 5)
    prefill.send(key, h.Started(5))
    slots = prefill.hear(h.Credit, key).slots
    assert len(slots) == 5
    yield Landing(gateway, prefill, key, slots)
    # However the request ended: with prefill's word that it is quiet, nothing is held.
    prefill.send(key, h.Abort("test", "the test is over"))
    prefill.send(key, h.Drained())
    wait_all_free(gateway)


def wait_for(gateway: Dialler, name: str, value: float, seconds: float = 20) -> dict[str, float]:
    """The statistics once this one has this value: what two connections bring has no order."""
    deadline = time.monotonic() + seconds
    while (stats := gateway.stats())[name] != value:
        assert time.monotonic() < deadline, (name, stats[name], value)
    return stats


def wait_all_free(gateway: Dialler, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while True:
        stats = gateway.stats()
        held = [stats["pages_leased"], stats["handoffs_open"], stats.get("slots_granted", 0)]
        if not any(held):
            assert stats["pages_free"] == stats["pages_total"]
            return
        assert time.monotonic() < deadline, stats


LIES: dict[str, tuple[Callable[[tuple[int, int]], m.Body], str | None]] = {
    # what prefill says, given one slot that is really its own -> how the request ends (None: it goes on)
    "a page that does not exist": (lambda slot: h.Landed(1, ((5, *slot),)), "kv_integrity"),
    "a huge page": (lambda slot: h.Landed(1, ((2**62, *slot),)), "kv_integrity"),
    "a negative page": (lambda slot: h.Landed(1, ((-1, *slot),)), "kv_integrity"),
    "a slot that does not exist": (lambda _: h.Landed(1, ((0, 10**9, 1),)), None),
    "a negative slot": (lambda _: h.Landed(1, ((0, -1, 1),)), None),
    "a use that was never granted": (lambda slot: h.Landed(1, ((0, slot[0], slot[1] + 1),)), None),
    "a number of pages that cannot be": (lambda _: h.Complete(70, 6, 1, b""), "kv_integrity"),
    "fewer tokens than were reserved": (lambda _: h.Complete(1, 5, 1, b""), "kv_integrity"),
    "complete, with nothing written": (lambda _: h.Complete(70, 5, 0, b""), "kv_integrity"),
    "another number of pages taken": (lambda _: h.Started(4), None),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_of_prefill_ends_at_most_its_own_request(landing: Landing, lie: str) -> None:
    gateway, prefill, key, slots = landing
    say, code = LIES[lie]
    before = gateway.stats()
    prefill.send(key, say(slots[0]))
    if code is None:
        assert prefill.quiet(0.2)
        assert gateway.stats()["handoffs_open"] == 1
    else:
        outcome = gateway.hear(m.Ended, key).outcome
        assert isinstance(outcome, Failed)
        assert outcome.code == code
        assert prefill.hear(h.Abort, key).code == code
    assert gateway.stats()["pages_landed"] == before["pages_landed"]


def test_a_page_of_rubbish_is_asked_for_once_more_and_then_ends_its_request(landing: Landing) -> None:
    gateway, prefill, key, slots = landing
    prefill.send(key, h.Landed(1, ((0, *slots[0]),)))  # nothing was ever written there
    again = prefill.hear(h.Resend, key)
    assert again.page == 0
    assert again.slot != slots[0]
    prefill.send(key, h.Landed(2, ((0, *again.slot),)))
    outcome = gateway.hear(m.Ended, key).outcome
    assert isinstance(outcome, Failed)
    assert outcome.code == "kv_integrity"
    assert prefill.hear(h.Abort, key).code == "kv_integrity"


@pytest.mark.parametrize(
    "body",
    [h.Complete(70, 5, 1, b""), h.Started(5), h.Landed(1, ((0, 0, 1),))],
    ids=lambda b: type(b).__name__,
)
def test_what_is_said_of_an_unknown_ticket_is_answered_so_and_counted(
    workers: dict[str, LoneWorker], dial: Callable[..., Dialler], body: m.Body
) -> None:
    decode = workers["decode"]
    prefill, gateway, key = dial(decode, info=like_prefill(decode)), dial(decode), fresh_key()
    before = gateway.stats()
    prefill.send(key, body)
    assert prefill.hear(h.Abort, key).code == "unknown_ticket"
    after = wait_for(gateway, "messages_stale", before["messages_stale"] + 1)
    assert {k: after[k] for k in MOVING} == {k: before[k] for k in MOVING} | {
        "slots_free": after["slots_free"]
    }
    # What asks for nothing is answered by nothing.
    for silent in (h.Drained(), h.Abort("gone", "gone")):
        prefill.send(key, silent)
    wait_for(gateway, "messages_stale", before["messages_stale"] + 3)
    assert prefill.quiet(0.1)


def test_unknown_tickets_are_logged_once_for_each_kind_and_those_that_ended_here_not_at_all(
    landing: Landing, workers: dict[str, LoneWorker]
) -> None:
    gateway, prefill, key, _ = landing
    decode, named = workers["decode"], "for the unknown attempt"
    gateway.send(key, m.Cancel("client_gone", "the client left"))
    prefill.hear(h.Abort, key)
    prefill.send(key, h.Drained())
    wait_for(gateway, "handoffs_open", 0)
    prefill.send(key, h.Started(5))  # had crossed the abort
    assert prefill.hear(h.Abort, key).code == "unknown_ticket"
    for _ in range(3):
        unknown = fresh_key()
        prefill.send(unknown, h.Complete(70, 5, 1, b""))
        prefill.hear(h.Abort, unknown)
    read_log(decode, gateway)
    assert decode.said(f"Started of {prefill.name} {named}") == 0
    assert decode.said(f"Complete of {prefill.name} {named}") == 1


def test_one_prefill_worker_cannot_speak_of_anothers_ticket(
    landing: Landing, workers: dict[str, LoneWorker], dial: Callable[..., Dialler]
) -> None:
    gateway, key = landing.gateway, landing.key
    other = dial(workers["decode"], info=like_prefill(workers["decode"]))
    other.hear(m.Welcome)
    before = gateway.stats()
    for body in (h.Abort("x", "x"), h.Drained(), h.Complete(1, 1, 1, b""), h.Landed(1, ((0, 0, 1),))):
        other.send(key, body)
    after = wait_for(gateway, "messages_stale", before["messages_stale"] + 4)
    assert other.quiet(0.1)
    assert after["handoffs_open"] == before["handoffs_open"]


# --------------------------------------------------------------------------------- prefill, and a decode that lies
@pytest.fixture
def fake(
    workers: dict[str, LoneWorker], dial: Callable[..., Dialler]
) -> Iterator[tuple[Dialler, FakeDecode]]:
    """(gateway, decode): the prefill worker is paired with a decode worker that is this test."""
    prefill = workers["prefill"]
    gateway = dial(prefill)
    decode = FakeDecode(KEYS, prefill.info)
    try:
        gateway.send(None, m.Connect(decode.info.address, decode.info.worker, decode.info.incarnation))
        decode.welcome()
        assert gateway.hear(m.Paired) == m.Paired("fake-decode", "", decode.info.incarnation)
        yield gateway, decode
        wait_all_free(gateway)
    finally:
        decode.close()


@pytest.mark.parametrize(("tokens", "pages"), [(70, 6), (70, 0), (69, 5), (10**12, 10**12), (-1, -1)])
def test_a_grant_for_pages_that_do_not_exist_ends_its_request_only(
    fake: tuple[Dialler, FakeDecode], tokens: int, pages: int
) -> None:
    gateway, decode = fake
    key, other = fresh_key(), fresh_key()
    gateway.send(key, submit(70, 8, "fake-decode"))
    decode.send(key, h.Grant(tokens, pages))
    outcome = gateway.hear(m.Ended, key).outcome
    assert isinstance(outcome, Failed)
    assert outcome.code == "kv_integrity"
    assert f"{pages} pages" in outcome.reason
    assert decode.hear(h.Abort, key).code == "kv_integrity"
    decode.hear(h.Drained, key)
    # The pair goes on with the next one, to its end.
    hand_over(gateway, decode, other)


def hand_over(gateway: Dialler, decode: FakeDecode, key: Key) -> None:
    """A request of 70 tokens, all of the way."""
    gateway.send(key, submit(70, 8, "fake-decode"))
    decode.send(key, h.Grant(70, 5))
    decode.hear(h.Started, key)
    decode.send(key, h.Credit(0, tuple((slot, 1) for slot in range(5))))
    complete = decode.hear(h.Complete, key)
    assert (complete.tokens, complete.pages) == (70, 5)
    decode.send(key, h.Ack())
    gateway.hear(m.Ended, key)


@pytest.mark.parametrize(
    "credit",
    [
        h.Credit(0, ((8, 1),)),
        h.Credit(0, ((-1, 1),)),
        h.Credit(0, ((2**62, 1),)),
        h.Credit(0, ((3, 1), (3, 1))),
        h.Credit(0, ((3, 1), (3, 2))),
    ],
    ids=["beyond", "negative", "huge", "twice", "twice with two uses"],
)
def test_credit_for_slots_that_do_not_exist_writes_nothing_and_ends_its_request_only(
    fake: tuple[Dialler, FakeDecode], credit: h.Credit
) -> None:
    gateway, decode = fake
    key = fresh_key()
    decode.receiver.memory[:] = 0xAB
    gateway.send(key, submit(70, 8, "fake-decode"))
    decode.send(key, h.Grant(70, 5))
    decode.hear(h.Started, key)
    decode.send(key, credit)
    outcome = gateway.hear(m.Ended, key).outcome
    assert isinstance(outcome, Failed)
    assert outcome.code == "transport_error"
    decode.hear(h.Drained, key)
    assert (decode.receiver.memory == 0xAB).all()
    hand_over(gateway, decode, fresh_key())


def test_what_decode_says_out_of_turn_is_counted_and_changes_nothing(
    fake: tuple[Dialler, FakeDecode],
) -> None:
    gateway, decode = fake
    before = gateway.stats()["messages_stale"]
    early = fresh_key()
    for body in (h.Credit(0, ((0, 1),)), h.Resend(0, (0, 1)), h.Ack()):
        decode.send(early, body)  # of a ticket that nobody has heard of
    gateway.send(early, submit(70, 8, "fake-decode"))
    for body in (h.Credit(0, ((0, 1),)), h.Resend(0, (0, 1)), h.Ack()):
        decode.send(early, body)  # before its grant
    decode.send(early, h.Grant(70, 5))
    decode.hear(h.Started, early)
    for body in (h.Credit(7, ((0, 1),)), h.Ack(), h.Grant(70, 5)):
        decode.send(early, body)
    wait_for(gateway, "messages_stale", before + 9)
    decode.send(early, h.Credit(0, tuple((slot, 1) for slot in range(5))))
    decode.hear(h.Complete, early)
    decode.send(early, h.Ack())
    gateway.hear(m.Ended, early)


@pytest.mark.parametrize("page", [3, -1, 99])
def test_a_decode_that_wants_a_page_again_that_was_never_sent_ends_that_handoff(
    fake: tuple[Dialler, FakeDecode], page: int
) -> None:
    gateway, decode = fake
    key = fresh_key()
    gateway.send(key, submit(70, 8, "fake-decode"))
    decode.send(key, h.Grant(70, 5))
    decode.hear(h.Started, key)
    decode.send(key, h.Resend(page, (0, 1)))
    decode.hear(h.Drained, key)
    outcome = gateway.hear(m.Ended, key).outcome
    assert isinstance(outcome, Failed)
    assert outcome.code == "kv_integrity"


def test_an_abort_of_an_unknown_ticket_is_answered_by_drained_and_nothing_starts_under_it_any_more(
    fake: tuple[Dialler, FakeDecode],
) -> None:
    gateway, decode = fake
    key = fresh_key()
    decode.send(key, h.Abort("client_gone", "the client left"))
    decode.hear(h.Drained, key)
    gateway.send(key, submit(70, 8, "fake-decode"))
    outcome = gateway.hear(m.Ended, key).outcome
    assert isinstance(outcome, Refused | Aborted)


@pytest.mark.parametrize(
    ("incarnation", "said"),
    [(True, "another incarnation"), (False, "model")],
    ids=["another incarnation", "another model"],
)
def test_prefill_does_not_pair_with_another_decode_worker_than_it_was_told_of(
    workers: dict[str, LoneWorker], dial: Callable[..., Dialler], incarnation: bool, said: str
) -> None:
    gateway = dial(workers["prefill"])
    decode = FakeDecode(KEYS, workers["prefill"].info)
    try:
        expected = wire.new_incarnation() if incarnation else decode.info.incarnation
        if not incarnation:
            decode.info = msgspec.structs.replace(decode.info, model="f" * 32)
        gateway.send(None, m.Connect(decode.info.address, decode.info.worker, expected))
        decode.welcome()
        paired = gateway.hear(m.Paired)
        assert said in paired.error
        key = fresh_key()
        gateway.send(key, submit(70, 8, "fake-decode"))
        assert gateway.hear(m.Ended, key).outcome.code == "no_pair"
    finally:
        decode.close()


@pytest.mark.parametrize(
    "landing_text", ["", "nonsense", "/etc/passwd:28672", "/proc/self/mem:28672", "/dev/null:0", "x:-5"]
)
def test_a_segment_that_cannot_be_opened_is_said_and_the_worker_goes_on(
    workers: dict[str, LoneWorker], dial: Callable[..., Dialler], landing_text: str
) -> None:
    gateway = dial(workers["prefill"])
    decode = FakeDecode(KEYS, workers["prefill"].info)
    try:
        gateway.send(None, m.Connect(decode.info.address, decode.info.worker, decode.info.incarnation))
        decode.hear(m.Hello)
        decode.send(None, m.Welcome(decode.info, landing_text, 1))
        assert gateway.hear(m.Paired).error
        assert gateway.stats()["pages_leased"] == 0
    finally:
        decode.close()


# ------------------------------------------------------------------------------------------------------ anything
def any_body(rng: random.Random) -> m.Body:
    """A well-formed message of the other half, of any content."""

    def number() -> int:
        return rng.choice([0, 1, 2, 5, -1, 70, 2**31, 2**62, -(2**62)])

    def slot() -> tuple[int, int]:
        return rng.randrange(-2, 12), rng.choice([1, 2, number()])

    return rng.choice(
        [
            lambda: h.Grant(rng.choice([70, number()]), rng.choice([5, number()])),
            lambda: h.Credit(rng.choice([0, 0, number()]), tuple(slot() for _ in range(rng.randrange(6)))),
            lambda: h.Resend(number(), slot()),
            lambda: h.Ack(),
            lambda: h.Started(number()),
            lambda: h.Landed(
                number(), tuple((rng.randrange(-1, 7), *slot()) for _ in range(rng.randrange(6)))
            ),
            lambda: h.Complete(
                rng.choice([70, number()]), rng.choice([5, number()]), number(), rng.randbytes(6)
            ),
            lambda: h.Abort("fuzz", "fuzz"),
            lambda: h.Drained(),
        ]
    )()


def settle(gateway: Dialler, peer: Any, keys: list[Key], closing: list[m.Body]) -> None:
    """After everything was said: the peer says that it is quiet, and nothing is held any more."""
    for key in keys:
        gateway.send(key, m.Cancel("test", "the test is over"))
        for body in closing:
            peer.send(key, body)
    wait_all_free(gateway)


@pytest.mark.parametrize("seed", range(3))
def test_no_words_of_a_prefill_worker_stop_a_decode_worker(
    workers: dict[str, LoneWorker], dial: Callable[..., Dialler], seed: int
) -> None:
    decode, rng = workers["decode"], random.Random(seed)
    gateway, info = dial(decode), like_prefill(decode)
    prefill = dial(decode, info=info)
    prefill.hear(m.Welcome)
    keys = [fresh_key() for _ in range(6)]
    for key in keys[:4]:
        gateway.send(key, submit(70, 8, info.worker))
    for _ in range(400):
        prefill.send(rng.choice(keys), any_body(rng))
    settle(gateway, prefill, keys, [h.Abort("test", "over"), h.Drained()])
    read_log(decode, gateway)
    assert decode.alive
    assert decode.said("Traceback") == 0


@pytest.mark.parametrize("seed", range(3))
def test_no_words_of_a_decode_worker_stop_a_prefill_worker(
    fake: tuple[Dialler, FakeDecode], workers: dict[str, LoneWorker], seed: int
) -> None:
    (gateway, decode), rng = fake, random.Random(seed)
    keys = [fresh_key() for _ in range(6)]
    for key in keys[:4]:
        gateway.send(key, submit(70, 8, "fake-decode"))
    for _ in range(400):
        decode.send(rng.choice(keys), any_body(rng))
    settle(gateway, decode, keys, [h.Abort("test", "over")])
    read_log(workers["prefill"], gateway)
    assert workers["prefill"].alive
    assert workers["prefill"].said("Traceback") == 0
    hand_over(gateway, decode, fresh_key())
