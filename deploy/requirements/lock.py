"""Writes the *.txt files beside it: what each image installs, at the versions of constraints.txt, with hashes.

Run `make lock` after a change of a dependency. torch is left out, and what only its CUDA build needs: which build of it
an image takes is a choice of whoever builds the image.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]

_SHARED = ("libs/common", "proto")
_IMAGES: dict[str, tuple[str, ...]] = {
    "gateway": (*_SHARED, "services/gateway"),
    "scheduler": (*_SHARED, "services/scheduler"),
    "kvmanager": (*_SHARED, "services/kvmanager"),
    "worker": (*_SHARED, "services/worker"),
    "model": (*_SHARED, "cli"),
}
_OWN = re.compile(r"octavo-")
_LEFT_OUT = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)==")
_PINNED = re.compile(r"^\S+==.*\n(?:[ \t]+.*\n)*", re.MULTILINE)


def requirements_of(member: str) -> list[str]:
    """What a distribution of this repository needs from elsewhere, its optional features too."""
    project = tomllib.loads((ROOT / member / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = [needed for extra in project.get("optional-dependencies", {}).values() for needed in extra]
    return [needed for needed in [*project["dependencies"], *optional] if not _OWN.match(needed)]


def build_requirements() -> list[str]:
    """What turns the distributions into wheels."""
    proto = tomllib.loads((ROOT / "proto/pyproject.toml").read_text(encoding="utf-8"))
    requires: list[str] = proto["build-system"]["requires"]
    return requires


def locked(requirements: list[str]) -> str:
    """The text of a requirements file that pip takes with --require-hashes, for every platform and Python from 3.11."""
    command = ["uv", "pip", "compile", "-", "--constraints", "constraints.txt", "--generate-hashes", "--universal"]
    options = ["--python-version", "3.11", "--no-annotate", "--no-header", "--quiet"]
    asked = "\n".join(requirements)
    found = subprocess.run([*command, *options], cwd=ROOT, input=asked, capture_output=True, text=True, check=True)
    return "".join(block for block in _PINNED.findall(found.stdout) if not _LEFT_OUT.match(block))


def main() -> None:
    wanted = {name: [one for member in members for one in requirements_of(member)] for name, members in _IMAGES.items()}
    for name, requirements in {**wanted, "build": build_requirements()}.items():
        text = "# Made by `make lock`.\n" + locked(requirements)
        (FOLDER / f"{name}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
