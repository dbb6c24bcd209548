"""Block keys: the same everywhere, and different for everything that changes K or V."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.common.block_hash import BlockHasher, HashAlgorithm, TokenChain, digest_of
from octavo.common.codecs.arrays import pack_int32
from octavo.common.messages.kv import OpenPool
from octavo.kvmanager.block_pool import BlockPool
from octavo.kvmanager.config import KvManagerConfig
from octavo.kvmanager.pool import PoolSettings


def chain(token_ids: range | list[int], salt: bytes = b"", secret: bytes = b"", block_size: int = 16) -> TokenChain:
    return TokenChain(BlockHasher(block_size, secret), pack_int32(token_ids), salt)


def spelled_out(parts: list[tuple[bytes, bytes | None]]) -> bytes:
    """SHA-256 of tagged, length-prefixed parts, as the documentation has them."""
    content = b""
    for tag, value in parts:
        content += tag + (b"\0" if value is None else b"\1" + len(value).to_bytes(4, "little") + value)
    return hashlib.sha256(content).digest()


def test_the_layout_is_the_documented_one() -> None:
    scheme = spelled_out(
        [
            (b"v", b"octavo-block-hash-3"),
            (b"h", b"sha256"),
            (b"b", b"\x10\0\0\0"),
            (b"k", b"bfloat16"),
            (b"s", b"key"),
        ]
    )
    adapter = [(b"a", b"blue"), (b"g", (7).to_bytes(8, "little"))]
    namespace = spelled_out([(b"r", scheme), (b"c", b"salt"), *adapter])
    first = spelled_out([(b"p", namespace), (b"t", pack_int32(range(16)))])
    second = spelled_out([(b"p", first), (b"t", pack_int32(range(16, 32)))])
    keys = TokenChain(BlockHasher(16, b"key", kv_format="bfloat16"), pack_int32(range(32)), b"salt", "blue", 7)
    assert [digest_of(keys.key(0)), digest_of(keys.key(1))] == [first, second]
    base = spelled_out([(b"r", BlockHasher(16).root), (b"c", None), (b"a", None), (b"g", None)])
    assert chain(range(16)).namespace.root == base


def test_blocks_of_another_kv_format_are_never_found() -> None:
    formats = ("", "bfloat16", "float8_e4m3fn/0123456789abcdef", "float8_e4m3fn/fedcba9876543210")
    openings = [OpenPool("group-0", 1, 1, 8, 16, kv_format=kv_format) for kv_format in formats]
    keys = {TokenChain(PoolSettings().hasher(opening), pack_int32(range(16))).key(0) for opening in openings}
    assert len(keys) == 4


def test_a_key_is_a_known_sha256_in_every_process_and_release() -> None:
    keys = chain(range(64))
    assert (
        keys.key(0).hex()
        == "7887563996e7fdfe2f554fc5cf04733189b5629b32588cf435406db4e38f15f4c97c89e10000000000000000000000"
    )
    assert (
        keys.key(3).hex()
        == "a8cba531fd367fe13efd6c56b463ad226ffa3a3c6289c12daee23bc3f981402647918ec90000000000000000000000"
    )


@pytest.mark.parametrize(("algorithm", "num_bytes"), [("sha256", 32), ("xxh3_128", 16)])
def test_the_algorithm_is_a_setting_and_enters_the_key(algorithm: HashAlgorithm, num_bytes: int) -> None:
    keys = TokenChain(BlockHasher(16, algorithm=algorithm), pack_int32(range(32)))
    assert len(digest_of(keys.key(1))) == num_bytes
    other = TokenChain(BlockHasher(16, algorithm=algorithm), pack_int32(range(32)))
    assert keys.key(1) == other.key(1)


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_another_process_computes_the_same_keys(hash_seed: str) -> None:
    program = (
        "from octavo.common.codecs.arrays import pack_int32\n"
        "from octavo.common.block_hash import BlockHasher, TokenChain\n"
        "keys = TokenChain(BlockHasher(16, b'secret'), pack_int32(range(64)), b'salt', 'adapter', 3)\n"
        "print(*(keys.key(index).hex() for index in range(4)))\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True
    ).stdout
    keys = TokenChain(BlockHasher(16, b"secret"), pack_int32(range(64)), b"salt", "adapter", 3)
    assert output.split() == [keys.key(index).hex() for index in range(4)]


def test_a_key_depends_on_every_token_before_it() -> None:
    assert chain(range(32)).key(1) != chain([99, *range(1, 32)]).key(1)
    assert chain(range(32)).key(1) == chain(range(40)).key(1)


def test_salt_secret_block_size_adapter_and_its_load_each_change_the_keys() -> None:
    adapted = [TokenChain(BlockHasher(16), pack_int32(range(32)), b"", *adapter) for adapter in (("x", 1), ("x", 2))]
    keys = {
        chain(range(32)).key(0),
        chain(range(32), salt=b"tenant").key(0),
        chain(range(32), secret=b"tenant").key(0),
        chain(range(32), block_size=8).key(0),
        TokenChain(BlockHasher(16, algorithm="xxh3_128"), pack_int32(range(32))).key(0),
        *(one.key(0) for one in adapted),
    }
    assert len({digest_of(key) for key in keys}) == 7


def test_a_salt_that_spells_an_adapter_is_not_the_adapter() -> None:
    """pfx-6e5: every part of a key has a tag and a length."""
    adapted = TokenChain(BlockHasher(16), pack_int32(range(64)), b"", "blue", 0)
    salted = TokenChain(BlockHasher(16), pack_int32(range(64)), b"blue")
    assert digest_of(adapted.key(0)) != digest_of(salted.key(0))


@given(salt=st.binary(max_size=40), other_salt=st.binary(max_size=40), token_ids=st.lists(st.integers(0, 2**31 - 1)))
def test_different_salts_never_give_one_key(salt: bytes, other_salt: bytes, token_ids: list[int]) -> None:
    token_ids += [0] * 16
    keys = [chain(token_ids, salt=one).key(0) for one in (salt, other_salt)]
    assert (digest_of(keys[0]) == digest_of(keys[1])) == (salt == other_salt)


def test_equal_digests_of_other_tokens_share_nothing() -> None:
    """pfx-490: with a digest that is the same for everything, the check of the tokens still tells them apart."""
    hasher = BlockHasher(16, digest=lambda content: bytes(32))
    one, other = (TokenChain(hasher, pack_int32(range(first, first + 32))) for first in (0, 100))
    assert digest_of(one.key(0)) == digest_of(other.key(0))
    pool = BlockPool(2)
    pool.allocate(2)
    pool.publish(0, one.key(0))
    assert pool.find(one.key(0)) == 0
    assert pool.find(other.key(0)) is pool.find(one.key(1)) is None


def test_the_default_is_a_cryptographic_digest() -> None:
    assert PoolSettings().hash_algorithm == KvManagerConfig().hash_algorithm == "sha256"


def test_appended_tokens_continue_the_chain() -> None:
    grown = chain(range(20))
    assert grown.num_full_blocks == 1
    grown.append(range(20, 33))
    assert (grown.num_tokens, grown.num_full_blocks) == (33, 2)
    assert grown.key(1) == chain(range(32)).key(1)


def test_a_forked_chain_goes_its_own_way() -> None:
    parent = chain(range(40))
    child = parent.fork(20)
    child.append([7] * 12)
    assert child.key(0) == parent.key(0)
    assert child.key(1) == chain([*range(20), *[7] * 12]).key(1)
    assert parent.key(1) == chain(range(32)).key(1)


def test_a_fork_beyond_the_known_tokens_knows_those() -> None:
    assert chain(range(20)).fork(30).num_tokens == 20
