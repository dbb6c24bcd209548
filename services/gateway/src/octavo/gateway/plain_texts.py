"""Texts of the tokens that may be sent as they come, which are most."""

from __future__ import annotations

import functools

from octavo.gateway.detokenization import TokenPieces
from octavo.gateway.stop_strings import StopStrings


class PlainTexts(dict[int, str | None]):
    """Text of each token id that ends no choice, is whole characters, and in which no stop string begins; None for the
    others. Filled on first use."""

    def __init__(
        self,
        pieces: TokenPieces,
        skips_special_tokens: bool,
        stops: StopStrings | None,
        ending_token_ids: frozenset[int],
    ) -> None:
        super().__init__()
        self._texts = (pieces.without_special if skips_special_tokens else pieces.all).texts
        self._stops, self._ending_token_ids = stops, ending_token_ids

    def __missing__(self, token_id: int) -> str | None:
        text = self._texts[token_id] or None
        if token_id in self._ending_token_ids or (text and self._stops and self._stops.begins.search(text)):
            text = None
        self[token_id] = text
        return text


@functools.lru_cache(maxsize=8)
def plain_texts(
    pieces: TokenPieces, skips_special_tokens: bool, stops: StopStrings | None, ending_token_ids: frozenset[int]
) -> PlainTexts:
    """Those of these rules, shared by all choices that have them; the ones that were asked for last are kept."""
    return PlainTexts(pieces, skips_special_tokens, stops, ending_token_ids)
