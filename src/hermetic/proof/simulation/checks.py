"""What must hold at every moment of a simulated run, and who is asked when.

The checks stand beside the product: they observe machines, slots and pools, and know what the product cannot (which bytes
are on their way, which byte was damaged). The one thing to know: the first finding ends the run; it is raised nowhere, so
that nothing of the product can swallow it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hermetic.engine.sequence import Sequence as Running
from hermetic.handoff.actions import Action, Enter, Report, Write
from hermetic.handoff.decode import DecodeHandoff
from hermetic.handoff.decode import State as DecodeState
from hermetic.handoff.machine import Machine
from hermetic.handoff.messages import Key
from hermetic.handoff.outcome import Completed
from hermetic.kv.pool import I32, Kind, Pool
from hermetic.kv.slots import Slots, SlotUse
from hermetic.proof.simulation.events import Events
from hermetic.proof.simulation.flights import Flight, Flying
from hermetic.proof.simulation.model import GEOMETRY, PAGE_SIZE
from hermetic.proof.simulation.plan import DRAIN, SILENT
from hermetic.proof.simulation.transport import Wires
from hermetic.transport.base import Page
from hermetic.worker.decode import DecodeWorker, Peer

if TYPE_CHECKING:
    from hermetic.proof.simulation.process import Process

CLEAN = DRAIN + SILENT + 1.0  # seconds without trouble after which a peer must have answered


class Checks:
    """`processes`: those that live, by name. `current` is the process whose code runs now."""

    def __init__(self, events: Events, wires: Wires, clock: Callable[[], float]) -> None:
        self._events, self._wires, self._clock = events, wires, clock
        self.processes: dict[str, Process] = {}
        self.current: Process | None = None
        self.finding: tuple[str, str, tuple[str, ...]] | None = None
        self.stop: Callable[[], None] = lambda: None
        self.touched: set[str] = set()  # attempts that held, or were to land, a damaged page or slot
        self.tenants: dict[str, str] = {}  # of each ticket
        self._troubles: dict[tuple[str, ...], float] = {}
        wires.watcher = self

    def found(self, kind: str, text: str, *keys: str) -> None:
        """A promise is broken."""
        if self.finding is None:
            self.finding = kind, text, tuple(key for key in keys if key)
            self.stop()

    # --------------------------------------------------------------------- machines

    def stepped(
        self, machine: Machine[Any], event: str, args: tuple[Any, ...], before: Any, actions: list[Action]
    ) -> None:
        process, key = self.current, str(machine.key)
        if process is None:
            return
        for action in actions:
            if isinstance(action, Write):
                process.writes.append((machine.key, tuple(use for _, use in action.pages)))
            elif isinstance(action, Enter):
                self._enters(process, machine)
            elif isinstance(action, Report) and isinstance(action.outcome, Completed):
                self._completes(machine, event, actions)
        if event[0].islower():  # a message is drawn where it arrives
            told = ", ".join(str(x) for x in args if not isinstance(x, bytes))
            after = "" if before is machine.state else f"; {before.name} -> {machine.state.name}"
            self._events.noted(process.name, event, told + after, (key,))
        if event == "overdue" and isinstance(machine, DecodeHandoff):
            machine._slots.check_conservation()
            self._overdue(process, machine)
        landing = isinstance(machine, DecodeHandoff) and before is DecodeState.LANDING
        if event == "copied" and landing and not args[1] and key not in self.touched:
            self.found("I1", f"page {args[0]} was refused by its seal, and nothing had damaged it", key)

    def _enters(self, process: Process, machine: Machine[Any]) -> None:
        """A request goes on to decode: every page of its prompt must have its tag."""
        seq = process.worker.engine.reserved(machine.key)
        prompt = seq.job.prompt
        count = GEOMETRY.pages_for(prompt)
        fills = np.clip(prompt - np.arange(count) * PAGE_SIZE, 0, PAGE_SIZE)
        pages, pool = seq.pages[:count], process.pool
        good = (pool.tag_lineage[pages] == seq.chain.lineages[:count]).all(1) & (
            pool.tag_fill[pages] == fills
        )
        if not good.all():
            text = f"a request enters decode, and page {int(np.argmin(good))} of its prompt was not verified"
            self.found("I1", text, str(machine.key))

    def _completes(self, machine: Machine[Any], event: str, actions: list[Action]) -> None:
        """A half says that all went well: decode when the request enters, prefill when decode has said so."""
        decode = isinstance(machine, DecodeHandoff)
        if event != "Ack" and not (decode and any(isinstance(action, Enter) for action in actions)):
            self.found("I4", f"a half reports success at {event}", str(machine.key))

    # ------------------------------------------------------------------------ slots

    def slots_changed(self, slots: Slots, what: str, uses: tuple[SlotUse, ...], key: object) -> None:
        process = self.current
        if process is None or what not in ("consume", "release"):
            return
        peer = _peer(process, lambda peer: peer.slots is slots)
        if peer is None:
            return
        freed = {use.slot for use in uses}
        record = process.worker._records.get(key)  # type: ignore[attr-defined]
        if record is not None and not freed.isdisjoint(use.slot for use in record.machine._copying.values()):
            self.found(
                "I3",
                f"slot {min(freed)} is free ({what}), and its page has not been copied out yet",
                str(key),
            )
        for flight in self._wires.flights:
            if flight.sender.receiver is peer.receiver and not flight.sender.receiver.fenced:
                for one in flight.pages:
                    if one.slot in freed:
                        text = (
                            f"slot {one.slot} is free ({what} by {key}), and a write to it may still arrive"
                        )
                        self.found("I3", text, flight.whose, str(key))

    def byte_arrives(self, flight: Flight, flying: Flying) -> None:
        """Bytes are about to be written into a slot of a segment that is not fenced."""
        receiver, sender = flight.sender.receiver, flight.sender.owner
        if flying.late is None:
            process = self.processes.get(sender.name)
            if process is not None and process is sender and not process.pool._holds[Kind.SEND][flying.page]:
                text = (
                    f"page {flying.page} of {sender.name} is read by a write, and nobody holds it for sending"
                )
                self.found("I3", text, flight.whose)
        if flying.use is None:
            return
        holder = receiver.landing.holder
        if holder is None:
            text = f"bytes of {sender.name} arrive in landing memory that was given back without a fence"
            self.found("I3", text, flight.whose)
            return
        process = self.processes.get(holder.owner.name)
        peer = None if process is None else _peer(process, lambda peer: peer.receiver is holder)
        if peer is not None and not peer.slots.holds(flight.key, flying.use):
            text = (
                f"bytes arrive in slot {flying.slot} of {holder.owner.name} under use {flying.use.use}, which is not "
                f"granted to their ticket (any more)"
            )
            self.found("I3", text, flight.whose)

    def spoils(self, flight: Flight) -> None:
        """What has landed for this ticket is damaged."""
        self.touched.add(flight.whose)

    # ------------------------------------------------------------------------ pages

    def begins(self, owner: Any, pages: Sequence[tuple[Page, int]]) -> tuple[Key | None, list[Flying]]:
        """A write begins: whose it is, and which pages it reads."""
        process: Process = owner
        slots = tuple(slot for _, slot in pages)
        found = next((w for w in process.writes if tuple(use.slot for use in w[1]) == slots), None)
        if found is None:
            self.found("handoff", f"{owner.name} writes into slots {slots} without a Write of any ticket")
            return None, []
        process.writes.remove(found)
        base, stride = process.base, process.pool.geometry.stride
        return found[0], [
            Flying(source, (source.ctypes.data - base) // stride, slot, use)
            for (source, slot), use in zip(pages, found[1], strict=True)
        ]

    def pages_changed(self, pool: Pool, what: str, kind: Kind, owner: str, pages: I32) -> None:
        process = self.current
        if process is None or process.pool is not pool:
            return
        chosen = pages.tolist()
        tenant = self.tenants.get(owner.partition("/")[0], "")
        if what == "take":
            process.tenants.update(dict.fromkeys(chosen, tenant))
        elif what == "share" and any(process.tenants.get(page) != tenant for page in chosen):
            self.found(
                "I1", f"a page that {process.name} computed for another tenant is shared with {tenant}", owner
            )
        if process.damaged:
            hit = process.damaged.intersection(chosen)
            if what == "share" and hit:
                self.touched.add(owner)
            elif what == "take":
                process.damaged -= hit
        if what == "take" or (what == "drop" and kind is Kind.SEND):
            read = self._read_now(process)
            for page in chosen:
                if page in read and (what == "take" or pool._total[page] == 1):
                    done = "taken by somebody else" if what == "take" else "given back"
                    self.found(
                        "I3",
                        f"page {page} of {process.name} is {done} while a write reads it",
                        read[page],
                        owner,
                    )

    def _read_now(self, process: Process) -> dict[int, str]:
        return {
            one.page: flight.whose
            for flight in self._wires.flights
            if flight.reading and flight.sender.owner is process
            for one in flight.pages
        }

    def reads(self, seq: Running, pages: list[int]) -> None:
        """Attention is about to read these pages for this sequence."""
        held: set[int] = set()
        for lease in (seq.full, seq.growing):
            if lease is not None and lease.open:
                held.update(lease.pages.tolist())
        if not held.issuperset(pages):
            lacks = sorted(set(pages) - held)
            self.found(
                "I1", f"attention reads pages {lacks}, which its reader does not hold", str(seq.job.key)
            )

    def conserved(self, process: Process) -> None:
        """I5 of one process. Raises OwnershipError or SlotError."""
        process.pool.check_conservation()
        if process.pool.counters.double_closes:
            self.found("I5", f"a lease of {process.name} was closed twice")
        for peer in _peers(process):
            peer.slots.check_conservation()

    # ----------------------------------------------------------------------- fences

    def trouble(self, *names: str) -> None:
        """Something was done to these (two: to what is between them), so that a late answer is nobody's fault."""
        self._troubles[names] = self._clock()

    def _overdue(self, process: Process, machine: DecodeHandoff) -> None:
        """Decode gives up waiting for *drained*: the peer must be dead, or have had trouble."""
        peer = _peer(process, lambda peer: peer.slots is machine._slots)
        other = next(
            (p for p in self.processes.values() if peer is not None and p.label == peer.info.source), None
        )
        if peer is None or other is None or not other.alive or self._wires.in_doubt(peer.receiver):
            return
        now, one, two = self._clock(), process.name, other.name
        about = ((one,), (two,), (one, two), (two, one))
        if all(now - self._troubles.get(names, -CLEAN) >= CLEAN for names in about):
            text = f"{two} answers and its writes arrive within their bound, and {one} takes it for lost all the same"
            self.found("L2", text, str(machine.key))

    # ------------------------------------------------------------------- the client's

    def integrity(self, keys: Sequence[str], reason: str) -> None:
        """A request ended with kv_integrity under one of these attempts."""
        if not self.touched.intersection(keys):
            text = f"a request ended with kv_integrity and held nothing that was damaged: {reason}"
            self.found("I6", text, *keys)


def _peers(process: Process) -> list[Peer]:
    worker = process.worker
    return [*worker._peers.values(), *worker._silent] if isinstance(worker, DecodeWorker) else []


def _peer(process: Process, which: Callable[[Peer], bool]) -> Peer | None:
    return next((peer for peer in _peers(process) if which(peer)), None)


__all__ = ["Checks"]
