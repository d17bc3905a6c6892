"""`hermetic prefill` and `hermetic decode`: one worker of a cluster file, in this process.

The one thing to know: it serves until it is told to stop. The first SIGTERM or SIGINT makes it leave: it takes nothing new,
finishes what it has and ends with 0; the second ends it at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from hermetic import cluster_file, keys
from hermetic.cluster_checks import own_address, read_model
from hermetic.cluster_file import ClusterFile, WorkerTable
from hermetic.console import StartProgress
from hermetic.keys import ClusterKeys
from hermetic.options import OptionError
from hermetic.telemetry import logs
from hermetic.worker.build import WorkerConfig, sizes

# What the checks that this shares with `hermetic serve` call by that command's options, and how the file calls it.
_KEYS = {
    "--prefill-kv": "kv",
    "--decode-kv": "kv",
    "--context-length": "context_length",
    "--page-size": "page_size",
    "--landing-slots": "slots",
    "--drain-deadline": "drain_seconds",
    "--transfer-floor": "transfer_floor",
    "--silent-after": "silent_seconds",
}
_WHERE = {  # where it stands, when it is not a matter of this worker
    "--context-length": ("gateway", "context_length"),
    "--page-size": ("page_size",),
    "--drain-deadline": ("timing", "drain_seconds"),
    "--transfer-floor": ("timing", "transfer_floor"),
}


def choose(file: ClusterFile, command: str, name: str | None) -> WorkerTable:
    """The worker that `hermetic COMMAND --name NAME` is. Without a name, the only one of that role. Raises OptionError.

    A unified worker decodes, so it is started by `hermetic decode`."""
    roles = ("decode", "unified") if command == "decode" else (command,)
    fitting = [worker for worker in file.workers.values() if worker.role in roles]
    known = ", ".join(worker.name for worker in fitting) or "none"
    if name is None:
        if len(fitting) == 1:
            return fitting[0]
        raise OptionError(f"--name is missing; workers for `hermetic {command}` in {file.path}: {known}")
    worker = file.workers.get(name)
    if worker is None:
        raise file.error(
            ("workers",), f"there is no worker {name!r}; for `hermetic {command}` there is: {known}"
        )
    if worker.role not in roles:
        starts = "prefill" if worker.role == "prefill" else "decode"
        raise file.error(
            ("workers", name, "role"), f"{name} is a {worker.role} worker; start it with `hermetic {starts}`"
        )
    return worker


def worker_config(
    file: ClusterFile, worker: WorkerTable, secrets: ClusterKeys, host: str, trace: str = ""
) -> WorkerConfig:
    """What this worker is told. `host` is the IP address of its `listen`."""
    threads = worker.threads
    if threads is None:
        threads = max(1, len(os.sched_getaffinity(0)) // file.on_one_host(worker))
    dialled = worker.advertise or worker.listen.host
    return WorkerConfig(
        name=worker.name,
        role=worker.role,
        model=file.model,
        dtype=file.dtype,
        kv_bytes=worker.kv,
        page_size=file.page_size,
        verify=file.verify,
        context_length=None,  # the gateway's cap; a worker offers what its pool holds
        chunk=worker.chunk,
        max_batch=worker.max_batch,
        threads=threads,
        host=host,
        secret=secrets.secret.key,
        keys=secrets.curve,
        log_format=file.log_format,
        port=worker.listen.port,
        advertise="" if dialled == host else dialled,
        source=worker.source or "",
        gateways=(f"tcp://{file.gateway.dialled}",),
        transport=file.transport,
        slots=worker.slots,
        drain_seconds=file.timing.drain_seconds,
        silent_seconds=file.timing.silent_seconds,
        transfer_floor=file.timing.transfer_floor,
        trace=trace,
        supervised=False,
    )


def check(file: ClusterFile, config: WorkerConfig) -> None:
    """Refuse what cannot be served, before weights are read. Raises OptionError with a line of the file."""
    _, model = read_model(file)
    # With the cap, so that a pool that cannot hold what the gateway is to advertise is refused here, with numbers.
    capped = msgspec.structs.replace(config, context_length=file.gateway.context_length)
    try:
        sizes(capped, model)
    except OptionError as error:
        option = str(error).partition(" ")[0]
        key = _WHERE.get(option, ("workers", config.name, "kv"))
        raise file.error(key, _in_words_of_the_file(str(error))) from error


def _in_words_of_the_file(message: str) -> str:
    return re.sub(r"--[a-z-]+", lambda option: _KEYS.get(option[0], option[0]), message)


def main(path: Path, command: str, name: str | None, trace: str = "") -> NoReturn:
    """The command, to the end of the process. Raises OptionError for what is wrong with the files."""
    file = cluster_file.load(path)
    worker = choose(file, command, name)
    secrets = keys.load(file.keys)
    host = own_address(file, ("workers", worker.name, "listen"), worker.listen)
    config = worker_config(file, worker, secrets, host, trace)
    check(file, config)

    from hermetic.worker.process import run_standalone

    logs.setup(file.log_format)
    show = StartProgress()

    def report(line: Mapping[str, Any]) -> None:
        match line:
            case {"progress": fraction, "text": text}:
                show.update(worker.name, fraction, text)
            case {"ready": {"info": {"address": address, "pages": pages, "page_size": size}}}:
                show.say(
                    f"ready {worker.name} {address}  {worker.role}, {pages * size:,} tokens ({pages:,} pages of {size}), "
                    f"transport {file.transport}; announcing itself to the gateway at {file.gateway.dialled}"
                )
            case {"error": text}:
                show.say(f"hermetic: {_in_words_of_the_file(text)}")
            case {"text": text}:
                show.say(f"{worker.name}: {text}")

    try:
        with show:
            run_standalone(config, report)
    except KeyboardInterrupt:  # while it loads; later a signal is the worker's own affair
        raise SystemExit(130) from None
