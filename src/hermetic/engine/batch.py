"""The arrays of a step. Rows of the running batch live in fixed arrays; a step takes what it needs from them.

State belongs to a sequence, never to a row number: a row is cleared when its sequence leaves, and a row's arrays *are*
the sequence's own chain arrays while it runs (see Chain.adopt), so there is no second copy that could go stale.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hermetic.engine.sequence import Sequence
from hermetic.kv.lineage import U64, Binder
from hermetic.kv.pool import I32, Mismatch, Pool


class Rows:
    """Page tables and expectations of the running sequences: [capacity, width]."""

    def __init__(self, capacity: int, width: int) -> None:
        self.capacity, self.width = capacity, width
        self.table = np.zeros((capacity, width), np.int32)
        self.lineages: U64 = np.zeros((capacity, width, 2), np.uint64)
        self.words: U64 = np.zeros((capacity, width), np.uint64)
        self.binds: U64 = np.zeros((capacity, width), np.uint64)
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def enter(self, seq: Sequence) -> None:
        """Give a sequence a row; its page table and chain live there from now on."""
        row = self._free.pop()
        seq.row = row
        self.table[row, : len(seq.pages)] = seq.pages
        seq.chain.adopt(self.lineages[row], self.words[row], self.binds[row])

    def add_page(self, seq: Sequence, page: int) -> None:
        assert seq.row is not None
        self.table[seq.row, len(seq.pages)] = page
        seq.pages = np.append(seq.pages, np.int32(page))

    def leave(self, seq: Sequence) -> None:
        """Clear the row. The sequence's chain must not be used afterwards."""
        assert seq.row is not None
        for array in (self.table, self.lineages, self.words, self.binds):
            array[seq.row] = 0
        self._free.append(seq.row)
        seq.row = None


@dataclass(frozen=True)
class Piece:
    """A part of one prompt that is computed in this step: tokens start..start+count-1."""

    seq: Sequence
    start: int
    count: int

    @property
    def last(self) -> bool:
        return self.start + self.count == self.seq.job.prompt


@dataclass
class Step:
    """Everything one step computes. Row i < len(decode) is decode[i]'s next token; the pieces' rows follow."""

    decode: list[Sequence]
    pieces: list[Piece]
    tokens: npt.NDArray[np.int64]  # [T]
    positions: npt.NDArray[np.int64]  # [T]
    page: I32  # [S] write segments, as in kernels.WritePlan
    first: I32
    count: I32
    start: I32
    word: U64
    binds: U64  # [T]
    lineages: U64  # [S, 2] what each segment's page will be when the step is done
    starts: list[int]  # first row of each piece


def check_rows(pool: Pool, rows: Rows, decode: list[Sequence]) -> tuple[Sequence, Mismatch] | None:
    """Every page that the decode batch will read has the tag that its reader expects; else the first that has not."""
    if not decode:
        return None
    index = np.array([s.row for s in decode], np.intp)
    lengths = np.array([s.computed for s in decode], np.int64)
    size = pool.geometry.page_size
    width = int(-(-lengths.max() // size))
    filled = np.clip(lengths[:, None] - np.arange(width) * size, 0, size).astype(np.int32)
    used = filled > 0
    bad = pool.check_read(rows.table[index, :width][used], rows.lineages[index, :width][used], filled[used])
    if bad is None:
        return None
    return decode[int(np.nonzero(used)[0][bad.index])], bad


def check_piece(pool: Pool, piece: Piece) -> Mismatch | None:
    """The same for the pages before a piece of a prompt."""
    size = pool.geometry.page_size
    count = -(-piece.start // size)
    if not count:
        return None
    filled = np.clip(piece.start - np.arange(count) * size, 0, size).astype(np.int32)
    return pool.check_read(piece.seq.pages[:count], piece.seq.chain.lineages[:count], filled)


def unwritable(pool: Pool, rows: Rows, decode: list[Sequence], pieces: list[Piece]) -> list[Sequence]:
    """Sequences whose next row or piece would go to a page that is not theirs alone, or out of order."""
    size = pool.geometry.page_size
    found: list[Sequence] = []
    if decode:
        index = np.array([s.row for s in decode], np.intp)
        tail, first = np.divmod(np.array([s.computed for s in decode], np.int64), size)
        good = pool.writable(rows.table[index, tail], first.astype(np.int32))
        found += [decode[i] for i in np.flatnonzero(~good)]
    for piece in pieces:
        where = np.arange(piece.start // size, -(-(piece.start + piece.count) // size))
        first = np.maximum(piece.start - where * size, 0).astype(np.int32)
        if not pool.writable(piece.seq.pages[where], first).all():
            found.append(piece.seq)
    return found


def build(pool: Pool, rows: Rows, bind: Binder, decode: list[Sequence], pieces: list[Piece]) -> Step:
    """Extend every chain by what this step writes and lay out the step. Checks that each write is the owner's."""
    size = pool.geometry.page_size
    batch = len(decode)
    tokens = np.empty(batch + sum(p.count for p in pieces), np.int64)
    positions = np.empty_like(tokens)
    binds: U64 = np.empty(len(tokens), np.uint64)
    if batch:
        tokens[:batch] = [s.tokens[s.computed] for s in decode]
        positions[:batch] = [s.computed for s in decode]
        binds[:batch] = bind(tokens[:batch].astype(np.uint64), positions[:batch].astype(np.uint64))
        terms = binds[:batch].tolist()
        for i, seq in enumerate(decode):
            seq.chain.append(seq.tokens[seq.computed], terms[i])
    at = batch
    starts = []
    parts: list[tuple[I32, I32, I32, I32, U64, U64]] = []
    if batch:
        index = np.array([s.row for s in decode], np.intp)
        tail, first = np.divmod(positions[:batch], size)
        parts.append(
            (
                rows.table[index, tail],
                first.astype(np.int32),
                np.ones(batch, np.int32),
                np.arange(batch, dtype=np.int32),
                rows.words[index, tail],
                rows.lineages[index, tail],
            )
        )
    for piece in pieces:
        seq, end = piece.seq, piece.start + piece.count
        starts.append(at)
        tokens[at : at + piece.count] = seq.tokens[piece.start : end]
        positions[at : at + piece.count] = np.arange(piece.start, end)
        binds[at : at + piece.count] = seq.chain.extend(tokens[at : at + piece.count])
        where = np.arange(piece.start // size, -(-end // size))
        begin = np.maximum(where * size, piece.start)
        stop = np.minimum((where + 1) * size, end)
        parts.append(
            (
                seq.pages[where],
                (begin - where * size).astype(np.int32),
                (stop - begin).astype(np.int32),
                (begin - piece.start + at).astype(np.int32),
                seq.chain.words[where],
                seq.chain.lineages[where],
            )
        )
        at += piece.count
    page, begin_row, count, start, word, lineages = (
        np.concatenate(column) for column in zip(*parts, strict=True)
    )
    pool.check_write(page, begin_row)
    return Step(
        decode, pieces, tokens, positions, page, begin_row, count, start, word, binds, lineages, starts
    )
