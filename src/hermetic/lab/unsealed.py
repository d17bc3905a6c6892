"""An engine that seals nothing and checks nothing, for benchmarks: what the product would cost without its promise.

It still copies: pages, slots, leases and the handoff are the product's own. Taken out are the row hashes and seal terms,
the lineage chains, every comparison of tags and counts of rows, and every verification. The one thing to know: it changes
its whole process, so it belongs into a process of its own (`hermetic.lab.process`), never beside a real worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hermetic.engine import engine as engine_module
from hermetic.kernels.base import I32, U64, GatherResult, Memory, ReadPlan
from hermetic.kernels.numba_cpu import NumbaKernels
from hermetic.kv.lineage import Chain
from hermetic.kv.pool import Pool
from hermetic.worker.core import Worker
from hermetic.worker.decode import DecodeWorker


class UnsealedKernels(NumbaKernels):
    """The product's kernels; rows are written without their seal terms and nothing is ever verified."""

    seals = False

    def attend(
        self, memory: Memory, layer: int, q: Tensor, out: Tensor, plan: ReadPlan, verify: bool
    ) -> None:
        super().attend(memory, layer, q, out, plan, False)

    def gather(
        self,
        memory: Memory,
        layer: int,
        pages: I32,
        length: int,
        words: U64,
        binds: U64,
        k_out: Tensor,
        v_out: Tensor,
        verify: bool,
    ) -> GatherResult:
        return super().gather(memory, layer, pages, length, words, binds, k_out, v_out, False)

    def verify_pages(
        self, memory: Memory, pages: I32, fills: I32, words: U64, binds: U64
    ) -> npt.NDArray[np.bool_]:
        return np.ones((len(pages), *self._places.shape), np.bool_)


class BareChain(Chain):
    """Counts tokens; hashes nothing and binds nothing."""

    def extend(self, tokens: Sequence[int] | npt.NDArray[np.int64]) -> U64:
        self._grow(-(-(self.length + len(tokens)) // self.page_size))
        self.length += len(tokens)
        return np.zeros(len(tokens), np.uint64)

    def append(self, token: int, term: int) -> None:
        if self.length % self.page_size == 0:
            self._grow(self.length // self.page_size + 1)
        self.length += 1


def _bind_nothing(tokens: U64, _positions: U64) -> U64:
    return np.zeros(len(tokens), np.uint64)


def _zero_unfilled(pool: Pool, page: int, fill: int) -> None:
    """The pool's own, without asking a tag whether this is the present fill."""
    for part in pool.geometry.components:
        pool.geometry.rows(pool.memory[page : page + 1], part.name)[:, :, :, fill:] = 0


def strip(worker: Worker) -> None:
    """Take sealing and checking out of this worker, and out of the whole process."""
    engine, runner = worker.engine, worker.engine.runner
    old = runner.kernels
    runner.kernels = UnsealedKernels(old.geometry, old.key, old.heads, old.scale, old.dtype)
    runner.kernels.warm()
    runner.verify = False
    pool: Any = engine.pool
    pool.check_read = lambda *_: None
    pool.check_write = lambda *_: None
    pool.set_tags = lambda *_: None
    pool.zero_unfilled = lambda page, fill: _zero_unfilled(engine.pool, page, fill)
    key: Any = engine._key
    key.bind = _bind_nothing
    bare: Any = engine
    bare._chain = lambda job: BareChain(engine._hasher, job.root, engine.size, key.bind)
    module: Any = engine_module
    module.check_rows = lambda *_: None
    module.check_piece = lambda *_: None
    module.unwritable = lambda *_: []
    if isinstance(worker, DecodeWorker):
        decode: Any = worker
        decode._verify_landed = lambda pages, *_: np.ones(len(pages), np.bool_)


if __name__ == "__main__":  # `python -m hermetic.lab.unsealed serve ...`: a server of such workers
    import os

    from hermetic.lab.__main__ import main
    from hermetic.lab.process import VARIABLE

    os.environ[VARIABLE] = "unsealed"
    main()
