"""From a loaded decoder to a GPU runner that is sized, captured and warm."""

from __future__ import annotations

import gc
import time

import structlog
import torch
from torch import Tensor

from octavo.worker.compute_thread import SetProgress
from octavo.worker.config import WorkerConfig
from octavo.worker.gpu_runner import GpuRunner
from octavo.worker.kernels.online_softmax import rows_per_tile
from octavo.worker.kv_cache import KvCache, block_bytes, kv_dtype, num_host_blocks_of
from octavo.worker.memory_plan import GIB, MemoryPlan
from octavo.worker.models.causal_lm import CausalLm
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.errors import ModelLoadError, UnknownArchitectureError
from octavo.worker.models.gpu_decoder import GpuDecoder, GpuModel
from octavo.worker.models.gpu_transformers import GpuTransformers
from octavo.worker.models.launch_ways import choose_few_rows, choose_overlap, choose_single_row
from octavo.worker.step_sizes import StepSizes

log = structlog.get_logger()

MAX_HEAD_DIM = 256
"""Of the largest heads that the kernels were measured with."""
NUM_TRIAL_BLOCKS = 4
DRIVER_BYTES_OF_A_GRAPH = 2 * 2**20
"""The driver keeps some kilobytes for each of its few hundred launches."""
GRAPH_MARGIN_BYTES = 256 * 2**20
"""Graphs of different sizes share memory less than perfectly."""


def load_gpu_runner(
    config: WorkerConfig,
    loaded: CausalLm,
    sizes: StepSizes,
    max_model_len: int,
    kv_scales: Tensor | None,
    progress: SetProgress,
) -> GpuRunner:
    """Size the pool by what a trial leaves free, capture the graphs of steps, warm up."""
    model = gpu_model(loaded)
    if isinstance(model, GpuDecoder):
        progress("timing the ways to launch a step")
        times = {f"{way}_ms": round(ms, 3) for way, ms in choose_single_row(model).items()}
        log.info("decode of one row", fused=model.single_row is not None, **times)
        times = {f"{way}_ms": round(ms, 3) for way, ms in choose_overlap(model).items()}
        log.info("steps of several rows", overlapping=model.overlaps, **times)
        for size, ways in choose_few_rows(model).items():
            times = {f"{way}_ms": round(ms, 3) for way, ms in ways.items()}
            by_hopper = model.few_rows is not None and model.few_rows.runs(size)
            log.info("steps of few rows", rows=size, by_kernels_for_hopper=by_hopper, **times)
    progress("measuring the memory of the largest step")
    plan = _measure(config, model, sizes, max_model_len, kv_scales)
    num_blocks = _num_blocks(config, model, sizes, max_model_len, plan)
    pool_bytes = num_blocks * block_bytes(model.config, config.block_size, kv_dtype(config, model.dtype))
    log.info("GPU memory planned", plan=plan.describe(), num_blocks=num_blocks, kv_pool_gib=round(pool_bytes / GIB, 1))
    num_host_blocks = num_host_blocks_of(config, num_blocks, pool_bytes // num_blocks, model.device)
    progress("allocating the KV pool, and locking host memory beside it")
    started = time.perf_counter()
    runner = _runner(config, model, sizes, max_model_len, num_blocks, kv_scales, num_host_blocks)
    log.info("KV pool allocated", num_host_blocks=num_host_blocks, seconds=round(time.perf_counter() - started, 1))
    if model.can_capture:
        progress("compiling kernels 0 %")
        runner.compile_steps(lambda share: progress(f"compiling kernels {int(100 * share)} %"))
        started = time.perf_counter()
        runner.capture_graphs(lambda share: progress(f"capturing graphs of steps {int(100 * share)} %"))
        torch.cuda.empty_cache()
        log.info("graphs captured", graphs=runner.num_graphs, seconds=round(time.perf_counter() - started, 1))
    return runner


def gpu_model(loaded: CausalLm) -> GpuModel:
    """The model by our kernels. Raises UnknownArchitectureError if they do not serve its heads."""
    config = loaded.config
    group, most = config.num_heads // config.num_kv_heads, rows_per_tile(1, config.head_dim)
    if config.head_dim > MAX_HEAD_DIM or group > most:
        raise UnknownArchitectureError(
            f"the kernels serve heads of up to {MAX_HEAD_DIM} and {most} query heads for each KV head, "
            f"not {config.head_dim} and {group}"
        )
    return GpuDecoder(loaded) if isinstance(loaded, Decoder) else GpuTransformers(loaded)


def _runner(
    config: WorkerConfig,
    model: GpuModel,
    sizes: StepSizes,
    max_model_len: int,
    num_blocks: int,
    kv_scales: Tensor | None,
    num_host_blocks: int = 0,
) -> GpuRunner:
    return GpuRunner(
        model,
        KvCache(
            model.config,
            num_blocks,
            config.block_size,
            kv_dtype(config, model.dtype),
            model.device,
            num_host_blocks,
            kv_scales,
        ),
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=max_model_len,
    )


def _measure(
    config: WorkerConfig, model: GpuModel, sizes: StepSizes, max_model_len: int, kv_scales: Tensor | None
) -> MemoryPlan:
    """Run the largest step and capture two graphs over a pool of a few blocks, then forget them."""
    weights = torch.cuda.memory_allocated(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    trial = _runner(config, model, sizes, max_model_len, NUM_TRIAL_BLOCKS, kv_scales)
    trial_pool = NUM_TRIAL_BLOCKS * block_bytes(model.config, config.block_size, kv_dtype(config, model.dtype))
    trial.run_largest()
    activations = torch.cuda.max_memory_allocated(model.device) - weights - trial_pool
    torch.cuda.empty_cache()
    graphs, num_graphs = 0, trial.num_graphs
    for num_captured in (1, 2) if model.can_capture else ():
        # By this process's own books: what is free changes with its neighbours, too.
        reserved_before = torch.cuda.memory_reserved(model.device)
        trial.capture_trial_graph(num_captured - 1)
        torch.cuda.empty_cache()
        taken = DRIVER_BYTES_OF_A_GRAPH + max(0, torch.cuda.memory_reserved(model.device) - reserved_before)
        graphs += taken if num_captured == 1 else taken * (num_graphs - 1)
    del trial
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    return MemoryPlan(
        total=total,
        utilization=config.gpu_memory_utilization,
        others=total - free - torch.cuda.memory_reserved(model.device),
        weights=weights,
        activations=activations,
        graphs=graphs + GRAPH_MARGIN_BYTES,
    )


def _num_blocks(config: WorkerConfig, model: GpuModel, sizes: StepSizes, max_model_len: int, plan: MemoryPlan) -> int:
    if config.num_blocks is not None:
        return config.num_blocks
    bytes_each = block_bytes(model.config, config.block_size, kv_dtype(config, model.dtype))
    if config.kv_cache_bytes is not None:
        if config.kv_cache_bytes < bytes_each:
            raise ModelLoadError(f"a KV pool of {config.kv_cache_bytes} bytes does not hold one block of {bytes_each}")
        return config.kv_cache_bytes // bytes_each
    blocks_of_longest = -(-max_model_len // config.block_size)
    most_useful = sizes.max_num_seqs * blocks_of_longest
    return min(most_useful, plan.num_blocks(bytes_each, blocks_of_longest))
