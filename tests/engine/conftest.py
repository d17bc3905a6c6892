"""The tiny model that all engine tests share. One thread is enough for it, and steadier beside other work."""

from __future__ import annotations

from collections.abc import Iterator

import numba
import pytest
import torch

from hermetic.lab.tiny import make_tiny


@pytest.fixture(autouse=True, scope="module")
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads(), numba.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    numba.set_num_threads(before[1])


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny")
