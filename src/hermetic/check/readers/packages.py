"""Which packages a node has: what `pip freeze` or `pip list` prints of it, and pip's own line in a start-up log.

The one thing to know: an engine's page does not say which Mooncake or NIXL it has. What these lists say is kept with the package's name, since both
may be there and only one moves KV.
"""

from __future__ import annotations

import re

from hermetic.check import facts
from hermetic.check.facts import Sheet

_ROW = re.compile(rb"([a-z][a-z0-9-]{1,40})(?:==|[ \t]+)(\d+(?:\.\d+)+[\w.+-]{0,40})[ \t]*$")
_INSTALLED = re.compile(rb"\b(mooncake-transfer-engine|nixl)(?:-[a-z]+\d*)*-(\d+(?:\.\d+)+\S{0,40})")
_TRANSPORT = re.compile(r"(mooncake|nixl)(?:-transfer-engine)?(?:-[a-z]+\d*)*")


def words(engine: str) -> tuple[bytes, ...]:
    """Of which a row of such a list has one. Few, since each is looked for in all of a log."""
    name = engine.encode()
    return (name + b"==", name + b"  ", b"mooncake-transfer-engine", b"nixl==", b"nixl  ", b"nixl-cu")


def listed(sheet: Sheet, engine: str, text: bytes, where: str) -> bool:
    """Whether this is a row of such a list; what it says of the engine and of a transfer engine is noted."""
    row = _ROW.match(text)
    if row is None:
        return False
    name, version = row[1].decode(), row[2].decode("utf-8", "replace")
    if name == engine:
        sheet.add(facts.VERSION, version, where)
        sheet.read.add(facts.PACKAGES)
        return True
    if transport := _TRANSPORT.fullmatch(name):
        sheet.add(facts.TRANSPORT_VERSION, f"{transport[1]} {version}", where)
    return False


def transports(sheet: Sheet, text: bytes, where: str) -> None:
    """The transfer engines among what pip says that it has installed."""
    for found in _INSTALLED.finditer(text):
        name = "nixl" if found[1] == b"nixl" else "mooncake"
        sheet.add(facts.TRANSPORT_VERSION, f"{name} {found[2].decode('utf-8', 'replace')}", where)


__all__ = ["listed", "transports", "words"]
