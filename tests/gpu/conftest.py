"""Without Triton, which comes with a torch that serves GPUs, nothing here can be imported."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
