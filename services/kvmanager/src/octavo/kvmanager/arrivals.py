"""Sequences that will ask for blocks: their prompts are hashed in slices, off the step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from octavo.common.block_hash import BlockHasher, TokenChain
from octavo.common.codecs.arrays import pack_int32
from octavo.common.errors import ProtocolError
from octavo.common.messages.kv import Arrival

SLICE_TOKENS = 4096
"""Tokens that one slice hashes: about 0.6 ms."""

STEP_TOKENS = 2048
"""Tokens that may be hashed while a message is answered, all its admissions together: a short prompt need not wait."""


@dataclass(slots=True)
class Arrived:
    """A sequence that holds no table yet."""

    chain: TokenChain
    awaited_block: int = -1
    """Index of the block that another sequence was computing when this one asked last; -1 if none."""


class ArrivalBook:
    """Holds the arrived sequences until they get a table or are released."""

    def __init__(self, hasher: BlockHasher) -> None:
        self._hasher = hasher
        self._arrived: dict[int, Arrived] = {}
        self._unhashed: deque[int] = deque()
        """Sequences in the order of their next slice; an entry may be of one that is gone."""

    def __len__(self) -> int:
        return len(self._arrived)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._arrived

    @property
    def has_unhashed(self) -> bool:
        return bool(self._unhashed)

    def add(self, arrival: Arrival) -> None:
        """Raises ProtocolError if the sequence has arrived already, or has no tokens."""
        if arrival.sequence_id in self._arrived:
            raise ProtocolError(f"sequence {arrival.sequence_id} arrives twice")
        if not arrival.token_ids:
            raise ProtocolError(f"sequence {arrival.sequence_id} has no tokens")
        chain = TokenChain(
            self._hasher, pack_int32(arrival.token_ids), arrival.salt, arrival.adapter, arrival.adapter_generation
        )
        self._arrived[arrival.sequence_id] = Arrived(chain)
        if chain.num_unhashed_blocks:
            self._unhashed.append(arrival.sequence_id)

    def find(self, sequence_id: int) -> Arrived | None:
        return self._arrived.get(sequence_id)

    def forget(self, sequence_id: int) -> bool:
        """False if it has not arrived."""
        return self._arrived.pop(sequence_id, None) is not None

    def hash_slice(self) -> bool:
        """Hash about `SLICE_TOKENS` tokens, of prompts in turn. False once there is nothing left to hash."""
        num_blocks = max(1, SLICE_TOKENS // self._hasher.block_size)
        while num_blocks > 0 and self._unhashed:
            sequence_id = self._unhashed.popleft()
            arrived = self._arrived.get(sequence_id)
            if arrived is None:
                continue
            chain = arrived.chain
            num_hashed = min(num_blocks, chain.num_unhashed_blocks)
            chain.hash_up_to(len(chain.keys) + num_hashed)
            num_blocks -= num_hashed
            if chain.num_unhashed_blocks:
                self._unhashed.append(sequence_id)
        return bool(self._unhashed)
