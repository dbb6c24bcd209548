"""Owns what this gateway believes one pool to hold: advisory, since the KV manager judges every admission itself."""

from __future__ import annotations

from octavo.common.block_hash import BlockHasher, TokenChain, digest_of

MAX_MATCHED_BLOCKS = 2048
"""Blocks of one prompt that are looked up: some 3 ms of hashing. Longer matches change no choice."""


class PoolDirectory:
    """Names of the blocks that a pool stores, each with the tiers that hold it.

    Bounded: beyond `max_blocks` those heard of first are forgotten, which costs hits that are not foreseen.
    """

    def __init__(self, max_blocks: int = 131_072) -> None:
        self.hasher: BlockHasher | None = None
        """Names blocks as the pool does; None while it is not followed."""
        self._max_blocks = max_blocks
        self._tiers: dict[int, int] = {}
        """block |-> tiers that hold it, one bit each"""

    def __len__(self) -> int:
        return len(self._tiers)

    def clear(self, hasher: BlockHasher | None = None) -> None:
        """Nothing is known of the pool any more; what is told next is named by `hasher`."""
        self._tiers.clear()
        self.hasher = hasher

    def store(self, digest: bytes, tier: int) -> None:
        name = _name(digest)
        if name not in self._tiers and len(self._tiers) >= self._max_blocks:
            del self._tiers[next(iter(self._tiers))]
        self._tiers[name] = self._tiers.get(name, 0) | 1 << tier

    def drop(self, digest: bytes, tier: int) -> None:
        name = _name(digest)
        left = self._tiers.get(name, 0) & ~(1 << tier)
        if left:
            self._tiers[name] = left
        else:
            self._tiers.pop(name, None)

    def holds(self, digest: bytes) -> bool:
        return _name(digest) in self._tiers


class PrefixMatcher:
    """How much of one prompt each pool holds. Pools that name blocks alike share the hashing."""

    def __init__(self, packed_tokens: bytes, salt: bytes) -> None:
        """`packed_tokens`: little-endian int32."""
        self._packed, self._salt = packed_tokens, salt
        self._chains: dict[tuple[bytes, int], TokenChain] = {}

    def num_matched_tokens(self, directory: PoolDirectory) -> int:
        """Leading tokens, in full blocks; the prompt's last token is always computed."""
        hasher = directory.hasher
        if hasher is None or not len(directory):
            return 0
        chain = self._chains.get((hasher.root, hasher.block_size))
        if chain is None:
            chain = TokenChain(hasher, self._packed, self._salt)
            self._chains[hasher.root, hasher.block_size] = chain
        num_blocks = min((chain.num_tokens - 1) // hasher.block_size, MAX_MATCHED_BLOCKS)
        for index in range(num_blocks):
            if not directory.holds(digest_of(chain.key(index))):
                return index * hasher.block_size
        return num_blocks * hasher.block_size


def _name(digest: bytes) -> int:
    """64 bits of it: two blocks with the same would only mislead a choice."""
    return int.from_bytes(digest[:8], "little")
