"""The workers' control channels: each worker refuses by its own numbers, and strangers get nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator

import numpy as np
import pytest
import zmq
import zmq.asyncio

from hermetic.gateway import cluster
from hermetic.gateway.backend import Failed, Generate, TokenStream
from hermetic.gateway.backend import Refused as GatewayRefused
from hermetic.handoff.messages import PROTOCOL, Key
from hermetic.handoff.outcome import Refused
from hermetic.model.params import SamplingParams
from hermetic.options import ServeOptions
from hermetic.serve import Deployment, deployment
from hermetic.worker import messages as m
from hermetic.worker import wire


class Channel:
    """A client of one worker's control channel with the cluster's keys, as the gateway is one."""

    def __init__(self, address: str, keys: wire.CurveKeys) -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.DEALER)
        wire.dial(self.socket, keys, address)
        self.outgoing = wire.Outgoing(wire.new_incarnation())

    async def ask(self, key: Key | None, body: m.Body) -> m.Envelope:
        await self.socket.send(self.outgoing.wrap(key, body))
        return await self.hear()

    async def hear(self) -> m.Envelope:
        return m.decode(await asyncio.wait_for(self.socket.recv(), 20))

    async def stats(self) -> dict[str, float]:
        answer = (await self.ask(None, m.AskStats(1))).body
        assert isinstance(answer, m.Stats)
        return answer.values

    def close(self) -> None:
        self.context.destroy(linger=0)


class Loop:
    """A deployment and the event loop that it lives on; tests run their coroutines there."""

    def __init__(self, runner: asyncio.Runner, running: Deployment) -> None:
        self.runner, self.running = runner, running

    def __call__(self, test: Callable[[Deployment], Coroutine[None, None, None]]) -> None:
        self.runner.run(test(self.running))


@pytest.fixture(scope="module")
def on() -> Iterator[Loop]:
    options = ServeOptions(prefill_kv=24 * 2**20, decode_kv=48 * 2**20)
    with asyncio.Runner() as runner:
        context = deployment(options, lambda *_: None)
        running = runner.run(context.__aenter__())
        try:
            yield Loop(runner, running)
        finally:
            runner.run(context.__aexit__(None, None, None))


def submit(tokens: int, max_tokens: int, peer: str) -> m.Submit:
    ids = np.full(tokens, 1000, "<i4").tobytes()
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return m.Submit(ids, tokens, params, 1, 0, 7, "tenant", "", 10**9, peer)


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


@pytest.mark.parametrize(
    ("role", "peer", "pages"),
    [("prefill", "decode-0", 67), ("decode", "prefill-0", 135)],  # 24 and 48 MiB / 372,736 bytes a page
)
def test_each_worker_refuses_what_its_own_pool_cannot_hold(
    on: Loop, role: str, peer: str, pages: int
) -> None:
    async def test(running: Deployment) -> None:
        handle = next(h for h in running.handles if h.config.role == role)
        channel = Channel(handle.address, running.keys)
        try:
            await channel.ask(None, m.Hello("test", None))
            before = await channel.stats()
            limit = pages * 16
            for number, (tokens, most) in enumerate(
                [(limit, 1), (limit + 1, 1), (limit - 15, 16), (limit * 3, 16), (8000, 500)]
            ):
                key = Key(bytes([number]) * 16, 1)
                answer = await channel.ask(key, submit(tokens, most, peer))
                assert answer.key == key
                assert isinstance(answer.body, m.Ended)
                assert isinstance(answer.body.outcome, Refused)
                assert answer.body.outcome.code == "context_length_exceeded"
                assert str(limit) in answer.body.outcome.reason
                assert str(tokens) in answer.body.outcome.reason
            after = await channel.stats()
            assert {k: after.get(k) for k in MOVING} == {k: before.get(k) for k in MOVING}
            assert after["refused"] == before["refused"] + 5
        finally:
            channel.close()

    on(test)


def test_a_request_for_a_pair_that_does_not_stand_is_refused(on: Loop) -> None:
    async def test(running: Deployment) -> None:
        for handle in running.handles:
            channel = Channel(handle.address, running.keys)
            await channel.ask(None, m.Hello("test", None))
            answer = await channel.ask(Key(b"p" * 16, 1), submit(8, 4, "nobody-7"))
            assert isinstance(answer.body, m.Ended)
            assert answer.body.outcome.code == "no_pair"
            channel.close()

    on(test)


def test_a_peer_without_the_cluster_key_gets_no_answer_at_all(on: Loop) -> None:
    async def test(running: Deployment) -> None:
        for keys in (wire.CurveKeys.make(), None):
            for handle in running.handles:
                context = zmq.asyncio.Context()
                socket = context.socket(zmq.DEALER)
                if keys is None:
                    socket.connect(handle.address)  # no CURVE at all
                else:  # the right server key, but a client key of its own
                    own = wire.CurveKeys(
                        running.keys.server_public, b"", keys.client_public, keys.client_secret
                    )
                    wire.dial(socket, own, handle.address)
                await socket.send(wire.Outgoing(wire.new_incarnation()).wrap(None, m.Hello("stranger", None)))
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(socket.recv(), 0.7)
                context.destroy(linger=0)

    on(test)


def test_messages_that_are_not_of_this_protocol_are_dropped_and_counted(on: Loop) -> None:
    async def test(running: Deployment) -> None:
        handle = running.handles[0]
        channel = Channel(handle.address, running.keys)
        await channel.ask(None, m.Hello("test", None))
        before = await channel.stats()
        good = channel.outgoing.wrap(None, m.AskStats(5))
        envelope = m.decode(good)
        other_version = m.encode(m.Envelope(PROTOCOL + 1, envelope.incarnation, 99, None, m.AskStats(5)))
        garbage = [b"", b"\x00" * 100, good[:-3], good + b"\x01", other_version]
        for raw in garbage:
            await channel.socket.send(raw)
        repeated = [good, good]  # the second is a repetition of the first
        for raw in repeated:
            await channel.socket.send(raw)
        assert isinstance((await channel.hear()).body, m.Stats)
        after = await channel.stats()
        assert after["messages_rejected"] == before["messages_rejected"] + len(garbage)
        assert after["messages_stale"] == before["messages_stale"] + 1
        channel.close()

    on(test)


def test_a_worker_of_another_model_or_layout_is_not_paired_and_told_what_differs(on: Loop) -> None:
    async def test(running: Deployment) -> None:
        import msgspec

        from hermetic.kv.geometry import Geometry

        decode = next(h for h in running.handles if h.config.role == "decode")
        prefill = next(h for h in running.handles if h.config.role == "prefill")
        assert prefill.info is not None
        other_geometry = Geometry.attention(32, 30, 3, 64, "bf16")
        for changes, named in [
            ({"model": "f" * 32}, "model"),
            ({"numeric": "weights=float32 compute=float32 kv=float32"}, "numeric"),
            ({"geometry": other_geometry}, "page_size: 16 here, 32 there"),
            ({"key_id": "0" * 16}, "key_id"),
            ({"role": "decode"}, "cannot be paired"),
        ]:
            channel = Channel(decode.address, running.keys)
            answer = await channel.ask(
                None, m.Hello("test", msgspec.structs.replace(prefill.info, **changes))
            )
            assert isinstance(answer.body, m.Rejected)
            assert named in answer.body.reason
            channel.close()

    on(test)


async def keep_asking(running: Deployment, stream: TokenStream) -> None:
    """Read to the end and ask again, until something is refused or fails."""
    while True:
        async for _ in stream:
            pass
        stream = await running.cluster.generate(FROZEN_ASK)


FROZEN_ASK = Generate(
    (1000,) * 40, SamplingParams(max_tokens=800, temperature=0.0, ignore_eos=True), "t", "t"
)


def test_requests_on_a_frozen_worker_end_and_it_serves_again_when_it_goes_on(
    on: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "BEAT_SECONDS", 0.2)
    monkeypatch.setattr(cluster, "SILENT_SECONDS", 4.0)

    async def test(running: Deployment) -> None:
        await asyncio.sleep(cluster.BEAT_SECONDS + 6)  # the beats of before go out
        for handle in running.handles:
            stream = await running.cluster.generate(FROZEN_ASK)
            await anext(aiter(stream))
            os.kill(handle.process.pid, signal.SIGSTOP)
            try:
                with pytest.raises((Failed, GatewayRefused)) as ended:
                    await keep_asking(running, stream)
                assert ended.value.code in ("worker_lost", "no_workers")
                assert handle.config.name in (await running.cluster.ready() or "")
            finally:
                os.kill(handle.process.pid, signal.SIGCONT)
            while (await running.cluster.ready()) is not None:
                await asyncio.sleep(0.2)
            stats = await running.cluster.stats()
            assert stats["decode-0"]["pages_leased"] == stats["prefill-0"]["pages_leased"] == 0
            assert stats["decode-0"]["slots_free"] == 64

    on(test)
