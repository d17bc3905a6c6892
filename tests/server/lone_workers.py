"""Worker processes without a gateway, and peers of them that are driven by hand: what a test says is what they hear.

The one thing to know: a `Dialler` speaks the real link (numbers, acknowledgements, order), so a test can follow the rules
of a session exactly, or break one of them with `raw`. A `FakeDecode` is the other end of a prefill worker's own dialling.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from hermetic.handoff.messages import Key
from hermetic.options import WORKER_ENVIRONMENT
from hermetic.transport.shm import ShmTransport
from hermetic.worker import messages as m
from hermetic.worker import wire
from hermetic.worker.build import WorkerConfig
from hermetic.worker.link import Link

START_SECONDS = 240  # compiling without a cache, on a busy machine
HEAR_SECONDS = 20.0
SECRET = bytes(range(32))
COMMAND = (sys.executable, "-m", "hermetic.worker.process")


@dataclass
class LoneWorker:
    """A worker process started as `hermetic serve` starts one. `log` grows while it runs."""

    config: WorkerConfig
    process: subprocess.Popen[bytes]
    info: m.WorkerInfo
    log: list[str] = field(default_factory=list)

    @property
    def address(self) -> str:
        return self.info.address

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def said(self, text: str) -> int:
        """How many lines of its log hold this text."""
        return sum(text in line for line in self.log)

    def stop(self) -> None:
        """Ends by itself when its standard input does."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def config(role: str, model: str, keys: wire.CurveKeys, **fields: Any) -> WorkerConfig:
    """A small worker in float32, with 64 pages of 16 tokens of `hermetic.lab.tiny`'s model if no more is said."""
    values: dict[str, Any] = {
        "name": f"{role}-0",
        "role": role,
        "model": model,
        "dtype": "float32",
        "kv_bytes": 64 * 28672,
        "page_size": 16,
        "verify": "landing",
        "context_length": None,
        "chunk": 64,
        "max_batch": 32,
        "threads": 1,
        "host": "127.0.0.1",
        "secret": SECRET,
        "keys": keys,
        "log_format": "text",
    }
    return WorkerConfig(**(values | fields))


def start(config: WorkerConfig, command: tuple[str, ...] = COMMAND) -> LoneWorker:
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=WORKER_ENVIRONMENT | os.environ,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    raw = msgspec.msgpack.encode(config)
    process.stdin.write(len(raw).to_bytes(4, "little") + raw)
    process.stdin.flush()
    log: list[str] = []

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            log.append(line.decode(errors="replace").rstrip("\n"))

    threading.Thread(target=read, daemon=True).start()
    patience = threading.Timer(START_SECONDS, process.kill)
    patience.start()
    try:
        for line in process.stdout:
            message = json.loads(line)
            if "ready" in message:
                info = msgspec.convert(message["ready"]["info"], m.WorkerInfo)
                return LoneWorker(config, process, info, log)
            assert "error" not in message, message
    finally:
        patience.cancel()
    process.wait()
    raise AssertionError(f"{config.name} did not start:\n" + "\n".join(log[-30:]))


class _End:
    """One end of one session over one socket."""

    def __init__(self, incarnation: bytes) -> None:
        self.link = Link(incarnation, 1, time.monotonic())
        self.heard: deque[tuple[Key | None, m.Body]] = deque()
        self.datagrams: deque[m.Envelope] = deque()

    def put(self, raw: bytes) -> None:
        raise AssertionError("for whoever knows the socket")

    def get(self, milliseconds: float) -> bytes | None:
        raise AssertionError("for whoever knows the socket")

    def send(self, key: Key | None, body: m.Body) -> None:
        self.put(self.link.wrap(key, body, time.monotonic()))

    def poll(self, milliseconds: float = 20) -> None:
        """Take in what came, and say what the link has to say."""
        raw = self.get(milliseconds)
        if raw is not None:
            envelope = m.decode(raw)
            if envelope.sequence == 0:
                self.datagrams.append(envelope)
            self.heard.extend(self.link.accept(envelope, time.monotonic()))
        for again in self.link.due(time.monotonic()):
            self.put(again)

    def hear(self, kind: type | None = None, key: Key | None = None, seconds: float = HEAR_SECONDS) -> Any:
        """The next message of this kind (about this key); what comes before it is dropped."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            while self.heard:
                about, body = self.heard.popleft()
                if (kind is None or isinstance(body, kind)) and (key is None or about == key):
                    return body
            self.poll()
        raise TimeoutError(f"no {kind.__name__ if kind else 'message'} within {seconds} s")

    def quiet(self, seconds: float) -> bool:
        """Whether nothing but signs of life comes for so long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.poll()
        return not self.heard


class Dialler(_End):
    """A client of one worker's control port: a gateway (`info` None), or another worker."""

    def __init__(
        self,
        address: str,
        keys: wire.CurveKeys,
        info: m.WorkerInfo | None = None,
        hello: bool = True,
    ) -> None:
        super().__init__(info.incarnation if info is not None else wire.new_incarnation())
        self.name = info.worker if info is not None else "test"
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        wire.dial(self.socket, keys, address, wire.new_identity())
        if hello:
            self.send(None, m.Hello(self.name, info))

    def put(self, raw: bytes) -> None:
        self.socket.send(raw)

    def get(self, milliseconds: float) -> bytes | None:
        return self.socket.recv() if self.socket.poll(milliseconds) else None

    def ask(self, key: Key | None, body: m.Body, kind: type | None = None) -> Any:
        self.send(key, body)
        return self.hear(kind)

    def stats(self) -> dict[str, float]:
        values: dict[str, float] = self.ask(None, m.AskStats(1), m.Stats).values
        return values

    def close(self) -> None:
        self.context.destroy(linger=0)


class FakeDecode(_End):
    """A decode worker that exists only as far as a prefill worker can see: an address, a Welcome, a landing segment."""

    def __init__(self, keys: wire.CurveKeys, like: m.WorkerInfo, slots: int = 8) -> None:
        incarnation = wire.new_incarnation()
        super().__init__(incarnation)
        self.context: zmq.Context[Any] = zmq.Context()
        self._auth = wire.authenticator(self.context, keys)
        self.socket = self.context.socket(zmq.ROUTER)
        port = wire.serve(self.socket, keys, "127.0.0.1")
        self.info = msgspec.structs.replace(
            like,
            worker="fake-decode",
            role="decode",
            incarnation=incarnation,
            pid=os.getpid(),
            address=f"tcp://127.0.0.1:{port}",
        )
        self.receiver = ShmTransport().receiver(slots, like.geometry.stride, like.pid)
        self.peer = b""

    def put(self, raw: bytes) -> None:
        self.socket.send_multipart([self.peer, raw])

    def get(self, milliseconds: float) -> bytes | None:
        if not self.socket.poll(milliseconds):
            return None
        self.peer, raw = self.socket.recv_multipart()
        return bytes(raw)

    def welcome(self) -> None:
        """Wait for the worker's Hello and answer it."""
        self.hear(m.Hello)
        self.send(None, m.Welcome(self.info, self.receiver.descriptor(), 1))

    def close(self) -> None:
        self._auth.stop()
        self.context.destroy(linger=0)
        self.receiver.close()
