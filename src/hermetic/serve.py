"""`hermetic serve`: worker processes, gateway and HTTP in one command."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import NoReturn

from hermetic import http_server
from hermetic.console import StartProgress
from hermetic.gateway import supervisor
from hermetic.gateway.cluster import Cluster
from hermetic.gateway.options import ClusterOptions
from hermetic.gateway.supervisor import Commands, Supervisor, WorkerHandle, product_command
from hermetic.handoff.trace import TraceFileError
from hermetic.handoff.trace import start as start_trace
from hermetic.http_server import Site, in_thread
from hermetic.kv.lineage import Secret
from hermetic.model.source import locate
from hermetic.model.weights import read_config
from hermetic.options import (
    DTYPES,
    MODES,
    ON_DISCONNECT,
    TRANSPORTS,
    VERIFY,
    OptionError,
    ServeOptions,
    format_size,
)
from hermetic.worker.build import WorkerConfig, check_numbers, sizes
from hermetic.worker.wire import CurveKeys

WORKER_HOST = "127.0.0.1"  # workers of one `serve` talk over loopback
PAIRING_SECONDS = 60.0  # from the last worker's being ready until every pair stands


@dataclass
class Deployment:
    """Running workers and the backend over them. `handles` follows restarts."""

    cluster: Cluster
    handles: list[WorkerHandle]
    keys: CurveKeys


def worker_configs(
    options: ServeOptions, keys: CurveKeys, secret: Secret, gateway: str = ""
) -> list[WorkerConfig]:
    """The workers of this deployment; `gateway` is where they announce themselves. Raises OptionError for what cannot be
    started."""
    for name, value, allowed in (
        ("--mode", options.mode, MODES),
        ("--verify", options.verify, VERIFY),
        ("--dtype", options.dtype, DTYPES),
        ("--transport", options.transport, TRANSPORTS),
        ("--on-disconnect", options.on_disconnect, ON_DISCONNECT),
    ):
        if value not in allowed:
            raise OptionError(f"{name} {value!r}: choose {', '.join(allowed)}")
    for name, count in (
        ("--chunk", options.chunk),
        ("--max-batch", options.max_batch),
        ("--prefill-workers", options.prefill_workers),
        ("--decode-workers", options.decode_workers),
        ("--landing-slots", options.landing_slots),
        ("--transfer-floor", options.transfer_floor),
    ):
        if count < 1:
            raise OptionError(f"{name} {count}: at least 1")
    for name, seconds in (
        ("--drain-deadline", options.drain_deadline),
        ("--silent-after", options.silent_after),
        ("--trip-minutes", options.trip_minutes),
    ):
        if not 0 < seconds < float("inf"):
            raise OptionError(f"{name} {seconds}: a number above 0")
    if options.trip_failures < 0:
        raise OptionError(f"--trip-failures {options.trip_failures}: 0 (never) or more")
    if options.mode == "unified":
        roles = [(f"unified-{i}", "unified", options.decode_kv) for i in range(options.decode_workers)]
    else:
        roles = [(f"prefill-{i}", "prefill", options.prefill_kv) for i in range(options.prefill_workers)]
        roles += [(f"decode-{i}", "decode", options.decode_kv) for i in range(options.decode_workers)]
    together = sum(kv for _, _, kv in roles)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if len(roles) > 1 and together > memory:
        raise OptionError(
            f"the KV pools of {len(roles)} workers take {format_size(together)} together (--prefill-kv, --decode-kv), more than "
            f"this machine's memory of {format_size(memory)}"
        )
    threads = options.threads
    if threads is None:
        threads = max(1, len(os.sched_getaffinity(0)) // len(roles))
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
            gateways=(gateway,) if gateway else (),
            transport=options.transport,
            slots=options.landing_slots,
            drain_seconds=options.drain_deadline,
            silent_seconds=options.silent_after,
            transfer_floor=options.transfer_floor,
            trace=os.path.abspath(options.trace) if options.trace else "",
        )
        for name, role, kv in roles
    ]


@contextlib.asynccontextmanager
async def deployment(
    options: ServeOptions,
    progress: supervisor.Progress,
    commands: Commands = product_command,
) -> AsyncIterator[Deployment]:
    """Start all workers, pair them, keep them alive, and end them on the way out.

    Raises OptionError, ModelError, StartError, Failed."""
    keys, secret = CurveKeys.make(), Secret.random()
    source = locate(options.model)
    configs = worker_configs(options, keys, secret)
    for config in configs:
        check_numbers(config)  # what needs no model to be seen is said at once
    model = await in_thread(read_config, source)
    for config in configs:  # refuse before anything is started
        sizes(config, model)
    if options.trace:
        try:
            start_trace(options.trace)
        except TraceFileError as error:
            raise OptionError(str(error)) from error
    cluster = Cluster(options.served_name or source.name, keys, cluster_options(options))
    workers: Supervisor | None = None
    try:
        address = await cluster.listen(WORKER_HOST, 0)
        configs = worker_configs(options, keys, secret, address)
        workers = Supervisor(configs, cluster.lost, progress, commands)
        await workers.start()
        await cluster.wait_ready(PAIRING_SECONDS, len(configs))
        yield Deployment(cluster, workers.handles, keys)
    finally:
        await cluster.shut_down()
        if workers is not None:
            await workers.stop()


def cluster_options(options: ServeOptions) -> ClusterOptions:
    return ClusterOptions(
        silent_seconds=options.silent_after,
        on_disconnect=options.on_disconnect,
        trip_failures=options.trip_failures,
        trip_seconds=60 * options.trip_minutes,
        state_file=options.state_file,
    )


def main(options: ServeOptions, commands: Commands = product_command) -> NoReturn:
    """The command, to the end of the process."""
    show = StartProgress()

    @contextlib.asynccontextmanager
    async def running() -> AsyncIterator[Cluster]:
        with show:
            async with deployment(options, show.update, commands) as started:
                yield started.cluster

    site = Site(
        options.model,
        options.host,
        options.port,
        options.api_keys,
        options.log_format,
        f"--host {options.host} --port {options.port}",
    )
    http_server.command(
        site,
        running,
        lambda url, cluster: show.ready(url, cluster.capacity(), options.api_keys is not None),
    )
