"""A scheduler's messages to one pool that is full of cached content: every allocation evicts."""

from __future__ import annotations

import time
from array import array

from octavo.common.codecs.kv import KV_STEPS
from octavo.common.messages.kv import Admission, Arrival, KvReply, KvRequest, OpenPool, Publication, Release
from octavo.kvmanager.pool import Pool, PoolSettings

BLOCK_SIZE = 16
PROMPT_LEN = 32
"""Of the sequences that decode: 1,024 of them fit the smallest pool."""
NEW_PROMPT_LEN = 200
SCRATCH_ID = 10**9
"""The sequence that single prompts are measured with."""


class Load:
    """A scheduler whose decodes are spread evenly over the positions of a block.

    Tokens of a prompt are those of a counter, so that no two prompts share a block unless they are meant to.
    """

    def __init__(self, num_blocks: int, num_sequences: int, settings: PoolSettings | None = None) -> None:
        self.num_blocks = num_blocks
        self.pool = Pool(OpenPool("group-0", 1, 1, num_blocks, BLOCK_SIZE), settings or PoolSettings())
        self._credit_target = 2 * num_sequences
        self._message_no = 0
        self._step = 0
        self._next_token = 0
        self._next_id = num_sequences
        self._credits: list[int] = []
        self._lengths: dict[int, int] = {}
        self._told: dict[int, int] = {}

    def apply(self, **fields: object) -> tuple[float, KvReply]:
        """Send one message. Returns the seconds that `apply` took, and the reply."""
        self._message_no += 1
        request = KvRequest(self._message_no, self._step, **fields)  # type: ignore[arg-type]
        start = time.perf_counter()
        reply = self.pool.apply(request)
        seconds = time.perf_counter() - start
        self._credits += [block_id for block_id, _ in reply.credits]
        return seconds, reply

    def fresh(self, num_tokens: int) -> array[int]:
        """Token ids that no sequence had before."""
        self._next_token = (self._next_token + num_tokens) % 2**30
        return array("i", range(self._next_token, self._next_token + num_tokens))

    def fill_cache(self) -> None:
        """Every block cached, with a key."""
        for first in range(0, self.num_blocks, 512):
            num_tokens = min(512, self.num_blocks - first) * BLOCK_SIZE
            self.apply(arrivals=[Arrival(SCRATCH_ID, self.fresh(num_tokens))])
            while self.pool.hash_slice():
                pass
            self.apply(admissions=[Admission(SCRATCH_ID)])
            self.apply(publications=[Publication(SCRATCH_ID, num_tokens)], releases=[Release(SCRATCH_ID, 0)])

    def start_decoding(self, num_sequences: int) -> None:
        for sequence_id in range(num_sequences):
            length = PROMPT_LEN + sequence_id % BLOCK_SIZE
            admission = Admission(sequence_id, tuple(self.fresh(length)))
            self.apply(admissions=[admission], credit_target=self._credit_target)
            self._lengths[sequence_id] = self._told[sequence_id] = length

    def restart_decoding(self) -> None:
        """The sequences end, and as many new ones begin."""
        number = len(self._lengths)
        self.apply(
            releases=[Release(sequence_id, self._step) for sequence_id in self._lengths],
            credit_target=self._credit_target,
        )
        self.start_decoding(number)

    def decode_request(self) -> KvRequest:
        """One step's message: one token for each sequence; a sixteenth of them fill a block, a sixteenth begin one."""
        self._step += 1
        spent, publications = [], []
        for sequence_id in self._lengths:
            self._lengths[sequence_id] += 1
            length = self._lengths[sequence_id]
            if length % BLOCK_SIZE == 1:
                spent.append((sequence_id, self._credits.pop()))
            if length % BLOCK_SIZE == 0:
                new_token_ids = tuple(self.fresh(length - self._told[sequence_id]))
                publications.append(Publication(sequence_id, length, new_token_ids))
                self._told[sequence_id] = length
        return KvRequest(0, self._step, spent, publications, credit_target=self._credit_target)

    def decode(self) -> float:
        step = self.decode_request()
        return self.apply(spent=step.spent, publications=step.publications, credit_target=step.credit_target)[0]

    def decode_with_turnover(self) -> float:
        """A step in which one sequence ends and a new prompt of 200 tokens comes."""
        step = self.decode_request()
        [gone, *_] = self._lengths
        del self._lengths[gone], self._told[gone]
        self._next_id += 1
        self._lengths[self._next_id] = self._told[self._next_id] = NEW_PROMPT_LEN
        seconds, _ = self.apply(
            spent=step.spent,
            publications=step.publications,
            releases=[Release(gone, self._step + 1)],
            arrivals=[Arrival(self._next_id, self.fresh(NEW_PROMPT_LEN))],
            admissions=[Admission(self._next_id)],
            credit_target=step.credit_target,
        )
        return seconds

    def prompt(self, token_ids: array[int]) -> dict[str, float]:
        """Seconds of each part of a prompt's way in: its arrival, the slices of its hashing, its admission; then its
        publication and its release."""
        arrival, _ = self.apply(arrivals=[Arrival(SCRATCH_ID, token_ids)], credit_target=self._credit_target)
        slices = []
        has_more = True
        while has_more:
            start = time.perf_counter()
            has_more = self.pool.hash_slice()
            slices.append(time.perf_counter() - start)
        admission, _ = self.apply(admissions=[Admission(SCRATCH_ID)], credit_target=self._credit_target)
        publication, _ = self.apply(
            publications=[Publication(SCRATCH_ID, len(token_ids))], credit_target=self._credit_target
        )
        release, _ = self.apply(releases=[Release(SCRATCH_ID, self._step)], credit_target=self._credit_target)
        return {
            "arrival": arrival,
            "hashing, longest slice": max(slices),
            "hashing": sum(slices),
            "admission": admission,
            "publication": publication,
            "release": release,
            "in all": arrival + sum(slices) + admission,
        }

    def encode_and_decode(self) -> float:
        """The codec's share of one decode message and its answer, on both sides."""
        step = self.decode_request()
        self._message_no += 1
        request = KvRequest(
            self._message_no, self._step, step.spent, step.publications, credit_target=self._credit_target
        )
        start = time.perf_counter()
        KV_STEPS.decode_client(KV_STEPS.encode_client(request))
        seconds = time.perf_counter() - start
        reply = self.pool.apply(request)
        start = time.perf_counter()
        KV_STEPS.decode_server(KV_STEPS.encode_server(reply))
        self._credits += [block_id for block_id, _ in reply.credits]
        return seconds + time.perf_counter() - start
