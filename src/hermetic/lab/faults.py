"""Faults, each a small named thing that happens to one request, from outside the product's code.

A fault is armed before its request (the *reader*) is submitted, and strikes once at its moment, between two rounds. What
bytes do is one half (`MUTATIONS`), where they do it the other (`Landed`, `Live`, `Computed`). The one thing to know: a
fault knows nothing of walls. The same fault is played against every setting, and only what stands in its way differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hermetic.engine.sequence import Job, Phase
from hermetic.engine.sequence import Sequence as EngineSequence
from hermetic.handoff.actions import Action
from hermetic.handoff.messages import Key
from hermetic.handoff.prefill import PrefillHandoff, State
from hermetic.kv.geometry import Geometry
from hermetic.worker.prefill import PrefillWorker

if TYPE_CHECKING:
    from hermetic.lab.scene import Scene

Page = npt.NDArray[np.uint8]  # uint8 [stride]
TARGET = 1  # the page of the reader's prompt that is hit: full, and neither the first nor the last
OTHER = 0  # another full page of the same prompt
AFTER_TOKENS = 3  # a live page is hit when the reader has at least so many output tokens


class Fault:
    """Something that goes wrong once. `name` is the row of the table."""

    name: str

    def arm(self, scene: Scene) -> None:
        """Called before the reader is submitted."""

    def due(self, scene: Scene) -> bool:
        """Whether this is the moment to strike; asked between rounds."""
        return len(scene.answer.tokens) >= AFTER_TOKENS and scene.bystander_runs()

    def strike(self, scene: Scene) -> None:
        """Called once, when it is due."""


# ------------------------------------------------------------------------------------------- what happens to a page
@dataclass(frozen=True)
class Target:
    """One page under a mutation: `page` is written in place, `own` gives the other pages of the same sequence."""

    scene: Scene
    geometry: Geometry
    page: Page
    own: Callable[[int], Page]

    def rows(self, component: str) -> npt.NDArray[Any]:
        """[layers, heads, page_size, width]"""
        view: npt.NDArray[Any] = self.geometry.rows(self.page[None], component)[0]
        return view


Mutation = Callable[[Target], None]


def tenants_page(t: Target) -> None:
    """another tenant's page, seals intact"""
    t.page[:] = t.scene.victim_pages[TARGET]


def other_position(t: Target) -> None:
    """the same request's page of another position, seals intact"""
    t.page[:] = t.own(OTHER)


def rows_swapped(t: Target) -> None:
    """two rows swapped"""
    for component in ("k", "v"):
        rows = t.rows(component)
        rows[:, :, [2, 5]] = rows[:, :, [5, 2]]


def kv_swapped(t: Target) -> None:
    """K and V swapped"""
    k, v = t.rows("k"), t.rows("v")
    k[:], v[:] = v.copy(), k.copy()


def layers_swapped(t: Target) -> None:
    """two layers' tiles swapped, seals with them"""
    seals = t.geometry.seals(t.page[None])[0]
    for array in (t.rows("k"), t.rows("v"), seals):
        array[[0, 1]] = array[[1, 0]]


def heads_swapped(t: Target) -> None:
    """two heads' tiles swapped, seals with them"""
    seals = t.geometry.seals(t.page[None])[0]
    for array in (t.rows("k"), t.rows("v"), seals):
        array[:, [0, 1]] = array[:, [1, 0]]


def bit_flipped(t: Target) -> None:
    """one bit flipped"""
    t.page[t.geometry.offset(1, 1, 0, 7) + 3] ^= 0x10


def tenants_row(t: Target) -> None:
    """one row of another tenant, written astray"""
    for component in ("k", "v"):
        theirs = t.geometry.rows(t.scene.victim_pages[TARGET][None], component)[0]
        t.rows(component)[:, :, 4] = theirs[:, :, t.scene.marker_row]


def models_page(t: Target) -> None:
    """another model's page of another tenant, seals intact"""
    t.page[:] = t.scene.other_model_page()


def dtypes_page(t: Target) -> None:
    """a page of another KV dtype, as bytes"""
    t.page[:] = t.scene.other_dtype_page()[: len(t.page)]


MUTATIONS: tuple[Mutation, ...] = (
    tenants_page,
    other_position,
    rows_swapped,
    kv_swapped,
    layers_swapped,
    heads_swapped,
    bit_flipped,
    tenants_row,
    models_page,
    dtypes_page,
)


def label(mutation: Mutation) -> str:
    return (mutation.__doc__ or mutation.__name__).strip()


# ------------------------------------------------------------------------------------------------------ where
class Landed(Fault):
    """In the landing slot, after prefill wrote it and before decode copies it: each time, or only the first."""

    def __init__(self, mutation: Mutation, once: bool = False) -> None:
        self.mutation, self.once = mutation, once
        self.name = f"landing slot: {label(mutation)}{', the first time only' if once else ''}"

    def arm(self, scene: Scene) -> None:
        worker = scene.pair.prefill
        geometry, write, hits = worker.engine.pool.geometry, worker._write, 0

        def written(key: Key, record: Any, batch: int, pages: list[tuple[int, int]]) -> None:
            nonlocal hits
            write(key, record, batch, pages)
            memory, own = worker.engine.pool.memory, record.pages.copy()

            def page_of(position: int) -> Page:
                page: Page = memory[own[position]]
                return page

            for index, slot in pages:
                if index == TARGET and scene.is_reader(key) and not (self.once and hits):
                    hits += 1
                    self.mutation(Target(scene, geometry, record.pair.sender.memory[slot], page_of))

        scene.patch(worker, "_write", written)

    def due(self, scene: Scene) -> bool:
        return False


