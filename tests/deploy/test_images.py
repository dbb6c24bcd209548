"""Dockerfiles and the requirements that they install."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "deploy/requirements"
DOCKERFILES = {
    "gateway": ROOT / "services/gateway/Dockerfile",
    "scheduler": ROOT / "services/scheduler/Dockerfile",
    "kvmanager": ROOT / "services/kvmanager/Dockerfile",
    "worker": ROOT / "services/worker/Dockerfile",
    "model": ROOT / "cli/Dockerfile",
}
FILES = [*DOCKERFILES, "build"]

_PIN = re.compile(r"^([\w.-]+)==(\S+)((?:.*\\\n)(?:[ \t]+--hash=sha256:[0-9a-f]{64}.*\n)+)", re.MULTILINE)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(name: str) -> dict[str, str]:
    """Package |-> version, of those that have a hash."""
    text = (REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8")
    return {normal(package): version for package, version, _ in _PIN.findall(text)}


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [line.split("#")[0].strip().partition("==") for line in lines]
    return {normal(name): version for name, _, version in found if version}


def dependencies(member: str) -> set[str]:
    project = tomllib.loads((ROOT / member / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {normal(re.split(r"[\[><=~! ;]", needed)[0]) for needed in project["dependencies"]}
    return {name for name in names if not name.startswith("octavo-")}


@pytest.mark.parametrize("name", FILES)
def test_every_requirement_has_a_hash(name: str) -> None:
    text = (REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8")
    assert len(pins(name)) == len(re.findall(r"^\S+==", text, re.MULTILINE)) > 5


@pytest.mark.parametrize("name", FILES)
def test_images_install_the_versions_that_the_tests_run_with(name: str) -> None:
    """Run `make lock` where this fails."""
    tested = constraints()
    differing = {package: version for package, version in pins(name).items() if tested.get(package, version) != version}
    assert differing == {}


@pytest.mark.parametrize("name", DOCKERFILES)
def test_images_install_all_that_their_distributions_need(name: str) -> None:
    """Run `make lock` where this fails."""
    member = str(DOCKERFILES[name].parent.relative_to(ROOT))
    needed = dependencies(member) | dependencies("libs/common") | dependencies("proto")
    assert needed - {"torch"} <= set(pins(name))


def imported_by(folder: Path) -> set[str]:
    """Packages of others that the sources import, at their start or later."""
    modules = set[str]()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules.add(node.module.partition(".")[0])
    names = packages_distributions()
    others = modules - sys.stdlib_module_names - {"octavo"}
    return {normal(name) for module in others for name in names.get(module, [module])}


@pytest.mark.parametrize("name", DOCKERFILES)
def test_images_install_all_that_their_sources_import(name: str) -> None:
    """triton comes with torch's build for GPUs; who does not name xxhash as the algorithm of hashes needs none."""
    imported = imported_by(DOCKERFILES[name].parent / "src") | imported_by(ROOT / "libs/common/src")
    assert imported - set(pins(name)) <= {"torch", "triton", "xxhash"}


def test_only_the_worker_gets_torch_and_its_own_version_of_it() -> None:
    for name, dockerfile in DOCKERFILES.items():
        assert ("torch" in dockerfile.read_text(encoding="utf-8")) == (name == "worker")
        assert "torch" not in pins(name)
    assert f"ARG TORCH=torch=={constraints()['torch']}\n" in DOCKERFILES["worker"].read_text(encoding="utf-8")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfiles_take_their_base_by_argument_and_end_without_root(name: str) -> None:
    text = DOCKERFILES[name].read_text(encoding="utf-8")
    assert not text.startswith("# syntax")
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) - {"scratch"} == {"${BASE_IMAGE}"}
    final = text[text.rindex("\nFROM ") :]
    assert "USER 10001:10001\n" in final
    assert "pip" not in re.sub(r"PIP_\w+", "", final)
    assert f"RUN sh install.sh packages {name}.txt" in text


def test_what_others_have_made_is_installed_by_hash_and_ours_without_an_index() -> None:
    script = (ROOT / "deploy/image/install.sh").read_text(encoding="utf-8")
    installs = [line.strip() for line in script.splitlines() if re.match(r"\s+(pip install|into_octavo) ", line)]
    assert [("--require-hashes" in line, "--no-index" in line) for line in installs] == [
        (True, False), (True, False), (False, True),
    ]  # fmt: skip


@pytest.mark.parametrize("name", DOCKERFILES)
def test_what_is_copied_is_in_the_build_context(name: str) -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[0] == "!"]
    copied = re.findall(r"^COPY (?!--from)(\S+) \S+$", DOCKERFILES[name].read_text(encoding="utf-8"), re.MULTILINE)
    assert len(copied) >= 5
    for path in copied:
        assert (ROOT / path).exists()
        assert any(path == folder or path.startswith(f"{folder}/") for folder in allowed)
