"""Prompts, a plain attention, and loops over the decoder that the model tests share."""

from __future__ import annotations

import copy
from typing import Any

import torch

from hermetic.model.decoder import Decoder
from hermetic.model.source import ModelSource

# Twenty openings of different kinds: prose, code, lists, other scripts, noise.
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "1, 1, 2, 3, 5, 8, 13,",
    "To make bread you need flour,",
    "Der schnelle braune Fuchs springt",
    "The three laws of thermodynamics are:\n1.",
    "import numpy as np\n\ndef mean(values):",
    "Q: What is the largest planet?\nA:",
    "She opened the letter, read it twice, and",
    "In 1969, Neil Armstrong",
    "SELECT name, age FROM users WHERE",
    "The opposite of hot is",
    "Dear Sir or Madam,\n\nI am writing to",
    "日本の首都は",
    "A triangle has three",
    '{"name": "Alice", "age":',
    "Photosynthesis is the process by which plants",
    "zxqv 7731 blorp",
]


class DenseAttention:
    """Attention over one growing sequence, with K and V kept whole: what an engine does, without pages."""

    def __init__(self) -> None:
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, heads, dim], k and v [T, kv_heads, dim] -> [T, heads, dim]."""
        if layer in self.keys:
            k, v = torch.cat([self.keys[layer], k]), torch.cat([self.values[layer], v])
        self.keys[layer], self.values[layer] = k.clone(), v.clone()
        new, total = q.shape[0], k.shape[0]
        mask = torch.ones(new, total, dtype=torch.bool).tril(total - new)
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask, enable_gqa=True
        )
        return out.transpose(0, 1).contiguous()


def all_logits(decoder: Decoder, tokens: list[int], chunk: int = 512) -> torch.Tensor:
    """float32 logits [tokens, vocab], computed chunk by chunk."""
    attend, parts = DenseAttention(), []
    for first in range(0, len(tokens), chunk):
        part = torch.tensor(tokens[first : first + chunk])
        parts.append(
            decoder.forward(part, torch.arange(first, first + len(part)), attend, torch.arange(len(part)))
        )
    return torch.cat(parts)


def greedy(decoder: Decoder, tokens: list[int], count: int) -> list[int]:
    """The `count` most likely next tokens, one at a time."""
    attend, out, first = DenseAttention(), [], 0
    part = tokens
    for _ in range(count):
        positions = torch.arange(first, first + len(part))
        logits = decoder.forward(torch.tensor(part), positions, attend, torch.tensor([len(part) - 1]))
        out.append(int(logits[0].argmax()))
        first, part = first + len(part), [out[-1]]
    return out


def load_reference(source: ModelSource) -> Any:
    """transformers' own model on the same GGUF file, in float32."""
    from transformers import AutoModelForCausalLM, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        str(source.folder),
        gguf_file=source.gguf,
        quantization_config=GgufConfig(gguf_file=source.gguf, dequantize=True),
        dtype=torch.float32,
    )
    return model.eval()


def in_bf16(reference: Any) -> Any:
    """A copy with bf16 weights, as transformers has it when it loads the file so: its rotary frequencies stay in float32."""
    model = copy.deepcopy(reference)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model
