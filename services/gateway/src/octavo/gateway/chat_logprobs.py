"""Lists of tokens with their log-probabilities, as chats and responses write them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from octavo.gateway.choice_output import OutputToken
from octavo.gateway.detokenization import TokenPieces
from octavo.gateway.logprobs import finite, token_namer


class TokenEntries:
    """`bytes` are what a token adds to the text; null if it adds nothing, as special tokens do."""

    def __init__(self, pieces: TokenPieces, *, as_ids: bool = False) -> None:
        self._pieces = pieces
        self._name = token_namer(pieces, as_ids=as_ids)

    def of(self, tokens: Iterable[OutputToken]) -> list[dict[str, Any]]:
        return [self._entry(token) for token in tokens]

    def _entry(self, token: OutputToken) -> dict[str, Any]:
        logprobs = token.logprobs
        if logprobs is None:
            return {"token": self._name(token.token_id), "logprob": None, "bytes": None, "top_logprobs": []}
        pairs = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
        return {
            "token": self._name(token.token_id),
            "logprob": finite(logprobs.sampled),
            "bytes": None if token.piece is None else list(token.piece),
            "top_logprobs": [
                {
                    "token": self._name(token_id),
                    "logprob": finite(value),
                    "bytes": list(self._pieces.all[token_id]),
                }
                for token_id, value in pairs
            ],
        }
