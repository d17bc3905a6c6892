"""Workers that speak the real control protocol over real sockets and compute nothing, for tests of the cluster.

A decode (or unified) worker makes tokens by `next_token`, a function of all tokens so far, so that a stream which is run
again elsewhere can be compared with what it must be. `limit` stops it after so many tokens; tests do the rest by hand.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from hermetic.gateway.backend import Finish, Generate, Token
from hermetic.gateway.cluster import Cluster, ClusterOptions
from hermetic.handoff.messages import Key
from hermetic.handoff.outcome import Aborted, Completed, Failed, Outcome
from hermetic.kv.geometry import Geometry
from hermetic.model.params import SamplingParams
from hermetic.worker import link, wire
from hermetic.worker import messages as m
from hermetic.worker.link import Link

VOCAB = 1000
EOS = 999
GEOMETRY = Geometry.attention(16, 2, 1, 8, "bf16")


def next_token(tokens: Sequence[int], seed: int) -> int:
    """What a model would say after these tokens; never the end of the sequence."""
    digest = hashlib.sha256(repr((list(tokens), seed)).encode()).digest()
    return int.from_bytes(digest[:4], "little") % (VOCAB - 1)


def answer(prompt: Sequence[int], count: int, seed: int) -> list[int]:
    """The whole answer to a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


def info(name: str, role: str, **changes: Any) -> m.WorkerInfo:
    values: dict[str, Any] = {
        "worker": name, "role": role, "incarnation": wire.new_incarnation(), "pid": 4242, "host": "test",
        "address": "", "transport": "shm", "source": "", "slots": 64, "model": "m" * 32, "numeric": "bf16", "position": "rope",
        "geometry": GEOMETRY, "key_id": "k" * 16, "pages": 16, "page_size": 16, "max_tokens": 256, "window": 8192,
        "vocab": VOCAB, "max_batch": 8, "verify": "landing", "eos": (EOS,),
    }  # fmt: skip
    return m.WorkerInfo(**(values | changes))


@dataclass(eq=False)
class Job:
    """One attempt that a worker was given."""

    key: Key
    identity: bytes
    submit: m.Submit
    tokens: list[int]
    outputs: dict[int, list[int]] = field(default_factory=dict)  # made here, by choice
    cancelled: m.Cancel | None = None
    over: bool = False
    playing: asyncio.Task[None] | None = None


