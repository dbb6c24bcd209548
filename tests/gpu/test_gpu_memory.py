"""The pool is sized by what this process takes, whatever its neighbours on the GPU take and give back meanwhile."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from octavo.worker.config import WorkerConfig
from octavo.worker.memory_plan import GIB, MemoryPlan
from octavo.worker.models.weights import load_decoder
from octavo.worker.step_sizes import StepSizes
from support.tiny_models import save_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

NEIGHBOUR = """
import sys, torch
while True:
    held = torch.empty(4 * 2**30, dtype=torch.uint8, device="cuda")
    print("held", flush=True)
    if not sys.stdin.readline():
        break
    del held
    torch.cuda.empty_cache()
    print("given back", flush=True)
    if not sys.stdin.readline():
        break
"""


def plan_of(folder: Path) -> MemoryPlan:
    from octavo.worker.gpu_loading import _measure
    from octavo.worker.models.gpu_decoder import GpuDecoder

    config = WorkerConfig(listen=["frames:///tmp/unused.sock"], model=folder, gpu_memory_utilization=0.2)
    model = GpuDecoder(load_decoder(folder, torch.bfloat16, torch.device("cuda")))
    return _measure(config, model, StepSizes(16, 512), 256, None)


def test_a_neighbour_that_takes_and_gives_back_memory_does_not_change_the_pool(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = save_tiny_model("llama", tmp_path_factory.mktemp("llama")).folder
    alone = plan_of(folder)
    is_over = threading.Event()

    with subprocess.Popen(
        [sys.executable, "-c", NEIGHBOUR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as neighbour:

        def keep_changing() -> None:
            while not is_over.is_set() and neighbour.stdout.readline():
                neighbour.stdin.write("\n")
                neighbour.stdin.flush()

        changing = threading.Thread(target=keep_changing)
        changing.start()
        try:
            plans = [plan_of(folder) for _ in range(4)]
        finally:
            is_over.set()
            changing.join()
            neighbour.kill()
    assert alone.kv_pool > 10 * GIB
    for plan in plans:
        assert plan.kv_pool == pytest.approx(alone.kv_pool, rel=0.01)
