"""The chart, rendered by helm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/octavo"


def find_helm() -> str | None:
    """helm beside this Python (`make install-dev` puts it there), or on the PATH."""
    return shutil.which("helm", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


class ChartError(Exception):
    """What helm says of values or templates that it refuses."""


def run_helm(helm: str, *arguments: str) -> str:
    """Output of helm. Raises ChartError."""
    finished = subprocess.run([helm, *arguments], capture_output=True, text=True, timeout=60)
    if finished.returncode:
        raise ChartError(finished.stderr.strip())
    return finished.stdout


def render(helm: str, values: dict[str, Any], kubernetes_version: str = "1.33.0") -> list[dict[str, Any]]:
    """The manifests for these values on top of the defaults, of a release octavo in the namespace llm."""
    given = [f"--set-json={key}={json.dumps(value)}" for key, value in values.items()]
    text = run_helm(
        helm, "template", "octavo", str(CHART), "--namespace", "llm", "--kube-version", kubernetes_version, *given
    )
    return [document for document in yaml.safe_load_all(text) if document]
