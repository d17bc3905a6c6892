"""What holds what in one state of the explorer, in lines for people: the end of every chart."""

from __future__ import annotations

from collections.abc import Iterator

from hermetic.kv.pool import Kind
from hermetic.proof.codec import Data
from hermetic.proof.draft import Draft
from hermetic.proof.model import State
from hermetic.proof.pages import name, shown
from hermetic.proof.world import World

_MODES = {
    "flying": "is under way",
    "doubt": "has failed and may still arrive",
    "ghost": "is over, and will arrive once more",
}


def standing(world: World, state: State) -> tuple[str, ...]:
    """A line for each half, slot, write and held page. The state is one of `world`'s own."""
    return tuple(_told(world, state))


def _told(world: World, state: State) -> Iterator[str]:
    draft = Draft(world, state)
    begun = [t for t in range(world.tickets) if draft.known(t).pair >= 0]
    for t in begun:
        at_decode = draft.d_state(t).lower() or draft.decode(t).stage
        yield f"{name(t)}: prefill {draft.p_state(t).lower() or _without(draft, t)}, decode {at_decode}"
    for pair in range(world.pairs):
        yield from _slots(world, state, pair)
    for t in begun:
        for flight in draft.flights(t):
            pages = ", ".join(f"page {p} -> slot {s} use {u}" for p, (_, s, u) in flight.pages)
            segment = "" if flight.live else ", into a segment that is fenced"
            yield f"batch {flight.batch} of {name(t)}, {pages}, {_MODES[flight.mode]}{segment}"
    for worker in range(world.scope.prefills):
        yield from _pages(world, state, f"prefill-{worker}", world.ppool_at(worker * world.scope.decodes))
    for worker in range(world.scope.decodes):
        yield from _pages(world, state, f"decode-{worker}", world.dpool_at(worker))


def _without(draft: Draft, t: int) -> str:
    """What prefill knows of a ticket that has no machine there."""
    ended = draft.prefill(t).ended
    return "nothing" if ended is None else f"over ({ended[1].lower()})"


def _slots(world: World, state: State, pair: int) -> Iterator[str]:
    uses, free, granted, quarantined = world.store.contents[state[world.slots_at(pair)]]
    memory = world.store.contents[state[world.mem_at(pair)]]
    owners: dict[int, Data] = dict(granted)
    of = (
        f" of prefill-{pair // world.scope.decodes} at decode-{pair % world.scope.decodes}"
        if world.pairs > 1
        else ""
    )
    for slot, use in enumerate(uses):
        if slot in free:
            told = "free" if use else "free, never used"
        else:
            told = f"use {use} granted to {name(owners[slot][1])}"
            told += ", in quarantine" if slot in quarantined else ""
            told += f"; there lies {shown(memory[slot])}" if memory[slot] is not None else ""
        yield f"slot {slot}{of}: {told}"


def _pages(world: World, state: State, worker: str, place: int) -> Iterator[str]:
    _, held, tables, contents, readings = world.store.contents[state[place]]
    places = {page: (ticket, index) for ticket, pages, _ in tables for index, page in enumerate(pages)}
    for page, content in enumerate(contents):
        leases = [f"{Kind(kind).name.lower()} by {name(t)}" for t, kind, pages in held if page in pages]
        reads = [f"read by batch {batch} of {name(t)}" for t, batch, _, read in readings if read == page]
        if not leases and not reads:
            continue
        what = f" (page {places[page][1]} of {name(places[page][0])})" if page in places else ""
        lies = f"; there lies {shown(content)}" if content is not None else ""
        yield f"{worker} page {page}{what}: {', '.join([*leases, *reads]) or 'free'}{lies}"


__all__ = ["standing"]
