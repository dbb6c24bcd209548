"""A worker without tensors: it keeps the token of every slot, and samples from what it reads through the block table.

The next token is a function of all tokens that a row can see, so a wrong block, a missed copy, or a write into somebody
else's block changes the answer.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from octavo.common.errors import StaleBlockError
from octavo.common.messages.generation import TokenLogprobs
from octavo.common.messages.kv import Transfer, TransferDirection
from octavo.common.messages.step import OpenSlot, RowFlag, StepPlan, StepRefused, StepResult

UNWRITTEN = -7


def next_token(token_ids: Sequence[int], seed: int, temperature: float, vocab_size: int) -> int:
    """What this worker samples after `token_ids`; greedy does not look at the seed."""
    salt = seed % 2**32 if temperature > 0 else 0
    return zlib.crc32(array("i", token_ids).tobytes(), salt) % vocab_size


def expected_output(
    prompt: Sequence[int], num_tokens: int, vocab_size: int, seed: int = 0, temperature: float = 0.0
) -> list[int]:
    """The answer of an idle worker."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids, seed, temperature, vocab_size))
    return token_ids[len(prompt) :]


def likeliest_tokens(token_ids: Sequence[int], count: int, vocab_size: int) -> TokenLogprobs:
    """The log-probabilities after `token_ids`: of all tokens different, and of tokens near 0 a little larger."""
    base = zlib.crc32(array("i", token_ids).tobytes())
    logprobs = {
        token: -0.01 * token - zlib.crc32(array("I", [token]).tobytes(), base) / 2**31 for token in range(vocab_size)
    }
    best = sorted(logprobs, key=lambda token: -logprobs[token])[:count]
    return TokenLogprobs(logprobs[best[0]] if best else 0.0, tuple(best), tuple(logprobs[token] for token in best))


@dataclass
class _Slot:
    opened: OpenSlot
    table: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    last_sample: int = UNWRITTEN


@dataclass
class _Copy:
    """A transfer that has begun. What it reads is kept, and compared at its end: nobody may have written to it."""

    transfer: Transfer
    contents: list[list[int]]


