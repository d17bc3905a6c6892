"""URLs of nodes: where they lead, and how they are shown.

The one thing to know: a URL may hold a user's password and a key, and people write signs into a password that end it (`/`, `?`, `#`). Nothing of that is
shown, also where the URL cannot be read.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import httpx

from hermetic.options import OptionError

_PARTS = re.compile(r"((?:[A-Za-z0-9][A-Za-z0-9._-]*=)?)((?:[A-Za-z][A-Za-z0-9+.-]*:/*)?//)?(.*)", re.DOTALL)
_QUERY = re.compile(r"[?#]")


def address(url: str) -> tuple[str, int] | None:
    """(host, port) of a URL; None if it names no host. Raises OptionError."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        _ = httpx.URL(url).host
    except (ValueError, httpx.InvalidURL) as error:
        why = str(error).partition(" as ")[0]  # behind it stands what was read as the port
        signs = "; in a password / is written as %2F, ? as %3F and # as %23" if "@" in url else ""
        raise OptionError(f"{shown_url(url)[:200]!r} is not a URL ({why}{signs})") from None
    return None if not parts.hostname else (parts.hostname, port)


def shown_url(url: str) -> str:
    """A URL, or what was meant as one, without what may be a secret in it: the user's name and password, and the query."""
    found = _PARTS.fullmatch(url)
    assert found is not None
    name, scheme, rest = found[1], found[2] or "", found[3]
    if "@" in rest and (scheme or ":" in rest.partition("@")[0]):
        head = _QUERY.split(rest, maxsplit=1)[0]
        user, at, _ = head.partition("/")[0].rpartition("@")
        if at:
            rest = rest[len(user) + 1 :]
        elif not _is_place(head):  # a sign of the password has ended it
            rest = rest.rpartition("@")[2]
    return name + scheme + _QUERY.split(rest, maxsplit=1)[0]


def _is_place(text: str) -> bool:
    try:
        return bool(urlsplit(f"//{text}").hostname) and urlsplit(f"//{text}").port is not None
    except ValueError:
        return False


__all__ = ["address", "shown_url"]
