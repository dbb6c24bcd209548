"""Where a decode step of a GPU worker goes, kernel by kernel, for the shape of Llama-3.1-8B.

python benchmarks/gpu_profile.py
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path

import torch
import workloads

from octavo.common.links import Address
from octavo.common.messages.step import OpenSlot, RowFlag, StepPlan, TableDelta
from octavo.worker.config import WorkerConfig
from octavo.worker.loading import load_core

BLOCK_SIZE = 16
CASES = ((1, 200), (64, 200), (256, 400), (1000, 400))
"""(rows, tokens of context)."""
NUM_STEPS = 6


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(workloads.LLAMA_8B), encoding="utf-8")
        config = WorkerConfig(
            listen=[Address("local", "worker")],
            model=Path(folder),
            load_format="dummy",
            num_blocks=30_000,
            max_num_seqs=1024,
            max_num_batched_tokens=8192,
            max_model_len=20480,
        )
        runner = load_core(config, lambda progress: None).runner
    for num_rows, context in CASES:
        per_row = -(-(context + NUM_STEPS + 4) // BLOCK_SIZE)
        step_id = 1
        runner.execute(
            StepPlan(
                step_id=step_id,
                opened_slots=[OpenSlot(slot, slot, (slot,), 0.0, 1.0, 0, None) for slot in range(num_rows)],
                table_deltas=[
                    TableDelta(slot, 0, tuple(range(slot * per_row, (slot + 1) * per_row)), (0,) * per_row)
                    for slot in range(num_rows)
                ],
            )
        )

        def decode(position: int, num_rows: int = num_rows) -> None:
            rows = list(range(num_rows))
            runner.execute(
                StepPlan(
                    step_id=0,
                    slots=rows,
                    starts=[position] * num_rows,
                    lengths=[1] * num_rows,
                    flags=[RowFlag.SAMPLE] * num_rows,
                    token_ids=rows,
                )
            )

        decode(context)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for step in range(NUM_STEPS):
                decode(context + 1 + step)
        times: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for event in profile.events():
            times[event.name] += event.device_time_total
            counts[event.name] += 1
        print(f"\n{num_rows} rows of {context} tokens: {sum(times.values()) / NUM_STEPS:.0f} us of kernels a step")
        for name, total in times.most_common(14):
            print(f"  {total / NUM_STEPS:9.1f} us  {counts[name] / NUM_STEPS:6.1f} launches  {name[:110]}")
        runner.reset()


if __name__ == "__main__":
    main()
