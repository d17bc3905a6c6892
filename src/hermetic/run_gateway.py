"""`hermetic gateway`: HTTP and the control port of a cluster whose workers are started elsewhere.

The one thing to know: it starts with no worker there. Workers announce themselves to its control port; until a pair of
them stands, requests get 503.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NoReturn

import zmq

from hermetic import cluster_file, http_server, keys
from hermetic.cluster_checks import own_address, read_model
from hermetic.cluster_file import ClusterFile
from hermetic.gateway.cluster import Cluster
from hermetic.gateway.options import ClusterOptions
from hermetic.gateway.tenants import is_loopback
from hermetic.http_server import Site
from hermetic.keys import ClusterKeys


def cluster_options(file: ClusterFile) -> ClusterOptions:
    gateway = file.gateway
    return ClusterOptions(
        silent_seconds=file.timing.silent_seconds,
        on_disconnect=gateway.on_disconnect,
        trip_failures=gateway.trip_failures,
        trip_seconds=60 * gateway.trip_minutes,
        state_file=None if gateway.state_file is None else str(gateway.state_file),
        context=gateway.context_length,
    )


@contextlib.asynccontextmanager
async def listening(file: ClusterFile, secrets: ClusterKeys, host: str, name: str) -> AsyncIterator[Cluster]:
    """A cluster that workers can join at `host`, an IP address of this machine. Raises OptionError."""
    cluster = Cluster(name, secrets.curve, cluster_options(file))
    try:
        try:
            await cluster.listen(host, file.gateway.control.port)
        except zmq.ZMQError as error:  # taken since it was looked at
            raise file.error(
                ("gateway", "control"), f"cannot listen on {file.gateway.control}: {error}"
            ) from error
        yield cluster
    finally:
        await cluster.shut_down()


def main(path: Path) -> NoReturn:
    """The command, to the end of the process. Raises OptionError for what is wrong with the files."""
    file = cluster_file.load(path)
    secrets = keys.load(file.keys)
    gateway, cap = file.gateway, file.gateway.context_length
    if gateway.api_keys is None and not is_loopback(gateway.http.host):
        raise file.error(
            ("gateway", "http"),
            f"http is {gateway.http}, which other machines can reach, so the gateway needs API keys: put the hashes that "
            '`hermetic hash-key` prints into a file of [tenants.NAME] tables, and name it here as api_keys = "FILE"; or listen on '
            "127.0.0.1",
        )
    source, model = read_model(file)
    if cap is not None and cap > model.window:
        raise file.error(
            ("gateway", "context_length"),
            f"context_length is {cap}, more than the model's window of {model.window} tokens; {model.window} would fit",
        )
    host = own_address(file, ("gateway", "control"), gateway.control)
    name = gateway.served_name or source.name
    site = Site(
        file.model,
        gateway.http.host,
        gateway.http.port,
        None if gateway.api_keys is None else str(gateway.api_keys),
        file.log_format,
        f"{path}: [gateway] http {gateway.http}",
    )

    def announce(url: str, _cluster: Cluster) -> None:
        print(
            f"ready {url}  control {gateway.dialled}, {len(file.workers)} workers in {path}; requests are answered when a pair "
            f"has joined (hermetic status {url})",
            file=sys.stderr,
            flush=True,
        )

    http_server.command(site, lambda: listening(file, secrets, host, name), announce)
