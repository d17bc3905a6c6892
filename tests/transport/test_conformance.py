"""What every transport keeps, with real processes at the writing end: the contract at the top of transport/base.py.

NIXL is here twice because it has two ways of moving bytes, and what ends a write differs between them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from writing_peer import PATIENCE_S, SLOTS, STRIDE, Peer, expected, landing, peers
from writing_process import content

from hermetic.transport.base import Receiver, Transport, TransportError, Written
from hermetic.transport.choose import open_transport

BIG = 4 << 20  # pages that take long enough to be stopped in the middle of
MANY = 8


@pytest.fixture(params=["shm", "mooncake", "nixl", "nixl over tcp"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Transport]:
    name, _, only = request.param.partition(" over ")
    if name == "nixl":
        monkeypatch.setenv("UCX_TLS", only or "tcp,cma")
    made = open_transport(name)
    yield made
    made.close()


def wait_for(condition: Callable[[], bool]) -> bool:
    """Whether it became true; it is asked often, for as long as a slow machine may need."""
    until = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(1e-3)
    return True


def stopped_in_the_middle(transport: Transport, peer: Peer, receiver: Receiver) -> None:
    """`peer` has opened `receiver` (MANY pages of BIG) and is stopped when some of the bytes of batch 1 are there."""
    peer.open(receiver, BIG)
    peer.tell("write", 1, [(slot, slot) for slot in range(MANY)])
    memory = receiver.memory
    while not memory[:, :: BIG // 64].any():
        pass
    peer.stop()
    there, before = int(np.count_nonzero(memory)), -1
    while there != before:  # what was in the kernel's buffers still arrives
        time.sleep(0.1)
        there, before = int(np.count_nonzero(memory)), there
    assert 0 < there < memory.size, "the writer was stopped too early or too late: BIG or MANY is wrong"


def test_a_batch_arrives_whole_in_its_slots_and_nowhere_else(transport: Transport) -> None:
    with peers(transport) as [peer], landing(transport, peer) as receiver:
        assert receiver.memory.shape == (SLOTS, STRIDE)
        peer.open(receiver)
        pages = [(4, 1), (0, 2), (5, 3)]
        peer.write(7, pages)
        assert peer.ended(1) == [Written(7, ok=True, stopped=True)]
        np.testing.assert_array_equal(receiver.memory, expected(pages))
        peer.write(8, [(0, 9)])
        assert peer.ended(1) == [Written(8, ok=True, stopped=True)]
        np.testing.assert_array_equal(receiver.memory, expected([*pages, (0, 9)]))
        assert peer.ended(1, 0.05) == []  # each is reported once
        assert peer.end() == 0  # without having closed anything: leaving is not a crash


batches = st.lists(
    st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(0, 999)), max_size=SLOTS, unique_by=lambda x: x[0]),
    min_size=1,
    max_size=4,
)  # fmt: skip


def test_whatever_the_batches_every_byte_is_where_it_belongs(transport: Transport) -> None:
    with peers(transport) as [peer], landing(transport, peer) as receiver:
        peer.open(receiver)
        number = iter(range(1_000_000))

        @settings(max_examples=20, suppress_health_check=list(HealthCheck))
        @given(batches)
        def check(plan: list[list[tuple[int, int]]]) -> None:
            receiver.memory[:] = 0
            landed, flying, waiting = [], {}, set()
            for pages in plan:
                batch = next(number)
                if waiting & {slot for slot, _ in pages}:
                    # Decode gives a slot again only when it has seen it written: any order will do for the others.
                    assert all(x.ok for x in peer.ended(len(flying)))
                    flying.clear()
                    waiting.clear()
                peer.write(batch, pages)
                flying[batch] = pages
                waiting |= {slot for slot, _ in pages}
                landed += pages
            assert {x.batch for x in peer.ended(len(flying)) if x.ok} == set(flying)
            np.testing.assert_array_equal(receiver.memory, expected(landed))

        check()


@pytest.mark.parametrize("bad", [-1, SLOTS, 1 << 40])
def test_a_batch_with_a_slot_that_does_not_exist_is_refused_whole(transport: Transport, bad: int) -> None:
    with peers(transport) as [peer], landing(transport, peer) as receiver:
        peer.open(receiver)
        peer.write(1, [(0, 5), (bad, 6), (1, 7)])
        assert peer.ended(1) == [Written(1, ok=False, stopped=True)]
        peer.write(2, [(2, 8), (2, 9)])
        assert peer.ended(1) == [Written(2, ok=False, stopped=True)]
        assert not receiver.memory.any()
        peer.write(3, [(0, 5)])  # and nothing else is the worse for it
        assert peer.ended(1) == [Written(3, ok=True, stopped=True)]


def test_a_descriptor_of_another_layout_or_another_transport_is_refused_with_a_reason(
    transport: Transport,
) -> None:
    with peers(transport) as [peer], landing(transport, peer) as receiver:
        with pytest.raises(TransportError, match="same page layout"):
            transport.sender(receiver.descriptor(), STRIDE + 8)
        for nonsense in ("", "nonsense", "mooncake:localhost:port:here:4096", "nixl:!:0:4096", "x:1:2:3:4"):
            with pytest.raises(TransportError, match="descriptor"):
                transport.sender(nonsense, STRIDE)


def test_a_peer_killed_in_the_middle_is_fenced_and_its_successor_works(transport: Transport) -> None:
    with peers(transport, 2) as [peer, successor]:
        with landing(transport, peer, MANY, BIG) as receiver:
            stopped_in_the_middle(transport, peer, receiver)
            peer.kill()
            assert wait_for(receiver.fence)
        with landing(transport, successor) as receiver:
            successor.open(receiver)
            successor.write(1, [(3, 4)])
            assert successor.ended(1) == [Written(1, ok=True, stopped=True)]
            np.testing.assert_array_equal(receiver.memory, expected([(3, 4)]))


def test_a_stopped_peer_that_goes_on_before_a_fence_writes_into_its_own_slots_only(
    transport: Transport,
) -> None:
    with (
        peers(transport, 2) as [peer, other],
        landing(transport, peer, MANY, BIG) as receiver,
        landing(transport, other) as receiver_of_other,
    ):
        other.open(receiver_of_other)
        stopped_in_the_middle(transport, peer, receiver)
        peer.resume()
        assert peer.answer() == "written"
        assert peer.ended(1) == [Written(1, ok=True, stopped=True)]
        pages = [(slot, slot) for slot in range(MANY)]
        np.testing.assert_array_equal(receiver.memory, expected(pages, MANY, BIG))
        assert not receiver_of_other.memory.any()


def test_after_a_fence_nothing_of_a_stopped_peer_lands_anywhere(transport: Transport) -> None:
    with peers(transport, 2) as [peer, other], landing(transport, peer, MANY, BIG) as receiver:
        stopped_in_the_middle(transport, peer, receiver)
        if transport.name == "shm":
            assert not receiver.fence()  # only the end of that process is one
            peer.kill()
            assert wait_for(receiver.fence)
            return
        old = receiver.memory
        assert old.any()
        assert receiver.fence()
        assert receiver.fence()  # it stays one
        # Memory for new peers, as much as could ever be mistaken for the old.
        with landing(transport, other, MANY, BIG) as new:
            extra = [transport.receiver(MANY, BIG, os.getpid()) for _ in range(2)]
            peer.resume()
            assert peer.answer() == "written"
            assert peer.ended(1) == [Written(1, ok=False, stopped=False)]  # in doubt, as far as it can know
            peer.tell("close")
            assert peer.answer() == "closed"
            assert not old.any()  # whoever still looks at it sees nobody's bytes
            for one in (new, *extra):
                assert not one.memory.any()
            other.open(new, BIG)
            other.write(1, [(1, 2)])
            assert other.ended(1) == [Written(1, ok=True, stopped=True)]
            np.testing.assert_array_equal(new.memory, expected([(1, 2)], MANY, BIG))
            for one in extra:
                one.close()


def test_after_a_restart_of_decode_the_old_sender_fails_and_a_new_one_works(transport: Transport) -> None:
    with peers(transport, 2) as [peer, new_peer]:
        with landing(transport, peer) as old:
            peer.open(old)
            peer.write(1, [(0, 1)])
            assert peer.ended(1) == [Written(1, ok=True, stopped=True)]
        with landing(transport, new_peer) as receiver:
            peer.write(2, [(1, 2)])
            late = peer.ended(1)
            # Shared memory outlives its maker as long as somebody maps it: the write is fine, and nobody's.
            assert [x.batch for x in late] == [2]
            assert late[0].ok == (transport.name == "shm")
            assert not receiver.memory.any()
            new_peer.open(receiver)
            new_peer.write(1, [(2, 3)])
            assert new_peer.ended(1) == [Written(1, ok=True, stopped=True)]
            np.testing.assert_array_equal(receiver.memory, expected([(2, 3)]))


def test_fencing_one_peer_disturbs_no_other(transport: Transport) -> None:
    with peers(transport, 2) as [peer, fenced], landing(transport, peer) as receiver:
        peer.open(receiver)
        for round_ in range(4):
            with landing(transport, fenced) as other:
                if round_ == 0:
                    fenced.open(other)
                    fenced.write(1, [(0, 1)])
                    assert fenced.ended(1)[0].ok
                    fenced.kill()
                peer.tell("write", round_, [(slot, 10 * round_ + slot) for slot in range(SLOTS)])
                assert transport.name == "shm" or other.fence()
                assert peer.answer() == "written"
                assert peer.ended(1) == [Written(round_, ok=True, stopped=True)]
            np.testing.assert_array_equal(
                receiver.memory, expected([(slot, 10 * round_ + slot) for slot in range(SLOTS)])
            )
            if round_ == 0 and transport.name == "shm":
                return  # a segment is made for a process that lives


def test_two_peers_write_at_once_each_into_its_own(transport: Transport) -> None:
    with (
        peers(transport, 2) as [a, b],
        landing(transport, a) as into_a,
        landing(transport, b) as into_b,
    ):
        assert into_a.descriptor() != into_b.descriptor()
        a.open(into_a)
        b.open(into_b)
        for round_ in range(10):
            plan = {
                a: [(s, 100 * round_ + s) for s in range(SLOTS)],
                b: [(s, 7000 + round_) for s in range(3)],
            }
            for peer, pages in plan.items():
                peer.tell("write", round_, pages)
            for peer in plan:
                assert peer.answer() == "written"
                assert peer.ended(1) == [Written(round_, ok=True, stopped=True)]
            np.testing.assert_array_equal(into_a.memory, expected(plan[a]))
            np.testing.assert_array_equal(into_b.memory, expected(plan[b]))


def test_both_ends_in_one_process_work_and_closing_is_idempotent(transport: Transport) -> None:
    receiver = transport.receiver(SLOTS, STRIDE, os.getpid())
    sender = transport.sender(receiver.descriptor(), STRIDE)
    sources = [content(seed, STRIDE) for seed in range(3)]
    sender.write(1, [(sources[0], 0), (sources[1], 1), (sources[2], 4)])
    ended: list[Written] = []
    assert wait_for(lambda: bool(ended.extend(sender.poll()) or ended))
    assert ended == [Written(1, ok=True, stopped=True)]
    np.testing.assert_array_equal(receiver.memory, expected([(0, 0), (1, 1), (4, 2)]))
    for _ in range(2):
        sender.close()
        receiver.close()
        transport.close()
