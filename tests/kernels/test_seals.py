"""Rows written by the kernels carry exactly the seals that kv/seals.py defines, however they were cut into writes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sealed_world import DEFAULT, LAYERS, SPECS, Spec, build, write, write_plan

from hermetic.kernels.base import KernelError, WritePlan
from hermetic.kernels.numba_cpu import NumbaKernels

specs = st.sampled_from(SPECS)
lengths = st.lists(st.integers(1, 70), min_size=1, max_size=3)
cuts = st.lists(st.integers(1, 69), max_size=6)


@settings(max_examples=60)
@given(spec=specs, lengths=lengths, cuts=cuts, seed=st.integers(0, 1000))
def test_written_pages_verify_by_the_definition_and_hold_the_rows(
    spec: Spec, lengths: list[int], cuts: list[int], seed: int
) -> None:
    world = build(spec, lengths, seed, cuts)
    for sequence in world.sequences:
        held, fills = len(sequence.pages), world.fills(sequence)
        pages = np.ascontiguousarray(world.memory[sequence.pages])
        chain = sequence.chain
        assert world.key.verify(pages, fills, chain.words[:held], chain.binds[:held]).all()
        assert world.good(sequence).all()
        for name, rows in (("k", sequence.k), ("v", sequence.v)):
            bits = rows.view(torch.int16) if spec.dtype == "bf16" else rows.view(torch.int32)
            stored = world.geometry.rows(pages, name).view(np.int16 if spec.dtype == "bf16" else np.int32)
            flat = stored.transpose(1, 0, 3, 2, 4).reshape(LAYERS, -1, spec.kv_heads, spec.dim)
            assert np.array_equal(flat[:, : sequence.length], bits.numpy())


@settings(max_examples=40)
@given(spec=specs, length=st.integers(1, 70), first=cuts, second=cuts)
def test_any_cut_of_the_same_rows_leaves_the_same_bytes(
    spec: Spec, length: int, first: list[int], second: list[int]
) -> None:
    assert np.array_equal(build(spec, [length], 5, first).memory, build(spec, [length], 5, second).memory)


@settings(max_examples=40)
@given(spec=specs, lengths=lengths, cuts=cuts, parallel=st.booleans())
def test_the_reference_writes_the_same_bytes(
    spec: Spec, lengths: list[int], cuts: list[int], parallel: bool
) -> None:
    world, other = build(spec, lengths, 3), build(spec, lengths, 3)
    for w, kernels in ((world, world.fast), (other, other.plain)):
        w.memory[:] = np.random.default_rng(9).integers(0, 256, w.memory.shape, dtype=np.uint8)
        world.fast.alone = -1 if parallel and spec == DEFAULT else 1 << 20
        for sequence in w.sequences:
            write(w, sequence, cuts, kernels)
    world.fast.alone = 1 << 20
    assert np.array_equal(world.memory, other.memory)


@pytest.mark.parametrize("spec", [s for s in SPECS if s.dim in (3, 5)])
def test_padding_of_a_row_is_written_as_zero(spec: Spec) -> None:
    world = build(spec, [2 * spec.page])
    part = world.geometry.components[0]
    used = spec.dim * world.fast.item
    assert part.row_bytes > used
    for page in world.sequences[0].pages:
        rows = world.memory[page, : world.geometry.seals_offset].reshape(-1, part.row_bytes)
        assert not rows[:, used:].any()


@pytest.mark.parametrize("spec", SPECS)
def test_rows_may_be_views_of_a_fused_projection(spec: Spec) -> None:
    world, other = build(spec, [20], 2), build(spec, [20], 2)
    sequence = other.sequences[0]
    fused = torch.full((20, spec.kv_heads * (spec.group + 2) * spec.dim), 9.0, dtype=sequence.k.dtype)
    size = spec.kv_heads * spec.dim
    k, v = (
        x.unflatten(1, (spec.kv_heads, spec.dim)) for x in (fused[:, -2 * size : -size], fused[:, -size:])
    )
    for layer in range(LAYERS):
        k.copy_(sequence.k[layer])
        v.copy_(sequence.v[layer])
        other.fast.write(other.memory, layer, k, v, write_plan(other, sequence, 0, 20))
    assert np.array_equal(world.memory, other.memory)


def _plan(**changes: object) -> WritePlan:
    values = {"page": 1, "first": 0, "count": 2, "start": 0}
    arrays = {n: np.array([changes.get(n, x)], np.int32) for n, x in values.items()}
    return WritePlan(**arrays, word=np.zeros(1, np.uint64), binds=np.zeros(2, np.uint64))


@pytest.mark.parametrize(
    "change",
    [{"page": -1}, {"page": 99}, {"first": 15}, {"first": -1}, {"count": -1}, {"start": 1}, {"start": -1}],
)
def test_a_segment_that_leads_outside_is_refused_before_anything_is_written(change: dict[str, int]) -> None:
    world = build(DEFAULT, [5])
    before = world.memory.copy()
    rows = torch.ones(2, DEFAULT.kv_heads, DEFAULT.dim, dtype=torch.bfloat16)
    for kernels in (world.fast, world.plain):
        with pytest.raises(KernelError, match="segment 0"):
            kernels.write(world.memory, 0, rows, rows, _plan(**change))
    assert np.array_equal(world.memory, before)


def test_a_plan_that_names_a_page_twice_is_refused() -> None:
    two, zero = np.full(2, 4, np.int32), np.zeros(2, np.int32)
    with pytest.raises(KernelError, match="twice"):
        WritePlan(two, zero, zero, zero, np.zeros(2, np.uint64), np.zeros(2, np.uint64))


def test_tensors_of_another_type_or_shape_are_refused() -> None:
    world = build(DEFAULT, [5])
    good = torch.ones(2, DEFAULT.kv_heads, DEFAULT.dim, dtype=torch.bfloat16)
    wide = torch.ones(2, DEFAULT.kv_heads, 2 * DEFAULT.dim, dtype=torch.bfloat16)
    for bad in (good.float(), good[:, :1], wide[:, :, ::2]):
        with pytest.raises(KernelError, match="k must be"):
            world.fast.write(world.memory, 0, bad, good, _plan())
    with pytest.raises(KernelError, match="layer 2"):
        world.fast.write(world.memory, LAYERS, good, good, _plan())
    with pytest.raises(KernelError, match="memory must be uint8"):
        world.fast.write(world.memory[:, :-8], 0, good, good, _plan())


def test_the_baseline_of_the_lab_writes_rows_and_no_seals() -> None:
    class Unsealed(NumbaKernels):
        seals = False

    world = build(DEFAULT, [5])
    kernels = Unsealed(world.geometry, world.key, 9, 0.125, "bf16")
    before = world.geometry.seals(world.memory).copy()
    world.sequences[0].k += 1
    write(world, world.sequences[0], [], kernels)
    assert np.array_equal(world.geometry.seals(world.memory), before)
    assert not world.good(world.sequences[0]).any()
