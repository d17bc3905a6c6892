"""A bad network on the control channel: envelopes dropped, doubled, held up and put out of order, by seeded chance.

It stands between a worker (or a gateway's control port) and everybody who dials it: a ROUTER towards them, and for each of
them one DEALER of the same name towards the target. So it sees whole envelopes, above CURVE, for which it needs the
cluster's keys. The one thing to know: TCP and ZeroMQ repair everything below; this is where messages can be lost at all.

    python -m hermetic.lab.proxy --keys FILE --listen HOST:PORT --target HOST:PORT --drop 0.1 --reorder 0.2
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import itertools
import random
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import zmq

from hermetic.worker import wire
from hermetic.worker.wire import CurveKeys

CLIENTS = 1024  # dialling ends at once at most; the one that was silent longest is forgotten for a new one
WAITING = 100_000  # envelopes that are held up at once at most; one more is dropped
LOOK_MS = 20  # how long the loop sleeps at most


@dataclass(frozen=True)
class Faults:
    """Chances from 0 to 1, for each envelope and in each direction by itself. Times in seconds, at most this much."""

    drop: float = 0.0
    duplicate: float = 0.0  # the second one comes up to `reorder_seconds` later
    delay: float = 0.0  # held up, and all behind it as well: order stays
    delay_seconds: float = 0.5
    reorder: float = 0.0  # held up alone: later ones pass it
    reorder_seconds: float = 0.2


@dataclass
class Counts:
    """What was done so far. Every envelope that came counts as passed or dropped; the rest counts what else was done to it."""

    passed: int = 0
    dropped: int = 0
    cut: int = 0  # of the dropped, while the link was cut
    duplicated: int = 0
    delayed: int = 0
    reordered: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{getattr(self, one.name)} {one.name}" for one in fields(self))


@dataclass(eq=False)
class _Way:
    """One direction of one client: where to send, and until when what comes has to wait."""

    socket: zmq.Socket[Any]
    prefix: tuple[bytes, ...]
    free_at: float = 0.0


@dataclass(order=True)
class _Held:
    """An envelope until its time has come."""

    at: float
    number: int
    way: _Way = field(compare=False)
    frames: list[bytes] = field(compare=False)


class Proxy:
    """One proxy, in a thread of its own. `faults` may be replaced while it runs; `counts` grow.

    It listens from the moment it is made, on the host (see hosts.py) of the thread that makes it."""

    def __init__(
        self,
        keys: CurveKeys,
        listen: tuple[str, int],
        target: str,
        faults: Faults | None = None,
        seed: int = 0,
    ) -> None:
        """`target` is tcp://HOST:PORT. Raises zmq.ZMQError when it cannot listen there."""
        self.faults, self.counts = faults or Faults(), Counts()
        self._keys, self._target, self._random = keys, target, random.Random(seed)
        self._cut = False
        self._stopping = threading.Event()
        self._held: list[_Held] = []
        self._numbers = itertools.count()
        self._clients: OrderedDict[bytes, tuple[zmq.Socket[Any], _Way, _Way]] = OrderedDict()
        self._by_socket: dict[zmq.Socket[Any], bytes] = {}
        self._context: zmq.Context[Any] = zmq.Context()
        self._auth = wire.authenticator(self._context, keys)
        self._router = self._context.socket(zmq.ROUTER)
        self._poller = zmq.Poller()
        try:
            self.port = wire.serve(self._router, keys, *listen)
        except zmq.ZMQError:
            self._auth.stop()
            self._context.destroy(linger=0)
            raise
        self._poller.register(self._router, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name=f"proxy to {target}", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Nothing passes until `heal`, and connections stay up: the far end just falls silent."""
        self._cut = True

    def heal(self) -> None:
        self._cut = False

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                wait = LOOK_MS
                if self._held:
                    wait = min(wait, max(0, int(1000 * (self._held[0].at - time.monotonic()))))
                for socket, _ in self._poller.poll(wait):
                    self._read(socket)
                self._deliver(time.monotonic())
        finally:
            self._auth.stop()
            self._context.destroy(linger=0)

    def _read(self, socket: zmq.Socket[Any]) -> None:
        for frames in _waiting(socket):
            if socket is self._router:
                _, inward, _ = self._client(frames[0])
                self._through(inward, frames[1:])
            else:
                _, _, outward = self._clients[self._by_socket[socket]]
                self._through(outward, frames)

    def _client(self, identity: bytes) -> tuple[zmq.Socket[Any], _Way, _Way]:
        if identity not in self._clients:
            dealer = self._context.socket(zmq.DEALER)
            wire.dial(dealer, self._keys, self._target, identity)
            self._poller.register(dealer, zmq.POLLIN)
            self._by_socket[dealer] = identity
            self._clients[identity] = dealer, _Way(dealer, ()), _Way(self._router, (identity,))
            if len(self._clients) > CLIENTS:
                _, (oldest, inward, outward) = self._clients.popitem(last=False)
                self._held = [one for one in self._held if one.way not in (inward, outward)]
                heapq.heapify(self._held)
                del self._by_socket[oldest]
                self._poller.unregister(oldest)
                oldest.close(linger=0)
        self._clients.move_to_end(identity)
        return self._clients[identity]

    def _through(self, way: _Way, frames: list[bytes]) -> None:
        """Decide what happens to one envelope."""
        now, faults, chance, counts = time.monotonic(), self.faults, self._random.random, self.counts
        if self._cut or chance() < faults.drop or len(self._held) >= WAITING:
            counts.dropped += 1
            counts.cut += self._cut
            return
        counts.passed += 1
        at = max(now, way.free_at)
        if chance() < faults.delay:
            counts.delayed += 1
            at += faults.delay_seconds * chance()
            way.free_at = at
        if chance() < faults.reorder:
            counts.reordered += 1
            at += faults.reorder_seconds * chance()
        self._hold(at, way, frames)
        if chance() < faults.duplicate:
            counts.duplicated += 1
            self._hold(at + faults.reorder_seconds * chance(), way, frames)

    def _hold(self, at: float, way: _Way, frames: list[bytes]) -> None:
        heapq.heappush(self._held, _Held(at, next(self._numbers), way, frames))

    def _deliver(self, now: float) -> None:
        while self._held and self._held[0].at <= now:
            held = heapq.heappop(self._held)
            # A queue that is full, or a client that has gone: lost, as on a real network.
            with contextlib.suppress(zmq.ZMQError):
                held.way.socket.send_multipart([*held.way.prefix, *held.frames], zmq.NOBLOCK)


def _waiting(socket: zmq.Socket[Any]) -> Iterator[list[bytes]]:
    """Messages that are there already, a bounded number of them."""
    with contextlib.suppress(zmq.Again):
        for _ in range(256):
            yield socket.recv_multipart(zmq.NOBLOCK)


def main() -> None:
    from hermetic import keys  # the product's key file

    parser = argparse.ArgumentParser(
        prog="python -m hermetic.lab.proxy", description="A bad control channel."
    )
    parser.add_argument("--keys", type=Path, required=True, help="the cluster's key file")
    parser.add_argument("--listen", required=True, help="HOST:PORT, what workers advertise")
    parser.add_argument("--target", required=True, help="HOST:PORT, where the worker really listens")
    parser.add_argument("--seed", type=int, default=0)
    for one in fields(Faults):
        parser.add_argument(f"--{one.name.replace('_', '-')}", type=float, default=one.default)
    given = parser.parse_args()
    host, _, port = given.listen.rpartition(":")
    faults = Faults(**{one.name: getattr(given, one.name) for one in fields(Faults)})
    cluster = keys.load(given.keys).curve
    with Proxy(cluster, (host.strip("[]"), int(port)), f"tcp://{given.target}", faults, given.seed) as proxy:
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(10)
                print(proxy.counts, file=sys.stderr, flush=True)
        print(proxy.counts, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
