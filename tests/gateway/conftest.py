"""The app over a scripted backend, driven without a network, and over a real socket."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
import uvicorn
from driving import client_of
from fastapi import FastAPI
from scripted import ScriptedBackend

from hermetic.gateway.app import create_app
from hermetic.gateway.limits import Settings
from hermetic.gateway.tenants import Tenants, local_tenants
from hermetic.model.source import locate
from hermetic.model.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(locate("smollm2"))


@pytest.fixture
def backend(tokenizer: Tokenizer) -> ScriptedBackend:
    return ScriptedBackend(tokenizer)


@pytest.fixture
def make_app(backend: ScriptedBackend, tokenizer: Tokenizer) -> Callable[..., FastAPI]:
    def make(tenants: Tenants | None = None, settings: Settings | None = None) -> FastAPI:
        return create_app(backend, tokenizer, tenants or local_tenants(), settings)

    return make


@pytest.fixture
def client(make_app: Callable[..., FastAPI]) -> httpx.AsyncClient:
    return client_of(make_app())


@pytest.fixture
def url(make_app: Callable[..., FastAPI]) -> Iterator[str]:
    """The app behind a real server on a free port of loopback."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(), log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join()
    listener.close()
