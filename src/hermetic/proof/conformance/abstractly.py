"""A recording as actions of the abstract protocol (abstract.py), one after the other, each with its guard.

The one thing to know: what is in a page is not recorded, only whether it verified. Bytes arrive when the transport says that
a write has ended; a page that does not verify had strange bytes in its slot (the one hostile action that is used), and a page
that does verify must have been written. A page that two prompts share is taken to be of both their lineages, as prefill says.

Each ticket has a state of its own, so that a step costs what that ticket has and not what the recording has; what several
tickets compete for (slots, pages, segments) is the same object in all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from hermetic.handoff import actions as act
from hermetic.handoff import messages as m
from hermetic.handoff import records as r
from hermetic.handoff.actions import Action
from hermetic.handoff.messages import HandoffMessage
from hermetic.handoff.outcome import Aborted
from hermetic.kv.slots import SlotUse
from hermetic.proof import mapping
from hermetic.proof.conformance.at_decode import DecodeHalf
from hermetic.proof.conformance.at_prefill import PrefillHalf
from hermetic.proof.conformance.half import Half
from hermetic.proof.conformance.ledger import Broken
from hermetic.proof.interpret import NotAllowed, State
from hermetic.proof.mapping import Call, Names, Took

OF_DECODE = ("leased", "holds", "used", "given", "granted", "quarantined", "lies", "fenced", "doubtful")
OF_PREFILL = ("kept", "contains", "final")
Name = tuple[str, str, str]
Use = tuple[str, int, int, int]  # decode process, segment, slot, use


class Abstract:
    """The abstract state of everything that is open. `taken` counts actions by name."""

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()
        self._segments: set[tuple[str, int]] = set()
        self._rows: dict[tuple[Name, int], Any] = {}  # lineages of pages that were found, not computed
        self._fixed: dict[str, Callable[..., Any]] = {
            "slot": lambda u: u[:3],
            "segment": lambda u: u[:2],
            "owner": lambda g: g[0],
            "prefiller": lambda t: t[1],
            "decoder": lambda t: t[2],
            "lineage": lambda t, i: self._rows.get((t, i), (t, i)),
        }
        self._shared: dict[str, dict[str, Any]] = {}  # process -> what its tickets compete for
        self.states: dict[Name, State] = {}
        self._sources: dict[Name, list[Any]] = {}  # source pages by index
        self._tables: dict[Name, list[Any]] = {}  # decode pages by index
        self._uses: dict[Name, set[Use]] = {}
        self.on: dict[
            tuple[str, str], Name
        ] = {}  # process, owner -> its ticket, which has entered and holds pages
        self.segment_of: dict[Name, int] = {}

    # ------------------------------------------------------------------- life

    def state(self, t: Name) -> State:
        found = self.states.get(t)
        if found is None:
            found = self.states[t] = State.first(self._fixed)
            found.now.update(self._of(t[1], OF_PREFILL))
            found.now.update(self._of(t[2], OF_DECODE))
            found.fixed["segments"] = self._segments  # type: ignore[index]
        return found

    def _of(self, p: str, names: tuple[str, ...]) -> dict[str, Any]:
        if p not in self._shared:
            first = State.first(self._fixed).now
            self._shared[p] = {name: first[name] for name in names}
        return self._shared[p]

    def forget(self, t: Name) -> None:
        """It is over on both sides, its answer as well."""
        if t in self.on.values():
            return
        state = self.states.pop(t, None)
        uses = self._uses.pop(t, set())
        self._sources.pop(t, None)
        for index in range(len(self._tables.pop(t, ()))):
            self._rows.pop((t, index), None)
        self.segment_of.pop(t, None)
        if state is not None:
            state.now["used"].difference_update(uses)
            state.now["given"].difference_update((u, t) for u in uses)
            state.now["doubtful"].difference_update((t, u) for u in uses)

    def take(self, t: Name, action: str, /, **args: Any) -> None:
        """Raises Broken."""
        try:
            self.state(t).take(action, **args)
        except NotAllowed as refused:
            raise Broken(
                f"{action}: {refused.action.says}; that is not possible here", f"it when {refused.guard}"
            ) from refused
        self.taken[action] += 1

    def abandon(self, t: Name) -> None:
        """It cannot be followed any more: what a killed process did for it is not known."""
        for name in ("leased", "granted", "given", "kept"):
            facts = self.state(t).now[name]
            facts.difference_update([fact for fact in facts if t in fact])
        self.on = {at: b for at, b in self.on.items() if b != t}
        self.forget(t)

    # --------------------------------------------------------------- processes

    def segment(self, p: str, number: int) -> None:
        self._segments.add((p, number))

    def fenced(self, p: str, number: int) -> None:
        self._of(p, OF_DECODE)["fenced"].add((p, number))
        self.taken["fence"] += 1

    def closed(self, tickets: Iterable[Name], decoder: str, segment: int, gone: bool, killed: bool) -> None:
        """Prefill's sender is closed, for these tickets of it. `killed`: what decode did last is not recorded."""
        if gone or killed:
            self._of(decoder, OF_DECODE)["fenced"].add(
                (decoder, segment)
            )  # its memory is gone with it, or it says that it has fenced it
            self.taken["decode_dies"] += gone
        for t in tickets:
            self.take(t, "drop", g=(decoder, segment))

    # ------------------------------------------------------------------- steps

    def step(self, t: Name, half: Half, step: r.Step, flight: tuple[tuple[int, int, int], ...]) -> None:
        """A step of a machine. `flight`: what the batch wrote that it is about."""
        took = Took(step.e, step.a, step.m, step.b, step.s, tuple(map(_action, step.do)))
        state, names = self.state(t), self._names(t, half)
        if isinstance(half, PrefillHalf):
            if step.e == "submitted" and not state.fixed["needed"]:
                self._need(t, half.pages)
            elif step.e == "started":
                self._sources[t] = self._owned(t[1], t, half, half.pages)
                self._find(t)
            batch = tuple((page, SlotUse(slot, use)) for page, slot, use in flight)
            self._all(t, mapping.prefill_step(took, self._names(t, half), state, batch))
            return
        assert isinstance(half, DecodeHalf)
        if step.e == "reserved":
            self._need(t, half.pages)
            self._tables[t] = self._owned(t[2], t, half, half.pages)
            names = self._names(t, half)
        self._all(t, mapping.decode_step(took, names, state))
        if half.entered and half.party.pooled:
            self.on[t[2], half.owner] = t
        elif half.entered:
            self.take(t, "finish", t=t)

    def checked(self, t: Name, index: int, q: int, good: bool, pooled: bool) -> None:
        """A page was copied, and hashed."""
        for _, i, use, page in [c for c in self.state(t).now["copying"] if c[1] == index]:
            if pooled and page != (t[2], q):
                raise Broken(
                    f"page {index} is copied to page {q} of the pool", f"page {page[1]}, of its table"
                )
            if not good:
                self.take(t, "stray", s=use[:3], junk=frozenset())
            self.take(t, "copy", t=t, i=i, u=use, p=page)

    def pages_free(self, p: str, owner: str) -> Name | None:
        """A request that has entered gives pages back. Returns whose they were."""
        t = self.on.pop((p, owner), None)
        if t is not None:
            self.take(t, "finish", t=t)
        return t

    def unknown(
        self, t: Name, at_prefill: bool, message: HandoffMessage, said: tuple[HandoffMessage, ...]
    ) -> None:
        """A message for a ticket without a machine on this side."""
        if at_prefill:
            known = self.state(t).now["prefill"][t] == "ended"
            self._all(t, mapping.unknown_at_prefill(t, known, message, said))
        else:
            self._all(t, mapping.unknown_at_decode(t, said))

    def forged(self, t: Name, message: HandoffMessage) -> None:
        """Tests only: a lie of prefill."""
        match message:
            case m.Landed(pages=pages):
                for index, slot, use in pages:
                    self.take(t, "lie_landed", t=t, i=index, u=self._use(t, slot, use))
            case m.Complete():
                self.take(t, "lie_complete", t=t)

    # ------------------------------------------------------------------ private

    def _all(self, t: Name, calls: Iterable[Call]) -> None:
        for action, args in calls:
            if action == "grant_use" or action == "ask_again":
                self._uses.setdefault(t, set()).add(args["u"])
            self.take(t, action, **args)

    def _names(self, t: Name, half: Half) -> Names:
        def at(pages: dict[Name, list[Any]], index: int) -> Any:
            mine = pages.get(t, [])
            if not 0 <= index < len(mine):
                raise Broken(f"page {index}, of {len(mine)}", "a page of its prompt")
            return mine[index]

        return Names(
            t,
            half.pages,  # type: ignore[attr-defined]
            lambda slot, use: self._use(t, slot, use),
            lambda index: at(self._tables, index),
            lambda index: at(self._sources, index),
        )

    def _use(self, t: Name, slot: int, use: int) -> Use:
        return (t[2], self.segment_of.get(t, 0), slot, use)

    def _need(self, t: Name, pages: int) -> None:
        """The prompt has so many pages; where the halves do not agree, what decode reserves counts."""
        needed = self.state(t).fixed["needed"]
        needed.clear()
        needed.update((t, index) for index in range(pages))

    def _owned(self, p: str, t: Name, half: Half, count: int) -> list[Any]:
        """The pages of the prompt, in order: shared ones first, as they were leased."""
        if not half.party.pooled:
            return [(t, index) for index in range(count)]
        return [(p, q) for q in list(half.party.pages.of.get(half.owner, ()))[:count]]

    def _find(self, t: Name) -> None:
        """What it shares was computed before it was found: its first owner only has not said so yet."""
        now = self.state(t).now
        for index, q in enumerate(self._sources[t]):
            others = [b for q2, b in now["kept"] if q2 == q]
            for b in others:
                if not now["final"](q) and self.states[b].now["prefill"][b] == "sending":
                    self.take(b, "make", t=b, i=self._sources[b].index(q), q=q)
            if others and now["contains"][q]:
                (self._rows[t, index],) = now["contains"][q]


def _action(done: r.Done) -> Action:
    """The machine's action that was recorded as this."""
    match done:
        case r.Sent(message=message):
            return act.Send(message)
        case r.Writes(batch=batch, pages=pages):
            return act.Write(batch, tuple((page, SlotUse(slot, use)) for page, slot, use in pages))
        case r.Copies(page=page, slot=slot, use=use):
            return act.Copy(page, SlotUse(slot, use))
        case r.Reported():
            return act.Report(Aborted(done.code, done.reason))
        case r.Entered():
            return act.Enter(b"")
        case r.LeasesClosed():
            return act.CloseLeases()
        case r.Forgotten():
            return act.Forget()
        case r.Stopped():
            return act.StopComputing()
        case r.Enqueued():
            return act.Enqueue()


__all__ = ["Abstract"]
