"""Settings of the scheduler."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from octavo.common.service_config import AddressListSetting, AddressSetting, ServiceConfig


class SchedulerConfig(ServiceConfig):
    """Decides who runs in each step. Settings come from flags, `OCTAVO_SCHEDULER_*` and a YAML file."""

    model_config = SettingsConfigDict(env_prefix="OCTAVO_SCHEDULER_")

    listen: AddressListSetting
    """Addresses for gateways; the gRPC ones serve the admin calls too."""

    kvmanager: AddressSetting | None = None
    """The KV manager that keeps the worker's block pool. Unset: the one that the registry has for `pool_id`."""

    worker: AddressSetting | None = None
    """The worker to drive. Unset: one that the registry has for `pool_id`, the others are standbys."""

    pool_id: str = "default"
    """Name of the block pool at the KV manager."""

    max_num_seqs: int | None = Field(default=None, ge=1)
    """Sequences that run at once; the worker's own limit counts too. Unset: the worker's alone."""

    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Tokens that one step may compute: decodes first, then chunks of prompts. The worker's own limit counts too.
    Unset: the worker's alone."""

    max_model_len: int | None = Field(default=None, ge=1)
    """Prompt and output tokens of one sequence. Unset: what the model and the block pool can hold."""

    max_num_waiting: int = Field(default=4096, ge=1)
    """Requests that may wait; more are refused with QUEUE_FULL, but for one of a tenant that has none waiting."""

    max_num_choices: int = Field(default=1024, ge=1)
    """Largest `n` of a request."""

    max_num_kept: int = Field(default=256, ge=0)
    """Choices kept after their end for branches; the oldest go first. Their blocks go when others need them."""

    pipeline_depth: int = Field(default=2, ge=1, le=4)
    """Steps on their way at once. 1 waits for each result, 2 hides the way to the worker and back."""

    prefix_cache: bool = True
    """Share the blocks of equal prefixes."""

    single_flight_timeout_s: float = Field(default=5.0, ge=0)
    """How long a request waits for one more block of its prompt that another one computes; then it computes itself.
    0: at once."""

    credits_per_sequence: int = Field(default=2, ge=1)
    """Blocks held ahead for each running sequence, so that decode never waits for the KV manager."""

    reservation: Literal["pages", "slabs"] = "pages"
    """`pages`: a sequence gets blocks as it grows. `slabs`: one run of neighbouring blocks for its longest answer when
    it starts, to measure what paging saves; choices beyond the first of a prompt still grow by blocks."""

    preemption: Literal["auto", "recompute", "swap"] = "auto"
    """What becomes of a sequence whose blocks others need. `auto`: what costs less by the rates measured; `swap`: host
    memory, as long as it has room, and prefixes come back from there whatever that costs."""

    min_progress: int = Field(default=16, ge=1)
    """Tokens that a sequence samples between two preemptions, if any other can be preempted instead. Before it has, no
    more urgent one takes its slot."""

    swap_timeout_s: float = Field(default=60.0, gt=0)
    """How long a sequence stays in host memory; then it waits to be computed again."""

    min_shared_blocks: int = Field(default=4, ge=1)
    """Leading blocks that rows must share for the worker to be told of it."""

    num_explained_requests: int = Field(default=10_000, ge=0)
    """Ended requests that can still be explained."""

    connect_timeout_s: float = Field(default=2.0, gt=0)
    """For one attempt to reach the worker or the KV manager."""

    load_timeout_s: float = Field(default=600.0, gt=0)
    """For the worker to load its model after a hello."""

    kvmanager_timeout_s: float = Field(default=10.0, gt=0)
    """For one reply of the KV manager; then its link is given up."""

    step_timeout_s: float = Field(default=60.0, gt=0)
    """For one step of the worker; then its link is given up. Shorter than `token_timeout_s` of the gateways, so that
    requests live to go on with a standby."""

    recovery_timeout_s: float = Field(default=60.0, gt=0)
    """How long requests wait for a worker and a KV manager to come back before they fail."""

    @model_validator(mode="after")
    def _others_can_be_found(self) -> SchedulerConfig:
        if self.registry is None:
            for name in ("kvmanager", "worker"):
                if getattr(self, name) is None:
                    raise ValueError(f"{name} is unset, and there is no registry to find it in")
        return self

    @model_validator(mode="after")
    def _budget_covers_a_decode_of_all(self) -> SchedulerConfig:
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if seqs is not None and tokens is not None and tokens < seqs:
            raise ValueError(
                f"max_num_batched_tokens ({tokens}) is below max_num_seqs ({seqs}): "
                "one decode step of all sequences would not fit"
            )
        return self
