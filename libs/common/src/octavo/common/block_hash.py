"""Names full blocks by what they hold: a chain of digests, byte-equal in every process.

    scheme    = H( v scheme | h algorithm | b block size | k format of K and V | s deployment secret )
    namespace = H( r scheme | c salt | a adapter | g load generation of the adapter )
    block i   = H( p block i - 1, or the namespace | t tokens )

H is SHA-256, or XXH3-128 by option. Every part is written as its one-byte tag, then 0 if it is absent, else 1, its
length as uint32 and its bytes; tokens are packed as int32; all integers are little-endian. See docs/kvmanager.md.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal
from zlib import crc32

from octavo.common.codecs.arrays import pack_int32

SCHEME = b"octavo-block-hash-3"
"""Name of this encoding. It enters every digest, so a changed encoding never meets digests of this one."""

TOKEN_BYTES = 4

HashAlgorithm = Literal["sha256", "xxh3_128"]

BlockKey = bytes
"""What a published block is found by, all in one object since a pool keeps a million of them:

    digest (32 bytes, or 16) | check (4) | adapter (4) | salt, first 16 bytes (4) | salt, rest (3)

The check is the CRC-32 of all tokens up to the end of the block, so that equal digests alone share nothing, and so that
equal tokens of different namespaces can be told. The last three are fingerprints, 0 for what is absent.
"""

UNKNOWN_KEY: BlockKey = b""
"""Of a block before one that was found again after a restart. Nothing is found by it."""

_MARKS_BYTES = 11
_TAIL_BYTES = 4 + _MARKS_BYTES
SALT_HEAD_BYTES = 16
"""A tenant's salts begin with as many bytes that are the same in all of them."""

_LENGTH = struct.Struct("<I")
_GENERATION = struct.Struct("<Q")


