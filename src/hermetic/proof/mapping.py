"""What the production machines do, in the words of the abstract protocol: one step is a list of abstract actions.

The explorer's transitions and the records of a trace both go through here. The one thing to know: this only says *which*
actions a step claims to be. Whether each was possible is for the protocol's guards, and whether the result is what the
machine has become is for the caller to compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hermetic.handoff import messages as m
from hermetic.handoff.actions import Action, CloseLeases, Copy, Enter, Send, Write
from hermetic.handoff.decode import OPEN, DecodeHandoff
from hermetic.handoff.decode import State as DecodeState
from hermetic.handoff.prefill import ACTIVE, PrefillHandoff
from hermetic.handoff.prefill import State as PrefillState
from hermetic.kv.slots import SlotUse
from hermetic.proof.interpret import State

Call = tuple[str, dict[str, Any]]
"""An abstract action's name and its parameters."""
_ACTIVE = frozenset(s.name for s in ACTIVE)
_OPEN = frozenset(s.name for s in OPEN)
_WAITING = frozenset({DecodeState.DRAINING.name, DecodeState.QUARANTINED.name})


@dataclass(frozen=True)
class Took:
    """One step of a machine, as `Machine.observer` sees it; states by name."""

    event: str
    args: tuple[Any, ...]
    message: m.HandoffMessage | None
    before: str
    after: str
    actions: tuple[Action, ...]


@dataclass(frozen=True)
class Names:
    """What the abstract protocol calls the things of one attempt. `pages`: of its prompt."""

    t: Any
    pages: int
    use: Callable[[int, int], Any]
    page: Callable[[int], Any]  # decode's, by index in the prompt
    source: Callable[[int], Any]  # prefill's


def prefill_step(
    took: Took, names: Names, state: State, flight: tuple[tuple[int, SlotUse], ...] = ()
) -> list[Call]:
    """`flight`: what the batch wrote, for `wrote`. `state` is the abstract state before the step."""
    if (PrefillState[took.before], took.event) not in PrefillHandoff.table:
        return []
    calls = list(_prefill_event(took, names, state, flight))
    for action in took.actions:
        match action:
            case Write(pages=pages):
                calls += [_write(took, names, page, use) for page, use in pages]
            case Send(message=message):
                calls += _prefill_says(took, names, message)
    gave_up = took.before in _ACTIVE and took.after not in _ACTIVE
    by_itself = took.event in ("fenced", "Ack") or any(
        name in ("in_doubt", "prefill_aborts") for name, _ in calls
    )
    if gave_up and not by_itself:
        calls.append(("prefill_aborts", {"t": names.t}))
    if took.after == "ENDED" and took.event not in ("fenced", "Ack"):
        calls.append(("prefill_drains", {"t": names.t}))
    return calls


def _prefill_event(
    took: Took, names: Names, state: State, flight: tuple[tuple[int, SlotUse], ...]
) -> Iterator[Call]:
    t, now = names.t, state.now
    match took.event:
        case "submitted":
            yield "submitted", {"t": t}
        case "Grant":
            yield "grant_received", {"t": t}
        case "started":
            yield "start", {"t": t, "take": frozenset((i, names.source(i)) for i in range(names.pages))}
        case "pages_ready":
            for i in range(took.args[0]):
                if (t, i) not in now["ready"]:
                    q = names.source(i)
                    yield "find" if q in now["final"] else "make", {"t": t, "i": i, "q": q}
        case "Credit":
            assert isinstance(took.message, m.Credit)
            known = sum(b == t for b, _ in now["known"])
            if took.message.first <= known:
                for slot, use in took.message.slots[known - took.message.first :]:
                    yield "credit_received", {"t": t, "u": names.use(slot, use)}
        case "wrote":
            yield from _wrote(took, names, state, flight)
        case "Ack" if took.after == "ENDED":
            yield "ack_received", {"t": t}
        case "fenced":
            yield "prefill_fenced", {"t": t}


def _wrote(took: Took, names: Names, state: State, flight: tuple[tuple[int, SlotUse], ...]) -> Iterator[Call]:
    _, ok, stopped = took.args
    if not ok and stopped and took.before in _ACTIVE:
        yield "prefill_aborts", {"t": names.t}
    for page, (slot, number) in flight:
        u = names.use(slot, number)
        write = {"t": names.t, "i": page, "u": u, "q": names.source(page)}
        if ok:
            if not state.now["fenced"](state.fixed["segment"](u)):
                yield "bytes_arrive", write
            yield "write_ends", write
        else:
            yield "write_fails" if stopped else "in_doubt", write


