"""Workers join, are refused with the difference named, fall silent, forget, are replaced, and leave."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import pytest
import zmq
import zmq.asyncio
from scripted_worker import GEOMETRY, World, answer, ask, info, read, world

from hermetic.gateway import members
from hermetic.gateway.backend import Failed, Refused
from hermetic.gateway.members import TICK_SECONDS
from hermetic.handoff.messages import PROTOCOL
from hermetic.kv.geometry import Geometry
from hermetic.worker import messages as m
from hermetic.worker import wire
from hermetic.worker.link import Link


def gateway(w: World) -> dict[str, float]:
    return w.cluster.members.counts()


async def test_workers_that_register_are_paired_and_serve() -> None:
    async with world() as w:
        await w.pair(2, 2)
        status = await w.cluster.status()
        assert [(one["id"], one["state"], one["paired"]) for one in status["workers"]] == [
            ("decode-0", "ready", ["prefill-0", "prefill-1"]),
            ("decode-1", "ready", ["prefill-0", "prefill-1"]),
            ("prefill-0", "ready", ["decode-0", "decode-1"]),
            ("prefill-1", "ready", ["decode-0", "decode-1"]),
        ]
        assert status["workers"][0]["pages"] == {"free": 10, "leased": 6}
        assert await read(await w.cluster.generate(ask(20, 8))) == {0: answer(range(1, 21), 8, 7)}
        await w.until(lambda: any(isinstance(b, m.Registered) for b in w.workers["decode-1"].door))


async def test_a_gateway_without_workers_says_so_and_serves_as_soon_as_a_pair_stands() -> None:
    async with world() as w:
        assert w.cluster.capacity().max_model_len == 0
        for refused in (w.cluster.accepting, lambda: w.cluster.admit(1, 1)):
            with pytest.raises(Refused) as error:
                refused()
            assert (error.value.code, error.value.status) == ("no_workers", 503)
        assert "no decode and no prefill worker" in (await w.cluster.ready() or "")
        await w.add("prefill-0")
        with pytest.raises(Failed, match="1 of 2 workers were ready within 0 s: there is no decode worker"):
            await w.cluster.wait_ready(0.4, 2)
        await w.add("decode-0")
        await w.cluster.wait_ready(10, 2)
        assert await w.cluster.ready() is None
        await w.add("unified-0")
        await w.cluster.wait_ready(10, 3)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "f" * 32}, "model: ffff"),
        ({"numeric": "float32"}, "numeric: float32 here, bf16 there"),
        ({"position": "other"}, "position"),
        ({"key_id": "0" * 16}, "key_id"),
        (
            {"geometry": Geometry.attention(32, 2, 1, 8, "bf16"), "page_size": 32},
            "page_size: 32 here, 16 there",
        ),
        ({"geometry": Geometry.attention(16, 3, 1, 8, "bf16")}, "layers"),
        ({"transport": "mooncake"}, "transport: mooncake here, shm there"),
        ({"role": "router"}, "its role is 'router'"),
        ({"page_size": 8}, "its numbers cannot be"),
        ({"max_tokens": 257}, "its numbers cannot be"),
        ({"max_tokens": 0}, "its numbers cannot be"),
        ({"address": "ipc:///tmp/x"}, "is not tcp://HOST:PORT"),
        ({"address": "tcp://127.0.0.1:99999"}, "is not tcp://HOST:PORT"),
        ({"pages": 4, "max_tokens": 64}, "its pool holds 64 tokens (4 pages of 16) and 256 are advertised"),
    ],
)
async def test_a_worker_that_does_not_fit_is_refused_with_the_difference_named_and_logged_once(
    changes: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with world() as w:
        await w.pair()
        worker = await w.add(
            "decode-9", "decode" if "role" not in changes else changes.pop("role"), **changes
        )
        await w.until(lambda: sum(isinstance(b, m.Rejected) for b in worker.door) >= 2)
        rejected = next(b for b in worker.door if isinstance(b, m.Rejected))
        assert named in rejected.reason
        assert w.state("decode-9") == "refused"
        assert gateway(w)["registrations_rejected"] == 1
        assert sum("decode-9" in r.getMessage() for r in caplog.records if r.levelno == logging.ERROR) == 1
        shown = next(one for one in (await w.cluster.status())["workers"] if one["id"] == "decode-9")
        assert (shown["state"], shown["reason"]) == ("refused", rejected.reason)
        with pytest.raises(Failed, match=re.escape(named)):
            await w.cluster.wait_ready(5, 3)
        assert await read(await w.cluster.generate(ask())) == {0: answer(range(1, 21), 8, 7)}


async def test_a_worker_in_the_way_does_not_keep_the_right_ones_out_for_long_after_it_was_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(members, "AWAY_SECONDS", 1.5)
    async with world() as w:
        wrong = await w.add("decode-0", model="f" * 32)
        await w.until(lambda: w.state("decode-0") == "ready")
        right = await w.add("prefill-0")
        await w.until(lambda: w.state("prefill-0") == "refused")
        wrong.kill()
        w.workers["decode-1"] = await w.add("decode-1")
        await w.until(lambda: w.state("prefill-0") == w.state("decode-1") == "ready")
        assert right.door
        await w.cluster.generate(ask())


async def test_while_all_members_are_away_for_a_moment_nobody_of_another_model_takes_their_place() -> None:
    async with world() as w:
        await w.pair()
        for one in w.workers.values():
            one.frozen = True
        await w.until(lambda: w.state("prefill-0") == w.state("decode-0") == "unreachable")
        stranger = await w.add("unified-9", model="f" * 32)
        await w.until(lambda: any(isinstance(b, m.Rejected) for b in stranger.door))
        assert w.state("unified-9") == "refused"
        for name in ("prefill-0", "decode-0"):
            w.workers[name].frozen = False
        await w.until(lambda: w.state("prefill-0") == w.state("decode-0") == "ready")
        assert await read(await w.cluster.generate(ask(20, 8))) == {0: answer(range(1, 21), 8, 7)}


async def test_a_second_process_of_a_name_is_refused_while_the_first_lives_and_takes_over_when_it_is_silent() -> (
    None
):
    async with world() as w:
        await w.pair()
        first = w.workers["decode-0"]
        second = await w.add("decode-0")
        await w.until(lambda: any(isinstance(b, m.Rejected) for b in second.door))
        rejected = next(b for b in second.door if isinstance(b, m.Rejected))
        assert "another process is decode-0 here: pid 4242 on test" in rejected.reason
        assert w.cluster.members.remotes["decode-0"].info == first.info
        first.frozen = True
        await w.until(lambda: w.cluster.members.remotes["decode-0"].info == second.info)
        await w.cluster.wait_ready(10, 2)
        assert await read(await w.cluster.generate(ask())) == {0: answer(range(1, 21), 8, 7)}
        # What the former one still says is answered and has no effect.
        first.frozen = False
        first.door.clear()
        await w.until(lambda: bool(first.door))
        assert isinstance(first.door[0], m.Rejected)
        assert "replaced" in first.door[0].reason
        assert w.cluster.members.remotes["decode-0"].info == second.info
        assert gateway(w)["messages_stale"] >= 1


async def test_a_restarted_worker_at_the_same_port_is_known_at_once_by_what_it_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with world(silent_seconds=30.0) as w:
        await w.pair()
        w.workers["decode-0"].kill()
        again = await w.add("decode-0", port=w.workers["decode-0"].port)
        await w.until(lambda: w.cluster.members.remotes["decode-0"].info == again.info)
        await w.cluster.wait_ready(10, 2)
        assert "another process answers at its address" in caplog.text


async def test_a_silent_worker_is_left_out_and_back_in_when_it_is_heard_again() -> None:
    async with world() as w:
        await w.pair(1, 2)
        w.workers["decode-0"].frozen = True
        await w.until(lambda: w.state("decode-0") == "unreachable")
        for _ in range(3):
            assert await read(await w.cluster.generate(ask())) == {0: answer(range(1, 21), 8, 7)}
        assert not w.workers["decode-0"].history
        assert await w.cluster.ready() is None
        w.workers["decode-0"].frozen = False
        await w.until(lambda: w.state("decode-0") == "ready")
        w.workers["decode-1"].frozen = True
        await w.until(lambda: w.state("decode-1") == "unreachable")
        await read(await w.cluster.generate(ask()))
        assert w.workers["decode-0"].history
        w.workers["prefill-0"].frozen = True
        await w.until(lambda: w.state("prefill-0") == "unreachable")
        assert "prefill-0 is unreachable (has not answered for" in (await w.cluster.ready() or "")
        with pytest.raises(Refused) as error:
            await w.cluster.generate(ask())
        assert (error.value.code, error.value.status) == ("no_workers", 503)


async def test_a_gateway_that_was_stopped_itself_does_not_take_everybody_for_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(silent_seconds=1.2) as w:
        await w.pair()
        lost: list[str] = []
        monkeypatch.setattr(w.cluster.members, "_unreachable", lambda remote, why: lost.append(why))
        clock = w.cluster.members
        now = asyncio.get_running_loop().time
        began = now()
        while now() - began < 2.5:  # the event loop does nothing else
            pass
        await asyncio.sleep(5 * TICK_SECONDS)
        assert not lost
        assert clock.remotes["decode-0"].state == "ready"


async def test_a_worker_that_came_back_and_fits_no_more_is_treated_as_a_stranger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(members, "AWAY_SECONDS", 0.0)
    async with world() as w:
        await w.pair()
        for worker in w.workers.values():
            worker.frozen = True
        await w.until(lambda: w.state("decode-0") == w.state("prefill-0") == "unreachable")
        old = w.workers["prefill-0"]
        await w.add("prefill-1", model="f" * 32)
        await w.add("decode-1", model="f" * 32)
        await w.cluster.wait_ready(10, 2)
        old.frozen = False
        await w.until(lambda: w.state("prefill-0") == "refused" or "prefill-0" in w.cluster.members.refused)
        assert "model" in w.cluster.members.refused["prefill-0"].reason
        assert w.cluster.members.remotes["prefill-0"].ended


async def test_a_worker_that_leaves_gets_nothing_new_and_is_let_go_when_it_is_free() -> None:
    async with world() as w:
        await w.pair(1, 2)
        leaving, other = w.workers["decode-0"], w.workers["decode-1"]
        leaving.limit = other.limit = 2
        streams = [await w.cluster.generate(ask()) for _ in range(2)]
        await w.until(lambda: len(leaving.jobs) == len(other.jobs) == 1)
        leaving.leaving = True
        await w.until(lambda: w.state("decode-0") == "draining")
        other.limit = None
        assert await read(await w.cluster.generate(ask())) == {0: answer(range(1, 21), 8, 7)}
        assert len(leaving.history) == 1
        assert not any(isinstance(b, m.Leave) for b in leaving.door)
        leaving.limit = None
        assert [await read(stream) for stream in streams] == [{0: answer(range(1, 21), 8, 7)}] * 2
        await w.until(
            lambda: sum(isinstance(b, m.Leave) for b in leaving.door) >= 2
        )  # also when one was lost
        assert w.state("decode-0") == "gone"
        assert w.cluster.runs.reruns == 0
        again = await w.add("decode-0")
        await w.until(lambda: w.state("decode-0") == "ready")
        assert again.info == w.cluster.members.remotes["decode-0"].info


async def test_a_worker_that_never_joined_may_go_at_once() -> None:
    async with world() as w:
        worker = await w.add("decode-0", role="router")
        worker.leaving = True
        await w.until(lambda: any(isinstance(b, m.Leave) for b in worker.door))
        assert w.state("decode-0") == "unknown"


async def test_an_unpaired_link_gets_no_requests_until_it_is_paired_again() -> None:
    async with world() as w:
        await w.pair(2, 1)
        w.workers["prefill-0"].paired("decode-0", "the link is cut")
        await w.until(lambda: not w.cluster.members.remotes["prefill-0"].paired)
        for _ in range(3):
            await read(await w.cluster.generate(ask()))
        assert not w.workers["prefill-0"].history
        w.workers["prefill-0"].paired("decode-0")
        w.workers["prefill-1"].paired("decode-0", "the link is cut")
        await w.until(lambda: not w.cluster.members.remotes["prefill-1"].paired)
        await w.until(lambda: bool(w.cluster.members.remotes["prefill-0"].paired))
        await read(await w.cluster.generate(ask()))
        # Decode may have answered before its half arrives.
        await w.until(lambda: bool(w.workers["prefill-0"].history))


async def test_what_does_not_belong_at_the_control_port_is_rejected_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with world() as w:
        await w.pair()
        socket = w.context.socket(zmq.DEALER)
        wire.dial(socket, w.keys, w.address, wire.new_identity())
        mine = wire.new_incarnation()
        other = info("decode-7", "decode")
        junk = [
            b"",
            b"\xc1",
            m.datagram(mine, m.Beat())[:-1],
            m.datagram(mine, m.Beat()),
            m.datagram(mine, m.Register(other, False)),  # somebody else's incarnation
            m.encode(m.Envelope(PROTOCOL + 1, mine, 1, 0, 0, None, m.Register(other, False))),
        ]
        for _ in range(3):
            for raw in junk:
                await socket.send(raw)
                answer_ = m.decode(await asyncio.wait_for(socket.recv(), 5)).body
                assert isinstance(answer_, m.Rejected)
        assert "protocol" in answer_.reason
        await socket.send_multipart([b"a", b"b"])
        await w.until(lambda: gateway(w)["messages_rejected"] == 3 * len(junk) + 1)
        warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert len(warnings) == len(set(warnings)) <= len(junk) + 1
        assert w.state("decode-7") == "unknown"
        await w.cluster.generate(ask())


async def test_a_stranger_without_the_key_gets_nothing() -> None:
    async with world() as w:
        await w.pair()
        socket = w.context.socket(zmq.DEALER)
        wire.dial(socket, wire.CurveKeys.make(), w.address, wire.new_identity())
        stranger = info("decode-7", "decode")
        socket.send(m.datagram(stranger.incarnation, m.Register(stranger, False)), zmq.NOBLOCK)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(socket.recv(), 0.5)
        assert w.state("decode-7") == "unknown"


async def test_messages_of_a_worker_that_cannot_be_read_are_dropped_and_the_worker_stays() -> None:
    async with world() as w:
        await w.pair()
        worker = w.workers["decode-0"]
        identity = next(iter(worker._links))
        for raw in (b"", b"\xc1garbage", m.datagram(wire.new_incarnation(), m.Beat(), 1)):
            worker._router.send_multipart([identity, raw])
        await w.until(lambda: gateway(w)["messages_rejected"] >= 2 and gateway(w)["messages_stale"] >= 1)
        assert await read(await w.cluster.generate(ask())) == {0: answer(range(1, 21), 8, 7)}
        assert w.state("decode-0") == "ready"
        assert GEOMETRY.page_size == 16


async def test_a_worker_that_was_drained_and_died_is_drained_still_and_one_that_left_is_not() -> None:
    async with world() as w:
        await w.pair(1, 2)
        w.workers["decode-1"].limit = 1
        for how in ("died", "left"):
            worker = w.workers["decode-0"]
            w.cluster.drain("decode-0")
            assert w.state("decode-0") == "drained"
            if how == "died":
                w.cluster.lost("decode-0", b"another.")  # of another incarnation: nothing happens
                assert w.state("decode-0") == "drained"
                w.cluster.lost("decode-0", worker.info.incarnation)
            else:
                worker.leaving = True
                await w.until(lambda: w.state("decode-0") == "gone")
            worker.kill()
            await w.add("decode-0")
            await w.until(lambda: w.state("decode-0") == ("drained" if how == "died" else "ready"))  # noqa: B023
            await read(await w.cluster.generate(ask(max_tokens=1)))
            assert bool(w.workers["decode-0"].history) is False or how == "left"
        assert w.cluster.undrain("decode-0") == "ready"


async def test_a_drained_worker_finishes_what_it_has_and_gets_nothing_new_until_it_is_undrained() -> None:
    async with world() as w:
        await w.pair(1, 2)
        first = w.workers["decode-0"]
        first.limit = 2
        stream = await w.cluster.generate(ask())
        await w.until(lambda: len(first.jobs) == 1)
        assert w.cluster.drain("decode-0") == "draining"
        for _ in range(3):
            await read(await w.cluster.generate(ask()))
        assert len(first.history) == 1
        first.limit = None
        assert await read(stream) == {0: answer(range(1, 21), 8, 7)}
        await w.until(lambda: w.state("decode-0") == "drained")
        assert w.cluster.drain("decode-1") == "drained"
        with pytest.raises(Refused):
            await w.cluster.generate(ask())
        assert "decode-0 is drained; decode-1 is drained" in (await w.cluster.ready() or "")
        assert w.cluster.undrain("decode-0") == "ready"
        await read(await w.cluster.generate(ask()))
        assert len(first.history) == 2
        with pytest.raises(
            Refused, match="there is no worker 'decode-7'; there are: decode-0, decode-1, prefill-0"
        ):
            w.cluster.drain("decode-7")


async def test_a_worker_for_which_too_much_waits_is_left_out_and_gets_a_new_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(silent_seconds=30.0) as w:
        await w.pair(1, 2)
        first = w.workers["decode-0"]
        first.frozen, first.limit = True, 2
        stream = await w.cluster.generate(ask())
        full = w.cluster.members.remotes["decode-0"].link
        monkeypatch.setattr(Link, "broken", property(lambda link: link is full))
        await w.until(lambda: w.state("decode-0") == "unreachable")
        assert "waiting for its acknowledgement" in w.cluster.members.remotes["decode-0"].reason
        assert await read(stream) == {0: answer(range(1, 21), 8, 7)}
        first.frozen, first.limit = False, None
        await w.until(lambda: w.state("decode-0") == "ready")
        assert w.cluster.members.remotes["decode-0"].link.session == 2
        w.cluster.drain("decode-1")
        assert await read(await w.cluster.generate(ask())) == {0: answer(range(1, 21), 8, 7)}
