"""A state of the explorer, as facts of the abstract protocol.

The one thing to know is how things are called. A page is called by the place it has in a page table, so that a page of two
tables has one name. A use is called by pair, slot and number while its segment is the present one; what still speaks of a
former segment has the attempt in its name. Prefill and its writes speak of the present segment once it was welcomed;
messages on their way to prefill do if their attempt is still open at decode.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hermetic.handoff import messages as m
from hermetic.handoff.decode import DecodeHandoff
from hermetic.handoff.prefill import PrefillHandoff
from hermetic.kv.pool import Kind
from hermetic.kv.slots import Slots, SlotUse
from hermetic.proof.codec import Data, decode, decode_machine
from hermetic.proof.draft import Draft
from hermetic.proof.halves import key_of, tokens_of
from hermetic.proof.interpret import Contents, State
from hermetic.proof.model import DOWN, UP

CUR, OLD = "present", "former"


def use_of(pair: int, where: SlotUse | tuple[int, int], t: int, present: bool) -> tuple[Any, ...]:
    """(segment's, pair, slot, number) or, of a former segment, with the attempt behind."""
    return (CUR, pair, *where) if present else (OLD, pair, *where, t)


def page_of(worker: int, t: int, index: int) -> tuple[Any, ...]:
    return (worker, t, index)


def functions(draft: Draft) -> dict[str, Any]:
    """What never changes, by the names of things."""
    pairs = [draft.known(t).pair for t in range(draft.world.tickets)]
    decodes = draft.world.scope.decodes  # a pair is prefill * decodes + decode
    return {
        "slot": lambda u: (u[0], u[1], u[2], *u[4:]),
        "segment": lambda u: u[:2],
        "owner": lambda g: g[1] % decodes,
        "prefiller": lambda t: pairs[t] // decodes,
        "decoder": lambda t: pairs[t] % decodes if pairs[t] >= 0 else -1,
        "lineage": lambda t, i: (t, i),
    }


def abstracted(draft: Draft) -> State:
    """The facts of this state."""
    world = draft.world
    needed = [(t, i) for t in range(world.tickets) for i in range(world.pages_of(t))]
    segments = [(age, pair) for pair in range(world.pairs) for age in (CUR, OLD)]
    state = State.first(functions(draft), needed, segments)
    now = state.now
    now["fenced"].update((OLD, pair) for pair in range(world.pairs))
    sources = _pages(draft, state, world.ppool_at, world.scope.prefills, world.scope.decodes, "prefill")
    _pages(draft, state, world.dpool_at, world.scope.decodes, 1, "decode")
    for pair in range(world.pairs):
        _slots(draft, state, pair)
    for t in range(world.tickets):
        if draft.known(t).pair >= 0:
            _prefill(draft, state, t, sources)
            _decode(draft, state, t)
            _messages(draft, state, t)
    _given(state)
    return state


def _pages(
    draft: Draft, state: State, at: Any, workers: int, step: int, side: str
) -> dict[tuple[int, int, int], Any]:
    """Tables, leases and contents of one side's pools; for prefill also what each write reads: (t, batch, index) -> page."""
    now, reads = state.now, {}
    for worker in range(workers):
        _, held, tables, contents, readings = draft.contents[draft.ids[at(worker * step)]]
        leases: dict[int, set[int]] = {}
        for t, _, pages in held:
            leases.setdefault(t, set()).update(pages)
        # A table may still list a page that its attempt gave back: the name comes from who holds it.
        names: dict[int, Any] = {}
        for t, pages, _ in tables:
            for index, page in enumerate(pages):
                if page in leases.get(t, ()):
                    names.setdefault(page, page_of(worker, t, index))
        for t, kind, pages in held:
            for page in pages:
                names.setdefault(page, (worker, "untabled", page))
                now["kept" if side == "prefill" else "leased"].add((names[page], t))
                if side == "prefill" and kind == Kind.SEND:
                    now["final"].add(names[page])
        for t, pages, tagged in tables:
            for index, page in enumerate(pages):
                if page not in leases.get(t, ()):
                    continue
                now["source" if side == "prefill" else "table"].add((t, index, names[page]))
                sent = any(u == t and kind == Kind.SEND and page in own for u, kind, own in held)
                if side == "prefill" and sent:
                    now["ready"].add((t, index))
                if side == "decode" and index in tagged and draft.decode(t).stage == "entered":
                    now["verified"].add((t, index))
        for t, batch, index, page in readings:
            reads[t, batch, index] = names.setdefault(page, (worker, "untabled", page))
        lies: Contents = now["contains" if side == "prefill" else "holds"]
        for page, name in names.items():
            _lie(lies, name, contents[page])
    return reads


def _lie(lies: Contents, place: Any, content: Data) -> None:
    if content is not None and content[3]:
        lies[place] = frozenset({(content[1], content[2])})


def _slots(draft: Draft, state: State, pair: int) -> None:
    uses, _, granted, quarantined = draft.contents[draft.ids[draft.world.slots_at(pair)]]
    now = state.now
    for slot, count in enumerate(uses):
        now["used"].update((CUR, pair, slot, number) for number in range(1, count + 1))
    for slot, (_, t) in granted:
        now["granted"].add(((CUR, pair, slot, uses[slot]), t))
        if slot in quarantined:
            now["quarantined"].add((CUR, pair, slot, uses[slot]))
    for slot, content in enumerate(draft.contents[draft.ids[draft.world.mem_at(pair)]]):
        _lie(now["lies"], (CUR, pair, slot), content)


def _prefill(draft: Draft, state: State, t: int, sources: dict[tuple[int, int, int], Any]) -> None:
    view, now, pair = draft.prefill(t), state.now, draft.known(t).pair
    now["prefill"][t] = "new" if view.machine is None and view.ended is None else "ended"
    for flight in draft.flights(t):
        if flight.mode == "ghost":
            continue
        for page, (_, slot, number) in flight.pages:
            u = use_of(pair, (slot, number), t, flight.live)
            now["writing"].add((t, page, u, sources[t, flight.batch, page]))
            if flight.mode == "doubt":
                now["doubtful"].add((t, u))
    if view.machine is None:
        return
    machine: PrefillHandoff = decode_machine(PrefillHandoff(key_of(t)), view.machine)
    now["prefill"][t] = machine.state.name.lower()
    present = draft.link(pair).welcomed

    def use(where: SlotUse | tuple[int, int]) -> Any:
        return use_of(pair, where, t, present)

    flying = {use(u) for pages in machine._in_flight.values() for _, u in pages}
    waiting = {use(u) for u in machine._credits}
    known = {use(u) for u in machine._numbers}
    now["known"].update((t, u) for u in known)
    now["spent"].update((t, u) for u in (known - waiting) | flying | {use(u) for u in machine._resent})
    for landed in machine._announced.values():
        now["wrote"].update((t, page, use((slot, number))) for page, slot, number in landed.pages)
    now["written"].update((t, page) for page in machine._landed)


def _decode(draft: Draft, state: State, t: int) -> None:
    view, now, pair = draft.decode(t), state.now, draft.known(t).pair
    phases = {"none": "none", "waiting": "none", "machine": "none", "entered": "entered", "over": "ended"}
    now["decode"][t] = phases[view.stage]
    if view.entered:
        now["went_on"].add(t)
    if view.machine is None:
        return
    blank = DecodeHandoff(key_of(t), tokens_of(draft.world.pages_of(t)), draft.world.pages_of(t), Slots(1))
    machine: DecodeHandoff = decode_machine(blank, view.machine)
    now["decode"][t] = machine.state.name.lower()

    def use(where: SlotUse | tuple[int, int]) -> Any:
        return use_of(pair, where, t, True)

    worker = pair % draft.world.scope.decodes
    now["credited"].update((t, use(u)) for u in machine._credited)
    now["asked"].update((t, page, use(u)) for page, u in machine._resent.items())
    now["verified"].update((t, page) for page in machine._verified)
    if machine._complete is not None:
        now["heard"].add(t)
    if machine._quiet:
        now["quiet"].add(t)
    tables = {(b, i): p for b, i, p in now["table"]}
    for name, copies in (("copying", view.copies), ("checking", [view.checking] if view.checking else [])):
        for page, (_, slot, number) in copies:
            p = tables.get((t, page), page_of(worker, t, page))
            now[name].add((t, page, use((slot, number)), p))


def _messages(draft: Draft, state: State, t: int) -> None:
    """What is on its way, but for slots that are named to a half that has ended: it does not look at them any more."""
    now, pair = state.now, draft.known(t).pair
    at_decode = draft.decode(t).machine is not None
    at_prefill = draft.prefill(t).machine is not None or draft.prefill(t).ended is None
    present = at_decode or draft.link(pair).welcomed
    for way, listens in ((UP, at_decode), (DOWN, at_prefill)):
        for data in draft.at(t, way):
            for name, fact in _says(decode(data), t, pair, present):
                if listens or not isinstance(fact, tuple):
                    now[name].add(fact)


def _says(message: m.HandoffMessage, t: int, pair: int, present: bool) -> Iterator[tuple[str, Any]]:
    match message:
        case m.Credit(slots=slots):
            for where in slots:
                yield "say_credit", (t, use_of(pair, where, t, present))
        case m.Resend(page=page, slot=where):
            yield "say_resend", (t, page, use_of(pair, where, t, present))
        case m.Landed(pages=pages):
            for page, slot, number in pages:
                yield "say_landed", (t, page, use_of(pair, (slot, number), t, present))
        case m.Abort():
            return
        case _:
            yield f"say_{type(message).__name__.lower()}", t


NAMING = (
    "say_credit",
    "say_resend",
    "say_landed",
    "credited",
    "asked",
    "known",
    "spent",
    "wrote",
    "writing",
    "doubtful",
)


def _given(state: State) -> None:
    """To whom each use was given: whoever has it, or is spoken of with it."""
    now = state.now
    now["given"].update(now["granted"])
    for name in NAMING:
        place = 1 if name in ("say_credit", "credited", "known", "spent", "doubtful") else 2
        now["given"].update((fact[place], fact[0]) for fact in now[name])


__all__ = ["CUR", "OLD", "abstracted", "page_of", "use_of"]
