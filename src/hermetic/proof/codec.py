"""States as plain nested tuples, and back: what the explorer remembers of production objects.

Values carry their type in front, so that anything can be rebuilt without being told what it was, and so that a use of a slot
is found wherever it is named (`part.changed`). The one thing to know: everything of a machine is encoded (`vars`), except what is given back
when it is rebuilt (its key, the slots that it shares) and what only counts (`stale`, `resends`).
"""

from __future__ import annotations

import enum
import marshal
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import msgspec

from hermetic.handoff import messages as m
from hermetic.handoff import outcome as o
from hermetic.handoff.decode import State as DecodeState
from hermetic.handoff.machine import Machine
from hermetic.handoff.prefill import State as PrefillState
from hermetic.kv.slots import Slots, SlotUse

Data = Any
"""None, bool, int, str, bytes, or a tuple of those."""

GIVEN_BACK = frozenset({"key", "_slots"})
ONLY_COUNTS = {"stale": 0, "resends": 0}
DECIDING = frozenset({"worker_lost", "no_pair", "kv_integrity"})
_STRUCTS: dict[str, type[msgspec.Struct]] = {
    c.__name__: c
    for c in (
        m.Grant, m.Credit, m.Resend, m.Ack, m.Started, m.Landed, m.Complete, m.Drained, m.Abort,
        o.Completed, o.Refused, o.Failed, o.Aborted,
    )
}  # fmt: skip
_ENUMS: dict[str, type[enum.Enum]] = {"p": PrefillState, "d": DecodeState}


def encode(value: Any) -> Data:
    """Raises TypeError for what has no encoding: a new kind of attribute must not be left out in silence."""
    if value is None or isinstance(value, bool | int | str | bytes):
        return value
    if isinstance(value, SlotUse):
        return ("U", value.slot, value.use)
    if isinstance(value, enum.Enum):
        return ("E", "p" if isinstance(value, PrefillState) else "d", value.name)
    match value:
        case m.Credit(first=first, slots=slots):
            return ("M", "Credit", first, ("T", *(("U", s, u) for s, u in slots)))
        case m.Resend(page=page, slot=(s, u)):
            return ("M", "Resend", page, ("U", s, u))
        case m.Landed(sequence=sequence, pages=pages):
            return ("M", "Landed", sequence, ("T", *(("T", p, ("U", s, u)) for p, s, u in pages)))
        case m.Abort(code=code) | o.Refused(code=code) | o.Failed(code=code) | o.Aborted(code=code):
            # Texts are only passed on, and so are codes but for those that decide what comes next.
            return ("M", type(value).__name__, code if code in DECIDING else "ended", "")
        case msgspec.Struct() if type(value).__name__ in _STRUCTS:
            return ("M", type(value).__name__, *(encode(getattr(value, f)) for f in value.__struct_fields__))
        case tuple():
            return ("T", *map(encode, value))
        case list():
            return ("L", *map(encode, value))
        case deque():
            return ("Q", *map(encode, value))
        case set() | frozenset():
            return ("S", *sorted(map(encode, value)))
        case dict():
            return ("D", *sorted((encode(k), encode(v)) for k, v in value.items()))
    raise TypeError(f"{type(value).__name__} has no encoding: {value!r}")


def decode(data: Data) -> Any:
    """The inverse of `encode`."""
    if not isinstance(data, tuple):
        return data
    match data[0]:
        case "U":
            return SlotUse(data[1], data[2])
        case "E":
            return _ENUMS[data[1]][data[2]]
        case "M":
            return _message(data)
        case "T":
            return tuple(map(decode, data[1:]))
        case "L":
            return list(map(decode, data[1:]))
        case "Q":
            return deque(map(decode, data[1:]))
        case "S":
            return set(map(decode, data[1:]))
        case "D":
            return {decode(k): decode(v) for k, v in data[1:]}
    raise TypeError(f"not an encoding: {data!r}")


def _message(data: Data) -> Any:
    match data[1]:
        case "Credit":
            return m.Credit(data[2], tuple((s, u) for _, s, u in data[3][1:]))
        case "Resend":
            return m.Resend(data[2], data[3][1:])
        case "Landed":
            return m.Landed(data[2], tuple((p, *use[1:]) for _, p, use in data[3][1:]))
        case name:
            return _STRUCTS[name](*map(decode, data[2:]))


def encode_machine(machine: Machine[Any]) -> Data:
    """Every attribute in the order of its name, without those that are given back; counters as if nothing was counted."""
    kept = sorted(vars(machine).keys() - GIVEN_BACK)
    return tuple(
        ONLY_COUNTS[name] if name in ONLY_COUNTS else encode(getattr(machine, name)) for name in kept
    )


def decode_machine(blank: Machine[Any], data: Data) -> Any:
    """`blank` (newly made, with its key and slots) in the state of `data`."""
    for name, value in zip(sorted(vars(blank).keys() - GIVEN_BACK), data, strict=True):
        setattr(blank, name, decode(value))
    return blank


def encode_slots(slots: Slots, ticket: Callable[[object], int]) -> Data:
    """Free slots in order: which of them is given next makes no difference, as uses are compared and never ordered."""
    held = tuple(sorted((slot, ("K", ticket(key))) for slot, key in slots._granted.items()))
    return (tuple(slots._uses), tuple(sorted(slots._free)), held, tuple(sorted(slots._quarantined)))


def decode_slots(data: Data, key: Callable[[int], object]) -> Slots:
    uses, free, granted, quarantined = data
    slots = Slots(len(uses))
    slots._uses, slots._free = list(uses), sorted(free, reverse=True)
    slots._granted = {slot: key(k[1]) for slot, k in granted}
    slots._quarantined = set(quarantined)
    return slots


class Store:
    """Contents by id. An id comes from the content alone, so every process gives it the same."""

    def __init__(self) -> None:
        self.contents: dict[int, Data] = {}
        self._ids: dict[Data, int] = {}

    def id(self, content: Data) -> int:
        known = self._ids.get(content)
        if known is not None:
            return known
        number = int.from_bytes(blake2b(marshal.dumps(content, 2), digest_size=8).digest(), "little")
        clash = self.contents.setdefault(number, content)
        if clash != content:
            raise RuntimeError("two contents have one 64-bit id; nothing that was found so far counts")
        self._ids[content] = number
        return number


__all__ = [
    "GIVEN_BACK",
    "Data",
    "Store",
    "decode",
    "decode_machine",
    "decode_slots",
    "encode",
    "encode_machine",
    "encode_slots",
]
