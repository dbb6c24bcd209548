"""Hit rates of a plain LRU and of the segmented one on traces with scans. Run: python benchmarks/eviction_trace.py

A trace mixes chats, which share system prompts and go on turn by turn, with long documents that are read once. Both
policies run the same trace on the real pool; the plain LRU is the same code with no share for protected blocks.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator

from octavo.common.messages.kv import Admission, Arrival, KvRequest, OpenPool, Publication, Release, Verdict
from octavo.kvmanager.block_pool import PROTECTED_SHARE
from octavo.kvmanager.ledger import violations
from octavo.kvmanager.pool import Pool, PoolSettings

BLOCK_SIZE = 16
NUM_BLOCKS = 4096
"""65,536 tokens."""
NUM_SYSTEM_PROMPTS = 24
NUM_CHATS = 160


class Trace:
    """Prompts as token ids, of chats and, for a share of all tokens, of scans."""

    def __init__(self, scan_share: float, seed: int) -> None:
        self._random = random.Random(seed)
        self._scan_share = scan_share
        self._next_token = 0
        self._systems = [self._fresh(self._random.randrange(400, 1600)) for _ in range(NUM_SYSTEM_PROMPTS)]
        self._chats = [self._new_chat() for _ in range(NUM_CHATS)]

    def prompts(self, num_prompts: int) -> Iterator[tuple[bool, list[int]]]:
        """(is_chat, prompt). A scan is 8,192 tokens long; chats come between until the shares are right."""
        chat_tokens = scan_tokens = 0
        for _ in range(num_prompts):
            if scan_tokens < self._scan_share * (chat_tokens + scan_tokens):
                scan_tokens += 8192
                yield False, self._fresh(8192)
                continue
            # Few chats are busy: the n-th is picked with a weight of 1 / n.
            place = min(int(NUM_CHATS ** self._random.random()), NUM_CHATS - 1)
            chat = self._chats[place]
            chat += self._fresh(self._random.randrange(20, 120))
            chat_tokens += len(chat)
            yield True, list(chat)
            if len(chat) > 3000:
                self._chats[place] = self._new_chat()

    def _new_chat(self) -> list[int]:
        return list(self._systems[min(int(NUM_SYSTEM_PROMPTS ** self._random.random()), NUM_SYSTEM_PROMPTS - 1)])

    def _fresh(self, num_tokens: int) -> list[int]:
        self._next_token += num_tokens
        return list(range(self._next_token - num_tokens, self._next_token))


def hit_rates(protected_share: float, scan_share: float, num_prompts: int, seed: int) -> tuple[float, float]:
    """Of the tokens of chats, and of all tokens, after a first quarter that fills the pool."""
    settings = PoolSettings(protected_share=protected_share)
    pool = Pool(OpenPool("group-0", 1, 1, NUM_BLOCKS, BLOCK_SIZE), settings)
    asked = {True: 0, False: 0}
    hit = {True: 0, False: 0}
    for number, (is_chat, prompt) in enumerate(Trace(scan_share, seed).prompts(num_prompts)):
        arrival = Arrival(number + 1, prompt)
        pool.apply(KvRequest(3 * number + 1, 0, arrivals=[arrival]))
        while pool.hash_slice():
            pass
        [answer] = pool.apply(KvRequest(3 * number + 2, 0, admissions=[Admission(number + 1)])).admitted
        assert answer.verdict is Verdict.OK
        pool.apply(
            KvRequest(
                3 * number + 3,
                0,
                publications=[Publication(number + 1, len(prompt))],
                releases=[Release(number + 1, 0)],
            )
        )
        if number > num_prompts // 4:
            asked[is_chat] += len(prompt)
            hit[is_chat] += answer.num_cached_tokens
    assert violations(pool) == []
    return hit[True] / asked[True], sum(hit.values()) / sum(asked.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print(f"{NUM_BLOCKS:,} blocks of {BLOCK_SIZE} tokens, {arguments.prompts:,} prompts, seed {arguments.seed}\n")
    print("| tokens of scans | chats, plain LRU | chats, segmented | all tokens, plain LRU | all tokens, segmented |")
    print("|---:|---:|---:|---:|---:|")
    for scan_share in (0.0, 0.2, 0.4, 0.6, 0.8):
        plain, segmented = (
            hit_rates(share, scan_share, arguments.prompts, arguments.seed) for share in (0.0, PROTECTED_SHARE)
        )
        cells = (plain[0], segmented[0], plain[1], segmented[1])
        print(f"| {scan_share:.0%} | " + " | ".join(f"{rate:.1%}" for rate in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
