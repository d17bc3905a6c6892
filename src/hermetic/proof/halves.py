"""One ticket at one worker: the production machine, and what worker/prefill.py and worker/decode.py do around it.

A step is a pure function (what the worker keeps of the ticket, event) -> (what it keeps then, effects), which runs the
production objects; that is why it may be remembered. The one thing to know: everything here that is not a call of a
production function stands for lines of the workers, and is to be read beside them: `_take`, `_cancel`, `_from_decode`,
`_from_prefill`, `_perform`, `_abandon`, `_overdue`, `lost`, `_drop_segment`. Random walks of the tests have surroundings of their
own (tests/handoff/handoff_world.py); why, is said there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hermetic.handoff import messages as m
from hermetic.handoff.actions import (
    Action,
    CloseLeases,
    Copy,
    Enqueue,
    Enter,
    Forget,
    Report,
    Send,
    StopComputing,
    Write,
)
from hermetic.handoff.decode import OPEN, DecodeHandoff
from hermetic.handoff.decode import State as DecodeState
from hermetic.handoff.outcome import Aborted, Completed, Failed, Outcome, Refused
from hermetic.handoff.prefill import ACTIVE, PrefillHandoff
from hermetic.handoff.prefill import State as PrefillState
from hermetic.handoff.unknown import at_decode, at_prefill
from hermetic.kv.slots import Slots
from hermetic.proof.codec import (
    Data,
    decode,
    decode_machine,
    decode_slots,
    encode,
    encode_machine,
    encode_slots,
)

SIZE = 2  # tokens of a page
FIRSTS = b"first token"
TOUCHED = (PrefillState.SENDING, PrefillState.COMPLETE, PrefillState.DRAINING, PrefillState.STUCK)
LOST = Failed("worker_lost", "")
ENDED = Aborted(
    "ended", ""
)  # for any cause that nothing depends on: its client left, its engine failed, the other half


def tokens_of(pages: int) -> int:
    """A prompt whose last page is not full, so that decode goes on in it."""
    return pages * SIZE - 1


def key_of(ticket: int) -> m.Key:
    return m.Key(bytes([ticket]) * 16, 1)


def ticket_of(key: object) -> int:
    assert isinstance(key, m.Key)
    return key.ticket[0]


class PrefillView(NamedTuple):
    """What a prefill worker keeps of a ticket. `report`: what the gateway was told."""

    machine: Data = None
    ended: Data = None
    submitted: bool = False
    queued: bool = False
    computing: bool = False
    ready: int = 0
    report: Data = None


class DecodeView(NamedTuple):
    """What a decode worker keeps of a ticket. `stage`: none, waiting (for pages), machine, entered, over.

    `copies` are queued, `checking` is copied and not hashed yet. `entered`: its request was given to the engine."""

    machine: Data = None
    stage: str = "none"
    copies: Data = ()
    checking: Data = ()
    entered: bool = False
    report: Data = None


class PrefillHalf:
    """A view unpacked, one step taken, and packed again. `effects` are what the step asks of the world, in order."""

    def __init__(self, view: PrefillView, ticket: int, pages: int) -> None:
        self.ticket, self.pages, self.view = ticket, pages, view
        self.effects: list[tuple[Any, ...]] = []
        self.machine: PrefillHandoff | None = None
        if view.machine is not None:
            self.machine = decode_machine(PrefillHandoff(key_of(ticket)), view.machine)

    def packed(self) -> PrefillView:
        packed = None if self.machine is None else encode_machine(self.machine)
        return self.view._replace(machine=packed)

    # ------------------------------------------------------------------- events

    def submit(self, up: bool) -> None:
        """The gateway's Submit; as `_take`."""
        self.view = self.view._replace(submitted=True)
        ended = decode(self.view.ended)
        if ended is not None:
            self._report(Refused("duplicate_attempt", "") if isinstance(ended, Completed) else ended)
            return
        if self.machine is None and not up:
            self._end(Refused("no_pair", ""))
            return
        machine = self.machine = self.machine or PrefillHandoff(key_of(self.ticket))
        self.perform(machine.submitted(tokens_of(self.pages), self.pages))

    def message(self, message: m.HandoffMessage) -> None:
        """As `_from_decode` and `_about_unknown`."""
        if self.machine is not None:
            self.perform(self.machine.received(message))
            return
        ended = decode(self.view.ended)
        answer = at_prefill(ended, message)
        if answer.remember is not None:
            self.view = self.view._replace(ended=encode(answer.remember))
        for said in answer.send:
            self.effects.append(("send", encode(said)))
        if answer.begin:
            self.machine = PrefillHandoff(key_of(self.ticket))
            self.perform(self.machine.received(message))

    def start(self) -> None:
        assert self.machine is not None
        self.view = self.view._replace(queued=False, computing=True)
        self.perform(self.machine.started())

    def compute(self) -> None:
        """The engine has made one page more; as `PagesReady` and, after the last, `PromptDone`."""
        assert self.machine is not None
        ready = self.view.ready + 1
        last = ready == self.pages
        self.view = self.view._replace(ready=ready, computing=not last)
        self.perform(self.machine.pages_ready(ready))
        if last and self.machine is not None:
            self.effects.append(("stop",))
            self.perform(self.machine.computed(FIRSTS))

    def wrote(self, batch: int, ok: bool, stopped: bool) -> None:
        if self.machine is not None:
            self.perform(self.machine.wrote(batch, ok, stopped))

    def end(self, cause: Outcome) -> None:
        """A cancel of the gateway, a failure of the engine, a lost peer."""
        if self.machine is not None and self.machine.state in ACTIVE:
            self.perform(self.machine.abort(cause))

    def nudge(self) -> None:
        assert self.machine is not None
        self.perform(self.machine.nudge())

    def fenced(self) -> None:
        """As `_drop_segment`."""
        if self.machine is not None and self.machine.state in TOUCHED:
            self.perform(self.machine.fenced(LOST.reason))

    # ------------------------------------------------------------------ actions

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(message=message):
                    self.effects.append(("send", encode(message)))
                case Enqueue():
                    self.view = self.view._replace(queued=True)
                case Write(batch=batch, pages=pages):
                    self.effects.append(("write", batch, tuple((page, encode(use)) for page, use in pages)))
                case StopComputing():
                    self._stop()
                case CloseLeases():
                    self._stop()
                    self.effects.append(("close",))
                case Report(outcome=outcome):
                    if not isinstance(outcome, Completed):
                        self._stop()
                    self._end(outcome)
                case Forget():
                    self.machine = None
                case _:
                    raise AssertionError(f"{action} is not for prefill")

    def _stop(self) -> None:
        self.view = self.view._replace(queued=False, computing=False)
        self.effects.append(("stop",))

    def _end(self, outcome: Outcome) -> None:
        self.view = self.view._replace(ended=encode(outcome))
        self._report(outcome)

    def _report(self, outcome: Outcome) -> None:
        """As `_end` of the worker: the gateway is told if it has asked, and once."""
        self.effects.append(("ended", encode(outcome)))
        if self.view.submitted and self.view.report is None:
            self.view = self.view._replace(report=encode(outcome))
            self.effects.append(("report", encode(outcome)))


