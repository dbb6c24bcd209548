"""Several groups behind one gateway: who gets a request, and what becomes of it when its group is lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from octavo.common.errors import DeadlineExceededError, NotReadyError, QueueFullError, UnknownResponseError
from octavo.common.messages.generation import (
    BranchPoint,
    ModelInfo,
    SampledToken,
    SamplingParams,
    SchedulerLoad,
    Submit,
)
from octavo.common.registry import Member, RegistryAwayError, Roster, StaticRegistry
from octavo.common.roles import Role
from octavo.gateway.generation import Generation
from octavo.gateway.request_part import Prompt
from octavo.gateway.scheduler_client import SchedulerClient
from octavo.gateway.worker_groups import GroupSettings, WorkerGroups
from support.scripted_scheduler import Answer, ScriptedScheduler
from support.waiting import eventually

MODEL = ModelInfo("m", 64, 100, (99,), max_num_seqs=4, block_size=16)
TOKENS = list(range(10, 30))


class Hosts:
    """Scripted schedulers by pool, in a registry that can be away."""

    def __init__(self, *pools: str, script: Callable[[Submit], Answer], step_s: float = 0.002) -> None:
        self.schedulers = {pool: ScriptedScheduler(MODEL, script, step_s) for pool in pools}
        self.listed = set(pools)
        self.is_away = False

    async def members(self) -> list[Member]:
        if self.is_away:
            raise RegistryAwayError("nobody answers")
        return [Member(f"s-{pool}", Role.SCHEDULER, pool, f"frames:///{pool}") for pool in sorted(self.listed)]

    def registry(self) -> StaticRegistry:
        registry = StaticRegistry([])
        registry.members = self.members  # type: ignore[method-assign]
        return registry


@contextlib.asynccontextmanager
async def running(hosts: Hosts, **settings: Any) -> AsyncIterator[WorkerGroups]:
    groups = WorkerGroups(
        Roster(hosts.registry(), interval_s=0.05, keep_s=0.2),
        lambda member: hosts.schedulers[member.pool_id].connect(),
        lambda connect: SchedulerClient(connect, recovery_timeout_s=1.0),
        GroupSettings(**{"routing": "round_robin", **settings}),
    )
    task = asyncio.create_task(groups.run())
    await eventually(lambda: reasons_of(groups) == dict.fromkeys(hosts.listed, ""))
    try:
        yield groups
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def reasons_of(groups: WorkerGroups) -> dict[str, str]:
    """pool |-> why its group is not ready"""
    return {state.pool_id: state.why_not_ready for state in groups.states}


def counting(submit: Submit) -> Answer:
    """A scheduler that is asked to go on gives the rest."""
    done = len(submit.resumed[0].output_token_ids) if submit.resumed else 0
    return Answer([TOKENS[done:]])


def prompt(max_tokens: int = 20, **options: Any) -> Prompt:
    return Prompt((1, 2), SamplingParams(max_tokens=max_tokens), **options)


async def tokens_of(generation: Generation) -> list[int]:
    tokens: list[int] = []
    with generation:
        async for events in generation:
            for _, event in events:
                if isinstance(event, int):
                    tokens.append(event)
                elif isinstance(event, SampledToken):
                    tokens.append(event.token_id)
    return tokens


def submitted(hosts: Hosts) -> dict[str, list[str]]:
    return {pool: [submit.request_id for submit in host.submits] for pool, host in hosts.schedulers.items()}


async def test_requests_go_in_turn_and_all_end() -> None:
    hosts = Hosts("a", "b", script=counting)
    async with running(hosts) as groups:
        answers = await asyncio.gather(*(tokens_of(groups.submit(f"r{i}", [prompt()])) for i in range(6)))
        assert answers == [TOKENS] * 6
        assert submitted(hosts) == {"a": ["r0", "r2", "r4"], "b": ["r1", "r3", "r5"]}
        assert groups.num_open_requests == 0
        assert groups.model == MODEL


async def test_the_least_loaded_group_by_what_schedulers_tell() -> None:
    hosts = Hosts("a", "b", script=counting)
    async with running(hosts, routing="least_loaded") as groups:
        hosts.schedulers["a"].tell(SchedulerLoad(num_waiting=1, num_running=4))
        await asyncio.sleep(0.02)
        for index in range(3):
            await tokens_of(groups.submit(f"r{index}", [prompt()]))
        assert submitted(hosts) == {"a": [], "b": ["r0", "r1", "r2"]}


async def test_what_a_lost_group_had_goes_on_in_another_with_its_tokens() -> None:
    hosts = Hosts("a", "b", script=counting, step_s=0.01)
    async with running(hosts) as groups:
        generations = [groups.submit(f"r{index}", [prompt()]) for index in range(4)]
        answers = [asyncio.create_task(tokens_of(generation)) for generation in generations]
        await asyncio.sleep(0.08)
        hosts.schedulers["a"].is_away = True
        hosts.schedulers["a"].drop_link()
        assert await asyncio.gather(*answers) == [TOKENS] * 4
        moved = [submit for submit in hosts.schedulers["b"].submits if submit.request_id in ("r0", "r2")]
        assert len(moved) == 2
        assert all(
            submit.resumed[0].output_token_ids == tuple(TOKENS[: len(submit.resumed[0].output_token_ids)])
            for submit in moved
        )
        assert reasons_of(groups)["a"] and not reasons_of(groups)["b"]
        assert groups.why_not_ready == ""
        # Nothing goes to the dead one, whatever the registry says.
        await asyncio.gather(*(tokens_of(groups.submit(f"q{index}", [prompt()])) for index in range(20)))
        assert not [name for name in submitted(hosts)["a"] if name.startswith("q")]
        hosts.schedulers["a"].is_away = False
        await eventually(lambda: not reasons_of(groups)["a"])
        await asyncio.gather(*(tokens_of(groups.submit(f"p{index}", [prompt()])) for index in range(4)))
        assert [name for name in submitted(hosts)["a"] if name.startswith("p")] == ["p0", "p2"]


async def test_a_group_that_lost_its_worker_gives_its_requests_away() -> None:
    hosts = Hosts("a", "b", script=counting, step_s=0.01)
    async with running(hosts) as groups:
        answer = asyncio.create_task(tokens_of(groups.submit("r", [prompt()])))
        await asyncio.sleep(0.08)
        hosts.schedulers["a"].tell_status(False, "no worker")
        assert await answer == TOKENS
        assert submitted(hosts) == {"a": ["r"], "b": ["r"]}
        assert [abort.request_no for abort in hosts.schedulers["a"].aborts] == [1]


async def test_without_another_group_a_request_waits_for_its_own() -> None:
    hosts = Hosts("a", script=counting, step_s=0.01)
    async with running(hosts) as groups:
        answer = asyncio.create_task(tokens_of(groups.submit("r", [prompt()])))
        await asyncio.sleep(0.08)
        hosts.schedulers["a"].drop_link()
        assert await answer == TOKENS
        assert submitted(hosts) == {"a": ["r", "r"]}


async def test_the_deadline_of_a_request_moves_with_it() -> None:
    hosts = Hosts("a", "b", script=lambda submit: Answer([TOKENS], never_starts=True))
    async with running(hosts) as groups:
        generation = groups.submit("r", [prompt()], timeout_s=0.4)
        hosts.schedulers["a"].is_away = True
        hosts.schedulers["a"].drop_link()
        await eventually(lambda: submitted(hosts)["b"] == ["r"])
        with pytest.raises(DeadlineExceededError):
            await asyncio.wait_for(tokens_of(generation), 2.0)
        assert groups.num_open_requests == 0
        assert [abort.request_no for abort in hosts.schedulers["b"].aborts] == [1]


async def test_a_full_queue_sends_a_request_to_the_next_group() -> None:
    hosts = Hosts("a", "b", script=counting)
    full = Answer([TOKENS], fails_after=0, failure=(QueueFullError.reason, "many wait"))
    hosts.schedulers["a"].script = lambda submit: full
    async with running(hosts) as groups:
        assert await tokens_of(groups.submit("r", [prompt()])) == TOKENS
        assert submitted(hosts) == {"a": ["r"], "b": ["r"]}
        hosts.schedulers["b"].script = lambda submit: full
        with pytest.raises(QueueFullError, match="many wait"):
            await tokens_of(groups.submit("q", [prompt()]))
        assert sorted(map(len, submitted(hosts).values())) == [2, 2], "each was asked once"


async def test_a_request_that_does_not_begin_goes_where_nothing_waits() -> None:
    hosts = Hosts("a", "b", script=counting)
    hosts.schedulers["a"].script = lambda submit: Answer([TOKENS], never_starts=True)
    async with running(hosts, reroute_after_s=0.1) as groups:
        assert await asyncio.wait_for(tokens_of(groups.submit("r", [prompt()])), 4.0) == TOKENS
        assert submitted(hosts) == {"a": ["r"], "b": ["r"]}


async def test_a_branch_goes_to_the_group_of_its_origin() -> None:
    hosts = Hosts("a", "b", script=counting)
    async with running(hosts) as groups:
        await tokens_of(groups.submit("origin", [prompt(keep_s=60.0)]))
        for index in range(3):
            branch = BranchPoint("origin", 0, None)
            await tokens_of(groups.submit(f"b{index}", [prompt(branch=branch)]))
        assert submitted(hosts) == {"a": ["origin", "b0", "b1", "b2"], "b": []}
        groups.forget("origin", b"")
        groups.forget("of another gateway", b"")
        await asyncio.sleep(0.02)
        assert [forget.request_id for forget in hosts.schedulers["a"].forgotten] == ["origin", "of another gateway"]
        assert [forget.request_id for forget in hosts.schedulers["b"].forgotten] == ["of another gateway"]


async def test_a_branch_of_what_was_lost_with_its_scheduler_is_told_so() -> None:
    def script(submit: Submit) -> Answer:
        return (
            Answer([[]], fails_after=0, failure=("UNKNOWN_RESPONSE", "no such")) if submit.branch else Answer([TOKENS])
        )

    hosts = Hosts("a", script=script)
    async with running(hosts) as groups:
        await tokens_of(groups.submit("origin", [prompt(keep_s=60.0)]))
        branch = prompt(branch=BranchPoint("origin", 0, None))
        with pytest.raises(UnknownResponseError, match=r"^no such$"):
            await tokens_of(groups.submit("early", [branch]))
        scheduler = hosts.schedulers["a"]
        scheduler.status = replace(scheduler.status, epoch=7)
        scheduler.drop_link()
        await eventually(lambda: groups.why_not_ready != "")
        await eventually(lambda: groups.why_not_ready == "")
        with pytest.raises(UnknownResponseError, match=r"^no such; the scheduler that served it has been lost since"):
            await tokens_of(groups.submit("late", [branch]))


async def test_a_branch_of_another_gateway_is_looked_for_in_every_group() -> None:
    hosts = Hosts("a", "b", "c", script=counting)
    unknown = Answer([TOKENS], fails_after=0, failure=(UnknownResponseError.reason, "no such response"))
    for pool in "ab":
        hosts.schedulers[pool].script = lambda submit: unknown
    async with running(hosts) as groups:
        branch = BranchPoint("elsewhere", 0, None)
        assert await tokens_of(groups.submit("r", [prompt(branch=branch)])) == TOKENS
        hosts.schedulers["c"].script = lambda submit: unknown
        with pytest.raises(UnknownResponseError):
            await tokens_of(groups.submit("q", [prompt(branch=branch)]))


async def test_an_explanation_comes_from_the_group_that_knows_the_request() -> None:
    hosts = Hosts("a", "b", script=counting)
    async with running(hosts) as groups:
        hosts.schedulers["b"].explanations["r"] = b'{"b": 1}'
        assert await groups.explain("r", b"") == b'{"b": 1}'
        assert await groups.explain("nobody's", b"") == b""


async def test_the_registry_may_be_away_and_a_group_that_it_forgot_ends_what_it_has() -> None:
    hosts = Hosts("a", "b", script=counting, step_s=0.01)
    async with running(hosts) as groups:
        hosts.is_away = True
        await asyncio.sleep(0.4)
        answers = await asyncio.gather(*(tokens_of(groups.submit(f"r{index}", [prompt()])) for index in range(4)))
        assert answers == [TOKENS] * 4
        hosts.is_away = False
        hosts.listed.discard("b")
        await asyncio.sleep(0.4)
        assert set(reasons_of(groups)) == {"a", "b"}, "its link is open: it is alive"
        hosts.schedulers["b"].is_away = True
        hosts.schedulers["b"].drop_link()
        await eventually(lambda: set(reasons_of(groups)) == {"a"})


async def test_a_group_with_another_model_or_shorter_sequences_gets_only_what_it_can_serve() -> None:
    hosts = Hosts("a", "b", "c", script=counting)
    for pool, model in (("b", replace(MODEL, max_model_len=10)), ("c", replace(MODEL, model_name="other"))):
        hosts.schedulers[pool].model = model
        hosts.schedulers[pool].status = replace(hosts.schedulers[pool].status, model=model)
    async with running(hosts) as groups:
        assert groups.model == MODEL
        for index in range(4):
            await tokens_of(groups.submit(f"r{index}", [prompt()]))
        assert submitted(hosts) == {"a": ["r0", "r1", "r2", "r3"], "b": [], "c": []}


async def test_after_a_refusal_of_work_nothing_new_is_taken() -> None:
    hosts = Hosts("a", "b", script=counting, step_s=0.01)
    async with running(hosts) as groups:
        answer = asyncio.create_task(tokens_of(groups.submit("r", [prompt()])))
        await asyncio.sleep(0.03)
        groups.refuse_new_work("shutting down")
        with pytest.raises(NotReadyError, match="shutting down"):
            groups.submit("q", [prompt()])
        await groups.drain(2.0)
        assert await answer == TOKENS
        assert groups.refuses_work
