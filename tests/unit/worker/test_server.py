"""The worker on links: hello, plans two deep, takeover, refusals, failures."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from octavo.common.errors import OctavoError
from octavo.common.links import Link, local_pair
from octavo.common.messages.step import (
    OpenSlot,
    RowFlag,
    StepPlan,
    StepRefused,
    StepResult,
    TableDelta,
    WorkerHello,
    WorkerReady,
    WorkerReply,
    WorkerRequest,
)
from octavo.worker.compute_thread import LoadingClock
from octavo.worker.config import WorkerConfig
from octavo.worker.main import new_server
from octavo.worker.models.errors import UnknownArchitectureError
from octavo.worker.server import WorkerServer
from octavo.worker.worker_core import ServedModel, WorkerCore
from support.runner_driver import make_runner
from support.tiny_models import VOCAB_SIZE, TinyModel, prompt_of

MakeTiny = Callable[[str], TinyModel]
Reply = TypeVar("Reply", WorkerReady, StepResult, StepRefused)

PROMPT = prompt_of(20)
FED = RowFlag.SAMPLE | RowFlag.FED_BY_LAST_SAMPLE


class Scheduler:
    """The client's end of a link to the worker."""

    def __init__(self, server: WorkerServer) -> None:
        link: Link[WorkerRequest, WorkerReply]
        link, servers_end = local_pair()
        self.link = link
        self.closed_by: asyncio.Future[OctavoError | None] = asyncio.get_running_loop().create_future()
        self._replies: asyncio.Queue[WorkerReply] = asyncio.Queue()
        link.bind(self._replies.put_nowait, self.closed_by.set_result)
        server.accept(servers_end)

    async def receive(self, kind: type[Reply]) -> Reply:
        reply = await asyncio.wait_for(self._replies.get(), 20)
        assert isinstance(reply, kind)
        return reply

    async def hello(self, epoch: int) -> WorkerReady:
        self.link.send(WorkerHello(epoch))
        return await self.receive(WorkerReady)

    def prefill(self) -> None:
        self.link.send(
            StepPlan(
                step_id=1,
                opened_slots=[OpenSlot(0, 1, (1,), 0.0, 1.0, 0, None)],
                table_deltas=[TableDelta(0, 0, (6, 2, 4), (1, 1, 1))],
                slots=[0],
                starts=[0],
                lengths=[len(PROMPT)],
                flags=[RowFlag.SAMPLE],
                token_ids=PROMPT,
            )
        )

    def decode(self, step_id: int) -> None:
        start = len(PROMPT) + step_id - 2
        self.link.send(StepPlan(step_id=step_id, slots=[0], starts=[start], lengths=[1], flags=[FED]))


class FailingRunner:
    """A runner whose third step fails as no plan should make it."""

    def __init__(self, folder: Path) -> None:
        self._runner = make_runner(folder)
        self._num_steps = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def launch(self, plan: StepPlan) -> object:
        self._num_steps += 1
        if self._num_steps == 3:
            raise ZeroDivisionError("the device is on fire")
        return self._runner.launch(plan)


class HangingRunner:
    """A runner whose steps wait until they are let go."""

    def __init__(self, folder: Path) -> None:
        self._runner = make_runner(folder)
        self.go_on = threading.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def launch(self, plan: StepPlan) -> object:
        self.go_on.wait()
        return self._runner.launch(plan)


@contextmanager
def serving(server: WorkerServer) -> Iterator[WorkerServer]:
    server.start()
    try:
        yield server
    finally:
        server._compute.stop(5)


@pytest.fixture
async def server(tiny: MakeTiny) -> AsyncIterator[WorkerServer]:
    folder = tiny("llama").folder
    with serving(WorkerServer(lambda progress: WorkerCore(make_runner(folder), ServedModel("tiny", (2,))))) as server:
        yield server


