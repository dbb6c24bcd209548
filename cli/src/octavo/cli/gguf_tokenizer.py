"""The tokenizer of a GGUF file as a Hugging Face tokenizer.json.

A GGUF file holds a vocabulary, merges and the name of a pre-tokenizer; the splitting rule behind that name is not in
the file. Where a name stands for the GPT-2 rule in transformers' GGUF loader, it does here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from octavo.cli.model_errors import UnsupportedModelError

_CONTROL = 3
_USER_DEFINED = 4

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

_SPLITS = {
    None: None,
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
}
"""Pre-tokenizer name in the file to splitting rule; None is the GPT-2 rule that ByteLevel has built in."""


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """A byte-level BPE tokenizer from the `tokenizer.ggml.*` fields.

    Raises UnsupportedModelError for other kinds of tokenizer.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UnsupportedModelError(f"its tokenizer is of kind {kind!r}; only byte-level BPE ('gpt2') can be converted")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [_pair(merge) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {_byte_level(token): index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        BPE(vocab=vocabulary, merges=merges, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False)
    )
    tokenizer.pre_tokenizer = _pre_tokenizer(metadata.get("tokenizer.ggml.pre"))
    tokenizer.decoder = decoders.ByteLevel()
    _add_whole_tokens(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type", ()))
    if metadata.get("tokenizer.ggml.add_bos_token") and "tokenizer.ggml.bos_token_id" in metadata:
        bos_id = metadata["tokenizer.ggml.bos_token_id"]
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, bos_id)]
        )
    return tokenizer


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The content of tokenizer_config.json: special tokens by name, chat template, whether a BOS is added."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
    }
    for name, field in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{field}_token_id")
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _pre_tokenizer(name: str | None) -> pre_tokenizers.PreTokenizer:
    if name not in _SPLITS:
        known = ", ".join(sorted(known for known in _SPLITS if known))
        raise UnsupportedModelError(f"its pre-tokenizer is {name!r}; those that can be converted are {known}")
    split = _SPLITS[name]
    if split is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _add_whole_tokens(tokenizer: Tokenizer, tokens: Sequence[str], token_types: Sequence[int]) -> None:
    """Mark the tokens that are never cut: control tokens as special, user-defined ones as plain."""
    typed = [
        (token, token_type) for token, token_type in zip(tokens, token_types, strict=False) if _is_byte_level(token)
    ]
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, kind in typed if kind == _CONTROL]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in typed if kind == _USER_DEFINED])


def _byte_alphabet() -> dict[int, str]:
    """Byte to the printable character that stands for it in a byte-level vocabulary.

    Printable Latin-1 stands for itself, the other 68 bytes for U+0100 onwards, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(hidden)}


_ALPHABET = _byte_alphabet()
_LETTERS = frozenset(_ALPHABET.values())


def _is_byte_level(token: str) -> bool:
    return _LETTERS.issuperset(token)


def _byte_level(token: str) -> str:
    """A token that the file spells as text, in the byte alphabet; one that is in it already, as it is."""
    return token if _is_byte_level(token) else "".join(_ALPHABET[byte] for byte in token.encode())