def _write(took: Took, names: Names, page: int, use: SlotUse) -> Call:
    asked = isinstance(took.message, m.Resend) and (page, tuple(use)) == (
        took.message.page,
        tuple(took.message.slot),
    )
    write = {"t": names.t, "i": page, "u": names.use(*use), "q": names.source(page)}
    return ("write_again" if asked else "write"), write


def _prefill_says(took: Took, names: Names, message: m.HandoffMessage) -> Iterator[Call]:
    t = names.t
    match message:
        case m.Started() if took.event != "started":
            yield "repeat_started", {"t": t}
        case m.Landed(pages=pages):
            for page, slot, use in pages:
                yield "announce", {"t": t, "i": page, "u": names.use(slot, use)}
        case m.Complete():
            yield ("repeat_complete" if took.before == "COMPLETE" else "completes"), {"t": t}


def unknown_at_prefill(
    t: Any, known: bool, message: m.HandoffMessage, said: tuple[m.HandoffMessage, ...]
) -> list[Call]:
    """A message for a ticket without a machine; `known`: it was remembered as ended."""
    if isinstance(message, m.Abort) and not known:
        return ended_at_prefill(t)
    return [("repeat_drained", {"t": t}) for answer in said if isinstance(answer, m.Drained)]


def ended_at_prefill(t: Any) -> list[Call]:
    """Refused, or ended before there was anything: prefill will know of this attempt that it has ended."""
    return [("prefill_aborts", {"t": t}), ("prefill_drains", {"t": t})]


def decode_step(took: Took, names: Names, state: State) -> list[Call]:
    """The same for decode's machine."""
    if (DecodeState[took.before], took.event) not in DecodeHandoff.table:
        return []
    t = names.t
    calls = list(_decode_event(took, names, state))
    for action in took.actions:
        match action:
            case Copy(page=page, slot=(slot, use)):
                landed = {"t": t, "i": page, "u": names.use(slot, use), "p": names.page(page)}
                calls.append(("landed_received", landed))
            case Enter():
                calls.append(("enter", {"t": t}))
            case Send(message=message):
                calls += _decode_says(took, names, state, message)
    if took.before in _OPEN and (took.after in _WAITING or took.after == "ENDED"):
        calls.append(("decode_aborts", {"t": t}))
    if took.event == "Drained":
        calls.append(("drained_received", {"t": t}))
    if any(isinstance(action, CloseLeases) for action in took.actions):
        calls.append(("close_pages", {"t": t}))
    if took.after == "ENDED":
        calls.append(("decode_ends", {"t": t}))
    return calls


def _decode_event(took: Took, names: Names, state: State) -> Iterator[Call]:
    t, now = names.t, state.now
    match took.event:
        case "reserved":
            yield "reserve", {"t": t, "take": frozenset((i, names.page(i)) for i in range(names.pages))}
        case "Started":
            yield "started_received", {"t": t}
        case "Complete" if t not in now["heard"]:
            yield "complete_received", {"t": t}
        case "overdue":
            yield "quarantine", {"t": t}
        case "copied":
            page, good = took.args
            for name in ("copying", "checking"):
                for b, i, u, p in now[name]:
                    if (b, i) == (t, page):
                        copy = {"t": t, "i": i, "u": u, "p": p}
                        fine = good and took.before == "LANDING"
                        yield (
                            ("drop_copy" if name == "copying" else "verify_good" if fine else "verify_bad"),
                            copy,
                        )


def _decode_says(took: Took, names: Names, state: State, message: m.HandoffMessage) -> Iterator[Call]:
    t, now = names.t, state.now
    match message:
        case m.Grant() if took.event != "reserved":
            yield "repeat_grant", {"t": t}
        case m.Credit(slots=slots):
            for u in (names.use(*where) for where in slots):
                yield ("repeat_credit" if (t, u) in now["credited"] else "grant_use"), {"t": t, "u": u}
        case m.Resend(page=page, slot=where):
            u = names.use(*where)
            yield (
                ("repeat_resend" if (t, page, u) in now["asked"] else "ask_again"),
                {"t": t, "i": page, "u": u},
            )


def unknown_at_decode(t: Any, said: tuple[m.HandoffMessage, ...]) -> list[Call]:
    """A message for a ticket without a machine, and what was answered."""
    return [("repeat_ack", {"t": t}) for answer in said if isinstance(answer, m.Ack)]


__all__ = [
    "Call", "Names", "Took", "decode_step", "ended_at_prefill", "prefill_step", "unknown_at_decode", "unknown_at_prefill",
]  # fmt: skip
