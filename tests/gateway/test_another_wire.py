"""The gateway on a wire, a clock and a source of randomness that are not its own: what the simulator stands on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from scripted_worker import ask, info

from hermetic.gateway.cluster import Cluster
from hermetic.gateway.options import ClusterOptions
from hermetic.gateway.wire import Door
from hermetic.worker import messages as m
from hermetic.worker.link import Link
from hermetic.worker.wire import CurveKeys

NO_KEYS = CurveKeys(b"", b"", b"", b"")


class Line:
    """Between the gateway and one worker, whose end of the session it plays."""

    def __init__(self, address: str, take: Callable[[bytes], None], clock: Callable[[], float]) -> None:
        self.address, self._take, self._clock = address, take, clock
        self.sent: list[bytes] = []
        self.closed = self.silent = False
        self.link: Link | None = None

    def put(self, raw: bytes) -> None:
        assert not self.closed
        self.sent.append(raw)

    def close(self) -> None:
        self.closed = True

    def read(self) -> list[m.Body]:
        """What the gateway has said since the last look."""
        sent, self.sent = self.sent, []
        return [m.decode(raw).body for raw in sent]

    def say(self, worker: m.WorkerInfo, *bodies: m.Body) -> None:
        if self.link is None:
            self.link = Link(worker.incarnation, 1, self._clock())
        for body in bodies:
            self._take(self.link.wrap(None, body, self._clock()))


class Wire:
    """Implements `wire.GatewayWire`: remembers the door and the lines."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.door: Door | None = None
        self.lines: dict[str, Line] = {}
        self.closed = False

    async def listen(self, host: str, port: int, door: Door) -> str:
        self.door = door
        return f"tcp://{host}:{port}"

    def dial(self, address: str, take: Callable[[bytes], None]) -> Line:
        if "nowhere" in address:
            raise OSError("No such device")
        self.lines[address] = Line(address, take, self._clock)
        return self.lines[address]

    async def close(self) -> None:
        self.closed = True


class World:
    """A gateway with one prefill and some decode workers, none of which answers but as the test says."""

    def __init__(self, seed: int = 1, **options: float) -> None:
        self.now = 500.0
        self.wire = Wire(lambda: self.now)
        draw = random.Random(seed)
        self.cluster = Cluster(
            "model",
            NO_KEYS,
            ClusterOptions(**options),  # type: ignore[arg-type]
            wire=self.wire,
            clock=lambda: self.now,
            entropy=draw.randbytes,
        )
        self.workers: dict[str, m.WorkerInfo] = {}

    async def open(self, decodes: int = 1, pages: int = 16) -> None:
        await self.cluster.listen("gateway", 1)
        names = [f"decode-{i}" for i in range(decodes)] + ["prefill-0"]
        for i, name in enumerate(names):
            worker = info(name, name[:-2], incarnation=bytes([i]) * 8, address=f"tcp://{name}:1", pages=pages)
            self.workers[name] = worker
            assert self.knock(worker) == m.Registered()
            self.line(name).say(worker, m.Welcome(worker, "", 0))
        for name in names[:-1]:
            self.line("prefill-0").say(
                self.workers["prefill-0"], m.Paired(name, "", self.workers[name].incarnation)
            )

    def knock(self, worker: m.WorkerInfo) -> m.Body:
        assert self.wire.door is not None
        answer = self.wire.door.knock(m.datagram(worker.incarnation, m.Register(worker, leaving=False)))
        assert answer is not None
        return m.decode(answer).body

    def line(self, name: str) -> Line:
        return self.wire.lines[f"tcp://{name}:1"]

    def everything(self) -> dict[str, list[bytes]]:
        return {address: line.sent for address, line in self.wire.lines.items()}


async def _said(seed: int) -> dict[str, list[bytes]]:
    world = World(seed)
    await world.open(2)
    request = ask(temperature=1.0, seed=None)
    runs = [world.cluster.runs.begin(request) for _ in range(3)]
    await runs[1].aclose()
    said = world.everything()
    await world.cluster.shut_down()
    return said


