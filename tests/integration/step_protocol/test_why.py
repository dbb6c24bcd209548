"""What the scheduler tells of a request afterwards, with the real KV manager."""

from __future__ import annotations

import random
from typing import Any

import pytest

from octavo.common.messages.kv import Admitted, MissReason, PrefixMiss, Verdict
from octavo.scheduler.core_settings import CoreSettings
from octavo.scheduler.preemption import PreemptionSettings
from octavo.scheduler.request_explanation import explain
from octavo.scheduler.request_records import WaitCause
from octavo.simulator.scripted_worker import expected_output
from octavo.simulator.step_cluster import StepCluster
from support.step_traffic import VOCAB, some_prompt


def why(cluster: StepCluster, request_no: int, *, for_operator: bool = True) -> dict[str, Any]:
    request_id = f"request-{request_no}"
    records = cluster.core.log.find(request_id)
    found = explain(request_id, records, cluster.now, 1_000.0 + cluster.now, for_operator=for_operator)
    [prompt] = found["prompts"]
    assert isinstance(prompt, dict)
    return prompt


def test_a_cold_prompt_and_the_same_again() -> None:
    cluster = StepCluster()
    cold = cluster.submit(some_prompt(18), max_tokens=3)
    cluster.run()
    warm = cluster.submit(some_prompt(18), max_tokens=3)
    cluster.run()
    first, second = why(cluster, cold), why(cluster, warm)
    assert (first["state"], first["num_prompt_tokens"], first["error"]) == ("ended", 18, None)
    assert first["sequences"][0]["finish_reason"] == "length"
    assert 0 < first["first_token_s"] <= first["ended_s"]
    [admission] = second["sequences"][0]["admissions"]
    assert (admission["num_tokens"], admission["num_blocks"]) == (18, 5)
    assert admission["blocks"]["hit_device"] == 4
    assert admission["blocks"]["tail_not_full"] == 1
    assert sum(admission["blocks"].values()) == 5
    assert second["arrived_at"] > first["arrived_at"] == 1_000.0


def test_the_second_of_two_waits_for_a_slot() -> None:
    cluster = StepCluster(max_num_seqs=1)
    cluster.submit(some_prompt(5), max_tokens=30)
    second = cluster.submit(some_prompt(6), max_tokens=2)
    third = cluster.submit(some_prompt(7), max_tokens=2)
    for _ in range(40):
        cluster.step()
    waiting = why(cluster, second)
    assert (waiting["state"], waiting["sequences"][0]["waits_for"]) == ("waiting", "no_slot")
    assert why(cluster, third)["sequences"][0]["waits_for"] == "behind_others"
    cluster.run()
    waited = why(cluster, second)["sequences"][0]["waited_s"]
    assert waited["no_slot"] == pytest.approx(cluster.core.log.wait_s[WaitCause.NO_SLOT], rel=0.5)
    assert max(waited, key=waited.__getitem__) == "no_slot"


def test_a_preemption_tells_what_it_cost() -> None:
    cluster = StepCluster(num_blocks=24, max_num_seqs=8, max_model_len=96)
    requests = [cluster.submit(some_prompt(9 + first, first=first), max_tokens=40) for first in range(8)]
    cluster.run()
    preemptions = [p for request in requests for s in why(cluster, request)["sequences"] for p in s["preemptions"]]
    assert len(preemptions) == cluster.core.stats.num_preemptions > 0
    for preemption in preemptions:
        assert (preemption["why"], preemption["kind"]) == ("no_blocks", "recompute")
        assert preemption["num_blocks"] > 0
        assert 0 <= preemption["num_tokens_computed_again"] <= preemption["num_computed_tokens"]
        assert preemption["back_after_s"] > 0
        assert preemption["cost_s"] == pytest.approx(preemption["num_tokens_computed_again"] / 10_000, rel=0.9)
    log = cluster.core.log
    assert log.num_tokens_again == sum(p["num_tokens_computed_again"] for p in preemptions) > 0
    assert log.preemption_cost_s["recompute"] == pytest.approx(sum(p["cost_s"] for p in preemptions), abs=1e-5)
    assert log.preemption_cost_s["swap"] == 0


