"""A model that loads in a blink, and commands that are ended with the test that started them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from running import Command, start

from hermetic.lab.tiny import make_tiny


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `tiny` lies: a random model with SmolLM2's tokenizer."""
    from transformers import AutoTokenizer

    from hermetic.model.source import locate

    where = tmp_path_factory.mktemp("cluster")
    source = locate("smollm2")
    made = make_tiny(where / "tiny", vocab_size=49152)
    AutoTokenizer.from_pretrained(source.folder, gguf_file=source.gguf).save_pretrained(made)
    return where


@pytest.fixture
def command(folder: Path) -> Iterator[Callable[..., Command]]:
    """Start `hermetic ...` in the model's folder."""
    started: list[Command] = []

    def run(*arguments: str) -> Command:
        started.append(start(*arguments, folder=folder))
        return started[-1]

    yield run
    for one in started:
        one.end(signal.SIGKILL)
