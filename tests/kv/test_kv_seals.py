"""Seals against a third implementation in plain Python integers, and against every way of moving bytes about."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermetic.kv.geometry import Component, Geometry, empty_pages
from hermetic.kv.lineage import Chain, Hasher, Scope, Secret
from hermetic.kv.seals import SealKey

SECRET = Secret(bytes(range(32)))
HASHER = Hasher(SECRET)
MASK64, MASK32 = 2**64 - 1, 2**32 - 1
GEOMETRIES = (
    Geometry.attention(4, 2, 2, 4, "bf16"),
    Geometry.attention(3, 2, 1, 3, "f32"),
    Geometry(2, (5, 3), (7,), (Component("latent", "bf16", 9),)),
)
KEYS = {g: SealKey(SECRET, g) for g in GEOMETRIES}
geometry_and_fill = st.sampled_from(GEOMETRIES).flatmap(
    lambda g: st.tuples(st.just(g), st.integers(0, g.page_size), st.integers(0, 2**32))
)


def root(tenant: str = "t") -> bytes:
    return HASHER.root(Scope(tenant, "", "m", "n", "", "l", "p", SECRET.key_id))


def junk(geometry: Geometry, seed: int, pages: int = 1) -> np.ndarray:
    memory = empty_pages(geometry, pages)
    memory[:] = np.random.default_rng(seed).integers(0, 256, memory.shape, dtype=np.uint8)
    return memory


def reader(geometry: Geometry, pages: int, seed: int = 0, tenant: str = "t", model: str = "m") -> Chain:
    scope = Scope(tenant, "", model, "n", "", "l", "p", SECRET.key_id)
    chain = Chain(HASHER, HASHER.root(scope), geometry.page_size, KEYS[geometry].bind)
    chain.extend(np.random.default_rng(seed).integers(0, 1000, pages * geometry.page_size))
    return chain


def sealed(geometry: Geometry, pages: int, seed: int = 0) -> tuple[np.ndarray, Chain]:
    """Full pages of random bytes, sealed for their rightful reader."""
    memory, chain = junk(geometry, seed, pages), reader(geometry, pages, seed)
    KEYS[geometry].seal(memory, geometry.page_size, chain.words[:pages], chain.binds[:pages])
    return memory, chain


def good(
    geometry: Geometry, memory: np.ndarray, chain: Chain, pages: slice | list[int] = slice(None)
) -> np.ndarray:
    words, binds = chain.words[: chain.pages][pages], chain.binds[: chain.pages][pages]
    return KEYS[geometry].verify(memory, geometry.page_size, words, binds)


# ---------------------------------------------------------------- the third implementation
def secret_bytes(label: str, size: int) -> bytes:
    return hashlib.shake_256(SECRET.key + label.encode()).digest(size)


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def third_seal(
    geometry: Geometry, page: bytes, layer: int, head: int, fill: int, word: int, bind: int
) -> int:
    place = int.from_bytes(
        secret_bytes(f"place {geometry.layers[layer]} {geometry.heads[head]}", 8), "little"
    )
    total = mix(word ^ place) + bind
    tile = (layer * len(geometry.heads) + head) * geometry.tile_bytes
    before = 0
    for part in geometry.components:
        size = part.row_bytes
        low = secret_bytes(f"nh low {part.name}", geometry.page_size * size // 2)
        high = secret_bytes(f"nh high {part.name}", geometry.page_size * size // 2)
        for row in range(fill):
            for at in range(row * size, (row + 1) * size, 8):
                value = int.from_bytes(page[tile + before + at : tile + before + at + 8], "little")
                a, b = (int.from_bytes(s[at // 2 : at // 2 + 4], "little") for s in (low, high))
                total += ((value + a) & MASK32) * (((value >> 32) + b) & MASK32)
        before += geometry.page_size * size
    return total & MASK64


@settings(max_examples=40)
@given(given_=geometry_and_fill, word=st.integers(0, MASK64), bind=st.integers(0, MASK64))
def test_a_seal_is_what_its_docstring_says(given_: tuple[Geometry, int, int], word: int, bind: int) -> None:
    geometry, fill, seed = given_
    memory = junk(geometry, seed)
    key = KEYS[geometry]
    key.seal(memory, fill, np.array([word], np.uint64), np.array([bind], np.uint64))
    got = geometry.seals(memory)[0].tolist()
    page = memory[0].tobytes()
    wanted = [
        [third_seal(geometry, page, i, j, fill, word, bind) for j in range(len(geometry.heads))]
        for i in range(len(geometry.layers))
    ]
    assert got == wanted


@settings(max_examples=40)
@given(given_=geometry_and_fill)
def test_appending_a_row_adds_that_rows_terms_and_nothing_else(given_: tuple[Geometry, int, int]) -> None:
    geometry, fill, seed = given_
    key, lanes = KEYS[geometry], geometry.lanes(junk(geometry, seed))
    chain = reader(geometry, 1, seed)
    terms = key.bind(np.random.default_rng(seed).integers(0, 1000, geometry.page_size).astype(np.uint64),
                     np.arange(geometry.page_size, dtype=np.uint64))  # fmt: skip
    seal = key.masks(chain.words[:1])
    for row in range(fill):
        seal = seal + key.nh(lanes, row, row + 1) + terms[row]
    assert (seal == key.expected(lanes, fill, chain.words[:1], terms[:fill].sum(keepdims=True))).all()


def test_rows_past_the_fill_do_not_count_and_the_fill_itself_does() -> None:
    geometry = GEOMETRIES[0]
    key, memory = KEYS[geometry], junk(geometry, 1)
    words, binds = np.array([5], np.uint64), np.array([6], np.uint64)
    key.seal(memory, 2, words, binds)
    geometry.rows(memory, "k")[:, :, :, 2:] = 0
    geometry.rows(memory, "v")[:, :, :, 3:] = 77
    assert key.verify(memory, 2, words, binds).all()
    assert not key.verify(memory, 1, words, binds).any()
    assert not key.verify(memory, 3, words, binds).any()


def test_a_row_replaced_by_its_neighbour_breaks_its_tile_alone() -> None:
    geometry = GEOMETRIES[0]
    memory, chain = sealed(geometry, 1)
    rows = geometry.rows(memory, "k")
    rows[0, 0, 0, 2] = rows[0, 0, 0, 1]
    assert good(geometry, memory, chain).tolist() == [[[False, True], [True, True]]]


def swap(view: np.ndarray, one: object, two: object) -> None:
    keep = view[one].copy()  # type: ignore[index]
    view[one] = view[two]  # type: ignore[index]
    view[two] = keep  # type: ignore[index]


def test_two_rows_swapped_break_their_tile_alone() -> None:
    geometry = GEOMETRIES[0]
    memory, chain = sealed(geometry, 2)
    swap(geometry.rows(memory, "k"), (0, 1, 0, 0), (0, 1, 0, 3))
    swap(geometry.rows(memory, "v"), (0, 1, 0, 0), (0, 1, 0, 3))
    wanted = np.ones((2, 2, 2), bool)
    wanted[0, 1, 0] = False
    assert np.array_equal(good(geometry, memory, chain), wanted)


def test_k_and_v_swapped_break_their_tile_alone() -> None:
    geometry = GEOMETRIES[0]
    memory, chain = sealed(geometry, 1)
    k, v = geometry.rows(memory, "k"), geometry.rows(memory, "v")
    keep = k[0, 0, 1].copy()
    k[0, 0, 1] = v[0, 0, 1]
    v[0, 0, 1] = keep
    assert good(geometry, memory, chain).tolist() == [[[True, False], [True, True]]]


@pytest.mark.parametrize(
    ("one", "two"), [((0, 0, 0), (0, 1, 0)), ((0, 0, 0), (0, 0, 1)), ((0, 1, 1), (1, 1, 1))]
)
def test_tiles_swapped_with_their_seals_verify_nowhere(one: tuple[int, ...], two: tuple[int, ...]) -> None:
    """Between layers, between heads, and between two pages of one sequence."""
    geometry = GEOMETRIES[0]
    memory, chain = sealed(geometry, 2)
    lanes, seals = geometry.lanes(memory), geometry.seals(memory)
    swap(lanes, one, two)
    swap(seals, one, two)
    wanted = np.ones((2, 2, 2), bool)
    wanted[one] = wanted[two] = False
    assert np.array_equal(good(geometry, memory, chain), wanted)


def test_a_page_verifies_for_its_own_reader_only() -> None:
    geometry = GEOMETRIES[0]
    memory, chain = sealed(geometry, 3)
    assert good(geometry, memory, chain).all()
    strangers = {
        "another tenant": reader(geometry, 3, tenant="u"),
        "another model": reader(geometry, 3, model="n"),
        "other tokens": reader(geometry, 3, seed=1),
    }
    for who, other in strangers.items():
        assert not good(geometry, memory, other).any(), who
    assert not good(geometry, memory, chain, [1, 2, 0]).any()  # right tokens, wrong position


def test_the_same_tokens_at_the_same_place_behind_another_prefix_do_not_verify() -> None:
    geometry = GEOMETRIES[0]
    size, key = geometry.page_size, KEYS[GEOMETRIES[0]]
    one, two = (Chain(HASHER, root(), size, key.bind) for _ in range(2))
    one.extend([1] * size + [7] * size)
    two.extend([2] * size + [7] * size)
    assert one.binds[1] == two.binds[1]  # same tokens, same positions: only the mask tells them apart
    memory = junk(geometry, 3)
    key.seal(memory, size, one.words[1:2], one.binds[1:2])
    assert key.verify(memory, size, one.words[1:2], one.binds[1:2]).all()
    assert not key.verify(memory, size, two.words[1:2], two.binds[1:2]).any()


def test_a_token_or_position_changed_in_the_bind_sum_breaks_every_tile() -> None:
    geometry = GEOMETRIES[0]
    memory, chain = sealed(geometry, 1)
    key = KEYS[geometry]
    ids = np.random.default_rng(0).integers(0, 1000, geometry.page_size).astype(np.uint64)
    places = np.arange(geometry.page_size, dtype=np.uint64)
    for tokens, positions in (
        (ids + np.uint64(1), places),
        (ids, places + np.uint64(1)),
        (ids[::-1], places),
    ):
        binds = key.bind(tokens, positions).sum(keepdims=True)
        assert not key.verify(memory, geometry.page_size, chain.words[:1], binds).any()


@settings(max_examples=120)
@given(geometry=st.sampled_from(GEOMETRIES), seed=st.integers(0, 2**20), data=st.data())
def test_any_flipped_bit_of_a_tile_or_its_seal_is_seen_there_and_only_there(
    geometry: Geometry, seed: int, data: st.DataObject
) -> None:
    memory, chain = sealed(geometry, 1, seed)
    byte = data.draw(st.integers(0, geometry.page_bytes - 1))
    memory[0, byte] ^= np.uint8(1 << data.draw(st.integers(0, 7)))
    tile = (
        byte // geometry.tile_bytes if byte < geometry.seals_offset else (byte - geometry.seals_offset) // 8
    )
    assert np.flatnonzero(~good(geometry, memory, chain).ravel()).tolist() == [tile]


def test_secrets_of_another_cluster_verify_nothing() -> None:
    geometry = GEOMETRIES[0]
    memory, chain = sealed(geometry, 1)
    other = SealKey(Secret(bytes(32)), geometry)
    assert not other.verify(memory, geometry.page_size, chain.words[:1], chain.binds[:1]).any()


def test_nh_of_one_lane_meets_any_difference_with_at_most_the_promised_chance() -> None:
    """The theorem on an analogue that can be counted: 4-bit halves, every one of the 2^8 secrets, every pair of lanes.

    NH(x) - NH(y) = c mod 2^8 must hold for at most 2^4 of the 2^8 secrets, whatever x, y and c. With XOR it would not.
    """
    half = np.arange(16)
    a, b = half[:, None], half[None, :]
    lanes = [(low, high) for low in range(16) for high in range(16)]
    values = np.array([(((low + a) % 16) * ((high + b) % 16)).ravel() for low, high in lanes])  # [256, 256]
    worst = 0
    for i in range(0, 256, 5):
        gaps = (values[i] - np.delete(values, i, 0)) % 256
        counts = np.zeros((255, 256), np.int64)
        np.add.at(counts, (np.arange(255)[:, None], gaps), 1)
        worst = max(worst, int(counts.max()))
    assert worst <= 16
