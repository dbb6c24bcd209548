"""From settings to a core that is loaded and warm."""

from __future__ import annotations

import gc
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch
from torch import Tensor

from octavo.worker.attention_torch import TorchAttention
from octavo.worker.compute_thread import SetProgress
from octavo.worker.config import WorkerConfig
from octavo.worker.gpu_shortage import names_shortage
from octavo.worker.grammars import Grammars
from octavo.worker.kv_cache import KvCache, block_bytes, default_kv_cache_bytes, kv_dtype, num_host_blocks_of
from octavo.worker.kv_scales import calibrate, kv_format
from octavo.worker.model_runner import ModelRunner
from octavo.worker.models.causal_lm import CausalLm
from octavo.worker.models.config import ModelConfig
from octavo.worker.models.errors import ModelLoadError
from octavo.worker.models.fp8_linear import check_fp8_device
from octavo.worker.models.model_folder import open_model
from octavo.worker.step_sizes import ON_CPU, StepSizes, sizes_for_gpu, step_sizes
from octavo.worker.worker_core import ServedModel, WorkerCore

if TYPE_CHECKING:  # imports triton
    from octavo.worker.gpu_runner import GpuRunner

log = structlog.get_logger()

GPU_FILE = Path("/dev/nvidia0")
"""There if the machine has a GPU whose driver is loaded, whatever torch makes of it."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@names_shortage
def load_core(config: WorkerConfig, progress: SetProgress) -> WorkerCore:
    """Load the model, size the pool, run a warm-up step. Blocks; raises ModelLoadError.

    To be called on the thread that will run the steps: torch's thread count is one per thread.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    progress("reading config.json")
    device = chosen_device(config.device)
    folder = open_model(config.model_folder, config.max_model_len)
    dtype = _dtype(config.dtype, folder.dtype, device)
    sizes = step_sizes(config, default_sizes(device))
    max_model_len = _max_model_len(config, folder.max_position_embeddings)
    progress("loading weights 0 %")
    model = folder.load(
        dtype,
        device,
        lambda share: progress(f"loading weights {min(int(100 * share), 100)} %"),
        is_dummy=config.load_format == "dummy",
        quantize=config.quantization is not None,
    )
    progress("allocating the KV pool")
    stored = kv_dtype(config, model.dtype)
    kv_scales = None
    if stored == torch.float8_e4m3fn:
        check_fp8_device(device)
        kv_scales = model.kv_scales
        if kv_scales is None:
            progress("calibrating the scales of K and V")
            kv_scales = calibrate(model)
    runner = _new_runner(config, model, sizes, max_model_len, kv_scales, progress)
    num_blocks = runner.limits.num_blocks
    eos_token_ids = model.config.eos_token_ids
    runner.use_grammars(Grammars(config.model_folder / "tokenizer.json", runner.limits.vocab_size, eos_token_ids))
    progress("running a warm-up step")
    runner.warm_up()
    gc.collect()
    gc.freeze()
    log.info(
        "model loaded",
        model=config.served_name,
        computed_by=type(model).__name__,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        num_blocks=num_blocks,
        kv_cache_bytes=num_blocks * block_bytes(model.config, config.block_size, stored),
        num_host_blocks=runner.num_host_blocks,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=max_model_len,
        num_threads=torch.get_num_threads(),
    )
    served = ServedModel(config.served_name, eos_token_ids, kv_format(stored, kv_scales))
    return WorkerCore(runner, served)


def _new_runner(
    config: WorkerConfig,
    model: CausalLm,
    sizes: StepSizes,
    max_model_len: int,
    kv_scales: Tensor | None,
    progress: SetProgress,
) -> ModelRunner | GpuRunner:
    """Triton kernels and graphs on a GPU, torch elsewhere."""
    if model.device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            raise ModelLoadError("the kernels for a GPU need Triton, which this torch came without: pip install triton")
        from octavo.worker.gpu_loading import load_gpu_runner

        return load_gpu_runner(config, model, sizes, max_model_len, kv_scales, progress)
    stored = kv_dtype(config, model.dtype)
    num_blocks = _num_blocks(config, model.config, sizes, max_model_len, stored)
    bytes_each = block_bytes(model.config, config.block_size, stored)
    num_host_blocks = num_host_blocks_of(config, num_blocks, bytes_each, model.device)
    kv_cache = KvCache(model.config, num_blocks, config.block_size, stored, model.device, num_host_blocks, kv_scales)
    return ModelRunner(
        model,
        kv_cache,
        TorchAttention(kv_cache.pool, model.config.num_heads, model.config.attention, kv_cache.scales),
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=max_model_len,
    )


def chosen_device(name: str) -> torch.device:
    """The device of this name. Raises ModelLoadError if there is none."""
    if name != "auto":
        return _named_device(name)
    if torch.cuda.is_available():
        return torch.device("cuda")
    if GPU_FILE.exists():
        log.warning(
            "a GPU is there, but this torch cannot use it: the CPU is used. README.md says which torch to install",
            torch=torch.__version__,
            built_for_cuda=torch.version.cuda or "none",
        )
    return torch.device("cpu")


def _named_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelLoadError(f"device {name!r}: {error}") from error
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise ModelLoadError(f"device {name!r}: torch {torch.__version__}, {built}, finds {count} GPUs here")
    return device


def default_sizes(device: torch.device) -> StepSizes:
    """What the device does well; of a GPU its whole memory counts, not what is free."""
    if device.type != "cuda":
        return ON_CPU
    return sizes_for_gpu(torch.cuda.get_device_properties(device).total_memory)


def _dtype(name: str, of_checkpoint: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        on_gpu = "bfloat16" if of_checkpoint == "float32" else of_checkpoint
        name = "float32" if device.type == "cpu" else on_gpu
    if name not in DTYPES:
        raise ModelLoadError(f"dtype {name} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _max_model_len(config: WorkerConfig, trained: int) -> int:
    if config.max_model_len is None:
        return trained
    if config.max_model_len > trained:
        raise ModelLoadError(f"max_model_len {config.max_model_len} exceeds the {trained} positions of the model")
    return config.max_model_len


def _num_blocks(
    config: WorkerConfig, model: ModelConfig, sizes: StepSizes, max_model_len: int, dtype: torch.dtype
) -> int:
    if config.num_blocks is not None:
        return config.num_blocks
    bytes_each = block_bytes(model, config.block_size, dtype)
    most_useful = sizes.max_num_seqs * -(-max_model_len // config.block_size) * bytes_each
    pool_bytes = config.kv_cache_bytes or default_kv_cache_bytes(most_useful)
    if pool_bytes < bytes_each:
        raise ModelLoadError(f"a KV pool of {pool_bytes} bytes does not hold one block of {bytes_each}")
    return pool_bytes // bytes_each
