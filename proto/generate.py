"""Compiles the .proto files into `gen/`; runs when octavo-proto is installed."""

from __future__ import annotations

import importlib.resources
import shutil
from pathlib import Path
from typing import Any

from grpc_tools import protoc
from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class GenerateStubs(BuildHookInterface):  # type: ignore[type-arg]
    """Hatch calls this before it builds, for editable installs too."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        out = root / "gen"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        arguments = [
            "protoc",
            f"--proto_path={root}",
            f"--proto_path={importlib.resources.files('grpc_tools') / '_proto'}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out={out}",
            f"--mypy_grpc_out={out}",
            *sorted(str(path.relative_to(root)) for path in root.glob("octavo/**/*.proto")),
        ]
        if status := protoc.main(arguments):
            raise RuntimeError(f"protoc ended with exit status {status}")
