"""Weights and config from a folder in Hugging Face's layout: config.json and safetensors, in one file or in shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hermetic.model.config import ModelConfig
from hermetic.model.errors import ModelError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DAMAGED = "the file is damaged or its download was cut short: fetch it again"


class SafetensorsFolder:
    """Reads tensors one at a time; names are without their leading "model."."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._file_of: dict[str, Path] = {}
        self._stored_name: dict[str, str] = {}
        self._open: dict[Path, Any] = {}
        for file in self._files():
            names: list[str] = list(self._handle(file).keys())
            for name in names:
                short = name.removeprefix("model.")
                self._file_of[short], self._stored_name[short] = file, name

    def read_config(self) -> ModelConfig:
        """Raises ModelError when config.json is missing, damaged, or describes another kind of model."""
        generation = self.folder / "generation_config.json"
        return ModelConfig.from_hf(
            _json(self.folder / "config.json"), _json(generation) if generation.is_file() else None
        )

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The stored shape, or None when there is no such tensor."""
        if name not in self._file_of:
            return None
        try:
            return tuple(self._slice(name).get_shape())
        except SafetensorError as error:
            raise ModelError(f"{self._file_of[name]}: {name} cannot be read ({error}): {_DAMAGED}") from error

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as stored, in a floating type."""
        file = self._file_of[name]
        try:
            tensor: torch.Tensor = self._handle(file).get_tensor(self._stored_name[name])
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelError(f"{file}: {name} cannot be read ({error}): {_DAMAGED}") from error
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            raise ModelError(
                f"{file}: {name} is stored as {str(tensor.dtype).removeprefix('torch.')}. Quantised safetensors are not "
                "read: use the unquantised model, or a GGUF file"
            )
        return tensor

    def stored_bytes(self, name: str) -> tuple[str, memoryview]:
        """The tensor's type and its bytes as stored, for the fingerprint."""
        tensor = self.tensor(name).contiguous()
        return str(tensor.dtype), tensor.reshape(-1).view(torch.uint8).numpy().data

    def _slice(self, name: str) -> Any:
        return self._handle(self._file_of[name]).get_slice(self._stored_name[name])

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(str(file), framework="pt")
            except FileNotFoundError as error:
                raise ModelError(f"{file} is missing: fetch the model again, with all its shards") from error
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file} cannot be read ({error}): {_DAMAGED}") from error
        return self._open[file]

    def _files(self) -> list[Path]:
        index = self.folder / _INDEX
        if index.is_file():
            table = _json(index).get("weight_map")
            if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
                raise ModelError(f"{index} has no weight_map: {_DAMAGED}")
            # Only names inside the folder: an index is data, and must not make us read elsewhere.
            outside = [file for file in table.values() if Path(file).name != file]
            if outside:
                raise ModelError(
                    f"{index} names {outside[0]!r}, which is not a file of the folder: {_DAMAGED}"
                )
            return [self.folder / file for file in sorted(set(table.values()))]
        if (self.folder / _SINGLE).is_file():
            return [self.folder / _SINGLE]
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise ModelError(
                f"{self.folder} holds no safetensors files. Weights in .bin files are not read (they can run code): "
                "convert them with transformers' save_pretrained"
            )
        return files


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing: this is not a complete model folder") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} cannot be read ({error}): {_DAMAGED}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object: {_DAMAGED}")
    return value
