"""Real servers for tests: `hermetic serve` as a process on a free port, ended by its id whatever happens."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field

import httpx
import psutil

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
