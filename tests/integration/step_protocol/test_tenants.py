"""Tenants that share one worker: none waits for the whole line of another. Over the real cores."""

from __future__ import annotations

from octavo.scheduler.core_settings import CoreSettings
from octavo.scheduler.preemption import PreemptionSettings
from octavo.simulator.step_cluster import StepCluster

VOCAB = 97


def small(num_blocks: int = 80, max_num_seqs: int = 2) -> StepCluster:
    settings = CoreSettings(max_num_batched_tokens=64, preemption=PreemptionSettings(min_progress=4))
    return StepCluster(num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_model_len=200, settings=settings)


def some_prompt(length: int, first: int) -> list[int]:
    return [(first + 7 * position) % VOCAB for position in range(length)]


def num_ended_before(cluster: StepCluster, request: int) -> int:
    cluster.run()
    return [ended for ended, _ in cluster.finished].index(request)


def test_a_single_request_passes_a_thousand_of_another_tenant() -> None:
    cluster = small()
    for number in range(1000):
        cluster.submit(some_prompt(9, number), max_tokens=3, tenant="crowd")
    for _ in range(100):
        cluster.step()
    num_before = len(cluster.finished)
    assert num_before > 5
    lone = cluster.submit(some_prompt(9, 5), max_tokens=3, tenant="lone")
    assert num_ended_before(cluster, lone) <= num_before + 6, "those that had begun, and one in turn"
    assert len(cluster.finished) == 1001
    cluster.assert_idle()


def test_without_tenants_age_decides_as_before() -> None:
    cluster = small(max_num_seqs=1)
    requests = [cluster.submit(some_prompt(9, number), max_tokens=2) for number in range(20)]
    cluster.run()
    assert [request for request, _ in cluster.finished] == requests


def test_weights_are_shares_of_what_begins() -> None:
    cluster = small(max_num_seqs=1)
    owners = {}
    for number in range(40):
        for tenant, weight in (("heavy", 3), ("light", 1)):
            request = cluster.submit(some_prompt(9, number), max_tokens=2, tenant=tenant, weight=weight)
            owners[request] = tenant
    cluster.run()
    first = [owners[request] for request, _ in cluster.finished][:40]
    assert 29 <= first.count("heavy") <= 31


def test_the_choices_of_one_request_take_turns_too() -> None:
    cluster = small(max_num_seqs=1, num_blocks=400)
    crowd = cluster.submit(some_prompt(9, 1), max_tokens=3, n=64, tenant="crowd", temperature=1.0)
    while not cluster.finished:
        cluster.step()
    lone = cluster.submit(some_prompt(9, 5), max_tokens=3, n=2, tenant="lone", temperature=1.0)
    cluster.run()
    ended = [request for request, _ in cluster.finished]
    assert ended.count(crowd) == 64
    assert [place for place, request in enumerate(ended) if request == lone][-1] <= 6


def test_a_tenant_keeps_its_place_when_its_request_is_preempted_or_the_pool_is_lost() -> None:
    """A small pool, so that blocks run out."""
    cluster = small(num_blocks=24, max_num_seqs=4)
    for number in range(60):
        cluster.submit(some_prompt(30, number), max_tokens=40, tenant="crowd")
    for _ in range(30):
        cluster.step()
    num_before = len(cluster.finished)
    lone = cluster.submit(some_prompt(30, 90), max_tokens=40, tenant="lone")
    cluster.step()
    cluster.crash()
    assert num_ended_before(cluster, lone) <= num_before + 12
    assert cluster.core.stats.num_preemptions > 0
    cluster.assert_idle()
