"""Cases that users of other servers reported, told over the real cores: K01, K04 and K09 of the kinds of fault."""

from __future__ import annotations

import random

import pytest

from octavo.common.messages.kv import TransferDirection
from octavo.kvmanager.block_state import BlockState
from octavo.kvmanager.host_pool import HostState
from octavo.kvmanager.transfers import Purpose
from octavo.scheduler.core_settings import CoreSettings
from octavo.scheduler.preemption import PreemptionSettings
from octavo.simulator.scripted_worker import expected_output
from octavo.simulator.step_cluster import StepCluster

VOCAB = 977
BLOCK_SIZE = 16
SWAP = CoreSettings(max_num_batched_tokens=64, preemption=PreemptionSettings(mode="swap"))


def greedy(prompt: list[int], num_tokens: int) -> list[int]:
    return expected_output(prompt, num_tokens, VOCAB)


def tokens(first: int, end: int) -> list[int]:
    return [token % VOCAB for token in range(first, end)]


def num_referenced(cluster: StepCluster) -> int:
    return sum(cluster.pool.blocks.ref_counts)


# K01


@pytest.mark.parametrize("seed", range(4))
def test_clients_that_leave_between_the_lookup_of_their_prefix_and_its_allocation_leave_no_reference(seed: int) -> None:
    """blk-429. A lookup pins nothing: hits are pinned by the admission that allocates the rest, in one message."""
    cluster = StepCluster(
        num_blocks=90, block_size=BLOCK_SIZE, max_num_seqs=16, max_model_len=800, vocab_size=VOCAB, seed=seed
    )
    prefix = tokens(0, 640)
    cluster.submit(prefix, max_tokens=1)
    cluster.run()
    dice = random.Random(seed)
    for round_no in range(5):
        leaving: list[int] = []
        for number in range(50):
            leaving.append(cluster.submit([*prefix, round_no, number], max_tokens=30))
            for _ in range(dice.randrange(6)):
                cluster.step()
            if dice.random() < 0.7:
                cluster.abort(leaving.pop(dice.randrange(len(leaving))))
        for request in leaving:
            cluster.abort(request)
        cluster.run()
        assert num_referenced(cluster) == 0
        cluster.assert_idle()
    last = cluster.submit([*prefix, 7], max_tokens=4)
    cluster.run()
    assert cluster.cached_tokens[last] == 640
    assert cluster.output(last) == greedy([*prefix, 7], 4)


# K04


def test_a_prompt_that_shares_the_first_part_of_a_secret_one_gets_nothing_of_its_rest() -> None:
    """pfx-279. The worker's answer depends on every position that a row can see, so foreign content would show."""
    cluster = StepCluster(num_blocks=24, block_size=BLOCK_SIZE, max_num_seqs=4, max_model_len=160, vocab_size=VOCAB)
    shared = cluster.submit(tokens(0, 50), max_tokens=1)
    cluster.run()
    for pair in range(200):
        secret = [*tokens(0, 50), *tokens(100 + 31 * pair, 130 + 31 * pair)]
        other = [*tokens(0, 40), *tokens(500 + 17 * pair, 520 + 17 * pair)]
        theirs, ours = cluster.submit(secret, max_tokens=3), cluster.submit(other, max_tokens=20)
        while len(cluster.output(ours)) < 10:
            assert cluster.step()
        [table] = [one for _, one in cluster.pool.tables if len(one.block_ids) > 3 and one.chain.num_tokens < 80]
        assert {cluster.pool.blocks.ref_counts[block] for block in table.block_ids[2:]} == {1}, "ours alone"
        cluster.run()
        assert cluster.cached_tokens[ours] == 32
        assert cluster.output(ours) == greedy(other, 20)
        assert cluster.output(theirs) == greedy(secret, 3)
    assert cluster.output(shared) == greedy(tokens(0, 50), 1)
    cluster.assert_idle()


# K09: host memory is the tier that there is. Its entries live in the KV manager, its bytes in the worker.


