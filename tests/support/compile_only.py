"""Compiles decode attention ahead for Hopper, without a GPU, in a process of its own: the tests' has Triton interpret.

Prints the shares of progress, the kernels that were loaded, and how many were after the same launches once more.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from octavo.worker.kernels.compile_ahead import compiling_ahead
from octavo.worker.kernels.decode_rows import ITEM, DecodeRows, make_scratch
from octavo.worker.kernels.paged_decode import paged_decode

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128


class _Hopper:
    """A driver that has a device and nothing on it."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def launch(num_items: int) -> None:
    query = torch.empty((1, NUM_HEADS, HEAD_DIM), dtype=torch.bfloat16)
    cache = torch.empty((4, 2, NUM_KV_HEADS, 16, HEAD_DIM), dtype=torch.bfloat16)
    rows = DecodeRows(torch.zeros((num_items, ITEM), dtype=torch.int32))
    scratch = make_scratch(num_items, 1, 1, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, query.device)
    paged_decode(query, cache, torch.zeros((1, 16), dtype=torch.int32), rows, scratch, query.clone(), scale=0.1)


def main() -> None:
    loaded: list[str] = []
    shares: list[float] = []
    hopper: Any = _Hopper()
    driver.set_active(hopper)
    torch.cuda.is_available = lambda: True

    def load(kernel: CompiledKernel) -> None:
        loaded.append(kernel.metadata.name)
        raise OutOfResources(2**20, 2**18, "shared memory")  # which is for the launch to say

    CompiledKernel.run = property(load)
    with compiling_ahead(shares.append):
        for num_items in (20, 100, 600, 20):
            launch(num_items)
    names = list(loaded)
    with compiling_ahead(shares.append):
        launch(100)
    print(json.dumps([shares, names, len(loaded)]))


if __name__ == "__main__":
    main()
