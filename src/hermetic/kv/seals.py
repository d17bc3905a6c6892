"""Seals: 64 bits beside every (layer, KV head) tile that only this reader's own lineage can reproduce.

    seal = mask(word(i-1), layer, head) + sum over filled rows j of [ NH_j(bytes of row j) + bind(token_j, position_j) ]

all mod 2^64. NH (Black, Halevi, Krawczyk, Krovetz, Rogaway: UMAC, CRYPTO '99): for each 64-bit lane v with its two
32-bit secrets a, b: ((v mod 2^32) + a mod 2^32) * ((v >> 32) + b mod 2^32), products added mod 2^64. Each lane of a
tile has its own secrets, indexed by component, row slot and place in the row.

What it promises. Take two different contents of a tile's filled rows, chosen without knowledge of the secrets. For
any constant c, NH(x) - NH(y) = c holds with probability at most 2^-32 over the secrets: condition on all secrets but
those of one lane that differs, say in its low half; the equation is then linear in the other half's secret with a
nonzero factor mod 2^32, which at most 2^32 of 2^64 secret pairs satisfy (the theorem's proof). Since the statement
is about every difference c, it also covers a seal that was changed along with the bytes, and a mask or bind sum that
belongs to somebody else. Products are *added*: with XOR instead the bound does not hold. Intact bytes under another
identity differ by masks and binds alone; those come from keyed 64-bit mixing, so they agree with chance 2^-64 if the
mixing is taken as random, and the 128-bit lineage in the tag has to agree as well.

What it does not promise. It is keyed, not a MAC: someone who reads the secrets (or many seals together with the
memory they belong to) can forge. It sees nothing of rows at or past the fill.

This file is the plain numpy reference; kernels/ has the fast one, held equal to it by tests.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hermetic.kv.geometry import Geometry
from hermetic.kv.lineage import U64, Binder, Secret, mix

LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


class SealKey:
    """The secrets of one geometry, derived from the cluster's secret.

    low, high  uint64 [tile_lanes]     NH secrets, each below 2^32, in the order of a tile's lanes
    places     uint64 [layers, heads]  one word per (layer, head), by global id, for the masks
    bind       Binder
    """

    def __init__(self, secret: Secret, geometry: Geometry) -> None:
        self.geometry = geometry
        halves = []
        for half in ("low", "high"):
            parts = [
                np.frombuffer(
                    secret.derive(f"nh {half} {c.name}", geometry.page_size * c.row_bytes // 2), np.uint32
                )
                for c in geometry.components
            ]
            halves.append(np.concatenate(parts).astype(np.uint64))
        self.low, self.high = halves
        places = [
            [secret.derive(f"place {layer} {head}", 8) for head in geometry.heads]
            for layer in geometry.layers
        ]
        self.places: U64 = np.frombuffer(b"".join(b for row in places for b in row), np.uint64).reshape(
            len(geometry.layers), len(geometry.heads)
        )
        self.bind = Binder(secret)
        self.rows = geometry.lane_rows()

    def masks(self, words: U64) -> U64:
        """mask(word, layer, head): words uint64 [n] -> uint64 [n, layers, heads]."""
        return mix(words[:, None, None] ^ self.places)

    def nh(self, lanes: U64, first: npt.ArrayLike, end: npt.ArrayLike) -> U64:
        """Sum of the row hashes of rows first..end-1: lanes uint64 [n, layers, heads, tile_lanes] -> [n, layers, heads].

        first, end: int, or int [n]."""
        begin, stop = np.reshape(first, (-1, 1)), np.reshape(end, (-1, 1))
        chosen = (self.rows >= begin) & (self.rows < stop)
        low = ((lanes & LOW) + self.low) & LOW
        high = ((lanes >> HALF) + self.high) & LOW
        products = np.where(chosen[:, None, None, :], low * high, np.uint64(0))
        total: U64 = products.sum(-1, dtype=np.uint64)
        return total

    def expected(self, lanes: U64, fills: npt.ArrayLike, words: U64, binds: U64) -> U64:
        """The seals that pages with these bytes must carry for this reader: uint64 [n, layers, heads].

        lanes uint64 [n, layers, heads, tile_lanes]; fills int [n]; words, binds uint64 [n] from the reader's Chain."""
        return self.masks(words) + self.nh(lanes, 0, fills) + binds[:, None, None]

    def verify(
        self, memory: npt.NDArray[np.uint8], fills: npt.ArrayLike, words: U64, binds: U64
    ) -> npt.NDArray[np.bool_]:
        """Which tiles verify: bool [n, layers, heads]; memory uint8 [n, stride], whole pages."""
        good: npt.NDArray[np.bool_] = self.expected(
            self.geometry.lanes(memory), fills, words, binds
        ) == self.geometry.seals(memory)
        return good

    def seal(self, memory: npt.NDArray[np.uint8], fills: npt.ArrayLike, words: U64, binds: U64) -> None:
        """Write seals for bytes already there. For tests and imports that verified first; never for a row just computed."""
        self.geometry.seals(memory)[...] = self.expected(self.geometry.lanes(memory), fills, words, binds)
