"""How fast matrix products are for a moment, and how fast for seconds: a GPU at its power limit lowers its clock.

Each line is a large product repeated: TFLOP/s, clock and power from nvidia-smi while it ran, and whether power was
what lowered the clock.
"""

from __future__ import annotations

import subprocess
import time

import torch

M, N, K = 8192, 28672, 4096
SW_POWER_CAP = 0x4
"""Of NVML's reasons for a lowered clock."""


def device_state() -> str:
    fields = "clocks.sm,power.draw,clocks_event_reasons.active"
    answer = subprocess.run(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"], capture_output=True, text=True, check=True
    )
    clock, power, reasons = answer.stdout.strip().split(", ")
    return f"{clock:>9}  {power:>9}  {'held by its power limit' if int(reasons, 16) & SW_POWER_CAP else ''}"


def measure(label: str, repeats: int, x: torch.Tensor, weight: torch.Tensor) -> None:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        torch.mm(x, weight.T)
    end.record()
    time.sleep(0.002 * repeats)  # towards the end of the products
    state = device_state() if repeats >= 100 else ""
    end.synchronize()
    tflops = 2 * M * N * K * repeats / start.elapsed_time(end) / 1e9
    print(f"{label:12} {tflops:5.0f} TFLOP/s  {state}", flush=True)


def main() -> None:
    x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(N, K, device="cuda", dtype=torch.bfloat16)
    measure("first", 10, x, weight)
    for _ in range(4):
        time.sleep(0.5)
        measure("a moment", 10, x, weight)
    for index in range(8):
        measure(f"second {index * 0.6:.1f}", 200, x, weight)


if __name__ == "__main__":
    main()
