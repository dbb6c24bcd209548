"""Where a step of a GPU worker goes, for the shape of Llama-3.1-8B: host, device, and kernel by kernel.

python benchmarks/gpu_profile.py
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import workloads

from octavo.common.links import Address
from octavo.common.messages.step import OpenSlot, RowFlag, SharingGroup, StepPlan, TableDelta
from octavo.worker.config import WorkerConfig
from octavo.worker.loading import load_core
from octavo.worker.runner import Runner

BLOCK_SIZE = 16
CASES = (
    (1, 200, 0, 0),
    (64, 200, 0, 0),
    (256, 400, 0, 0),
    (1000, 400, 0, 0),
    (500, 1652, 0, 1488),
    (0, 0, 128, 0),
    (16, 200, 200, 0),
    (16, 200, 500, 0),
    (64, 200, 200, 0),
)
"""(decode rows, tokens of their context, tokens of one prompt that is computed beside them, leading tokens of the
contexts that all rows share)."""
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
    for num_rows, context, num_prompt, num_shared in CASES:
        step = steps_of(runner, num_rows, context, num_prompt, num_shared)
        print(f"\n{num_rows} rows of {context} tokens, {num_shared} shared, a prompt of {num_prompt}: ", end="")
        profile(runner, step)
        runner.reset()


def steps_of(
    runner: Runner, num_rows: int, context: int, num_prompt: int, num_shared: int
) -> Callable[[int], StepPlan]:
    """Fills the slots, and returns what makes the plan of a step, given its number; the prompt is always the same."""
    shared = tuple(range(num_shared // BLOCK_SIZE))
    num_blocks = -(-(context + 4 * NUM_STEPS) // BLOCK_SIZE)
    own = num_blocks - len(shared)
    tables = []
    for slot in range(num_rows):
        first = len(shared) + slot * own
        tables.append(TableDelta(slot, 0, (*shared, *range(first, first + own)), (0,) * num_blocks))
    groups = [SharingGroup(tuple(range(num_rows)), len(shared))] if shared else []
    slots, lengths = list(range(num_rows)), [1] * num_rows
    if num_prompt:
        first, count = len(shared) + num_rows * own, -(-num_prompt // BLOCK_SIZE)
        tables.append(TableDelta(num_rows, 0, tuple(range(first, first + count)), (0,) * count))
        slots.append(num_rows)
        lengths.append(num_prompt)
    opened = [OpenSlot(slot, slot, (slot,), 0.0, 1.0, 0, None) for slot in slots]
    runner.execute(StepPlan(step_id=1, opened_slots=opened, table_deltas=tables))

    def plan(step: int) -> StepPlan:
        return StepPlan(
            step_id=0,
            slots=slots,
            starts=[context + step] * num_rows + [0] * (num_prompt > 0),
            lengths=lengths,
            flags=[RowFlag.SAMPLE] * len(slots),
            token_ids=list(range(sum(lengths))),
            groups=groups,
        )

    return plan


def profile(runner: Runner, plan_of: Callable[[int], StepPlan]) -> None:
    """Time steps alone, then look at their kernels."""
    launch_ms, whole_ms, busy_ms = [], [], []
    for step in range(2 * NUM_STEPS):
        plan = plan_of(step)
        began = time.perf_counter()
        launched = runner.launch(plan)
        launch_ms.append(1e3 * (time.perf_counter() - began))
        launched.wait()
        whole_ms.append(1e3 * (time.perf_counter() - began))
        busy_ms.append(1e3 * launched.measured_s[1])
    medians = [statistics.median(times[1:]) for times in (launch_ms, whole_ms, busy_ms)]
    print("launched after {:.2f} ms, ended after {:.2f} ms, device {:.2f} ms".format(*medians), end="; ")
    print(f"the first after {whole_ms[0]:.2f} ms")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for step in range(2 * NUM_STEPS, 3 * NUM_STEPS):
            runner.execute(plan_of(step))
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in profiler.events():
        times[event.name] += event.device_time_total
        counts[event.name] += 1
    print(f"  {sum(times.values()) / NUM_STEPS:.0f} us of kernels a step")
    for name, total in times.most_common(14):
        print(f"  {total / NUM_STEPS:9.1f} us  {counts[name] / NUM_STEPS:6.1f} launches  {name[:110]}")


if __name__ == "__main__":
    main()
