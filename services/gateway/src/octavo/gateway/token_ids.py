"""Token ids that clients give."""

from __future__ import annotations

from typing import Any

from octavo.gateway.http_errors import FieldError


def check_token_ids(ids: list[Any], param: str, vocab_size: int) -> None:
    """Raises FieldError for the first entry that is not an integer from 0 to vocab_size - 1."""
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size):
        return
    for position, token_id in enumerate(ids):
        if type(token_id) is not int:
            name = f"{param}[{position}]"
            raise FieldError(name, f"{name}: is not an integer token id", "invalid_value")
        if not 0 <= token_id < vocab_size:
            name = f"{param}[{position}]"
            message = f"{name}: token id {token_id} is not in the vocabulary, 0 to {vocab_size - 1}"
            raise FieldError(name, message, "token_out_of_range")
