"""Every family the decoder serves, as a tiny random model written by transformers, against transformers in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from model_helpers import all_logits
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, Qwen2Config, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from hermetic.model.decoder import Decoder
from hermetic.model.source import locate

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 160,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}
THETA = {"rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig(**TINY),
    "llama tied": LlamaConfig(**TINY, tie_word_embeddings=True),
    "llama with biases": LlamaConfig(**TINY, attention_bias=True, mlp_bias=True),
    "llama with wide heads": LlamaConfig(**TINY, head_dim=32),
    "llama without grouping": LlamaConfig(**TINY | {"num_key_value_heads": 4}),
    "llama with llama3 rope": LlamaConfig(**TINY, rope_parameters=LLAMA3 | THETA),
    "llama with linear rope": LlamaConfig(
        **TINY, rope_parameters={"rope_type": "linear", "factor": 2.0} | THETA
    ),
    "llama with yarn": LlamaConfig(**TINY, rope_parameters=YARN | THETA),
    "mistral": MistralConfig(**TINY, sliding_window=None),
    "qwen2": Qwen2Config(**TINY),
    "qwen2 with yarn": Qwen2Config(**TINY, rope_parameters=YARN | THETA),
    "qwen3": Qwen3Config(**TINY, head_dim=16),
    "qwen3 tied, with biases": Qwen3Config(
        **TINY, head_dim=32, tie_word_embeddings=True, attention_bias=True
    ),
}


def _random_model(config: Any) -> Any:
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        # Larger than the initialiser's, biases and norms too: else half of the arithmetic would not show.
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
    return model


def _difference(model: Any, decoder: Decoder) -> float:
    tokens = torch.randint(3, 160, (150,), generator=torch.Generator().manual_seed(4)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    return float((all_logits(decoder, tokens, chunk=64) - expected).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_what_transformers_computes(family: str, tmp_path: Path) -> None:
    model = _random_model(FAMILIES[family])
    model.save_pretrained(tmp_path)
    assert _difference(model, Decoder.load(locate(str(tmp_path)), "float32")) < 1e-3


def test_sharded_weights_are_the_same_model(tmp_path: Path) -> None:
    model = _random_model(FAMILIES["qwen3"])
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert _difference(model, Decoder.load(locate(str(tmp_path)), "float32")) < 1e-3


def test_weights_stored_in_bf16_or_half_are_read_exactly(tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        _random_model(FAMILIES["llama"]).to(dtype).save_pretrained(tmp_path / str(dtype))
        model = AutoModelForCausalLM.from_pretrained(tmp_path / str(dtype), dtype=torch.float32).eval()
        assert _difference(model, Decoder.load(locate(str(tmp_path / str(dtype))), "float32")) < 1e-3


def _write_gguf(
    path: Path, model: Any, architecture: str, factors: np.ndarray[Any, Any] | None = None
) -> None:
    """What llama.cpp's converter writes, through the gguf library: names, metadata, and Llama's permuted Q and K."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = parameter.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
            name.split(".")[-2]
        )
        if architecture == "llama" and heads:
            # LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py.
            split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(stored, values)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("family", ["llama", "llama tied", "qwen2", "qwen3"])
def test_a_gguf_file_is_the_same_model(family: str, tmp_path: Path) -> None:
    model = _random_model(FAMILIES[family])
    _write_gguf(tmp_path / "tiny.gguf", model, family.split()[0])
    source = locate(str(tmp_path / "tiny.gguf"))
    decoder = Decoder.load(source, "float32")
    assert _difference(model, decoder) < 1e-3
    assert decoder.config.tied_head == model.config.tie_word_embeddings
    assert decoder.config.eos_token_ids == (2,)


def test_rope_factors_in_a_gguf_file_are_llama3s_scaling(tmp_path: Path) -> None:
    scaled = _random_model(FAMILIES["llama with llama3 rope"])
    plain = LlamaForCausalLM(FAMILIES["llama"])
    factors = (plain.model.rotary_emb.inv_freq / scaled.model.rotary_emb.inv_freq).numpy()
    _write_gguf(tmp_path / "tiny.gguf", scaled, "llama", factors)
    assert _difference(scaled, Decoder.load(locate(str(tmp_path / "tiny.gguf")), "float32")) < 1e-3


def test_fingerprints_tell_models_apart_that_differ_in_one_weight_or_in_one_config_field(
    tmp_path: Path,
) -> None:
    seen = set()
    for n in range(3):
        model = _random_model(FAMILIES["llama"])
        if n == 1:
            model.model.layers[1].mlp.down_proj.weight.data[3, 5] += 1e-3
        if n == 2:
            model.config.rms_norm_eps = 2e-6
        model.save_pretrained(tmp_path / str(n))
        decoder = Decoder.load(locate(str(tmp_path / str(n))), "float32")
        assert Decoder.load(locate(str(tmp_path / str(n))), "bf16").fingerprint == decoder.fingerprint
        seen.add(decoder.fingerprint)
    assert len(seen) == 3


@pytest.mark.parametrize("family", [*FAMILIES, "odd widths"])
def test_a_decode_row_gives_the_same_bits_in_a_step_of_decode_rows_and_beside_a_prompt(
    family: str, tmp_path: Path
) -> None:
    config = FAMILIES.get(family) or LlamaConfig(**TINY | {"intermediate_size": 90, "hidden_size": 72})
    _random_model(config).save_pretrained(tmp_path)
    decoder = Decoder.load(locate(str(tmp_path)), "bf16")
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(3, 160, (30,), generator=generator)
    positions = torch.randint(0, 250, (30,), generator=generator)

    def blend(_layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of a row to itself, with all of q, k and v in the result."""
        wide = [x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v)]
        return torch.tanh(q * wide[0]) + wide[1]

    def run(rows: list[int], decode: int) -> torch.Tensor:
        return decoder.forward(tokens[rows], positions[rows], blend, torch.arange(len(rows)), decode)

    everything = list(range(30))
    mixed = run(everything, 13)
    assert torch.equal(run(everything[:13], 13), mixed[:13])
    assert torch.equal(run([5], 1), mixed[5:6])
    assert torch.equal(run(everything[13:], 0), mixed[13:])
    # The prompt's kernels compute the same up to bf16's rounding along the way.
    both = torch.stack([mixed[:13], run(everything[:13], 0)])
    assert float((both[0] - both[1]).norm() / both[1].norm()) < 0.05
