"""What both halves of a recorded ticket share: rows of the table, messages, outcomes; and what a process has.

The one thing to know: nothing here runs the machines. What a half may do follows from what was recorded of it before, in
the protocol's own words, so that a machine that does something else is seen whatever it thinks of itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hermetic.handoff import records as r
from hermetic.handoff.messages import Abort, HandoffMessage
from hermetic.proof.conformance.ledger import Broken, Pages, SlotBook, demand


@dataclass
class Party:
    """One recorded process."""

    p: str
    info: r.Process
    whole: bool  # workers are recorded, not machines alone: transports, copies, pools
    pages: Pages = field(init=False)
    segments: dict[int, SlotBook] = field(default_factory=dict)  # decode's, by number
    current: dict[str, int] = field(default_factory=dict)  # decode: peer -> its newest segment
    senders: dict[str, int | None] = field(
        default_factory=dict
    )  # prefill: decode process -> segment; None: closed
    here: dict[str, Any] = field(default_factory=dict)  # key -> its ticket, while a machine of it lives here
    owners: dict[str, str] = field(default_factory=dict)  # the pool's name for an owner -> key, of these
    pending: list[r.SlotsChanged] = field(
        default_factory=list
    )  # changes inside a step that is not recorded yet

    def __post_init__(self) -> None:
        self.pages = Pages(self.info.pages)

    @property
    def name(self) -> str:
        return self.info.worker

    @property
    def pooled(self) -> bool:
        """Whether its pool is recorded."""
        return self.whole and self.info.pages > 0


def short(key: str) -> str:
    """How a pool names the owner of a lease: see Key.__str__."""
    ticket, _, attempt = key.partition("/")
    return f"{ticket[:12]}/{attempt}"


Table = Mapping[tuple[Any, str], frozenset[Any]]


def rows_by_name(table: Table) -> dict[tuple[str, str], frozenset[str]]:
    return {(state.name, event): frozenset(s.name for s in to) for (state, event), to in table.items()}


class Half:
    """One half of one ticket while its machine lives."""

    rows: Mapping[tuple[str, str], frozenset[str]]
    first: str
    who: str

    def __init__(self, key: str, party: Party, peer: str) -> None:
        self.key, self.party, self.peer = key, party, peer
        self.owner = short(key)
        self.state = self.first
        self.reported = ""
        self.closed = False
        self.over = False  # forgotten

    def step(self, step: r.Step, taken: Counter[tuple[str, str, str]]) -> list[HandoffMessage]:
        """Follow one step; returns what it sent. Raises Broken."""
        if step.b != self.state:
            raise Broken(
                f"{self.who} is said to be {step.b} before {step.e}",
                f"{self.state}, where its last step left it",
            )
        pending, self.party.pending = self.party.pending, []
        if step.m is not None and type(step.m).__name__ != step.e:
            raise Broken(f"{step.e} with {step.m}", "a message of that name")
        row = self.rows.get((step.b, step.e))
        if row is None:
            if step.s != step.b or step.do or pending:
                raise Broken(
                    f"{step.e} in {step.b}, which has no row, did something: {_said(step)}", "ignoring it"
                )
            return []
        if step.s not in row:
            raise Broken(
                f"{step.b} --{step.e}--> {step.s}", f"{step.b} --{step.e}--> {' or '.join(sorted(row))}"
            )
        taken[self.who, step.b, step.e] += 1
        self.state = step.s
        self.happens(step, pending)
        sent = [self.does(step, done) for done in step.do]
        self.settles(step)
        return [message for message in sent if message is not None]

    # ------------------------------------------------------------- for each role
    def happens(self, step: r.Step, pending: list[r.SlotsChanged]) -> None:
        """What the event itself says, before what the machine makes of it."""
        raise AssertionError("for each role")

    def does(self, step: r.Step, done: r.Done) -> HandoffMessage | None:
        """One action. Returns the message that it sends."""
        match done:
            case r.Sent(message=message):
                self.says(step, message)
                return message
            case r.Reported(outcome=outcome):
                demand(
                    not self.reported, f"{self.who} reports {outcome} after {self.reported}", "one outcome"
                )
                self._as_it_ended(step, done)
                self.reported = outcome
            case r.Forgotten():
                demand(
                    self.state in ("ENDED", "ENTERED"),
                    f"{self.who} is forgotten in {self.state}",
                    "forgetting what has ended",
                )
                self.over = True
            case _:
                self.acts(step, done)
        return None

    def _as_it_ended(self, step: r.Step, report: r.Reported) -> None:
        """The outcome is that of the step: Completed only by the other half's ack, or by entering; else its cause."""
        well = step.e == "Ack" if self.who == "prefill" else step.s == "ENTERED"
        allowed = ("Completed",) if well else ("Refused", "Failed", "Aborted")
        demand(
            report.outcome in allowed,
            f"{self.who} reports {report.outcome} by {step.e}",
            " or ".join(allowed),
        )
        if step.e == "abort":
            said = (report.outcome, report.code, report.reason)
            demand(said == step.a, f"{self.who} is ended for {step.a} and reports {said}", "the same")
        if isinstance(step.m, Abort):
            demand(
                report.code == step.m.code,
                f"{self.who} is told {step.m.code} and reports {report.code}",
                step.m.code,
            )

    def says(self, step: r.Step, message: HandoffMessage) -> None:
        raise AssertionError("for each role")

    def acts(self, step: r.Step, done: r.Done) -> None:
        raise AssertionError("for each role")

    def settles(self, step: r.Step) -> None:
        """After all of a step: what must be so now."""

    def gives_up(self, change: r.PagesChanged) -> None:
        """Leases on pages of this ticket are closed, while its machine lives."""
        raise AssertionError("for each role")

    def wrong(self, what: object) -> Broken:
        return Broken(f"{self.who} does {what}", f"what a {self.who} half does")


def args_of(step: r.Step, *types: type) -> tuple[Any, ...]:
    """The step's arguments, of these types. Raises Broken."""
    if len(step.a) != len(types) or not all(
        isinstance(a, t) and (t is bool) == isinstance(a, bool) for a, t in zip(step.a, types, strict=True)
    ):
        raise Broken(
            f"{step.e} with arguments {list(step.a)}", f"{step.e} with {', '.join(t.__name__ for t in types)}"
        )
    return step.a


def _said(step: r.Step) -> str:
    return f"it is {step.s}, {len(step.do)} actions"


__all__ = ["Half", "Party", "Table", "args_of", "rows_by_name", "short"]
