"""Why a prefix block was not found: what was evicted or flushed, and what is stored under another salt or adapter."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from octavo.common.block_hash import BlockKey, adapter_mark_of, salt_marks_of, token_check
from octavo.common.messages.kv import MissReason, PrefixMiss
from octavo.kvmanager.single_flight import Flights

MAX_JUDGED_BLOCKS = 256
"""Missed blocks of one admission that are looked at; those behind share the reason of the last."""

FLUSHED = -1
"""Stands for the sequence that a block was evicted for, if it was flushed."""


class PrefixHistory:
    """Remembers, in bounded memory, what became of blocks that are found no more.

    Both are tables of fixed size in which a new entry takes the place of an old one: of blocks that are gone, by a hash
    of the key; and of stored blocks by the check of their tokens, which all namespaces share. So a reason may be told
    as NEVER_STORED that was another; it is never made up otherwise, but for collisions of the checks.
    """

    def __init__(self, num_blocks: int, keys: Sequence[BlockKey | None], key_to_block: dict[BlockKey, int]) -> None:
        self._keys = keys
        self._key_to_block = key_to_block
        num_gone = 1 << max(14, (num_blocks // 4).bit_length())
        self._gone_mask = num_gone - 1
        self._gone = array("q", bytes(8 * num_gone))
        """hash(key), by its low bits."""
        self._gone_for = array("q", bytes(8 * num_gone))
        """The sequence that it was evicted for, or FLUSHED."""
        num_places = 1 << max(6, (num_blocks - 1).bit_length())
        self._mask = num_places - 1
        self._by_tokens = array("i", [-1]) * num_places

    def note_stored(self, block_id: int, key: BlockKey) -> None:
        self._by_tokens[token_check(key) & self._mask] = block_id

    def note_gone(self, keys: Iterable[BlockKey], for_sequence_id: int) -> None:
        """`for_sequence_id`: 0 for a credit, FLUSHED for nobody."""
        gone, gone_for, mask = self._gone, self._gone_for, self._gone_mask
        for name in map(hash, keys):
            place = name & mask
            gone[place] = name
            gone_for[place] = for_sequence_id

    def forget_sequences(self) -> None:
        """Sequences are numbered anew: for whom a block was evicted is told no more."""
        self._gone_for = array("q", [min(sequence_id, 0) for sequence_id in self._gone_for])

    def misses(self, keys: Sequence[BlockKey], num_hits: int, flights: Flights) -> list[PrefixMiss]:
        """Reasons for the full blocks from `num_hits` on; their counts add up to all of them."""
        num_blocks: dict[MissReason, int] = {}
        evicted_by = 0
        last_reason: MissReason | None = None
        end = min(len(keys), num_hits + MAX_JUDGED_BLOCKS)
        for index in range(num_hits, end):
            key = keys[index]
            if key in self._key_to_block:
                # It is stored: it misses because one before it does, or because it must be computed anyway.
                reason = last_reason or MissReason.LAST_TOKEN
            else:
                reason, by = self._reason(key, flights)
                if reason is MissReason.EVICTED and reason not in num_blocks:
                    evicted_by = by
            num_blocks[reason] = num_blocks.get(reason, 0) + 1
            last_reason = reason
            if reason is MissReason.NEVER_STORED:
                # What follows it was never stored either.
                end = index + 1
                break
        if last_reason is not None:
            num_blocks[last_reason] += len(keys) - end
        return [
            PrefixMiss(reason, number, evicted_by if reason is MissReason.EVICTED else 0)
            for reason, number in num_blocks.items()
        ]

    def _reason(self, key: BlockKey, flights: Flights) -> tuple[MissReason, int]:
        if flights.leader(key) is not None:
            return MissReason.IN_FLIGHT, 0
        name = hash(key)
        place = name & self._gone_mask
        if self._gone[place] == name:
            by = self._gone_for[place]
            return (MissReason.FLUSHED, 0) if by == FLUSHED else (MissReason.EVICTED, by)
        check = token_check(key)
        block_id = self._by_tokens[check & self._mask]
        other = self._keys[block_id] if block_id >= 0 else None
        if other is not None and token_check(other) == check:
            has_other_salt = salt_marks_of(other) != salt_marks_of(key)
            has_other_adapter = adapter_mark_of(other) != adapter_mark_of(key)
            # The same salt and adapter leave another load of the adapter.
            only_salt = has_other_salt and not has_other_adapter
            return (MissReason.OTHER_SALT if only_salt else MissReason.OTHER_ADAPTER), 0
        return MissReason.NEVER_STORED, 0
