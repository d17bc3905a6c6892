"""State diagrams of both roles, made from the transition tables, and put into docs/proof.md between markers.

`python -m hermetic.proof.diagram` prints them, `--write` puts them in. The one thing to know: nothing between a pair of
markers is written by hand, and a test compares it with the tables.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hermetic.handoff import decode, prefill

DOCS = Path(__file__).parents[3] / "docs" / "proof.md"
BEGIN, END = "<!-- made by the code: {} -->", "<!-- end: {} -->"
Table = Mapping[tuple[Any, str], frozenset[Any]]
ROLES: dict[str, tuple[Table, type[enum.Enum]]] = {
    "prefill": (prefill.TABLE, prefill.State),
    "decode": (decode.TABLE, decode.State),
}


def mermaid(role: str) -> str:
    """A state diagram; one edge for all events that lead from one state to another."""
    table, states = ROLES[role]
    edges: dict[tuple[str, str], list[str]] = {}
    for (state, event), targets in table.items():
        for target in sorted(targets, key=list(states).index):
            if target is not state:
                edges.setdefault((state.name, target.name), []).append(event)
    first = next(iter(states))
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first.name}"]
    lines += [f"    {a} --> {b}: {', '.join(events)}" for (a, b), events in edges.items()]
    lines += [f"    {state.name} --> [*]" for state in states if not any(a == state.name for a, _ in edges)]
    return "\n".join([*lines, "```"])


def grid(role: str) -> str:
    """A row a state, a column an event, in each cell where it may lead; empty: ignored, and counted as stale."""
    table, states = ROLES[role]
    events = list(dict.fromkeys(event for _, event in table))
    lines = [f"| | {' | '.join(events)} |", "|---" * (len(events) + 1) + "|"]
    for state in states:
        cells = [", ".join(_targets(table, states, state, event)) for event in events]
        lines.append(
            "|".join(["", f" **{state.name}** ", *(f" {cell} " if cell else " " for cell in cells), ""])
        )
    return "\n".join(lines)


def _targets(table: Table, states: type[enum.Enum], state: enum.Enum, event: str) -> Iterator[str]:
    """`stays` for the state itself, so that only moves are in capitals."""
    targets = table.get((state, event), frozenset())
    yield from ("stays" if s is state else s.name for s in states if s in targets)


def sections() -> dict[str, str]:
    """By marker."""
    return {
        f"{role}-{what}": make(role)
        for role in ROLES
        for what, make in (("diagram", mermaid), ("table", grid))
    }


def between(marker: str, text: str) -> str:
    """What stands between a marker's lines. Raises ValueError when they are not there, or not once."""
    begin, end = BEGIN.format(marker), END.format(marker)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the text needs the lines {begin} and {end}, once each and in this order")
    return text.partition(begin)[2].partition(end)[0].strip("\n")


def put_between(marker: str, content: str, path: Path = DOCS) -> bool:
    """Replace what stands between a marker's lines. Whether that changed anything. Raises ValueError as `between`."""
    text = path.read_text()
    if between(marker, text) == content.strip("\n"):
        return False
    begin, end = BEGIN.format(marker), END.format(marker)
    before, _, rest = text.partition(begin)
    path.write_text(f"{before}{begin}\n\n{content.strip()}\n\n{end}{rest.partition(end)[2]}")
    return True


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--write"]):
        print("usage: python -m hermetic.proof.diagram [--write]", file=sys.stderr)
        return 2
    for marker, content in sections().items():
        if not arguments:
            print(f"{content}\n")
        elif put_between(marker, content):
            print(f"{DOCS}: {marker} is new")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
