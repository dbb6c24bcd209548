"""Counts how often each event happened and each rule of the protocol was put to use, from the messages that pass."""

from __future__ import annotations

from collections import Counter

from octavo.common.messages.kv import DeclarePool, KvReply, KvRequest, TransferDirection, Verdict, WaitReason
from octavo.common.messages.step import RowFlag, StepPlan
from octavo.kvmanager.block_state import BlockState
from octavo.kvmanager.pool import Pool
from octavo.scheduler.stats import SchedulerStats

FAULTS = (
    "worker link cut",
    "KV link cut",
    "gateway link cut",
    "worker died",
    "KV manager died",
    "KV manager lost its catalogue",
    "scheduler died",
    "gateway died",
    "link paused",
    "plan corrupted",
    "stale scheduler came back",
)
EVENTS = (
    "said twice",
    "worker resumed",
    "worker started over",
    "KV link resumed",
    "resumption withdrawn",
    "declarations given up",
    "pool declared",
    "block recycled",
    "cached blocks taken over",
    "pool lost",
    "prompt chunk",
    "choices fanned out",
    "forked",
    "fork put off",
    "tail copied",
    "admitted",
    "admission put off",
    "prefix hit",
    "hit on a quarantined block",
    "prompt hashed ahead",
    "wait for a block in flight",
    "preempted",
    "paused for the slot",
    "paused for the blocks",
    "urgent before a swapped one",
    "swapped out",
    "swapped in",
    "host tier copy",
    "beam search",
    "branch",
    "next turn",
    "aborted",
    "forgotten",
    "submitted again",
    "resumed with its tokens",
    "shared prefix group",
)
RULES = (
    "published after compute",
    "fence held a block back",
    "late row dropped",
    "duplicate answered from store",
    "old generation refused",
    "old epoch refused",
    "credit spent before it was told",
    "credit recalled",
    "credit given back",
    "credits quarantined at a new epoch",
    "hit on a block that was taken over",
    "refused before a model was there",
)


class Tally(Counter[str]):
    """Name |-> number of times."""

    def kv_request(self, pool: Pool, request: KvRequest) -> set[int]:
        """Before it is applied. The blocks that its acknowledgement leaves in quarantine."""
        self["published after compute"] += len(request.publications)
        self["prompt hashed ahead"] += len(request.arrivals)
        self["credit spent before it was told"] += len(request.spent)
        self["credit given back"] += len(request.returned_credits)
        self["urgent before a swapped one"] += bool(
            request.admissions and not request.swap_ins and pool.tier.num_swapped
        )
        if not request.admissions or not pool.blocks.counts().quarantined:
            return set()
        blocks = pool.blocks
        return {
            block_id
            for block_id, state in enumerate(blocks.states)
            if state is BlockState.QUARANTINED and blocks.quarantine.fences[block_id] > request.acknowledged_step
        }

    def kv_reply(self, reply: KvReply, block_size: int, quarantined: set[int]) -> None:
        """What the manager answered, once."""
        self["credit recalled"] += reply.num_recalled_credits
        self["fence held a block back"] += reply.counts.quarantined > 0
        for forked in reply.forked:
            self["forked" if forked.verdict is Verdict.OK else "fork put off"] += 1
            self["tail copied"] += forked.copy is not None
        for answer in reply.admitted:
            self["admitted" if answer.verdict is Verdict.OK else "admission put off"] += 1
            self["wait for a block in flight"] += answer.wait_reason is WaitReason.IN_FLIGHT
            hits = answer.block_ids[: answer.num_cached_tokens // block_size]
            self["prefix hit"] += len(hits) > 0
            self["hit on a quarantined block"] += len(quarantined.intersection(hits))
        self["swapped out"] += sum(answer.verdict is Verdict.OK for answer in reply.swapped_out)
        self["swapped in"] += sum(answer.verdict is Verdict.OK for answer in reply.swapped_in)
        self["host tier copy"] += sum(copy.direction is TransferDirection.TO_DEVICE for copy in reply.transfers)

    def hits_of_taken_over(self, reply: KvReply, block_size: int, taken_over: set[tuple[int, int]]) -> None:
        """`taken_over`: (block, generation) of those that were cached when the pool was opened."""
        for answer in reply.admitted:
            hits = zip(answer.block_ids[: answer.num_cached_tokens // block_size], answer.generations, strict=False)
            self["hit on a block that was taken over"] += not taken_over.isdisjoint(hits)

    def declared(self, declaration: DeclarePool) -> None:
        self["pool declared"] += 1
        self["block recycled"] += len(declaration.recycled)

    def plan(self, plan: StepPlan) -> None:
        self["shared prefix group"] += len(plan.groups)
        self["choices fanned out"] += sum(bool(flags & RowFlag.FAN_OUT) for flags in plan.flags)
        self["prompt chunk"] += sum(not flags for flags in plan.flags)

    def scheduler(self, stats: SchedulerStats) -> None:
        """The totals of a scheduler that ends."""
        self["preempted"] += stats.num_preemptions
        self["paused for the slot"] += stats.num_paused["no_slot"]
        self["paused for the blocks"] += stats.num_paused["no_blocks"]
        self["pool lost"] += stats.num_pool_losses
        self["late row dropped"] += stats.num_wasted_rows
        self["aborted"] += stats.num_aborted_choices
