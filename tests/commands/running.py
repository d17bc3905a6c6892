"""Commands as real processes: started, listened to, and ended by their ids whatever happens."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

SECONDS = 240  # compiling without a cache, on a busy machine


@dataclass
class Command:
    """`hermetic ...`, running. `log` is its standard error so far."""

    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)

    @property
    def children(self) -> list[psutil.Process]:
        """Its worker processes."""
        found = psutil.Process(self.process.pid).children()
        return [child for child in found if "hermetic.worker" in " ".join(child.cmdline())]

    def wait_for(self, pattern: str, times: int = 1, seconds: float = SECONDS) -> re.Match[str]:
        """The line that matches (the last of so many)."""
        until(
            lambda: len(self._matches(pattern)) >= times or self.process.poll() is not None, seconds, self.log
        )
        matches = self._matches(pattern)
        assert len(matches) >= times, f"{pattern!r} was not said:\n" + "\n".join(self.log[-30:])
        return matches[times - 1]

    def _matches(self, pattern: str) -> list[re.Match[str]]:
        return [found for line in list(self.log) if (found := re.search(pattern, line))]

    def listening(self) -> set[tuple[str, int]]:
        """Every address that this process listens on, TCP or UDP."""
        connections = psutil.Process(self.process.pid).net_connections("inet")
        return {
            (c.laddr.ip, c.laddr.port)
            for c in connections
            if c.status == psutil.CONN_LISTEN or (c.type == socket.SOCK_DGRAM and not c.raddr)
        }

    def end(self, number: signal.Signals = signal.SIGTERM, seconds: float = 30) -> int:
        """Send a signal and wait for the end; its children end with it or are ended."""
        if self.process.poll() is not None:
            return self.process.returncode
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(number)
        try:
            return self.process.wait(seconds)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            for child in psutil.wait_procs(children, timeout=5)[1]:
                child.kill()


def start(*arguments: str, folder: Path) -> Command:
    process = subprocess.Popen(
        [sys.executable, "-m", "hermetic", *arguments],
        cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    command = Command(process)

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            command.log.append(line.rstrip("\n"))

    threading.Thread(target=read, daemon=True).start()
    return command


def until(true: Callable[[], bool], seconds: float = 60, log: list[str] | None = None) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come to be:\n" + "\n".join((log or [])[-30:])
        time.sleep(0.05)


def ask(url: str, **fields: Any) -> httpx.Response:
    """A completion of the tiny model, the same tokens each time."""
    body = {"model": "tiny", "prompt": [7, 8, 9] * 20, "max_tokens": 12, "ignore_eos": True, "temperature": 0}
    return httpx.post(f"{url}/v1/completions", json=body | fields, timeout=60)


def free_port(host: str) -> int:
    with socket.socket() as sock:
        sock.bind((host, 0))
        return sock.getsockname()[1]
