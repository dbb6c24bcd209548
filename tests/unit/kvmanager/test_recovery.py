"""A scheduler comes back to its pool: over a new link, or after the manager that kept it has died."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.common.block_hash import digest_of
from octavo.common.errors import ProtocolError
from octavo.common.messages.kv import (
    Admission,
    DeclaredTable,
    DeclarePool,
    KvReply,
    KvRequest,
    OpenPool,
    Publication,
    Release,
)
from octavo.kvmanager.block_state import BlockState
from octavo.kvmanager.catalogue import CatalogueFolder
from octavo.kvmanager.ledger import violations
from octavo.kvmanager.pool import Pool, PoolSettings
from octavo.kvmanager.replies import MAX_KEPT_REPLIES, ReplyLog
from octavo.kvmanager.stats import KvStats
from support.pools import tokens

NUM_BLOCKS, BLOCK_SIZE = 8, 16
OPENING = OpenPool("group-0", epoch=1, incarnation=7, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
FINGERPRINT = bytes(32)

NewPool = Callable[[], Pool]


@pytest.fixture
def restarted(tmp_path: Path) -> NewPool:
    """Each call is a new KV manager, which opens the same pool of the same folder."""
    folders: list[CatalogueFolder] = []

    def new_pool() -> Pool:
        for folder in folders:
            folder.close()
        folders.append(CatalogueFolder(tmp_path))
        return Pool(OPENING, PoolSettings(), KvStats(), folders[-1].open(OPENING, FINGERPRINT))

    return new_pool


def table(sequence_id: int, token_ids: tuple[int, ...], *blocks: tuple[int, int], computed: int = 0) -> DeclaredTable:
    return DeclaredTable(
        sequence_id,
        token_ids,
        computed,
        tuple(block_id for block_id, _ in blocks),
        tuple(generation for _, generation in blocks),
    )


def declare(pool: Pool, *tables: DeclaredTable, launched: int = 0, acknowledged: int = 0, **more: object) -> None:
    pool.declare(
        DeclarePool(
            tables=list(tables),
            credits=more.get("credits", []),  # type: ignore[arg-type]
            launched_step=launched,
            acknowledged_step=acknowledged,
            recycled=more.get("recycled", []),  # type: ignore[arg-type]
            highest_generation=more.get("highest", 0),  # type: ignore[arg-type]
        )
    )
    assert violations(pool) == []


def hit_tokens(pool: Pool, token_ids: tuple[int, ...]) -> int:
    """How many tokens of a new sequence are found."""
    number, step = pool.last_message_no + 1, pool.blocks.quarantine.acknowledged_step
    reply = pool.apply(KvRequest(number, step, admissions=[Admission(99, token_ids)]))
    pool.apply(KvRequest(number + 1, step, releases=[Release(99, 0)]))
    return reply.admitted[0].num_cached_tokens


def states(pool: Pool, state: BlockState) -> set[int]:
    return {block_id for block_id, has in enumerate(pool.blocks.states) if has is state}


def test_declared_blocks_are_held_and_all_others_wait_for_the_last_step_launched() -> None:
    pool = Pool(OPENING, PoolSettings())
    first = table(1, tokens(0, 40), (0, 5), (1, 5), (2, 9), computed=40)
    child = table(2, tokens(0, 33), (0, 5), (1, 5), (4, 1), computed=33)
    declare(pool, first, child, launched=12, acknowledged=10, credits=[(6, 3)], highest=9)
    assert [pool.blocks.ref_counts[block_id] for block_id in (0, 1, 2, 4)] == [2, 2, 1, 1]
    assert pool.blocks.granted == {6}
    assert states(pool, BlockState.QUARANTINED) == {3, 5, 7}
    pool.apply(KvRequest(1, 12))
    assert states(pool, BlockState.FREE) == {3, 5, 7}
    assert violations(pool) == []


def test_computed_blocks_of_declared_tables_are_found() -> None:
    pool = Pool(OPENING, PoolSettings())
    declare(pool, table(1, tokens(0, 40), (0, 1), (1, 1), (2, 1), computed=20))
    assert hit_tokens(pool, tokens(0, 40)) == 16


def test_declared_sequence_grows_publishes_and_ends_as_before() -> None:
    pool = Pool(OPENING, PoolSettings())
    declare(pool, table(1, tokens(0, 17), (0, 1), (1, 1), computed=17), credits=[(5, 2)])
    pool.apply(
        KvRequest(1, 0, spent=[(1, 5)], publications=[Publication(1, 33, tokens(17, 32))], releases=[Release(1, 0)])
    )
    assert violations(pool) == []
    assert hit_tokens(pool, tokens(0, 40)) == 32


def test_no_block_falls_behind_what_the_worker_has_seen() -> None:
    """Without a catalogue the blocks that were not declared begin above the highest generation there was."""
    pool = Pool(OPENING, PoolSettings())
    declare(pool, table(1, tokens(0, 10), (0, 3)), highest=41)
    reply = pool.apply(KvRequest(1, 0, admissions=[Admission(2, tokens(50, 60))], credit_target=2))
    assert reply.admitted[0].generations == (42,)
    assert [generation for _, generation in reply.credits] == [42, 42]
    assert pool.blocks.generations[0] == 3


def test_cached_prefix_outlives_its_manager(restarted: NewPool) -> None:
    old = restarted()
    old.apply(KvRequest(1, 0, admissions=[Admission(1, tokens(0, 40))]))
    old.apply(KvRequest(2, 0, publications=[Publication(1, 40)], releases=[Release(1, 0)]))
    old.write_catalogue()
    new = restarted()
    declare(new, launched=3, acknowledged=3)
    assert hit_tokens(new, tokens(0, 40)) == 32
    assert violations(new) == []


def test_blocks_that_got_a_new_owner_are_not_found_as_what_they_were(restarted: NewPool) -> None:
    """All eight blocks are cached, then one is granted anew and one is recycled by the scheduler."""
    old = restarted()
    old.apply(KvRequest(1, 0, admissions=[Admission(1, tokens(0, 128))]))
    old.apply(KvRequest(2, 0, publications=[Publication(1, 128)], releases=[Release(1, 0)]))
    [(granted, generation)] = old.apply(KvRequest(3, 0, credit_target=1)).credits
    old.write_catalogue()
    new = restarted()
    declare(new, credits=[(granted, generation)], recycled=[(3, 2)])
    assert new.blocks.keys[granted] is None and new.blocks.keys[3] is None
    assert (new.blocks.generations[granted], new.blocks.generations[3]) == (2, 2)
    assert len(states(new, BlockState.CACHED)) == 6


def test_generations_go_on_from_the_catalogue(restarted: NewPool) -> None:
    old = restarted()
    [(block_id, first)] = old.apply(KvRequest(1, 0, credit_target=1)).credits
    old.write_catalogue()
    new = restarted()
    declare(new)
    given = dict(new.apply(KvRequest(1, 0, credit_target=8)).credits)
    assert given[block_id] == first + 1


def test_catalogue_of_another_life_or_with_torn_records_is_not_believed(tmp_path: Path) -> None:
    folder = CatalogueFolder(tmp_path)
    old = Pool(OPENING, PoolSettings(), KvStats(), folder.open(OPENING, FINGERPRINT))
    old.apply(KvRequest(1, 0, admissions=[Admission(1, tokens(0, 40))]))
    old.apply(KvRequest(2, 0, publications=[Publication(1, 40)], releases=[Release(1, 0)]))
    old.write_catalogue()
    [path] = tmp_path.glob("*.catalogue")
    content = bytearray(path.read_bytes())
    place = content.index(digest_of(old.blocks.keys[0]))
    content[place] ^= 1
    path.write_bytes(content)
    folder.close()

    folder = CatalogueFolder(tmp_path)
    torn = Pool(OPENING, PoolSettings(), KvStats(), folder.open(OPENING, FINGERPRINT))
    declare(torn)
    assert hit_tokens(torn, tokens(0, 40)) == 0
    for opening, fingerprint in [
        (OpenPool("group-0", 1, 8, NUM_BLOCKS, BLOCK_SIZE), FINGERPRINT),
        (OPENING, bytes(31) + b"x"),
    ]:
        catalogue = folder.open(opening, fingerprint)
        assert catalogue is not None
        assert not catalogue.is_restored
        assert set(catalogue.generations) == {0}
    folder.close()


def test_catalogue_belongs_to_one_process_at_a_time(tmp_path: Path) -> None:
    holder, other = CatalogueFolder(tmp_path), CatalogueFolder(tmp_path)
    assert holder.open(OPENING, FINGERPRINT) is not None
    assert other.open(OPENING, FINGERPRINT) is None
    holder.close()
    assert other.open(OPENING, FINGERPRINT) is not None
    other.close()


@pytest.mark.parametrize(
    "declaration",
    [
        DeclarePool([table(1, tokens(0, 16), (8, 1))], [], 0, 0),
        DeclarePool([table(1, tokens(0, 16), (0, 1)), table(2, tokens(0, 16), (0, 2))], [], 0, 0),
        DeclarePool([table(1, tokens(0, 16), (0, 1)), table(1, tokens(0, 16), (1, 1))], [], 0, 0),
        DeclarePool([table(1, tokens(0, 32), (0, 1), (0, 1))], [], 0, 0),
        DeclarePool([table(1, tokens(0, 32), (0, 1))], [], 0, 0),
        DeclarePool([table(1, tokens(0, 16), (0, 1), computed=17)], [], 0, 0),
        DeclarePool([table(1, tokens(0, 16), (0, 1))], [(0, 1)], 0, 0),
        DeclarePool([], [(0, 1), (0, 1)], 0, 0),
    ],
)
def test_declaration_that_makes_no_sense_is_refused(declaration: DeclarePool) -> None:
    with pytest.raises(ProtocolError):
        Pool(OPENING, PoolSettings()).declare(declaration)


def test_pool_is_declared_before_its_first_message_and_once() -> None:
    pool = Pool(OPENING, PoolSettings())
    declare(pool)
    with pytest.raises(ProtocolError):
        declare(pool)
    driven = Pool(OPENING, PoolSettings())
    driven.apply(KvRequest(1, 0))
    with pytest.raises(ProtocolError):
        declare(driven)


def test_replies_are_kept_until_acknowledged_and_so_many_at_most() -> None:
    pool, log = Pool(OPENING, PoolSettings()), ReplyLog()
    replies: list[KvReply] = []
    for number in range(1, MAX_KEPT_REPLIES + 6):
        replies.append(pool.apply(KvRequest(number, 0)))
        log.keep(replies[-1])
        if number == 4:
            assert log.after(1) == replies[1:]
            log.acknowledge(2)
            assert log.after(1) is None
            assert log.find(2) is None and log.find(3) == replies[2]
    assert log.after(4) is None
    assert log.after(5) == replies[5:]