async def test_all_that_a_gateway_says_follows_from_its_clock_its_randomness_and_what_it_is_asked() -> None:
    first, again, other = await _said(1), await _said(1), await _said(2)
    assert first == again
    assert all(len(raws) >= 2 for raws in first.values())
    assert first != other


async def test_seeds_tickets_and_the_incarnation_are_drawn_from_the_given_randomness() -> None:
    drawn: list[int] = []

    def entropy(count: int) -> bytes:
        drawn.append(count)
        return bytes([len(drawn)]) * count

    world = World()
    cluster = Cluster("model", NO_KEYS, wire=world.wire, clock=lambda: world.now, entropy=entropy)
    assert cluster.members.incarnation == bytes([1]) * 8
    world.cluster = cluster
    await world.open()
    run = cluster.runs.begin(ask(seed=None))
    assert {run.ticket, run.seed.to_bytes(8)} == {bytes([3]) * 16, (int.from_bytes([2] * 8) >> 2).to_bytes(8)}
    await cluster.shut_down()
    assert world.wire.closed


async def test_silence_and_freshness_are_measured_by_the_given_clock() -> None:
    world = World(silent_seconds=30.0)
    await world.open()
    run = world.cluster.runs.begin(ask())
    (key,) = run.live
    token = m.Tokens((m.TokenOut(key, 0, 5, None, None),))
    world.line("decode-0").say(world.workers["decode-0"], token)
    assert world.cluster.runs.last_first_token == world.now == 500.0
    assert await world.cluster.ready() is None  # a token just came; no probe is needed
    world.now += 31.0
    for name in world.workers:
        remote = world.cluster.members.remotes[name]
        assert remote.reachable
        world.cluster.members._look_at(remote, world.now)
        assert not remote.reachable
    world.line("decode-0").say(world.workers["decode-0"], m.Stats(1, {}))
    assert world.cluster.members.remotes["decode-0"].heard == world.now
    assert world.cluster.members.remotes["decode-0"].reachable
    await world.cluster.shut_down()


async def test_requests_of_a_lost_worker_run_again_in_the_order_in_which_they_came() -> None:
    world = World()
    await world.open(2)
    world.cluster.drain("decode-1")
    runs = [world.cluster.runs.begin(ask()) for _ in range(40)]
    world.cluster.undrain("decode-1")
    world.line("decode-1").read()
    world.cluster.lost("decode-0", world.workers["decode-0"].incarnation)
    submitted = [m.decode(raw).key for raw in world.line("decode-1").sent]
    assert [key.ticket for key in submitted if key is not None] == [run.ticket for run in runs]
    await world.cluster.shut_down()


async def test_what_still_comes_from_a_worker_that_has_ended_changes_nothing() -> None:
    world = World()
    await world.open()
    line, worker = world.line("decode-0"), world.workers["decode-0"]
    world.cluster.lost("decode-0", worker.incarnation)
    assert line.closed
    before = world.cluster.members.counts()
    line.say(worker, m.Stats(1, {}))
    line._take(m.datagram(b"another!", m.Reset(), 1))
    assert world.cluster.members.counts() == before
    await world.cluster.shut_down()


async def test_a_worker_whose_address_cannot_be_dialled_is_refused_with_the_reason() -> None:
    world = World()
    await world.open()
    lost = info("decode-1", "decode", address="tcp://nowhere:1", incarnation=b"n" * 8)
    assert world.knock(lost) == m.Rejected("its address tcp://nowhere:1 cannot be dialled: No such device")
    assert "decode-1" in world.cluster.members.refused
    await world.cluster.shut_down()


@pytest.mark.parametrize("parts", [0, 1, 5])
async def test_the_door_counts_what_is_no_message_and_those_without_keys(parts: int) -> None:
    world = World()
    await world.open(0)
    door = world.wire.door
    assert door is not None
    door.malformed(parts)
    door.keyless()
    assert door.knock(b"rubbish") is not None
    counts = world.cluster.members.counts()
    assert (counts["messages_rejected"], counts["peers_refused"]) == (2, 1)
    await asyncio.sleep(0)
    await world.cluster.shut_down()