class ScriptedWorker:
    """`frozen`: it reads and says nothing. `limit`: tokens that it makes for each choice, in all (None: to the end)."""

    def __init__(self, world: World, worker: m.WorkerInfo) -> None:
        self.world, self.info = world, worker
        self.limit: int | None = None
        self.frozen = self.leaving = self.mute_door = False
        self.ends_on_cancel = True
        self.refuses: Outcome | None = None  # what every new attempt gets at once
        self.pairs = True  # prefill: answers Connect with a pair that stands
        self.jobs: dict[Key, Job] = {}
        self.history: list[Job] = []
        self.heard: list[m.Body] = []  # everything that was given to it
        self.door: list[m.Body] = []  # what the gateway's control port answered
        self.resets = 0
        self.stats: dict[str, float] = {"pages_free": 10, "pages_leased": 6, "slots_free": 64}
        self._handed: set[Key] = set()
        self._links: dict[bytes, Link] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._router: zmq.asyncio.Socket | None = None

    @property
    def name(self) -> str:
        return self.info.worker

    async def start(self, port: int = 0) -> ScriptedWorker:
        router = self.world.context.socket(zmq.ROUTER)
        while True:
            try:
                bound = wire.serve(router, self.world.keys, "127.0.0.1", port)
                break
            except zmq.ZMQError as error:  # whoever had the port is still going
                if error.errno != errno.EADDRINUSE:
                    raise
                await asyncio.sleep(0.02)
        self.port = bound
        if not self.info.address:
            self.info = msgspec.structs.replace(self.info, address=f"tcp://127.0.0.1:{bound}")
        dealer = self.world.context.socket(zmq.DEALER)
        wire.dial(dealer, self.world.keys, self.world.address, wire.new_identity())
        self._router, self._dealer = router, dealer
        for work in (self._read(router), self._hear_door(dealer), self._beat(dealer)):
            self._tasks.append(asyncio.create_task(work))
        return self

    def kill(self) -> None:
        """The end of its process, seen from outside: silence, and nobody at the port."""
        for task in self._tasks:
            task.cancel()
        for job in self.jobs.values():
            if job.playing is not None:
                job.playing.cancel()
        if self._router is not None:
            self._router.close(linger=0)
            self._dealer.close(linger=0)

    def forget(self) -> None:
        """It gives up every session, as after a long silence: what ran is gone."""
        self._links.clear()
        for job in self.jobs.values():
            job.over = True
            if job.playing is not None:
                job.playing.cancel()
        self.jobs.clear()

    # ----------------------------------------------------------------------- saying

    def say(self, identity: bytes, key: Key | None, body: m.Body) -> None:
        line = self._links.get(identity)
        if line is not None and self._router is not None and not self._router.closed:
            raw = line.wrap(key, body, time.monotonic())
            if not self.frozen:
                self._router.send_multipart([identity, raw], zmq.NOBLOCK)

    def tell(self, job: Job, body: m.Body) -> None:
        self.say(job.identity, job.key, body)

    def make(self, job: Job, choice: int, *tokens: int) -> None:
        """Emit these tokens of a choice."""
        job.outputs.setdefault(choice, []).extend(tokens)
        out = tuple(m.TokenOut(job.key, choice, token, None, None) for token in tokens)
        self.say(job.identity, None, m.Tokens(out))

    def end(self, job: Job, outcome: Outcome) -> None:
        if not job.over:
            job.over = True
            self.jobs.pop(job.key, None)
            if job.playing is not None and job.playing is not asyncio.current_task():
                job.playing.cancel()
            self.tell(job, m.Ended(outcome))

    def paired(self, worker: str, error: str = "") -> None:
        for identity in self._links:
            self.say(identity, None, m.Paired(worker, error, self.world.workers[worker].info.incarnation))

    # ---------------------------------------------------------------------- playing

    async def _play(self, job: Job) -> None:
        """All of an answer, one token of each choice a step."""
        submit = job.submit
        peer = self.world.workers.get(submit.peer)
        before = len(job.tokens) - submit.prompt
        choices = range(submit.choice, submit.choice + submit.n)
        for at in range(before, submit.params.max_tokens):
            while self.limit is not None and at >= self.limit:
                await asyncio.sleep(0.005)
            for choice in choices:
                made = job.outputs.get(choice, [])
                self.make(job, choice, next_token([*job.tokens, *made], submit.seed + choice))
            if at == before and peer is not None:
                peer.handed_over(job.key)
            await asyncio.sleep(0)
        for choice in choices:
            self.tell(job, m.ChoiceDone(choice, "length", None))
        self.end(job, Completed())

    def handed_over(self, key: Key) -> None:
        """Prefill: decode has everything, also if the request itself is still on its way to here."""
        self._handed.add(key)
        if key in self.jobs:
            self.end(self.jobs[key], Completed())

    def _submitted(self, identity: bytes, key: Key, submit: m.Submit) -> None:
        job = Job(key, identity, submit, np.frombuffer(submit.tokens, "<i4").tolist())
        self.jobs[key] = job
        self.history.append(job)
        if key in self._handed:
            self.end(job, Completed())
        elif self.refuses is not None:
            self.end(job, self.refuses)
        elif self.info.role != "prefill":
            job.playing = asyncio.create_task(self._play(job))

    def _handle(self, identity: bytes, key: Key | None, body: m.Body) -> None:
        self.heard.append(body)
        match body:
            case m.Hello():
                self.say(identity, None, m.Welcome(self.info, "", 0))
            case m.Connect(worker=worker, incarnation=incarnation):
                if self.pairs:
                    self.say(identity, None, m.Paired(worker, "", incarnation))
            case m.AskStats(number=number):
                self.say(identity, None, m.Stats(number, self.stats))
            case m.Submit() if key is not None:
                self._submitted(identity, key, body)
            case m.Cancel(choice=None) if key is not None and key in self.jobs:
                job = self.jobs[key]
                job.cancelled = body
                if self.ends_on_cancel:
                    self.end(job, Aborted(body.code, body.reason))

    # ----------------------------------------------------------------------- sockets

    async def _read(self, router: zmq.asyncio.Socket) -> None:
        while True:
            while self.frozen:
                await asyncio.sleep(0.005)
            identity, raw = await router.recv_multipart()
            while self.frozen:
                await asyncio.sleep(0.005)
            envelope = m.decode(raw)
            line = self._links.get(identity)
            if isinstance(envelope.body, m.Hello) and (line is None or envelope.session > line.session):
                line = self._links[identity] = Link(self.info.incarnation, envelope.session, time.monotonic())
            if line is None or envelope.session != line.session:
                self.resets += 1
                reset = m.datagram(self.info.incarnation, m.Reset(), envelope.session)
                router.send_multipart([identity, reset], zmq.NOBLOCK)
                continue
            for key, body in line.accept(envelope, time.monotonic()):
                self._handle(identity, key, body)

    async def _hear_door(self, dealer: zmq.asyncio.Socket) -> None:
        while True:
            self.door.append(m.decode(await dealer.recv()).body)

    async def _beat(self, dealer: zmq.asyncio.Socket) -> None:
        rounds = 0
        while True:
            if not self.frozen:
                if rounds % 5 == 0 and not self.mute_door:
                    self.register(self.leaving)
                for identity, line in list(self._links.items()):
                    for raw in line.due(time.monotonic()):
                        assert self._router is not None
                        self._router.send_multipart([identity, raw], zmq.NOBLOCK)
            rounds += 1
            await asyncio.sleep(0.02)

    def register(self, leaving: bool = False) -> None:
        raw = m.datagram(self.info.incarnation, m.Register(self.info, leaving))
        self._dealer.send(raw, zmq.NOBLOCK)


