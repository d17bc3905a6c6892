"""The way from a backend to an HTTP server that ends cleanly: what `hermetic serve` and `hermetic gateway` have in common.

The one thing to know: the commands differ only in how their cluster comes to be; `Running` is that difference. The socket
is bound before it, so that a port in use is said before anything slow is started, and answers are given after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import uvicorn
import uvloop

from hermetic.gateway.app import create_app
from hermetic.gateway.backend import Failed
from hermetic.gateway.cluster import Cluster
from hermetic.gateway.supervisor import StartError
from hermetic.gateway.tenants import Tenants, tenants_for
from hermetic.model.errors import ModelError
from hermetic.model.source import locate
from hermetic.model.tokenizer import Tokenizer
from hermetic.options import OptionError
from hermetic.telemetry import logs

A = TypeVar("A")
B = TypeVar("B")

Running = Callable[[], AbstractAsyncContextManager[Cluster]]
"""Enters with a cluster that takes requests; leaves when everything that it started has ended."""

Announce = Callable[[str, Cluster], None]
"""Called once, with the URL, when requests are answered."""


@dataclass(frozen=True)
class Site:
    """Where HTTP is spoken, and for which model."""

    model: str
    host: str
    port: int
    api_keys: str | None
    log_format: str
    where: (
        str  # how a person names host and port when they cannot be had, e.g. "--host 127.0.0.1 --port 8000"
    )


_READING = threading.Lock()  # transformers' lazy imports are not safe to run in two threads at once


async def in_thread(work: Callable[[A], B], argument: A) -> B:
    """Run slow reading beside the event loop, in a thread that an interrupted start does not wait for."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[B] = loop.create_future()

    def settle(value: B | None, error: Exception | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)  # type: ignore[arg-type]

    def body() -> None:
        value, error = None, None
        try:
            with _READING:
                value = work(argument)
        except Exception as problem:  # noqa: BLE001  (whatever it is, it is raised again where it is awaited)
            error = problem
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=body, daemon=True).start()
    return await future


def bind(site: Site) -> socket.socket:
    """The listening socket, before anything slow is started. Raises OptionError when it cannot be had."""
    try:
        infos = socket.getaddrinfo(site.host, site.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, OverflowError, UnicodeError) as error:
        raise OptionError(f"{site.where}: {error}") from error
    family, kind, proto, _, address = infos[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(1024)
    except (OSError, OverflowError) as error:
        sock.close()
        raise OptionError(
            f"{site.where}: cannot listen on {site.host} port {site.port}: {error}; choose another port, or end what uses it"
        ) from error
    return sock


async def run(site: Site, running: Running, announce: Announce) -> int:
    """Serve until a signal comes.

    Returns 0 when it served, 128 + the signal's number when it was stopped before that."""
    tenants = tenants_for(site.api_keys, site.host)
    sock = bind(site)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    code = 0
    served: list[str] = []

    def on_signal(number: signal.Signals) -> None:
        nonlocal code
        code = 0 if served else 128 + number
        stop.set()

    def announced(url: str, cluster: Cluster) -> None:
        served.append(url)
        announce(url, cluster)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    serving = asyncio.create_task(_serve(site, tenants, sock, running, announced, stop))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        if not serving.done():
            serving.cancel()
        sock.close()
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    return code


async def _serve(
    site: Site,
    tenants: Tenants,
    sock: socket.socket,
    running: Running,
    announce: Announce,
    stop: asyncio.Event,
) -> None:
    # Read while the cluster comes to be; that begins with the config, so that a refusal comes first.
    tokenizing = asyncio.create_task(in_thread(Tokenizer.load, locate(site.model)))
    tokenizing.add_done_callback(
        lambda task: task.cancelled() or task.exception()
    )  # awaited only if all goes well
    async with running() as cluster:
        tokenizer = await tokenizing
        config = uvicorn.Config(
            create_app(cluster, tokenizer, tenants, listens=sock.getsockname()[0]),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            server_header=False,
        )
        server = _Server(config)
        host, port = sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        announce(f"http://{shown}:{port}", cluster)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        try:
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            server.should_exit = server.force_exit = True
            await asyncio.wait({serving}, timeout=2)


class _Server(uvicorn.Server):
    """uvicorn would take SIGINT and SIGTERM for itself; `run` has them."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


def command(site: Site, running: Running, announce: Announce) -> NoReturn:
    """`run` as a command, to the end of the process: everything is closed by then, and taking the interpreter with its
    models and tokenizers apart would take longer than all of that."""
    open_standard_streams()
    end(_outcome(site, running, announce))


def _outcome(site: Site, running: Running, announce: Announce) -> int:
    """Returns the exit code; writes one clear line for whatever went wrong."""
    try:
        logs.setup(site.log_format)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run(site, running, announce))
    except (OptionError, ModelError) as error:
        print(f"hermetic: {error}", file=sys.stderr)
        return 2
    except StartError as error:
        print(f"hermetic: {error}", file=sys.stderr)
        return error.exit_code
    except Failed as error:
        print(f"hermetic: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def open_standard_streams() -> None:
    """Whoever started us may have closed some of 0, 1 and 2; a socket that got such a number would be written to."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one


def end(code: int) -> NoReturn:
    """End the process now, with what was written."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    os._exit(code)
