"""One pool as its scheduler sees it: a message in, the answer out."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.common.block_hash import BlockHasher, HashAlgorithm
from octavo.common.errors import MessageGapError, ProtocolError
from octavo.common.messages.kv import (
    Arrival,
    DeclarePool,
    Forked,
    KvReply,
    KvRequest,
    OpenPool,
    PoolCounts,
    Release,
    Verdict,
)
from octavo.kvmanager.admission import AdmissionControl
from octavo.kvmanager.arrivals import ArrivalBook
from octavo.kvmanager.block_pool import PROTECTED_SHARE, BlockPool
from octavo.kvmanager.block_table import BlockTables
from octavo.kvmanager.catalogue import Catalogue
from octavo.kvmanager.declaration import rebuild
from octavo.kvmanager.flush import Flushed, FlushScope, flush
from octavo.kvmanager.host_pool import HostPool
from octavo.kvmanager.host_tier import HostTier, HostTierSettings
from octavo.kvmanager.stats import KvStats

HOT_SHARE = 0.1
"""Share of the pool's blocks: that many most recently used cached blocks are hot."""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """What an operator decides for every pool."""

    watermark: float = 0.01
    """Share of blocks, 0 to 1, that an admission leaves available; at least one block."""
    hash_secret: bytes = b""
    """Enters every block hash. Empty: none."""
    host_tier: HostTierSettings = field(default_factory=HostTierSettings)
    hash_algorithm: HashAlgorithm = "sha256"
    protected_share: float = PROTECTED_SHARE
    """Share of blocks that may be cached and protected from scans; 0 is a plain LRU."""

    def hasher(self, opening: OpenPool) -> BlockHasher:
        """Computes the keys of this pool."""
        return BlockHasher(opening.block_size, self.hash_secret, self.hash_algorithm, kv_format=opening.kv_format)


@dataclass(frozen=True, slots=True)
class CachedBlocks:
    """What outlives the scheduler of a pool: blocks that nobody holds, and host memory."""

    blocks: BlockPool
    host: HostPool
    catalogue: Catalogue | None


