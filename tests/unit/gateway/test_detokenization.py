"""Text from token ids, one at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from octavo.gateway.detokenization import IncrementalDetokenizer, TokenPieces, UnsupportedDecoderError
from support.small_tokenizer import BOS, EOS, byte_ids, byte_level_tokenizer, byte_token_ids, id_of

BYTE_LEVEL = byte_level_tokenizer()
BYTE_LEVEL_PIECES = TokenPieces(BYTE_LEVEL)

WORDS = ["▁Hello", "▁wor", "ld", "▁", "▁▁", "!", "é", "한", "<s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LLAMA_VOCABULARY = {token: index for index, token in enumerate(["<unk>", *WORDS, *BYTES])}


def llama_tokenizer(decoder: decoders.Decoder) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(LLAMA_VOCABULARY, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


LLAMA = llama_tokenizer(
    decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
)
GEMMA = llama_tokenizer(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))
METASPACE = llama_tokenizer(decoders.Metaspace())
PLAIN = Tokenizer(models.WordLevel({"a": 0, "bc": 1, "[UNK]": 2}, "[UNK]"))


def deltas_of(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    """One text per token, and what the end releases."""
    detokenizer = IncrementalDetokenizer(TokenPieces(tokenizer), skip_special_tokens)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("text", ["👍🏽", "한국어", "cafe\u0301", "👩‍👩‍👧"])
def test_character_split_over_tokens_comes_whole_with_its_last_byte(text: str) -> None:
    deltas = deltas_of(BYTE_LEVEL, byte_ids(text))
    assert "".join(deltas) == text
    assert "\ufffd" not in "".join(deltas)
    assert [delta for delta in deltas if delta] == list(text)


def test_output_that_ends_inside_a_character_ends_in_one_replacement_mark() -> None:
    thumb = byte_ids("👍")
    for num_bytes in (1, 2, 3):
        assert deltas_of(BYTE_LEVEL, [*byte_ids("ok"), *thumb[:num_bytes]])[2:] == [*[""] * num_bytes, "\ufffd"]


def test_impossible_bytes_are_marked_at_once() -> None:
    impossible = byte_token_ids(BYTE_LEVEL, b"\xff\xff\xc3A")
    assert deltas_of(BYTE_LEVEL, impossible) == ["\ufffd", "\ufffd", "", "\ufffdA", ""]


def test_ids_without_a_token_have_no_text() -> None:
    assert deltas_of(BYTE_LEVEL, [BYTE_LEVEL.get_vocab_size() + 3, *byte_ids("a")]) == ["", "a", ""]


def test_special_tokens_are_left_out_or_shown() -> None:
    bos, eos = id_of(BYTE_LEVEL, BOS), id_of(BYTE_LEVEL, EOS)
    think = id_of(BYTE_LEVEL, "<think>")
    assert "".join(deltas_of(BYTE_LEVEL, [bos, think, eos])) == "<think>"
    assert "".join(deltas_of(BYTE_LEVEL, [bos, think, eos], skip_special_tokens=False)) == BOS + "<think>" + EOS


@settings(max_examples=150)
@given(
    st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 2), max_size=40),
    st.booleans(),
)
def test_joined_deltas_equal_decoding_all_ids(ids: list[int], skip_special_tokens: bool) -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL_PIECES, skip_special_tokens)
    text = "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.flush()
    assert text == BYTE_LEVEL.decode(ids, skip_special_tokens=skip_special_tokens)


def _ids_of_words_and_byte_texts() -> st.SearchStrategy[list[int]]:
    word = st.sampled_from([[LLAMA_VOCABULARY[word]] for word in WORDS])
    text = st.text(max_size=3).map(lambda text: [LLAMA_VOCABULARY[f"<0x{byte:02X}>"] for byte in text.encode()])
    return st.lists(st.one_of(word, text), max_size=12).map(lambda parts: [token for part in parts for token in part])


@pytest.mark.parametrize("tokenizer", [LLAMA, GEMMA], ids=["llama", "gemma"])
@settings(max_examples=100)
@given(ids=_ids_of_words_and_byte_texts(), skip_special_tokens=st.booleans())
def test_sentencepiece_style_equals_decoding_all_ids(
    tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool
) -> None:
    text = "".join(deltas_of(tokenizer, ids, skip_special_tokens))
    assert text == tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@settings(max_examples=100)
@given(st.lists(st.sampled_from([LLAMA_VOCABULARY[word] for word in WORDS]), max_size=8), st.booleans())
def test_metaspace_equals_decoding_all_ids(ids: list[int], skip_special_tokens: bool) -> None:
    text = "".join(deltas_of(METASPACE, ids, skip_special_tokens))
    assert text == METASPACE.decode(ids, skip_special_tokens=skip_special_tokens)


def test_leading_space_is_dropped_only_at_the_beginning() -> None:
    hello, wor, ld = (LLAMA_VOCABULARY[word] for word in ("▁Hello", "▁wor", "ld"))
    assert deltas_of(LLAMA, [hello, wor, ld, hello]) == ["Hello", " wor", "ld", " Hello", ""]
    assert deltas_of(GEMMA, [hello, wor]) == [" Hello", " wor", ""]


def test_tokens_of_a_tokenizer_without_decoder_are_joined_by_spaces() -> None:
    assert deltas_of(PLAIN, [0, 1, 1]) == ["a", " bc", " bc", ""]
    assert PLAIN.decode([0, 1, 1]) == "a bc bc"


def test_decoder_that_cannot_be_streamed_is_refused() -> None:
    with pytest.raises(UnsupportedDecoderError, match="WordPiece"):
        TokenPieces(llama_tokenizer(decoders.WordPiece()))


def test_name_of_a_token_that_is_no_whole_text_spells_its_bytes() -> None:
    [first_byte, *_] = byte_ids("é")
    assert BYTE_LEVEL_PIECES.name(first_byte) == "bytes:\\xc3"
    assert BYTE_LEVEL_PIECES.name(byte_ids("a")[0]) == "a"


@pytest.fixture(scope="module")
def real_tokenizer() -> Tokenizer:
    """SmolLM2's: from the folder in OCTAVO_TEST_MODEL, else from the default model, which is fetched if need be."""
    folder = os.environ.get("OCTAVO_TEST_MODEL")
    if folder is None:
        command = [sys.executable, "-m", "octavo.cli.main", "model", "path"]
        folder = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    return Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))


@pytest.mark.real_model
@settings(max_examples=200)
@given(ids=st.lists(st.integers(0, 49151), max_size=60), skip_special_tokens=st.booleans())
def test_real_tokenizer_equals_decoding_all_ids(
    real_tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool
) -> None:
    detokenizer = IncrementalDetokenizer(TokenPieces(real_tokenizer), skip_special_tokens)
    text = "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.flush()
    assert text == real_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
