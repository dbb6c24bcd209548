"""helm, where it is."""

from __future__ import annotations

import os

import pytest

from support.helm_chart import find_helm


@pytest.fixture(scope="session")
def helm() -> str:
    """The command. Where it is missing, its tests are skipped; `make check-deploy` installs it, and fails without."""
    if found := find_helm():
        return found
    if os.environ.get("OCTAVO_REQUIRE_HELM"):
        raise FileNotFoundError("helm")
    pytest.skip("helm is not installed: make check-deploy installs it")
