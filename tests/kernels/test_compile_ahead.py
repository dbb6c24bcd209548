"""Kernels are compiled ahead without a launch; that of a GPU is tests/gpu/test_gpu_compile_ahead.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from support import compile_only


def test_each_kernel_is_compiled_and_loaded_once() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, compile_only.__file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

    shares, loaded, num_loaded = json.loads(done.stdout.splitlines()[-1])
    assert len(shares) == 3 and shares[-1] == 1.0
    assert loaded == ["_paged_decode_kernel"] * 3
    assert num_loaded == 3
