"""Decode attention is attention, and its bits depend on nothing but the sequence's own rows and length."""

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sealed_world import DEFAULT, LAYERS, SPECS, Spec, World, build, write

specs = st.sampled_from(SPECS)
TOLERANCE = {"bf16": 2**-8, "f32": 2e-6}  # half a unit in the last place of results of size 1, and a little


def expected(world: World, index: int, q: torch.Tensor, layer: int) -> torch.Tensor:
    """PyTorch's own attention in float64 over the rows as they were handed to `write`: [heads, dim]."""
    sequence = world.sequences[index]
    k, v = (x[layer].double().transpose(0, 1) for x in (sequence.k, sequence.v))
    result = torch.nn.functional.scaled_dot_product_attention(
        q.double()[None, :, None], k[None], v[None], scale=world.spec.dim**-0.5, enable_gqa=True
    )
    return result[0, :, 0]


@settings(max_examples=60)
@given(
    spec=specs,
    lengths=st.lists(st.one_of(st.integers(1, 40), st.integers(200, 600)), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
    verify=st.booleans(),
)
def test_decode_attention_is_attention(spec: Spec, lengths: list[int], seed: int, verify: bool) -> None:
    world = build(spec, lengths, seed)
    q, plan = world.query(len(lengths), seed), world.plan(room=2)
    for layer in range(LAYERS):
        out = world.attend(plan, q, verify, layer).double()
        for b in range(len(lengths)):
            wanted = expected(world, b, q[b], layer)
            error = (out[b] - wanted).abs()
            assert (error <= TOLERANCE[spec.dtype] * wanted.abs().clamp(min=1.0)).all(), error.max()
    assert plan.bad.tolist() == [-1] * len(lengths)


@settings(max_examples=15)
@given(spec=specs, lengths=st.lists(st.integers(1, 60), min_size=1, max_size=3))
def test_the_reference_agrees(spec: Spec, lengths: list[int]) -> None:
    world = build(spec, lengths)
    q, plans = world.query(len(lengths)), (world.plan(), world.plan())
    fast = world.attend(plans[0], q)
    plain = world.attend(plans[1], q, kernels=world.plain)
    assert torch.allclose(fast.double(), plain.double(), rtol=2**-8, atol=TOLERANCE[spec.dtype])
    assert np.array_equal(plans[0].bad, plans[1].bad)
    assert np.array_equal(plans[0].tiles, plans[1].tiles)


@settings(max_examples=40)
@given(
    spec=specs,
    lengths=st.lists(st.one_of(st.integers(1, 40), st.integers(250, 600)), min_size=2, max_size=6),
    data=st.data(),
)
def test_a_sequence_alone_gives_the_same_bits_as_in_any_batch(
    spec: Spec, lengths: list[int], data: st.DataObject
) -> None:
    world = build(spec, lengths)
    q = world.query(len(lengths))
    alone = [world.attend(world.plan([b]), q[b : b + 1])[0] for b in range(len(lengths))]
    chosen = data.draw(st.permutations(range(len(lengths))))[: data.draw(st.integers(1, len(lengths)))]
    together = world.attend(world.plan(chosen, room=3), q[chosen])
    for row, b in enumerate(chosen):
        assert torch.equal(together[row], alone[b])


@settings(max_examples=40)
@given(spec=specs, lengths=st.lists(st.integers(1, 600), min_size=1, max_size=3))
def test_verifying_does_not_change_a_bit(spec: Spec, lengths: list[int]) -> None:
    world = build(spec, lengths)
    q = world.query(len(lengths))
    assert torch.equal(world.attend(world.plan(), q, True), world.attend(world.plan(), q, False))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("spec", [SPECS[0], SPECS[4]])
def test_threads_do_not_change_a_bit(spec: Spec, threads: int) -> None:
    world = build(spec, [1, 17, 300, 513, 1024, 255, 256, 257])
    q = world.query(8)
    serial, plan = world.attend(world.plan(), q), world.plan()
    before = numba.get_num_threads()
    numba.set_num_threads(min(threads, before))
    world.fast.alone = -1
    try:
        for _ in range(20):
            assert torch.equal(world.attend(plan, q), serial)
    finally:
        world.fast.alone = 1 << 20
        numba.set_num_threads(before)
    assert (plan.tiles == 20 * -(-plan.lengths[:, None] // spec.page)).all()
    assert plan.bad.tolist() == [-1] * 8


def test_where_a_sequence_lies_in_the_pool_does_not_change_a_bit() -> None:
    lengths, outs = [70, 300], []
    for seed in (1, 2):
        world = build(DEFAULT, lengths, seed)
        for to, source in zip(world.sequences, build(DEFAULT, lengths, 3).sequences, strict=True):
            to.k, to.v, to.chain, to.terms = source.k, source.v, source.chain, source.terms
        for sequence in world.sequences:
            write(world, sequence, [])
        outs.append(world.attend(world.plan(), world.query(2)))
    assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("spec", SPECS)
def test_queries_and_results_may_be_views(spec: Spec) -> None:
    world = build(spec, [9, 30])
    q, heads = world.query(2), spec.kv_heads * spec.group
    wide = torch.full((2, heads + 3, spec.dim), 5.0, dtype=q.dtype)
    wide[:, 1 : 1 + heads] = q
    target = torch.full((2, heads + 2, spec.dim), 5.0, dtype=q.dtype)
    world.fast.attend(world.memory, 0, wide[:, 1 : 1 + heads], target[:, 1:-1], world.plan(), True)
    assert torch.equal(target[:, 1:-1], world.attend(world.plan(), q))
    assert (target[:, 0] == 5).all()
    assert (target[:, -1] == 5).all()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_or_infinity_in_a_page_never_gives_a_clean_number(spec: Spec, where: str, value: float) -> None:
    world = build(spec, [19])
    sequence = world.sequences[0]
    getattr(sequence, where)[:, 11] = value
    write(world, sequence, [])
    out = world.attend(world.plan(), world.query(1).abs())
    assert not out.isfinite().any()


def test_all_of_a_page_nan_gives_nan_unless_verified_and_found() -> None:
    world = build(DEFAULT, [50])
    world.memory[world.sequences[0].pages[1], : world.geometry.seals_offset] = 0xFF
    plan = world.plan()
    assert world.attend(plan, world.query(1), False).isnan().all()
    world.attend(plan, world.query(1), True)
    assert plan.bad.tolist() == [1]


def test_no_rows_give_zeros() -> None:
    world = build(DEFAULT, [30, 30])
    plan = world.plan()
    plan.lengths[:] = [0, 30]
    out = world.attend(plan, world.query(2))
    assert not out[0].any()
    assert torch.equal(out[1:], world.attend(world.plan([1]), world.query(2)[1:]))
    assert plan.tiles.tolist() == [[0] * 3, [2] * 3]


def test_a_result_is_rounded_to_nearest_even() -> None:
    """A zero query weighs two rows equally, so their exact mean is rounded once: PyTorch's rounding is the judge."""
    world = build(DEFAULT, [2])
    bits = torch.arange(0x3F80, 0x3F80 + 2 * 192, dtype=torch.int16).view(2, 1, 3, 64)
    world.sequences[0].v[:] = bits.view(torch.bfloat16).transpose(0, 1)
    write(world, world.sequences[0], [])
    out = world.attend(world.plan(), torch.zeros(1, 9, 64, dtype=torch.bfloat16))
    mean = world.sequences[0].v[0].float().mean(0).to(torch.bfloat16)
    assert torch.equal(out[0].view(3, 3, 64), mean[:, None].expand(3, 3, 64))


def test_large_scores_do_not_overflow() -> None:
    world = build(DEFAULT, [300])
    q = world.query(1) * 1000
    out = world.attend(world.plan(), q)
    assert torch.allclose(out[0].double(), expected(world, 0, q[0], 0), atol=2e-2, rtol=2e-2)
