"""Sequences written into a junk-filled pool, with the chains of their rightful readers: the ground the tests stand on."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hermetic.kernels.base import TORCH, Kernels, Memory, ReadPlan, WritePlan
from hermetic.kernels.numba_cpu import NumbaKernels
from hermetic.kernels.reference import ReferenceKernels
from hermetic.kv.geometry import Geometry, empty_pages
from hermetic.kv.lineage import Chain, Hasher, Secret
from hermetic.kv.seals import SealKey

LAYERS = 2


@dataclass(frozen=True)
class Spec:
    page: int
    kv_heads: int
    group: int
    dim: int
    dtype: str


# Each costs some seconds to compile when the cache is cold, so: few, and every corner in one of them. Rows of whole and
# of broken vectors, rows that need padding, pages below, at and above 16 rows, groups that fit registers and do not.
SPECS = (
    Spec(16, 3, 3, 64, "bf16"),
    Spec(16, 2, 1, 80, "f32"),
    Spec(1, 1, 4, 8, "bf16"),
    Spec(5, 2, 2, 96, "bf16"),
    Spec(32, 1, 8, 128, "bf16"),
    Spec(24, 2, 2, 24, "f32"),
    Spec(7, 2, 1, 5, "bf16"),
    Spec(3, 1, 3, 3, "f32"),
)
DEFAULT = SPECS[0]

SECRET = Secret(bytes(range(32)))


@dataclass
class Sequence:
    chain: Chain
    terms: np.ndarray
    pages: np.ndarray  # int32
    k: Tensor  # [layers, length, kv_heads, dim]
    v: Tensor

    @property
    def length(self) -> int:
        return self.chain.length


@dataclass
class World:
    spec: Spec
    geometry: Geometry
    key: SealKey
    fast: NumbaKernels
    plain: ReferenceKernels
    memory: Memory
    sequences: list[Sequence] = field(default_factory=list)

    def query(self, batch: int, seed: int = 1) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        shape = (batch, self.spec.kv_heads * self.spec.group, self.spec.dim)
        return torch.randn(shape, generator=generator).to(TORCH[self.spec.dtype])

    def plan(self, chosen: list[int] | None = None, room: int = 0) -> ReadPlan:
        """What these sequences read, all rows of each; `room` more table columns than needed, pointing nowhere."""
        some = self.sequences if chosen is None else [self.sequences[i] for i in chosen]
        width = max(len(s.pages) for s in some) + room
        table = np.full((len(some), width), -7, np.int32)
        words, binds = (np.full((len(some), width), 3, np.uint64) for _ in range(2))
        for b, s in enumerate(some):
            held = len(s.pages)
            table[b, :held] = s.pages
            words[b, :held], binds[b, :held] = s.chain.words[:held], s.chain.binds[:held]
        lengths = np.array([s.length for s in some], np.int32)
        tiles = np.zeros((len(some), self.spec.kv_heads), np.int64)
        return ReadPlan(table, lengths, words, binds, np.full(len(some), -1, np.int32), tiles)

    def attend(
        self, plan: ReadPlan, q: Tensor, verify: bool = True, layer: int = 0, kernels: Kernels | None = None
    ) -> Tensor:
        out = torch.full_like(q, 7.0)
        (kernels or self.fast).attend(self.memory, layer, q, out, plan, verify)
        return out

    def fills(self, sequence: Sequence) -> np.ndarray:
        at = np.arange(len(sequence.pages)) * self.spec.page
        return np.minimum(sequence.length - at, self.spec.page).astype(np.int32)

    def good(self, sequence: Sequence) -> np.ndarray:
        """verify_pages of a sequence: bool [pages, layers, kv_heads]."""
        held = len(sequence.pages)
        chain = sequence.chain
        return self.fast.verify_pages(
            self.memory, sequence.pages, self.fills(sequence), chain.words[:held], chain.binds[:held]
        )


def write_plan(world: World, sequence: Sequence, first: int, end: int) -> WritePlan:
    """Rows first..end-1 of a sequence, k and v starting at row `first`."""
    size = world.spec.page
    pages = np.arange(first // size, -(-end // size))
    begin = np.maximum(pages * size, first)
    count = np.minimum((pages + 1) * size, end) - begin
    return WritePlan(
        page=sequence.pages[pages],
        first=(begin - pages * size).astype(np.int32),
        count=count.astype(np.int32),
        start=(begin - first).astype(np.int32),
        word=sequence.chain.words[pages],
        binds=sequence.terms[first:end],
    )


def write(world: World, sequence: Sequence, cuts: list[int], kernels: Kernels | None = None) -> None:
    edges = sorted({0, sequence.length, *(c for c in cuts if c < sequence.length)})
    for first, end in pairwise(edges):
        plan = write_plan(world, sequence, first, end)
        for layer in range(LAYERS):
            k, v = sequence.k[layer, first:end], sequence.v[layer, first:end]
            (kernels or world.fast).write(world.memory, layer, k, v, plan)


_made: dict[Spec, tuple[Geometry, SealKey, NumbaKernels, ReferenceKernels]] = {}


def build(spec: Spec, lengths: list[int], seed: int = 0, cuts: list[int] | None = None) -> World:
    """Sequences of these lengths on shuffled pages of a pool full of junk, written by the fast kernels."""
    if spec not in _made:
        geometry = Geometry.attention(spec.page, LAYERS, spec.kv_heads, spec.dim, spec.dtype)
        key = SealKey(SECRET, geometry)
        rest = (geometry, key, spec.kv_heads * spec.group, spec.dim**-0.5, spec.dtype)
        _made[spec] = (geometry, key, NumbaKernels(*rest), ReferenceKernels(*rest))
    geometry, key, fast, plain = _made[spec]
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    counts = [geometry.pages_for(n) for n in lengths]
    memory = empty_pages(geometry, sum(counts) + 2)
    memory[:] = rng.integers(0, 256, memory.shape, dtype=np.uint8)
    world = World(spec, geometry, key, fast, plain, memory)
    order = rng.permutation(len(memory)).astype(np.int32)
    hasher = Hasher(SECRET)
    for length, count in zip(lengths, counts, strict=True):
        chain = Chain(hasher, rng.bytes(24), spec.page, key.bind)
        terms = chain.extend(rng.integers(0, 50000, length))
        pages, order = order[:count], order[count:]
        shape = (LAYERS, length, spec.kv_heads, spec.dim)
        k, v = (torch.randn(shape, generator=generator).to(TORCH[spec.dtype]) for _ in range(2))
        sequence = Sequence(chain, terms, pages, k, v)
        world.sequences.append(sequence)
        write(world, sequence, cuts or [])
    return world
