"""Records of one ticket as steps of a chart, in the words that the explorer's charts use (words.py).

The one thing to know: as there, a message is an arrow where it *arrives*; what a step says is told at the last one only, which
is the one that is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from hermetic.handoff import records as r
from hermetic.handoff.messages import HandoffMessage
from hermetic.proof.conformance.half import short
from hermetic.proof.conformance.recording import Line
from hermetic.proof.saved import Step
from hermetic.proof.words import DOES, DOUBT, FAILS, content, used


def steps(lines: Iterable[Line], key: str, pair: tuple[str, str], names: Mapping[str, str]) -> Iterator[Step]:
    """`pair`: the processes of prefill and decode; "" where it is not known. `names`: what each process calls itself."""
    told = [(number, record, part) for number, record in lines for part in _parts(record, key, pair)]
    for at, (number, record, part) in enumerate(told):
        detail = part.detail
        if isinstance(record, r.Step):
            moved = f"{record.b} -> {record.s}" if record.s != record.b else ""
            last = at == len(told) - 1
            detail = "; ".join(x for x in (detail, moved, *(map(_done, record.do) if last else ())) if x)
        yield Step(
            names.get(part.actor, part.actor),
            part.what,
            names.get(part.to, part.to),
            short(key) if key else "",
            detail,
            f"line {number}",
        )


def _parts(record: r.Record, key: str, pair: tuple[str, str]) -> Iterator[Step]:
    """What a record says of this ticket. Lanes are processes here."""
    p = record.p
    other = pair[1] if p == pair[0] else pair[0]
    match record:
        case r.Begin():
            yield Step(p, "begins")
        case r.Step(m=message) if message is not None:
            yield _arrives(other, p, message)
        case r.Step(e=event, a=args):
            yield _event(p, event, args)
        case r.Unknown(m=message, peer=peer):
            arrow = _arrives(peer, p, message)
            said = ", ".join(type(x).__name__ for x in record.send) or "nothing"
            yield msgspec.structs.replace(
                arrow, detail="; ".join(x for x in (arrow.detail, "not here", f"answers {said}") if x)
            )
        case r.Write(batch=batch, pages=pages):
            yield Step(
                p, f"starts batch {batch}", detail=", ".join(f"page {i} -> slot {s}" for i, _, s in pages)
            )
        case r.Written(batch=batch, ok=True):
            yield Step(p, f"bytes of batch {batch}", other)
        case r.Written(batch=batch, stopped=stopped):
            yield Step(p, f"batch {batch} {FAILS if stopped else DOUBT}")
        case r.Copying(pages=pages):
            mine = [f"page {i} out of {used(s, u)}" for k, i, _, s, u in pages if k == key or not key]
            yield Step(p, f"copies {', '.join(mine)}")
        case r.Verified(pages=pages):
            mine = [
                f"page {i}: {'good' if good else 'BAD'}" for k, i, _, good in pages if k == key or not key
            ]
            yield Step(p, f"hashes {', '.join(mine)}")
        case r.SlotsChanged(what=what, uses=uses):
            yield Step(p, f"slots: {what}", detail=", ".join(used(*use) for use in uses))
        case r.PagesChanged(what=what, kind=kind, pages=pages):
            yield Step(p, f"pages: {what} {kind}", detail=", ".join(map(str, pages)))
        case _:
            raw = {k: v for k, v in msgspec.to_builtins(record).items() if k not in ("k", "p", "key")}
            said = ", ".join(f"{name} {value}" for name, value in raw.items())
            yield Step(p, type(record).__name__.lower(), detail=said)


def _arrives(actor: str, to: str, message: HandoffMessage) -> Step:
    return Step(actor, type(message).__name__, to, detail=content(message))


def _event(p: str, event: str, args: tuple[bool | int | str, ...]) -> Step:
    """An event that is no message."""
    match event, args:
        case "submitted", (tokens, pages):
            return Step("gateway", "Submit", p, detail=f"{tokens} tokens, {pages} pages")
        case "started", _:
            return Step(p, DOES["start"])
        case "pages_ready", (count,):
            return Step(p, f"has computed pages up to number {count}")
        case "computed", _:
            return Step(p, "has computed everything")
        case "wrote", (batch, ok, stopped):
            return Step(p, f"batch {batch} {'has ended well' if ok else FAILS if stopped else DOUBT}")
        case "reserved", _:
            return Step(p, DOES["reserve"])
        case "copied", (page, good):
            return Step(p, f"page {page} {'is its own' if good else 'is refused, or not copied'}")
        case (("credit" | "nudge" | "overdue"), _):
            return Step(p, DOES[event])
        case "abort", (outcome, code, reason):
            return Step(p, "ends", detail=f"{outcome} {code}: {reason}")
        case "fenced", (reason,):
            return Step(p, "is told of a fence", detail=str(reason))
    return Step(p, event, detail=", ".join(map(str, args)))


def _done(done: r.Done) -> str:
    """An action of a machine, in a few words."""
    match done:
        case r.Sent(message=message):
            said = content(message)
            return f"says {type(message).__name__}" + (f" ({said})" if said else "")
        case r.Writes(batch=batch, pages=pages):
            return f"begins batch {batch}: " + ", ".join(f"page {i} -> {used(s, u)}" for i, s, u in pages)
        case r.Copies(page=page, slot=slot, use=use):
            return f"will copy page {page} out of {used(slot, use)}"
        case r.Reported(outcome=outcome, code=code):
            return f"reports {outcome} {code}".rstrip()
        case r.Enqueued():
            return "queues it"
        case r.Stopped():
            return "stops computing"
        case r.Entered():
            return "lets it enter a batch"
        case r.LeasesClosed():
            return "gives its pages back"
        case r.Forgotten():
            return "forgets it"


__all__ = ["steps"]
