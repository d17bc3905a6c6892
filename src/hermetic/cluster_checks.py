"""What a cluster file says against what is on this machine: is that address ours, is that model here?

Asked before anything slow is started, so that an answer of no comes at once, with the line of the file.
"""

from __future__ import annotations

import ipaddress
import socket

from hermetic.cluster_file import Address, ClusterFile
from hermetic.model.config import ModelConfig
from hermetic.model.errors import ModelError
from hermetic.model.source import ModelSource, locate
from hermetic.model.weights import read_config
from hermetic.options import OptionError
from hermetic.toml_lines import Path as KeyPath


def own_address(file: ClusterFile, key: KeyPath, address: Address) -> str:
    """The IP address to bind: `address.host`, resolved if it is a name. Nothing stays bound.

    Raises OptionError with the line of `key` when it is no address of this machine, or its port is taken."""
    try:
        infos = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise file.error(
            key, f"{key[-1]} is {address}, and {address.host} cannot be resolved: {error}"
        ) from error
    family, kind, proto, _, where = infos[0]
    found = str(where[0])
    if ipaddress.ip_address(found.partition("%")[0]).is_unspecified:
        raise file.error(
            key,
            f"{key[-1]} is {address}, and {address.host} stands for every address; name the one that others dial",
        )
    with socket.socket(family, kind, proto) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(where)
            probe.listen()
        except OSError as error:
            raise _refused(file, key, address, found, error) from error
    return found


def _refused(file: ClusterFile, key: KeyPath, address: Address, found: str, error: OSError) -> OptionError:
    shown = found if found == address.host else f"{found} ({address.host})"
    return file.error(
        key,
        f"cannot listen on {shown} port {address.port}: {error.strerror}; {key[-1]} must be an address of this machine, and its "
        "port free",
    )


def read_model(file: ClusterFile) -> tuple[ModelSource, ModelConfig]:
    """The model's files on this machine, and its shape. Raises OptionError with the line of `model`."""
    try:
        source = locate(file.model)
        return source, read_config(source)
    except ModelError as error:
        raise file.error(("model",), str(error)) from error