def test_what_is_swapped_is_copied_and_not_computed_again() -> None:
    swap = CoreSettings(max_num_batched_tokens=32, preemption=PreemptionSettings("swap", min_progress=4))
    cluster = StepCluster(num_blocks=24, max_num_seqs=8, max_model_len=96, num_host_blocks=60, settings=swap)
    requests = [cluster.submit(some_prompt(9 + first, first=first), max_tokens=40) for first in range(8)]
    cluster.run()
    preemptions = [p for request in requests for s in why(cluster, request)["sequences"] for p in s["preemptions"]]
    assert {p["kind"] for p in preemptions} == {"swap"}
    assert {p["num_tokens_computed_again"] for p in preemptions} == {0}
    copy_there_and_back_s = 2 * 20e-6
    for p in preemptions:
        assert 0 < p["num_swapped_blocks"] <= p["num_blocks"]
        assert p["cost_s"] == pytest.approx(copy_there_and_back_s * p["num_swapped_blocks"])
    assert cluster.core.log.preemption_cost_s["swap"] == pytest.approx(sum(p["cost_s"] for p in preemptions), abs=1e-5)


def test_a_row_that_sits_out_waits_for_a_credit() -> None:
    one_credit = CoreSettings(max_num_batched_tokens=32, credits_per_sequence=1, pipeline_depth=1)
    cluster = StepCluster(num_blocks=60, block_size=1, max_num_seqs=4, max_model_len=40, settings=one_credit)
    requests = [cluster.submit(some_prompt(5, first=first), max_tokens=9) for first in range(4)]
    cluster.run()
    waits = [why(cluster, request)["sequences"][0] for request in requests]
    assert all(told["waits_for"] is None and not told["preemptions"] for told in waits)
    waited = [told["waited_s"].get("no_credit", 0.0) for told in waits]
    assert max(waited) > 0
    assert cluster.core.log.wait_s[WaitCause.NO_CREDIT] == pytest.approx(sum(waited), abs=1e-5)
    assert all(told["waited_s"].get("no_credit", 0.0) < told["ended_s"] for told in waits)


@pytest.mark.parametrize(
    ("block_copy_us", "outcome", "other"), [(20, "hit_host", "slower_tier"), (5000, "slower_tier", "hit_host")]
)
def test_a_prefix_comes_from_the_host_only_if_that_is_faster(block_copy_us: int, outcome: str, other: str) -> None:
    cluster = StepCluster(num_blocks=20, num_host_blocks=40)
    cluster.worker.block_copy_us = block_copy_us
    cluster.submit(some_prompt(40), max_tokens=2)
    cluster.run()
    cluster.submit(some_prompt(76, first=50), max_tokens=2)
    cluster.run()
    again = cluster.submit(some_prompt(40), max_tokens=2)
    cluster.run()
    [admission] = why(cluster, again)["sequences"][0]["admissions"]
    blocks = admission["blocks"]
    assert blocks[outcome] > 0
    assert other not in blocks
    assert sum(blocks.values()) == admission["num_blocks"] == 10
    assert admission["block_copy_s"] == pytest.approx(block_copy_us * 1e-6)
    assert (admission["block_compute_s"] < admission["block_copy_s"]) == (outcome == "slower_tier")
    stats = cluster.stats
    assert stats.num_prefix_hit_blocks + sum(stats.num_missed_blocks.values()) == stats.num_prefix_lookup_blocks
    assert cluster.output(again) == expected_output(some_prompt(40), 2, VOCAB)
    cluster.assert_idle()


def test_a_lost_pool_is_told() -> None:
    cluster = StepCluster()
    request = cluster.submit(some_prompt(9), max_tokens=20)
    for _ in range(20):
        cluster.step()
    cluster.core.pool_lost()
    cluster.core.advance(cluster.now)
    assert why(cluster, request)["sequences"][0]["waits_for"] == "pool_lost"
    cluster.now += 5.0
    cluster.open()
    cluster.run()
    told = why(cluster, request)["sequences"][0]
    assert told["waited_s"]["pool_lost"] == pytest.approx(5.0, abs=0.01)
    assert [p["why"] for p in told["preemptions"]] == ["pool_lost"]


def test_a_refused_request_is_told_with_its_error() -> None:
    cluster = StepCluster()
    bad = cluster.submit([1, VOCAB], max_tokens=1)
    cluster.run()
    told = why(cluster, bad)
    assert (told["state"], told["error"]["reason"]) == ("failed", "TOKEN_OUT_OF_RANGE")


