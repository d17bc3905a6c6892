"""Models that are not the default one, from a Hugging Face directory, and directories that are broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from serving import Server, stop

from hermetic.lab.tiny import make_tiny
from hermetic.model.source import locate


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny random Llama in safetensors with SmolLM2's tokenizer, as transformers saves them."""
    from transformers import AutoTokenizer

    source = locate("smollm2")
    made = Path(make_tiny(tmp_path, vocab_size=49152))
    AutoTokenizer.from_pretrained(source.folder, gguf_file=source.gguf).save_pretrained(made)
    return made


def test_a_hugging_face_directory_is_served(make_server: Callable[..., Server], folder: Path) -> None:
    server = make_server("--mode", "unified", "--decode-kv", "4MiB", "--model", str(folder))
    ask = {"model": folder.name, "prompt": "Once upon a time", "max_tokens": 5, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=ask, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 5
    assert stop(server) == 0


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda folder: (folder / "config.json").write_text("[1, 2]"), "config.json"),
        (lambda folder: change(folder, num_hidden_layers=-1), "num_hidden_layers"),
        (lambda folder: change(folder, num_hidden_layers=7), "layers"),
        (lambda folder: change(folder, rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "dynamic"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
        (lambda folder: next(folder.glob("*.safetensors")).write_bytes(b"\0" * 64), "safetensors"),
    ],
)
def test_a_broken_directory_is_refused_in_one_line(
    folder: Path, spoil: Callable[[Path], object], named: str
) -> None:
    spoil(folder)
    command = [sys.executable, "-m", "hermetic", "serve", "--port", "0", "--mode", "unified"]
    done = subprocess.run(
        [*command, "--decode-kv", "4MiB", "--model", str(folder)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert named in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def change(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_closed_standard_output_harms_nobody(folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "hermetic",
        "serve",
        "--port",
        "0",
        "--mode",
        "unified",
        "--decode-kv",
        "4MiB",
    ]
    process = subprocess.Popen(
        [*command, "--model", str(folder)], stderr=subprocess.PIPE, text=True, preexec_fn=lambda: os.close(1)
    )
    assert process.stderr is not None
    try:
        assert any(line.startswith("ready http") for line in process.stderr)
    finally:
        process.terminate()
        assert process.wait(15) == 0
