"""The simulator's parts, each against what it promises: the fake model, the plan, virtual time, the network, the transport."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermetic.engine.batch import Rows
from hermetic.engine.engine import Engine, Role
from hermetic.engine.sequence import Emit, Job
from hermetic.handoff.messages import Key
from hermetic.kv.pool import Pool
from hermetic.model.params import SamplingParams
from hermetic.proof.simulation.events import Events
from hermetic.proof.simulation.loop import VirtualLoop
from hermetic.proof.simulation.model import EOS, GEOMETRY, PAGE_SIZE, FakeRunner, answer
from hermetic.proof.simulation.network import DialledLine, Network
from hermetic.proof.simulation.options import CLASSES, Narrowed, Rates
from hermetic.proof.simulation.plan import Asked, make
from hermetic.proof.simulation.process import HASHER, SEALS
from hermetic.transport.base import TransportError

PROMPT = [7, 3, 250, 9, 9, 1, 42, 17, 5]


def engine(verify: bool = True) -> Engine:
    pool = Pool(GEOMETRY, 16)
    runner = FakeRunner(SEALS, pool, Rows(4, 16), verify, lambda *_: None)
    return Engine(runner, HASHER, SEALS, Role.UNIFIED, 64, EOS, 4)  # type: ignore[arg-type]


def job(prompt: list[int], max_tokens: int, number: int = 1) -> Job:
    key = Key(number.to_bytes(16, "little"), 1)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return Job(key, np.array(prompt, np.int64), len(prompt), params, 1, 0, 0, bytes([number]) * 24, number)


def tokens_of(one: Engine, key: Key) -> list[int]:
    out = []
    while one.busy:
        out += [event.token for event in one.step() if isinstance(event, Emit) and event.key == key]
    return out


# -------------------------------------------------------------------------------- the model
@settings(max_examples=30)
@given(st.lists(st.integers(0, 250), min_size=1, max_size=24), st.integers(1, 16))
def test_the_engine_over_pages_says_what_the_tokens_alone_must_give(prompt: list[int], most: int) -> None:
    one = engine()
    neighbour, asked = job([1, 2, 3], 16, 2), job(prompt, most)
    one.submit(neighbour)
    one.submit(asked)
    assert tokens_of(one, asked.key) == answer(prompt, most)[0]


def prefilled() -> tuple[Engine, Job]:
    """A request whose prompt is in pages, with one token said."""
    one, asked = engine(verify=False), job(PROMPT, 8)
    one.submit(asked)
    while not any(isinstance(event, Emit) for event in one.step()):
        pass
    return one, asked


@pytest.mark.parametrize("row", range(len(PROMPT)))
@pytest.mark.parametrize("part", [0, 1])
def test_one_wrong_row_changes_the_answer(row: int, part: int) -> None:
    right = answer(PROMPT, 8)[0][1:]
    one, asked = prefilled()
    page = one.pages(asked.key)[row // PAGE_SIZE]
    GEOMETRY.lanes(one.pool.memory)[page, 0, 0, part * PAGE_SIZE + row % PAGE_SIZE] ^= np.uint64(1)
    assert tokens_of(one, asked.key) != right


def test_rows_beyond_the_fill_do_not_matter() -> None:
    one, asked = prefilled()
    page, filled = one.pages(asked.key)[-1], len(PROMPT) % PAGE_SIZE
    GEOMETRY.lanes(one.pool.memory)[page, 0, 0, filled + 1 : PAGE_SIZE] = np.uint64(12345)
    assert tokens_of(one, asked.key) == answer(PROMPT, 8)[0][1:]


def test_the_seals_that_it_writes_are_the_products() -> None:
    one, asked = prefilled()
    (seq,) = one._live[asked.key]
    assert seq.row is not None
    count = GEOMETRY.pages_for(seq.computed)
    fills = np.clip(seq.computed - np.arange(count) * PAGE_SIZE, 0, PAGE_SIZE)
    words, binds = one.rows.words[seq.row, :count], one.rows.binds[seq.row, :count]
    good = SEALS.verify(one.pool.memory[seq.pages[:count]], fills, words, binds)
    assert good.all()
    assert not SEALS.verify(one.pool.memory[seq.pages[:count]], fills, words + np.uint64(1), binds).any()


# --------------------------------------------------------------------------------- the plan
@settings(max_examples=25)
@given(st.integers(1, 10_000), st.sets(st.integers(0, 29), min_size=1), st.sampled_from(CLASSES))
def test_leaving_out_requests_and_faults_leaves_the_rest_as_it_was(
    seed: int, only: set[int], without: str
) -> None:
    whole = make(seed, Asked(30))
    part = make(seed, Asked(30, narrowed=Narrowed(only=tuple(only), without=(without,))))
    assert part.shape == whole.shape
    kept = [ask for ask in whole.asks if ask.number in only]
    assert [ask.tokens for ask in part.asks] == [ask.tokens for ask in kept]
    assert without == "abort" or part.asks == tuple(kept)
    told = {(f.at, f.kind, f.target, f.to) for f in whole.faults}
    assert {(f.at, f.kind, f.target, f.to) for f in part.faults} == {x for x in told if x[1] != without}


def test_every_kind_of_fault_is_in_some_seed() -> None:
    plans = [make(seed, Asked(50)) for seed in range(60)]
    kinds = {fault.kind for plan in plans for fault in plan.faults}
    rates = {name for plan in plans for name in CLASSES if getattr(plan.rates, name) > 0}
    assert rates == set(CLASSES)
    assert kinds == set(CLASSES) - {"loss", "duplicate", "late", "abort", "write_fails", "write_doubt"}


# ------------------------------------------------------------------------------------- time
def test_virtual_hours_pass_at_once_and_in_order() -> None:
    loop, seen = VirtualLoop(), []

    async def story() -> None:
        loop.call_later(7200.0, seen.append, "second")
        loop.call_later(3600.0, seen.append, "first")
        await asyncio.sleep(10_000.0)

    loop.run_until_complete(story())
    assert seen == ["first", "second"]
    assert loop.time() == pytest.approx(10_000.0)
    loop.close()


def test_what_can_never_come_is_not_waited_for() -> None:
    loop = VirtualLoop()
    with pytest.raises(RuntimeError, match="can never come"):
        loop.run_until_complete(loop.create_future())
    loop.close()


# ---------------------------------------------------------------------------------- network
@dataclass
class Ear:
    name: str
    got: list[bytes]
    alive: bool = True

    def arrive(self, connection: bytes, raw: bytes, answer: object) -> None:
        self.got.append(raw)


def network(**rates: float) -> tuple[VirtualLoop, Network, Ear, DialledLine]:
    loop = VirtualLoop()
    chances = Rates(**{**vars(Rates().quiet()), **rates})
    net = Network(1, chances, Events(loop.time), loop)
    here, there = Ear("here", []), Ear("there", [])
    net.ends["tcp://there:1"] = there
    return loop, net, there, DialledLine(net, here, "tcp://there:1", "there", b"r1", lambda _: None)


def settle(loop: VirtualLoop) -> None:
    loop.run_until_complete(asyncio.sleep(2.0))
    loop.close()


def test_a_quiet_network_delivers_each_message_once() -> None:
    loop, _, there, line = network()
    for i in range(50):
        line.put(b"%d" % i)
    settle(loop)
    assert sorted(there.got) == sorted(b"%d" % i for i in range(50))


def test_messages_are_lost_doubled_and_overtaken() -> None:
    for rates, expected in ({"loss": 1.0}, []), ({"duplicate": 1.0}, [b"x", b"x"]):
        loop, _, there, line = network(**rates)
        line.put(b"x")
        settle(loop)
        assert there.got == expected
    loop, _, there, line = network(late=0.5)
    for i in range(50):
        line.put(b"%03d" % i)
    settle(loop)
    assert there.got != sorted(there.got)
    assert len(there.got) == 50


def test_what_is_cut_delivers_nothing_until_it_is_mended_as_often_as_it_was_cut() -> None:
    loop, net, there, line = network()
    net.cut("here", "there")
    net.cut("there", "here")
    line.put(b"1")
    net.mend("here", "there")
    line.put(b"2")
    net.mend("here", "there")
    line.put(b"3")
    settle(loop)
    assert there.got == [b"3"]


def test_an_address_is_whoever_listens_there_when_a_message_arrives() -> None:
    loop, net, there, line = network()
    line.put(b"1")
    there.alive = False
    other = Ear("there", [])
    net.ends["tcp://there:1"] = other
    settle(loop)
    assert (there.got, other.got) == ([], [b"1"])


def test_a_descriptor_of_nobody_is_refused() -> None:
    from hermetic.proof.simulation.transport import Wires

    loop = VirtualLoop()
    wires = Wires(1, make(1, Asked(1)).shape, Rates(), Events(loop.time), loop, lambda _: True)
    for text in ("simulated:1", "mooncake:x"):
        with pytest.raises(TransportError):
            wires.sender(Ear("prefill-0", []), text, 4096)  # type: ignore[arg-type]
    loop.close()