class DecodeHalf:
    """The same for decode. `slots` are the peer's, shared by all its tickets."""

    def __init__(self, view: DecodeView, slots: Data, ticket: int, pages: int) -> None:
        self.ticket, self.pages, self.view = ticket, pages, view
        self.effects: list[tuple[Any, ...]] = []
        self.slots: Slots = decode_slots(slots, key_of)
        self.machine: DecodeHandoff | None = None
        if view.machine is not None:
            self.machine = decode_machine(self._new(), view.machine)

    def _new(self) -> DecodeHandoff:
        return DecodeHandoff(key_of(self.ticket), tokens_of(self.pages), self.pages, self.slots)

    def packed(self) -> tuple[DecodeView, Data]:
        packed = None if self.machine is None else encode_machine(self.machine)
        return self.view._replace(machine=packed), encode_slots(self.slots, ticket_of)

    # ------------------------------------------------------------------- events

    def submit(self, up: bool) -> None:
        """As `_take`."""
        if not up:
            self.view = self.view._replace(stage="over")
            self._report(Refused("no_pair", ""))
            return
        self.view = self.view._replace(stage="waiting")

    def reserve(self) -> None:
        """The engine has leased the pages; as `Reserved`."""
        self.machine = self._new()
        self.view = self.view._replace(stage="machine")
        self.perform(self.machine.reserved())

    def message(self, message: m.HandoffMessage) -> None:
        """As `_from_prefill`."""
        if self.machine is not None:
            self.perform(self.machine.received(message))
        elif self.view.stage != "waiting":
            for said in at_decode(self.view.entered, message).send:
                self.effects.append(("send", encode(said)))

    def credit(self) -> None:
        assert self.machine is not None
        self.perform(self.machine.credit(self.slots.free))

    def wants(self) -> int:
        return 0 if self.machine is None else min(self.machine.wants(), self.slots.free)

    def copy(self) -> None:
        """The first queued copy is made; it is hashed in the next step."""
        first, *rest = self.view.copies
        self.view = self.view._replace(copies=tuple(rest), checking=first)

    def copied(self, page: int, good: bool) -> None:
        assert self.machine is not None
        self.view = self.view._replace(checking=())
        self.perform(self.machine.copied(page, good))

    def end(self, cause: Outcome) -> None:
        """A cancel of the gateway, a failure of the engine, a lost peer."""
        if self.view.stage == "waiting":
            self.view = self.view._replace(stage="over")
            self._report(cause)
        elif self.machine is not None and self.machine.state in OPEN:
            self.perform(self.machine.abort(cause))

    def finish(self) -> None:
        """The answer is whole: the engine lets its pages go."""
        self.view = self.view._replace(stage="over")
        self.effects.append(("close",))

    def overdue(self) -> None:
        if self.machine is not None and self.machine.state is DecodeState.DRAINING:
            self.perform(self.machine.overdue())

    def lost(self) -> None:
        """As `lost` of the worker, for one ticket."""
        self.end(LOST)
        self.overdue()

    def fenced(self) -> None:
        """As `_fence`, for one ticket."""
        if self.machine is not None:
            self.perform(self.machine.fenced(LOST.reason))

    def settled(self) -> None:
        """The last of a fence: whatever was granted returns."""
        self.slots.fence()

    def nudge(self) -> None:
        if self.machine is not None:
            self.perform(self.machine.nudge())

    # ------------------------------------------------------------------ actions

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(message=message):
                    self.effects.append(("send", encode(message)))
                case Copy(page=page, slot=slot):
                    self.view = self.view._replace(copies=(*self.view.copies, (page, encode(slot))))
                case Enter():
                    self.view = self.view._replace(stage="entered", entered=True)
                    self.effects.append(("enter",))
                case CloseLeases():
                    self.effects.append(("close",))
                case Report(outcome=Completed()):
                    self._report(Completed())
                case Report(outcome=outcome):
                    self._report(outcome)
                    self._abandon()
                case Forget():
                    self.machine = None
                    if self.view.stage == "machine":
                        self.view = self.view._replace(stage="over")
                case _:
                    raise AssertionError(f"{action} is not for decode")

    def _abandon(self) -> None:
        """Copies that are queued will not be made."""
        while self.view.copies and self.machine is not None:
            (page, _), *rest = self.view.copies
            self.view = self.view._replace(copies=tuple(rest))
            self.perform(self.machine.copied(page, False))

    def _report(self, outcome: Outcome) -> None:
        self.effects.append(("ended", encode(outcome)))
        if self.view.report is None:
            self.view = self.view._replace(report=encode(outcome))
            self.effects.append(("report", encode(outcome)))
