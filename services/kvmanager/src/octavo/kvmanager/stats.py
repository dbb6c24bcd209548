"""Counters of one KV manager. They only grow, also when a pool is replaced."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.common.messages.kv import MissReason, Verdict, WaitReason


@dataclass(slots=True)
class KvStats:
    """What all pools of this process did since it started."""

    num_prefix_lookup_tokens: int = 0
    """Tokens of admitted sequences."""
    num_prefix_hit_tokens: int = 0
    """Those of them whose blocks were found by hash."""
    num_prefix_lookup_blocks: int = 0
    """Full blocks of the tokens of admitted sequences. Each was hit or missed for one reason."""
    num_prefix_hit_blocks: int = 0
    num_missed_blocks: dict[MissReason, int] = field(default_factory=lambda: dict.fromkeys(MissReason, 0))
    num_waits: dict[WaitReason, int] = field(default_factory=lambda: dict.fromkeys(WaitReason, 0))
    """Answers LATER by reason."""
    num_flushed_blocks: int = 0
    num_evictions: int = 0
    """Cached blocks taken for new content."""
    num_host_hit_tokens: int = 0
    """Of the hit tokens, those that were restored from host memory."""
    num_sunk_blocks: int = 0
    """Evicted blocks that were saved in host memory."""
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_admissions: dict[Verdict, int] = field(default_factory=lambda: dict.fromkeys(Verdict, 0))
    """Answers to admissions; one that was told LATER counts each time it asks."""
