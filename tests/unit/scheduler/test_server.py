"""The scheduler on links: what gateways are told when worker or KV manager come, stall, go, and come back."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from octavo.common.codecs.kv import KV_STEPS
from octavo.common.links import Address, connect, listen
from octavo.common.messages.generation import (
    Abort,
    FinishReason,
    ResumedChoice,
)
from octavo.common.messages.kv import OpenPool, PoolOpened
from octavo.kvmanager.pool import PoolSettings
from octavo.kvmanager.server import KvManagerServer
from octavo.simulator.scripted_worker import expected_output
from support.fake_host import (
    BLOCK_SIZE,
    FIRST_EPOCH,
    NUM_BLOCKS,
    NUM_SLOTS,
    VOCAB,
    FakeHost,
    Gateway,
    ignore,
    running,
)
from support.waiting import eventually


async def test_gateway_is_told_the_model_once_worker_and_kv_manager_are_there() -> None:
    async with running(FakeHost()) as (scheduler, gateway, _):
        await eventually(lambda: gateway.statuses[-1].ready)
        _, first, *_, last = gateway.statuses
        assert (first.ready, first.model) == (False, None)
        assert first.reason
        assert last.model is not None
        assert (last.model.model_name, last.model.max_model_len, last.model.max_num_seqs) == ("m", 256, NUM_SLOTS)
        assert scheduler.not_ready_reason == ""


async def test_sequence_never_outgrows_the_pool_nor_the_limit_set() -> None:
    async with running(FakeHost(), max_model_len=100) as (_, gateway, _):
        await eventually(lambda: gateway.statuses[-1].model)
        model = gateway.statuses[-1].model
        assert model is not None
        assert model.max_model_len == 100
        gateway.submit(1, [5] * 95, max_tokens=6)
        await eventually(lambda: gateway.failed)
        assert gateway.failed[1].reason == "PROMPT_TOO_LONG"


async def test_request_before_the_first_worker_is_refused() -> None:
    host = FakeHost()
    host.is_up = False
    async with running(host) as (_, gateway, _):
        gateway.submit(1, [5], max_tokens=3)
        await eventually(lambda: gateway.failed)
        assert gateway.failed[1].reason == "NOT_READY"


async def run_to_end(gateway: Gateway, request_no: int, prompt: list[int], num_tokens: int) -> None:
    """All its tokens, each once."""
    await eventually(lambda: request_no in gateway.finished or request_no in gateway.failed)
    assert gateway.failed == {}
    assert gateway.tokens[request_no] == expected_output(prompt, num_tokens, VOCAB)
    assert gateway.finished[request_no].reason is FinishReason.LENGTH


async def test_lost_worker_is_a_pause() -> None:
    host = FakeHost()
    host.step_s = 0.002
    async with running(host) as (scheduler, gateway, _):
        await eventually(lambda: gateway.statuses[-1].ready)
        gateway.submit(1, [5, 6, 7], max_tokens=50)
        await eventually(lambda: len(gateway.tokens.get(1, ())) >= 10)
        host.is_up = False
        host.links["worker"].close()
        await eventually(lambda: not scheduler.core.has_worker)
        num_tokens = len(gateway.tokens[1])
        gateway.submit(2, [8, 9], max_tokens=5)
        await asyncio.sleep(0.05)
        assert len(gateway.tokens[1]) == num_tokens
        host.is_up = True
        await run_to_end(gateway, 1, [5, 6, 7], 50)
        await run_to_end(gateway, 2, [8, 9], 5)
        assert scheduler.core.stats.num_pool_losses == 1
        assert host.epochs == sorted(host.epochs)


async def test_decode_goes_on_while_the_kv_manager_is_away() -> None:
    host = FakeHost()
    host.step_s = 0.002
    async with running(host) as (scheduler, gateway, _):
        await eventually(lambda: gateway.statuses[-1].ready)
        gateway.submit(1, [5, 6, 7], max_tokens=50)
        await eventually(lambda: len(gateway.tokens.get(1, ())) >= 10)
        host.is_up = False
        host.links["kvmanager"].close()
        num_tokens = len(gateway.tokens[1])
        gateway.submit(2, [8, 9], max_tokens=5)
        await eventually(lambda: len(gateway.tokens[1]) >= num_tokens + BLOCK_SIZE)
        assert gateway.statuses[-1].ready
        assert 2 not in gateway.tokens
        host.is_up = True
        await run_to_end(gateway, 1, [5, 6, 7], 50)
        await run_to_end(gateway, 2, [8, 9], 5)
        stats = scheduler.core.stats
        assert (stats.num_pool_losses, stats.num_declarations, stats.num_kvmanager_resumes) == (0, 0, 1)


async def test_new_kv_manager_is_told_what_the_scheduler_holds() -> None:
    host = FakeHost()
    host.step_s = 0.002
    async with running(host) as (scheduler, gateway, _):
        await eventually(lambda: gateway.statuses[-1].ready)
        gateway.submit(1, [5, 6, 7], max_tokens=50)
        await eventually(lambda: len(gateway.tokens.get(1, ())) >= 10)
        host.kvmanager = KvManagerServer(PoolSettings(), boot_epoch=2, check_ledger=True)
        host.links["kvmanager"].close()
        await run_to_end(gateway, 1, [5, 6, 7], 50)
        stats = scheduler.core.stats
        assert (stats.num_pool_losses, stats.num_declarations, stats.num_preemptions) == (0, 1, 0)
        [pool] = host.kvmanager.pools
        await eventually(lambda: pool.blocks.counts().active == 0)


async def test_kv_manager_that_was_replaced_is_refused() -> None:
    host = FakeHost()
    host.least_boot_epoch = 2
    async with running(host) as (scheduler, gateway, _):
        await eventually(lambda: any("there is one of epoch 2" in status.reason for status in gateway.statuses))
        assert not gateway.statuses[-1].ready
        host.kvmanager = KvManagerServer(PoolSettings(), boot_epoch=2, check_ledger=True)
        await eventually(lambda: gateway.statuses[-1].ready)
        gateway.submit(1, [5, 6, 7], max_tokens=10)
        await run_to_end(gateway, 1, [5, 6, 7], 10)
        assert scheduler.core.stats.num_pool_losses == 0


async def test_a_scheduler_that_waits_for_its_worker_always_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.scheduler.readiness._UNTOLD_ABSENCE_S", 0.1)
    host = FakeHost()
    host.is_up = False
    async with running(host) as (scheduler, gateway, _):
        await eventually(lambda: "worker away" in scheduler.not_ready_reason)
        await asyncio.sleep(0.7)
        assert "worker away" in scheduler.not_ready_reason
        assert all(status.reason for status in gateway.statuses if not status.ready)


async def test_gateways_are_told_the_load_and_whose_it_is() -> None:
    host = FakeHost()
    host.step_s = 0.2
    async with running(host, pool_id="left") as (scheduler, gateway, _):
        await eventually(lambda: gateway.statuses[-1].ready)
        assert (gateway.statuses[-1].pool_id, gateway.statuses[-1].epoch) == ("left", FIRST_EPOCH)
        for request_no in range(1, NUM_SLOTS + 3):
            gateway.submit(request_no, [5] * 20, max_tokens=60)
        await eventually(
            lambda: gateway.loads[-1].num_running == NUM_SLOTS and gateway.loads[-1] == scheduler.core.load
        )
        busy = gateway.loads[-1]
        assert (busy.num_waiting, busy.num_waiting_tokens, busy.max_num_running) == (2, 40, NUM_SLOTS)
        assert busy.num_available_blocks <= busy.num_blocks - NUM_SLOTS
        for request_no in range(1, NUM_SLOTS + 3):
            gateway.link.send(Abort(request_no))
        await eventually(lambda: (gateway.loads[-1].num_running, gateway.loads[-1].num_waiting) == (0, 0))


async def test_refused_step_starts_over_with_a_hello() -> None:
    host = FakeHost()
    host.refuses_step = 6
    async with running(host) as (scheduler, gateway, _):
        await eventually(lambda: gateway.statuses[-1].ready)
        gateway.submit(1, [5, 6, 7], max_tokens=30)
        await run_to_end(gateway, 1, [5, 6, 7], 30)
        assert scheduler.core.stats.num_pool_losses == 1
        assert any("refused" in status.reason for status in gateway.statuses)


async def test_step_that_takes_too_long_gives_the_worker_up() -> None:
    host = FakeHost()
    async with running(host, step_timeout_s=0.2) as (_, gateway, _):
        await eventually(lambda: gateway.statuses[-1].ready)
        host.worker_answers = False
        gateway.submit(1, [5, 6, 7], max_tokens=10)
        await eventually(lambda: "has not finished a step" in gateway.statuses[-1].reason)
        host.worker_answers = True
        await run_to_end(gateway, 1, [5, 6, 7], 10)


async def test_a_scheduler_that_was_suspended_itself_does_not_blame_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.scheduler.server._SUSPENDED_S", 1.0)
    host = FakeHost()
    host.step_s = 0.8
    async with running(host, step_timeout_s=1.1) as (scheduler, gateway, _):
        await eventually(lambda: gateway.statuses[-1].ready)
        gateway.submit(1, [5, 6, 7], max_tokens=2)
        await eventually(lambda: scheduler.core.oldest_step)
        time.sleep(1.6)  # noqa: ASYNC251 (nothing of this process runs)
        await run_to_end(gateway, 1, [5, 6, 7], 2)
        assert scheduler.core.stats.num_pool_losses == 0


async def test_kv_manager_that_does_not_answer_is_given_up() -> None:
    host = FakeHost()
    host.kvmanager_answers = False
    async with running(host, kvmanager_timeout_s=0.2) as (_, gateway, _):
        await asyncio.sleep(0.3)
        assert not gateway.statuses[-1].ready
        host.kvmanager_answers = True
        await eventually(lambda: gateway.statuses[-1].ready)
        gateway.submit(1, [5, 6, 7], max_tokens=10)
        await run_to_end(gateway, 1, [5, 6, 7], 10)


async def test_requests_fail_when_nobody_comes_back_in_time() -> None:
    host = FakeHost()
    host.step_s = 0.005
    async with running(host, recovery_timeout_s=0.1) as (_, gateway, _):
        await eventually(lambda: gateway.statuses[-1].ready)
        gateway.submit(1, [5, 6, 7], max_tokens=100)
        await eventually(lambda: gateway.tokens)
        host.is_up = False
        host.links["worker"].close()
        await eventually(lambda: gateway.failed)
        assert gateway.failed[1].reason == "NOT_READY"
        assert "no worker" in gateway.failed[1].message


async def test_requests_of_a_lost_gateway_end() -> None:
    host = FakeHost()
    host.step_s = 0.005
    async with running(host) as (scheduler, gateway, _):
        await eventually(lambda: gateway.statuses[-1].ready)
        gateway.submit(1, [5, 6, 7], max_tokens=100)
        other = Gateway(scheduler)
        other.submit(1, [5, 6, 7], max_tokens=20)
        await eventually(lambda: gateway.tokens)
        gateway.link.close()
        await run_to_end(other, 1, [5, 6, 7], 20)
        assert scheduler.core.num_requests == 0


async def test_stop_at_any_moment_of_the_start_is_heeded() -> None:
    for num_turns in range(12):
        async with running(FakeHost()):
            for _ in range(num_turns):
                await asyncio.sleep(0)


async def test_abort_ends_a_request_once() -> None:
    host = FakeHost()
    host.step_s = 0.005
    async with running(host) as (scheduler, gateway, _):
        await eventually(lambda: gateway.statuses[-1].ready)
        gateway.submit(1, [5, 6, 7], max_tokens=100)
        await eventually(lambda: gateway.tokens)
        gateway.link.send(Abort(1))
        gateway.link.send(Abort(1))
        await eventually(lambda: gateway.finished)
        assert gateway.finished[1].reason is FinishReason.ABORT
        await eventually(lambda: scheduler.core.num_requests == 0)


async def test_stop_lets_running_requests_end_within_the_grace() -> None:
    host = FakeHost()
    host.step_s = 0.005
    async with running(host, drain_grace_s=5.0) as (_, gateway, stop):
        await eventually(lambda: gateway.statuses[-1].ready)
        gateway.submit(1, [5, 6, 7], max_tokens=30)
        await eventually(lambda: gateway.tokens)
        stop.request()
        await run_to_end(gateway, 1, [5, 6, 7], 30)
        await asyncio.wait_for(gateway.is_closed.wait(), 2)
        assert gateway.statuses[-1].reason == "shutting down"


async def test_stop_leaves_what_outlives_the_grace_to_the_next_scheduler() -> None:
    host = FakeHost()
    host.step_s = 0.02
    async with running(host, drain_grace_s=0.1) as (_, gateway, stop):
        await eventually(lambda: gateway.statuses[-1].ready)
        gateway.submit(1, [5, 6, 7], max_tokens=200)
        await eventually(lambda: gateway.tokens)
        stop.request()
        await asyncio.wait_for(gateway.is_closed.wait(), 2)
        assert gateway.failed == {}
        assert gateway.statuses[-1].is_draining
        known = gateway.tokens[1]
        assert known == expected_output([5, 6, 7], 200, VOCAB)[: len(known)]
    host.step_s = 0.0
    async with running(host) as (scheduler, gateway, _):
        await eventually(lambda: gateway.statuses[-1].ready)
        gateway.submit(1, [5, 6, 7], max_tokens=200, resumed=(ResumedChoice(0, tuple(known)),))
        await eventually(lambda: 1 in gateway.finished)
        assert known + gateway.tokens[1] == expected_output([5, 6, 7], 200, VOCAB)
        assert scheduler.core.stats.num_resumed_requests == 1


async def test_choices_go_on_each_by_itself() -> None:
    async with running(FakeHost()) as (_, gateway, _):
        await eventually(lambda: gateway.statuses[-1].ready)
        whole = expected_output([5, 6, 7], 30, VOCAB)
        resumed = (ResumedChoice(1, tuple(whole[:4])), ResumedChoice(2, tuple(whole[:9])))
        gateway.submit(1, [5, 6, 7], max_tokens=30, resumed=resumed, n=4)
        await eventually(lambda: gateway.num_finished == 2)
        assert gateway.by_choice == {(1, 1): whole[4:], (1, 2): whole[9:]}


@pytest.mark.parametrize(
    ("resumed", "options"),
    [
        ([ResumedChoice(0, ())], {}),
        ([ResumedChoice(0, (1,) * 30)], {}),
        ([ResumedChoice(1, (1,))], {}),
        ([ResumedChoice(0, (1,)), ResumedChoice(0, (2,))], {}),
        ([ResumedChoice(0, (VOCAB,))], {}),
        ([ResumedChoice(0, (1,))], {"beam_width": 2}),
    ],
    ids=["no tokens", "too many", "no such choice", "twice", "no such token", "beams"],
)
async def test_what_cannot_go_on_is_refused(resumed: list[ResumedChoice], options: dict[str, int]) -> None:
    async with running(FakeHost()) as (scheduler, gateway, _):
        await eventually(lambda: gateway.statuses[-1].ready)
        gateway.submit(1, [5, 6, 7], max_tokens=30, resumed=tuple(resumed), **options)
        await eventually(lambda: 1 in gateway.failed)
        assert gateway.failed[1].reason in ("INVALID_REQUEST", "TOKEN_OUT_OF_RANGE")
        assert scheduler.core.num_requests == 0


@pytest.mark.parametrize("carrier", ["frames", "grpc+unix"])
async def test_a_scheduler_whose_pool_another_has_taken_says_so_and_does_not_take_it_back(
    carrier: str, tmp_path: Path
) -> None:
    host = FakeHost()
    address = Address(carrier, str(tmp_path / "kv.sock"))
    listener = await listen([address], KV_STEPS, host.kvmanager.accept)
    host.connect_kvmanager = lambda: connect(address, KV_STEPS, timeout_s=10)  # type: ignore[method-assign]
    try:
        async with running(host) as (scheduler, gateway, _):
            await eventually(lambda: gateway.statuses[-1].ready)
            owner = await connect(address, KV_STEPS, timeout_s=10)
            answers: list[Any] = []
            owner.bind(answers.append, ignore)
            owner.send(OpenPool("default", 2**63, 99, NUM_BLOCKS, BLOCK_SIZE))
            refusal = f"refused by the KV manager: epoch {host.epochs[0]} of pool 'default'; it has seen {2**63}"
            await eventually(lambda: refusal in scheduler._readiness.longest_absence(time.monotonic())[1])
            await eventually(lambda: gateway.statuses[-1].reason == refusal)
            assert not owner.is_closed
            assert [type(answer) for answer in answers] == [PoolOpened]
            assert len(host.epochs) == 1, "the worker was made to start over"
            owner.close()
    finally:
        await listener.close(0.1)
