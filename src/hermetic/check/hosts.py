"""Which addresses stand for the machine itself, and which for all of its interfaces, in every spelling that a resolver takes.

The one thing to know: `127.0.1.1` is what Debian calls a machine's own name, and reaches nobody else either; `0` and `::ffff:0.0.0.0` are all interfaces.
"""

from __future__ import annotations

import ipaddress
import re
import socket

_NAMES = ("localhost", "ip6-localhost", "localhost.localdomain")
_SHORT = re.compile(r"[0-9][0-9a-fA-FxX.]*")


def number(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a text is by itself, also `0` and `127.1`; None for a name."""
    try:
        found = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return _short(host)
    return getattr(found, "ipv4_mapped", None) or found


def _short(host: str) -> ipaddress.IPv4Address | None:
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host)) if _SHORT.fullmatch(host) else None
    except OSError:
        return None


def is_loopback(host: str) -> bool:
    """Whether only the machine itself reaches what listens there."""
    found = number(host)
    return found.is_loopback if found is not None else host.lower().rstrip(".") in _NAMES


def is_everywhere(host: str) -> bool:
    """Whether what listens there listens on all interfaces."""
    found = number(host)
    return found.is_unspecified if found is not None else host == "*"


def is_anywhere(host: str) -> bool:
    """Whether each machine has this address."""
    return not host or is_loopback(host) or is_everywhere(host)


__all__ = ["is_anywhere", "is_everywhere", "is_loopback", "number"]
