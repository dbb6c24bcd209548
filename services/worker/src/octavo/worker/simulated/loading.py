"""From settings to the core of a simulated worker. Imports no torch."""

from __future__ import annotations

import structlog

from octavo.worker.config import WorkerConfig
from octavo.worker.models.errors import ModelLoadError
from octavo.worker.models.model_json import read_eos_token_ids, read_json
from octavo.worker.simulated.profile import Profile
from octavo.worker.simulated.runner import SimulatedRunner
from octavo.worker.simulated.sampling import plain_token_ids
from octavo.worker.slots import StepLimits
from octavo.worker.step_sizes import StepSizes, step_sizes
from octavo.worker.worker_core import ServedModel, WorkerCore

log = structlog.get_logger()


def load_simulated_core(config: WorkerConfig) -> WorkerCore:
    """The core that `config.simulated` names. Vocabulary and ends of sequence are the model folder's if there is one.

    Raises ModelLoadError.
    """
    profile = Profile.load(config.simulated or "")
    num_gpus = config.simulated_gpus
    vocab_size, eos_token_ids = profile.model.vocab_size, profile.model.eos_token_ids
    if config.model is not None:
        values = read_json(config.model / "config.json")
        vocab_size = _vocab_size(values.get("vocab_size"))
        eos_token_ids = read_eos_token_ids(config.model, values)
    usual = StepSizes(num_gpus * profile.limits.max_num_seqs, num_gpus * profile.limits.max_num_batched_tokens)
    sizes = step_sizes(config, usual)
    limits = StepLimits(
        num_blocks=_num_blocks(config, profile),
        block_size=config.block_size,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=_max_model_len(config, profile),
        vocab_size=vocab_size,
    )
    runner = SimulatedRunner(
        profile,
        limits,
        plain_token_ids(config.model, vocab_size, eos_token_ids),
        num_host_blocks=_num_host_blocks(config, profile),
        num_gpus=num_gpus,
    )
    log.info(
        "simulating",
        profile=config.simulated,
        num_gpus=num_gpus,
        num_blocks=limits.num_blocks,
        num_host_blocks=runner.num_host_blocks,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
    )
    return WorkerCore(runner, ServedModel(config.served_name, eos_token_ids, f"simulated {config.simulated}"))


def _vocab_size(value: object) -> int:
    if not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"config.json says vocab_size {value!r}")
    return value


def _max_model_len(config: WorkerConfig, profile: Profile) -> int:
    trained = profile.model.max_model_len
    if config.max_model_len is not None and config.max_model_len > trained:
        raise ModelLoadError(f"max_model_len {config.max_model_len} exceeds the {trained} positions of the profile")
    return config.max_model_len or trained


def _num_blocks(config: WorkerConfig, profile: Profile) -> int:
    if config.num_blocks is not None:
        return config.num_blocks
    pool_bytes = config.kv_cache_bytes or config.simulated_gpus * profile.limits.kv_cache_bytes
    block_bytes = config.block_size * profile.model.kv_token_bytes
    if pool_bytes < block_bytes:
        raise ModelLoadError(f"a KV pool of {pool_bytes} bytes does not hold one block of {block_bytes}")
    return pool_bytes // block_bytes


def _num_host_blocks(config: WorkerConfig, profile: Profile) -> int:
    if config.num_host_blocks is not None:
        return config.num_host_blocks
    usual = config.simulated_gpus * profile.limits.host_cache_bytes
    host_bytes = usual if config.host_cache_bytes is None else config.host_cache_bytes
    return host_bytes // (config.block_size * profile.model.kv_token_bytes)
