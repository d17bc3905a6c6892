"""What is kept of a ticket while its recording is followed, one process's records one ahead, and what is wrong in the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from hermetic.handoff import records as r
from hermetic.proof.conformance.at_decode import DecodeHalf
from hermetic.proof.conformance.at_prefill import PrefillHalf
from hermetic.proof.conformance.half import Party
from hermetic.proof.conformance.recording import Line

STORY = 40  # records of a ticket that a counterexample shows

Name = tuple[str, str, str]
"""Key, prefill process, decode process: a ticket and attempt belongs to one pair."""


@dataclass(eq=False, slots=True)
class Ticket:
    """One ticket and attempt, on both sides."""

    name: Name
    prefill: PrefillHalf | None = None
    decode: DecodeHalf | None = None
    sent: dict[str, set[int]] = field(default_factory=dict)  # process -> hashes of what it said
    ended: set[str] = field(default_factory=set)  # processes that have ended it for good
    blind: bool = False  # a part of it is not recorded: only what each half knows is checked from there on
    entered: set[str] = field(default_factory=set)  # decode processes from which it went on
    story: deque[Line] | None = None  # its last records

    def tell(self, line: Line) -> None:
        if self.story is None:
            self.story = deque(maxlen=STORY)
        if not self.story or self.story[-1].number != line.number:
            self.story.append(line)

    @property
    def over(self) -> bool:
        """On both sides."""
        return self.name[1] in self.ended and self.name[2] in self.ended


class Reader:
    """One process's records, one ahead."""

    def __init__(self, lines: Iterator[Line]) -> None:
        self._lines = lines
        self.head = next(lines, None)
        self.ended = False  # it said End

    def advance(self) -> None:
        self.ended = self.ended or isinstance(self.head and self.head.record, r.End)
        self.head = next(self._lines, None)


class Violation(Exception):
    """The first record that no behaviour of the protocol has. `ticket`: whose it is, where that is known."""

    def __init__(self, line: Line, text: str, allowed: str, ticket: Ticket | None) -> None:
        super().__init__(text)
        self.line, self.text, self.allowed, self.ticket = line, text, allowed, ticket


def name_of(party: Party, key: str, peer: str) -> Name:
    """The ticket that this process has with that one."""
    return (key, party.p, peer) if party.info.role == "prefill" else (key, peer, party.p)


__all__ = ["Name", "Reader", "Ticket", "Violation", "name_of"]
