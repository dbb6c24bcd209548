"""Moves blocks between device and host: sequences that are swapped, prefix blocks that sink and come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from octavo.common.block_hash import BlockKey, TokenChain
from octavo.common.errors import ProtocolError
from octavo.common.messages.kv import SwapIn, SwapOut, SwappedIn, SwappedOut, Verdict, WaitReason
from octavo.kvmanager.block_pool import BlockPool
from octavo.kvmanager.block_state import BlockState
from octavo.kvmanager.block_table import BlockTable, BlockTables
from octavo.kvmanager.host_pool import HostPool
from octavo.kvmanager.stats import KvStats
from octavo.kvmanager.transfers import Purpose, Transfers


@dataclass(frozen=True, slots=True)
class HostTierSettings:
    """What an operator decides for the host memory of every pool."""

    max_sinking_blocks: int = 64
    """Evicted blocks that one message may send to host memory; more are dropped."""
    min_host_hit_blocks: int = 1
    """Shorter runs of host blocks are computed again instead of restored."""


@dataclass(frozen=True, slots=True)
class TailBlock:
    """One block of a swapped sequence: in host memory, or still on the device because others share it."""

    host_id: int | None
    device_id: int | None = None


@dataclass(frozen=True, slots=True)
class SwapInRound:
    """The answers to the swap-ins of one message."""

    swapped_in: list[SwappedIn]
    num_missing_blocks: int
    """Credits whose return would let the first LATER in; 0 if none would."""

    @property
    def is_blocked(self) -> bool:
        """Whoever asks next has to wait too."""
        return any(answer.verdict is Verdict.LATER for answer in self.swapped_in)


class HostTier:
    """Owns the tails of swapped sequences; their tables keep what stays on the device.

    A block of a swapped tail that other tables share stays on the device, and the tail holds its reference. All others
    are copied. A copy's device blocks are TRANSFERRING until it is acknowledged: sources then go where released blocks
    go, targets become active.
    """

    def __init__(
        self,
        blocks: BlockPool,
        tables: BlockTables,
        host: HostPool,
        num_watermark_blocks: int,
        settings: HostTierSettings,
        stats: KvStats,
    ) -> None:
        self.host = host
        self.transfers = Transfers(blocks, host)
        self._blocks = blocks
        self._tables = tables
        self._num_watermark_blocks = num_watermark_blocks
        self._settings = settings
        self._stats = stats
        self._tails: dict[int, list[TailBlock]] = {}
        blocks.keeps_evicted = host.num_blocks > 0 and settings.max_sinking_blocks > 0

    @property
    def num_swapped(self) -> int:
        """Sequences that are swapped, whole or in part."""
        return len(self._tails)

    def tails(self) -> Iterator[tuple[int, list[TailBlock]]]:
        return iter(self._tails.items())

    def refuse_swapped(self, sequence_id: int) -> None:
        """Raises ProtocolError for a swapped sequence: its table cannot grow."""
        if sequence_id in self._tails:
            raise ProtocolError(f"sequence {sequence_id} is swapped")

    # Swap.

    def swap_out(self, request: SwapOut) -> SwappedOut:
        """Save the end of a table. LATER if host memory is full, or if the sequence has a transfer on its way.

        Raises ProtocolError if the sequence holds no table, or a shorter one than is to be kept.
        """
        table = self._tables.table(request.sequence_id)
        if not 0 <= request.num_kept_blocks <= len(table.block_ids):
            raise ProtocolError(
                f"sequence {request.sequence_id} keeps {request.num_kept_blocks} of {len(table.block_ids)} blocks"
            )
        leaving = table.block_ids[request.num_kept_blocks :]
        copied = [block_id for block_id in leaving if self._blocks.ref_counts[block_id] == 1]
        if self.transfers.is_open_for(request.sequence_id) or (host_ids := self.host.take(len(copied))) is None:
            return SwappedOut(request.sequence_id, Verdict.LATER)
        place = dict(zip(copied, host_ids, strict=True))
        tail = [TailBlock(place[block]) if block in place else TailBlock(None, block) for block in leaving]
        self._tails[request.sequence_id] = tail + self._tails.get(request.sequence_id, [])
        del table.block_ids[request.num_kept_blocks :]
        self._blocks.begin_copies_out(copied, request.last_step)
        generations = [self._blocks.generations[block_id] for block_id in copied]
        unfindable: list[BlockKey | None] = [None] * len(copied)
        transfer_id = self.transfers.begin(
            Purpose.SWAP_OUT, copied, generations, host_ids, unfindable, unfindable, request.sequence_id
        )
        self._tables.give_up_claims(request.sequence_id)
        self._stats.num_swapped_out_blocks += len(copied)
        return SwappedOut(request.sequence_id, Verdict.OK, transfer_id)

    def swap_in(self, requests: Sequence[SwapIn]) -> SwapInRound:
        """Serve in order, each whole or not at all. Raises ProtocolError for a sequence that is not swapped."""
        answers: list[SwappedIn] = []
        num_missing_blocks = 0
        is_blocked = False
        for request in requests:
            if request.sequence_id not in self._tails:
                raise ProtocolError(f"sequence {request.sequence_id} is not swapped")
            if is_blocked:
                answer = _wait(request, WaitReason.BEHIND_ANOTHER)
            else:
                answer, num_missing_blocks = self._swap_in_one(request)
                is_blocked = answer.verdict is Verdict.LATER
            answers.append(answer)
        return SwapInRound(answers, num_missing_blocks)

    def _swap_in_one(self, request: SwapIn) -> tuple[SwappedIn, int]:
        sequence_id = request.sequence_id
        table, tail = self._tables.table(sequence_id), self._tails[sequence_id]
        if self.transfers.is_open_for(sequence_id):
            return _wait(request, WaitReason.IN_FLIGHT), 0
        num_kept = len(table.block_ids)
        num_blocks = max(num_kept + len(tail), -(-request.num_tokens // self._tables.block_size))
        found = self._still_on_device(table, tail)
        num_new = num_blocks - num_kept - sum(block is not None for block in found)
        num_found_cached = sum(
            block is not None and self._blocks.states[block] is BlockState.CACHED for block in set(found)
        )
        num_available = self._blocks.num_available - num_found_cached
        num_reserved = self._num_watermark_blocks if len(self._tables) > self.num_swapped else 0
        if num_available + len(self._blocks.granted) - num_new < num_reserved:
            return _wait(request, WaitReason.NO_BLOCKS), 0
        if num_available < num_new:
            return _wait(request, WaitReason.NO_BLOCKS), num_new - num_available
        transfer_id = self._return_tail(sequence_id, table, tail, found, num_new)
        generations = self._tables.generations(table)
        return SwappedIn(sequence_id, Verdict.OK, transfer_id, tuple(table.block_ids), generations), 0

    def _still_on_device(self, table: BlockTable, tail: list[TailBlock]) -> list[int | None]:
        """For each block of the tail the device block that holds its content, or None."""
        first = len(table.block_ids)
        return [
            block.device_id
            if block.device_id is not None
            else self._blocks.find(table.chain.key(index))
            if table.is_publishing and index < table.num_published_blocks
            else None
            for index, block in enumerate(tail, first)
        ]

    def _return_tail(
        self, sequence_id: int, table: BlockTable, tail: list[TailBlock], found: list[int | None], num_new: int
    ) -> int:
        """Give the table its blocks again. The id of the transfer that fills them."""
        del self._tails[sequence_id]
        for block, device_id in zip(tail, found, strict=True):
            if block.device_id is None and device_id is not None:
                self._blocks.pin(device_id)
        new = self._blocks.allocate(num_new)
        assert new is not None
        unused = iter(new)
        targets, host_ids, indexes = [], [], []
        for block, device_id in zip(tail, found, strict=True):
            if device_id is None:
                assert block.host_id is not None
                device_id = next(unused)
                indexes.append(len(table.block_ids))
                targets.append(device_id)
                host_ids.append(block.host_id)
            table.block_ids.append(device_id)
        table.block_ids.extend(unused)
        transfer_id = self._begin_filling(Purpose.SWAP_IN, sequence_id, table, indexes, host_ids)
        self.host.give_back([block.host_id for block in tail if block.host_id is not None])
        self._stats.num_swapped_in_blocks += len(targets)
        return transfer_id

    def release(self, sequence_id: int, last_step: int) -> None:
        """Give up a swapped sequence's tail; nothing if it has none. Its table is released apart."""
        tail = self._tails.pop(sequence_id, [])
        self._blocks.release([block.device_id for block in tail[::-1] if block.device_id is not None], last_step)
        self.host.give_back([block.host_id for block in tail if block.host_id is not None])

    # Prefix blocks.

    def sink_evicted(self) -> None:
        """Save cached blocks that this message has evicted, the most recently used ones, as far as host memory goes."""
        device_ids, generations, host_ids = [], [], []
        keys: list[BlockKey | None] = []
        parents: list[BlockKey | None] = []
        for evicted in self._blocks.take_evicted()[-self._settings.max_sinking_blocks :]:
            if self.host.find(evicted.key) is not None:
                continue
            taken = self.host.take(1)
            if taken is None:
                break
            device_ids.append(evicted.block_id)
            generations.append(evicted.generation)
            host_ids += taken
            keys.append(evicted.key)
            parents.append(evicted.parent)
        self.transfers.begin(Purpose.SINK, device_ids, generations, host_ids, keys, parents)
        self._stats.num_sunk_blocks += len(device_ids)

    def find_run(self, chain: TokenChain, first_index: int, end_index: int) -> list[int]:
        """Host blocks that hold the blocks of `chain` from `first_index` on; too short a run counts as none."""
        run: list[int] = []
        for index in range(first_index, end_index):
            host_id = self.host.find(chain.key(index))
            if host_id is None:
                break
            run.append(host_id)
        return run if len(run) >= self._settings.min_host_hit_blocks else []

    def restore(self, sequence_id: int, first_index: int, run: Sequence[int]) -> int:
        """Fill the table's blocks from `first_index` on from a run that was found. The id of the transfer."""
        table = self._tables.table(sequence_id)
        indexes = range(first_index, first_index + len(run))
        return self._begin_filling(Purpose.RESTORE, sequence_id, table, indexes, run)

    def forget_cached(self, matches: Callable[[BlockKey], bool] = lambda key: True) -> None:
        """Nothing that was saved before, or is on its way, is found by a key that matches."""
        self.host.forget_cached(matches)
        self.transfers.forget_keys(matches)

    def _begin_filling(
        self, purpose: Purpose, sequence_id: int, table: BlockTable, indexes: Sequence[int], host_ids: Sequence[int]
    ) -> int:
        """Fill these blocks of the table; those that were published can be found again afterwards."""
        device_ids = [table.block_ids[index] for index in indexes]
        keys: list[BlockKey | None] = []
        parents: list[BlockKey | None] = []
        for index in indexes:
            is_published = table.is_publishing and index < table.num_published_blocks
            keys.append(table.chain.key(index) if is_published else None)
            parents.append(table.chain.key(index - 1) if is_published and index else None)
        self._blocks.begin_copies_in(device_ids)
        generations = [self._blocks.generations[block_id] for block_id in device_ids]
        return self.transfers.begin(purpose, device_ids, generations, host_ids, keys, parents, sequence_id)


def _wait(request: SwapIn, reason: WaitReason) -> SwappedIn:
    return SwappedIn(request.sequence_id, Verdict.LATER, wait_reason=reason)
