"""A model whose output is a function of exactly the KV rows that it attended to, and the answer that a prompt must get.

Row i of a sequence holds two 64-bit words, made from token i and from a digest of every row before it, as those rows are
read from the pool's memory through the page table. The next token is a hash of the digest of rows 0..i. So one row that is
not the sequence's own changes the digest, every later row, and (all but surely) the next token.

The one thing to know: `answer` computes what must come out from the tokens alone, in plain integers, with no page, table or
batch. Seals are made with the product's secrets, masks and binds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hermetic.engine.batch import Rows, Step
from hermetic.engine.runner import Result
from hermetic.engine.sequence import Sequence as Running
from hermetic.kv.geometry import Component, Geometry
from hermetic.kv.lineage import U64, mix
from hermetic.kv.pool import I32, Pool
from hermetic.kv.seals import HALF, LOW, SealKey

PAGE_SIZE = 4
VOCAB = 251
EOS = (0, 100, 200)
GEOMETRY = Geometry(PAGE_SIZE, (0,), (0,), (Component("k", "u8", 8), Component("v", "u8", 8)))

_ALL = (1 << 64) - 1
_TOKEN, _KEY, _VALUE, _NEXT = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7, 0xAEF17502108EF2D9
_U = np.uint64


# ------------------------------------------------------------------ what must come out
def answer(prompt: Sequence[int], max_tokens: int) -> tuple[list[int], str]:
    """The output tokens of a prompt and how they end: "stop" or "length"."""
    digest, tokens = 0, list(prompt)
    for position, token in enumerate(tokens):
        digest = _digest(digest, token, position)
    out: list[int] = []
    while True:
        out.append(_scrambled(digest ^ _NEXT) % VOCAB)
        if out[-1] in EOS:
            return out, "stop"
        if len(out) == max_tokens:
            return out, "length"
        digest = _digest(digest, out[-1], len(prompt) + len(out) - 1)


def _digest(digest: int, token: int, position: int) -> int:
    """Of rows 0..position, from that of the rows before."""
    first, second = _row(digest, token, position)
    key = _scrambled(first + _KEY * (position + 1) & _ALL)
    value = _scrambled(second ^ (_VALUE * (position + 1) & _ALL))
    return digest + key + value & _ALL


def _row(digest: int, token: int, position: int) -> tuple[int, int]:
    first = _scrambled(digest ^ (_TOKEN * (token + 1) & _ALL))
    return first, _scrambled(first + _TOKEN * (position + 1) & _ALL)


def _scrambled(x: int) -> int:
    """SplitMix64's finaliser."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _ALL
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _ALL
    return x ^ x >> 31


# ------------------------------------------------------------------------- the runner
class Kernels:
    """What decode and forks ask of a kernel set, over this geometry."""

    def __init__(self, key: SealKey) -> None:
        self.key = key

    def verify_pages(
        self, memory: npt.NDArray[np.uint8], pages: I32, fills: I32, words: U64, binds: U64
    ) -> npt.NDArray[np.bool_]:
        return self.key.verify(memory[pages], fills, words, binds)

    def copy_rows(
        self,
        source: npt.NDArray[np.uint8],
        source_pages: I32,
        target: npt.NDArray[np.uint8],
        target_pages: I32,
        fills: I32,
    ) -> None:
        for a, b, fill in zip(source_pages.tolist(), target_pages.tolist(), fills.tolist(), strict=True):
            filled = self.key.rows < fill
            old, new = source[a : a + 1], target[b : b + 1]
            new[...] = 0
            GEOMETRY.lanes(new)[..., filled] = GEOMETRY.lanes(old)[..., filled]
            GEOMETRY.seals(new)[...] = GEOMETRY.seals(old)


