"""Reads the JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.worker.models.errors import ModelLoadError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file. Raises ModelLoadError."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} does not exist: is this a model folder?") from error
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path} does not hold an object")
    return values


def read_eos_token_ids(folder: Path, values: dict[str, Any]) -> tuple[int, ...]:
    """Those of generation_config.json first, then those of config.json, each once."""
    generation = folder / "generation_config.json"
    found: list[int] = []
    for source in (read_json(generation) if generation.exists() else {}, values):
        ids = source.get("eos_token_id")
        found += [] if ids is None else [ids] if isinstance(ids, int) else [int(one) for one in ids]
    return tuple(dict.fromkeys(found))
