"""The layout of a page, by hand: where every byte is, and that two layouts agree only when they are equal."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermetic.kv.geometry import Component, Geometry, GeometryError, differences, empty_pages

SMOLLM2 = Geometry.attention(16, 30, 3, 64, "bf16")

components = st.lists(
    st.builds(
        Component,
        st.sampled_from(["k", "v", "latent", "scale"]),
        st.sampled_from(["bf16", "f16", "f32", "f8e4m3", "u8"]),
        st.integers(1, 9),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda c: c.name,
)
ids = st.lists(st.integers(0, 40), min_size=1, max_size=4, unique=True)
geometries = st.builds(
    lambda size, layers, heads, parts: Geometry(size, tuple(layers), tuple(heads), tuple(parts)),
    st.integers(1, 7),
    ids,
    ids,
    components,
)


def test_smollm2_keeps_23040_bytes_a_token_and_360_kib_a_page_of_16() -> None:
    # 30 layers x 3 KV heads x (K and V) x 64 numbers x 2 bytes
    assert SMOLLM2.token_bytes == 30 * 3 * 2 * 64 * 2 == 23_040
    assert SMOLLM2.seals_offset == 16 * 23_040 == 360 * 1024
    assert SMOLLM2.tiles == 90
    assert SMOLLM2.page_bytes == 360 * 1024 + 90 * 8
    assert SMOLLM2.stride == 364 * 1024  # the next whole 4 KiB
    assert SMOLLM2.tile_lanes == 16 * 2 * 64 * 2 // 8 == 512


def test_a_prompt_needs_whole_pages() -> None:
    assert [SMOLLM2.pages_for(n) for n in (0, 1, 15, 16, 17, 32, 33)] == [0, 1, 1, 1, 2, 2, 3]


def test_a_row_is_padded_to_whole_hash_lanes() -> None:
    assert Component("k", "bf16", 5).row_bytes == 16
    assert Component("k", "f32", 3).row_bytes == 16
    assert Component("k", "u8", 1).row_bytes == 8
    assert Component("k", "bf16", 64).row_bytes == 128


def test_a_latent_cache_is_one_component_on_one_head() -> None:
    mla = Geometry(16, tuple(range(27)), (0,), (Component("latent", "bf16", 576),))
    assert mla.token_bytes == 27 * 576 * 2
    assert mla.tile_bytes == 16 * 1152
    memory = empty_pages(mla, 2)
    assert mla.rows(memory, "latent").shape == (2, 27, 1, 16, 576)
    assert mla.seals(memory).shape == (2, 27, 1)
    assert mla.lane_rows().tolist() == [r for r in range(16) for _ in range(144)]


@settings(max_examples=60)
@given(geometry=geometries, data=st.data())
def test_views_address_the_bytes_that_offset_names(geometry: Geometry, data: st.DataObject) -> None:
    memory = empty_pages(geometry, 2)
    page = data.draw(st.integers(0, 1))
    layer = data.draw(st.integers(0, len(geometry.layers) - 1))
    head = data.draw(st.integers(0, len(geometry.heads) - 1))
    index = data.draw(st.integers(0, len(geometry.components) - 1))
    row = data.draw(st.integers(0, geometry.page_size - 1))
    part = geometry.components[index]
    # By hand: the tiles before this one, the components before this one, the rows before this one.
    row_bytes = [
        -(-c.width * {"bf16": 2, "f16": 2, "f32": 4}.get(c.dtype, 1) // 8) * 8 for c in geometry.components
    ]
    tile = geometry.page_size * sum(row_bytes)
    byte = (layer * len(geometry.heads) + head) * tile + geometry.page_size * sum(row_bytes[:index])
    byte += row * row_bytes[index]
    assert geometry.offset(layer, head, index, row) == byte

    geometry.rows(memory, part.name).view(f"u{part_item(part)}")[page, layer, head, row] = 1
    touched = np.flatnonzero(memory[page])
    assert touched.tolist() == [byte + i * part_item(part) for i in range(part.width)]
    assert not memory[1 - page].any()

    memory[:] = 0
    lane = data.draw(st.integers(0, geometry.tile_lanes - 1))
    geometry.lanes(memory)[page, layer, head, lane] = 1
    at = int(np.flatnonzero(memory[page])[0])
    assert at == geometry.offset(layer, head) + 8 * lane
    assert geometry.lane_rows()[lane] == row_of(geometry, row_bytes, 8 * lane)

    memory[:] = 0
    geometry.seals(memory)[page, layer, head] = 1
    at = int(np.flatnonzero(memory[page])[0])
    assert at == geometry.tiles * tile + 8 * (layer * len(geometry.heads) + head)


def part_item(part: Component) -> int:
    return {"bf16": 2, "f16": 2, "f32": 4, "f8e4m3": 1, "u8": 1}[part.dtype]


def row_of(geometry: Geometry, row_bytes: list[int], byte: int) -> int:
    """The row that owns a byte of a tile, by walking over the tile."""
    for size in row_bytes:
        if byte < size * geometry.page_size:
            return byte // size
        byte -= size * geometry.page_size
    raise AssertionError("outside the tile")


@settings(max_examples=60)
@given(geometry=geometries)
def test_every_page_starts_on_4_kib_and_holds_its_tiles_and_seals(geometry: Geometry) -> None:
    assert geometry.stride % 4096 == 0
    assert geometry.seals_offset + 8 * geometry.tiles == geometry.page_bytes <= geometry.stride
    assert geometry.stride - geometry.page_bytes < 4096
    assert all(c.row_bytes % 8 == 0 for c in geometry.components)
    memory = empty_pages(geometry, 3)
    assert memory.ctypes.data % 4096 == 0
    assert memory.shape == (3, geometry.stride)
    assert not memory.any()


@settings(max_examples=100)
@given(a=geometries, b=geometries)
def test_two_layouts_encode_alike_if_and_only_if_they_are_equal(a: Geometry, b: Geometry) -> None:
    assert (a.encode() == b.encode()) == (a == b)
    assert (a.fingerprint() == b.fingerprint()) == (a == b)
    assert (differences(a, b) == []) == (a == b)
    assert msgspec.msgpack.decode(a.encode(), type=Geometry) == a


@pytest.mark.parametrize(
    "change",
    [
        {"page_size": 32},
        {"layers": tuple(range(29))},
        {"heads": (0, 1, 3)},
        {"components": (Component("v", "bf16", 64), Component("k", "bf16", 64))},
        {"components": (Component("k", "f16", 64), Component("v", "f16", 64))},
    ],
)
def test_any_changed_field_is_another_layout_and_is_named(change: dict[str, object]) -> None:
    other = msgspec.structs.replace(SMOLLM2, **change)
    assert other.fingerprint() != SMOLLM2.fingerprint()
    (text,) = differences(SMOLLM2, other)
    assert text.startswith(next(iter(change)))


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Geometry(0, (0,), (0,), (Component("k", "bf16", 1),)),
        lambda: Geometry(1, (), (0,), (Component("k", "bf16", 1),)),
        lambda: Geometry(1, (0,), (), (Component("k", "bf16", 1),)),
        lambda: Geometry(1, (0,), (0,), ()),
        lambda: Geometry(1, (0, 0), (0,), (Component("k", "bf16", 1),)),
        lambda: Geometry(1, (0,), (1, 1), (Component("k", "bf16", 1),)),
        lambda: Geometry(1, (0,), (0,), (Component("k", "bf16", 1), Component("k", "bf16", 2))),
        lambda: Geometry(1, (0,), (0,), (Component("k", "int4", 8),)),
        lambda: Geometry(1, (0,), (0,), (Component("k", "bf16", 0),)),
        lambda: Geometry(1, (0,), (0,), (Component("k", "bf16", 1),), version=2),
    ],
)
def test_a_layout_that_cannot_be_is_refused(bad: object) -> None:
    with pytest.raises(GeometryError):
        bad()  # type: ignore[operator]
