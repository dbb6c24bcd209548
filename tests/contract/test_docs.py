"""Documentation that names things names what exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])

_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_MAKE = re.compile(r"(?:^|`|= |> )make ([a-z][a-z-]*)", re.MULTILINE)
_TARGET = re.compile(r"^([a-z][a-z-]*):.*## ", re.MULTILINE)
_COMMAND = re.compile(r"\.venv/bin/octavo ([a-z]+)")
_SHORT_PATH = re.compile(r"`(gateway|scheduler|kvmanager|worker)/([\w/]+\.py)`")
_PATH = re.compile(r"`((?:tests|benchmarks|docs|libs|services|cli|proto)/[\w./-]+)`")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors_of(page: Path) -> set[str]:
    """As web views of a repository make them: lower case, dashes for spaces, no other punctuation."""
    headings = _HEADING.findall(_FENCE.sub("", text_of(page)))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for target in _LINK.findall(_FENCE.sub("", text_of(page))):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{name_of(page)} links to {target}"
        if anchor:
            assert anchor in anchors_of(linked), f"{name_of(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_make_command_is_a_target_of_the_makefile(page: Path) -> None:
    targets = set(_TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))
    assert "serve" in targets
    assert set(_MAKE.findall(text_of(page))) <= targets


def test_the_readme_names_make_serve_and_make_test() -> None:
    assert {"serve", "test"} <= set(_MAKE.findall(text_of(ROOT / "README.md")))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_octavo_command_exists(page: Path) -> None:
    from octavo.cli.main import app

    groups = {group.name for group in app.registered_groups}
    commands = {command.callback.__name__ for command in app.registered_commands if command.callback is not None}
    assert set(_COMMAND.findall(text_of(page))) <= groups | commands


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_path_of_the_repository_exists(page: Path) -> None:
    missing = [path for path in _PATH.findall(text_of(page)) if not (ROOT / path).exists() and path != "proto/gen"]
    assert missing == []


def test_every_short_path_of_the_architecture_page_is_a_file_of_that_service() -> None:
    paths = _SHORT_PATH.findall(text_of(ROOT / "docs/architecture.md"))
    assert len(paths) > 20
    missing = [path for path in paths if not (ROOT / f"services/{path[0]}/src/octavo/{path[0]}/{path[1]}").exists()]
    assert missing == []


def test_generated_tables_are_current() -> None:
    """Run `make docs` where this fails."""
    check = [sys.executable, str(ROOT / "docs/generate_reference.py"), "--check"]
    finished = subprocess.run(check, capture_output=True, text=True)
    assert (finished.returncode, finished.stderr) == (0, "")
