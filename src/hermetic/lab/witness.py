"""A witness of what attention read: every K and V row by its bytes, looked up in an index of who wrote it.

The witness stands between the runner and its kernels. Rows are indexed when they are written, by the values that the
model computed; before every attention call the rows that the call is about to read are taken from the pages and looked
up. The one thing to know: it trusts bytes only. Tags, seals, page tables and lineages could all be wrong, and it would
still see whose keys and values went into whose answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hermetic.engine.batch import Step
from hermetic.engine.runner import Result
from hermetic.engine.sequence import Sequence
from hermetic.kernels.base import I32, U64, GatherResult, Kernels, Memory, ReadPlan, WritePlan
from hermetic.kv.geometry import Geometry
from hermetic.lab.pair import LabPair
from hermetic.worker.core import Worker

COMPONENTS = ("k", "v")


class Owner(NamedTuple):
    """Whose sequence a row was computed for."""

    tenant: str
    ticket: bytes
    model: str


class Place(NamedTuple):
    """Where in its sequence a row belongs."""

    position: int
    layer: int
    head: int
    component: str


class Origin(NamedTuple):
    """A row as it was written: for whom, where, and for which token."""

    owner: Owner
    place: Place
    token: int


@dataclass(frozen=True)
class Stranger:
    """One row that attention read and that was not the reader's own row of that place."""

    worker: str
    step: int  # of that worker, counted from 1
    reader: Owner
    place: Place  # what the reader took it for
    page: int
    origins: tuple[Origin, ...]  # every row ever written with these bytes; empty when there is none


@dataclass
class Witness:
    """Watches any number of pairs. `strangers` is what it saw; `rows_read` how many rows it looked up."""

    strangers: list[Stranger] = field(default_factory=list)
    rows_read: int = 0
    _index: dict[bytes, dict[Origin, None]] = field(default_factory=dict, repr=False)
    # The last row written for each place, by position: equal rows need no look-up.
    _own: dict[tuple[Owner, int, int, str], list[bytes]] = field(default_factory=dict, repr=False)

    def watch(self, pair: LabPair) -> None:
        """Stand between both workers' runners and their kernels."""
        for worker in (pair.prefill, pair.decode):
            _Watch(self, pair, worker)

    def wrote(self, rows: Iterable[bytes], origins: Iterable[Origin]) -> None:
        for row, origin in zip(rows, origins, strict=True):
            self._index.setdefault(row, {})[origin] = None
            position, layer, head, component = origin.place
            own = self._own.setdefault((origin.owner, layer, head, component), [])
            own += [b""] * (position + 1 - len(own))
            own[position] = row

    def saw(self, worker: str, step: int, reader: Owner, first: Place, page: int, rows: list[bytes]) -> None:
        """The reader is about to read these rows for its own of `first` and the positions after it."""
        self.rows_read += len(rows)
        start, layer, head, component = first
        own = self._own.get((reader, layer, head, component), [])
        if own[start : start + len(rows)] == rows:
            return
        for i, row in enumerate(rows):
            place = first._replace(position=start + i)
            origins = tuple(self._index.get(row, ()))
            if not any(o.owner == reader and o.place == place for o in origins):
                self.strangers.append(Stranger(worker, step, reader, place, page, origins))

    # ----------------------------------------------------------------- questions

    def read_by(self, ticket: bytes) -> list[Stranger]:
        """Every row that this request's attention read and that was not its own."""
        return [s for s in self.strangers if s.reader.ticket == ticket]

    def leaked_to(self, ticket: bytes) -> list[Origin]:
        """Rows of other tenants among them, without those whose bytes are the reader's tenant's own as well."""
        found: dict[Origin, None] = {}
        for stranger in self.read_by(ticket):
            tenants = {o.owner.tenant for o in stranger.origins}
            if tenants and stranger.reader.tenant not in tenants:
                found |= dict.fromkeys(stranger.origins)
        return list(found)


