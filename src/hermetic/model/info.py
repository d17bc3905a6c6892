"""What `hermetic info` shows about a model, without loading its weights."""

from __future__ import annotations

from dataclasses import dataclass

from hermetic.kv.geometry import Geometry
from hermetic.model.source import ModelSource
from hermetic.model.weights import read_config


@dataclass(frozen=True)
class ModelInfo:
    """Sizes of a model. KV bytes are what one token adds to the cache, K and V over all layers."""

    name: str
    file: str
    architecture: str
    parameters: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    window: int
    rope: str
    kv_bytes_bf16: int
    kv_bytes_float32: int

    def tokens_in(self, memory: int, dtype: str = "bf16", page_size: int = 16) -> int:
        """How many tokens a pool of `memory` bytes holds: whole pages, with their seals and padding."""
        width = "bf16" if dtype == "bf16" else "f32"
        page = Geometry.attention(page_size, self.layers, self.kv_heads, self.head_dim, width).stride
        return memory // page * page_size


def describe(source: ModelSource) -> ModelInfo:
    """Read the config and the tensor table. Raises ModelError when the files are missing, damaged or unsupported."""
    config = read_config(source)
    return ModelInfo(
        name=source.name,
        file=str(source.file),
        architecture=config.architecture,
        parameters=config.parameters,
        layers=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab=config.vocab,
        window=config.window,
        rope=config.rope.kind,
        kv_bytes_bf16=2 * config.kv_elements_per_token,
        kv_bytes_float32=4 * config.kv_elements_per_token,
    )
