"""From what `--model` says to a Hugging Face folder on this machine."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from octavo.cli import default_model
from octavo.cli.gguf_convert import convert_gguf
from octavo.cli.model_cache import cached_folder
from octavo.cli.model_errors import IncompleteModelError, ModelNotFoundError, UnsupportedModelError
from octavo.cli.progress import Progress

_CONVERTER_VERSION = "1"
"""Part of a converted model's cache key; to be raised when the converter's output changes."""

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model that the services can load."""

    folder: Path
    """Holds config.json, safetensors and tokenizer.json."""
    name: str
    """What clients call it."""


def prepare_model(argument: str | None, progress: Progress) -> PreparedModel:
    """Find, fetch or convert the model. None is the default model.

    `argument` is a Hugging Face folder, a GGUF file, or a name on the Hugging Face hub. Raises ModelError.
    """
    if argument is None:
        return PreparedModel(default_model.default_model(progress), default_model.NAME)
    path = Path(argument).expanduser()
    if path.is_dir():
        return PreparedModel(checked_folder(path.resolve()), path.resolve().name)
    if path.is_file():
        return PreparedModel(_from_gguf(path.resolve(), progress), path.stem)
    if _HUB_NAME.fullmatch(argument) and not argument.startswith(".") and path.suffix != ".gguf":
        return PreparedModel(checked_folder(_from_hub(argument, progress)), argument)
    raise ModelNotFoundError(
        f"there is no file or folder {argument}. A model is a Hugging Face folder, a .gguf file, or a hub name like "
        "owner/model"
    )


def tokenizer_folder(folder: Path) -> Path:
    """`folder` itself, if a model without weights is all that is needed of it. Raises IncompleteModelError."""
    if missing := _missing_descriptions(folder):
        raise IncompleteModelError(f"{folder} lacks {', '.join(missing)}")
    return folder


def _missing_descriptions(folder: Path) -> list[str]:
    return [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]


def checked_folder(folder: Path) -> Path:
    """`folder` itself. Raises IncompleteModelError that says what it lacks."""
    missing = _missing_descriptions(folder)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        missing += [shard for shard in shards if not (folder / shard).is_file()]
    elif not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise IncompleteModelError(
            f"{folder} is not a whole Hugging Face model folder: it lacks {', '.join(missing)}.{_hint(folder)}"
        )
    return folder


def _hint(folder: Path) -> str:
    if gguf_files := sorted(folder.glob("*.gguf")):
        return f" It holds a GGUF file: use --model {gguf_files[0]}"
    if any(folder.glob("pytorch_model*.bin")):
        return " Its weights are in the pickle format: save the model again with safetensors"
    return ""


def _from_gguf(path: Path, progress: Progress) -> Path:
    if path.suffix != ".gguf":
        raise UnsupportedModelError(f"{path} is a file, but not a .gguf file; for safetensors name the folder it is in")
    status = path.stat()
    identity = f"{_CONVERTER_VERSION}\n{path}\n{status.st_size}\n{status.st_mtime_ns}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return cached_folder(f"{path.stem}-{key}", lambda folder: convert_gguf(path, folder, progress), progress)


def _from_hub(name: str, progress: Progress) -> Path:
    progress(f"fetching {name} from the Hugging Face hub")
    way_out = (
        f"Fetch it where the hub can be reached (hf download {name} --local-dir FOLDER), copy the folder here, and run "
        "octavo serve --model FOLDER"
    )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelNotFoundError(
            f"{name} is no file or folder here, and huggingface_hub is not installed, so that it cannot be fetched. "
            f"{way_out}"
        ) from None
    download: Callable[..., str] = snapshot_download
    try:
        return Path(download(name, allow_patterns=_HUB_FILES, etag_timeout=10))
    except Exception as error:  # the hub's client raises errors of its own, of its HTTP client and of the system
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFoundError(
            f"{name} is no file or folder here, and could not be fetched from the hub ({reason}). {way_out}"
        ) from error
