"""Decides which sequences get their blocks now: all or nothing, prefix hits first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.common.block_hash import BlockHasher, TokenChain
from octavo.common.codecs.arrays import pack_int32
from octavo.common.errors import ProtocolError
from octavo.common.messages.kv import Admission, Admitted, MissReason, PrefixMiss, Verdict, WaitReason
from octavo.kvmanager.arrivals import STEP_TOKENS, ArrivalBook, Arrived
from octavo.kvmanager.block_pool import BlockPool
from octavo.kvmanager.block_state import BlockState
from octavo.kvmanager.block_table import BlockTables
from octavo.kvmanager.host_tier import HostTier
from octavo.kvmanager.stats import KvStats

MAX_WAITING_CHAINS = 64
"""Sequences that never arrived and were told LATER whose block keys are kept for the next time they ask."""

MAX_LOOKUPS = 2048
"""Blocks looked up for one message. Admissions that come after so many are told to ask again."""


@dataclass(frozen=True, slots=True)
class AdmissionRound:
    """The answers to the admissions of one message."""

    admitted: list[Admitted]
    num_missing_blocks: int
    """Credits whose return would let the first LATER in; 0 if none would."""


class AdmissionControl:
    """Answers admissions.

    NEVER  the sequence needs more blocks than the pool has.
    LATER  HASHING: its prompt is not hashed yet. IN_FLIGHT: another sequence computes its next block.
           NO_BLOCKS: it does not fit. BEHIND_ANOTHER: one before it in the same message did not, or the message has
           had all its lookups. The first two do not hold up those behind.
    OK     otherwise.

    It fits if `num_watermark_blocks` are left over of the free, cached and granted blocks; none need be if no
    sequence holds a table. Where it takes granted ones to fit, it is LATER until they have been returned.
    A slab, whose table will not grow, needs no watermark, but free neighbours for all its new blocks.
    """

    def __init__(
        self,
        blocks: BlockPool,
        tables: BlockTables,
        arrivals: ArrivalBook,
        hasher: BlockHasher,
        tier: HostTier,
        num_watermark_blocks: int,
        stats: KvStats,
    ) -> None:
        self._blocks = blocks
        self._tables = tables
        self._arrivals = arrivals
        self._hasher = hasher
        self._tier = tier
        self._num_watermark_blocks = num_watermark_blocks
        self._stats = stats
        self._waiting_chains: OrderedDict[int, Arrived] = OrderedDict()
        self._num_hashable_blocks = 0
        self._unhashed: TokenChain | None = None
        """The first of this message that was told HASHING."""
        self._num_lookups = 0
        self._num_missing_blocks = 0
        self._skips_host = False

    def admit(
        self, admissions: Sequence[Admission], is_blocked: bool = False, *, skips_host: bool = False
    ) -> AdmissionRound:
        """Serve in order; all have to wait if `is_blocked`. `skips_host`: blocks in host memory are computed again.

        Raises ProtocolError for a sequence that holds a table or has no tokens.
        """
        admitted: list[Admitted] = []
        self._num_hashable_blocks = STEP_TOKENS // self._hasher.block_size
        self._num_lookups = self._num_missing_blocks = 0
        self._unhashed = None
        self._skips_host = skips_host
        for admission in admissions:
            arrived = self._arrived(admission)
            num_positions = max(arrived.chain.num_tokens, admission.num_table_tokens)
            num_blocks = -(-num_positions // self._hasher.block_size)
            if num_blocks > self._blocks.num_blocks:
                self._arrivals.forget(admission.sequence_id)
                answer = Admitted(admission.sequence_id, Verdict.NEVER)
            elif is_blocked or self._num_lookups > MAX_LOOKUPS:
                answer = _later(admission, WaitReason.BEHIND_ANOTHER)
            else:
                answer = self._admit_one(admission, arrived, num_blocks)
                is_blocked = answer.wait_reason is WaitReason.NO_BLOCKS
            if answer.verdict is Verdict.LATER:
                self._stats.num_waits[answer.wait_reason] += 1
                self._keep_waiting(admission, arrived)
            self._stats.num_admissions[answer.verdict] += 1
            admitted.append(answer)
        if self._unhashed is not None:
            # What others left of the message's share, so that asking alone gets there in the end.
            num_hashed = min(self._num_hashable_blocks, self._unhashed.num_unhashed_blocks)
            self._unhashed.hash_up_to(len(self._unhashed.keys) + num_hashed)
        return AdmissionRound(admitted, self._num_missing_blocks)

    def _arrived(self, admission: Admission) -> Arrived:
        sequence_id = admission.sequence_id
        if sequence_id in self._tables:
            raise ProtocolError(f"sequence {sequence_id} holds a table already")
        arrived = self._arrivals.find(sequence_id)
        if arrived is not None:
            return arrived
        if not admission.token_ids:
            raise ProtocolError(f"sequence {sequence_id} has no tokens")
        packed_tokens = pack_int32(admission.token_ids)
        arrived = self._waiting_chains.pop(sequence_id, None)
        if arrived is None or not arrived.chain.holds(packed_tokens, admission.salt):
            arrived = Arrived(TokenChain(self._hasher, packed_tokens, admission.salt))
        return arrived

    def _admit_one(self, admission: Admission, arrived: Arrived, num_blocks: int) -> Admitted:
        sequence_id, chain = admission.sequence_id, arrived.chain
        if not self._finish_hashing(sequence_id, chain):
            return _later(admission, WaitReason.HASHING)
        if not admission.computes_itself and (leader_id := self._leader_of(arrived)) is not None:
            return _later(admission, WaitReason.IN_FLIGHT, leader_id)
        # At least one token is left out, so that there is one to compute logits from.
        num_findable = 0 if admission.ignores_cache else (chain.num_tokens - 1) // self._hasher.block_size
        hits = self._blocks.find_run(chain.keys, num_findable)
        self._num_lookups += len(hits) + 1
        arrived.awaited_block = len(hits) if len(hits) < num_findable else -1
        if not admission.computes_itself and (leader_id := self._leader_of(arrived)) is not None:
            return _later(admission, WaitReason.IN_FLIGHT, leader_id)
        num_new_blocks = num_blocks - len(hits)
        # Cached blocks that are hit cannot be evicted for the new ones.
        states = self._blocks.states
        num_hits_cached = sum([states[block_id] is BlockState.CACHED for block_id in hits])
        num_available = self._blocks.num_available - num_hits_cached
        num_left = num_available + len(self._blocks.granted) - num_new_blocks
        is_slab = admission.num_table_tokens > 0
        has_others = len(self._tables) > self._tier.num_swapped
        if num_left < (self._num_watermark_blocks if has_others and not is_slab else 0):
            return _later(admission, WaitReason.NO_BLOCKS)
        if num_available < num_new_blocks:
            self._num_missing_blocks = num_new_blocks - num_available
            return _later(admission, WaitReason.NO_BLOCKS)
        if is_slab and not self._blocks.put_run_first(num_new_blocks):
            return _later(admission, WaitReason.NO_BLOCKS)
        run = self._tier.find_run(chain, len(hits), num_findable)
        num_slower = len(run) if self._skips_host else 0
        return self._give_table(sequence_id, chain, hits, [] if num_slower else run, num_new_blocks, num_slower)

    def _give_table(
        self,
        sequence_id: int,
        chain: TokenChain,
        hits: list[int],
        run: list[int],
        num_new_blocks: int,
        num_slower_blocks: int,
    ) -> Admitted:
        """It fits: the blocks found on the device, then those that come from the host, then new ones to compute.

        `num_slower_blocks`: of the latter, the first ones, which the host has and which are not copied.
        """
        num_found, block_size = len(hits) + len(run), self._hasher.block_size
        misses = self._blocks.history.misses(chain.keys, num_found + num_slower_blocks, self._tables.flights)
        if num_slower_blocks:
            misses.insert(0, PrefixMiss(MissReason.SLOWER_TIER, num_slower_blocks))
        table = self._tables.create(sequence_id, chain, hits, num_new_blocks, len(run))
        transfer_id = self._tier.restore(sequence_id, len(hits), run)
        self._arrivals.forget(sequence_id)
        num_cached_tokens = num_found * block_size
        self._count(chain, num_found, misses)
        self._stats.num_host_hit_tokens += len(run) * block_size
        return Admitted(
            sequence_id,
            Verdict.OK,
            num_cached_tokens,
            tuple(table.block_ids),
            self._tables.generations(table),
            num_host_tokens=len(run) * block_size,
            transfer_id=transfer_id,
            misses=tuple(misses),
        )

    def _finish_hashing(self, sequence_id: int, chain: TokenChain) -> bool:
        """Hash what is left if the message may, or must since the sequence has not arrived before."""
        num_unhashed = chain.num_unhashed_blocks
        if num_unhashed > self._num_hashable_blocks and sequence_id in self._arrivals:
            self._unhashed = self._unhashed or chain
            return False
        if num_unhashed:
            self._num_hashable_blocks -= num_unhashed
            chain.hash_up_to(chain.num_full_blocks)
        return True

    def _leader_of(self, arrived: Arrived) -> int | None:
        """The sequence that computes the block which this one awaits."""
        if arrived.awaited_block < 0:
            return None
        return self._tables.flights.leader(arrived.chain.keys[arrived.awaited_block])

    def _count(self, chain: TokenChain, num_hits: int, misses: list[PrefixMiss]) -> None:
        stats = self._stats
        stats.num_prefix_lookup_tokens += chain.num_tokens
        stats.num_prefix_hit_tokens += num_hits * self._hasher.block_size
        stats.num_prefix_lookup_blocks += chain.num_full_blocks
        stats.num_prefix_hit_blocks += num_hits
        for miss in misses:
            stats.num_missed_blocks[miss.reason] += miss.num_blocks

    def _keep_waiting(self, admission: Admission, arrived: Arrived) -> None:
        if admission.sequence_id in self._arrivals:
            return
        self._waiting_chains[admission.sequence_id] = arrived
        if len(self._waiting_chains) > MAX_WAITING_CHAINS:
            self._waiting_chains.popitem(last=False)


def _later(admission: Admission, reason: WaitReason, leader_id: int = 0) -> Admitted:
    return Admitted(admission.sequence_id, Verdict.LATER, wait_reason=reason, awaited_sequence_id=leader_id)
