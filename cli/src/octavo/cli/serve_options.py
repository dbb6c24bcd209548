"""What `octavo serve` was asked for; the four processes and the local transport are both built from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from octavo.common.logs import LogLevel

Carrier = Literal["frames", "grpc"]
KvCacheDtype = Literal["auto", "fp8", "fp8_e4m3"]
Quantization = Literal["fp8"]


def check_limits(max_num_seqs: int | None, max_num_batched_tokens: int | None) -> None:
    """Raises ValueError if a step could not hold one token of each sequence. One that is not given is the worker's."""
    if max_num_seqs is not None and max_num_batched_tokens is not None and max_num_batched_tokens < max_num_seqs:
        raise ValueError(
            f"--max-num-batched-tokens ({max_num_batched_tokens}) must be at least --max-num-seqs ({max_num_seqs}): "
            "each sequence decodes one token a step"
        )


def check_gateways(
    gateways: int, redis: str | None, tls_cert: Path | None, tls_key: Path | None, *, is_local: bool
) -> None:
    """Raises ValueError if so many gateways could not serve as one, or HTTPS lacks a half."""
    if gateways > 1 and is_local:
        raise ValueError("--gateways goes with processes of their own, not with --local")
    if gateways > 1 and redis is None:
        raise ValueError(f"--gateways {gateways} needs --redis URL: stored responses and limits are shared there")
    if (tls_cert is None) != (tls_key is None):
        raise ValueError("--tls-cert and --tls-key go together")


def check_simulation(
    simulated: str | None,
    simulated_gpus: int | None,
    kv_cache_dtype: KvCacheDtype | None,
    quantization: Quantization | None,
) -> None:
    """Raises ValueError if options of a simulated worker contradict each other."""
    if simulated is None and simulated_gpus is not None:
        raise ValueError("--simulated-gpus needs --simulated")
    if simulated is not None and (quantization is not None or kv_cache_dtype not in (None, "auto")):
        raise ValueError("--kv-cache-dtype and --quantization of a simulated worker are those of its profile")


def check_groups(groups: int, *, is_local: bool) -> None:
    """Raises ValueError if so many groups cannot be started."""
    if groups > 1 and is_local:
        raise ValueError("--groups goes with processes of their own, not with --local")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """None leaves a setting to the service that owns it: its environment variable, else its default."""

    host: str = "127.0.0.1"
    port: int = 8000
    max_model_len: int | None = None
    """Prompt and output tokens of one sequence."""
    max_num_seqs: int | None = None
    """Sequences that run at once."""
    max_num_batched_tokens: int | None = None
    """Tokens computed in one step."""
    block_size: int | None = None
    """Tokens per KV block."""
    num_blocks: int | None = None
    """Blocks in the KV pool."""
    kv_cache_dtype: KvCacheDtype | None = None
    """Type of K and V in the pool."""
    quantization: Quantization | None = None
    """What weights are rounded to when loaded."""
    num_host_blocks: int | None = None
    """Blocks of host memory for swapped sequences and evicted prefixes."""
    simulated: str | None = None
    """Profile of a simulated worker."""
    simulated_gpus: int | None = None
    """GPUs that it stands for."""
    prefix_cache: bool = True
    pipeline_depth: int | None = None
    """Steps on their way at once."""
    log_level: LogLevel = "warning"
    carrier: Carrier = "frames"
    """How messages travel between the processes."""
    groups: int = 1
    """Worker groups: a scheduler, a KV manager and a worker each."""
    gateways: int = 1
    """Gateway processes on the one port."""
    redis: str | None = None
    """Where gateways keep what they share."""
    tls_cert: Path | None = None
    tls_key: Path | None = None

    @property
    def url(self) -> str:
        """Where the gateway answers, as a client on this machine writes it."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "") else "::1" if self.host == "::" else self.host
        scheme = "https" if self.tls_cert else "http"
        return f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"
