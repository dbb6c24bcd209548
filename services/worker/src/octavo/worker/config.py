"""Settings of the worker."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from octavo.common.service_config import AddressListSetting, ServiceConfig


class WorkerConfig(ServiceConfig):
    """The worker's settings, from flags, `OCTAVO_WORKER_*` and a YAML file."""

    model_config = SettingsConfigDict(env_prefix="OCTAVO_WORKER_")

    listen: AddressListSetting = Field(min_length=1)
    """Addresses where a scheduler may connect, `frames://PATH`, `grpc://HOST:PORT` or `grpc+unix://PATH`."""

    pool_id: str = "default"
    """With a registry: the name of its block pool, by which scheduler and KV manager find it."""

    model: Path | None = None
    """Folder with config.json and *.safetensors. A simulated worker does without, or takes the vocabulary from it."""

    simulated: str | None = None
    """Profile of a model on a GPU, by name (`h200-llama-8b`) or as a YAML or JSON file: steps take the time that they
    would take there, nothing is computed, and tokens are drawn from seed and position."""

    simulated_gpus: int = Field(default=1, ge=1)
    """GPUs that a simulated worker stands for, each with the whole model and an even share of every step."""

    model_name: str = ""
    """The name that requests ask for. Empty: the folder's name."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and activations. `auto`: float32 on a CPU; on a GPU the checkpoint's type, bfloat16 for float32."""

    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto"
    """Type of K and V in the pool. `auto`: that of `dtype`. `fp8`, the same as `fp8_e4m3`: half the memory of bfloat16,
    with scales from the checkpoint, else from a calibration pass at start."""

    quantization: Literal["fp8"] | None = None
    """`fp8`: matrices of the layers are rounded to e4m3 when loaded, with a scale for each output; activations are
    rounded token by token. Checkpoints of compressed-tensors that are stored so need no setting."""

    device: str = "auto"
    """A torch device. `auto`: a GPU if there is one, else the CPU."""

    block_size: int = Field(default=16, ge=8, le=128)
    """Tokens per KV block."""

    num_blocks: int | None = Field(default=None, ge=1)
    """Blocks in the KV pool. Unset: as many as fit `kv_cache_bytes`."""

    kv_cache_bytes: int | None = Field(default=None, gt=0)
    """Size of the KV pool. Unset: what `max_num_seqs` sequences can use, within what `gpu_memory_utilization` leaves
    on a GPU, at most 4 GiB and a quarter of free memory on a CPU."""

    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that this worker may take, for weights, activations, graphs and KV pool. Other processes
    do not change it, but what they hold is left to them."""

    load_format: Literal["safetensors", "dummy"] = "safetensors"
    """`dummy`: random weights of the shapes in config.json, for benchmarks; no checkpoint is read."""

    num_host_blocks: int | None = Field(default=None, ge=0)
    """Blocks of host memory for swapped sequences and evicted prefixes. Unset: as many as fit `host_cache_bytes`."""

    host_cache_bytes: int | None = Field(default=None, ge=0)
    """Size of the same. Unset: as much as the KV pool, at most a quarter of free memory and 2 GiB (8 with a GPU)."""

    max_num_seqs: int | None = Field(default=None, ge=1)
    """Slots: sequences that may be open at once. Unset: 32 on a CPU; on a GPU 1,024 from 48 GiB of memory on, 256 from
    20 GiB on, else 128."""

    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Tokens that one step may compute. Unset: 512 on a CPU; on a GPU 8,192, 4,096 or 2,048 by the same sizes."""

    max_model_len: int | None = Field(default=None, ge=1)
    """Positions that one sequence may have. Unset: what the model was trained for."""

    step_watchdog_s: float = Field(default=300.0, gt=0)
    """Seconds that one step may last before /health/live fails, so that whoever watches the worker starts it again."""

    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads for tensor work. Unset: one per core."""

    @model_validator(mode="after")
    def _every_slot_fits_a_step(self) -> Self:
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if seqs is not None and tokens is not None and tokens < seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs: each sequence decodes one a step")
        return self

    @model_validator(mode="after")
    def _computes_or_simulates(self) -> Self:
        if self.simulated is None:
            if self.model is None:
                raise ValueError("model is required, unless the worker is simulated")
            if self.simulated_gpus != 1:
                raise ValueError("simulated_gpus needs simulated")
        elif self.kv_cache_dtype != "auto" or self.quantization is not None:
            raise ValueError("kv_cache_dtype and quantization of a simulated worker are those of its profile")
        return self

    @property
    def model_folder(self) -> Path:
        """`model` of a worker that is not simulated."""
        assert self.model is not None, "checked with the settings"
        return self.model

    @property
    def served_name(self) -> str:
        """The name that requests ask for."""
        of_model = Path(self.simulated or "").stem if self.model is None else self.model.resolve().name
        return self.model_name or of_model
