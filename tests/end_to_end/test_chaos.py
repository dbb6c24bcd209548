"""The drill of benchmarks/chaos, short: services die at random moments under mixed load, and nothing fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from octavo.cli.models import PreparedModel

DRILL = Path(__file__).parents[2] / "benchmarks" / "chaos"


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments",
    [
        ["deaths", "--rounds", "1", "--clients", "4"],
        ["chaos", "--seconds", "60", "--gap", "4", "8", "--clients", "6"],
        ["soak", "--seconds", "60", "--clients", "4"],
    ],
    ids=["each death by itself", "deaths at random", "no deaths for long"],
)
def test_no_request_fails_and_nothing_is_left(arguments: list[str], tiny_model: PreparedModel) -> None:
    command = [sys.executable, str(DRILL), *arguments, "--model", str(tiny_model.folder)]
    drill = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=290, check=False
    )
    assert drill.returncode == 0, drill.stdout
