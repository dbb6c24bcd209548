from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo.worker.gpu_shortage import names_shortage
from octavo.worker.memory_plan import GIB, MemoryPlan
from octavo.worker.models.errors import ModelLoadError

PLAN = MemoryPlan(
    total=100 * GIB, utilization=0.9, others=2 * GIB, weights=15 * GIB, activations=2 * GIB, graphs=1 * GIB
)


def test_the_pool_gets_what_is_left_of_the_share() -> None:
    assert PLAN.kv_pool == 71.25 * GIB
    assert PLAN.num_blocks(block_bytes=2 * GIB, blocks_of_longest=35) == 35


def test_neighbours_change_the_pool_only_where_they_leave_less_than_the_share() -> None:
    """Servers of a share each, started in any order or at once, get the pools they would get alone."""
    first = replace(PLAN, utilization=0.35, weights=10 * GIB)
    second = replace(PLAN, utilization=0.20, weights=5 * GIB)
    assert first.kv_pool == replace(first, others=22 * GIB).kv_pool == (35 - 0.75 - 13) * GIB
    assert second.kv_pool == replace(second, others=37 * GIB).kv_pool == (20 - 0.75 - 8) * GIB


def test_memory_of_other_processes_is_left_to_them() -> None:
    assert replace(PLAN, others=42 * GIB).kv_pool == 38 * GIB


def test_a_pool_too_small_for_the_longest_sequence_names_the_settings_and_what_they_should_be() -> None:
    with pytest.raises(
        ModelLoadError, match=r"set gpu_memory_utilization to at least 0\.91, or set max_model_len to at most 35"
    ):
        PLAN.num_blocks(block_bytes=2 * GIB, blocks_of_longest=36)


def test_where_neighbours_are_in_the_way_they_are_named() -> None:
    with pytest.raises(ModelLoadError, match=r"room for 19 KV blocks.*end other processes, which hold about 41\.2 GiB"):
        replace(PLAN, others=42 * GIB).num_blocks(block_bytes=2 * GIB, blocks_of_longest=36)


def test_a_model_that_leaves_nothing_does_not_ask_for_a_shorter_length() -> None:
    with pytest.raises(ModelLoadError, match="use a smaller model"):
        replace(PLAN, weights=95 * GIB).num_blocks(block_bytes=GIB, blocks_of_longest=1)


def test_the_description_says_where_each_gib_goes() -> None:
    assert PLAN.describe() == (
        "total 100.0 GiB, allowed 90.0 GiB, other processes and driver 2.0 GiB, weights 15.0 GiB, activations 2.0 GiB, "
        "graphs 1.0 GiB, KV pool 71.2 GiB"
    )


def test_want_of_memory_while_loading_says_who_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 30 * GIB)

    @names_shortage
    def load() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(
        ModelLoadError, match=r"of 80\.0 GiB this worker has 30\.0, other processes and the driver 49\.0"
    ):
        load()