def cluster_with_host() -> StepCluster:
    return StepCluster(num_blocks=20, max_model_len=80, num_host_blocks=40, vocab_size=VOCAB, settings=SWAP)


def sink(cluster: StepCluster, prompt: list[int]) -> None:
    """Compute the prompt, and others after it until its blocks have been evicted to host memory."""
    cluster.submit(prompt, max_tokens=2)
    cluster.run()
    for first in (300, 500):
        cluster.submit(tokens(first, first + 76), max_tokens=2)
        cluster.run()


def test_a_block_is_found_in_the_host_only_once_its_copy_has_been_acknowledged() -> None:
    """tier-252: what has not arrived whole is not there, and a copy that never ends is never found."""
    cluster = cluster_with_host()
    prompt = tokens(0, 32)
    cluster.submit(prompt, max_tokens=2)
    cluster.run()
    cluster.submit(tokens(300, 376), max_tokens=2)
    while not (sinking := [one for one in cluster.pool.tier.transfers if one.purpose is Purpose.SINK]):
        assert cluster.step()
    host = cluster.pool.tier.host
    for transfer in sinking:
        assert all(key is not None and host.find(key) is None for key in transfer.keys)
        assert {host.states[host_id] for host_id in transfer.host_ids} == {HostState.SWAPPED}
    keys = [key for transfer in sinking for key in transfer.keys if key is not None]
    cluster.run()
    assert all(host.find(key) is not None for key in keys)
    cluster.assert_idle()


def test_what_the_worker_has_lost_is_a_miss_and_costs_no_request() -> None:
    """tier-f3a: description and data are of one life of the pool, so the one cannot outlive the other. 8 at once."""
    cluster = cluster_with_host()
    prompt = tokens(0, 32)
    sink(cluster, prompt)
    assert cluster.pool.counts().host_cached > 0
    cluster.crash()
    assert cluster.pool.counts().host_cached == 0
    again = [cluster.submit([*prompt, number], max_tokens=10) for number in range(8)]
    cluster.run()
    assert cluster.stats.num_host_hit_tokens == 0
    assert cluster.failed == {}
    for number, request in enumerate(again):
        assert cluster.output(request) == greedy([*prompt, number], 10)
    cluster.assert_idle()


@pytest.mark.parametrize("is_aborted", [False, True], ids=["read", "given up"])
def test_a_slow_restore_holds_its_host_and_device_blocks_however_long_it_takes(is_aborted: bool) -> None:
    """tier-302: there is no lease. Both ends are held until the worker says that the copy has ended, also if nobody
    waits for it any more; meanwhile others evict all that can be evicted."""
    cluster = cluster_with_host()
    prompt = tokens(0, 32)
    sink(cluster, prompt)
    cluster.worker.stalled.add(TransferDirection.TO_DEVICE)
    again = cluster.submit(prompt, max_tokens=10)
    while not (reading := [one for one in cluster.pool.tier.transfers if one.purpose is Purpose.RESTORE]):
        assert cluster.step()
    [restore] = reading
    if is_aborted:
        cluster.abort(again)
    others = [cluster.submit(tokens(first, first + 28), max_tokens=4) for first in range(310, 910, 50)]
    num_sunk_before = cluster.stats.num_sunk_blocks
    while len(cluster.finished) < 3 + len(others) + is_aborted:
        assert cluster.step()
        blocks, host = cluster.pool.blocks, cluster.pool.tier.host
        assert {blocks.states[block] for block in restore.device_ids} == {BlockState.TRANSFERRING}
        assert not set(restore.host_ids) & {*host.free, *host.evictable}
    assert cluster.stats.num_sunk_blocks - num_sunk_before > 40, "the whole host memory has been written anew"
    assert not cluster.output(again)
    cluster.worker.stalled.clear()
    cluster.run()
    assert cluster.output(again) == ([] if is_aborted else greedy(prompt, 10))
    cluster.assert_idle()
