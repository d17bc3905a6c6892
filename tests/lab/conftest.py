"""What the lab's tests share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _what_is_loaded_stays() -> Iterator[None]:
    """Witnesses make many small objects; without this every collection walks torch and transformers as well."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
