"""A copy of a page carries its filled rows and its seals, and not one byte of anything else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sealed_world import DEFAULT, SPECS, Spec, build

from hermetic.kernels.base import KernelError
from hermetic.kv.geometry import empty_pages


@settings(max_examples=50)
@given(
    spec=st.sampled_from(SPECS),
    length=st.integers(1, 70),
    order=st.randoms(),
    parallel=st.booleans(),
    same=st.booleans(),
)
def test_a_copy_verifies_and_holds_nothing_old(
    spec: Spec, length: int, order, parallel: bool, same: bool
) -> None:
    world = build(spec, [length])
    sequence, geometry = world.sequences[0], world.geometry
    count = len(sequence.pages)
    if same:  # a fork: source and target are pages of one pool
        grown = np.concatenate([world.memory, world.memory])
        memory = empty_pages(geometry, len(grown))
        memory[:] = grown
        source = target = memory
        free = list(range(len(world.memory), len(grown)))
    else:
        source, target = world.memory, empty_pages(geometry, count + 2)
        target[:] = 0x5A
        free = list(range(len(target)))
    order.shuffle(free)
    to, fills = np.array(free[:count], np.int32), world.fills(sequence)
    wanted = target.copy()
    world.plain.copy_rows(source, sequence.pages, wanted, to, fills)
    world.fast.alone = -1 if parallel and spec == DEFAULT else 1 << 20
    world.fast.copy_rows(source, sequence.pages, target, to, fills)
    world.fast.alone = 1 << 20
    assert np.array_equal(target, wanted)
    chain = sequence.chain
    good = world.fast.verify_pages(target, to, fills, chain.words[:count], chain.binds[:count])
    assert good.all()
    last = target[to[-1:]]
    assert not geometry.lanes(last)[..., world.key.rows >= fills[-1]].any()
    assert not last[:, geometry.page_bytes :].any()


@pytest.mark.parametrize(
    ("pages", "targets", "fills", "says"),
    [
        ([0], [9], [1], "target pages"),
        ([9], [0], [1], "source pages"),
        ([-1], [0], [1], "source pages"),
        ([0], [1], [17], "fills"),
        ([0], [1], [-1], "fills"),
        ([0, 1], [2, 2], [1, 1], "named twice"),
        ([0, 1], [1, 2], [1, 1], "both source and target"),
        ([0, 1], [2], [1], "fills"),
    ],
)
def test_a_copy_that_cannot_be_right_is_refused_before_anything_is_written(
    pages: list[int], targets: list[int], fills: list[int], says: str
) -> None:
    world = build(DEFAULT, [10])
    before = world.memory.copy()
    arrays = [np.array(x, np.int32) for x in (pages, targets, fills)]
    for kernels in (world.fast, world.plain):
        with pytest.raises(KernelError, match=says):
            kernels.copy_rows(world.memory, arrays[0], world.memory, arrays[1], arrays[2])
    assert np.array_equal(world.memory, before)


def test_copying_nothing_does_nothing() -> None:
    world = build(DEFAULT, [10])
    before, none = world.memory.copy(), np.zeros(0, np.int32)
    world.fast.copy_rows(world.memory, none, world.memory, none, none)
    assert np.array_equal(world.memory, before)