def sha256(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def digest_function(algorithm: HashAlgorithm) -> Callable[[bytes], bytes]:
    """Raises ImportError if the algorithm's package is not installed."""
    if algorithm == "sha256":
        return sha256
    import xxhash

    return xxhash.xxh3_128_digest


def token_check(key: BlockKey) -> int:
    """CRC-32 of all tokens up to the end of the block."""
    return int.from_bytes(key[-_TAIL_BYTES:-_MARKS_BYTES], "little")


def digest_of(key: BlockKey) -> bytes:
    return key[:-_TAIL_BYTES]


def adapter_mark(adapter: str) -> bytes:
    """What keys of blocks computed with this adapter carry."""
    return sha256(b"a" + adapter.encode())[:4] if adapter else bytes(4)


def salt_mark(salt: bytes) -> bytes:
    """What keys of blocks carry whose salt has the same first `SALT_HEAD_BYTES` bytes."""
    return sha256(b"c" + salt[:SALT_HEAD_BYTES])[:4] if salt else bytes(4)


def _salt_rest_mark(salt: bytes) -> bytes:
    rest = salt[SALT_HEAD_BYTES:]
    return sha256(b"r" + rest)[:3] if rest else bytes(3)


def adapter_mark_of(key: BlockKey) -> bytes:
    return key[-11:-7]


def salt_mark_of(key: BlockKey) -> bytes:
    return key[-7:-3]


def salt_marks_of(key: BlockKey) -> bytes:
    """Fingerprints of the whole salt."""
    return key[-7:]


def _part(tag: bytes, value: bytes | None) -> bytes:
    if value is None:
        return tag + b"\x00"
    return tag + b"\x01" + _LENGTH.pack(len(value)) + value


@dataclass(frozen=True, slots=True)
class Namespace:
    """What the keys of a sequence depend on beside its tokens."""

    root: bytes
    """The parent of block 0."""
    marks: bytes
    """The end of every key."""


class BlockHasher:
    """Computes the keys of one pool.

    `secret` keeps outsiders from building keys; empty means none. `kv_format` names what a block's bytes mean beside
    its tokens: contents of one format are never found by keys of another.
    """

    def __init__(
        self,
        block_size: int,
        secret: bytes = b"",
        algorithm: HashAlgorithm = "sha256",
        digest: Callable[[bytes], bytes] | None = None,
        kv_format: str = "",
    ) -> None:
        self.block_size = block_size
        self.digest = digest or digest_function(algorithm)
        self.root = self.digest(
            _part(b"v", SCHEME)
            + _part(b"h", algorithm.encode())
            + _part(b"b", _LENGTH.pack(block_size))
            + _part(b"k", kv_format.encode() or None)
            + _part(b"s", secret or None)
        )
        """Names the scheme, with the secret."""
        self.before_parent = b"p\x01" + _LENGTH.pack(len(self.root))
        self.before_tokens = b"t\x01" + _LENGTH.pack(block_size * TOKEN_BYTES)

    @classmethod
    def of_root(cls, block_size: int, algorithm: HashAlgorithm, root: bytes) -> BlockHasher:
        """One that names blocks as the one does whose root this is. Raises ImportError as `digest_function` does."""
        hasher = cls(block_size, algorithm=algorithm)
        hasher.root = root
        return hasher

    def namespace(self, salt: bytes = b"", adapter: str = "", adapter_generation: int = 0) -> Namespace:
        """An empty salt is an absent one; an empty adapter is the base model, which has no generations."""
        root = self.digest(
            _part(b"r", self.root)
            + _part(b"c", salt or None)
            + _part(b"a", adapter.encode() or None)
            + _part(b"g", _GENERATION.pack(adapter_generation) if adapter else None)
        )
        return Namespace(root, adapter_mark(adapter) + salt_mark(salt) + _salt_rest_mark(salt))


class TokenChain:
    """The token ids of one sequence, and the keys of its full blocks, each computed once."""

    def __init__(
        self,
        hasher: BlockHasher,
        packed_tokens: bytes,
        salt: bytes = b"",
        adapter: str = "",
        adapter_generation: int = 0,
    ) -> None:
        self._hasher = hasher
        self._packed: bytes | bytearray = packed_tokens
        self._origin = (salt, adapter, adapter_generation)
        self.namespace = hasher.namespace(salt, adapter, adapter_generation)
        self.keys: list[BlockKey] = []
        """Of the leading blocks that are hashed."""
        self._parent, self._check = self.namespace.root, 0
        """Digest and check of the last of them."""

    @property
    def num_tokens(self) -> int:
        return len(self._packed) // TOKEN_BYTES

    @property
    def num_full_blocks(self) -> int:
        return self.num_tokens // self._hasher.block_size

    @property
    def num_unhashed_blocks(self) -> int:
        return self.num_full_blocks - len(self.keys)

    def holds(self, packed_tokens: bytes, salt: bytes) -> bool:
        """Whether this is the base model's chain of exactly these tokens and this salt."""
        return self._packed == packed_tokens and self._origin == (salt, "", 0)

    def append(self, token_ids: Collection[int]) -> None:
        if not isinstance(self._packed, bytearray):
            self._packed = bytearray(self._packed)
        self._packed += pack_int32(token_ids)

    def key(self, block_index: int) -> BlockKey:
        """Key of a full block, `block_index < num_full_blocks`."""
        if len(self.keys) <= block_index:
            self.hash_up_to(block_index + 1)
        return self.keys[block_index]

    def hash_up_to(self, num_blocks: int) -> None:
        """Compute the keys of the first `num_blocks` full blocks."""
        keys, packed, hasher = self.keys, self._packed, self._hasher
        digest, before_parent, before_tokens = hasher.digest, hasher.before_parent, hasher.before_tokens
        marks = self.namespace.marks
        stride = hasher.block_size * TOKEN_BYTES
        parent, check = self._parent, self._check
        for start in range(len(keys) * stride, num_blocks * stride, stride):
            tokens = packed[start : start + stride]
            check = crc32(tokens, check)
            parent = digest(before_parent + parent + before_tokens + tokens)
            keys.append(parent + check.to_bytes(4, "little") + marks)
        self._parent, self._check = parent, check

    def fork(self, num_tokens: int) -> TokenChain:
        """The chain of the first `num_tokens` tokens, or of all if fewer are known."""
        child = TokenChain(self._hasher, bytes(self._packed[: num_tokens * TOKEN_BYTES]), *self._origin)
        child.keys = self.keys[: child.num_full_blocks]
        if child.keys:
            child._parent, child._check = digest_of(child.keys[-1]), token_check(child.keys[-1])
        return child
