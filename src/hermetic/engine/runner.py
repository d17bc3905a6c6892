"""One step of the model over pages: write the new rows, attend, and say whether every byte that was read is our own.

The runner computes and reports; it emits nothing. What it returns may be used only for sequences that are not in
`bad`, and the engine sees to that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hermetic.engine.batch import Rows, Step
from hermetic.engine.sequence import Sequence
from hermetic.kernels.base import Kernels, ReadPlan, WritePlan
from hermetic.kv.pool import Pool
from hermetic.model.decoder import Decoder


@dataclass
class Result:
    """logits float32 [decode rows + finished pieces, vocab]; `bad`: sequence -> index of its first bad page."""

    logits: Tensor
    bad: dict[Sequence, int] = field(default_factory=dict)
    tiles: int = 0  # tiles verified while they were read


class Runner:
    """Model, kernels and pool of one worker."""

    def __init__(self, model: Decoder, kernels: Kernels, pool: Pool, rows: Rows, verify_reads: bool) -> None:
        self.model, self.kernels, self.pool, self.rows, self.verify = model, kernels, pool, rows, verify_reads

    def run(self, step: Step) -> Result:
        batch, memory, kernels = len(step.decode), self.pool.memory, self.kernels
        writes = WritePlan(step.page, step.first, step.count, step.start, step.word, step.binds)
        reads = self._reads(step)
        found = [-1] * len(step.pieces)
        piece_tiles = 0
        out: Tensor | None = None

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            nonlocal piece_tiles
            nonlocal out
            kernels.write(memory, layer, k, v, writes)
            if out is None:  # once a step: the model is done with it when the next layer attends
                out = torch.empty_like(q, memory_format=torch.contiguous_format)
            if reads is not None and not step.pieces:
                kernels.attend(memory, layer, q, out, reads, self.verify)
                return out
            if reads is not None:
                kernels.attend(memory, layer, q[:batch], out[:batch], reads, self.verify)
            for i, (piece, start) in enumerate(zip(step.pieces, step.starts, strict=True)):
                chain, end = piece.seq.chain, start + piece.count
                count = chain.pages
                got = kernels.prefill_attend(
                    memory, layer, q[start:end], out[start:end], piece.seq.pages[:count], piece.start,
                    chain.words[:count], chain.binds[:count], self.verify,
                )  # fmt: skip
                piece_tiles += got.tiles
                if got.bad >= 0 and (found[i] < 0 or got.bad < found[i]):
                    found[i] = got.bad
            return out

        last = [s + p.count - 1 for s, p in zip(step.starts, step.pieces, strict=True) if p.last]
        rows = torch.tensor([*range(batch), *last], dtype=torch.int64)
        with torch.inference_mode():
            logits = self.model.forward(
                torch.from_numpy(step.tokens), torch.from_numpy(step.positions), attend, rows, decode=batch
            )
        result = Result(logits, tiles=piece_tiles)
        if reads is not None:
            result.tiles += int(reads.tiles.sum())
            result.bad = {step.decode[i]: int(reads.bad[i]) for i in np.flatnonzero(reads.bad >= 0)}
        result.bad.update({p.seq: bad for p, bad in zip(step.pieces, found, strict=True) if bad >= 0})
        return result

    def _reads(self, step: Step) -> ReadPlan | None:
        if not step.decode:
            return None
        index = np.array([s.row for s in step.decode], np.intp)
        lengths = (step.positions[: len(index)] + 1).astype(np.int32)
        width = self.pool.geometry.pages_for(int(lengths.max()))
        return ReadPlan(
            table=self.rows.table[index, :width],
            lengths=lengths,
            words=self.rows.words[index, :width],
            binds=self.rows.binds[index, :width],
            bad=np.full(len(index), -1, np.int32),
            tiles=np.zeros((len(index), len(self.pool.geometry.heads)), np.int64),
        )
