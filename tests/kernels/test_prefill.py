"""Prefill attention is causal attention, and how a prompt is cut into chunks changes no bit of it."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sealed_world import DEFAULT, SPECS, Spec, build

from hermetic.kernels.base import KernelError

specs = st.sampled_from(SPECS)


def prefill(world, kernels, q, start, verify=True):
    sequence = world.sequences[0]
    out = torch.full_like(q, 9.0)
    chain = sequence.chain
    found = kernels.prefill_attend(
        world.memory, 0, q, out, sequence.pages, start, chain.words, chain.binds, verify
    )
    return out, found


@settings(max_examples=25)
@given(spec=specs, length=st.integers(1, 90), seed=st.integers(0, 99))
def test_prefill_attention_is_causal_attention(spec: Spec, length: int, seed: int) -> None:
    world = build(spec, [length], seed)
    q = world.query(length, seed)
    out, found = prefill(world, world.fast, q, 0)
    k, v = (x[0].double().transpose(0, 1) for x in (world.sequences[0].k, world.sequences[0].v))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.double().transpose(0, 1)[None],
        k[None],
        v[None],
        is_causal=True,
        scale=spec.dim**-0.5,
        enable_gqa=True,
    )[0].transpose(0, 1)
    tolerance = 2**-6 if spec.dtype == "bf16" else 1e-5
    assert torch.allclose(out.double(), wanted, rtol=tolerance, atol=tolerance)
    assert found == (-1, -(-length // spec.page) * spec.kv_heads)
    plain, again = prefill(world, world.plain, q, 0)
    assert torch.allclose(plain.double(), wanted, rtol=tolerance, atol=tolerance)
    assert again == found


@settings(max_examples=20)
@given(spec=st.sampled_from(SPECS[:4]), length=st.integers(2, 700), data=st.data())
def test_any_chunks_give_the_same_bits(spec: Spec, length: int, data: st.DataObject) -> None:
    world = build(spec, [length])
    sequence, q = world.sequences[0], world.query(length)
    whole, _ = prefill(world, world.fast, q, 0)
    cuts = data.draw(st.lists(st.integers(1, length - 1), max_size=4, unique=True))
    edges = [0, *sorted(cuts), length]
    for start, end in pairwise(edges):
        # The pages still hold later rows, and their seals those of the whole: a chunk reads without verifying here.
        out = torch.empty_like(q[start:end])
        args = (sequence.pages, start, sequence.chain.words, sequence.chain.binds, False)
        world.fast.prefill_attend(world.memory, 0, q[start:end], out, *args)
        assert torch.equal(out, whole[start:end])


@settings(max_examples=40)
@given(spec=specs, length=st.integers(0, 90), verify=st.booleans(), parallel=st.booleans())
def test_gather_copies_the_rows_and_zeroes_the_rest(
    spec: Spec, length: int, verify: bool, parallel: bool
) -> None:
    world = build(spec, [max(length, 1)])
    sequence = world.sequences[0]
    shape = (spec.kv_heads, 96, spec.dim)
    k, v = (torch.full(shape, 9.0, dtype=sequence.k.dtype) for _ in range(2))
    world.fast.alone = -1 if parallel and spec == DEFAULT else 1 << 20
    args = (sequence.pages, length, sequence.chain.words, sequence.chain.binds)
    found = world.fast.gather(world.memory, 1, *args, k, v, verify)
    world.fast.alone = 1 << 20
    for got, rows in ((k, sequence.k), (v, sequence.v)):
        assert torch.equal(got[:, :length], rows[1, :length].transpose(0, 1))
        assert not got[:, length:].any()
    assert found == (-1, -(-length // spec.page) * spec.kv_heads if verify else 0)


def test_gather_refuses_targets_that_are_too_small_and_plans_that_are_too_short() -> None:
    world = build(DEFAULT, [40])
    sequence = world.sequences[0]
    chain = sequence.chain
    k = torch.empty(3, 39, 64, dtype=torch.bfloat16)
    with pytest.raises(KernelError, match="k_out"):
        world.fast.gather(world.memory, 0, sequence.pages, 40, chain.words, chain.binds, k, k, True)
    with pytest.raises(KernelError, match="need 3 pages"):
        world.fast.gather(world.memory, 0, sequence.pages[:2], 40, chain.words, chain.binds, k, k, True)


def test_the_mask_and_the_buffers_follow_the_chunk() -> None:
    world = build(DEFAULT, [600])
    q = world.query(600)
    first = prefill(world, world.fast, q, 0)[0]
    for start, count in ((0, 40), (0, 41), (560, 40), (559, 41), (0, 600)):
        sequence = world.sequences[0]
        args = (sequence.pages, start, sequence.chain.words, sequence.chain.binds, False)
        out = torch.empty_like(q[start : start + count])
        world.fast.prefill_attend(world.memory, 0, q[start : start + count], out, *args)
        assert torch.equal(out, first[start : start + count])


def test_a_bad_page_of_the_prefix_is_named() -> None:
    world = build(DEFAULT, [100])
    world.memory[world.sequences[0].pages[4], world.geometry.offset(0, 1, 0, 2)] ^= np.uint8(1)
    assert prefill(world, world.fast, world.query(100), 0)[1] == (4, 21)
