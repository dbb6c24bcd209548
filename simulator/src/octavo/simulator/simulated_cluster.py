"""The whole cluster in virtual time: gateways, scheduler, KV manager and worker, on links with delays of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from octavo.common.errors import NotReadyError, StaleEpochError, UnknownResponseError
from octavo.common.messages.generation import Abort, Forget, Submit, TokenBatch
from octavo.common.messages.kv import DeclarePool, KvReply, OpenPool, PoolOpened, StreamRefused
from octavo.common.messages.step import StepPlan, WorkerHello, WorkerReady
from octavo.kvmanager.host_tier import HostTierSettings
from octavo.scheduler.core import SchedulerCore
from octavo.scheduler.core_settings import CoreSettings
from octavo.scheduler.worker_group import WorkerGroup
from octavo.simulator.content_check import check_contents
from octavo.simulator.faulty_cluster import FaultyCluster, SchedulersLink
from octavo.simulator.fence_watch import FenceWatch
from octavo.simulator.plan_corruption import with_old_generation
from octavo.simulator.scripted_gateway import ClientRequest, ScriptedGateway
from octavo.simulator.tally import Tally

MEAN_DELAYS_S = (0.0001, 0.001, 0.005, 0.03)
VOCAB_SIZE = 31
BURST_RATE = 0.5
"""How often a message comes right after the one before it on the same link."""


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """What is drawn from the seed before anything runs."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int
    core: CoreSettings
    num_host_blocks: int
    host_tier: HostTierSettings
    duplicate_rate: float
    num_gateways: int
    ledger_interval: int
    """The ledger is checked after every so many messages to the KV manager."""
    catalogue_dir: Path | None


