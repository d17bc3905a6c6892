"""Servers that tests share, and a way to start one with other options."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from serving import Server, start, stop


@pytest.fixture(scope="session")
def make_server() -> Iterator[Callable[..., Server]]:
    """Start servers with options of the test's own; all are ended with the session at the latest."""
    servers: list[Server] = []

    def make(*arguments: str, wait: bool = True) -> Server:
        servers.append(start(*arguments, wait=wait))
        return servers[-1]

    yield make
    for server in servers:
        if server.process.poll() is None:
            stop(server)


@pytest.fixture(scope="session")
def server(make_server: Callable[..., Server]) -> Server:
    """Disaggregated, with a prefill pool (67 pages, 1,072 tokens) far below the model's window of 8,192."""
    return make_server("--prefill-kv", "24MiB", "--decode-kv", "96MiB")


@pytest.fixture(scope="session")
def limit(server: Server) -> int:
    """The advertised context: 24 MiB / 372,736 bytes a page = 67 pages of 16 tokens."""
    return 67 * 16