class Pool:
    """Blocks, tables and credits of one worker group.

    Credits are blocks handed to the scheduler ahead. `apply` grants up to the target it is told, from free blocks, then
    from cached ones, least recently used first. Hot ones are evicted only for the first credit of each sequence, so
    that a sequence can always grow, to the whole pool if it is alone. While an admission or a fork waits for credits to
    come back, none are granted.
    """

    def __init__(
        self,
        opening: OpenPool,
        settings: PoolSettings,
        stats: KvStats | None = None,
        catalogue: Catalogue | None = None,
        cached: CachedBlocks | None = None,
    ) -> None:
        """`cached` is what the pool before it has let go, of the same life of the memory."""
        if opening.num_blocks < 1 or opening.block_size < 1 or opening.num_host_blocks < 0:
            raise ProtocolError(f"a pool of {opening.num_blocks} blocks of {opening.block_size} tokens")
        stats = stats or KvStats()
        self.pool_id = opening.pool_id
        self.block_size = opening.block_size
        self.stats = stats
        if opening.generations and len(opening.generations) != opening.num_blocks:
            raise ProtocolError(f"{len(opening.generations)} generations of {opening.num_blocks} blocks")
        if cached is None:
            cached = _fresh_blocks(opening, settings, stats, catalogue)
        self.blocks = cached.blocks
        for block_id, generation in enumerate(opening.generations):
            self.blocks.note_generation(block_id, max(generation, self.blocks.generations[block_id]))
        self.tables = BlockTables(self.blocks, opening.block_size)
        num_watermark_blocks = max(1, int(settings.watermark * opening.num_blocks))
        self.tier = HostTier(self.blocks, self.tables, cached.host, num_watermark_blocks, settings.host_tier, stats)
        self.hasher = settings.hasher(opening)
        self._catalogue = cached.catalogue
        self.arrivals = ArrivalBook(self.hasher)
        self._admissions = AdmissionControl(
            self.blocks,
            self.tables,
            self.arrivals,
            self.hasher,
            self.tier,
            num_watermark_blocks,
            stats,
        )
        self._num_hot_blocks = int(HOT_SHARE * opening.num_blocks)
        self._last_message_no = 0
        self._is_declared = False
        self._last_reply: KvReply | None = None

    @property
    def last_message_no(self) -> int:
        """Of the last message applied."""
        return self._last_message_no

    def declare(self, declaration: DeclarePool) -> None:
        """Become the pool that the scheduler holds. Raises ProtocolError after the first message, or if it makes no
        sense."""
        if self._last_message_no or self._is_declared:
            raise ProtocolError("a pool is declared before its first message, and once")
        self._is_declared = True
        rebuild(self.blocks, self.tables, self.hasher, declaration)

    def let_go(self) -> CachedBlocks:
        """End this pool: the scheduler that drove it is gone, and no step or copy of it is on its way. What is cached
        stays so."""
        self.tier.transfers.abandon()
        for sequence_id, _ in list(self.tables):
            self.tier.release(sequence_id, last_step=0)
            self.tables.release(sequence_id, last_step=0)
        self.blocks.vacate()
        return CachedBlocks(self.blocks, self.tier.host, self._catalogue)

    def write_catalogue(self) -> None:
        """To be called when the answer to a message is on its way."""
        if self._catalogue is not None:
            self._catalogue.write()

    def apply(self, request: KvRequest) -> KvReply:
        """Apply one message, item by item in the order of its fields, each whole or not at all.

        The last message again gets the last answer again. Raises MessageGapError for any other number than the next,
        and ProtocolError for an item that names an unknown sequence or block; the items before it stay applied.
        """
        if self._last_reply is not None and request.message_no == self._last_message_no:
            return self._last_reply
        if request.message_no != self._last_message_no + 1:
            raise MessageGapError(f"message {request.message_no} after message {self._last_message_no}")
        self._last_message_no, self._last_reply = request.message_no, None
        self._last_reply = self._apply_next(request)
        return self._last_reply

    def _apply_next(self, request: KvRequest) -> KvReply:
        self.blocks.acknowledge(request.acknowledged_step)
        for transfer_id in request.finished_transfers:
            self.tier.transfers.finish(transfer_id)
        for sequence_id, block_id in request.spent:
            self.tier.refuse_swapped(sequence_id)
            self.tables.append_credit(sequence_id, block_id)
        for publication in request.publications:
            self.tables.publish(publication)
        forked = [self.tables.fork(fork) for fork in request.forks]
        swapped_out = [self.tier.swap_out(swap_out) for swap_out in request.swap_outs]
        for release in request.releases:
            self._release(release)
        for block_id in request.returned_credits:
            self.blocks.return_credit(block_id)
        for arrival in request.arrivals:
            self._arrive(arrival)
        swap_ins = self.tier.swap_in(request.swap_ins)
        admissions = self._admissions.admit(
            request.admissions, swap_ins.is_blocked, skips_host=request.skips_host_prefixes
        )
        num_missing = swap_ins.num_missing_blocks + admissions.num_missing_blocks + _num_refused(forked)
        credit_ids = [] if num_missing else self.blocks.grant(self._num_grantable(request.credit_target))
        num_granted = len(self.blocks.granted)
        self.tier.sink_evicted()
        return KvReply(
            message_no=request.message_no,
            forked=forked,
            admitted=admissions.admitted,
            credits=[(block_id, self.blocks.generations[block_id]) for block_id in credit_ids],
            num_recalled_credits=min(num_granted, max(num_missing, num_granted - request.credit_target)),
            counts=self.counts(),
            swapped_out=swapped_out,
            swapped_in=swap_ins.swapped_in,
            transfers=self.tier.transfers.take_untold(),
        )

    def counts(self) -> PoolCounts:
        """Blocks of device and host by state."""
        host = self.tier.host
        return self.blocks.counts(len(host.free), host.num_swapped, host.num_cached)

    def hash_slice(self) -> bool:
        """Hash a slice of the prompts that have arrived, under 1 ms. False once all are hashed."""
        return self.arrivals.hash_slice()

    def flush(self, scope: FlushScope) -> Flushed:
        """Make prefix blocks unfindable, between two messages."""
        flushed = flush(self.blocks, self.tables, scope)
        self.tier.forget_cached(scope.matcher())
        self.stats.num_flushed_blocks += flushed.num_freed_blocks + flushed.num_used_blocks
        return flushed

    def _arrive(self, arrival: Arrival) -> None:
        if arrival.sequence_id in self.tables:
            raise ProtocolError(f"sequence {arrival.sequence_id} arrives and holds a table")
        self.arrivals.add(arrival)

    def _release(self, release: Release) -> None:
        """Of a table, or of a sequence that has only arrived."""
        if not self.arrivals.forget(release.sequence_id):
            self.tier.release(release.sequence_id, release.last_step)
            self.tables.release(release.sequence_id, release.last_step)

    def _num_grantable(self, credit_target: int) -> int:
        num_granted, num_cached = len(self.blocks.granted), len(self.blocks.cached)
        num_wanted = max(0, credit_target - num_granted)
        num_from_free = min(num_wanted, len(self.blocks.free))
        num_growing = len(self.tables) - self.tier.num_swapped
        num_first_credits = num_growing - num_granted - num_from_free
        num_evictable = min(num_cached, max(0, num_cached - self._num_hot_blocks, num_first_credits))
        return num_from_free + min(num_wanted - num_from_free, num_evictable)


def _num_refused(forked: list[Forked]) -> int:
    return sum(fork.verdict is Verdict.LATER for fork in forked)


def _fresh_blocks(
    opening: OpenPool, settings: PoolSettings, stats: KvStats, catalogue: Catalogue | None
) -> CachedBlocks:
    """All free, but for those of which a catalogue of the same life of the memory knows what they hold."""
    blocks = BlockPool(opening.num_blocks, stats, catalogue, settings.protected_share)
    if catalogue is not None and catalogue.is_restored:
        blocks.restore(catalogue.keys())
    return CachedBlocks(blocks, HostPool(opening.num_host_blocks, blocks.events), catalogue)
