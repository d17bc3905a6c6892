"""The fused kernels against plain PyTorch, bit for bit; the exponential against float64; row counts that agree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from hermetic.model import linear, ops
from hermetic.model.linear import Linear, RowPlan
from hermetic.model.ops import FusedOps, PlainOps

DTYPES = [torch.bfloat16, torch.float32]
PLAIN, FUSED = PlainOps(), FusedOps()


def _random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=["serial", "parallel"])
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "PARALLEL_ELEMENTS", 0 if request.param == "parallel" else 10**12)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (7, 64), (33, 100), (5, 1)])
def test_norms_are_the_same_bits_fused_and_plain(rows: int, width: int, dtype: torch.dtype) -> None:
    x, delta, weight = (
        _random(n, *shape, dtype=dtype) for n, shape in enumerate([(rows, width), (rows, width), (width,)])
    )
    assert torch.equal(FUSED.rms_norm(x, weight, 1e-5), PLAIN.rms_norm(x, weight, 1e-5))
    sum_fused, sum_plain = x.clone(), x.clone()
    assert torch.equal(
        FUSED.add_rms_norm(sum_fused, delta, weight, 1e-5), PLAIN.add_rms_norm(sum_plain, delta, weight, 1e-5)
    )
    assert torch.equal(sum_fused, sum_plain)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
def test_rotation_with_and_without_qk_norm_is_the_same_bits_fused_and_plain(
    dtype: torch.dtype, normed: bool
) -> None:
    rows, heads, kv_heads, dim = 9, 6, 2, 32
    angles = _random(1, 50, dim // 2)
    cos, sin = angles.cos().to(dtype).float(), angles.sin().to(dtype).float()
    positions = torch.randint(0, 50, (rows,), generator=torch.Generator().manual_seed(2))
    norms = (_random(3, dim, dtype=dtype), _random(4, dim, dtype=dtype)) if normed else None
    qkv = _random(5, rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
    fused, plain = qkv.clone(), qkv.clone()
    FUSED.rope(fused, positions, cos, sin, heads, kv_heads, norms, 1e-6)
    PLAIN.rope(plain, positions, cos, sin, heads, kv_heads, norms, 1e-6)
    assert torch.equal(fused, plain)
    assert torch.equal(
        fused[:, (heads + kv_heads) * dim :], qkv[:, (heads + kv_heads) * dim :]
    )  # V is left alone


@pytest.mark.usefixtures("_kernels")
def test_silu_is_torchs_for_every_bf16_number() -> None:
    gate = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).unsqueeze(0)
    both = torch.cat([gate, torch.ones_like(gate)], 1)
    found, expected = FUSED.silu_mul(both), PLAIN.silu_mul(both)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[~found.isnan()], expected[~expected.isnan()])


@pytest.mark.usefixtures("_kernels")
def test_silu_in_float32_is_within_four_ulp_of_float64() -> None:
    gate = torch.linspace(-80, 80, 200_001).unsqueeze(0)
    found = FUSED.silu_mul(torch.cat([gate, torch.ones_like(gate)], 1)).double()
    exact = gate.double() / (1 + (-gate.double()).exp())
    assert ((found - exact).abs() <= 4 * 2.0**-23 * exact.abs()).all()


def test_plain_ops_round_where_transformers_rounds() -> None:
    x, weight = _random(1, 4, 64, dtype=torch.bfloat16), _random(2, 64, dtype=torch.bfloat16)
    norm = LlamaRMSNorm(64, eps=1e-5).to(torch.bfloat16)
    norm.weight.data.copy_(weight)
    assert torch.equal(PLAIN.rms_norm(x, weight, 1e-5), norm(x))
    angles = _random(3, 4, 16)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    qkv = _random(4, 4, 4 * 32, dtype=torch.bfloat16)
    q, k = qkv.view(4, 4, 32)[:, :2], qkv.view(4, 4, 32)[:, 2:3]
    wide = (cos.repeat(1, 2), sin.repeat(1, 2))
    expected_q, expected_k = apply_rotary_pos_emb(q, k, *wide)
    PLAIN.rope(qkv, torch.arange(4), cos.float(), sin.float(), 2, 1, None, 0.0)
    assert torch.equal(qkv.view(4, 4, 32)[:, :2], expected_q)
    assert torch.equal(qkv.view(4, 4, 32)[:, 2:3], expected_k)


@given(least=st.sampled_from([1, 2]), most=st.integers(8, 200), rows=st.integers(1, 3000))
def test_a_row_plans_pieces_cover_all_rows_once_in_sizes_that_agree(least: int, most: int, rows: int) -> None:
    plan = RowPlan(least, most, blocks=(1024, 512))
    pieces = list(plan.pieces(rows))
    assert [first for first, _ in pieces] == [0, *(last for _, last in pieces[:-1])]
    assert pieces[-1][1] == rows
    assert all(last - first in plan.blocks or 1 <= last - first <= most for first, last in pieces)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(960, 576), (576, 576), (3072, 576), (576, 1536), (65, 47), (2048, 2048)]
)
def test_a_linears_rows_have_the_same_bits_for_any_number_of_rows_and_are_right(
    outputs: int, inputs: int, dtype: torch.dtype, threads: int
) -> None:
    torch.set_num_threads(threads)
    try:
        weight, x = _random(1, outputs, inputs, dtype=dtype), _random(2, 700, inputs, dtype=dtype)
        bias = _random(3, outputs, dtype=dtype)
        apply = Linear(weight, bias)
        whole = apply(x)
        for count in (1, 2, 5, 19, 33, 97, 130, 160, 182, 256, 300, 511, 513):
            assert torch.equal(apply(x[:count]), whole[:count]), count
            assert torch.equal(apply(x[700 - count :].contiguous()), whole[700 - count :]), count
        exact = x.double() @ weight.double().T + bias.double()
        assert (whole - exact).abs().max() <= (
            2.0**-7 if dtype is torch.bfloat16 else 2.0**-18
        ) * exact.abs().max()
    finally:
        torch.set_num_threads(1)


def test_without_prepacking_a_linear_is_still_row_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "has_prepacking", lambda: False)
    monkeypatch.setattr(linear, "_plans", {})
    for dtype in DTYPES:
        weight, x = _random(1, 96, 200, dtype=dtype), _random(2, 300, 200, dtype=dtype)
        apply = Linear(weight)
        whole = apply(x)
        for count in (1, 2, 9, 31, 32, 40, 129, 256):
            assert torch.equal(apply(x[:count]), whole[:count]), (dtype, count)


def test_on_a_cpu_without_bf16_a_linear_is_the_float32_product_rounded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There oneDNN refuses a bf16 weight, and no model could be loaded."""
    monkeypatch.setattr(linear, "multiplies_bf16", lambda: False)
    monkeypatch.setattr(linear, "_plans", {})
    dtype = torch.bfloat16
    weight, x = _random(1, 96, 200, dtype=dtype), _random(2, 300, 200, dtype=dtype)
    bias = _random(3, 96, dtype=dtype)
    apply = Linear(weight, bias)
    whole = apply(x)
    assert whole.dtype is dtype
    exact = x.double() @ weight.double().T + bias.double()
    # half a unit in the last of 8 bits, and the few that float32 rounds to the other side
    assert ((whole.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5).all()
    for count in (1, 2, 9, 31, 32, 40, 129, 256):
        assert torch.equal(apply(x[:count]), whole[:count]), count


@settings(max_examples=20)
@given(
    plan=st.sampled_from([RowPlan(32, 32), RowPlan(2, 16, (64,)), RowPlan(1, 8)]), rows=st.integers(1, 150)
)
def test_any_row_plan_gives_the_product_whatever_pieces_it_is_cut_into(plan: RowPlan, rows: int) -> None:
    weight, x = _random(1, 24, 16), _random(2, rows, 16)
    apply = Linear(weight)
    apply.plan = plan
    torch.testing.assert_close(apply(x), x @ weight.T)
