from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.worker.memory_plan import GIB, MemoryPlan
from octavo.worker.models.errors import ModelLoadError

PLAN = MemoryPlan(
    total=100 * GIB, utilization=0.9, others=2 * GIB, weights=15 * GIB, activations=2 * GIB, graphs=1 * GIB
)


def test_the_pool_gets_what_the_others_leave_of_the_allowed_share() -> None:
    assert PLAN.kv_pool == 70 * GIB
    assert PLAN.num_blocks(block_bytes=2 * GIB, blocks_of_longest=35) == 35


def test_memory_of_other_processes_is_left_to_them() -> None:
    assert replace(PLAN, others=42 * GIB).kv_pool == 30 * GIB


def test_a_pool_too_small_for_the_longest_sequence_names_the_settings_and_what_they_should_be() -> None:
    with pytest.raises(
        ModelLoadError, match=r"gpu_memory_utilization to at least 0\.92, or set max_model_len to at most 35"
    ):
        PLAN.num_blocks(block_bytes=2 * GIB, blocks_of_longest=36)


def test_a_model_that_leaves_nothing_does_not_ask_for_a_shorter_length() -> None:
    with pytest.raises(ModelLoadError, match="use a smaller model"):
        replace(PLAN, weights=95 * GIB).num_blocks(block_bytes=GIB, blocks_of_longest=1)


def test_the_description_says_where_each_gib_goes() -> None:
    assert PLAN.describe() == (
        "total 100.0 GiB, allowed 90.0 GiB, other processes and driver 2.0 GiB, weights 15.0 GiB, activations 2.0 GiB, "
        "graphs 1.0 GiB, KV pool 70.0 GiB"
    )