async def test_plans_two_deep_give_the_greedy_continuation(server: WorkerServer, tiny: MakeTiny) -> None:
    """Each plan is sent before the result of the one before it is back, as a scheduler at depth 2 does."""
    scheduler = Scheduler(server)
    ready = await scheduler.hello(epoch=1)
    assert (ready.model_name, ready.vocab_size, ready.block_size) == ("tiny", VOCAB_SIZE, 16)
    scheduler.prefill()
    tokens = []
    for step_id in range(2, 22):
        scheduler.decode(step_id)
        result = await scheduler.receive(StepResult)
        assert result.step_id == step_id - 1
        tokens += result.token_ids
    assert tokens == tiny("llama").greedy(PROMPT, 20)


async def test_times_are_reported(server: WorkerServer) -> None:
    scheduler = Scheduler(server)
    await scheduler.hello(epoch=1)
    await asyncio.sleep(0.05)
    scheduler.prefill()
    scheduler.decode(2)
    first, second = await scheduler.receive(StepResult), await scheduler.receive(StepResult)
    assert first.idle_us >= 50_000
    assert second.idle_us < 5_000
    assert first.compute_us > 0


async def test_hello_that_comes_before_the_model_is_loaded_waits(tiny: MakeTiny) -> None:
    folder, may_load = tiny("llama").folder, threading.Event()

    def build(progress: Callable[[str], None]) -> WorkerCore:
        progress("loading weights 45 %")
        may_load.wait(20)
        return WorkerCore(make_runner(folder), ServedModel("tiny", ()))

    with serving(WorkerServer(build)) as server:
        scheduler = Scheduler(server)
        hello = asyncio.create_task(scheduler.hello(epoch=1))
        await asyncio.sleep(0.05)
        assert not hello.done()
        assert server.health() == "loading weights 45 %"
        may_load.set()
        await hello
        await server.loaded
        assert server.health() == ""


def test_a_stage_of_loading_lasts_from_its_first_word_to_the_next_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((100.0, 100.0, 102.0, 104.5, 105.0))
    monkeypatch.setattr("octavo.worker.compute_thread.time.monotonic", lambda: next(times))
    clock = LoadingClock()
    for progress in ("importing torch", "loading weights 0 %", "loading weights 99 %", "running a warm-up step", ""):
        clock.begin(progress)
    assert clock.seconds == {"importing torch": 2.0, "loading weights": 2.5, "running a warm-up step": 0.5}


async def test_higher_epoch_takes_over(server: WorkerServer, tiny: MakeTiny) -> None:
    """The old scheduler's link is closed and its queued plans are dropped; all slots are free for the new one, and the
    blocks hold what they held: the new one computes the prompt's last tokens behind the old one's block."""
    old, new = Scheduler(server), Scheduler(server)
    first_life = await old.hello(epoch=3)
    old.prefill()
    await old.receive(StepResult)
    for step_id in range(2, 20):
        old.decode(step_id)
    second_life = await new.hello(epoch=4)
    while isinstance(refused := await old.receive(StepResult | StepRefused), StepResult):
        pass
    assert refused == StepRefused(0, "STALE_EPOCH", "epoch 4 has said hello")
    assert await asyncio.wait_for(old.closed_by, 5) is None
    assert first_life.generations == ()
    assert second_life.incarnation == first_life.incarnation
    assert (second_life.generations[6], second_life.generations[2], second_life.generations[7]) == (1, 1, -1)
    new.link.send(
        StepPlan(
            step_id=1,
            opened_slots=[OpenSlot(0, 1, (1,), 0.0, 1.0, 0, None)],
            table_deltas=[TableDelta(0, 0, (6, 7), (1, 1))],
            slots=[0],
            starts=[16],
            lengths=[len(PROMPT) - 16],
            flags=[RowFlag.SAMPLE],
            token_ids=PROMPT[16:],
        )
    )
    result = await new.receive(StepResult)
    assert (result.step_id, result.token_ids) == (1, tiny("llama").greedy(PROMPT, 1))


async def test_hello_that_asks_for_a_new_life_gets_one(server: WorkerServer) -> None:
    scheduler = Scheduler(server)
    life = await scheduler.hello(epoch=1)
    scheduler.prefill()
    await scheduler.receive(StepResult)
    scheduler.link.send(WorkerHello(2, begins_new_life=True))
    ready = await scheduler.receive(WorkerReady)
    assert ready.incarnation != life.incarnation
    assert ready.generations == ()


