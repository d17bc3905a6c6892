"""What the model tests share: the default model, its tokenizer, and its transformers reference, each loaded once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from model_helpers import load_reference

from hermetic.model.decoder import Decoder
from hermetic.model.source import ModelSource, locate


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """One thread: most of these steps are small, and two threads that wait for each other fare badly on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smollm2() -> ModelSource:
    return locate("smollm2")


@pytest.fixture(scope="session")
def tokenizer(smollm2: ModelSource) -> Any:
    from hermetic.model.tokenizer import Tokenizer

    return Tokenizer.load(smollm2)


@pytest.fixture(scope="session")
def decoder_float32(smollm2: ModelSource) -> Decoder:
    return Decoder.load(smollm2, "float32")


@pytest.fixture(scope="session")
def decoder_bf16(smollm2: ModelSource) -> Decoder:
    return Decoder.load(smollm2, "bf16")


@pytest.fixture(scope="session")
def reference(smollm2: ModelSource) -> Any:
    """transformers' own model on the same file, in float32."""
    return load_reference(smollm2)
