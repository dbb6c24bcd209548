"""Decides which sequences get their blocks now: all or nothing, prefix hits first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.common.codecs.arrays import pack_int32
from octavo.common.errors import ProtocolError
from octavo.common.messages.kv import Admission, Admitted, Verdict
from octavo.kvmanager.block_hash import BlockHasher, TokenChain
from octavo.kvmanager.block_pool import BlockPool, BlockState
from octavo.kvmanager.block_table import BlockTables
from octavo.kvmanager.host_tier import HostTier
from octavo.kvmanager.stats import KvStats

MAX_WAITING_CHAINS = 64
"""Sequences told LATER whose block keys are kept for the next time they ask."""


@dataclass(frozen=True, slots=True)
class AdmissionRound:
    """The answers to the admissions of one message."""

    admitted: list[Admitted]
    num_missing_blocks: int
    """Credits whose return would let the first LATER in; 0 if none would."""


class AdmissionControl:
    """Answers admissions.

    NEVER  the sequence needs more blocks than the pool has.
    LATER  it does not fit, or one before it in the same message did not.
    OK     otherwise.

    It fits if `num_watermark_blocks` are left over of the free, cached and granted blocks; none need be if no
    sequence holds a table. Where it takes granted ones to fit, it is LATER until they have been returned.
    """

    def __init__(
        self,
        blocks: BlockPool,
        tables: BlockTables,
        hasher: BlockHasher,
        tier: HostTier,
        num_watermark_blocks: int,
        stats: KvStats,
    ) -> None:
        self._blocks = blocks
        self._tables = tables
        self._hasher = hasher
        self._tier = tier
        self._num_watermark_blocks = num_watermark_blocks
        self._stats = stats
        self._waiting_chains: OrderedDict[int, TokenChain] = OrderedDict()

    def admit(self, admissions: Sequence[Admission], is_blocked: bool = False) -> AdmissionRound:
        """Serve in order; all have to wait if `is_blocked`.

        Raises ProtocolError for a sequence that holds a table or has no tokens.
        """
        admitted: list[Admitted] = []
        num_missing_blocks = 0
        for admission in admissions:
            num_blocks = self._num_blocks(admission)
            if num_blocks > self._blocks.num_blocks:
                answer = Admitted(admission.sequence_id, Verdict.NEVER)
            elif is_blocked:
                answer = Admitted(admission.sequence_id, Verdict.LATER)
            else:
                answer, num_missing_blocks = self._admit_one(admission, num_blocks)
                is_blocked = answer.verdict is Verdict.LATER
            self._stats.num_admissions[answer.verdict] += 1
            admitted.append(answer)
        return AdmissionRound(admitted, num_missing_blocks)

    def _num_blocks(self, admission: Admission) -> int:
        if admission.sequence_id in self._tables:
            raise ProtocolError(f"sequence {admission.sequence_id} holds a table already")
        if not admission.token_ids:
            raise ProtocolError(f"sequence {admission.sequence_id} has no tokens")
        return -(-len(admission.token_ids) // self._hasher.block_size)

    def _admit_one(self, admission: Admission, num_blocks: int) -> tuple[Admitted, int]:
        chain = self._chain_of(admission)
        hits = self._hits(chain)
        num_new_blocks = num_blocks - len(hits)
        # Cached blocks that are hit cannot be evicted for the new ones.
        num_hits_cached = sum(self._blocks.states[block_id] is BlockState.CACHED for block_id in hits)
        num_available = self._blocks.num_available - num_hits_cached
        num_left = num_available + len(self._blocks.granted) - num_new_blocks
        if num_left < (self._num_watermark_blocks if len(self._tables) else 0):
            self._keep_waiting(admission.sequence_id, chain)
            return Admitted(admission.sequence_id, Verdict.LATER), 0
        if num_available < num_new_blocks:
            self._keep_waiting(admission.sequence_id, chain)
            return Admitted(admission.sequence_id, Verdict.LATER), num_new_blocks - num_available
        return self._give_table(admission, chain, hits, num_new_blocks), 0

    def _give_table(self, admission: Admission, chain: TokenChain, hits: list[int], num_new_blocks: int) -> Admitted:
        """It fits: the blocks found on the device, then those that come from the host, then new ones to compute."""
        block_size, sequence_id = self._hasher.block_size, admission.sequence_id
        run = self._tier.find_run(chain, len(hits), (chain.num_tokens - 1) // block_size)
        table = self._tables.create(sequence_id, chain, hits, num_new_blocks, len(run))
        transfer_id = self._tier.restore(sequence_id, len(hits), run)
        num_cached_tokens = (len(hits) + len(run)) * block_size
        self._stats.num_prefix_lookup_tokens += len(admission.token_ids)
        self._stats.num_prefix_hit_tokens += num_cached_tokens
        self._stats.num_host_hit_tokens += len(run) * block_size
        return Admitted(
            sequence_id,
            Verdict.OK,
            num_cached_tokens,
            tuple(table.block_ids),
            self._tables.generations(table),
            num_host_tokens=len(run) * block_size,
            transfer_id=transfer_id,
        )

    def _hits(self, chain: TokenChain) -> list[int]:
        """Leading blocks found. At least one token is left out, so that there is one to compute logits from."""
        hits: list[int] = []
        for index in range((chain.num_tokens - 1) // self._hasher.block_size):
            block_id = self._blocks.find(chain.key(index))
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def _chain_of(self, admission: Admission) -> TokenChain:
        packed_tokens = pack_int32(admission.token_ids)
        chain = self._waiting_chains.pop(admission.sequence_id, None)
        if chain is None or not chain.holds(packed_tokens, admission.salt):
            chain = TokenChain(self._hasher, packed_tokens, admission.salt)
        return chain

    def _keep_waiting(self, sequence_id: int, chain: TokenChain) -> None:
        self._waiting_chains[sequence_id] = chain
        if len(self._waiting_chains) > MAX_WAITING_CHAINS:
            self._waiting_chains.popitem(last=False)
