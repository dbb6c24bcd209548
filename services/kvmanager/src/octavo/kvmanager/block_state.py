"""Where a KV block can be."""

from __future__ import annotations

import enum


class BlockState(enum.IntEnum):
    """What a block is to its pool.

    free         in no table, no key                   handed out first, most recently freed first
    granted      a credit of the scheduler, no key     becomes active when spent, free when returned
    active       ref_count >= 1                        never handed out
    cached       ref_count == 0, has a key             handed out last, see SegmentedLru
    quarantined  ref_count == 0, fence not yet open    never handed out; found by its key if it has one
    transferring source (ref_count == 0) or target of  never handed out, never found
                 a copy from or to the host
    """

    FREE = 0
    GRANTED = 1
    ACTIVE = 2
    CACHED = 3
    QUARANTINED = 4
    TRANSFERRING = 5
