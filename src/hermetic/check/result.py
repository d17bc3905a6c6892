"""What a check found, as data: findings, what could not be determined, and what passed. Its JSON schema is docs/check-schema.json."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Severity = Literal["error", "warning", "note"]
State = Literal["finding", "unknown", "passed", "attested"]


class Verdict(msgspec.Struct, kw_only=True):
    """One rule at one subject. `subject`: a node, "prefill -> decode" for a pair, or a proxy.

    `message`: of a finding what is wrong, in one sentence with the numbers; of an unknown what is missing and where it would stand; of what is
    attested, which patch. `where`: the sources that it rests on ("prefill.log, line 41").

    `lacks`, `ask`: of an unknown the same in parts: what is not known, and the kinds of sources of which one would say it; empty where it is unknown for
    another reason."""

    code: str
    state: State
    subject: str
    message: str = ""
    where: list[str] = []
    severity: Severity = "error"
    lacks: str = ""
    ask: list[str] = []


class Told(msgspec.Struct, kw_only=True):
    """A node or proxy that was read. `facts`: by name, the values that were said, each with where."""

    name: str
    role: str = ""
    engine: str = ""
    version: str = ""
    sources: list[str] = []
    facts: dict[str, list[dict[str, Any]]] = {}


class Unread(msgspec.Struct, kw_only=True):
    """A source that could not be read, or only in part; `part`: something was taken from it all the same. `left_out`: a file of a folder that belongs
    to no deployment, as far as can be told."""

    source: str
    why: str
    part: bool = False
    left_out: bool = False


class Report(msgspec.Struct, kw_only=True):
    """`files`: those of which something was taken. `verdicts`: findings first, the gravest first; then unknowns; then the others."""

    version: int = 1
    started: str = ""  # ISO 8601, UTC
    sources: list[str] = []
    files: list[str] = []
    nodes: list[Told] = []
    verdicts: list[Verdict] = []
    unread: list[Unread] = []
    notes: list[str] = []

    def of(self, state: State) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.state == state]


__all__ = ["Report", "Severity", "State", "Told", "Unread", "Verdict"]
