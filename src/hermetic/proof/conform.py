"""Whether a recording of real workers (`--trace FILE`) is a behaviour of the protocol: `hermetic prove --conform FILE`.

The one thing to know: "conforms" is said only of what was read whole. A file that is no recording, has a hole in it, or
lacks a process that others dealt with is an error (exit code 2), never an answer. What a killed process did last is not
in the file: that is counted and said.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hermetic.handoff import decode, prefill
from hermetic.proof.conformance.follow import Follower
from hermetic.proof.conformance.recording import Recording, TraceError
from hermetic.proof.conformance.telling import steps
from hermetic.proof.conformance.tickets import Violation
from hermetic.proof.saved import Counterexample

ROWS = frozenset(
    (who, state.name, event)
    for who, table in (("prefill", prefill.TABLE), ("decode", decode.TABLE))
    for state, event in table
)


@dataclass(frozen=True)
class Conformance:
    """What was found. `exit_code` 0: it conforms; 1: it does not."""

    path: Path
    records: int
    processes: tuple[str, ...]  # workers, as they called themselves, in the order of their first records
    killed: tuple[str, ...]  # those that did not end in peace
    cuts: tuple[int, ...]  # lines that were left cut
    tickets: int
    open: int  # tickets that have not ended on both sides
    actions: Mapping[str, int]
    rows: Mapping[tuple[str, str, str], int]  # role, state, event -> how often
    unfollowed: (
        int  # tickets of which a killed process had a part: from there on each half is checked by itself
    )
    from_killed: int  # messages whose sender was killed before it recorded them
    seconds: float
    violation: Counterexample | None = None
    line: int = 0  # of the violation
    allowed: str = ""  # what the protocol allows there

    @property
    def conforms(self) -> bool:
        return self.violation is None

    @property
    def exit_code(self) -> int:
        return 0 if self.conforms else 1

    def lines(self) -> list[str]:
        """For people."""
        found = [
            f"{self.path}: {self.records:,} records of {len(self.processes)} processes ({', '.join(self.processes)}), "
            f"{self.tickets:,} tickets, {sum(self.actions.values()):,} abstract actions, {self.seconds:.1f} s",
            f"rows of the tables taken: {len(self.rows)} of {len(ROWS)}",
        ]
        if self.killed:
            found.append(
                f"without an end, what they did last is not recorded: {', '.join(self.killed)}"
                + (f" (line {', '.join(map(str, self.cuts))} cut off)" if self.cuts else "")
                + f"; {self.from_killed} messages are believed to be theirs"
            )
        if self.open:
            found.append(f"{self.open:,} tickets are open at its end: it conforms as far as it goes")
        if self.violation is not None:
            return [
                *found,
                f"line {self.line}: {self.violation.text} (or a record before it is missing in the file)",
                f"the protocol allows there: {self.allowed}",
            ]
        return [*found, "it is a behaviour of the protocol"]


def conform(path: Path, *, alone: bool = False, lab: bool = False) -> Conformance:
    """Check a recording. Raises TraceError when it cannot be read whole.

    `alone` and `lab` are for tests: machines without workers around them; messages put in by hand."""
    began = time.monotonic()
    recording = Recording(path)
    follower = Follower(recording, alone, lab)
    violation = None
    try:
        follower.run()
    except Violation as found:
        violation = found
    names = {p: party.name for p, party in follower.parties.items()}
    readers = follower.readers
    return Conformance(
        path=path,
        records=follower.records,
        processes=tuple(names.values()),
        killed=tuple(name for p, name in names.items() if not readers[p].ended and readers[p].head is None),
        cuts=tuple(recording.cuts),
        tickets=follower.seen,
        open=sum(t.prefill is not None or t.decode is not None for t in follower.tickets.values()),
        actions=dict(follower.abstract.taken if follower.abstract else {}),
        unfollowed=follower.unfollowed,
        rows=dict(follower.rows),
        from_killed=follower.from_killed,
        seconds=time.monotonic() - began,
        violation=None if violation is None else _counterexample(path, violation, names),
        line=0 if violation is None else violation.line.number,
        allowed="" if violation is None else violation.allowed,
    )


def _counterexample(path: Path, found: Violation, names: Mapping[str, str]) -> Counterexample:
    line, ticket = found.line, found.ticket
    story = list(ticket.story or ()) if ticket is not None else []
    if not story or story[-1].number != line.number:
        story.append(line)
    key, *pair = ticket.name if ticket is not None else (getattr(line.record, "key", ""), line.record.p, "")
    return Counterexample(
        kind="conformance",
        text=found.text,
        steps=tuple(steps(story, key, (pair[0], pair[1]), names)),
        scope={"file": str(path), "line": line.number},
        source="conformance",
    )


__all__ = ["ROWS", "Conformance", "TraceError", "conform"]