class ScriptedWorker:
    """Runs plans at once, and checks that every plan keeps the contract.

    Transfers end at a later step, drawn from `chance`; their targets hold garbage until then.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        vocab_size: int,
        num_host_blocks: int = 0,
        chance: Random | None = None,
    ) -> None:
        self.num_transferred_blocks = {TransferDirection.TO_HOST: 0, TransferDirection.TO_DEVICE: 0}
        self._host_memory = [[UNWRITTEN] * block_size for _ in range(num_host_blocks)]
        self._copies: dict[int, _Copy] = {}
        self.stalled: set[TransferDirection] = set()
        """Copies this way do not end."""
        self.block_copy_us = 20
        """What it tells that a copy took. Every step takes 1,000."""
        self._chance = chance or Random(0)
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.num_rows = 0
        self.num_grouped_rows = 0
        self.largest_step = 0
        self._memory = [[UNWRITTEN] * block_size for _ in range(num_blocks)]
        self._generations = [0] * num_blocks
        self._slots: list[_Slot | None] = [None] * max_num_seqs
        self._last_step = 0

    def run(self, plan: StepPlan) -> StepResult:
        assert plan.step_id == self._last_step + 1, f"step {plan.step_id} after {self._last_step}"
        self._last_step = plan.step_id
        for slot in plan.closed_slots:
            assert self._slots[slot] is not None, f"slot {slot} is closed twice"
            self._slots[slot] = None
        for opened in plan.opened_slots:
            assert self._slots[opened.slot] is None, f"slot {opened.slot} is opened twice"
            self._slots[opened.slot] = _Slot(opened)
        old_generations = self._generations[:]
        before = list(self._generations) if plan.copies else []
        renewed = self._apply_deltas(plan)
        for transfer in plan.transfers:
            if transfer.direction is TransferDirection.TO_HOST:
                self._begin_to_host(transfer, old_generations)
        for copy in plan.copies:
            assert copy.source_generation == before[copy.source_id], f"copy of an old block {copy.source_id}"
            assert copy.target_generation >= self._generations[copy.target_id], f"copy to old block {copy.target_id}"
            before[copy.target_id] = self._generations[copy.target_id] = copy.target_generation
            self._memory[copy.target_id] = list(self._memory[copy.source_id])
        for block_id in renewed - {copy.target_id for copy in plan.copies}:
            self._memory[block_id] = [UNWRITTEN] * self.block_size
        for transfer in plan.transfers:
            if transfer.direction is TransferDirection.TO_DEVICE:
                self._begin_to_device(transfer)
        finished = [
            transfer_id
            for transfer_id, copy in self._copies.items()
            if copy.transfer.direction not in self.stalled and (not plan.slots or self._chance.random() < 0.4)
        ]
        num_copied = sum(self._end(transfer_id) for transfer_id in finished)
        self._check_groups(plan)
        token_ids, logprobs = self._run_rows(plan)
        return StepResult(
            plan.step_id, token_ids, logprobs, 1000, 0, finished, transfer_us=self.block_copy_us * num_copied
        )

    def _begin_to_host(self, transfer: Transfer, generations: list[int]) -> None:
        for block_id, generation in zip(transfer.device_ids, transfer.generations, strict=True):
            assert generation >= generations[block_id], f"block {block_id} of an old generation goes to the host"
        self._begin(transfer, transfer.host_ids)
        self._copies[transfer.transfer_id] = _Copy(transfer, [list(self._memory[b]) for b in transfer.device_ids])

    def _begin_to_device(self, transfer: Transfer) -> None:
        for block_id, generation in zip(transfer.device_ids, transfer.generations, strict=True):
            assert generation >= self._generations[block_id], f"block {block_id} of an old generation is filled"
            holders = [s for s in self._slots if s is not None and block_id in s.table]
            assert not holders, f"block {block_id} is filled while a live slot lists it"
            self._generations[block_id] = generation
            self._memory[block_id] = [UNWRITTEN] * self.block_size
        self._begin(transfer, transfer.host_ids)
        self._copies[transfer.transfer_id] = _Copy(transfer, [list(self._host_memory[h]) for h in transfer.host_ids])

    def _begin(self, transfer: Transfer, host_ids: tuple[int, ...]) -> None:
        to_host = transfer.direction is TransferDirection.TO_HOST
        for other in self._copies.values():
            if to_host or other.transfer.direction is TransferDirection.TO_HOST:
                assert not set(host_ids) & set(other.transfer.host_ids), "a host block in two transfers"
            if other.transfer.direction is TransferDirection.TO_DEVICE:
                assert not set(transfer.device_ids) & set(other.transfer.device_ids), "a block is filled twice"
        assert transfer.transfer_id not in self._copies
        self.num_transferred_blocks[transfer.direction] += len(host_ids)

    def _end(self, transfer_id: int) -> int:
        copy = self._copies.pop(transfer_id)
        transfer = copy.transfer
        generations = dict(zip(transfer.device_ids, transfer.generations, strict=True))
        for block_id, host_id, content in zip(transfer.device_ids, transfer.host_ids, copy.contents, strict=True):
            if transfer.direction is TransferDirection.TO_HOST:
                if generations[block_id] == self._generations[block_id]:
                    assert self._memory[block_id] == content, f"block {block_id} was overwritten while it was read"
                self._host_memory[host_id] = content
            else:
                assert self._memory[block_id] == [UNWRITTEN] * self.block_size, (
                    f"block {block_id} was written too early"
                )
                assert self._host_memory[host_id] == content, f"host block {host_id} was overwritten while it was read"
                self._memory[block_id] = list(content)
        return len(transfer.device_ids)

    def close_slots(self) -> None:
        """Every copy ends, and steps count from 1. Blocks and host memory hold what they held."""
        for transfer_id in list(self._copies):
            self._end(transfer_id)
        self._slots = [None] * len(self._slots)
        self._last_step = 0

    def content(self, block_id: int) -> list[int]:
        """The tokens of one block."""
        return self._memory[block_id]

    def host_content(self, host_id: int) -> list[int]:
        """The tokens of one block of host memory."""
        return self._host_memory[host_id]

    @property
    def generations(self) -> tuple[int, ...]:
        """Of each block the last one seen; 0 for none."""
        return tuple(self._generations)

    def refusal(self, plan: StepPlan) -> StepRefused | None:
        """The answer to a plan that names a block of an old generation, None to others. Nothing of it runs."""
        for delta in plan.table_deltas:
            for block_id, generation in zip(delta.block_ids, delta.generations, strict=True):
                if generation < self._generations[block_id]:
                    return StepRefused(plan.step_id, StaleBlockError.reason, f"block {block_id} of an old generation")
        return None

    def generation(self, block_id: int) -> int:
        """The last one seen; 0 for none."""
        return self._generations[block_id]

    def _check_groups(self, plan: StepPlan) -> None:
        """Every group names rows of this plan, each once, that share the blocks and write to none of them."""
        starts = dict(zip(plan.slots, plan.starts, strict=True))
        grouped = [slot for group in plan.groups for slot in group.slots]
        assert len(set(grouped)) == len(grouped), "a row is in two groups"
        for group in plan.groups:
            assert len(group.slots) > 1 and group.num_blocks > 0
            leading = {tuple(self._slot(slot).table[: group.num_blocks]) for slot in group.slots}
            assert len(leading) == 1 and len(leading.pop()) == group.num_blocks, "a group shares fewer blocks"
            assert all(starts[slot] >= group.num_blocks * self.block_size for slot in group.slots)
        self.num_grouped_rows += len(grouped)

    def _apply_deltas(self, plan: StepPlan) -> set[int]:
        renewed = set()
        for delta in plan.table_deltas:
            slot = self._slot(delta.slot)
            assert delta.start_index == len(slot.table), "a table delta was lost"
            for block_id, generation in zip(delta.block_ids, delta.generations, strict=True):
                assert generation >= self._generations[block_id], f"block {block_id} of an old generation"
                if generation > self._generations[block_id]:
                    holders = [s for s in self._slots if s is not None and block_id in s.table]
                    assert not holders, f"block {block_id} is reused while a live slot lists it"
                    self._generations[block_id] = generation
                    renewed.add(block_id)
                slot.table.append(block_id)
                slot.generations.append(generation)
        return renewed

    def _run_rows(self, plan: StepPlan) -> tuple[list[int], list[TokenLogprobs | None]]:
        self.num_rows += len(plan.slots)
        self.largest_step = max(self.largest_step, sum(plan.lengths))
        inputs = iter(plan.token_ids)
        written: dict[tuple[int, int], int] = {}
        rows = list(zip(plan.slots, plan.starts, plan.lengths, plan.flags, strict=True))
        assert len({slot for slot, *_ in rows}) == len(rows), "two rows of a step share a slot"
        for slot_no, start, length, flags in rows:
            slot = self._slot(slot_no)
            if flags & RowFlag.FED_BY_LAST_SAMPLE:
                assert length == 1
                token_ids = [slot.last_sample]
            else:
                token_ids = [next(inputs) for _ in range(length)]
            for position, token_id in enumerate(token_ids, start):
                block_id = slot.table[position // self.block_size]
                place = (block_id, position % self.block_size)
                assert place not in written, f"two rows write to block {block_id}"
                written[place] = slot_no
                self._memory[block_id][position % self.block_size] = token_id
        assert next(inputs, None) is None, "input tokens are left over"
        samples: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        for slot_no, start, length, flags in rows:
            slot = self._slot(slot_no)
            sampled = self._sample(slot, start + length, flags)
            samples += sampled
            count = slot.opened.num_logprobs
            found = None
            if sampled and count is not None:
                found = likeliest_tokens(self._visible(slot, start + length), count, self.vocab_size)
            logprobs += [found] * len(sampled)
        return samples, logprobs if any(logprobs) else []

    def _sample(self, slot: _Slot, num_tokens: int, flags: int) -> list[int]:
        if not flags & (RowFlag.SAMPLE | RowFlag.FAN_OUT):
            return []
        visible = self._visible(slot, num_tokens)
        seeds = slot.opened.seeds if flags & RowFlag.FAN_OUT else slot.opened.seeds[:1]
        samples = [next_token(visible, seed, slot.opened.temperature, self.vocab_size) for seed in seeds]
        slot.last_sample = samples[0]
        return samples

    def _visible(self, slot: _Slot, num_tokens: int) -> list[int]:
        return [self._memory[slot.table[p // self.block_size]][p % self.block_size] for p in range(num_tokens)]

    def _slot(self, slot: int) -> _Slot:
        opened = self._slots[slot]
        assert opened is not None, f"slot {slot} is not open"
        return opened