class SimulatedCluster(FaultyCluster):
    """Every message takes the time that its link draws; the next one to arrive is delivered. Order holds per link."""

    def __init__(self, shape: ClusterShape, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.tally = Tally()
        self.num_steps = 0
        self._fences = FenceWatch()
        self._shape = shape
        self._trace = trace
        self._due: dict[str, float] = {}
        self._last_delivery = ""
        self._mean_delays: dict[str, float] = {}
        self._gateway_ids = itertools.count(1)
        self._request_numbers = itertools.count(1)
        self._num_kv_messages = 0
        self._stale_epoch: int | None = None
        self._known_epochs = {"worker": 0, "KV manager": 0}
        """The highest epoch that each has seen for sure."""
        self._corrupts_next_plan = False
        self._salts: set[bytes] = set()
        """Of all requests."""
        self._opening = OpenPool("", 0, 0, 0, 0)
        """The last one that the KV manager got."""
        self._taken_over: set[tuple[int, int]] = set()
        """(block, generation) of those that were cached when a new scheduler opened the pool."""
        self.gateways: list[ScriptedGateway] = []
        self.past_gateways: list[ScriptedGateway] = []
        super().__init__(
            catalogue_dir=shape.catalogue_dir,
            duplicate_rate=shape.duplicate_rate,
            num_blocks=shape.num_blocks,
            block_size=shape.block_size,
            max_num_seqs=shape.max_num_seqs,
            max_model_len=shape.max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(13,),
            settings=shape.core,
            num_host_blocks=shape.num_host_blocks,
            host_tier=shape.host_tier,
            seed=seed,
        )
        self.events = self.tally
        self.gateways.extend(self._new_gateway() for _ in range(shape.num_gateways))

    # Gateways.

    def submit_over(self, gateway: ScriptedGateway, submit: Submit, shared: tuple[int, ...] = ()) -> None:
        """Send it under a number of its own, from its beginning. `shared` are the tokens before its branch point."""
        number = next(self._request_numbers)
        self.events["beam search"] += submit.params.beam_width > 0
        self.events["branch"] += submit.branch is not None
        self._salts.add(submit.cache_salt)
        gateway.submit(replace(submit, request_no=number, request_id=f"request-{number}", resumed=()), shared)
        if submit.branch is not None:
            gateway.allowed_failures.add((number, UnknownResponseError.reason))

    def resume_over(self, gateway: ScriptedGateway, lost: ClientRequest) -> None:
        """Send a lost request again, with the tokens that came of it."""
        number = next(self._request_numbers)
        self.events["resumed with its tokens"] += lost.can_resume
        if lost.submit.branch is not None:
            gateway.allowed_failures.add((number, UnknownResponseError.reason))
        gateway.resume(number, lost)

    def lose_gateway(self, gateway: ScriptedGateway) -> list[ClientRequest]:
        """Its link ends on both sides, and it comes back over a new one. The requests that were lost."""
        self.core.on_gateway_lost(gateway.gateway_id)
        self._advance()
        return self._replace_gateway(gateway)

    def _replace_gateway(self, gateway: ScriptedGateway) -> list[ClientRequest]:
        lost = gateway.lose_link()
        self.past_gateways.append(gateway)
        self.gateways[self.gateways.index(gateway)] = self._new_gateway()
        return lost

    def _new_gateway(self) -> ScriptedGateway:
        return ScriptedGateway(next(self._gateway_ids), self.vocab_size, self.model.eos_token_ids)

    # Faults.

    def restart_scheduler(self, absence: int) -> list[ClientRequest]:
        """All that it knew is gone. The requests that were lost."""
        self.events["scheduler died"] += 1
        lost = [request for gateway in list(self.gateways) for request in self._replace_gateway(gateway)]
        self._stale_epoch = self.group.epoch
        self.tally.scheduler(self.core.stats)
        self.core = SchedulerCore(self._shape.core)
        self.group = WorkerGroup(self.core, "pool", self._epochs, lambda ready: self.model)
        if self.random.random() < 0.7:
            self._begin_long_step()
        self.cut_worker_link(absence)
        self.cut_kv_link(absence)
        return lost

    def _begin_long_step(self) -> None:
        """The plans that were sent still arrive, and the first takes long: the next scheduler may come meanwhile."""
        while self.worker_link is not None and self.worker_link.requests:
            self._deliver_to_worker()
        self._due["worker computes"] = self.now + self.random.choice([0.05, 0.3])

    def restart_worker(self, absence: int = 0) -> None:
        """See FaultyCluster. The new one cannot know who was there before."""
        super().restart_worker(absence)
        self._known_epochs["worker"] = 0

    def lose_catalogue(self, absence: int) -> None:
        """The KV manager dies, and its files with it."""
        self.events["KV manager lost its catalogue"] += 1
        self.cut_kv_link(absence)
        if self._catalogue_dir is not None:
            for file in self._catalogue_dir.iterdir():
                file.unlink()
        self._start_kvmanager()

    def pause(self, name: str, seconds: float) -> None:
        """Nothing is delivered there for so long."""
        self.events["link paused"] += 1
        self._due[name] = self.now + seconds

    def corrupt_a_plan(self) -> None:
        """The next plan that tells of a block the worker has seen names it at an older generation."""
        self._corrupts_next_plan = self.may_be_refused = True

    def bring_back_stale_scheduler(self) -> bool:
        """The scheduler that died wants to go on. False if none died, or if nobody can know that it is stale."""
        stale = self._stale_epoch
        if stale is None or stale >= min(self._known_epochs.values()):
            return False
        self.events["stale scheduler came back"] += 1
        try:
            self.session_worker.receive(WorkerHello(stale))
        except StaleEpochError:
            self.events["old epoch refused"] += 1
        else:
            raise AssertionError(f"the worker took epoch {stale} after {self._known_epochs['worker']}")
        link = SchedulersLink()
        link.is_cut = True
        self.kvmanager.accept(link)
        link.receive(OpenPool("pool", stale, 1, self._num_blocks, self.model.block_size, self._num_host_blocks))
        told = [reply.reason for reply in link.replies if isinstance(reply, StreamRefused)]
        is_told = told == [StaleEpochError.reason] and len(link.replies) == 1
        is_refused = link.was_closed and is_told and not (self.kv_link and self.kv_link.was_closed)
        assert is_refused, f"the KV manager took epoch {stale} after {self._known_epochs['KV manager']}"
        self.events["old epoch refused"] += 1
        return True

    # Virtual time.

    def step(self) -> bool:
        """Deliver what arrives next. False if nothing will ever arrive."""
        deliveries, due = self._deliveries(), self._due
        for name in deliveries:
            if name not in due:
                due[name] = self.now + self._delay(name)
        if len(due) > len(deliveries):
            for name in due.keys() - deliveries.keys():
                del due[name]
        name = min(due, key=due.__getitem__, default="")
        at = due[name] if name else float("inf")
        back_at = at
        for back in (self.kv_back_at, self.worker_back_at):
            if self.now < back < back_at:
                back_at = back
        if back_at < at:
            self.now = back_at
            return True
        if not name:
            return False
        self.now = max(self.now, due.pop(name))
        self._last_delivery = name
        if self._trace is not None:
            self._trace(f"{self.now:10.6f}  {name:<20}  {self._head(name)!r}")
        deliveries[name]()
        return True

    def _delay(self, name: str) -> float:
        if name not in self._mean_delays:
            self._mean_delays[name] = self.random.choice(MEAN_DELAYS_S)
        if name == self._last_delivery and self.random.random() < BURST_RATE:
            return 0.0
        return self.random.expovariate(1.0) * self._mean_delays[name]

    def _deliveries(self) -> dict[str, Callable[[], None]]:
        deliveries = super()._deliveries()
        for gateway in self.gateways:
            if gateway.to_scheduler:
                deliveries[f"from gateway {gateway.gateway_id}"] = self._from(gateway)
            if gateway.from_scheduler:
                deliveries[f"to gateway {gateway.gateway_id}"] = self._to(gateway)
        return deliveries

    def _head(self, name: str) -> Any:
        """The message that is delivered next there."""
        queues: dict[str, Any] = {"worker computes": self.session_worker.queue}
        if self.worker_link is not None:
            queues |= {"to worker": self.worker_link.requests, "from worker": self.worker_link.replies}
        if self.kv_link is not None:
            queues |= {"to KV manager": self.kv_link.requests, "from KV manager": self.kv_link.replies}
        for gateway in self.gateways:
            queues[f"from gateway {gateway.gateway_id}"] = gateway.to_scheduler
            queues[f"to gateway {gateway.gateway_id}"] = gateway.from_scheduler
        return queues[name][0] if name in queues else None

    def _from(self, gateway: ScriptedGateway) -> Callable[[], None]:
        def deliver() -> None:
            message = gateway.to_scheduler.popleft()
            match message:
                case Submit():
                    if self.core.model is None:
                        gateway.allowed_failures.add((message.request_no, NotReadyError.reason))
                        self.events["refused before a model was there"] += 1
                    self.core.on_submit(gateway.gateway_id, message)
                case Abort():
                    self.core.on_abort(gateway.gateway_id, message)
                case Forget():
                    self.core.on_forget(message)
            self._advance()

        return deliver

    def _to(self, gateway: ScriptedGateway) -> Callable[[], None]:
        def deliver() -> None:
            batch = gateway.from_scheduler.popleft()
            assert isinstance(batch, TokenBatch)
            gateway.receive(batch)

        return deliver

    def _advance(self) -> None:
        outbox = self.group.advance(self.now)
        if outbox.plans:
            assert self.worker_link is not None, "plans without a link"
            self.worker_link.requests.extend(outbox.plans)
            for plan in outbox.plans:
                self._fences.sent(plan)
        if outbox.kv_messages:
            assert self.kv_link is not None, "messages without a link"
            self.kv_link.requests.extend(outbox.kv_messages)
        for gateway in self.gateways:
            if batch := outbox.batches.get(gateway.gateway_id):
                gateway.from_scheduler.append(batch)

    # What passes is counted.

    def _deliver_to_worker(self) -> None:
        link = self.worker_link
        assert link is not None
        message = link.requests[0]
        session = self.session_worker.session
        is_again = isinstance(message, StepPlan) and session is not None and message.step_id <= session.last_step
        num_replies = len(link.replies)
        super()._deliver_to_worker()
        if is_again:
            self.events["duplicate answered from store"] += len(link.replies) - num_replies
        if isinstance(message, WorkerHello):
            self._known_epochs["worker"] = message.epoch

    def _compute(self) -> None:
        self.num_steps += 1
        queue, worker = self.session_worker.queue, self.session_worker
        is_corrupt = False
        if self._corrupts_next_plan and worker.refusal is None and not worker.runs_old_step:
            old = with_old_generation(queue[0], worker.scripted.generation)
            if is_corrupt := old is not None:
                assert old is not None
                queue[0] = old
                self._corrupts_next_plan = False
                self.events["plan corrupted"] += 1
        self.tally.plan(queue[0])
        step_id = queue[0].step_id
        super()._compute()
        self._fences.ran(step_id)
        if is_corrupt:
            assert worker.refusal is not None, "a plan with a block of an old generation ran"
            self.events["old generation refused"] += 1

    def _deliver_from_worker(self) -> None:
        assert self.worker_link is not None
        if isinstance(message := self.worker_link.replies[0], WorkerReady) and not message.is_resumed:
            self._fences.start_over()
        super()._deliver_from_worker()

    def _deliver_to_kvmanager(self) -> None:
        link = self.kv_link
        assert link is not None
        message = link.requests[0]
        self._num_kv_messages += 1
        self.kvmanager.check_ledger = self._num_kv_messages % self._shape.ledger_interval == 0
        if isinstance(message, OpenPool):
            super()._deliver_to_kvmanager()
            self._on_opened(message)
            return
        if isinstance(message, DeclarePool):
            self.tally.declared(message)
            super()._deliver_to_kvmanager()
            self._check_contents()
            return
        num_replies = len(link.replies)
        if message.message_no <= self.pool.last_message_no:
            super()._deliver_to_kvmanager()
            self.events["duplicate answered from store"] += len(link.replies) - num_replies
            return
        quarantined = self.tally.kv_request(self.pool, message)
        super()._deliver_to_kvmanager()
        for reply in itertools.islice(link.replies, num_replies, None):
            assert isinstance(reply, KvReply)
            self.tally.kv_reply(reply, self.model.block_size, quarantined)
            self.tally.hits_of_taken_over(reply, self.model.block_size, self._taken_over)
            self._fences.check(reply, self.model.block_size)

    def _on_opened(self, opening: OpenPool) -> None:
        is_taken_over = opening.epoch > self._opening.epoch
        self._opening = opening
        if not is_taken_over:
            return  # a declaration follows
        assert not self.session_worker.runs_old_step, "the pool was opened while a step of an earlier scheduler runs"
        self._check_contents()
        blocks = self.pool.blocks
        self._taken_over = {(block_id, blocks.generations[block_id]) for block_id in blocks.cached}
        self.events["cached blocks taken over"] += len(self._taken_over) > 0

    def _check_contents(self) -> None:
        if self._opening.incarnation == self.session_worker.incarnation:
            check_contents(self.pool, self.session_worker.scripted, self._salts)

    def _deliver_from_kvmanager(self) -> None:
        assert self.kv_link is not None
        if isinstance(message := self.kv_link.replies[0], PoolOpened) and not message.is_resumed:
            self.events["credits quarantined at a new epoch"] += self._known_epochs["KV manager"] < self.group.epoch
            self._known_epochs["KV manager"] = self.group.epoch
        super()._deliver_from_kvmanager()

    def _start_kvmanager(self) -> None:
        super()._start_kvmanager()
        self._known_epochs["KV manager"] = 0

    # The end.

    def forget_ended_requests(self) -> None:
        """What clients got of them was compared as it came."""
        self.past_gateways.clear()
        for gateway in self.gateways:
            gateway.forget_ended_requests()

    def assert_idle(self) -> None:
        """Nothing is alive, and every request came to its end."""
        super().assert_idle()
        self._check_contents()
        for gateway in [*self.past_gateways, *self.gateways]:
            gateway.assert_ended()
