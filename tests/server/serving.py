"""Real servers for tests: `hermetic serve` as a process on a free port, ended by its id whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import httpx
import psutil
import uvicorn

from hermetic.gateway.app import create_app
from hermetic.gateway.cluster import Cluster
from hermetic.gateway.pairing import standing
from hermetic.gateway.supervisor import Commands, product_command
from hermetic.gateway.tenants import tenants_for
from hermetic.model.source import locate
from hermetic.model.tokenizer import Tokenizer
from hermetic.options import ServeOptions
from hermetic.serve import Deployment, deployment

START_SECONDS = 240  # compiling without a cache, on a busy machine


@dataclass
class Server:
    """A running `hermetic serve`. `log` grows while it runs."""

    process: subprocess.Popen[str]
    url: str = ""
    log: list[str] = field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics: `name{labels}` -> value."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in lines}

    def pages(self) -> dict[tuple[str, str], float]:
        """Pages by (worker, state)."""
        found = {}
        for name, value in self.metrics().items():
            if match := re.fullmatch(r'hermetic_pages\{state="(\w+)",worker="([\w-]+)"\}', name):
                found[match[2], match[1]] = value
        return found

    def workers(self) -> list[psutil.Process]:
        return [
            p
            for p in psutil.Process(self.process.pid).children()
            if "hermetic.worker" in " ".join(p.cmdline())
        ]

    def wait_idle(self, seconds: float = 20) -> None:
        """Wait until no page is leased anywhere."""
        deadline = time.monotonic() + seconds
        while any(count for (_, state), count in self.pages().items() if state == "leased"):
            assert time.monotonic() < deadline, f"pages are still leased after {seconds} s: {self.pages()}"
            time.sleep(0.1)


def start(*arguments: str, wait: bool = True) -> Server:
    command = [sys.executable, "-m", "hermetic", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    server = Server(process)
    ready = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            server.log.append(line.rstrip("\n"))
            if match := re.match(r"ready (http://\S+)", line):
                server.url = match[1]
                ready.set()
        ready.set()

    threading.Thread(target=read, daemon=True).start()
    if wait and not (ready.wait(START_SECONDS) and server.url):
        stop(server)
        raise AssertionError("the server did not start:\n" + "\n".join(server.log[-30:]))
    return server


def stop(server: Server) -> int:
    """End it and everything it started, by id. Returns its exit code."""
    children = (
        psutil.Process(server.process.pid).children(recursive=True) if server.process.poll() is None else []
    )
    server.process.send_signal(signal.SIGTERM)
    try:
        code = server.process.wait(15)
    except subprocess.TimeoutExpired:
        server.process.kill()
        code = server.process.wait()
    _, alive = psutil.wait_procs(children, timeout=5)
    for process in alive:
        process.kill()
    return code


def events(response: httpx.Response) -> list[dict]:
    """The JSON of every SSE event but [DONE]."""
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


# ------------------------------------------------------------------------------------- the gateway in this process
@dataclass
class Here:
    """A deployment whose gateway lives in this event loop: its workers are processes, its HTTP is real."""

    running: Deployment
    client: httpx.AsyncClient

    @property
    def cluster(self) -> Cluster:
        return self.running.cluster

    def incarnations(self) -> set[bytes]:
        """Of the members that are ready."""
        return {r.info.incarnation for r in self.cluster.members.remotes.values() if r.state == "ready"}

    def pairs(self) -> int:
        """How many pairs (or unified workers) stand."""
        return len(standing(self.cluster.members.remotes.values()))

    async def wait(self, what: str, until: Callable[[], bool | Awaitable[bool]], seconds: float) -> None:
        """Look again and again; fails with what was waited for, and with all figures."""
        deadline = time.monotonic() + seconds
        while True:
            now = until()
            if now if isinstance(now, bool) else await now:
                return
            assert time.monotonic() < deadline, (
                f"{what}: not within {seconds} s; {await self.cluster.stats()}"
            )
            await asyncio.sleep(0.05)

    async def wait_all_free(self, seconds: float = 30) -> Mapping[str, Mapping[str, float]]:
        """Wait until no worker holds a page, a slot or a ticket; returns the figures."""
        workers = len(self.running.handles)

        async def free() -> bool:
            figures = {k: v for k, v in (await self.cluster.stats()).items() if k != "gateway"}
            return len(figures) == workers and not any(map(held, figures.values()))

        await self.wait("everything given back", free, seconds)
        figures = await self.cluster.stats()
        for name, values in figures.items():
            if name != "gateway":
                assert values["pages_free"] == values["pages_total"], (name, values)
                assert values.get("slots_free") == values.get("slots_total"), (name, values)
                assert values["lease_double_closes"] == values["tag_mismatches"] == 0, (name, values)
        return figures


HOLDS = (
    "pages_leased",
    "pages_sending",
    "pages_quarantined",
    "slots_granted",
    "slots_quarantined",
    "handoffs_open",
    "drains_outstanding",
    "releases_deferred",
    "writes_in_flight",
    "writes_in_doubt",
    "peers_silent",
    "sequences_waiting",
    "sequences_reserved",
    "sequences_prefilling",
    "sequences_running",
)


def held(figures: Mapping[str, float]) -> dict[str, float]:
    """What a worker still holds, by its own figures; empty when it holds nothing."""
    return {name: figures[name] for name in HOLDS if figures.get(name)}


class _Server(uvicorn.Server):
    """Signals are the test's."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


@contextlib.asynccontextmanager
async def here(options: ServeOptions, commands: Commands = product_command) -> AsyncIterator[Here]:
    """Workers started and paired, HTTP answered on a free port; all ended on the way out."""
    async with deployment(options, lambda *_: None, commands) as running:
        tokenizer = await asyncio.to_thread(Tokenizer.load, locate(options.model))
        app = create_app(running.cluster, tokenizer, tenants_for(None, "127.0.0.1"))
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            server = _Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
            serving = asyncio.create_task(server.serve(sockets=[sock]))
            url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            limits = httpx.Limits(max_connections=None)
            try:
                async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
                    yield Here(running, client)
            finally:
                server.should_exit = server.force_exit = True
                await serving
