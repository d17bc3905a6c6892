"""`hermetic serve`: worker processes, gateway and HTTP in one command."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import uvicorn
import uvloop

from hermetic.console import StartProgress
from hermetic.gateway import supervisor
from hermetic.gateway.app import create_app
from hermetic.gateway.backend import Failed
from hermetic.gateway.cluster import Cluster
from hermetic.gateway.supervisor import COMMAND, StartError, WorkerHandle
from hermetic.gateway.tenants import Tenants, tenants_for
from hermetic.kv.lineage import Secret
from hermetic.model.errors import ModelError
from hermetic.model.source import locate
from hermetic.model.tokenizer import Tokenizer
from hermetic.model.weights import read_config
from hermetic.options import OptionError, ServeOptions
from hermetic.telemetry import logs
from hermetic.worker.build import VERIFY, WorkerConfig, sizes
from hermetic.worker.wire import CurveKeys

WORKER_HOST = "127.0.0.1"  # workers of one `serve` talk over loopback
DTYPES = ("bf16", "float32")
MODES = ("disaggregated", "unified")


A = TypeVar("A")
B = TypeVar("B")

Commands = Callable[[WorkerConfig], Sequence[str]]
"""The command line that starts a worker. Always the product's own, but in the lab, which starts broken ones."""


def product_command(_config: WorkerConfig) -> Sequence[str]:
    return COMMAND


@dataclass
class Deployment:
    """Running workers and the backend over them."""

    cluster: Cluster
    handles: list[WorkerHandle]
    keys: CurveKeys


def worker_configs(options: ServeOptions, keys: CurveKeys, secret: Secret) -> list[WorkerConfig]:
    """The workers of this deployment. Raises OptionError for what cannot be started."""
    for name, value, allowed in (
        ("--mode", options.mode, MODES),
        ("--verify", options.verify, VERIFY),
        ("--dtype", options.dtype, DTYPES),
    ):
        if value not in allowed:
            raise OptionError(f"{name} {value!r}: choose {', '.join(allowed)}")
    if options.chunk < 1 or options.max_batch < 1:
        raise OptionError("--chunk and --max-batch must be at least 1")
    cores = len(os.sched_getaffinity(0))
    roles = [("unified-0", "unified", options.decode_kv)]
    if options.mode == "disaggregated":
        roles = [("prefill-0", "prefill", options.prefill_kv), ("decode-0", "decode", options.decode_kv)]
    threads = options.threads if options.threads is not None else max(1, cores // len(roles))
    if threads < 1:
        raise OptionError(f"--threads {threads}: at least 1")
    return [
        WorkerConfig(
            name=name,
            role=role,
            model=options.model,
            dtype=options.dtype,
            kv_bytes=kv,
            page_size=options.page_size,
            verify=options.verify,
            context_length=options.context_length,
            chunk=options.chunk,
            max_batch=options.max_batch,
            threads=threads,
            host=WORKER_HOST,
            secret=secret.key,
            keys=keys,
            log_format=options.log_format,
        )
        for name, role, kv in roles
    ]


@contextlib.asynccontextmanager
async def deployment(
    options: ServeOptions,
    progress: supervisor.Progress,
    commands: Commands = product_command,
) -> AsyncIterator[Deployment]:
    """Start all workers, pair them, and end them on the way out. Raises OptionError, ModelError, StartError, Failed."""
    keys, secret = CurveKeys.make(), Secret.random()
    source = locate(options.model)
    configs = worker_configs(options, keys, secret)
    model = await _in_thread(read_config, source)
    for config in configs:
        sizes(config, model)  # refuse before anything is started
    handles: list[WorkerHandle] = []
    cluster = Cluster(options.served_name or source.name, keys)
    watchers: list[asyncio.Task[None]] = []

    async def watch(handle: WorkerHandle) -> None:
        await handle.process.wait()
        cluster.lost(handle.config.name)

    starting = [asyncio.create_task(supervisor.start(c, progress, commands(c))) for c in configs]
    try:
        for done in asyncio.as_completed(starting):
            handles.append(await done)
        for handle in handles:
            assert handle.info is not None
            await cluster.join(handle.info, handle.address)
            watchers.append(asyncio.create_task(watch(handle)))
        await cluster.pair()
        yield Deployment(cluster, handles, keys)
    finally:
        for start in starting:
            start.cancel()
        for result in await asyncio.gather(*starting, return_exceptions=True):
            if isinstance(result, WorkerHandle) and result not in handles:
                handles.append(result)
        for watcher in watchers:
            watcher.cancel()
        await cluster.shut_down()
        await supervisor.stop(handles)


_READING = threading.Lock()  # transformers' lazy imports are not safe to run in two threads at once


async def _in_thread(work: Callable[[A], B], argument: A) -> B:
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


def bind(host: str, port: int) -> socket.socket:
    """The listening socket, before anything slow is started. Raises OptionError when it cannot be had."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, OverflowError, UnicodeError) as error:
        raise OptionError(f"--host {host} --port {port}: {error}") from error
    family, kind, proto, _, address = infos[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(1024)
    except (OSError, OverflowError) as error:
        sock.close()
        raise OptionError(
            f"cannot listen on {host} port {port}: {error}; choose another with --port, or end what uses it"
        ) from error
    return sock


async def run(
    options: ServeOptions,
    progress: supervisor.Progress,
    announce: Callable[[str, Cluster], None],
    commands: Commands = product_command,
) -> int:
    """Serve until a signal comes. `announce` is called once with the URL when requests are answered.

    Returns 0 when it served, 128 + the signal's number when it was stopped before that."""
    tenants = tenants_for(options.api_keys, options.host)
    sock = bind(options.host, options.port)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    code = 0

    def on_signal(number: signal.Signals) -> None:
        nonlocal code
        code = 0 if served else 128 + number
        stop.set()

    served: list[str] = []

    def announced(url: str, cluster: Cluster) -> None:
        served.append(url)
        announce(url, cluster)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    serving = asyncio.create_task(_serve(options, tenants, sock, progress, announced, commands, stop))
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
    options: ServeOptions,
    tenants: Tenants,
    sock: socket.socket,
    progress: supervisor.Progress,
    announce: Callable[[str, Cluster], None],
    commands: Commands,
    stop: asyncio.Event,
) -> None:
    # Read while the workers start; `deployment` begins with the config, so that a refusal comes first.
    tokenizing = asyncio.create_task(_in_thread(Tokenizer.load, locate(options.model)))
    tokenizing.add_done_callback(
        lambda task: task.cancelled() or task.exception()
    )  # awaited only if all goes well
    async with deployment(options, progress, commands) as running:
        tokenizer = await tokenizing
        app = create_app(running.cluster, tokenizer, tenants)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            server_header=False,
        )
        server = _Server(config)
        host, port = sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        announce(f"http://{shown}:{port}", running.cluster)
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


def _open_standard_streams() -> None:
    """Whoever started us may have closed some of 0, 1 and 2; a socket that got such a number would be written to."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one


def main(options: ServeOptions, commands: Commands = product_command) -> NoReturn:
    """The command, to the end of the process: everything is closed by then, and taking the interpreter with its models
    and tokenizers apart would take longer than all of that."""
    code = _main(options, commands)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    os._exit(code)


def _main(options: ServeOptions, commands: Commands) -> int:
    """Returns the exit code; writes one clear line for whatever went wrong."""
    _open_standard_streams()
    show = StartProgress()
    try:
        logs.setup(options.log_format)
        with show, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(
                run(
                    options,
                    show.update,
                    lambda url, cluster: show.ready(url, cluster.capacity(), options.api_keys is not None),
                    commands,
                )
            )
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
