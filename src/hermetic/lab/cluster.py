"""A whole cluster of real commands from one cluster file, on one host or on hosts apart, and traffic whose tokens are known.

The model is tiny, and its tokenizer spells every token as its number, so that the text of an answer says exactly which
tokens were made. Prompts are token ids for the same reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

import httpx

from hermetic import keys
from hermetic.keys import ClusterKeys
from hermetic.lab.hosts import Host
from hermetic.lab.load import Answer, Ask, send
from hermetic.lab.tiny import make_tiny

T = TypeVar("T")

START_SECONDS = 240.0  # compiling without a cache, on a busy machine
REQUEST_SECONDS = 120.0  # a request that takes longer is taken to hang
ERROR_SECONDS = 1.0  # before the next request after one that ended with an error


class ClusterError(RuntimeError):
    """The cluster did not come to what was waited for; the message has the end of what it said."""


def make_model(folder: Path, **shape: int) -> str:
    """A tiny random Llama (see tiny.py) whose tokenizer spells token 17 as " 17", and none is hidden."""
    path = make_tiny(folder, **shape)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "unk_token": None, "merges": [],
            "vocab": {f"\u0120{token}": token for token in range(vocab)},
        },
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return path


def tokens_of(answer: Answer) -> list[int]:
    """The tokens of an answer made with `make_model`'s tokenizer."""
    return [int(word) for word in answer.text.split()]


def undisturbed(model: str, asks: Sequence[Ask], dtype: str = "float32") -> dict[tuple[int, ...], list[int]]:
    """What each prompt's answer must be: one engine in this process, one request after the other, nothing else going on."""
    from hermetic.handoff.messages import Key
    from hermetic.lab.pair import make_worker
    from hermetic.model.params import SamplingParams
    from hermetic.worker import messages as m

    made: list[int] = []

    def collect(_to: bytes, _key: Key | None, body: m.Body) -> None:
        if isinstance(body, m.Tokens):
            made.extend(token.token for token in body.tokens)

    worker = make_worker("unified", model, 256, dtype=dtype, threads=1, send=collect)
    answers: dict[tuple[int, ...], list[int]] = {}
    for i, ask in enumerate(asks):
        if ask.prompt in answers:
            continue
        made.clear()
        raw = b"".join(token.to_bytes(4, "little") for token in ask.prompt)
        params = SamplingParams(max_tokens=ask.max_tokens, temperature=0.0, ignore_eos=True)
        submit = m.Submit(raw, len(ask.prompt), params, 1, 0, 0, "lab", "", i, "")
        worker.handle(b"lab", Key(i.to_bytes(16, "little"), 1), submit)
        while worker.tick():
            pass
        answers[ask.prompt] = list(made)
        assert len(made) == ask.max_tokens
    return answers


