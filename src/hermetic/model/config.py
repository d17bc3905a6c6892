"""What the decoder needs to know about a model, read from its Hugging Face config, "by config, not by name".

The one thing to know: `ModelConfig.from_hf` refuses (ModelError) everything that the decoder would compute wrongly,
so a config that exists is one that the decoder gets right. RoPE is kept as its inverse frequencies, which is what
determines a cached key; a RoPE whose frequencies depend on the total length has no such numbers and is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hermetic.model.errors import ModelError

# transformers' model types whose attention, MLP and norms are exactly this decoder's (given the fields read below).
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope", "su")

# Fields that change what a layer computes, and which this decoder does not implement: refused unless unset.
_UNSUPPORTED = {
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "attn_logit_softcapping": "soft-capped attention scores",
    "final_logit_softcapping": "soft-capped logits",
    "query_pre_attn_scalar": "another attention scale",
    "attention_multiplier": "another attention scale",
    "embedding_multiplier": "scaled embeddings",
    "residual_multiplier": "scaled residuals",
    "logits_scaling": "scaled logits",
    "no_rope_layers": "layers without RoPE",
    "quantization_config": "quantised safetensors weights (use the unquantised model, or a GGUF file)",
}


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: angle(position, i) = position * inv_freq[i]; cos and sin are multiplied by `scaling`."""

    kind: str
    inv_freq: tuple[float, ...]  # head_dim / 2 float32 values
    scaling: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """A dense decoder of the Llama family. `window` is the longest context, in tokens, that it may be given."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    norm_eps: float
    rope: Rope
    window: int
    tied_head: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: str = "silu"
    eos_token_ids: tuple[int, ...] = ()

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers that one token adds to the KV cache, K and V over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def parameters(self) -> int:
        """How many weights the model has (a tied head is counted once)."""
        return sum(_size(shape) for shape in self.tensor_shapes().values())

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that the model must have, by its name in safetensors without the leading "model."."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "embed_tokens.weight": (self.vocab, self.hidden),
            "norm.weight": (self.hidden,),
        }
        if not self.tied_head:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        for n in range(self.layers):
            layer: dict[str, tuple[int, ...]] = {
                "input_layernorm.weight": (self.hidden,),
                "post_attention_layernorm.weight": (self.hidden,),
                "self_attn.q_proj.weight": (q, self.hidden),
                "self_attn.k_proj.weight": (kv, self.hidden),
                "self_attn.v_proj.weight": (kv, self.hidden),
                "self_attn.o_proj.weight": (self.hidden, q),
                "mlp.gate_proj.weight": (self.intermediate, self.hidden),
                "mlp.up_proj.weight": (self.intermediate, self.hidden),
                "mlp.down_proj.weight": (self.hidden, self.intermediate),
            }
            if self.qkv_bias:
                layer |= {
                    "self_attn.q_proj.bias": (q,),
                    "self_attn.k_proj.bias": (kv,),
                    "self_attn.v_proj.bias": (kv,),
                }
            if self.o_bias:
                layer["self_attn.o_proj.bias"] = (self.hidden,)
            if self.mlp_bias:
                layer |= {
                    "mlp.gate_proj.bias": (self.intermediate,),
                    "mlp.up_proj.bias": (self.intermediate,),
                    "mlp.down_proj.bias": (self.hidden,),
                }
            if self.qk_norm:
                layer |= {
                    "self_attn.q_norm.weight": (self.head_dim,),
                    "self_attn.k_norm.weight": (self.head_dim,),
                }
            shapes |= {f"layers.{n}.{name}": shape for name, shape in layer.items()}
        return shapes

    @classmethod
    def from_hf(
        cls,
        config: Any,
        generation: Mapping[str, Any] | None = None,
        rope_factors: Iterable[float] | None = None,
    ) -> ModelConfig:
        """From a transformers config object, or the dict of a config.json.

        `generation` is generation_config.json's dict: its end tokens join the config's. `rope_factors` (GGUF's
        rope_freqs tensor) divide the plain inverse frequencies and replace the config's own scaling.
        Raises ModelError for whatever the decoder would not compute faithfully.
        """
        if isinstance(config, Mapping):
            config = _parse(config)
        kind = getattr(config, "model_type", None)
        if kind not in ARCHITECTURES:
            raise ModelError(
                f"the model is a {kind!r}; hermetic computes {', '.join(ARCHITECTURES)} (dense decoders of the Llama "
                "family). Choose a model of one of these types"
            )
        for field, meaning in _UNSUPPORTED.items():
            if getattr(config, field, None) not in (None, 0, False, 1, 1.0):
                raise ModelError(
                    f"the model's config sets {field}, which means {meaning}: this decoder has no such thing"
                )
        if config.hidden_act != "silu":
            raise ModelError(
                f"the model's activation is {config.hidden_act!r}; this decoder computes 'silu' only"
            )

        heads, hidden = config.num_attention_heads, config.hidden_size
        kv_heads = heads if config.num_key_value_heads is None else config.num_key_value_heads
        _check_positive(num_attention_heads=heads, hidden_size=hidden)
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        _check_positive(
            num_hidden_layers=config.num_hidden_layers,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_position_embeddings,
        )
        if heads % kv_heads:
            raise ModelError(
                f"{heads} attention heads cannot share {kv_heads} KV heads: the config is damaged"
            )
        if head_dim % 2:
            raise ModelError(f"head_dim is {head_dim}; rotary embedding needs an even number")
        attention_bias = bool(getattr(config, "attention_bias", False))
        return cls(
            architecture=kind,
            layers=config.num_hidden_layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
            norm_eps=float(config.rms_norm_eps),
            rope=_rope(config, head_dim, rope_factors),
            window=_window(config),
            tied_head=bool(config.tie_word_embeddings),
            # Qwen2's code has a bias on Q, K and V always, and never on O; the others follow `attention_bias`.
            qkv_bias=kind == "qwen2" or (kind != "mistral" and attention_bias),
            o_bias=kind in ("llama", "qwen3") and attention_bias,
            mlp_bias=kind == "llama" and bool(getattr(config, "mlp_bias", False)),
            qk_norm=kind == "qwen3",
            eos_token_ids=_eos(config, generation or {}),
        )


def _parse(fields: Mapping[str, Any]) -> Any:
    """The transformers config object for a config.json's dict."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    kind = fields.get("model_type")
    if kind not in ARCHITECTURES:
        raise ModelError(
            f"the model's config says model_type {kind!r}; hermetic computes {', '.join(ARCHITECTURES)}. "
            "Choose a model of one of these types"
        )
    rope_kind = _rope_kind(fields)
    if rope_kind not in STATIC_ROPE:
        _refuse_rope(rope_kind)
    try:
        return AutoConfig.for_model(**fields)
    except (StrictDataclassError, KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ModelError(f"the model's config cannot be read: {error}") from error


def _rope_kind(fields: Mapping[str, Any]) -> Any:
    """rope_type of a raw config; before transformers 5 it stood in `rope_scaling`, under `type` in the oldest files."""
    parameters = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise ModelError(
            f"the model's RoPE parameters are {parameters!r}, not a table: the config is damaged"
        )
    return parameters.get("rope_type", parameters.get("type", "default")) or "default"


def _refuse_rope(kind: Any) -> None:
    if kind in LENGTH_DEPENDENT_ROPE:
        raise ModelError(
            f"the model's RoPE scaling is {kind!r}: its rotation of a token depends on how long the whole sequence is, so "
            "the KV cache of a prefix would depend on what follows it, and no page could be bound to its own tokens. "
            f"Use a static scaling ({', '.join(STATIC_ROPE)}), for instance yarn, or remove the scaling from the config"
        )
    raise ModelError(f"the model's RoPE type {kind!r} is unknown; known are {', '.join(STATIC_ROPE)}")


def _rope(config: Any, head_dim: int, factors: Iterable[float] | None) -> Rope:
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters or {}
    kind = parameters.get("rope_type", "default")
    if kind not in STATIC_ROPE:
        _refuse_rope(kind)
    if parameters.get("partial_rotary_factor", 1.0) != 1.0 or getattr(
        config, "partial_rotary_factor", 1.0
    ) not in (None, 1.0):
        raise ModelError(
            "the model rotates only part of each head (partial_rotary_factor); this decoder rotates all of it"
        )
    if parameters.get("mrope_section"):
        raise ModelError(
            "the model's RoPE has sections for images (mrope_section); this decoder serves text models"
        )
    theta = parameters.get("rope_theta")
    if not isinstance(theta, int | float) or not theta > 0:
        raise ModelError(f"the model's rope_theta is {theta!r}; it must be a positive number")
    if kind == "default" or factors is not None:
        # theta_i = base^(-2i/d): "RoFormer", Su et al. 2021, section 3.2.2; in float32, as transformers computes it.
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        inv_freq, scaling = 1.0 / (theta**exponents), 1.0
        if factors is not None:
            divisors = torch.tensor(list(factors), dtype=torch.float32)
            if divisors.shape != inv_freq.shape or not bool((divisors > 0).all()):
                raise ModelError(
                    f"rope_freqs must be {head_dim // 2} positive numbers: the model file is damaged"
                )
            inv_freq, kind = inv_freq / divisors, "factors"
    else:
        try:
            inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ModelError(
                f"the model's RoPE scaling {dict(parameters)!r} cannot be used: {error!r}"
            ) from error
    if not bool(torch.isfinite(inv_freq).all()):
        raise ModelError(
            f"the model's RoPE parameters {dict(parameters)!r} give frequencies that are not finite"
        )
    return Rope(kind=kind, inv_freq=tuple(inv_freq.tolist()), scaling=float(scaling))


def _window(config: Any) -> int:
    """Inside a sliding window full attention and windowed attention are the same thing, so it bounds the context."""
    window = int(config.max_position_embeddings)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        odd = set(kinds) - {"full_attention", "sliding_attention"}
        if odd:
            raise ModelError(
                f"the model has layers of type {', '.join(sorted(odd))}; this decoder has none of those"
            )
    sliding = getattr(config, "sliding_window", None)
    slides = kinds is None or "sliding_attention" in kinds
    return min(window, int(sliding)) if sliding and slides else window


def _eos(config: Any, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """End tokens of generation_config and config together: chat models often name theirs in only one of them."""
    found: list[int] = []
    for value in (generation.get("eos_token_id"), config.eos_token_id):
        for token in value if isinstance(value, list | tuple) else [value]:
            if token is None or token in found:
                continue
            if not isinstance(token, int) or not 0 <= token < config.vocab_size:
                raise ModelError(f"the end token {token!r} is not in the vocabulary of {config.vocab_size}")
            found.append(token)
    return tuple(found)


def _check_positive(**values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or value <= 0:
            raise ModelError(f"the model's {name} is {value!r}; it must be a positive whole number")


def _size(shape: tuple[int, ...]) -> int:
    count = 1
    for side in shape:
        count *= side
    return count
