"""The control channel's decoder: whatever comes in, it is an envelope of this version or a ProtocolError."""

from __future__ import annotations

import random
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermetic.handoff import messages as h
from hermetic.handoff.messages import MAX_MESSAGE, PROTOCOL, Key
from hermetic.handoff.outcome import Completed, Failed
from hermetic.kv.geometry import Geometry
from hermetic.model.params import SamplingParams
from hermetic.worker import messages as m

KEY = Key(b"k" * 16, 1)
INFO = m.WorkerInfo(
    worker="prefill-0", role="prefill", incarnation=b"i" * 8, pid=1, host="h", address="tcp://127.0.0.1:1",
    transport="shm", source="127.0.0.1", slots=0, model="m", numeric="n", position="p", geometry=Geometry.attention(16, 2, 2, 8, "bf16"),
    key_id="k", pages=4, page_size=16, max_tokens=64, window=64, vocab=512, max_batch=8, verify="landing", eos=(0,),
)  # fmt: skip
BODIES: tuple[m.Body, ...] = (
    h.Grant(40, 3), h.Credit(0, ((1, 2), (3, 4))), h.Resend(1, (2, 3)), h.Ack(), h.Started(3),
    h.Landed(1, ((0, 1, 2),)), h.Complete(40, 3, 1, b"state"), h.Drained(), h.Abort("code", "reason"),
    m.Hello("gateway", None), m.Connect("tcp://a:1", "decode-0", b"i" * 8),
    m.Submit(b"\1\0\0\0", 1, SamplingParams(max_tokens=1), 1, 0, 7, "t", "", 1, "decode-0"),
    m.Cancel("c", "r"), m.AskStats(1), m.Welcome(INFO, "landing", 1), m.Rejected("why"),
    m.Tokens((m.TokenOut(KEY, 0, 5, -0.5, ((1, -0.5),)),)), m.ChoiceDone(0, "stop", 0), m.Preempted(0),
    m.Paired("decode-0", "", b"i" * 8), m.Ended(Failed("c", "r")), m.Ended(Completed()), m.Stats(1, {"a": 1.0}),
    m.Leave(), m.Register(INFO, False), m.Registered(), m.Beat(), m.Reset(),
)  # fmt: skip
DATAGRAMS = (m.Leave, m.Register, m.Registered, m.Beat, m.Reset)


def envelope(body: m.Body, **changes: object) -> m.Envelope:
    sequence = 0 if isinstance(body, DATAGRAMS) else 1
    made = m.Envelope(PROTOCOL, b"i" * 8, 1, sequence, 0, KEY, body)
    return msgspec.structs.replace(made, **changes)


def refused(raw: bytes) -> str:
    with pytest.raises(m.ProtocolError) as error:
        m.decode(raw)
    return str(error.value)


def test_there_is_a_sample_of_every_body() -> None:
    assert {type(body) for body in BODIES} == set(get_args(m.Body))


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_every_body_arrives_as_it_was_sent(body: m.Body) -> None:
    assert m.decode(m.encode(envelope(body))) == envelope(body)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_a_message_cut_short_anywhere_is_refused(body: m.Body) -> None:
    raw = m.encode(envelope(body))
    for length in range(len(raw)):
        refused(raw[:length])
    refused(raw + b"\0")


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_a_damaged_message_is_an_envelope_or_refused_and_nothing_else(body: m.Body) -> None:
    raw, draw = m.encode(envelope(body)), random.Random(type(body).__name__)
    for _ in range(400):
        damaged = bytearray(raw)
        for _ in range(draw.randint(1, 3)):
            damaged[draw.randrange(len(damaged))] = draw.choice(
                [0x00, 0x7F, 0x80, 0xC0, 0xDD, 0xFF, draw.randrange(256)]
            )
        try:
            got = m.decode(bytes(damaged))
        except m.ProtocolError:
            continue
        assert isinstance(got, m.Envelope)


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(raw: bytes) -> None:
    refused(raw)


values = st.recursive(
    st.none()
    | st.integers(-(2**63), 2**64 - 1)
    | st.binary(max_size=20)
    | st.text(max_size=20)
    | st.floats(),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=200)
@given(st.lists(values, min_size=7, max_size=9))
def test_well_formed_messagepack_that_is_no_envelope_is_refused(fields: list[object]) -> None:
    refused(msgspec.msgpack.encode([PROTOCOL, b"i" * 8, 1, 1, 0, None, *fields]))


@pytest.mark.parametrize("version", [PROTOCOL - 1, PROTOCOL + 1, 0, -1])
def test_another_version_is_refused_with_both_numbers(version: int) -> None:
    text = refused(m.encode(envelope(h.Ack(), version=version)))
    assert str(version) in text
    assert str(PROTOCOL) in text


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_what_belongs_into_a_session_has_a_number_there_and_a_datagram_has_none(body: m.Body) -> None:
    datagram = isinstance(body, DATAGRAMS)
    raw = m.encode(envelope(body, sequence=1 if datagram else 0))
    if isinstance(body, m.Rejected):
        m.decode(raw)  # answers a Hello, or an announcement
    else:
        assert type(body).__name__ in refused(raw)


@pytest.mark.parametrize(
    "changes",
    [
        {"incarnation": b""},
        {"incarnation": b"i" * 9},
        {"session": -1},
        {"sequence": -1},
        {"ack": -1},
        {"key": Key(b"k" * 15, 1)},
        {"key": Key(b"k" * 16, 0)},
        {"key": Key(b"", 1)},
    ],
)
def test_impossible_numbers_and_names_are_refused(changes: dict[str, object]) -> None:
    refused(m.encode(envelope(h.Ack(), **changes)))


def test_a_message_over_the_limit_is_refused_before_it_is_decoded() -> None:
    text = refused(bytes(MAX_MESSAGE + 1))
    assert str(MAX_MESSAGE + 1) in text
    assert str(MAX_MESSAGE) in text


def test_lengths_that_no_message_could_have_take_no_memory() -> None:
    raw = m.encode(envelope(h.Landed(1, ((0, 1, 2),))))
    for tail, head in ((5, b"\xdd"), (5, b"\xdf"), (5, b"\xc6"), (4, b"\xdd")):
        refused(raw[:-tail] + head + b"\xff\xff\xff\xff")


def test_arrays_nested_very_deep_are_refused() -> None:
    raw = m.encode(envelope(h.Ack()))
    refused(b"\x98" + raw[1:] + b"\x91" * 100_000 + b"\xc0")
