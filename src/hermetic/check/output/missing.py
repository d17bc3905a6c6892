"""What is not known, brought together: a reader wants to know what to give, not which of forty rules lacks what.

The one thing to know: of the sources that would say something, the few are named that together would say all of it; each fact stands with one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hermetic.check.result import Report

_NOBODY = "nothing that was read says"  # and no other source would


@dataclass(frozen=True)
class Missing:
    """`node`: whose it is, empty for that of no node alone; `what`: is not known, in words; `codes`: of the rules that want it; `ask`: what would say it.

    `told`: whether that is all; else `what` is the whole reason."""

    node: str
    what: str
    codes: tuple[str, ...]
    ask: tuple[str, ...] = ()
    told: bool = True


@dataclass(frozen=True)
class Given:
    """What a kind of source would say. `begins`: which, up to what it would say; empty for what is unknown for another reason."""

    begins: str
    says: tuple[Missing, ...]

    @property
    def nodes(self) -> list[str]:
        return list(dict.fromkeys(one.node for one in self.says if one.node))

    def facts(self) -> list[tuple[str, list[str], list[str]]]:
        """(what, codes, nodes), each thing once."""
        found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
        for one in self.says:
            codes, nodes = found.setdefault(one.what, ({}, {}))
            codes |= dict.fromkeys(one.codes)
            nodes |= dict.fromkeys(filter(None, [one.node]))
        return [(what, list(codes), list(nodes)) for what, (codes, nodes) in found.items()]


def missing(report: Report) -> list[Missing]:
    """Every thing that is not known, once for each node."""
    nodes = sorted((node.name for node in report.nodes), key=len, reverse=True)
    found: dict[tuple[str, str, bool], tuple[list[str], tuple[str, ...]]] = {}
    for verdict in report.of("unknown"):
        node = next((name for name in nodes if verdict.message.startswith(f"{name}: ")), "")
        what = verdict.lacks or verdict.message.removeprefix(f"{node}: ")
        codes, _ = found.setdefault((node, what, bool(verdict.lacks)), ([], tuple(verdict.ask)))
        codes.append(verdict.code)
    return [
        Missing(node, what, tuple(dict.fromkeys(codes)), ask, told)
        for (node, what, told), (codes, ask) in found.items()
    ]


def by_source(things: Sequence[Missing]) -> list[Given]:
    """The source that says most first, then the one that says most of the rest; what none would say comes last."""
    left, found = [one for one in things if one.ask], list[Given]()
    while left:
        counts: dict[str, int] = {}
        for one in left:
            for source in one.ask:
                counts[source] = counts.get(source, 0) + 1
        best = max(counts, key=lambda source: counts[source])  # of equals the one that was named first
        found.append(Given(f"{best} would say", tuple(one for one in left if best in one.ask)))
        left = [one for one in left if best not in one.ask]
    silent = Given(_NOBODY, tuple(one for one in things if one.told and not one.ask))
    other = Given("", tuple(one for one in things if not one.told and not one.ask))
    return found + [given for given in (silent, other) if given.says]


__all__ = ["Given", "Missing", "by_source", "missing"]
