"""A pool with a scheduler's bookkeeping around it, for stories about blocks."""

from __future__ import annotations

from typing import Any

from octavo.common.messages.kv import (
    Admission,
    Admitted,
    Arrival,
    Fork,
    Forked,
    KvReply,
    KvRequest,
    OpenPool,
    PoolCounts,
    Publication,
    Release,
)
from octavo.kvmanager.ledger import violations
from octavo.kvmanager.pool import Pool, PoolSettings
from octavo.kvmanager.stats import KvStats


def tokens(start: int, end: int) -> tuple[int, ...]:
    """The token ids `start` to `end` - 1."""
    return tuple(range(start, end))


class DrivenPool:
    """Sends messages in order and checks the ledger after each one.

    Steps are acknowledged as they are launched, unless `acknowledged_step` is given.
    """

    def __init__(
        self, num_blocks: int, block_size: int = 16, settings: PoolSettings | None = None, num_host_blocks: int = 0
    ) -> None:
        self.stats = KvStats()
        opening = OpenPool("group-0", 1, 1, num_blocks, block_size, num_host_blocks)
        self.pool = Pool(opening, settings or PoolSettings(), self.stats)
        self.credit_target = 0
        self.acknowledged_step = 0
        self._message_no = 0

    @property
    def counts(self) -> PoolCounts:
        return self.pool.blocks.counts()

    def table(self, sequence_id: int) -> list[int]:
        return self.pool.tables.table(sequence_id).block_ids

    def send(self, **fields: Any) -> KvReply:
        """One `KvRequest` with these fields; the ledger must hold afterwards."""
        self._message_no += 1
        self.acknowledged_step = fields.pop("acknowledged_step", self.acknowledged_step)
        fields.setdefault("credit_target", self.credit_target)
        reply = self.pool.apply(KvRequest(self._message_no, self.acknowledged_step, **fields))
        assert violations(self.pool) == []
        return reply

    def admit(
        self, sequence_id: int, token_ids: tuple[int, ...] = (), salt: bytes = b"", *, waits: bool = False
    ) -> Admitted:
        """Ask for blocks; `waits` for another sequence that computes the next one, instead of computing it again."""
        [answer] = self.send(admissions=[Admission(sequence_id, token_ids, salt, computes_itself=not waits)]).admitted
        return answer

    def arrive(self, sequence_id: int, token_ids: tuple[int, ...], salt: bytes = b"", **adapter: Any) -> None:
        self.send(arrivals=[Arrival(sequence_id, token_ids, salt, **adapter)])

    def publish(self, sequence_id: int, num_computed_tokens: int, new_token_ids: tuple[int, ...] = ()) -> None:
        self.send(publications=[Publication(sequence_id, num_computed_tokens, new_token_ids)])

    def fork(self, parent_id: int, child_id: int, num_tokens: int, num_table_tokens: int = 0) -> Forked:
        [answer] = self.send(forks=[Fork(parent_id, child_id, num_tokens, num_table_tokens)]).forked
        return answer

    def release(self, *sequence_ids: int, last_step: int = 0) -> KvReply:
        return self.send(releases=[Release(sequence_id, last_step) for sequence_id in sequence_ids])

    def grow(self, sequence_id: int) -> int:
        """Get one credit and spend it. Returns its block."""
        reply = self.send(credit_target=1)
        [(block_id, _)] = reply.credits
        self.send(spent=[(sequence_id, block_id)])
        return block_id

    def cache(self, sequence_id: int, token_ids: tuple[int, ...]) -> list[int]:
        """Admit, compute, publish and release. Returns the table that the sequence had."""
        admitted = self.admit(sequence_id, token_ids)
        self.publish(sequence_id, len(token_ids))
        self.release(sequence_id)
        return list(admitted.block_ids)
