"""Products of few rows are right, and a row's bits depend on the row and the weights alone."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hermetic.kernels import matmul
from hermetic.kernels.matmul import FewRows, processor_kind
from hermetic.kernels.tiles import PAIRS, PORTABLE, TILES

# What this processor can run: a kind includes the ones below it.
KINDS = [kind for kind in (PORTABLE, PAIRS, TILES) if kind <= processor_kind()]
BF16, F32 = torch.bfloat16, torch.float32
shapes = st.tuples(st.integers(1, 200), st.integers(1, 200))


@functools.cache
def weights(outputs: int, inputs: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn((outputs, inputs), generator=generator).to(BF16)
    return weight, torch.randn(outputs, generator=generator).to(BF16)


def some_rows(count: int, inputs: int, seed: int = 1) -> torch.Tensor:
    return torch.randn((count, inputs), generator=torch.Generator().manual_seed(seed)).to(BF16)


def exact(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product in float64, and the sum of its terms' sizes: what rounding errors are proportional to."""
    bias = torch.zeros(weight.shape[0]) if bias is None else bias
    return x.double() @ weight.double().T + bias.double(), (
        x.double().abs() @ weight.double().abs().T + bias.double().abs()
    )


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(shape=shapes, count=st.integers(1, 70), biased=st.booleans())
@example(shape=(576, 1536), count=8, biased=False)
@example(shape=(33, 31), count=17, biased=True)
def test_it_is_the_product(kind: int, shape: tuple[int, int], count: int, biased: bool) -> None:
    weight, bias = weights(*shape)
    x = some_rows(count, shape[1])
    given_bias = bias if biased else None
    wanted, size = exact(x, weight, given_bias)
    sums = FewRows(weight, given_bias, F32, kind)(x)
    # Each of the `inputs` additions is off by at most half a unit in the last place of what has been summed.
    assert ((sums.double() - wanted).abs() <= (shape[1] + 2) * 2.0**-24 * size).all()
    rounded = FewRows(weight, given_bias, BF16, kind)(x)
    assert torch.equal(rounded, sums.to(BF16))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(shape=shapes, count=st.integers(2, 130), data=st.data())
def test_a_row_alone_gives_the_same_bits_as_among_others(
    kind: int, shape: tuple[int, int], count: int, data: st.DataObject
) -> None:
    product = FewRows(*weights(*shape), F32, kind)
    x = some_rows(count, shape[1])
    together = product(x)
    chosen = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=70))
    assert torch.equal(product(x[chosen]), together[chosen])
    for row in chosen[:4]:
        assert torch.equal(product(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 5, 33])
def test_the_number_of_threads_changes_no_bit(kind: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "ALONE", 0)
    product, x = FewRows(*weights(1000, 576), F32, kind), some_rows(count, 576)
    before, results = numba.get_num_threads(), []
    try:
        for threads in range(1, numba.config.NUMBA_NUM_THREADS + 1):
            numba.set_num_threads(threads)
            results.append(product(x))
    finally:
        numba.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_row_and_shows_in_all_of_it(kind: int, bad: float) -> None:
    weight, bias = weights(70, 50)
    x = some_rows(20, 50)
    clean = FewRows(weight, bias, F32, kind)(x)
    x[7, 3] = bad
    for dtype in (F32, BF16):
        found = FewRows(weight, bias, dtype, kind)(x)
        assert not found[7].isfinite().any()
        rest = [row for row in range(20) if row != 7]
        assert torch.equal(found[rest], clean[rest].to(dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_that_is_not_a_number_shows_in_its_output_only(kind: int) -> None:
    weight = weights(70, 50)[0].clone()
    weight[40, 49] = float("nan")
    found = FewRows(weight, None, F32, kind)(some_rows(20, 50)).isnan()
    assert found[:, 40].all()
    assert int(found.sum()) == 20


def test_rounding_is_to_the_nearest_even() -> None:
    """1 + 2^-8 is halfway between two bf16 and goes down to 1; 1 + 3 * 2^-8 goes up to 1 + 2^-6."""
    weight = torch.tensor([[1.0, 2.0**-8], [1.0, 3 * 2.0**-8]], dtype=BF16)
    for kind in KINDS:
        assert FewRows(weight, None, BF16, kind)(torch.ones((1, 2), dtype=BF16)).tolist() == [[1.0, 1.015625]]


def test_no_rows_give_no_rows() -> None:
    assert FewRows(weights(64, 64)[0])(torch.empty((0, 64), dtype=BF16)).shape == (0, 64)


def test_what_does_not_fit_is_refused_with_its_shape() -> None:
    product = FewRows(weights(64, 64)[0])
    for x in (
        torch.zeros((1, 63), dtype=BF16),
        torch.zeros((1, 64)),
        torch.zeros((1, 128), dtype=BF16)[:, ::2],
    ):
        with pytest.raises(ValueError, match=r"x must be contiguous bf16 \[rows, 64\]"):
            product(x)
    with pytest.raises(ValueError, match="bf16 weights give"):
        FewRows(torch.zeros(2, 2))


PROGRAM = """
import json, torch
from hermetic.kernels import matmul
from hermetic.kernels.matmul import FewRows, kernel, processor_kind
matmul.ALONE = 0
hits = []
for parallel in (0, 1):
    product = FewRows(torch.zeros((64, 64), dtype=torch.bfloat16))
    product._kernels = [kernel(processor_kind(), parallel)] * 2
    product(torch.zeros((1, 64), dtype=torch.bfloat16))
    hits.append(sum(kernel(processor_kind(), parallel).stats.cache_hits.values()))
print(json.dumps(hits))
"""


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    def run() -> list[int]:
        env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", PROGRAM]
        return json.loads(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)

    assert run() == [0, 0]  # not even the parallel build finds the serial one
    assert run() == [1, 1]
