"""Owns the block tables: which blocks hold each sequence, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from octavo.common.block_hash import BlockKey, TokenChain
from octavo.common.errors import ProtocolError
from octavo.common.messages.kv import BlockCopy, Fork, Forked, Publication, Verdict
from octavo.kvmanager.block_pool import BlockPool
from octavo.kvmanager.single_flight import Flights


@dataclass(slots=True)
class BlockTable:
    """One sequence."""

    block_ids: list[int]
    """Entry i holds positions i * block_size to (i + 1) * block_size - 1."""
    chain: TokenChain
    """The tokens told so far. Output tokens are told when their block is published, so the blocks may be ahead."""
    num_published_blocks: int
    """Leading blocks that were found by hash or offered for publication."""
    num_claimed_blocks: int = 0
    """Blocks before it that are not published are claimed in the flights: this sequence computes them."""
    is_publishing: bool = True
    """False after a flush of what it rests on."""


class BlockTables:
    """Every table holds one reference on each of its blocks. A part-filled block is in one table only."""

    def __init__(self, blocks: BlockPool, block_size: int) -> None:
        self._blocks = blocks
        self.block_size = block_size
        self._tables: dict[int, BlockTable] = {}
        self.flights = Flights()

    def __len__(self) -> int:
        return len(self._tables)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._tables

    def __iter__(self) -> Iterator[tuple[int, BlockTable]]:
        return iter(self._tables.items())

    def table(self, sequence_id: int) -> BlockTable:
        """Raises ProtocolError if the sequence holds no table."""
        table = self._tables.get(sequence_id)
        if table is None:
            raise ProtocolError(f"sequence {sequence_id} holds no table")
        return table

    def create(
        self,
        sequence_id: int,
        chain: TokenChain,
        hits: Sequence[int],
        num_new_blocks: int,
        num_restored_blocks: int = 0,
    ) -> BlockTable:
        """A table of the blocks found, pinned first, then new ones, of which the pool must have enough.

        The first `num_restored_blocks` of the new ones will be filled with content that has a key already. The full
        blocks among the others are claimed: whoever comes next with the same prompt may wait for them.
        """
        self._blocks.pin_hits(hits)
        new = self._blocks.allocate(num_new_blocks, sequence_id)
        assert new is not None
        num_found = len(hits) + num_restored_blocks
        table = BlockTable([*hits, *new], chain, num_found, chain.num_full_blocks)
        self.flights.claim(sequence_id, chain.keys[num_found : chain.num_full_blocks])
        self._tables[sequence_id] = table
        return table

    def fork(self, fork: Fork) -> Forked:
        """Share the parent's full blocks; a block that `num_tokens` fills in part is copied into a new one.

        The child knows the tokens that the manager knows of the parent, up to `num_tokens`. LATER if there are too few
        available blocks for the copy and for `num_table_tokens`. Raises ProtocolError if the parent holds no table or a
        shorter one, or if the child has one.
        """
        parent = self.table(fork.parent_id)
        if fork.child_id in self._tables:
            raise ProtocolError(f"sequence {fork.child_id} holds a table already")
        num_full_blocks, num_tail_tokens = divmod(fork.num_tokens, self.block_size)
        if not 0 < fork.num_tokens <= len(parent.block_ids) * self.block_size:
            raise ProtocolError(
                f"fork of sequence {fork.parent_id} at {fork.num_tokens} tokens; its table has {len(parent.block_ids)}"
                f" blocks of {self.block_size}"
            )
        num_blocks = -(-max(fork.num_tokens, fork.num_table_tokens) // self.block_size)
        new = self._blocks.allocate(num_blocks - num_full_blocks)
        if new is None:
            return Forked(fork.child_id, Verdict.LATER)
        shared = parent.block_ids[:num_full_blocks]
        for block_id in shared:
            self._blocks.pin(block_id)
        child = BlockTable(
            block_ids=[*shared, *new],
            chain=parent.chain.fork(fork.num_tokens),
            num_published_blocks=min(parent.num_published_blocks, num_full_blocks),
            is_publishing=parent.is_publishing,
        )
        self._tables[fork.child_id] = child
        copy = self._copy(parent.block_ids[num_full_blocks], new[0]) if num_tail_tokens else None
        return Forked(fork.child_id, Verdict.OK, tuple(child.block_ids), self.generations(child), copy)

    def _copy(self, source_id: int, target_id: int) -> BlockCopy:
        generations = self._blocks.generations
        return BlockCopy(source_id, target_id, generations[source_id], generations[target_id])

    def take_over(
        self, sequence_id: int, block_ids: Sequence[int], chain: TokenChain, num_computed_tokens: int
    ) -> None:
        """A table that another manager made, whose references are counted already. Its computed blocks are published.

        Raises ProtocolError if the sequence holds a table, or if tokens and blocks do not match.
        """
        if sequence_id in self._tables:
            raise ProtocolError(f"sequence {sequence_id} is declared twice")
        self._tables[sequence_id] = BlockTable(list(block_ids), chain, num_published_blocks=0)
        self.publish(Publication(sequence_id, num_computed_tokens))

    def append_credit(self, sequence_id: int, block_id: int) -> None:
        """A spent credit stands at the end of the table. Raises ProtocolError for no such table or credit."""
        table = self.table(sequence_id)
        self._blocks.spend(block_id)
        table.block_ids.append(block_id)

    def publish(self, publication: Publication) -> None:
        """Make the blocks findable whose positions are all computed.

        Raises ProtocolError if there is no such table, if it is shorter than the tokens, or if a token is missing.
        """
        sequence_id, num_computed_tokens, new_token_ids = publication
        table = self.table(sequence_id)
        chain, block_ids, first = table.chain, table.block_ids, table.num_published_blocks
        num_full_blocks = num_computed_tokens // self.block_size
        num_tokens = chain.num_tokens + len(new_token_ids)
        if max(num_computed_tokens, num_tokens) > len(block_ids) * self.block_size:
            raise ProtocolError(f"sequence {sequence_id} is longer than its table")
        if num_full_blocks * self.block_size > num_tokens:
            raise ProtocolError(f"sequence {sequence_id} has {num_computed_tokens} tokens computed, {num_tokens} told")
        if new_token_ids:
            chain.append(new_token_ids)
        if not table.is_publishing or num_full_blocks <= first:
            return
        chain.hash_up_to(num_full_blocks)
        keys, publish = chain.keys, self._blocks.publish
        parent = keys[first - 1] if first else None
        for index in range(first, num_full_blocks):
            publish(block_ids[index], keys[index], parent)
            parent = keys[index]
        self._end_claims(sequence_id, table, num_full_blocks)
        table.num_published_blocks = num_full_blocks

    def release(self, sequence_id: int, last_step: int) -> None:
        """Give up the table. Its end becomes the least recently used: without its beginning it cannot be hit."""
        table = self.table(sequence_id)
        del self._tables[sequence_id]
        self._end_claims(sequence_id, table, table.num_claimed_blocks)
        self._blocks.release(table.block_ids[::-1], last_step)

    def give_up_claims(self, sequence_id: int) -> None:
        """Nobody need wait any longer for what the sequence computes."""
        table = self.table(sequence_id)
        self._end_claims(sequence_id, table, table.num_claimed_blocks)
        table.num_claimed_blocks = 0

    def stop_publishing(self, matches: Callable[[BlockKey], bool]) -> int:
        """Sequences whose keys match publish nothing more. Returns how many they are."""
        num_stopped = 0
        for sequence_id, table in self._tables.items():
            if table.is_publishing and matches(table.chain.namespace.marks):
                table.is_publishing = False
                self._end_claims(sequence_id, table, table.num_claimed_blocks)
                num_stopped += 1
        return num_stopped

    def _end_claims(self, sequence_id: int, table: BlockTable, end: int) -> None:
        """Claims on blocks before `end` that are not published."""
        if table.num_published_blocks < table.num_claimed_blocks:
            keys = table.chain.keys[table.num_published_blocks : min(end, table.num_claimed_blocks)]
            self.flights.end(sequence_id, keys)

    def generations(self, table: BlockTable) -> tuple[int, ...]:
        generations = self._blocks.generations
        return tuple([generations[block_id] for block_id in table.block_ids])
