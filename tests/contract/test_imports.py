"""What each service loads when it starts: torch only in the worker, and there only with the model."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SERVICES = ["gateway", "scheduler", "kvmanager", "worker"]
HEAVY = {"torch", "transformers", "triton", "numba", "scipy", "pandas"}


def modules_after(code: str) -> set[str]:
    """Top-level modules, and second-level ones of octavo, that a fresh interpreter has after running `code`."""
    report = "import json, sys; print(json.dumps([name for name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    names = json.loads(done.stdout.splitlines()[-1])
    return {".".join(name.split(".")[:2]) if name.startswith("octavo.") else name.split(".")[0] for name in names}


@pytest.mark.parametrize("service", SERVICES)
def test_service_starts_without_heavy_imports(service: str) -> None:
    loaded = modules_after(f"import octavo.{service}.main")
    assert not loaded & HEAVY
    assert {name for name in loaded if name.startswith("octavo.")} <= {
        "octavo.common",
        "octavo.v1",
        f"octavo.{service}",
    }


def test_command_line_starts_without_any_service() -> None:
    loaded = modules_after("import octavo.cli.main")
    assert not loaded & (HEAVY | {"grpc", "fastapi", "uvicorn"})
    assert not loaded & {f"octavo.{service}" for service in SERVICES}


@pytest.mark.parametrize("service", SERVICES)
def test_service_explains_its_settings(service: str) -> None:
    command = [sys.executable, "-m", f"octavo.{service}.main"]
    shown = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    for flag in ("--config", "--log-level", "--metrics-listen", "--drain-grace-s"):
        assert flag in shown.stdout
    refused = subprocess.run([*command, "--no-such-flag", "1"], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
