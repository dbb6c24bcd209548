"""Times a decode step of one row, whole and product by product, in each way that the worker could run it.

    python benchmarks/gpu_single_row.py

Shape of Llama-3.1-8B, random weights, a context of 200 tokens; each way is captured in a graph. What the worker takes
by itself is said by its log line "decode of one row".
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import workloads
from gpu_timing import measure_limits, time_us
from torch import Tensor

from octavo.common.links import Address
from octavo.common.messages.step import OpenSlot, RowFlag, StepPlan, TableDelta
from octavo.worker import attention_plan
from octavo.worker.config import WorkerConfig
from octavo.worker.kernels.few_row_linear import add_few_row_linear
from octavo.worker.kernels.rms_norm import rms_norm
from octavo.worker.kernels.single_row_product import TILING, single_row_product
from octavo.worker.loading import load_core
from octavo.worker.models.single_row import SingleRow
from octavo.worker.step_graphs import GraphKey

CONTEXT = 200
TILINGS = [TILING, (8, 512, 4, 4), (16, 1024, 8, 3), (8, 1024, 4, 3), (32, 256, 4, 4), (16, 256, 4, 6), (4, 1024, 2, 4)]
MIN_PARTS = (64, 128, 256)
NUM_REPLAYS = 30
PRODUCTS = {"qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}


def load(folder: Path) -> Any:
    (folder / "config.json").write_text(json.dumps(workloads.LLAMA_8B), encoding="utf-8")
    config = WorkerConfig(
        listen=[Address("local", "worker")],
        model=folder,
        load_format="dummy",
        num_blocks=2000,
        num_host_blocks=0,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        max_model_len=4096,
    )
    return load_core(config, lambda progress: print(progress, flush=True) if "%" not in progress else None).runner


def step_us(runner: Any, way: SingleRow | None) -> float:
    """Median microseconds of the whole step's graph, sampling included."""
    key = GraphKey(1, False)
    runner.model.single_row = way
    runner.capture_trial_graph(runner._graphs.keys.index(key))
    decode = StepPlan(step_id=0, slots=[0], starts=[CONTEXT], lengths=[1], flags=[RowFlag.SAMPLE], token_ids=[100])
    runner.execute(decode)
    times = []
    for _ in range(NUM_REPLAYS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        runner._graphs.replay(key)
        ended.record()
        ended.synchronize()
        times.append(1000 * began.elapsed_time(ended))
    return statistics.median(times[5:])


def print_products(copy_rate: float) -> None:
    for name, (out_features, in_features) in PRODUCTS.items():
        num_bytes = 2 * out_features * in_features
        weights = [
            torch.randn((out_features, in_features), dtype=torch.bfloat16, device="cuda")
            for _ in range(max(2, -(-(512 << 20) // num_bytes)))
        ]
        x = torch.randn((1, in_features), dtype=torch.bfloat16, device="cuda")
        norm = torch.ones(in_features, dtype=torch.bfloat16, device="cuda")
        residual = torch.zeros((1, out_features), dtype=torch.bfloat16, device="cuda")
        adds, is_gated = name in ("output", "down"), name == "gate_up"

        def usual(weights: list[Tensor] = weights, x: Tensor = x, norm: Tensor = norm, adds: bool = adds) -> None:
            for weight in weights:
                if adds:
                    add_few_row_linear(residual, x, weight)  # noqa: B023
                else:
                    torch.mm(rms_norm(x, norm, 1e-5), weight.t())

        cells = [("usual", time_us(usual, launches_per_graph=len(weights)))]
        for tiling in TILINGS:
            for overlaps in (False, True) if tiling == TILING else (True,):

                def fused(tiling: tuple[int, int, int, int] = tiling, overlaps: bool = overlaps) -> None:
                    for weight in weights:  # noqa: B023
                        single_row_product(
                            x,  # noqa: B023
                            weight,
                            None,
                            None if adds else norm,  # noqa: B023
                            1e-5,
                            add_to=residual if adds else None,  # noqa: B023
                            is_gated=is_gated,  # noqa: B023
                            overlaps=overlaps,
                            tiling=tiling,
                        )

                us = time_us(fused, launches_per_graph=len(weights))
                cells.append((f"{tiling}{' overlapping' if overlaps else ''}", us))
        for label, us in cells:
            print(
                f"{name:8} {label:32} {us:7.2f} us  {num_bytes / us * 1e6 / copy_rate:5.2f} of the copy rate",
                flush=True,
            )


def main() -> None:
    limits = measure_limits()
    print(f"copy {limits.copy_bytes_per_s / 1e12:.2f} TB/s")
    with torch.inference_mode():
        print_products(limits.copy_bytes_per_s)
    with tempfile.TemporaryDirectory() as folder:
        runner = load(Path(folder))
    num_blocks = CONTEXT // 16 + 1
    runner.execute(
        StepPlan(
            step_id=0,
            opened_slots=[OpenSlot(0, 0, (0,), 0.0, 1.0, 0, None)],
            table_deltas=[TableDelta(0, 0, tuple(range(num_blocks)), (0,) * num_blocks)],
            slots=[0],
            starts=[0],
            lengths=[CONTEXT],
            flags=[RowFlag.SAMPLE],
            token_ids=[100] * CONTEXT,
        )
    )
    decoder = runner.model.decoder
    ways: dict[str, SingleRow | None] = {"usual": None, "fused": SingleRow(decoder, overlaps=False)}
    ways |= {f"overlapping {tiling}": SingleRow(decoder, overlaps=True, tiling=tiling) for tiling in TILINGS}
    usual_part = attention_plan.MIN_PART
    for name, way in ways.items():
        print(f"step     {name:32} {step_us(runner, way):8.1f} us", flush=True)
    best = min((way for way in ways.values() if way is not None), key=lambda way: step_us(runner, way))
    for part in MIN_PARTS:
        attention_plan.MIN_PART = part
        print(f"step     parts of {part:3} tokens (fastest way)   {step_us(runner, best):8.1f} us", flush=True)
    attention_plan.MIN_PART = usual_part


if __name__ == "__main__":
    main()
