"""met-3ba: tokens found on the device, brought from the host and computed add up to the prompt, at each admission."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest

from octavo.common.messages.kv import KvReply, Verdict
from octavo.scheduler.core_settings import CoreSettings
from octavo.scheduler.preemption import PreemptionSettings
from octavo.simulator.step_cluster import StepCluster
from support.step_traffic import some_prompt


@dataclass
class Account:
    """Of one admission."""

    num_tokens: int
    num_local: int
    num_host: int
    num_computed: int = 0

    @property
    def is_whole(self) -> bool:
        return self.num_local + self.num_host + self.num_computed == self.num_tokens


class AccountedCluster(StepCluster):
    """Follows every sequence from each admission to the position with which its tokens are all computed."""

    def __init__(self, **options: Any) -> None:
        self.accounts: dict[int, list[Account]] = {}
        super().__init__(**options)

    def _deliver(self, handler: Any, queue: Any) -> None:
        message = queue[0]
        if isinstance(message, KvReply):
            for admitted in message.admitted:
                if admitted.verdict is Verdict.OK:
                    sequence = self.core._life.admissions._admitting[admitted.sequence_id]  # type: ignore[union-attr]
                    local = admitted.num_cached_tokens - admitted.num_host_tokens
                    account = Account(len(sequence.token_ids), local, admitted.num_host_tokens)
                    assert account.num_local >= 0 and account.num_host >= 0
                    assert account.num_local + account.num_host < account.num_tokens, "a token is left to compute"
                    self.accounts.setdefault(sequence.sequence_id, []).append(account)
        super()._deliver(handler, queue)

    def _advance(self) -> None:
        num_before = len(self._plans)
        super()._advance()
        life = self.core._life
        assert life is not None
        by_slot = {sequence.slot: sequence.sequence_id for sequence in life.pool.running.values()}
        for plan in itertools.islice(self._plans, num_before, None):
            for slot, start, length in zip(plan.slots, plan.starts, plan.lengths, strict=True):
                self._follow(self.accounts[by_slot[slot]][-1], start, length)

    def _follow(self, account: Account, start: int, length: int) -> None:
        if account.is_whole:
            assert start >= account.num_tokens, "what is there is computed again"
            return
        assert start == account.num_local + account.num_host + account.num_computed, "a gap, or computed twice"
        account.num_computed += length
        assert account.num_local + account.num_host + account.num_computed <= account.num_tokens


@pytest.mark.parametrize("seed", range(6))
def test_local_host_and_computed_tokens_add_up_to_the_prompt_at_each_admission(seed: int) -> None:
    """A small pool with host memory: who is preempted finds more at the second admission than at the first."""
    settings = CoreSettings(32, preemption=PreemptionSettings("recompute"))
    cluster = AccountedCluster(num_blocks=24, num_host_blocks=60, settings=settings, seed=seed)
    common = some_prompt(32)
    for first in range(14):
        cluster.submit([*common, *some_prompt(8, first=40 + first)], max_tokens=30)
        for _ in range(seed * 5):
            cluster.step()
    cluster.run()
    cluster.assert_idle()
    assert cluster.failed == {}
    accounts = [account for told in cluster.accounts.values() for account in told]
    assert sum(account.num_host for account in accounts) > 0 and sum(account.num_local for account in accounts) > 0
    later = [account for told in cluster.accounts.values() for account in told[1:]]
    assert max(account.num_local + account.num_host for account in later) > 40, "more is found than the prompt has"
    assert all(told[-1].is_whole for told in cluster.accounts.values())
    stats, kv = cluster.core.stats, cluster.stats
    assert kv.num_prefix_lookup_tokens == sum(account.num_tokens for account in accounts)
    assert kv.num_prefix_hit_tokens == sum(account.num_local + account.num_host for account in accounts)
    assert kv.num_host_hit_tokens == sum(account.num_host for account in accounts)
    firsts = [told[0] for told in cluster.accounts.values()]
    assert stats.num_cached_prompt_tokens == sum(account.num_local + account.num_host for account in firsts)
    assert stats.num_host_prompt_tokens == sum(account.num_host for account in firsts)