def prompts(count: int, shortest: int, longest: int, output: int, vocab: int, seed: int = 0) -> list[Ask]:
    """Different prompts of random tokens, evenly from the shortest to the longest, each third one with a common beginning."""
    rng = random.Random(seed)
    common = [rng.randrange(1, vocab) for _ in range(longest)]
    asks = []
    for i in range(count):
        size = shortest + (longest - shortest) * i // max(1, count - 1)
        own = [rng.randrange(1, vocab) for _ in range(size)]
        asks.append(Ask(tuple(common[: size // 2] + own[size // 2 :]) if i % 3 == 0 else tuple(own), output))
    return asks


@dataclass(frozen=True)
class Member:
    """One worker of the cluster. `lab`: HERMETIC_LAB's words, for a worker with something broken (see process.py)."""

    name: str
    role: str
    listen: str  # HOST:PORT
    host: Host | None = None  # None: this one
    advertise: str = ""
    lab: str = ""
    fields: Mapping[str, object] = field(default_factory=dict)  # more of its table in the file


@dataclass(frozen=True)
class Gateway:
    """The gateway. `http` is asked from its own host."""

    control: str  # HOST:PORT
    http: str
    host: Host | None = None
    advertise: str = ""
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass
class Cluster:
    """Processes started from one file in `folder`; what each says is in `folder/NAME.log`."""

    folder: Path
    gateway: Gateway
    members: Sequence[Member]
    keys: ClusterKeys
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    @classmethod
    def write(
        cls,
        folder: Path,
        model: str,
        gateway: Gateway,
        members: Sequence[Member],
        timing: Mapping[str, object],
        **top: object,
    ) -> Cluster:
        """Write the cluster file and its keys. `top` are further keys at the top of the file."""
        secrets = ClusterKeys.make()
        keys.write(folder / "cluster.keys", secrets)
        values: dict[str, object] = {"model": model, "keys": "cluster.keys", **top}
        tables: list[tuple[str, Mapping[str, object]]] = [
            ("gateway", {"control": gateway.control, "http": gateway.http}
             | ({"advertise": gateway.advertise} if gateway.advertise else {}) | dict(gateway.fields)),
            *((f"workers.{one.name}", {"role": one.role, "listen": one.listen}
               | ({"advertise": one.advertise} if one.advertise else {}) | dict(one.fields)) for one in members),
            ("timing", timing),
        ]  # fmt: skip
        text = _lines(values) + "".join(f"\n[{name}]\n{_lines(table)}" for name, table in tables)
        (folder / "cluster.toml").write_text(text)
        return cls(folder, gateway, members, secrets)

    @property
    def file(self) -> Path:
        return self.folder / "cluster.toml"

    @contextlib.contextmanager
    def running(self) -> Iterator[Cluster]:
        """Start everything, wait for nothing, and end it on the way out."""
        try:
            self.start("gateway")
            for member in self.members:
                self.start(member.name)
            yield self
        finally:
            self.end()

    def start(self, name: str) -> subprocess.Popen[str]:
        """Start the gateway or a worker (again)."""
        environment = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000", "PYTHONUNBUFFERED": "1"}
        if name == "gateway":
            host, module, words = self.gateway.host, "hermetic", ["gateway"]
        else:
            member = next(one for one in self.members if one.name == name)
            host, module = member.host, "hermetic.lab" if member.lab else "hermetic"
            words = ["prefill" if member.role == "prefill" else "decode", "--name", name]
            environment["HERMETIC_LAB"] = member.lab
        command = [sys.executable, "-m", module, words[0], "--cluster", str(self.file), *words[1:]]
        with (self.folder / f"{name}.log").open("a") as log:
            if host is not None:
                process = host.start(command, environment, log, log)
            else:
                process = _start_here(command, environment, log)
        self.processes[name] = process
        return process

    def end(self) -> None:
        """End every process, by the group it was started in; a stopped one as well."""
        for process in self.processes.values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes.values():
            process.wait()

    # ------------------------------------------------------------------- looking at it

    @property
    def url(self) -> str:
        return f"http://{self.gateway.http}"

    def here(self, what: Callable[[], T]) -> T:
        """Do this on the gateway's host, from which its HTTP can be asked."""
        return what() if self.gateway.host is None else self.gateway.host.call(what)

    def get(self, path: str, timeout: float = 10.0) -> httpx.Response:
        return self.here(lambda: httpx.get(f"{self.url}{path}", timeout=timeout))

    def status(self) -> dict[str, Any]:
        """Raises httpx.HTTPError."""
        answer = self.get("/admin/status")
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics: `name{labels}` -> value."""
        text = self.get("/metrics", timeout=30).text
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in lines}

    @staticmethod
    def figure_in(values: Mapping[str, float], name: str, **labels: str) -> float:
        """The sum of a metric's samples in `values` that have these labels."""
        total = 0.0
        for sample, value in values.items():
            found = re.fullmatch(r"(\w+)(?:\{(.*)\})?", sample)
            if found and found[1] == name:
                has = dict(re.findall(r'(\w+)="([^"]*)"', found[2] or ""))
                if labels.items() <= has.items():
                    total += value
        return total

    def whole(self) -> bool:
        """Every worker is ready, and every prefill worker is paired with every decode worker."""
        try:
            workers = {one["id"]: one for one in self.status()["workers"]}
        except httpx.HTTPError:
            return False
        decodes = {one.name for one in self.members if one.role == "decode"}
        ready = all(one.name in workers and workers[one.name]["state"] == "ready" for one in self.members)
        return ready and all(
            decodes <= set(workers[one.name]["paired"]) for one in self.members if one.role == "prefill"
        )

    def idle(self) -> bool:
        """Every worker that is there holds nothing: all pages and slots are free."""
        values = self.metrics()
        return all(
            self.figure_in(values, name) == self.figure_in(values, name, state="free")
            for name in ("hermetic_pages", "hermetic_slots")
        )

    def wait_whole(self, seconds: float = START_SECONDS) -> None:
        self.wait("all workers are ready and paired", self.whole, seconds)

    def wait_idle(self, seconds: float = 60.0) -> None:
        self.wait("all pages and slots are free", self.idle, seconds)

    def wait(self, what: str, true: Callable[[], bool], seconds: float, every: float = 0.2) -> None:
        """Raises ClusterError when `true` is not within `seconds`, or when a process has ended unasked meanwhile."""
        deadline = time.monotonic() + seconds
        while not true():
            ended = {name: p.returncode for name, p in self.processes.items() if p.poll() is not None}
            if ended or time.monotonic() > deadline:
                why = f"ended: {ended}" if ended else f"not within {seconds:g} s"
                raise ClusterError(f"{what}: {why}\n{self.said()}")
            time.sleep(every)

    def said(self, lines: int = 15) -> str:
        """The end of every log."""
        parts = []
        for path in sorted(self.folder.glob("*.log")):
            parts += [f"--- {path.stem}", *path.read_text(errors="replace").splitlines()[-lines:]]
        return "\n".join(parts)

    # --------------------------------------------------------------------- asking it

    def ask(self, asks: Sequence[Ask], concurrency: int = 8) -> list[Answer]:
        """Answers in the order of `asks`. Raises httpx.HTTPError when a connection fails."""
        traffic = Traffic(self, asks, concurrency, once=True)
        traffic.start()
        return traffic.wait()


class Traffic:
    """Requests one after the other, so many at a time, from a thread on the gateway's host, until it is stopped."""

    def __init__(self, cluster: Cluster, asks: Sequence[Ask], concurrency: int, once: bool = False) -> None:
        self._cluster, self._asks, self._concurrency, self._once = cluster, asks, concurrency, once
        self.answers: list[Answer] = []  # as they come; with `once`, in the order of `asks` in the end
        self.open = 0
        self._stopping = threading.Event()
        self._thread = ThreadPoolExecutor(1, "traffic")
        self._end: Future[None] | None = None

    def start(self) -> Traffic:
        self._end = self._thread.submit(self._cluster.here, lambda: asyncio.run(self._drive()))
        return self

    def stop(self) -> list[Answer]:
        """Let the requests that are open end, and return every answer."""
        self._stopping.set()
        return self.wait()

    def wait(self) -> list[Answer]:
        """Every answer; one that hung has that as its error. Raises httpx.HTTPError when a connection fails."""
        assert self._end is not None
        self._end.result()
        return self.answers

    def __enter__(self) -> Traffic:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.shutdown()

    async def _drive(self) -> None:
        order = iter(range(len(self._asks))) if self._once else _around(len(self._asks))
        found: dict[int, Answer] = {}
        model = await self._model()

        async def work(client: httpx.AsyncClient) -> None:
            for i in order:
                if self._stopping.is_set():
                    return
                self.open += 1
                try:
                    async with asyncio.timeout(REQUEST_SECONDS):
                        answer = await send(client, model, self._asks[i])
                except TimeoutError:
                    answer = Answer(self._asks[i], error=f"it did not end within {REQUEST_SECONDS:g} s")
                self.open -= 1
                found[i] = answer
                self.answers.append(answer)
                if answer.error:  # as a client that is told Retry-After
                    await asyncio.sleep(ERROR_SECONDS)

        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(
                base_url=self._cluster.url, timeout=2 * REQUEST_SECONDS, limits=limits
            ) as client,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(self._concurrency):
                group.create_task(work(client))
        if self._once:
            self.answers = [found[i] for i in range(len(self._asks))]

    async def _model(self) -> str:
        async with httpx.AsyncClient(base_url=self._cluster.url, timeout=30) as client:
            name: str = (await client.get("/v1/models")).json()["data"][0]["id"]
            return name


def wrong(answers: Sequence[Answer], expected: Mapping[tuple[int, ...], list[int]]) -> list[str]:
    """Answers that are not exactly what an undisturbed run says, each in a line."""
    found = []
    for answer in answers:
        want = expected[answer.ask.prompt][: answer.ask.max_tokens]
        got = tokens_of(answer)
        if answer.status != 200 or answer.error:
            found.append(
                f"prompt of {len(answer.ask.prompt)}: {answer.status} {answer.error} after {len(got)} tokens"
            )
        elif got != want:
            same = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), len(got))
            found.append(
                f"prompt of {len(answer.ask.prompt)}: {len(got)} tokens, wrong from {same} on: {got} {want}"
            )
    return found


def _around(count: int) -> Iterator[int]:
    while True:
        yield from range(count)


def _start_here(
    command: Sequence[str], environment: Mapping[str, str], log: IO[str]
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True, start_new_session=True,
        env={**os.environ, **environment},
    )  # fmt: skip


def _lines(values: Mapping[str, object]) -> str:
    """TOML: JSON's texts and numbers are TOML's as well."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