async def test_lower_epoch_is_turned_away(server: WorkerServer) -> None:
    current, stale = Scheduler(server), Scheduler(server)
    await current.hello(epoch=3)
    stale.link.send(WorkerHello(2))
    assert await stale.receive(StepRefused) == StepRefused(0, "STALE_EPOCH", "epoch 2 came after 3")
    await asyncio.wait_for(stale.closed_by, 5)
    current.prefill()
    await current.receive(StepResult)


async def test_plan_before_hello_ends_the_stream(server: WorkerServer) -> None:
    scheduler = Scheduler(server)
    scheduler.prefill()
    await asyncio.wait_for(scheduler.closed_by, 5)


async def test_gap_refuses_all_later_plans_until_the_next_hello(server: WorkerServer) -> None:
    scheduler = Scheduler(server)
    await scheduler.hello(epoch=1)
    scheduler.prefill()
    scheduler.decode(3)
    scheduler.decode(2)
    assert (await scheduler.receive(StepResult)).step_id == 1
    refused, after = await scheduler.receive(StepRefused), await scheduler.receive(StepRefused)
    assert (refused.step_id, refused.reason) == (3, "MESSAGE_GAP")
    assert (after.step_id, after.reason) == (2, "MESSAGE_GAP")

    again = Scheduler(server)
    await again.hello(epoch=1)
    again.prefill()
    assert (await again.receive(StepResult)).step_id == 1


async def test_failed_step_is_refused_and_the_worker_lives_on(tiny: MakeTiny) -> None:
    runner = FailingRunner(tiny("llama").folder)
    core = WorkerCore(runner, ServedModel("tiny", ()))  # type: ignore[arg-type]
    with serving(WorkerServer(lambda progress: core)) as server:
        scheduler = Scheduler(server)
        await scheduler.hello(epoch=1)
        scheduler.prefill()
        for step_id in (2, 3, 4):
            scheduler.decode(step_id)
        for _ in (1, 2):
            await scheduler.receive(StepResult)
        refused, after = await scheduler.receive(StepRefused), await scheduler.receive(StepRefused)
        assert (refused.step_id, refused.reason) == (3, "INTERNAL")
        assert "fire" not in refused.message
        assert (after.step_id, after.reason) == (4, "INTERNAL")

        scheduler.link.send(WorkerHello(1))
        await scheduler.receive(WorkerReady)
        scheduler.prefill()
        await scheduler.receive(StepResult)


async def test_a_step_that_does_not_end_is_told_to_whoever_watches_also_after_a_new_hello(tiny: MakeTiny) -> None:
    """ops-374: the event loop turns, and yet no token can be produced."""
    runner = HangingRunner(tiny("llama").folder)
    core = WorkerCore(runner, ServedModel("tiny", ()))  # type: ignore[arg-type]
    with serving(WorkerServer(lambda progress: core)) as server:
        scheduler = Scheduler(server)
        await scheduler.hello(epoch=1)
        await asyncio.sleep(0.2)
        assert server.why_restart(0.1) == "", "it is idle, not stuck"
        scheduler.prefill()
        scheduler.decode(2)
        await asyncio.sleep(0.2)
        scheduler.link.send(WorkerHello(2))
        await asyncio.sleep(0.05)
        assert server.why_restart(0.1) == "one step has lasted for 0 s"
        assert server.why_restart(60.0) == ""
        runner.go_on.set()
        await scheduler.receive(WorkerReady)
        assert server.why_restart(0.1) == ""


async def test_scheduler_that_leaves_makes_room_for_the_next(server: WorkerServer) -> None:
    leaving = Scheduler(server)
    await leaving.hello(epoch=1)
    leaving.prefill()
    leaving.link.close()
    following = Scheduler(server)
    await following.hello(epoch=1)
    following.prefill()
    assert (await following.receive(StepResult)).step_id == 1


