"""The words of charts: what a half does and what messages say, the same for the explorer and for recordings."""

from __future__ import annotations

from hermetic.handoff import messages as m

DOES = {
    "start": "takes its pages and starts",
    "compute": "has computed the next page",
    "reserve": "reserves its pages",
    "credit": "gives it slots",
    "copy": "copies a page out of its slot",
    "verify": "hashes the page it copied to",
    "finish": "has answered and lets its pages go",
    "nudge": "time passes: says again what may be lost",
    "overdue": "the drain deadline passes",
}
DOUBT, FAILS = "ends in doubt: its bytes may still come", "fails, and has stopped"


def used(slot: int, use: int) -> str:
    return f"slot {slot} use {use}"


def content(message: m.HandoffMessage) -> str:
    """What a message says besides its name."""
    match message:
        case m.Credit(first=first, slots=slots):
            return f"from {first}: {', '.join(used(*slot) for slot in slots) or 'none open'}"
        case m.Landed(sequence=sequence, pages=pages):
            return f"batch {sequence}: " + ", ".join(f"page {p} in {used(s, u)}" for p, s, u in pages)
        case m.Resend(page=page, slot=slot):
            return f"page {page} into {used(*slot)}"
        case m.Grant(tokens=tokens, pages=pages):
            return f"{tokens} tokens, {pages} pages"
        case m.Complete(tokens=tokens, pages=pages, batches=batches):
            return f"{tokens} tokens, {pages} pages, {batches} batches"
        case m.Abort(code=code):
            return code
    return ""


__all__ = ["DOES", "DOUBT", "FAILS", "content", "used"]
