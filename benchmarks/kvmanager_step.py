"""What the KV manager's core costs a message, without any transport. Run: python benchmarks/kvmanager_step.py

The pool has 55,712 blocks of 16 tokens (Llama-3.1-8B on one H200), full of cached content: every allocation evicts.
"""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections.abc import Callable, Iterator

from octavo.common.codecs.kv import KV_STEPS
from octavo.common.messages.kv import Admission, KvRequest, OpenPool, Publication, Release
from octavo.kvmanager.ledger import violations
from octavo.kvmanager.pool import Pool, PoolSettings

NUM_BLOCKS = 55_712
BLOCK_SIZE = 16
NUM_SEQUENCES = 256
PROMPT_LEN = 200


class Load:
    """A scheduler of 256 sequences whose decodes are spread evenly over the positions of a block."""

    def __init__(self) -> None:
        self.pool = Pool(OpenPool("group-0", 1, 1, NUM_BLOCKS, BLOCK_SIZE), PoolSettings())
        self._message_no = 0
        self._step = 0
        self._next_token = 0
        self._next_id = NUM_SEQUENCES
        self._credits: list[int] = []
        self._lengths: dict[int, int] = {}
        self._told: dict[int, int] = {}

    def apply(self, **fields: object) -> float:
        """Send one message. Returns the seconds that `apply` took."""
        self._message_no += 1
        request = KvRequest(self._message_no, self._step, **fields)  # type: ignore[arg-type]
        start = time.perf_counter()
        reply = self.pool.apply(request)
        seconds = time.perf_counter() - start
        self._credits += [block_id for block_id, _ in reply.credits]
        return seconds

    def fill_cache(self) -> None:
        for first in range(0, NUM_BLOCKS, 464):
            num_tokens = min(464, NUM_BLOCKS - first) * BLOCK_SIZE
            self.apply(admissions=[Admission(-1, self.fresh(num_tokens))])
            self.apply(publications=[Publication(-1, num_tokens)], releases=[Release(-1, 0)])

    def fresh(self, num_tokens: int) -> tuple[int, ...]:
        """Token ids that no sequence had before."""
        self._next_token += num_tokens
        return tuple(range(self._next_token, self._next_token + num_tokens))

    def start_decoding(self) -> None:
        for sequence_id in range(NUM_SEQUENCES):
            length = PROMPT_LEN + sequence_id % BLOCK_SIZE
            self.apply(admissions=[Admission(sequence_id, self.fresh(length))], credit_target=2 * NUM_SEQUENCES)
            self._lengths[sequence_id] = self._told[sequence_id] = length

    def decode_step(self, sequences: Iterator[int]) -> KvRequest:
        """The fields of one step's message: one token for each sequence, 16 blocks filled, 16 begun."""
        self._step += 1
        spent, publications = [], []
        for sequence_id in sequences:
            self._lengths[sequence_id] += 1
            length = self._lengths[sequence_id]
            if length % BLOCK_SIZE == 1:
                spent.append((sequence_id, self._credits.pop()))
            if length % BLOCK_SIZE == 0:
                new_token_ids = self.fresh(length - self._told[sequence_id])
                publications.append(Publication(sequence_id, length, new_token_ids))
                self._told[sequence_id] = length
        return KvRequest(0, self._step, spent, publications, credit_target=2 * NUM_SEQUENCES)

    def decode(self) -> float:
        step = self.decode_step(iter(list(self._lengths)))
        return self.apply(spent=step.spent, publications=step.publications, credit_target=step.credit_target)

    def decode_with_turnover(self) -> float:
        """A step in which one sequence ends and a new prompt of 200 tokens comes."""
        step = self.decode_step(iter(list(self._lengths)))
        [gone, *_] = self._lengths
        del self._lengths[gone], self._told[gone]
        self._next_id += 1
        self._lengths[self._next_id] = self._told[self._next_id] = PROMPT_LEN
        return self.apply(
            spent=step.spent,
            publications=step.publications,
            releases=[Release(gone, self._step + 1)],
            admissions=[Admission(self._next_id, self.fresh(PROMPT_LEN))],
            credit_target=step.credit_target,
        )

    def admit_cold(self, num_tokens: int) -> float:
        """Admission and publication of a prompt of which nothing is cached; it is gone afterwards."""
        seconds = self.apply(admissions=[Admission(-1, self.fresh(num_tokens))])
        seconds += self.apply(publications=[Publication(-1, num_tokens)])
        self.apply(releases=[Release(-1, self._step)])
        return seconds

    def admit_hot(self, token_ids: tuple[int, ...]) -> float:
        seconds = self.apply(admissions=[Admission(-1, token_ids)])
        self.apply(publications=[Publication(-1, len(token_ids))], releases=[Release(-1, self._step)])
        return seconds

    def release(self, num_tokens: int) -> float:
        self.apply(admissions=[Admission(-1, self.fresh(num_tokens))])
        return self.apply(releases=[Release(-1, self._step)])

    def check_ledger(self) -> float:
        start = time.perf_counter()
        assert violations(self.pool) == []
        return time.perf_counter() - start

    def encode_and_decode(self) -> float:
        """The codec's share of one decode message and its answer, on both sides."""
        step = self.decode_step(iter(list(self._lengths)))
        self._message_no += 1
        request = KvRequest(self._message_no, self._step, step.spent, step.publications, credit_target=512)
        start = time.perf_counter()
        KV_STEPS.decode_client(KV_STEPS.encode_client(request))
        seconds = time.perf_counter() - start
        reply = self.pool.apply(request)
        start = time.perf_counter()
        KV_STEPS.decode_server(KV_STEPS.encode_server(reply))
        self._credits += [block_id for block_id, _ in reply.credits]
        return seconds + time.perf_counter() - start


def row(name: str, measure: Callable[[], float], times: int) -> None:
    micros = sorted(measure() * 1e6 for _ in range(times))
    p99 = micros[min(times - 1, times * 99 // 100)]
    print(f"| {name:<52} | {statistics.median(micros):>8.0f} | {p99:>8.0f} | {times:>5} |")


def main() -> None:
    load = Load()
    load.fill_cache()
    load.start_decoding()
    gc.collect()
    gc.freeze()
    shared = load.fresh(4096)
    load.admit_hot(shared)
    print(f"{platform.machine()}, Python {platform.python_version()}, {NUM_BLOCKS} blocks, {NUM_SEQUENCES} sequences\n")
    print(f"| {'message':<52} | {'p50 µs':>8} | {'p99 µs':>8} | {'runs':>5} |")
    print(f"|{'-' * 54}|{'-' * 9}:|{'-' * 9}:|{'-' * 6}:|")
    row("decode step: 16 spent, 16 published, 16 granted", load.decode, 500)
    row("the same, encoded and decoded, with the answer", load.encode_and_decode, 300)
    row("decode step, one end and one new prompt of 200", load.decode_with_turnover, 200)
    row("admit and publish 4,096 tokens, nothing cached", lambda: load.admit_cold(4096), 100)
    row("admit 4,096 tokens, all but the last block cached", lambda: load.admit_hot(shared), 100)
    row("release of 256 blocks", lambda: load.release(4096), 100)
    row("ledger check", load.check_ledger, 10)


if __name__ == "__main__":
    main()