class Live(Fault):
    """In decode's pool, in a page that was verified when it landed, between two steps."""

    def __init__(self, mutation: Mutation) -> None:
        self.mutation, self.name = mutation, f"live page: {label(mutation)}"

    def strike(self, scene: Scene) -> None:
        engine = scene.pair.decode.engine
        seq = only(scene, scene.reader)
        memory = engine.pool.memory
        page = memory[seq.pages[TARGET]]
        self.mutation(Target(scene, engine.pool.geometry, page, lambda i: memory[seq.pages[i]]))


class Computed(Fault):
    """In prefill's pool, between two chunks of the prompt, in a page that was sent already or in one that is still being
    filled. Later chunks attend to it either way; only the second is sent with its damage."""

    def __init__(self, mutation: Mutation, sent: bool) -> None:
        self.mutation, self.sent = mutation, sent
        self.name = f"prefill page, {'sent already' if sent else 'not sent yet'}: {label(mutation)}"

    def due(self, scene: Scene) -> bool:
        seq, size = scene.prefilling(), scene.pair.prefill.engine.size
        if seq is None:
            return False
        return (
            seq.computed >= (TARGET + 1) * size
            if self.sent
            else TARGET * size < seq.computed < (TARGET + 1) * size
        )

    def strike(self, scene: Scene) -> None:
        engine, seq = scene.pair.prefill.engine, scene.prefilling()
        assert seq is not None
        memory = engine.pool.memory
        page = memory[seq.pages[TARGET]]
        self.mutation(Target(scene, engine.pool.geometry, page, lambda i: memory[seq.pages[i]]))


class Late(Fault):
    """A peer writes into a slot that it had been granted, long after decode copied the page out."""

    def __init__(self, mutation: Mutation) -> None:
        self.mutation, self.name = mutation, f"late write to the slot: {label(mutation)}"
        self._used: dict[int, tuple[int, int]] = {}  # page -> (slot, use)

    def arm(self, scene: Scene) -> None:
        self._used = {}
        worker = scene.pair.prefill
        (peer,) = scene.pair.decode._peers.values()
        write = worker._write

        def written(key: Key, record: Any, batch: int, pages: list[tuple[int, int]]) -> None:
            if scene.is_reader(key):
                self._used.update({index: (slot, peer.slots._uses[slot]) for index, slot in pages})
            write(key, record, batch, pages)

        scene.patch(worker, "_write", written)

    def strike(self, scene: Scene) -> None:
        slot, use = self._used[TARGET]
        (peer,) = scene.pair.decode._peers.values()
        (pair,) = scene.pair.prefill._pairs.values()
        assert peer.slots._uses[slot] == use, "the slot was granted to somebody else meanwhile"
        assert pair.sender is not None
        page: Page = pair.sender.memory[slot].copy()  # type: ignore[attr-defined]
        self.mutation(Target(scene, scene.pair.decode.engine.pool.geometry, page, lambda _: page))
        pair.sender.write(1 << 40, [(page, slot)])
        pair.sender.poll()


# ------------------------------------------------------------------------------------------------- page tables
class TableToFreed(Fault):
    """An entry of the reader's page table points at a page that was freed; it still holds another tenant's rows."""

    name = "page table: points at a freed page"

    def strike(self, scene: Scene) -> None:
        engine = scene.pair.decode.engine
        free = engine.pool._free[: engine.pool._free_count]
        (page, *_) = [p for p in free.tolist() if p in scene.victim_table]
        engine.rows.table[only(scene, scene.reader).row, TARGET] = page


class TableToOther(Fault):
    """An entry of the reader's page table points at a live page of another tenant's running request."""

    name = "page table: points at another request's page"

    def strike(self, scene: Scene) -> None:
        engine = scene.pair.decode.engine
        engine.rows.table[only(scene, scene.reader).row, TARGET] = only(scene, scene.bystander).pages[TARGET]


def only(scene: Scene, key: Key) -> EngineSequence:
    """The sequence of a request with one choice, in the decode engine."""
    (seq,) = scene.pair.decode.engine._live[key]
    assert seq.phase is Phase.RUNNING
    return seq


# ----------------------------------------------------------------------------------------------- the incident
class ClaimsAll(PrefillHandoff):
    """Says *complete*, with the real counts, as soon as what was computed has been sent, however little that is."""

    def _pump(self) -> list[Action]:
        out = super()._pump()
        sent = self._next == self._ready and not self._in_flight and not self._again
        if self.state is State.SENDING and self._computed is not None and sent:
            self.state = State.COMPLETE
            out += self._completes()
        return out


PLACEHOLDER = 0  # the token that stands for a prompt that was "rejected"


def replace_prompts(worker: PrefillWorker, chosen: Callable[[Job], bool]) -> None:
    """Make this worker compute one placeholder token in place of every chosen prompt, and claim that all is done."""
    submit = worker.engine.submit

    def submitting(job: Job) -> None:
        if not chosen(job):
            submit(job)
            return
        record = worker._records[job.key]
        record.job = replace(job, tokens=np.array([PLACEHOLDER], np.int64), prompt=1)
        record.machine.__class__ = ClaimsAll
        submit(record.job)

    worker.engine.submit = submitting  # type: ignore[method-assign]


class Incident(Fault):
    """Prefill replaces the prompt by one token, fills one page, and reports every page complete."""

    name = "the incident: one placeholder page, all reported complete"

    def arm(self, scene: Scene) -> None:
        replace_prompts(scene.pair.prefill, lambda job: scene.is_reader(job.key))

    def due(self, scene: Scene) -> bool:
        return False
