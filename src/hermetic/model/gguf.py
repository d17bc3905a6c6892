"""Weights and config from one GGUF file, dequantised while reading.

The one thing to know: llama.cpp rotates neighbouring pairs of a head where Hugging Face rotates its two halves, so its
converter permutes the rows of Q and K for the `llama` architecture (and for no other read here); `tensor` undoes it.
Format: the GGUF specification in the ggml repository, docs/gguf.md.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hermetic.model.config import ModelConfig
from hermetic.model.errors import ModelError

_PERMUTED = ("llama",)
_ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral's files say llama
_DAMAGED = "the file is damaged or its download was cut short: fetch it again"
_TOP = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _reader(path: Path) -> Any:
    """gguf's reader over a plain array: numpy makes every slice of a memmap an object with a history, and a vocabulary is half a
    million slices (2.7 s became 0.7 s)."""
    from gguf import GGUFReader

    plain = property(
        lambda self: self.__dict__["data"],
        lambda self, mapped: self.__dict__.update(data=np.asarray(mapped)),
    )
    return type("PlainReader", (GGUFReader,), {"data": plain})(path)


class GGUFFile:
    """Reads tensors one at a time, by the names that safetensors would give them without the leading "model."."""

    def __init__(self, path: Path):
        self.path = path
        try:
            reader = _reader(path)
            self._tensors = {tensor.name: tensor for tensor in reader.tensors}
            self._fields = {name: field.contents for name, field in reader.fields.items()}
        except FileNotFoundError as error:
            raise ModelError(f"there is no file {path}") from error
        except (ValueError, IndexError, KeyError, OSError, OverflowError, TypeError, MemoryError) as error:
            raise ModelError(f"{path} cannot be read as GGUF ({error}): {_DAMAGED}") from error
        self.architecture = str(self._field("general.architecture"))
        if self.architecture not in _ARCHITECTURES:
            raise ModelError(
                f"{path} holds a model of architecture {self.architecture!r}; hermetic reads {', '.join(_ARCHITECTURES)}"
            )
        if int(self._field("split.count", 1)) > 1:
            raise ModelError(
                f"{path} is one part of several: join them with llama-gguf-split --merge, and serve that"
            )
        self._config = self._read_config()

    def read_config(self) -> ModelConfig:
        """The config that the metadata describes."""
        return self._config

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The stored shape, or None when there is no such tensor."""
        tensor = self._tensors.get(gguf_name(name))
        return None if tensor is None else tuple(int(side) for side in reversed(tensor.shape))

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor, dequantised to float32, in Hugging Face's row order."""
        from gguf.quants import dequantize

        stored = self._tensors[gguf_name(name)]
        shape = tuple(int(side) for side in reversed(stored.shape))
        try:
            values = np.ascontiguousarray(dequantize(stored.data, stored.tensor_type), dtype=np.float32)
            tensor = torch.from_numpy(values.reshape(shape).copy())
        except (NotImplementedError, ValueError, KeyError) as error:
            raise ModelError(
                f"{self.path}: {stored.name}, stored as {stored.tensor_type.name}, cannot be dequantised ({error})"
            ) from error
        if self.architecture in _PERMUTED and "self_attn.q_proj" in name:
            return _halves(tensor, self._config.heads)
        if self.architecture in _PERMUTED and "self_attn.k_proj" in name:
            return _halves(tensor, self._config.kv_heads)
        return tensor

    def stored_bytes(self, name: str) -> tuple[str, memoryview]:
        """The tensor's type and its bytes as stored (quantised), for the fingerprint."""
        stored = self._tensors[gguf_name(name)]
        return str(stored.tensor_type.name), np.ascontiguousarray(stored.data).reshape(-1).view(np.uint8).data

    def _field(self, key: str, default: Any = None) -> Any:
        read = self._fields.get(key)
        try:
            value = default if read is None else read()
        except (ValueError, IndexError, UnicodeDecodeError) as error:
            raise ModelError(f"{self.path}: the field {key} cannot be read ({error}): {_DAMAGED}") from error
        if value is None:
            raise ModelError(f"{self.path} has no field {key}: {_DAMAGED}")
        return value

    def _read_config(self) -> ModelConfig:
        arch = self.architecture

        def of(key: str, default: Any = None) -> Any:
            return self._field(f"{arch}.{key}", default)

        if int(of("expert_count", 0)) > 0:
            raise ModelError(f"{self.path} is a mixture of experts; hermetic computes dense models")
        heads, hidden = int(of("attention.head_count")), int(of("embedding_length"))
        if heads <= 0:
            raise ModelError(f"{self.path}: attention.head_count is {heads}: {_DAMAGED}")
        head_dim = int(of("attention.key_length", hidden // heads))
        if int(of("attention.value_length", head_dim)) != head_dim:
            raise ModelError(f"{self.path}: keys and values of different size are not supported")
        if int(of("rope.dimension_count", head_dim)) != head_dim:
            raise ModelError(f"{self.path} rotates only part of each head; this decoder rotates all of it")
        kv_heads = of("attention.head_count_kv", heads)
        if isinstance(kv_heads, list):
            raise ModelError(
                f"{self.path} has another number of KV heads in each layer, which is not supported"
            )
        embedding = self.shape("embed_tokens.weight")
        fields: dict[str, Any] = {
            "model_type": arch,
            "num_hidden_layers": int(of("block_count")),
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": int(kv_heads),
            "head_dim": head_dim,
            "intermediate_size": int(of("feed_forward_length")),
            "vocab_size": embedding[0] if embedding else int(of("vocab_size")),
            "rms_norm_eps": float(of("attention.layer_norm_rms_epsilon")),
            "max_position_embeddings": int(of("context_length")),
            "tie_word_embeddings": self.shape("lm_head.weight") is None,
            "attention_bias": arch != "qwen2" and self.shape("layers.0.self_attn.q_proj.bias") is not None,
            "rope_parameters": self._rope(of),
            "bos_token_id": self._fields.get("tokenizer.ggml.bos_token_id", lambda: None)(),
            "eos_token_id": self._end_tokens(),
        }
        sliding = int(of("attention.sliding_window", 0))
        if sliding:
            fields["max_position_embeddings"] = min(fields["max_position_embeddings"], sliding)
        factors = self._tensors.get("rope_freqs.weight")
        return ModelConfig.from_hf(
            fields, rope_factors=None if factors is None else [float(f) for f in np.asarray(factors.data)]
        )

    def _rope(self, of: Any) -> dict[str, Any]:
        """llama.cpp's RoPE fields as transformers' rope_parameters."""
        kind = str(of("rope.scaling.type", "none"))
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(of("rope.freq_base", 10000.0))}
        factor = float(of("rope.scaling.factor", of("rope.scale_linear", 1.0)))
        if kind == "none" and factor != 1.0:
            kind = "linear"
        if kind in ("linear", "yarn"):
            rope |= {"rope_type": kind, "factor": factor}
        elif kind != "none":
            rope["rope_type"] = kind  # refused by ModelConfig, which says why
        if kind == "yarn":
            rope["original_max_position_embeddings"] = int(of("rope.scaling.original_context_length"))
            # llama.cpp multiplies attn_factor with YaRN's own 1 + 0.1 ln(factor) (Peng et al. 2023, eq. 22).
            rope["attention_factor"] = float(of("rope.scaling.attn_factor", 1.0)) * (
                1 + 0.1 * math.log(max(factor, 1.0))
            )
        return rope

    def _end_tokens(self) -> list[int]:
        """End of sequence, and end of turn where a chat model names another."""
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        return [int(self._field(key)) for key in keys if key in self._fields]


def gguf_name(name: str) -> str:
    """`layers.3.self_attn.q_proj.weight` -> `blk.3.attn_q.weight`."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    _, layer, part = stem.split(".", 2)
    return f"blk.{layer}.{_LAYER[part]}.{kind}"


def _halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from (pair, half) order back to (half, pair) order. tensor [heads * dim, ...] of any dtype."""
    pairs = tensor.shape[0] // heads // 2
    return (
        tensor.reshape(heads, pairs, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape).contiguous()
    )
