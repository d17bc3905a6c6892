"""The exponential behind the softmax, against numpy in float64."""

import numpy as np
from numba import njit

from hermetic.kernels.simd import exp2_lanes


@njit
def _all(x, y):  # float32 [n], n a multiple of 16
    for i in range(0, len(x), 16):
        exp2_lanes(x.ctypes.data + 4 * i, y.ctypes.data + 4 * i)


def exp2(x: np.ndarray) -> np.ndarray:
    source = np.zeros(-(-len(x) // 16) * 16, np.float32)
    source[: len(x)] = x
    target = np.empty_like(source)
    _all(source, target)
    return target[: len(x)]


def test_exp2_is_off_by_less_than_one_unit_in_the_last_place() -> None:
    x = np.concatenate([np.linspace(-126, 0, 1_000_001), np.linspace(-1, 0, 1_000_001)]).astype(np.float32)
    wanted = np.exp2(x.astype(np.float64))
    unit = np.spacing(wanted.astype(np.float32)).astype(np.float64)
    assert np.max(np.abs(exp2(x) - wanted) / unit) < 1.0


def test_exp2_of_zero_is_exactly_one_and_of_whole_numbers_exact() -> None:
    x = -np.arange(127, dtype=np.float32)
    assert np.array_equal(exp2(x), np.exp2(x))


def test_exp2_far_below_is_exactly_zero() -> None:
    x = np.array([-126.5, -127, -1e3, -1e30, -np.inf], np.float32)
    assert not exp2(x).any()


def test_exp2_of_nan_is_nan() -> None:
    bits = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF], np.uint32)
    assert np.isnan(exp2(bits.view(np.float32))).all()