class FakeRunner:
    """`engine.runner.Runner` for the model above. `reads` is told what each sequence is about to read: (sequence, pages)."""

    def __init__(
        self,
        key: SealKey,
        pool: Pool,
        rows: Rows,
        verify: bool,
        reads: Callable[[Running, list[int]], None],
    ) -> None:
        self.kernels, self.pool, self.rows, self.verify = Kernels(key), pool, rows, verify
        self.model = SimpleNamespace(config=SimpleNamespace(vocab=VOCAB))
        self._key, self._reads = key, reads
        self._lanes = GEOMETRY.lanes(pool.memory)[:, 0, 0]
        self._seals = GEOMETRY.seals(pool.memory)[:, 0, 0]

    def run(self, step: Step) -> Result:
        batch = len(step.decode)
        rows = np.empty((len(step.tokens), 2), _U)
        digests = np.empty(batch + sum(p.last for p in step.pieces), _U)
        if batch:
            self._decode(step, rows, digests)
        at = batch
        for piece, start in zip(step.pieces, step.starts, strict=True):
            digest = self._piece(piece, start, step, rows)
            if piece.last:
                digests[at] = digest
                at += 1
        self._write(step, rows)
        logits = np.zeros((len(digests), VOCAB), np.float32)
        logits[np.arange(len(digests)), (mix(digests ^ _U(_NEXT)) % _U(VOCAB)).astype(np.intp)] = 1.0
        result = Result(torch.from_numpy(logits))
        if self.verify:
            self._verify(step, result)
        return result

    def _decode(self, step: Step, rows: U64, digests: U64) -> None:
        """One new row for each running sequence, after what it reads."""
        batch = len(step.decode)
        lengths = step.positions[:batch]
        width = int(-(-lengths.max() // PAGE_SIZE))
        for seq, length in zip(step.decode, lengths.tolist(), strict=True):
            self._reads(seq, seq.pages[: -(-length // PAGE_SIZE)].tolist())
        index = np.array([seq.row for seq in step.decode], np.intp)
        seen = self._attended(self.rows.table[index, :width], lengths)
        tokens, places = step.tokens[:batch].astype(_U), lengths.astype(_U)
        first = mix(seen ^ (tokens + _U(1)) * _U(_TOKEN))
        second = mix(first + (places + _U(1)) * _U(_TOKEN))
        rows[:batch, 0], rows[:batch, 1] = first, second
        digests[:batch] = seen + _contribution(first, second, places)

    def _attended(self, table: I32, lengths: npt.NDArray[np.int64]) -> U64:
        """The digest of each sequence's first rows, as they are in memory: table [B, P], lengths [B] -> [B]."""
        lanes = self._lanes[table]
        shape = (len(table), table.shape[1] * PAGE_SIZE)
        places = np.arange(shape[1], dtype=_U)
        each = _contribution(
            lanes[:, :, :PAGE_SIZE].reshape(shape), lanes[:, :, PAGE_SIZE:].reshape(shape), places
        )
        each[places[None, :] >= lengths[:, None].astype(_U)] = 0
        return each.sum(1, dtype=_U)

    def _piece(self, piece: Any, start: int, step: Step, rows: U64) -> int:
        """The rows of a part of a prompt; returns the digest behind its last."""
        seq, digest = piece.seq, 0
        before = -(-piece.start // PAGE_SIZE)
        self._reads(seq, seq.pages[:before].tolist())
        if before:
            lengths = np.array([piece.start], np.int64)
            digest = int(self._attended(seq.pages[None, :before], lengths)[0])
        tokens = step.tokens[start : start + piece.count].tolist()
        for i, token in enumerate(tokens):
            rows[start + i] = _row(digest, token, piece.start + i)
            digest = _digest(digest, token, piece.start + i)
        return digest

    def _write(self, step: Step, rows: U64) -> None:
        """Rows into their pages and their terms into the seals; terms come from the values, not from memory."""
        segment = np.repeat(np.arange(len(step.page)), step.count)
        page = step.page[segment]
        slot = step.first[segment] + np.arange(len(page)) - step.start[segment]
        terms = step.binds.copy()
        for part in range(2):
            lane, values = slot + part * PAGE_SIZE, rows[:, part]
            self._lanes[page, lane] = values
            low = ((values & LOW) + self._key.low[lane]) & LOW
            terms += low * (((values >> HALF) + self._key.high[lane]) & LOW)
        sums = np.add.reduceat(terms, step.start)
        begun = step.first > 0
        before = np.where(begun, self._seals[step.page], self._key.masks(step.word)[:, 0, 0])
        self._seals[step.page] = before + sums

    def _verify(self, step: Step, result: Result) -> None:
        """Every page of every sequence of the step, at the fill that it has now."""
        for i, seq in enumerate(step.decode):
            assert seq.row is not None
            count = -(-(int(step.positions[i]) + 1) // PAGE_SIZE)
            expected = self.rows.words[seq.row, :count], self.rows.binds[seq.row, :count]
            self._check(seq, int(step.positions[i]) + 1, *expected, result)
        for piece in step.pieces:
            seq, length = piece.seq, piece.start + piece.count
            count = -(-length // PAGE_SIZE)
            self._check(seq, length, seq.chain.words[:count], seq.chain.binds[:count], result)

    def _check(self, seq: Running, length: int, words: U64, binds: U64, result: Result) -> None:
        fills = np.clip(length - np.arange(len(words)) * PAGE_SIZE, 0, PAGE_SIZE)
        good = self._key.verify(self.pool.memory[seq.pages[: len(words)]], fills, words, binds).all((1, 2))
        result.tiles += len(words)
        if not good.all():
            result.bad[seq] = int(np.argmin(good))


def _contribution(first: U64, second: U64, places: U64) -> U64:
    """Of each row to the digest of what holds it."""
    return mix(first + (places + _U(1)) * _U(_KEY)) + mix(second ^ (places + _U(1)) * _U(_VALUE))


__all__ = ["EOS", "GEOMETRY", "PAGE_SIZE", "VOCAB", "FakeRunner", "Kernels", "answer"]
