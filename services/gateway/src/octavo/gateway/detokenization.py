"""Token ids to text, one at a time: owns the bytes of a character that is not complete yet.

Text is the UTF-8 decoding of the bytes that the tokens add. A byte sequence that can never become a character turns
into U+FFFD as soon as that is certain (one mark per maximal ill-formed part, as Unicode recommends), so nothing is
held back for longer than three bytes. If the output ends inside a character, its incomplete bytes become one U+FFFD.

The result equals `Tokenizer.decode` of all ids. The one exception is a tokenizer with byte fallback whose run of
byte tokens is not valid UTF-8: `decode` then marks every byte of the run, which cannot be known before the run ends.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def _byte_level_alphabet() -> dict[str, int]:
    """The character by which byte-level BPE writes each byte: itself where printable, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_ALPHABET = _byte_level_alphabet()


class UnsupportedDecoderError(Exception):
    """The tokenizer's decoder has a part whose output cannot be made token by token."""


class _Pieces(dict[int, bytes]):
    """Bytes of each token id, filled on first use. Ids without a token are empty."""

    def __init__(self, tokenizer: Tokenizer, to_bytes: Callable[[str], bytes], hidden: frozenset[str]) -> None:
        super().__init__()
        self._tokenizer, self._to_bytes, self._hidden = tokenizer, to_bytes, hidden
        self.texts = _Texts(self)

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        piece = b"" if token is None or token in self._hidden else self._to_bytes(token)
        self[token_id] = piece
        return piece


class _Texts(dict[int, str | None]):
    """Text of each token id whose piece is whole characters, filled on first use; None for the others."""

    def __init__(self, pieces: _Pieces) -> None:
        super().__init__()
        self._pieces = pieces

    def __missing__(self, token_id: int) -> str | None:
        try:
            text = self._pieces[token_id].decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


class TokenPieces:
    """What each token adds to the text, as bytes. Raises UnsupportedDecoderError for decoders it does not know.

    The special tokens in `shown` are seen even where special tokens are left out.

    Known are ByteLevel; Replace, ByteFallback, Fuse and a Strip of leading characters; Metaspace; and none at all.
    """

    def __init__(self, tokenizer: Tokenizer, shown: frozenset[str] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._replacements: list[tuple[str, str]] = []
        self._has_byte_tokens = False
        self.strip_char, self.strip_count = "", 0
        """Up to `strip_count` leading `strip_char` are taken off the whole text."""
        self.first_drops = ""
        """Characters that the first token loses."""
        self.separator = b""
        """Stands between any two tokens."""
        to_bytes = self._read_decoder()
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        special = frozenset(added[token_id].content for token_id in self.special_ids) - shown
        self.all = _Pieces(tokenizer, to_bytes, frozenset())
        self.without_special = _Pieces(tokenizer, to_bytes, special)

    def _read_decoder(self) -> Callable[[str], bytes]:
        decoder = self._tokenizer.decoder
        if decoder is None:
            self.separator = b" "
            return str.encode
        steps = _flatten(json.loads(decoder.__getstate__()))
        if [step["type"] for step in steps] == ["ByteLevel"]:
            return _byte_level_bytes
        is_fused = False
        for step in steps:
            match step:
                case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
                    self._replacements.append((pattern, content))
                case {"type": "ByteFallback"}:
                    self._has_byte_tokens = True
                case {"type": "Fuse"}:
                    is_fused = True
                case {"type": "Strip", "content": char, "start": start, "stop": 0} if is_fused:
                    self.strip_char, self.strip_count = char, start
                case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme} if len(steps) == 1:
                    self._replacements.append((mark, " "))
                    self.first_drops = "" if scheme == "never" else mark
                case _:
                    raise UnsupportedDecoderError(f"the tokenizer's decoder {step['type']} is not supported")
        return self._replaced_bytes

    def _replaced_bytes(self, token: str) -> bytes:
        if self._has_byte_tokens and (byte := _BYTE_TOKEN.match(token)):
            return bytes((int(byte[1], 16),))
        for pattern, content in self._replacements:
            token = token.replace(pattern, content)
        return token.encode()

    def first(self, token_id: int, skip_special_tokens: bool) -> bytes:
        """Like `all` and `without_special`, for a token that begins the text."""
        pieces = self.without_special if skip_special_tokens else self.all
        if self.first_drops and pieces[token_id]:
            token = self._tokenizer.id_to_token(token_id) or ""
            return self._replaced_bytes(token.replace(self.first_drops, ""))
        return pieces[token_id]

    def name(self, token_id: int) -> str:
        """How a list of log-probabilities calls a token: its text, or `bytes:\\xNN...` if it is no whole text."""
        piece = self.all[token_id]
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for child in decoder["decoders"] for step in _flatten(child)]


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:  # an added token, written as plain text
        return token.encode()


class IncrementalDetokenizer:
    """The text of one choice. Give it every id, in order, then `flush` once."""

    __slots__ = (
        "_decoder",
        "_has_begun",
        "_joins_special",
        "_num_to_strip",
        "_pieces",
        "_skips_special",
        "_table",
        "_texts",
        "_was_special",
        "is_inside_character",
        "is_steady",
        "piece",
    )

    def __init__(
        self, pieces: TokenPieces, skip_special_tokens: bool, spaces_between_special_tokens: bool = True
    ) -> None:
        self._pieces = pieces
        self._skips_special = skip_special_tokens
        self._table = pieces.without_special if skip_special_tokens else pieces.all
        self._texts = self._table.texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._has_begun = False
        self.is_steady = False
        """The next token adds its own piece and nothing else, to whole characters."""
        self._joins_special = bool(pieces.separator) and not spaces_between_special_tokens
        self._was_special = False
        self._num_to_strip = pieces.strip_count
        self.piece = b""
        """Bytes that the last token added to the text."""
        self.is_inside_character = False
        """The last bytes are the beginning of a character."""

    def push(self, token_id: int) -> str:
        """The text that this token completes."""
        piece = self._table[token_id]
        if self.is_steady and (text := self._texts[token_id]) is not None:
            self.piece = piece
            return text
        if not self._has_begun:
            self.piece = self._begin(token_id, piece)
        elif piece and not (self._joins_special and self._was_special and token_id in self._pieces.special_ids):
            self.piece = self._pieces.separator + piece
        else:
            self.piece = piece
        if self._joins_special and piece:
            self._was_special = token_id in self._pieces.special_ids
        text = self._decoder.decode(self.piece)
        self.is_inside_character = bool(self._decoder.getstate()[0])
        self.is_steady = self._has_begun and not (self.is_inside_character or self._pieces.separator)
        return text

    def _begin(self, token_id: int, piece: bytes) -> bytes:
        if not piece:
            return piece
        if self._num_to_strip:
            char = self._pieces.strip_char.encode()
            while self._num_to_strip and piece.startswith(char):
                piece, self._num_to_strip = piece[len(char) :], self._num_to_strip - 1
            self._has_begun = bool(piece) or not self._num_to_strip
            return piece
        self._has_begun = True
        return self._pieces.first(token_id, self._skips_special)

    def flush(self) -> str:
        """What is left at the end: U+FFFD if the output ended inside a character, else nothing."""
        return self._decoder.decode(b"", True)
