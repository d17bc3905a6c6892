"""The shape of a page, in a form that describes itself.

One page is one contiguous block: for every layer and KV head a *tile* (the rows of every component, K and V for
ordinary attention), then one 64-bit seal per tile, then zero padding up to a whole number of 4 KiB:

    [layer][head][component][row][row bytes]   seals: [layer][head] uint64   padding

So a page is one write on any transport, a tile is one linear scan for the hash, and a range of heads (tensor
parallel ranks) is a range of tiles. A latent cache (MLA) is a geometry with one component and one head; scales of a
quantised cache are one more component. Nothing here assumes an engine.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

VERSION = 1
STRIDE_ALIGNMENT = 4096  # bytes: what O_DIRECT, huge mappings and RDMA registrations all accept
ROW_ALIGNMENT = 8  # bytes: one hash lane

ITEM_SIZE = {"bf16": 2, "f16": 2, "f32": 4, "f8e4m3": 1, "u8": 1}
_NUMPY = {"bf16": np.uint16, "f16": np.float16, "f32": np.float32, "f8e4m3": np.uint8, "u8": np.uint8}


class GeometryError(ValueError):
    """A geometry that cannot be laid out, or two that differ; the message names the field."""


class Component(msgspec.Struct, frozen=True):
    """What one token keeps for one head under one name: `width` elements of `dtype`."""

    name: str
    dtype: str
    width: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, padded to whole hash lanes."""
        size = self.width * ITEM_SIZE[self.dtype]
        return -(-size // ROW_ALIGNMENT) * ROW_ALIGNMENT


class Geometry(msgspec.Struct, frozen=True):
    """Layout of every page in a pool. `layers` and `heads` are global ids, so that shards can name their part."""

    page_size: int  # tokens
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    components: tuple[Component, ...]
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise GeometryError(
                f"page layout version {self.version} is not known here (this is version {VERSION})"
            )
        if self.page_size < 1 or not self.layers or not self.heads or not self.components:
            raise GeometryError("a page needs at least one token, one layer, one head and one component")
        for part in self.components:
            if part.dtype not in ITEM_SIZE or part.width < 1:
                raise GeometryError(f"component {part.name!r}: cannot lay out {part.width} x {part.dtype!r}")
        for what, ids in (
            ("layers", self.layers),
            ("heads", self.heads),
            ("components", [c.name for c in self.components]),
        ):
            if len(set(ids)) != len(ids):
                raise GeometryError(f"{what} are named twice: {list(ids)}")

    @classmethod
    def attention(cls, page_size: int, layers: int, kv_heads: int, head_dim: int, dtype: str) -> Geometry:
        """K and V of ordinary (grouped-query) attention; dtype "bf16" or "f32"."""
        parts = (Component("k", dtype, head_dim), Component("v", dtype, head_dim))
        return cls(page_size, tuple(range(layers)), tuple(range(kv_heads)), parts)

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token, all layers and heads."""
        return len(self.layers) * len(self.heads) * sum(c.row_bytes for c in self.components)

    @property
    def tile_bytes(self) -> int:
        return self.page_size * sum(c.row_bytes for c in self.components)

    @property
    def tile_lanes(self) -> int:
        """64-bit hash lanes of one tile."""
        return self.tile_bytes // 8

    @property
    def tiles(self) -> int:
        return len(self.layers) * len(self.heads)

    @property
    def seals_offset(self) -> int:
        return self.tiles * self.tile_bytes

    @property
    def page_bytes(self) -> int:
        """Data and seals, without the padding."""
        return self.seals_offset + 8 * self.tiles

    @property
    def stride(self) -> int:
        """Bytes from one page to the next."""
        return -(-self.page_bytes // STRIDE_ALIGNMENT) * STRIDE_ALIGNMENT

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def offset(self, layer: int, head: int, component: int = 0, row: int = 0) -> int:
        """Byte offset in a page of a row; layer, head and component are slots (0-based), not global ids."""
        base = (layer * len(self.heads) + head) * self.tile_bytes
        base += self.page_size * sum(c.row_bytes for c in self.components[:component])
        return base + row * self.components[component].row_bytes

    def rows(self, memory: npt.NDArray[np.uint8], component: str) -> npt.NDArray[Any]:
        """A view of one component: [pages, layers, heads, page_size, width]; memory is uint8 [pages, stride].

        bf16 shows as its bits (uint16)."""
        index = [c.name for c in self.components].index(component)
        part = self.components[index]
        item = ITEM_SIZE[part.dtype]
        flat = memory.reshape(-1)[self.offset(0, 0, index) :]
        shape = (memory.shape[0], len(self.layers), len(self.heads), self.page_size, part.width)
        strides = (self.stride, len(self.heads) * self.tile_bytes, self.tile_bytes, part.row_bytes, item)
        view: npt.NDArray[Any] = np.ndarray(shape, _NUMPY[part.dtype], flat.data, 0, strides)
        return view

    def lanes(self, memory: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
        """A view of the hash lanes: uint64 [pages, layers, heads, tile_lanes], in the order of the page's bytes."""
        shape = (memory.shape[0], len(self.layers), len(self.heads), self.tile_lanes)
        strides = (self.stride, len(self.heads) * self.tile_bytes, self.tile_bytes, 8)
        return np.ndarray(shape, np.uint64, memory.reshape(-1).data, 0, strides)

    def seals(self, memory: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
        """A view of the seals: uint64 [pages, layers, heads]; memory is uint8 [pages, stride]."""
        flat = memory.reshape(-1)[self.seals_offset :]
        shape = (memory.shape[0], len(self.layers), len(self.heads))
        return np.ndarray(shape, np.uint64, flat.data, 0, (self.stride, 8 * len(self.heads), 8))

    def lane_rows(self) -> npt.NDArray[np.int32]:
        """For each lane of a tile the row (0..page_size-1) that it belongs to: int32 [tile_lanes]."""
        parts = [np.repeat(np.arange(self.page_size), c.row_bytes // 8) for c in self.components]
        return np.concatenate(parts).astype(np.int32)

    def encode(self) -> bytes:
        """One byte string for equal layouts, and only for them."""
        return msgspec.msgpack.encode(self)

    def fingerprint(self) -> str:
        return hashlib.blake2b(self.encode(), digest_size=16).hexdigest()


def differences(ours: Geometry, theirs: Geometry) -> list[str]:
    """What differs, in words: `page_size: 16 here, 32 there`. Empty when equal."""
    pairs = [(name, getattr(ours, name), getattr(theirs, name)) for name in Geometry.__struct_fields__]
    return [f"{name}: {a} here, {b} there" for name, a, b in pairs if a != b]


def empty_pages(geometry: Geometry, count: int) -> npt.NDArray[np.uint8]:
    """Zeroed memory for `count` pages: uint8 [count, stride], 4 KiB aligned."""
    raw = np.zeros(count * geometry.stride + STRIDE_ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % STRIDE_ALIGNMENT
    return raw[start : start + count * geometry.stride].reshape(count, geometry.stride)
