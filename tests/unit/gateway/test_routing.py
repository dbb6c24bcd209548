"""Which group a prompt goes to, and what the gateway believes of pools."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.common.block_hash import BlockHasher, TokenChain, digest_of
from octavo.common.codecs.arrays import pack_int32
from octavo.common.messages.generation import SchedulerLoad
from octavo.gateway.pool_directory import PoolDirectory, PrefixMatcher
from octavo.gateway.routing import Candidate, Router

DEVICE, HOST = 1, 2
SECRET = b"of the deployment"


def candidate(matched: int = 0, num_open: int = 0, waiting: int = 0, **load: int) -> Candidate:
    full = {"max_num_running": 32, "num_blocks": 1000, "num_available_blocks": 1000, **load}
    return Candidate(SchedulerLoad(**full), matched, num_open, waiting, block_size=16)


def digests(token_ids: list[int], block_size: int = 4, salt: bytes = b"") -> list[bytes]:
    chain = TokenChain(BlockHasher(block_size, SECRET), pack_int32(token_ids), salt)
    return [digest_of(chain.key(index)) for index in range(chain.num_full_blocks)]


def directory_of(*stored: list[int], block_size: int = 4, salt: bytes = b"", max_blocks: int = 100) -> PoolDirectory:
    """A pool that stores these, whose root was told by its KV manager."""
    root = BlockHasher(block_size, SECRET).root
    directory = PoolDirectory(max_blocks)
    directory.clear(BlockHasher.of_root(block_size, "sha256", root))
    for token_ids in stored:
        for digest in digests(token_ids, block_size, salt):
            directory.store(digest, DEVICE)
    return directory


def matched(token_ids: list[int], directory: PoolDirectory, salt: bytes = b"") -> int:
    return PrefixMatcher(pack_int32(token_ids), salt).num_matched_tokens(directory)


PROMPT = list(range(100, 120))  # five blocks of 4


def test_leading_full_blocks_match_and_the_last_token_is_computed() -> None:
    assert matched(PROMPT, directory_of(PROMPT)) == 16
    assert matched([*PROMPT, 7], directory_of(PROMPT)) == 20
    assert matched(PROMPT, directory_of(PROMPT[:9])) == 8
    assert matched([*PROMPT[:8], 0, *PROMPT[9:]], directory_of(PROMPT)) == 8
    assert matched(PROMPT[:3], directory_of(PROMPT)) == 0


def test_other_salts_and_other_secrets_match_nothing() -> None:
    assert matched(PROMPT, directory_of(PROMPT, salt=b"tenant"), salt=b"tenant") == 16
    assert matched(PROMPT, directory_of(PROMPT, salt=b"tenant")) == 0
    directory = directory_of(PROMPT)
    directory.hasher = BlockHasher(4, b"another secret")
    assert matched(PROMPT, directory) == 0


def test_a_pool_that_is_not_followed_claims_nothing() -> None:
    directory = directory_of(PROMPT)
    directory.clear()
    assert matched(PROMPT, directory) == 0
    assert len(directory) == 0


def test_a_block_is_there_while_one_tier_holds_it() -> None:
    directory = directory_of(PROMPT)
    first = digests(PROMPT)[0]
    directory.store(first, HOST)
    directory.drop(first, DEVICE)
    assert matched(PROMPT, directory) == 16
    directory.drop(first, HOST)
    assert matched(PROMPT, directory) == 0
    directory.drop(first, HOST)  # told twice


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20), st.sampled_from([DEVICE, HOST])), max_size=80))
def test_a_directory_stays_within_its_bound_and_agrees_with_a_set(events: list[tuple[bool, int, int]]) -> None:
    names = [bytes([number] * 32) for number in range(21)]
    bounded, unbounded = PoolDirectory(8), PoolDirectory(1000)
    held: set[tuple[int, int]] = set()
    for is_stored, number, tier in events:
        for directory in (bounded, unbounded):
            (directory.store if is_stored else directory.drop)(names[number], tier)
        (held.add if is_stored else held.discard)((number, tier))
        assert len(bounded) <= 8
    assert [unbounded.holds(name) for name in names] == [
        any((number, tier) in held for tier in (DEVICE, HOST)) for number in range(21)
    ]
    assert all(unbounded.holds(name) for name in names if bounded.holds(name))


def test_a_prefix_draws_its_prompts_until_its_group_has_too_much_to_do() -> None:
    router = Router("prefix")
    assert router.choose(1000, [("hot", candidate(matched=960)), ("cold", candidate())]) == "hot"
    assert router.choose(1000, [("hot", candidate(matched=960, waiting=900)), ("cold", candidate())]) == "hot"
    assert router.choose(1000, [("hot", candidate(matched=960, waiting=1000)), ("cold", candidate())]) == "cold"
    busy = candidate(matched=960, num_running=32, num_waiting=4)
    assert router.choose(1000, [("hot", busy), ("cold", candidate())]) == "cold"


def test_what_the_scheduler_told_and_what_was_sent_since_are_not_counted_twice() -> None:
    told = candidate(num_waiting=2, num_waiting_tokens=500)
    assert told.cost(100) == candidate(num_open=2, waiting=500).cost(100)
    both = candidate(num_open=2, waiting=500, num_waiting=2, num_waiting_tokens=500)
    assert both.cost(100) == told.cost(100)


def test_a_group_without_blocks_is_avoided() -> None:
    router = Router("prefix")
    full, roomy = candidate(num_available_blocks=0), candidate(num_running=8)
    assert router.choose(640, [("full", full), ("roomy", roomy)]) == "roomy"


def test_equal_groups_take_turns() -> None:
    for policy in ("prefix", "least_loaded", "round_robin"):
        router = Router(policy)  # type: ignore[arg-type]
        chosen = [router.choose(50, [(name, candidate()) for name in "abc"]) for _ in range(9)]
        assert chosen == list("abc") * 3
        router.forget("a")


def test_round_robin_and_least_loaded_ask_for_no_prefix() -> None:
    groups = [("hot", candidate(matched=96, num_open=1)), ("cold", candidate())]
    assert Router("least_loaded").choose(100, groups) == "cold"
    assert [Router("round_robin").choose(100, groups) for _ in range(2)] == ["hot", "hot"]
    router = Router("round_robin")
    assert [router.choose(100, groups) for _ in range(4)] == ["hot", "cold", "hot", "cold"]


@pytest.mark.parametrize("num_groups", [2, 4])
def test_a_group_that_starts_cold_soon_has_its_share(num_groups: int) -> None:
    """One prefix, held by one group only; requests come in bursts of 64 and end between the bursts."""
    router, holders, counts = Router("prefix"), {"0"}, Counter[str]()
    for _ in range(8):
        waiting = Counter[str]()
        for _ in range(64):
            groups = [
                (
                    name,
                    candidate(
                        matched=2000 if name in holders else 0, waiting=waiting[name], num_open=waiting[name] // 100
                    ),
                )
                for name in map(str, range(num_groups))
            ]
            chosen = router.choose(2100, groups)
            waiting[chosen] += 2100 - 2000 * (chosen in holders)
            counts[chosen] += 1
        holders |= set(waiting)
    assert len(holders) == num_groups
    assert min(counts.values()) >= 0.6 * 64 * 8 / num_groups
