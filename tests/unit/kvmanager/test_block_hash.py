"""Block keys: the same everywhere, and different for everything that changes K or V."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.common.codecs.arrays import pack_int32
from octavo.kvmanager.block_hash import BlockHasher, TokenChain


def chain(token_ids: range | list[int], salt: bytes = b"", secret: bytes = b"", block_size: int = 16) -> TokenChain:
    return TokenChain(BlockHasher(block_size, secret), pack_int32(token_ids), salt)


def test_a_key_is_a_known_sha256_in_every_process_and_release() -> None:
    keys = chain(range(64))
    assert keys.key(0).digest.hex() == "6edc65d88dbb107d92ce65ca478071a1c0450d18d7ff873fb7e9df2624af88d0"
    assert keys.key(3).digest.hex() == "f0ad01b73dbd0a1c48027baf2b9c68b61bb7885a0345007ab02562c973872a2d"


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_another_process_computes_the_same_keys(hash_seed: str) -> None:
    program = (
        "from octavo.common.codecs.arrays import pack_int32\n"
        "from octavo.kvmanager.block_hash import BlockHasher, TokenChain\n"
        "keys = TokenChain(BlockHasher(16, b'secret'), pack_int32(range(64)))\n"
        "print(*(keys.key(index).digest.hex() for index in range(4)))\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True
    ).stdout
    keys = chain(range(64), secret=b"secret")
    assert output.split() == [keys.key(index).digest.hex() for index in range(4)]


def test_a_key_depends_on_every_token_before_it() -> None:
    assert chain(range(32)).key(1) != chain([99, *range(1, 32)]).key(1)
    assert chain(range(32)).key(1) == chain(range(40)).key(1)


def test_salt_secret_and_block_size_each_change_the_keys() -> None:
    digests = {
        chain(range(32)).key(0).digest,
        chain(range(32), salt=b"tenant").key(0).digest,
        chain(range(32), secret=b"tenant").key(0).digest,
        chain(range(32), block_size=8).key(0).digest,
    }
    assert len(digests) == 4


@given(salt=st.binary(max_size=40), other_salt=st.binary(max_size=40), token_ids=st.lists(st.integers(0, 2**31 - 1)))
def test_different_salts_never_give_one_key(salt: bytes, other_salt: bytes, token_ids: list[int]) -> None:
    token_ids += [0] * 16
    keys = [chain(token_ids, salt=one).key(0) for one in (salt, other_salt)]
    assert (keys[0].digest == keys[1].digest) == (salt == other_salt)
    assert (keys[0].content == keys[1].content) == (salt == other_salt)


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