class World:
    """A cluster and its workers in one event loop."""

    def __init__(self, cluster: Cluster, keys: wire.CurveKeys, address: str) -> None:
        self.cluster, self.keys, self.address = cluster, keys, address
        self.context = zmq.asyncio.Context()
        self._auth = wire.authenticator(self.context, keys)
        self.workers: dict[str, ScriptedWorker] = {}

    async def add(self, name: str, role: str = "", port: int = 0, **changes: Any) -> ScriptedWorker:
        worker = ScriptedWorker(self, info(name, role or name.partition("-")[0], **changes))
        self.workers[name] = worker
        return await worker.start(port)

    async def pair(self, prefills: int = 1, decodes: int = 1, **changes: Any) -> None:
        """So many of each, and wait until everybody stands."""
        for role, count in (("prefill", prefills), ("decode", decodes)):
            for number in range(count):
                await self.add(f"{role}-{number}", **changes)
        await self.cluster.wait_ready(10, prefills + decodes)

    def state(self, name: str) -> str:
        remote = self.cluster.members.remotes.get(name)
        if remote is None:
            return "refused" if name in self.cluster.members.refused else "unknown"
        return remote.state

    async def until(self, condition: Any, what: str = "it") -> None:
        """Wait for something that must come."""
        for _ in range(2000):
            if condition():
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"{what} did not happen within 10 s")

    async def close(self) -> None:
        await self.cluster.shut_down()
        for worker in self.workers.values():
            worker.kill()
        self._auth.stop()
        self.context.destroy(linger=0)


@asynccontextmanager
async def world(**options: Any) -> AsyncIterator[World]:
    keys = wire.CurveKeys.make()
    seconds, link.BEAT_SECONDS = link.BEAT_SECONDS, 0.1  # so that silence is short, too
    cluster = Cluster("test-model", keys, ClusterOptions(**({"silent_seconds": 0.8} | options)))
    made = World(cluster, keys, await cluster.listen("127.0.0.1", 0))
    try:
        yield made
    finally:
        link.BEAT_SECONDS = seconds
        await made.close()


def ask(prompt: int | Sequence[int] = 20, max_tokens: int = 8, n: int = 1, **params: Any) -> Generate:
    tokens = tuple(range(1, prompt + 1)) if isinstance(prompt, int) else tuple(prompt)
    given = {"temperature": 0.0, "seed": 7} | params
    return Generate(tokens, SamplingParams(max_tokens=max_tokens, **given), "tenant", "scope", n)


async def read(stream: Any) -> dict[int, list[int]]:
    """The tokens of every choice; every choice must have had its end exactly once."""
    made: dict[int, list[int]] = {}
    ends: list[int] = []
    async for event in stream:
        if isinstance(event, Token):
            assert event.index not in ends
            made.setdefault(event.index, []).append(event.token)
        else:
            assert isinstance(event, Finish)
            ends.append(event.index)
    assert sorted(ends) == sorted(made)
    return made


__all__ = ["EOS", "Failed", "ScriptedWorker", "World", "answer", "ask", "info", "read", "world"]
