"""Copies whole blocks within the pool."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

WORDS_PER_PROGRAM = 8192


@triton.jit
def _copy_blocks_kernel(
    pool_ptr,  # int32 [num_blocks, block_words]
    source_ids_ptr,  # int32 [num_copies]
    target_ids_ptr,  # int32 [num_copies]
    block_words,
    BLOCK: tl.constexpr,
):
    """Grid: (num_copies, parts of a block)."""
    copy = tl.program_id(0)
    source = tl.load(source_ids_ptr + copy).to(tl.int64) * block_words  # passes 2**31 in large pools
    target = tl.load(target_ids_ptr + copy).to(tl.int64) * block_words
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < block_words
    tl.store(pool_ptr + target + word, tl.load(pool_ptr + source + word, mask=inside), mask=inside)


def copy_blocks(pool_words: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """Copy block `source_ids[i]` to `target_ids[i]`, all at once: no target may be a source or twice a target.

    `pool_words` is the pool seen as int32 [num_blocks, block_words].
    """
    block_words = pool_words.shape[1]
    grid = (len(source_ids), triton.cdiv(block_words, WORDS_PER_PROGRAM))
    _copy_blocks_kernel[grid](pool_words, source_ids, target_ids, block_words, BLOCK=WORDS_PER_PROGRAM, num_warps=8)
