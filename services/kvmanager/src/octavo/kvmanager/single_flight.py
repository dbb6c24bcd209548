"""Which sequence is computing a block that nobody has published yet."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.common.block_hash import BlockKey


class Flights:
    """Claims on the full blocks of prompts that are being computed: the first claim on a key counts.

    A claim ends when its block is published, or when its sequence gives up its table.
    """

    def __init__(self) -> None:
        self._claims: dict[BlockKey, int] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def items(self) -> Iterable[tuple[BlockKey, int]]:
        return self._claims.items()

    def leader(self, key: BlockKey) -> int | None:
        """The sequence that computes the block, or None."""
        return self._claims.get(key)

    def claim(self, sequence_id: int, keys: Iterable[BlockKey]) -> None:
        claims = self._claims
        for key in keys:
            claims.setdefault(key, sequence_id)

    def end(self, sequence_id: int, keys: Iterable[BlockKey]) -> None:
        """The claims of this sequence on these keys end."""
        claims = self._claims
        for key in keys:
            if claims.get(key) == sequence_id:
                del claims[key]
