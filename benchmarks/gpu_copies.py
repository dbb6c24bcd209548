"""Times the copies of KV blocks against what plain copies of the same memory reach in the same run.

    python benchmarks/gpu_copies.py

Blocks of Llama-3.1-8B, 2 MiB each, random ids. Swap: the worker's own transfers, to pinned memory and back, one way and
both at once, beside a plain copy of one large piece. Copy-on-write: the kernel, beside a plain copy on the device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from gpu_timing import measure_limits, time_us

from octavo.common.messages.kv import Transfer, TransferDirection
from octavo.worker.block_transfers import new_transfers
from octavo.worker.kernels.copy_blocks import copy_blocks

BLOCK_SHAPE = (32, 2, 8, 16, 128)
NUM_BLOCKS, NUM_HOST_BLOCKS = 8192, 2048
REPEATS = 5
TO_HOST, TO_DEVICE = TransferDirection.TO_HOST, TransferDirection.TO_DEVICE


def seconds(run: Callable[[], object]) -> float:
    """Median by the host's clock, from the call until the device has nothing left to do."""
    times = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def main() -> None:
    pool = torch.randn((NUM_BLOCKS, *BLOCK_SHAPE), device="cuda").to(torch.bfloat16)
    block_bytes = pool[0].numel() * 2
    began = time.perf_counter()
    transfers = new_transfers(pool, NUM_HOST_BLOCKS)
    host = transfers._host
    print(f"pinned {host.numel() * 2 / 2**30:.1f} GiB in {time.perf_counter() - began:.1f} s")
    draw = np.random.default_rng(0)
    num_moved = 1024
    numbers = iter(range(1, 10**9))

    def move(direction: TransferDirection, device_ids: list[int], host_ids: list[int]) -> Transfer:
        return Transfer(next(numbers), direction, tuple(device_ids), (1,) * len(device_ids), tuple(host_ids))

    whole, other = host[:num_moved], host[num_moved : 2 * num_moved]
    plain_out = num_moved * block_bytes / seconds(lambda: whole.copy_(pool[:num_moved], non_blocking=True))
    plain_in = num_moved * block_bytes / seconds(lambda: pool[:num_moved].copy_(whole, non_blocking=True))
    side = torch.cuda.Stream()

    def plain_both() -> None:
        whole.copy_(pool[:num_moved], non_blocking=True)
        with torch.cuda.stream(side):
            pool[num_moved : 2 * num_moved].copy_(other, non_blocking=True)

    both = 2 * num_moved * block_bytes / seconds(plain_both)
    print(f"plain    out {plain_out / 1e9:6.1f}   in {plain_in / 1e9:6.1f}   both {both / 1e9:6.1f} GB/s")

    random_ids = draw.permutation(NUM_BLOCKS).tolist()
    host_ids = draw.permutation(NUM_HOST_BLOCKS).tolist()
    for name, device_ids, host_places in (
        ("random", random_ids, host_ids),
        ("host in order", random_ids, list(range(NUM_HOST_BLOCKS))),
        (
            "runs of 16",
            [first + place for first in range(0, NUM_BLOCKS, 64) for place in range(16)],
            list(range(NUM_HOST_BLOCKS)),
        ),
        ("in order", list(range(NUM_BLOCKS)), list(range(NUM_HOST_BLOCKS))),
    ):
        first, second = slice(0, num_moved), slice(num_moved, 2 * num_moved)
        issue_s: list[float] = []

        def swap_out(device_ids: list[int] = device_ids, places: list[int] = host_places, at: slice = first) -> None:
            began = time.perf_counter()
            transfers.to_host([move(TO_HOST, device_ids[at], places[at])])
            issue_s.append(time.perf_counter() - began)  # noqa: B023
            transfers.finished(wait=True)

        def swap_in(device_ids: list[int] = device_ids, places: list[int] = host_places, at: slice = first) -> None:
            transfers.to_device([move(TO_DEVICE, device_ids[at], places[at])])
            transfers.finished(wait=True)

        def swap_both(device_ids: list[int] = device_ids, places: list[int] = host_places) -> None:
            transfers.to_host([move(TO_HOST, device_ids[first], places[first])])  # noqa: B023
            transfers.to_device([move(TO_DEVICE, device_ids[second], places[second])])  # noqa: B023
            transfers.finished(wait=True)

        out = num_moved * block_bytes / seconds(swap_out)
        back = num_moved * block_bytes / seconds(swap_in)
        two = 2 * num_moved * block_bytes / seconds(swap_both)
        print(
            f"swap     {name:14} out {out / 1e9:6.1f} ({out / plain_out:4.2f})   in {back / 1e9:6.1f} "
            f"({back / plain_in:4.2f})   both {two / 1e9:6.1f} ({two / both:4.2f}) GB/s (of plain)   "
            f"launching takes {1e6 * statistics.median(issue_s) / num_moved:5.1f} us a block",
            flush=True,
        )
    wrong = pool.clone()
    ids = draw.permutation(NUM_BLOCKS)[:256].tolist()
    transfers.to_host([move(TO_HOST, ids, host_ids[:256])])
    transfers.finished(wait=True)
    wrong[ids] = 0
    pool[ids] = 0
    transfers.to_device([move(TO_DEVICE, ids, host_ids[:256])])
    transfers.finished(wait=True)
    torch.cuda.synchronize()
    assert all(torch.equal(pool[one], host[place].cuda()) for one, place in zip(ids, host_ids[:256], strict=True))
    assert not torch.equal(pool[ids], wrong[ids])

    limits = measure_limits()
    words = pool.view(NUM_BLOCKS, -1).view(torch.int32)
    for num_copies in (1, 8, 64, 512):
        chosen = draw.permutation(NUM_BLOCKS)[: 2 * num_copies]
        sources, targets = (
            torch.tensor(part, dtype=torch.int32, device="cuda") for part in (chosen[:num_copies], chosen[num_copies:])
        )
        us = time_us(lambda sources=sources, targets=targets: copy_blocks(words, sources, targets))  # type: ignore[misc]
        rate = 2 * num_copies * block_bytes / (us * 1e-6)
        print(
            f"copy on write {num_copies:4} blocks {us:8.1f} us  "
            f"{rate / 1e12:5.2f} TB/s ({rate / limits.copy_bytes_per_s:4.2f} of a plain copy)",
            flush=True,
        )


if __name__ == "__main__":
    main()
