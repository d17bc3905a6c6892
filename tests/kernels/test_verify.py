"""Every byte of a filled row, every seal and every part of the identity counts; bytes past the fill do not."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sealed_world import DEFAULT, LAYERS, SPECS, Spec, World, build

specs = st.sampled_from(SPECS)


def findings(world: World, layer: int) -> tuple[int, int, int]:
    """First bad page of sequence 0 as attend, gather and prefill_attend see it."""
    sequence, plan = world.sequences[0], world.plan([0], room=1)
    world.attend(plan, world.query(1), True, layer)
    args = (sequence.pages, sequence.length, sequence.chain.words, sequence.chain.binds)
    shape = (world.spec.kv_heads, sequence.length, world.spec.dim)
    k = torch.empty(shape, dtype=sequence.k.dtype)
    gathered = world.fast.gather(world.memory, layer, *args, k, k.clone(), True)
    q = world.query(1)
    prefilled = world.fast.prefill_attend(
        world.memory, layer, q, q.clone(), args[0], sequence.length - 1, args[2], args[3], True
    )
    return int(plan.bad[0]), gathered.bad, prefilled.bad


@settings(max_examples=80)
@given(spec=specs, length=st.integers(1, 70), data=st.data())
def test_one_flipped_bit_in_a_filled_row_or_a_seal_is_found_where_it_is(
    spec: Spec, length: int, data: st.DataObject
) -> None:
    world = build(spec, [length, 3])
    geometry, sequence = world.geometry, world.sequences[0]
    index = data.draw(st.integers(0, len(sequence.pages) - 1))
    layer = data.draw(st.integers(0, LAYERS - 1))
    head = data.draw(st.integers(0, spec.kv_heads - 1))
    component = data.draw(st.sampled_from([0, 1, None]))
    bit = data.draw(st.integers(0, 7))
    if component is None:
        at = geometry.seals_offset + 8 * (layer * spec.kv_heads + head) + data.draw(st.integers(0, 7))
    else:
        row = data.draw(st.integers(0, int(world.fills(sequence)[index]) - 1))
        size = geometry.components[component].row_bytes
        at = geometry.offset(layer, head, component, row) + data.draw(st.integers(0, size - 1))
    world.memory[sequence.pages[index], at] ^= np.uint8(1 << bit)
    wanted = np.ones((len(sequence.pages), LAYERS, spec.kv_heads), bool)
    wanted[index, layer, head] = False
    assert np.array_equal(world.good(sequence), wanted)
    assert world.good(world.sequences[1]).all()
    assert findings(world, layer) == (index, index, index)
    assert findings(world, 1 - layer) == (-1, -1, -1)


@settings(max_examples=40)
@given(spec=specs, length=st.integers(1, 70), seed=st.integers(0, 1000))
def test_bytes_past_the_fill_and_past_the_seals_do_not_count(spec: Spec, length: int, seed: int) -> None:
    world = build(spec, [length])
    before = [world.attend(world.plan(), world.query(1), True, layer) for layer in range(LAYERS)]
    sequence, geometry = world.sequences[0], world.geometry
    rng = np.random.default_rng(seed)
    page = world.memory[sequence.pages[-1:]]
    fill = int(world.fills(sequence)[-1])
    tail = world.key.rows >= fill
    lanes = geometry.lanes(page)
    # every unfilled bf16 and f32 element a NaN, or any bits at all
    noise = rng.integers(0, 2**64, lanes[..., tail].shape, dtype=np.uint64)
    lanes[..., tail] = np.uint64(0xFFFFFFFFFFFFFFFF) if seed % 2 else noise
    page[:, geometry.page_bytes :] = 0xAB
    world.memory[sequence.pages[-1:]] = page
    assert world.good(sequence).all()
    for layer in range(LAYERS):
        assert findings(world, layer) == (-1, -1, -1)
        assert torch.equal(world.attend(world.plan(), world.query(1), True, layer), before[layer])


def swap(world: World, a: tuple[int, int, int, int], b: tuple[int, int, int, int], size: int) -> None:
    """Exchange `size` bytes at two offsets (layer, head, component, row) of the first page."""
    page = world.memory[world.sequences[0].pages[0]]
    x, y = world.geometry.offset(*a), world.geometry.offset(*b)
    page[x : x + size], page[y : y + size] = page[y : y + size].copy(), page[x : x + size].copy()


def seal_swap(world: World, a: tuple[int, int], b: tuple[int, int]) -> None:
    seals = world.geometry.seals(world.memory)[world.sequences[0].pages[0]]
    seals[a], seals[b] = seals[b].copy(), seals[a].copy()


def rows_swapped(world: World) -> None:
    swap(world, (0, 0, 0, 2), (0, 0, 0, 5), world.geometry.components[0].row_bytes)


def keys_and_values_swapped(world: World) -> None:
    swap(world, (0, 0, 0, 0), (0, 0, 1, 0), world.geometry.tile_bytes // 2)


def one_row_swapped_between_keys_and_values(world: World) -> None:
    swap(world, (0, 0, 0, 4), (0, 0, 1, 4), world.geometry.components[0].row_bytes)


def layers_swapped_with_their_seals(world: World) -> None:
    swap(world, (0, 0, 0, 0), (1, 0, 0, 0), world.geometry.tile_bytes)
    seal_swap(world, (0, 0), (1, 0))


def heads_swapped_with_their_seals(world: World) -> None:
    swap(world, (0, 0, 0, 0), (0, 1, 0, 0), world.geometry.tile_bytes)
    seal_swap(world, (0, 0), (0, 1))


def page_of_another_sequence(world: World) -> None:
    world.sequences[0].pages[0] = world.sequences[1].pages[0]


def two_own_pages_swapped(world: World) -> None:
    pages = world.sequences[0].pages
    pages[0], pages[1] = pages[1], pages[0]


def another_word(world: World) -> None:
    world.sequences[0].chain.words[0] ^= np.uint64(1)


def another_bind(world: World) -> None:
    world.sequences[0].chain.binds[0] += np.uint64(1)


def everything_zero(world: World) -> None:
    world.memory[world.sequences[0].pages[0]] = 0


def everything_all_ones(world: World) -> None:
    world.memory[world.sequences[0].pages[0]] = 0xFF


MISTAKES = [
    rows_swapped,
    keys_and_values_swapped,
    one_row_swapped_between_keys_and_values,
    layers_swapped_with_their_seals,
    heads_swapped_with_their_seals,
    page_of_another_sequence,
    two_own_pages_swapped,
    another_word,
    another_bind,
    everything_zero,
    everything_all_ones,
]


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("spec", [SPECS[0], SPECS[1]])
def test_every_mistake_of_identity_is_found_by_every_reader(
    mistake: Callable[[World], None], spec: Spec
) -> None:
    world = build(spec, [40, 40])
    assert findings(world, 0) == (-1, -1, -1)
    mistake(world)
    assert findings(world, 0) == (0, 0, 0)
    assert not world.good(world.sequences[0])[0, 0].all()
    assert world.good(world.sequences[0])[2:].all()


@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_seal_is_valid_at_exactly_one_fill(wrong: int) -> None:
    world = build(DEFAULT, [16 + 9])
    sequence = world.sequences[0]
    fills = world.fills(sequence) + np.array([0, wrong], np.int32)
    good = world.fast.verify_pages(
        world.memory, sequence.pages, fills, sequence.chain.words[:2], sequence.chain.binds[:2]
    )
    assert good[0].all()
    assert not good[1].any()


@settings(max_examples=30)
@given(spec=specs, data=st.data(), parallel=st.booleans())
def test_verify_pages_agrees_with_the_reference_on_any_damage(
    spec: Spec, data: st.DataObject, parallel: bool
) -> None:
    world = build(spec, [33, 40])
    for _ in range(data.draw(st.integers(0, 8))):
        page = data.draw(st.integers(0, len(world.memory) - 1))
        world.memory[page, data.draw(st.integers(0, world.geometry.page_bytes - 1))] ^= np.uint8(0x10)
    chains = [s.chain for s in world.sequences]
    pages = np.concatenate([s.pages for s in world.sequences] + [np.array([-1, len(world.memory)], np.int32)])
    fills = np.concatenate([world.fills(s) for s in world.sequences] + [np.array([1, 1], np.int32)])
    fills[0] = data.draw(st.integers(-1, spec.page + 1))
    words = np.concatenate([c.words[: c.pages] for c in chains] + [np.zeros(2, np.uint64)])
    binds = np.concatenate([c.binds[: c.pages] for c in chains] + [np.zeros(2, np.uint64)])
    world.fast.alone = -1 if parallel and spec == DEFAULT else 1 << 20
    got = world.fast.verify_pages(world.memory, pages, fills, words, binds)
    world.fast.alone = 1 << 20
    assert np.array_equal(got, world.plain.verify_pages(world.memory, pages, fills, words, binds))


@settings(max_examples=30)
@given(spec=specs, lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5), steps=st.integers(1, 3))
def test_the_count_of_compared_tiles_is_what_arithmetic_says(
    spec: Spec, lengths: list[int], steps: int
) -> None:
    world = build(spec, lengths)
    plan = world.plan()
    for _ in range(steps):
        for layer in range(LAYERS):
            world.attend(plan, world.query(len(lengths)), True, layer)
    for b, length in enumerate(lengths):
        assert plan.tiles[b].tolist() == [steps * LAYERS * -(-length // spec.page)] * spec.kv_heads
    before = plan.tiles.copy()
    world.attend(plan, world.query(len(lengths)), False)
    assert np.array_equal(plan.tiles, before)


def test_only_the_sequence_with_the_bad_page_is_marked_and_its_lowest_page_wins() -> None:
    world = build(DEFAULT, [100, 100, 100])
    victim = world.sequences[1]
    for index, layer in ((5, 0), (2, 1), (4, 1)):
        at = world.geometry.offset(layer, 2, 1, 3)
        world.memory[victim.pages[index], at] ^= np.uint8(4)
    plan = world.plan()
    world.attend(plan, world.query(3), True, 0)
    assert plan.bad.tolist() == [-1, 5, -1]
    world.attend(plan, world.query(3), True, 1)
    assert plan.bad.tolist() == [-1, 2, -1]
    world.attend(plan, world.query(3), True, 0)
    assert plan.bad.tolist() == [-1, 2, -1]


def test_without_verify_no_damage_is_reported() -> None:
    world = build(DEFAULT, [40])
    everything_zero(world)
    plan = world.plan()
    world.attend(plan, world.query(1), False)
    assert plan.bad.tolist() == [-1]


@pytest.mark.parametrize("outside", [-1, -(2**31), 10_000, 2**31 - 1])
@pytest.mark.parametrize("verify", [False, True])
def test_a_page_number_outside_the_pool_is_reported_and_not_followed(outside: int, verify: bool) -> None:
    world = build(DEFAULT, [100, 100])
    world.sequences[0].pages[3] = outside
    plan = world.plan()
    out = world.attend(plan, world.query(2), verify)
    assert plan.bad.tolist() == [3, -1]
    assert plan.tiles.tolist() == [[6 * verify] * 3, [7 * verify] * 3]
    clean = world.plan([1])
    assert torch.equal(out[1], world.attend(clean, world.query(2)[1:], verify)[0])
    k = torch.empty(3, 100, 64, dtype=torch.bfloat16)
    sequence = world.sequences[0]
    rest = (sequence.pages, 100, sequence.chain.words, sequence.chain.binds)
    found = world.fast.gather(world.memory, 0, *rest, k, k.clone(), verify)
    assert found == (3, 18 * verify)


@pytest.mark.parametrize(("verify", "bad"), [(False, 7), (True, 6)])
def test_a_table_that_is_too_short_for_its_length_is_reported(verify: bool, bad: int) -> None:
    """Page 7 is not in the table; verified, page 6 is bad already, since it is not filled to its end."""
    world = build(DEFAULT, [100, 30])
    plan = world.plan()
    plan.lengths[0] = 2**31 - 1
    world.attend(plan, world.query(2), verify)
    assert plan.bad.tolist() == [bad, -1]
