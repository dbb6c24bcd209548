"""The real cores of scheduler and KV manager with a scripted worker, in one thread, in any order of delivery."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from octavo.common.messages.generation import (
    Abort,
    BranchPoint,
    ChoiceFinished,
    FinishReason,
    Forget,
    ModelInfo,
    RequestFailed,
    SamplingParams,
    Submit,
    TokenBatch,
)
from octavo.common.messages.kv import OpenPool
from octavo.kvmanager.host_tier import HostTierSettings
from octavo.kvmanager.ledger import violations
from octavo.kvmanager.pool import Pool, PoolSettings
from octavo.kvmanager.stats import KvStats
from octavo.scheduler.core import Outbox, SchedulerCore
from octavo.scheduler.core_settings import CoreSettings
from octavo.simulator.scripted_worker import ScriptedWorker

GATEWAY = 1


class StepCluster:
    """Three links, each in order; which one delivers next is drawn from the seed."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_model_len: int = 200,
        vocab_size: int = 97,
        eos_token_ids: tuple[int, ...] = (),
        settings: CoreSettings | None = None,
        watermark: float = 0.01,
        num_host_blocks: int = 0,
        host_tier: HostTierSettings | None = None,
        seed: int = 0,
    ) -> None:
        self.random = random.Random(seed)
        self.vocab_size = vocab_size
        self.model = ModelInfo(
            "scripted", min(max_model_len, num_blocks * block_size), vocab_size, eos_token_ids, max_num_seqs, block_size
        )
        self._num_blocks = num_blocks
        self._num_host_blocks = num_host_blocks
        self._pool_settings = PoolSettings(watermark, host_tier=host_tier or HostTierSettings())
        self.stats = KvStats()
        self._incarnation = 0
        self.core = SchedulerCore(settings or CoreSettings(max_num_batched_tokens=32))
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.finished: dict[tuple[int, int], ChoiceFinished] = {}
        self.failed: dict[int, RequestFailed] = {}
        self.cached_tokens: dict[int, int] = {}
        self.prompt_tokens: dict[int, int] = {}
        self._request_nos = iter(range(1, 1_000_000))
        self.now = 0.0
        self.open()

    def open(self) -> None:
        """A fresh worker and a fresh pool."""
        model = self.model
        self._incarnation += 1
        self.worker = ScriptedWorker(
            self._num_blocks, model.block_size, model.max_num_seqs, model.vocab_size, self._num_host_blocks, self.random
        )
        opening = OpenPool(
            "pool", 1, self._incarnation, self._num_blocks, model.block_size, num_host_blocks=self._num_host_blocks
        )
        self._pool = Pool(opening, self._pool_settings, self.stats)
        self._plans: deque[Any] = deque()
        self._results: deque[Any] = deque()
        self._requests: deque[Any] = deque()
        self._replies: deque[Any] = deque()
        self.core.start(model, self._num_blocks, 2048)
        self._advance()

    @property
    def pool(self) -> Pool:
        """The present one."""
        return self._pool

    def crash(self) -> None:
        """Worker and KV manager lose everything; what was on its way is gone."""
        self.core.pool_lost()
        self.open()

    def submit(self, prompt: list[int], max_tokens: int, **params: Any) -> int:
        """`branch` is (request_no, choice, number of tokens); the prompt goes on from there."""
        salt, keep_s = params.pop("cache_salt", b""), params.pop("keep_s", 0.0)
        parent, priority = params.pop("branch", None), params.pop("priority", 0)
        whose = {name: params.pop(name) for name in ("tenant", "weight") if name in params}
        branch = BranchPoint(f"request-{parent[0]}", *parent[1:]) if parent else None
        request_no = next(self._request_nos)
        options = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **params})
        submit = Submit(
            request_no,
            f"request-{request_no}",
            tuple(prompt),
            options,
            salt,
            priority,
            branch=branch,
            keep_s=keep_s,
            **whose,
        )
        self.core.on_submit(GATEWAY, submit)
        self._advance()
        return request_no

    def abort(self, request_no: int, choice_index: int | None = None, num_output_tokens: int | None = None) -> None:
        self.core.on_abort(GATEWAY, Abort(request_no, choice_index, num_output_tokens))
        self._advance()

    def forget(self, request_no: int, cache_salt: bytes = b"") -> None:
        self.core.on_forget(Forget(f"request-{request_no}", cache_salt))
        self._advance()

    def pass_time(self, seconds: float) -> None:
        """Nothing happens for so long."""
        self.now += seconds
        self._advance()

    def step(self) -> bool:
        """Deliver one message. False if none is on its way."""
        deliveries: list[Callable[[], object]] = []
        if self._plans:
            deliveries.append(lambda: self._results.append(self.worker.run(self._plans.popleft())))
        if self._requests:
            deliveries.append(self._serve_kv_request)
        if self._results:
            deliveries.append(lambda: self._deliver(self.core.on_step_result, self._results))
        if self._replies:
            deliveries.append(lambda: self._deliver(self.core.on_kv_reply, self._replies))
        if self.pool.arrivals.has_unhashed:
            deliveries.append(self.pool.hash_slice)
        if not deliveries:
            return False
        self.random.choice(deliveries)()
        self.now += 0.001
        return True

    def run(self, max_deliveries: int = 200_000) -> None:
        """Deliver until nothing is on its way."""
        for _ in range(max_deliveries):
            if not self.step():
                return
        raise AssertionError("no end after so many messages")

    def output(self, request_no: int, choice_index: int = 0) -> list[int]:
        return self.tokens.get((request_no, choice_index), [])

    def finish_reason(self, request_no: int, choice_index: int = 0) -> FinishReason:
        return self.finished[request_no, choice_index].reason

    def assert_idle(self) -> None:
        """Nothing is alive: no request, no table, no active block."""
        core = self.core
        assert core.num_requests == core.num_running == core.num_waiting == core.num_swapped == 0
        assert violations(self.pool) == []
        counts = self.pool.counts()
        assert counts.active == counts.quarantined == counts.granted == counts.transferring == counts.host_swapped == 0
        assert counts.free + counts.cached == self._num_blocks
        assert counts.host_free + counts.host_cached == self._num_host_blocks
        assert len(self.pool.tables) == len(self.pool.tables.flights) == len(self.pool.arrivals) == 0

    def _serve_kv_request(self) -> None:
        self._replies.append(self.pool.apply(self._requests.popleft()))
        assert violations(self.pool) == []

    def _deliver(self, handler: Callable[[Any], None], queue: deque[Any]) -> None:
        handler(queue.popleft())
        self._advance()

    def _advance(self) -> None:
        outbox: Outbox = self.core.advance(self.now)
        self._plans.extend(outbox.plans)
        if outbox.kv_request is not None:
            self._requests.append(outbox.kv_request)
        self._take_batch(outbox.batches.get(GATEWAY))

    def _take_batch(self, batch: TokenBatch | None) -> None:
        if batch is None:
            return
        for started in batch.started:
            assert started.request_no not in self.cached_tokens
            self.cached_tokens[started.request_no] = started.num_cached_tokens
            self.prompt_tokens[started.request_no] = started.num_prompt_tokens
        for token in batch.tokens:
            assert (token.request_no, token.choice_index) not in self.finished, "a token after the end"
            self.tokens.setdefault((token.request_no, token.choice_index), []).append(token.token_id)
        for end in batch.finished:
            assert (end.request_no, end.choice_index) not in self.finished, "two ends"
            self.finished[end.request_no, end.choice_index] = end
        for failure in batch.failed:
            self.failed[failure.request_no] = failure