def test_only_the_last_ended_requests_are_kept() -> None:
    cluster = StepCluster(settings=CoreSettings(max_num_batched_tokens=32, num_explained_requests=2))
    requests = [cluster.submit([1, 2, 3], max_tokens=2, n=3) for _ in range(4)]
    cluster.run()
    kept = [bool(cluster.core.log.find(f"request-{request}")) for request in requests]
    assert kept == [False, False, True, True]
    assert len(cluster.core.log) == 2
    assert len(cluster.core.log._sequences) == 6


def test_what_tells_of_other_tenants_is_for_the_operator_only() -> None:
    cluster = StepCluster()
    other = cluster.submit(some_prompt(9), max_tokens=1, cache_salt=b"theirs")
    own = cluster.submit(some_prompt(9, first=3), max_tokens=1, cache_salt=b"mine")
    third = cluster.submit(some_prompt(33, first=5), max_tokens=30, cache_salt=b"mine")
    for _ in range(100):
        cluster.step()
    [sequence] = cluster.core.log.find(f"request-{third}")[0].sequences
    misses = (
        PrefixMiss(MissReason.EVICTED, 2, evicted_by=1),
        PrefixMiss(MissReason.EVICTED, 1, evicted_by=2),
        PrefixMiss(MissReason.OTHER_SALT, 3),
        PrefixMiss(MissReason.NEVER_STORED, 1),
    )
    told_again = Admitted(sequence.sequence_id, Verdict.OK, num_cached_tokens=4, misses=misses)
    live = next(s for s in cluster.core._life.pool.running.values() if s.sequence_id == sequence.sequence_id)
    cluster.core.log.admitted(live, told_again, block_size=4)
    cluster.core.advance(cluster.now)
    full = why(cluster, third)["sequences"][0]["admissions"][-1]
    assert full["evicted_by"] == [f"request-{other}", f"request-{own}"]
    assert (full["blocks"]["other_salt"], full["blocks"]["never_stored"]) == (3, 1)
    withheld = why(cluster, third, for_operator=False)["sequences"][0]["admissions"][-1]
    assert withheld["evicted_by"] == [f"request-{own}"]
    assert withheld["blocks"]["never_stored"] == 4
    assert "other_salt" not in withheld["blocks"]
    assert sum(withheld["blocks"].values()) == sum(full["blocks"].values()) == full["num_blocks"]


def test_choices_share_leading_blocks_and_the_worker_is_told() -> None:
    cluster = StepCluster(settings=CoreSettings(max_num_batched_tokens=64, min_shared_blocks=2))
    cluster.submit(some_prompt(40), max_tokens=20, n=4, temperature=1.0)
    cluster.run()
    assert cluster.worker.num_grouped_rows > 4 * 15


@pytest.mark.parametrize("seed", range(20))
def test_under_any_order_waits_fit_into_lifetimes_and_outcomes_add_up(seed: int) -> None:
    dice = random.Random(seed)
    cluster = StepCluster(
        num_blocks=dice.choice([14, 24, 60]),
        max_num_seqs=dice.choice([1, 3, 8]),
        max_model_len=56,
        settings=CoreSettings(max_num_batched_tokens=dice.choice([8, 32]), pipeline_depth=dice.choice([1, 2])),
        seed=seed,
    )
    requests = []
    for _ in range(30):
        prompt = some_prompt(dice.randrange(1, 40), first=dice.randrange(3))
        requests.append(cluster.submit(prompt, dice.randrange(1, 16), n=dice.choice([1, 1, 3])))
        if dice.random() < 0.2:
            cluster.abort(dice.choice(requests), dice.choice([None, 0]))
        if dice.random() < 0.05:
            cluster.crash()
        for _ in range(dice.randrange(0, 30)):
            cluster.step()
    cluster.run()
    admissions = []
    for request in requests:
        told = why(cluster, request)
        assert told["state"] == "ended"
        for sequence in told["sequences"]:
            assert sequence["waits_for"] is None
            assert sum(sequence["waited_s"].values()) <= told["ended_s"] + 1e-5
            admissions += sequence["admissions"]
    for admission in admissions:
        assert sum(admission["blocks"].values()) == admission["num_blocks"]
    log = cluster.core.log
    assert sum(log.prefix_blocks.values()) == sum(admission["num_blocks"] for admission in admissions)
    sequences = [sequence for request in requests for sequence in why(cluster, request)["sequences"]]
    shown = sum(sum(sequence["waited_s"].values()) for sequence in sequences)
    assert sum(log.wait_s.values()) == pytest.approx(shown, abs=1e-3)
