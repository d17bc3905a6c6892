"""What a part is: one ticket's share of a state, and what it depends on besides (see parts.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from hermetic.proof.codec import Data
from hermetic.proof.model import Broken, Link, Move
from hermetic.proof.world import Draft

OWN, OTHER = "own", "other"  # whose rows lie somewhere, as a part says it


class Pages(NamedTuple):
    """A ticket's pages at one worker, numbered from 0. `held`: (kind, pages); `table`: in order of the prompt; `lies`: what is
    in each; `readings`: (batch, index, page) of writes under way."""

    held: Data = ()
    table: Data = ()
    tagged: Data = ()
    lies: Data = ()
    readings: Data = ()


class Part(NamedTuple):
    """`size`: pages of the prompt. `six`: component ids. `granted`: (slot, use); `lies`: what is in those slots."""

    size: int
    six: tuple[int, ...]
    uses: tuple[int, ...]
    granted: Data = ()
    quarantined: Data = ()
    lies: Data = ()
    prefill: Pages = Pages()
    decode: Pages = Pages()


class Env(NamedTuple):
    """What others have: slots (a mask), pages at both workers; the link; whether decode is between a copy and its hash for
    another ticket, and whether bytes of another's write may come once more; whether the adversary may still do anything."""

    slots: int = 0
    prefill: int = 0
    decode: int = 0
    link: int = 0
    busy: bool = False
    ghost: bool = False
    faults: bool = True


class Made(NamedTuple):
    """A move of a ticket. `fault`: its number in FAULTS, -1 for a calm one. `to` -1: it breaks something, see `broken`."""

    fault: int
    to: int
    move: Move
    broken: Broken | None


LINKS = tuple(Link(state, welcomed) for state in ("up", "d_lost", "p_lost") for welcomed in (True, False))


SHARED: dict[str, Callable[[Draft], None]] = {
    "crash prefill": lambda d: d.crash_prefill(0),
    "crash decode": lambda d: d.crash_decode(0),
    "fence": lambda d: d.replace(0),
    "greet": lambda d: d.greet(0),
    "welcome": lambda d: d.welcome(0),
    "silence decode": lambda d: d.silence(0, "d_lost"),
    "silence prefill": lambda d: d.silence(0, "p_lost"),
}


def changed(data: Data, change: Callable[[Data], Data]) -> Data:
    """`data` with `change` done to every use of a slot in it; what has no order is sorted again."""
    if not isinstance(data, tuple) or not data:
        return data
    if data[0] == "U":
        return change(data)
    made = tuple(changed(item, change) for item in data)
    return (data[0], *sorted(made[1:])) if data[0] in ("S", "D") else made


def named(data: Data) -> Iterator[tuple[int, int]]:
    """Every (slot, use) in it."""
    if isinstance(data, tuple) and data:
        if data[0] == "U":
            yield data[1], data[2]
        else:
            for item in data:
                yield from named(item)
