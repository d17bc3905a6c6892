"""One way to read a model's weights, whatever file they are in, checked against its config before use."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Protocol

import torch

from hermetic.model.config import ModelConfig
from hermetic.model.errors import ModelError
from hermetic.model.source import ModelSource, locate

__all__ = ["ModelSource", "Progress", "Weights", "fingerprint", "locate", "open_weights", "read_config"]

Progress = Callable[[float, str], None]  # (fraction done from 0 to 1, what is being done)


class Weights(Protocol):
    """Tensors by their safetensors names without the leading "model."; read one at a time."""

    def read_config(self) -> ModelConfig: ...

    def shape(self, name: str) -> tuple[int, ...] | None: ...

    def tensor(self, name: str) -> torch.Tensor: ...

    def stored_bytes(self, name: str) -> tuple[str, memoryview]: ...


def open_weights(source: ModelSource) -> Weights:
    """Open the file or folder and check that every tensor is there in the right shape. Raises ModelError."""
    weights: Weights
    if source.gguf is not None:
        from hermetic.model.gguf import GGUFFile

        weights = GGUFFile(source.file)
    else:
        from hermetic.model.safetensors import SafetensorsFolder

        weights = SafetensorsFolder(source.folder)
    for name, wanted in weights.read_config().tensor_shapes().items():
        found = weights.shape(name)
        if found is None:
            raise ModelError(f"{source.file} has no tensor {name}: the model is incomplete, fetch it again")
        if found != wanted:
            raise ModelError(
                f"{source.file}: {name} has shape {list(found)}, but the config asks for {list(wanted)}. "
                "Config and weights are of different models, or damaged: fetch both again"
            )
    return weights


def read_config(source: ModelSource) -> ModelConfig:
    """The model's config, without reading its weights. Raises ModelError."""
    return open_weights(source).read_config()


def fingerprint(config: ModelConfig, weights: Weights) -> str:
    """128 bits in hex over the config and every tensor's name, shape, type and bytes as stored (BLAKE2b).

    Two files of one model in different formats have different fingerprints; two different models never the same.
    """

    def digest(name: str) -> bytes:
        kind, data = weights.stored_bytes(name)
        hashed = hashlib.blake2b(f"{name}\0{weights.shape(name)}\0{kind}\0".encode(), digest_size=32)
        hashed.update(data)
        return hashed.digest()

    names = sorted(config.tensor_shapes())
    whole = hashlib.blake2b(b"hermetic model 1\0", digest_size=16)
    whole.update(repr(sorted(asdict(config).items())).encode())
    # Two threads: hashlib lets go of the interpreter lock, and two keep up with any disk.
    with ThreadPoolExecutor(max_workers=2) as pool:
        for part in pool.map(digest, names):
            whole.update(part)
    return whole.hexdigest()
