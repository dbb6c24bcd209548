"""Names full blocks by what they hold: a chain of SHA-256 digests, byte-equal in every process.

    digest of block i = SHA-256( parent | tokens | salt | adapter )

`parent` is the digest of block i - 1, or the root, which is made of the scheme's name, the block size and the
deployment secret. Every part is written as a one-byte tag, then 0 if it is absent, else 1, its length as uint32 and its
bytes; tokens are packed as int32; all integers are little-endian.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple

from octavo.common.codecs.arrays import pack_int32

SCHEME = b"octavo-block-hash-1"
"""Name of this encoding. It enters the root, so a changed encoding never meets digests of this one."""

TOKEN_BYTES = 4
DIGEST_BYTES = 32

_LENGTH = struct.Struct("<I")


class BlockKey(NamedTuple):
    """What a published block is found by."""

    digest: bytes
    content: bytes
    """The bytes that were hashed. They are compared on a hit, so that equal digests alone share nothing."""


UNKNOWN_KEY = BlockKey(b"", b"")
"""Of a block before one that was found again after a restart. Nothing is found by it."""


def digest_of(key: BlockKey) -> bytes:
    return key.digest


def sha256(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _part(tag: bytes, value: bytes | None) -> bytes:
    if value is None:
        return tag + b"\x00"
    return tag + b"\x01" + _LENGTH.pack(len(value)) + value


class BlockHasher:
    """Computes the keys of one pool. `secret` keeps outsiders from building keys; empty means none."""

    def __init__(self, block_size: int, secret: bytes = b"", digest: Callable[[bytes], bytes] = sha256) -> None:
        self.block_size = block_size
        self.digest = digest
        self.root = digest(_part(b"v", SCHEME) + _part(b"b", _LENGTH.pack(block_size)) + _part(b"s", secret or None))
        self._before_parent = b"p\x01" + _LENGTH.pack(len(self.root))
        self._before_tokens = b"t\x01" + _LENGTH.pack(block_size * TOKEN_BYTES)

    def extra(self, salt: bytes) -> bytes:
        """The parts that are the same in all blocks of a sequence. An empty salt is an absent one."""
        return _part(b"c", salt or None) + _part(b"a", None)

    def key(self, parent: bytes, packed_tokens: bytes, extra: bytes) -> BlockKey:
        """The key of one full block; `packed_tokens` is `block_size` token ids as packed int32."""
        content = b"".join((self._before_parent, parent, self._before_tokens, packed_tokens, extra))
        return BlockKey(self.digest(content), content)


class TokenChain:
    """The token ids of one sequence, and the keys of its full blocks, each computed when it is first asked for."""

    def __init__(self, hasher: BlockHasher, packed_tokens: bytes, salt: bytes = b"") -> None:
        self._hasher = hasher
        self._packed = packed_tokens
        self._salt = salt
        self._extra = hasher.extra(salt)
        self._keys: list[BlockKey] = []

    @property
    def num_tokens(self) -> int:
        return len(self._packed) // TOKEN_BYTES

    @property
    def num_full_blocks(self) -> int:
        return self.num_tokens // self._hasher.block_size

    def holds(self, packed_tokens: bytes, salt: bytes) -> bool:
        """Whether this is the chain of exactly these tokens and this salt."""
        return self._packed == packed_tokens and self._salt == salt

    def append(self, token_ids: Iterable[int]) -> None:
        self._packed += pack_int32(token_ids)

    def key(self, block_index: int) -> BlockKey:
        """Key of a full block, `block_index < num_full_blocks`."""
        keys, hasher = self._keys, self._hasher
        stride = hasher.block_size * TOKEN_BYTES
        while len(keys) <= block_index:
            start = len(keys) * stride
            parent = keys[-1].digest if keys else hasher.root
            keys.append(hasher.key(parent, self._packed[start : start + stride], self._extra))
        return keys[block_index]

    def fork(self, num_tokens: int) -> TokenChain:
        """The chain of the first `num_tokens` tokens, or of all if fewer are known."""
        child = TokenChain(self._hasher, self._packed[: num_tokens * TOKEN_BYTES], self._salt)
        child._keys = self._keys[: child.num_full_blocks]
        return child