class _Watch:
    """The kernels of one runner, looked over the shoulder. Everything not named here is the kernels' own."""

    def __init__(self, witness: Witness, pair: LabPair, worker: Worker) -> None:
        runner = worker.engine.runner
        self._witness, self._pair = witness, pair
        self._worker, self._model = worker.info.worker, worker.info.model
        self._kernels: Kernels = runner.kernels
        self._run = runner.run
        self._step: Step | None = None
        self._steps = 0
        self._piece = 0  # which piece of the step the next prefill_attend of this layer is for
        runner.kernels = self  # type: ignore[assignment]
        runner.run = self.run  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    @property
    def _geometry(self) -> Geometry:
        return self._kernels.geometry

    def run(self, step: Step) -> Result:
        self._step = step
        self._steps += 1
        return self._run(step)

    def _owner(self, seq: Sequence) -> Owner:
        key = seq.job.key
        return Owner(self._pair.answer(key).submit.scope, key.ticket, self._model)

    # -------------------------------------------------------------------- kernels

    def write(self, memory: Memory, layer: int, k: Tensor, v: Tensor, plan: WritePlan) -> None:
        assert self._step is not None
        step, self._piece = self._step, 0
        owners = [self._owner(s) for s in step.decode]
        for piece in step.pieces:
            owners += [self._owner(piece.seq)] * piece.count
        for component, tensor in zip(COMPONENTS, (k, v), strict=True):
            for head in range(self._kernels.kv_heads):
                origins = [
                    Origin(owner, Place(position, layer, head, component), token)
                    for owner, position, token in zip(
                        owners, step.positions.tolist(), step.tokens.tolist(), strict=True
                    )
                ]
                self._witness.wrote(_rows(_bits(tensor[:, head])), origins)
        self._kernels.write(memory, layer, k, v, plan)

    def attend(
        self, memory: Memory, layer: int, q: Tensor, out: Tensor, plan: ReadPlan, verify: bool
    ) -> None:
        assert self._step is not None
        for i, seq in enumerate(self._step.decode):
            self._look(memory, layer, seq, plan.table[i], int(plan.lengths[i]))
        self._kernels.attend(memory, layer, q, out, plan, verify)

    def prefill_attend(
        self,
        memory: Memory,
        layer: int,
        q: Tensor,
        out: Tensor,
        pages: I32,
        start: int,
        words: U64,
        binds: U64,
        verify: bool,
    ) -> GatherResult:
        assert self._step is not None
        seq = self._step.pieces[self._piece].seq
        self._piece += 1
        self._look(memory, layer, seq, pages, start + q.shape[0])
        return self._kernels.prefill_attend(memory, layer, q, out, pages, start, words, binds, verify)

    def _look(self, memory: Memory, layer: int, seq: Sequence, table: I32, length: int) -> None:
        geometry, owner = self._geometry, self._owner(seq)
        size = geometry.page_size
        pages = table[: geometry.pages_for(length)].tolist()
        for component in COMPONENTS:
            view = geometry.rows(memory, component)
            for i, page in enumerate(pages):
                filled = min(size, length - i * size)
                for head in range(len(geometry.heads)):
                    place = Place(i * size, layer, head, component)
                    rows = _rows(view[page, layer, head, :filled])
                    self._witness.saw(self._worker, self._steps, owner, place, page, rows)


def _bits(rows: Tensor) -> npt.NDArray[np.uint8]:
    """[n, dim] of the model's dtype -> its bytes, uint8 [n, bytes]."""
    dense = rows.detach().contiguous()
    raw: npt.NDArray[np.uint8] = dense.view(torch.uint8).numpy()
    return raw


def _rows(rows: npt.NDArray[Any]) -> list[bytes]:
    """The bytes of each row of [n, width]."""
    dense = np.ascontiguousarray(rows)
    size = dense.shape[1] * dense.itemsize
    raw = dense.tobytes()
    return [raw[i : i + size] for i in range(0, len(raw), size)]
