"""The transports by name. An optional one is imported only when it is asked for."""

from __future__ import annotations

from hermetic.transport.base import WRITE_TIMEOUT_S, Transport, TransportError

NAMES = ("shm", "mooncake", "nixl")


def open_transport(name: str, host: str = "127.0.0.1", write_timeout_s: float = WRITE_TIMEOUT_S) -> Transport:
    """The transport of this worker process; it listens on `host` (an address of this machine) and on no other.

    Raises TransportError when it is unknown or not installed; the message has the line that installs it."""
    match name:
        case "shm":
            from hermetic.transport.shm import ShmTransport

            return ShmTransport()
        case "mooncake":
            from hermetic.transport.mooncake import MooncakeTransport

            return MooncakeTransport(host, write_timeout_s=write_timeout_s)
        case "nixl":
            from hermetic.transport.nixl import NixlTransport

            return NixlTransport(host, write_timeout_s)
        case _:
            raise TransportError(f"there is no transport {name!r}: choose {', '.join(NAMES)}")
