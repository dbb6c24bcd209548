"""What blocks cost: to copy them to host memory and back, or to compute them again."""

from __future__ import annotations

from octavo.common.messages.step import StepResult

_WEIGHT = 0.1
"""Of the newest measurement."""
_MIN_PREFILL_TOKENS = 16
"""Steps with fewer say more of decodes than of prompts."""
INITIAL_PREFILL_TOKENS_PER_S = 10_000.0
INITIAL_BLOCKS_PER_S = 500.0


class PreemptionCost:
    """Seconds of worker time, from rates that step results tell.

    The first measurement of a rate replaces the guess that it begins with, later ones count for a tenth.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.prefill_tokens_per_s = INITIAL_PREFILL_TOKENS_PER_S
        self.blocks_per_s = INITIAL_BLOCKS_PER_S
        self.knows_link = False
        """A copy has been measured."""
        self.knows_prefill = False
        """A step of prompts has been measured."""

    def on_step(self, result: StepResult, num_prefill_tokens: int, num_tokens: int, num_copied_blocks: int) -> None:
        """A step computed `num_tokens`, of which `num_prefill_tokens` are of prompts, and copies of blocks ended."""
        copy_s = result.transfer_us * 1e-6
        if num_copied_blocks and copy_s > 0:
            weight = _WEIGHT if self.knows_link else 1.0
            self.blocks_per_s += weight * (num_copied_blocks / copy_s - self.blocks_per_s)
            self.knows_link = True
        compute_s = result.compute_us * 1e-6
        if num_prefill_tokens >= max(_MIN_PREFILL_TOKENS, num_tokens // 2) and compute_s > 0:
            weight = _WEIGHT if self.knows_prefill else 1.0
            self.prefill_tokens_per_s += weight * (num_tokens / compute_s - self.prefill_tokens_per_s)
            self.knows_prefill = True

    @property
    def copy_s(self) -> float:
        """Of one block, one way."""
        return 1 / self.blocks_per_s

    @property
    def compute_s(self) -> float:
        """Of the tokens of one block, in a prompt."""
        return self._block_size / self.prefill_tokens_per_s

    @property
    def host_is_slower(self) -> bool:
        """It has been measured that a block is computed in less time than it is copied."""
        return self.knows_link and self.knows_prefill and self.compute_s < self.copy_s

    def of_recompute(self, num_computed_tokens: int) -> float:
        """To compute so many positions again."""
        return num_computed_tokens / self.prefill_tokens_per_s

    def of_swap(self, num_blocks: int) -> float:
        """To copy so many blocks out and in again."""
        return 2 * num_blocks / self.blocks_per_s
