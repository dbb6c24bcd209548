"""Times the attention kernels on a GPU against the limits measured in the same run.

    python benchmarks/gpu_kernels.py [--sweep] [--fp8] [--figures FILE]

Shape of Llama-3.1-8B: 32 query heads, 8 KV heads, head size 128, blocks of 16, bfloat16, random blocks. `--sweep` tries
the tilings among which the defaults were chosen.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import workloads
from gpu_limits import Figure
from gpu_timing import Limits, measure_limits, time_us
from torch import Tensor

from octavo.worker.attention_plan import FEW_ROWS, cut_queries, decode_items, spare_items
from octavo.worker.kernels import paged_prefill as prefill_module
from octavo.worker.kernels.decode_rows import ITEM, DecodeRows, make_scratch
from octavo.worker.kernels.few_row_linear import TILING, add_few_row_linear
from octavo.worker.kernels.many_queries import prefill
from octavo.worker.kernels.paged_decode import NewTokens, paged_decode
from octavo.worker.kernels.paged_prefill import PrefillRows, paged_prefill
from octavo.worker.kernels.quantize_rows import quantize_rows
from octavo.worker.models.fp8_linear import to_rows_of_e4m3
from octavo.worker.models.rotary import cos_sin_table
from octavo.worker.models.scaled_linear import ScaledLinear

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
DEVICE = "cuda"


def w1_after(num_steps: int) -> list[int]:
    """Contexts of the requests of W1 that run on after so many tokens each."""
    return [len(prompt) + num_steps for prompt, num_output in workloads.chat_like() if num_output > num_steps]


DECODES = {
    "1 x 200": [200],
    "16 x 400": [400] * 16,
    "32 x 300": [300] * 32,
    "64 x 200": [200] * 64,
    "128 x 300": [300] * 128,
    "32 x 16k": [16384] * 32,
    "1 x 1k": [1024],
    "1 x 4k": [4096],
    "1 x 32k": [32768],
    "4 x 1k": [1024] * 4,
    "64 x 1k": [1024] * 64,
    "64 x 4k": [4096] * 64,
    "256 x 1k": [1024] * 256,
    "256 x 4k": [4096] * 256,
    "1000 x 300": [300] * 1000,
    **{f"W1 after {steps} tokens": w1_after(steps) for steps in (1, 100, 200, 300, 400, 514, 700, 900)},
    "64 mixed, longest 8k": np.random.default_rng(0).lognormal(7.0, 0.9, 64).clip(16, 8192).astype(int).tolist(),
}
PREFILLS = {
    "1 x 8192": [(0, 8192)],
    "512 on 8192": [(8192, 512)],
    "2048 on 8192": [(8192, 2048)],
    "1 x 16384": [(0, 16384)],
    "16 x 512": [(0, 512)] * 16,
    "20 x 100 on 1500": [(1500, 100)] * 20,
    "8 x 1000": [(0, 1000)] * 8,
    "1 x 300": [(0, 300)],
}
DECODE_TILINGS = [(32, 1, 2), (32, 1, 3), (32, 2, 3), (64, 4, 2), (64, 2, 2), (16, 1, 4)]
PREFILL_TILINGS = [(128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 3), (64, 64, 4, 3), (64, 64, 4, 4)]
LINEARS = {"output": (4096, 4096), "down": (4096, 14336)}
LINEAR_TILINGS = [
    (16, 256, 4, 4),
    (16, 256, 4, 6),
    (16, 512, 4, 4),
    (16, 512, 8, 5),
    (32, 256, 4, 4),
    (32, 128, 4, 6),
    (16, 128, 2, 6),
    (64, 128, 4, 4),
]
LinearTiling = tuple[int, int, int, int]

TILINGS: list[tuple[str, Any]] = [
    *(("decode", tiling) for tiling in DECODE_TILINGS),
    *(("prefill", tiling) for tiling in PREFILL_TILINGS),
    *(("linear", tiling) for tiling in LINEAR_TILINGS),
]


class Pool:
    """Keys and values of rows, in several layers so that no launch finds the last one's data in the cache."""

    dtype = torch.bfloat16
    """Of keys and values. e4m3 comes with scales."""

    def __init__(self, seq_lens: list[int]) -> None:
        counts = [-(-length // BLOCK_SIZE) for length in seq_lens]
        num_blocks = sum(counts)
        layer_bytes = num_blocks * 2 * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM * self.dtype.itemsize
        self.num_layers = max(2, min(16, -(-(256 << 20) // layer_bytes)))
        shape = (num_blocks, self.num_layers, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        self.pool = torch.empty(shape, dtype=self.dtype, device=DEVICE)
        for block in self.pool.split(4096):
            block.copy_(torch.randn(block.shape, dtype=torch.bfloat16, device=DEVICE))
        self.scales = torch.ones((2, NUM_KV_HEADS), device=DEVICE) if self.dtype == torch.float8_e4m3fn else None
        ids = np.random.default_rng(0).permutation(num_blocks)
        self.tables = torch.zeros((len(seq_lens), max(counts)), dtype=torch.int32)
        for row, count in enumerate(counts):
            first = sum(counts[:row])
            self.tables[row, :count] = torch.from_numpy(ids[first : first + count])
        last = torch.tensor(seq_lens) - 1
        places = self.tables[torch.arange(len(seq_lens)), last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE
        self.last_slots = places.to(DEVICE, torch.int64)
        """Where each row's last token is: block_id * block_size + offset in the block."""
        self.tables = self.tables.to(DEVICE)


def column(values: object) -> Tensor:
    return torch.as_tensor(np.asarray(values), dtype=torch.int32, device=DEVICE)


def time_decode(
    seq_lens: list[int], tiling: tuple[int, int, int] | None, num_spare: int | None = None, *, stores: bool = False
) -> float:
    """Microseconds of a launch, which also does the work of `store_kv` if it `stores`."""
    pool = Pool(seq_lens)
    num_rows = len(seq_lens)
    num_spare = num_spare or spare_items(num_rows, NUM_KV_HEADS)
    items = np.zeros((num_rows + num_spare, ITEM), dtype=np.int64)
    made = decode_items(np.arange(num_rows), np.arange(num_rows), np.array(seq_lens), num_spare)
    items[: len(made)] = made
    rows = DecodeRows(column(items))
    scratch = make_scratch(len(items), num_rows, num_rows, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, torch.device(DEVICE))
    heads = torch.randn((num_rows, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM), dtype=torch.bfloat16, device=DEVICE)
    query = heads[:, :NUM_HEADS] if stores else heads[:, :NUM_HEADS].contiguous()
    out = torch.empty((num_rows, NUM_HEADS, HEAD_DIM), dtype=torch.bfloat16, device=DEVICE)
    new = NewTokens(cos_sin_table(None, HEAD_DIM, max(seq_lens), out.device), pool.last_slots, None, 0.0)

    def launch() -> None:
        for layer in range(pool.num_layers):
            paged_decode(
                query,
                pool.pool[:, layer],
                pool.tables,
                rows,
                scratch,
                out,
                scale=HEAD_DIM**-0.5,
                scales=pool.scales,
                new=new if stores else None,
                tiling=tiling,
            )

    return time_us(launch, launches_per_graph=pool.num_layers)


def time_prefill(chunks: list[tuple[int, int]], tiling: tuple[int, int, int, int] | None) -> tuple[float, float]:
    """Microseconds and FLOP of one launch."""
    query_lens = np.array([queries for _, queries in chunks])
    seq_lens = np.array([context + queries for context, queries in chunks])
    pool = Pool(seq_lens.tolist())
    attend = prefill
    if tiling is not None:
        tile_rows_size, keys_per_tile, num_warps, num_stages = tiling
        prefill_module.rows_per_tile = lambda group, head_dim: tile_rows_size
        attend = partial(paged_prefill, keys_per_tile=keys_per_tile, num_warps=num_warps, num_stages=num_stages)
    queries = prefill_module.queries_per_tile(NUM_HEADS // NUM_KV_HEADS, HEAD_DIM)
    tile_rows, tile_parts = cut_queries(query_lens, seq_lens, queries)
    rows = PrefillRows(
        slots=column(range(len(chunks))),
        tokens=column(np.cumsum(query_lens) - query_lens),
        query_lens=column(query_lens),
        seq_lens=column(seq_lens),
        tile_rows=column(tile_rows),
        tile_parts=column(tile_parts),
    )
    query = torch.randn((int(query_lens.sum()), NUM_HEADS, HEAD_DIM), dtype=torch.bfloat16, device=DEVICE)
    out = torch.empty_like(query)
    us = time_us(
        lambda: attend(query, pool.pool[:, 0], pool.tables, rows, out, scale=HEAD_DIM**-0.5, scales=pool.scales)
    )
    seen = sum(queries * context + queries * (queries + 1) / 2 for context, queries in chunks)
    return us, 4 * seen * NUM_HEADS * HEAD_DIM


def print_decodes(limits: Limits, tiling: tuple[int, int, int] | None = None, figures: Path | None = None) -> None:
    for name, seq_lens in DECODES.items():
        for kind in ("", ", storing")[: 1 + (len(seq_lens) <= FEW_ROWS)]:
            us = time_decode(seq_lens, tiling, stores=bool(kind))
            moved = sum(seq_lens) * 2 * NUM_KV_HEADS * HEAD_DIM * Pool.dtype.itemsize
            share = moved / us * 1e6 / limits.copy_bytes_per_s
            label = f"decode   {tiling or ''!s:16} {name + kind:22}"
            print(f"{label} {us:9.1f} us   {share:5.2f} of the copy rate", flush=True)
            Figure(f"decode attention {name}{kind}", us, "us", share).append_to(figures)


def print_prefills(
    limits: Limits, tiling: tuple[int, int, int, int] | None = None, figures: Path | None = None
) -> None:
    for name, chunks in PREFILLS.items():
        us, flop = time_prefill(chunks, tiling)
        rate = flop / us * 1e6
        share = rate / limits.matmul_flops
        print(
            f"prefill  {tiling or ''!s:16} {name:22} {us:9.1f} us   {rate / 1e12:5.0f} TFLOP/s  {share:5.2f} of matmul"
        )
        Figure(f"prefill attention {name}", rate / 1e12, "TFLOP/s", share).append_to(figures)


def time_linear(name: str, num_rows: int, tiling: LinearTiling | Literal["library"] | None) -> float:
    """A layer that adds to the residual; `library` is torch's matrix product."""
    out_features, in_features = LINEARS[name]
    num_weights = max(2, -(-(512 << 20) // (2 * out_features * in_features)))
    weights = [
        torch.randn((out_features, in_features), dtype=torch.bfloat16, device=DEVICE) for _ in range(num_weights)
    ]
    x = torch.randn((num_rows, in_features), dtype=torch.bfloat16, device=DEVICE)
    residual = torch.randn((num_rows, out_features), dtype=torch.bfloat16, device=DEVICE)

    def launch() -> None:
        for weight in weights:
            if tiling == "library":
                residual.addmm_(x, weight.t())
            else:
                add_few_row_linear(residual, x, weight, tiling=tiling or TILING)

    return time_us(launch, launches_per_graph=num_weights)


def print_linears(limits: Limits, num_rows: int, tiling: LinearTiling | Literal["library"] | None = None) -> None:
    cells = []
    for name, (out_features, in_features) in LINEARS.items():
        us = time_linear(name, num_rows, tiling)
        cells.append(f"{name} {us:6.1f} us {2 * out_features * in_features / us * 1e6 / limits.copy_bytes_per_s:4.2f}")
    print(f"linear   {num_rows} rows {tiling or ''!s:18} " + "   ".join(cells), flush=True)


def time_scaled_linear(out_features: int, in_features: int, num_rows: int) -> tuple[float, float, float]:
    """Microseconds of a product of e4m3 weights with the rounding of its activations, of the rounding, of bfloat16."""
    weights = [
        torch.randn((out_features, in_features), dtype=torch.bfloat16, device=DEVICE)
        for _ in range(max(2, -(-(512 << 20) // (2 * out_features * in_features))))
    ]
    layers = [ScaledLinear(*to_rows_of_e4m3(weight), None) for weight in weights]
    x = torch.randn((num_rows, in_features), dtype=torch.bfloat16, device=DEVICE)

    def launch(products: list[Callable[[Tensor], object]]) -> float:
        return time_us(lambda: [product(x) for product in products], launches_per_graph=len(products))

    plain = [partial(torch.nn.functional.linear, weight=weight) for weight in weights]
    return launch(list(layers)), launch([quantize_rows] * len(weights)), launch(list(plain))


def print_scaled_linears(num_rows: int) -> None:
    shapes = {"qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
    cells = []
    for name, (out_features, in_features) in shapes.items():
        scaled, rounding, plain = time_scaled_linear(out_features, in_features, num_rows)
        cells.append(f"{name} {scaled:6.1f} us (rounding {rounding:4.1f}; bfloat16 {plain:6.1f})")
    print(f"e4m3     {num_rows} rows  " + "   ".join(cells), flush=True)


def sweep(limits: Limits, kinds: list[str]) -> None:
    if "decode" in kinds:
        for tiling in DECODE_TILINGS:
            print_decodes(limits, tiling)
        for num_spare, name in itertools.product((32, 64, 128, 256), ("1 x 32k", "64 x 4k", "256 x 1k", "32 x 16k")):
            print(
                f"decode   spare {num_spare:4} {name:22} {time_decode(DECODES[name], None, num_spare):9.1f} us",
                flush=True,
            )
    if "linear" in kinds:
        for num_rows in (1, 2, 4):
            for linear_tiling in ("library", *LINEAR_TILINGS):
                print_linears(limits, num_rows, linear_tiling)
    if "prefill" in kinds:
        for prefill_tiling in PREFILL_TILINGS:
            print_prefills(limits, prefill_tiling)


def compile_sweep(kinds: list[str], fp8: bool) -> None:
    """Fill Triton's cache on disk from several processes at once, since each tiling takes seconds to compile."""
    command = [sys.executable, __file__, *(["--fp8"] if fp8 else []), "--compile"]
    jobs = [index for index, (kind, _) in enumerate(TILINGS) if kind in kinds]
    running = [subprocess.Popen([*command, str(index)]) for index in jobs]
    for process in running:
        process.wait()


def compile_one(index: int) -> None:
    kind, tiling = TILINGS[index]
    if kind == "decode":
        time_decode([600], tiling)
    elif kind == "prefill":
        time_prefill([(64, 128)], tiling)
    else:
        for name, num_rows in itertools.product(LINEARS, (1, 2, 4)):
            time_linear(name, num_rows, tiling)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--kinds", nargs="*", default=["decode", "linear", "prefill"], help="what to sweep")
    parser.add_argument("--fp8", action="store_true", help="keys, values and weights of e4m3")
    parser.add_argument("--figures", type=Path, help="file to append what gpu_figures.py reads")
    parser.add_argument("--compile", type=int)
    arguments = parser.parse_args()
    if arguments.fp8:
        Pool.dtype = torch.float8_e4m3fn
    if arguments.compile is not None:
        compile_one(arguments.compile)
        return
    limits = measure_limits()
    print(f"copy {limits.copy_bytes_per_s / 1e12:.2f} TB/s, matmul {limits.matmul_flops / 1e12:.0f} TFLOP/s")
    if arguments.sweep:
        compile_sweep(arguments.kinds, arguments.fp8)
        sweep(limits, arguments.kinds)
    else:
        print_decodes(limits, figures=arguments.figures)
        print_prefills(limits, figures=arguments.figures)
        if arguments.fp8:
            for num_rows in (1, 64, 256, 1024):
                print_scaled_linears(num_rows)
            return
        for num_rows in (1, 2, 4):
            print_linears(limits, num_rows, "library")
            print_linears(limits, num_rows)


if __name__ == "__main__":
    main()