async def test_worker_is_built_from_its_settings(tiny: MakeTiny) -> None:
    config = WorkerConfig(
        listen=["frames:///tmp/unused.sock"],
        model=tiny("qwen3").folder,
        model_name="small",
        kv_cache_bytes=2**20,
        max_num_seqs=4,
        num_threads=1,
    )
    with serving(new_server(config)) as server:
        ready = await Scheduler(server).hello(epoch=0)
        bytes_each = 3 * 2 * 2 * 16 * 16 * 4
        assert ready.model_name == "small"
        assert ready.num_blocks == 2**20 // bytes_each
        assert ready.max_model_len == 256
        assert ready.eos_token_ids == (2,)


async def test_model_that_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    config = WorkerConfig(listen=["frames:///tmp/unused.sock"], model=tmp_path)
    with serving(new_server(config)) as server:
        with pytest.raises(UnknownArchitectureError, match="BertModel is not one of LlamaForCausalLM"):
            await server.loaded
        assert server.health().startswith("loading failed: architecture BertModel")


async def test_a_closed_server_keeps_what_was_loaded(tiny: MakeTiny) -> None:
    """To free a GPU's graphs and memory takes longer than the grace of a stop."""
    runner = make_runner(tiny("llama").folder)
    is_freed = threading.Event()
    weakref.finalize(runner, is_freed.set)
    cores = [WorkerCore(runner, ServedModel("tiny", ()))]
    del runner
    server = WorkerServer(lambda progress: cores.pop())
    server.start()
    await server.loaded
    await server.close(10)

    assert not any(thread.name in ("compute", "results") for thread in threading.enumerate())
    gc.collect()
    assert not is_freed.is_set()


async def test_lost_link_is_resumed_with_slots_memory_and_the_results_that_were_lost(
    server: WorkerServer, tiny: MakeTiny
) -> None:
    """The link ends with two steps on their way. The next one gets their results, and plan 4 is sent again."""
    first = Scheduler(server)
    life = await first.hello(epoch=1)
    first.prefill()
    tokens = (await first.receive(StepResult)).token_ids
    first.decode(2)
    first.decode(3)
    await first.receive(StepResult)  # of step 2, which the scheduler is taken not to have read
    first.link.close()

    second = Scheduler(server)
    second.link.send(WorkerHello(1, life.incarnation, last_result=1))
    ready = await second.receive(WorkerReady)
    assert (ready.is_resumed, ready.incarnation) == (True, life.incarnation)
    for step_id in range(ready.last_step + 1, 6):
        second.decode(step_id)
    for step_id in range(2, 6):
        result = await second.receive(StepResult)
        assert result.step_id == step_id
        tokens += result.token_ids
    assert tokens == tiny("llama").greedy(PROMPT, 5)


async def test_repeated_plan_gets_the_result_that_it_got_before(server: WorkerServer) -> None:
    scheduler = Scheduler(server)
    await scheduler.hello(epoch=1)
    scheduler.prefill()
    result = await scheduler.receive(StepResult)
    scheduler.prefill()
    assert await scheduler.receive(StepResult) == result


async def test_hello_of_another_life_or_scheduler_closes_all_slots(server: WorkerServer) -> None:
    for hello in (WorkerHello(1, 12345, 1), WorkerHello(2, 0, 0)):
        scheduler = Scheduler(server)
        life = await scheduler.hello(epoch=1)
        scheduler.prefill()
        await scheduler.receive(StepResult)
        other = Scheduler(server)
        other.link.send(hello)
        ready = await other.receive(WorkerReady)
        assert not ready.is_resumed
        assert ready.incarnation == life.incarnation
        other.prefill()
        assert (await other.receive(StepResult)).step_id == 1
        if hello.epoch == 2:
            return


async def test_refused_plan_cannot_be_resumed(server: WorkerServer) -> None:
    scheduler = Scheduler(server)
    life = await scheduler.hello(epoch=1)
    scheduler.decode(2)
    await scheduler.receive(StepRefused)
    again = Scheduler(server)
    again.link.send(WorkerHello(1, life.incarnation, 0))
    ready = await again.receive(WorkerReady)
    assert not ready.is_resumed
    assert ready.incarnation != life.incarnation
