"""A random Llama small enough to load in a blink, in Hugging Face's layout.

The one thing to know: its weights are large on purpose. With the usual initialisation every prompt gives nearly the same
logits; with these, every row of every layer depends visibly on the whole prefix, which is what the lab looks at.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from hermetic.model.config import ModelConfig

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
}


def make_tiny(folder: Path, seed: int = 0, **shape: int) -> str:
    """Write config.json and model.safetensors into `folder` (made if needed) and return its path, for `--model`.

    `shape` overrides fields of SHAPE; two seeds are two models of one shape."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = SHAPE | shape
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    } | fields
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, size in ModelConfig.from_hf(config).tensor_shapes().items():
        if len(size) == 1:
            tensor = 1 + 0.1 * torch.randn(size, generator=generator)
        else:
            # Variance-preserving, but for the embedding: activations keep their size through the layers.
            spread = 1.0 if name == "embed_tokens.weight" else size[1] ** -0.5
            tensor = spread * torch.randn(size, generator=generator)
        tensors[name if name.startswith("lm_head") else f"model.{name}"] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)
