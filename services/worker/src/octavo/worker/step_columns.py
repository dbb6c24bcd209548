"""The columns of a step: on the host as they are or as long as a graph has them, on the device as kernels get them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.worker.kernels.decode_rows import ITEM, TILE, DecodeRows, PrefixTiles
from octavo.worker.kernels.paged_prefill import PrefillRows
from octavo.worker.kernels.sample import DrawColumns
from octavo.worker.step_buffer import Int32Array

NUM_TOKEN_COLUMNS = 3
NUM_DRAW_COLUMNS = 7


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """The tokens of a step, on the device, all int32 [num_tokens]."""

    slots: Tensor  # -1 is padding
    positions: Tensor
    sent: Tensor  # token ids, or gpu_batch.SENT_NOTHING


@dataclass(frozen=True, slots=True)
class StepColumns:
    """A step, on the device."""

    tokens: TokenColumns
    decodes: DecodeRows | None
    prefixes: PrefixTiles | None
    prefills: PrefillRows | None
    drawn_tokens: Tensor | None  # int32 [num_logits_rows] |-> token of the step; None: each in its place
    draws: DrawColumns | None


@dataclass(frozen=True, slots=True)
class MixedShape:
    """What a graph of mixed rows has room for."""

    num_tokens: int
    num_rows: int
    """Of one token; also rows of logits, and draws."""
    num_items: int
    num_tiles: int
    """Of rows of many tokens; also such rows."""
    num_prefix_tiles: int | None
    """None: rows read nothing together."""

    def holds(self, mixed: MixedColumns) -> bool:
        """The step fits if padded."""
        return (
            mixed.has_prefixes == (self.num_prefix_tiles is not None)
            and len(mixed.tokens[0]) <= self.num_tokens
            and all(len(column) <= self.num_rows for column in mixed.draws[:2])
            and all(len(column) <= self.num_tiles for column in mixed.prefills[-1:])
            and mixed.num_decodes <= self.num_rows
        )


@dataclass(frozen=True, slots=True)
class MixedColumns:
    """A step of any rows: token, decode, prefill and draw columns, those of a kind that has no rows left out.

    Decode columns are the items, then members and tiles of shared prefixes if there are any. The first column of the
    draws, before their NUM_DRAW_COLUMNS, is the step's token of each row of logits.
    """

    tokens: list[Int32Array]
    decodes: list[Int32Array]
    prefills: list[Int32Array]
    draws: list[Int32Array]
    num_decodes: int

    @property
    def has_prefixes(self) -> bool:
        """Decode rows share what they read."""
        return len(self.decodes) > 1

    @property
    def columns(self) -> list[Int32Array]:
        """In the order in which they lie in the buffer."""
        return [*self.tokens, *self.decodes, *self.prefills, *self.draws]

    def padded(self, shape: MixedShape) -> MixedColumns:
        """All kinds at the lengths of the shape, which holds the step. What is added computes and draws nothing."""
        num_rows, num_tiles = shape.num_rows, shape.num_tiles
        decode_lengths = [ITEM * shape.num_items]
        if shape.num_prefix_tiles is not None:
            decode_lengths += [num_rows, TILE * shape.num_prefix_tiles]
        empty_row = num_tiles  # one more than there may be: a row without queries, for tiles that have nothing to do
        return MixedColumns(
            _filled(self.tokens, [shape.num_tokens] * NUM_TOKEN_COLUMNS, [-1, 0, 0]),
            _filled(self.decodes, decode_lengths, [0] * len(decode_lengths)),
            _filled(self.prefills, [num_tiles + 1] * 4 + [num_tiles] * 2, [0, 0, 0, 0, empty_row, 0]),
            _filled(
                self.draws,
                [num_rows, num_rows, num_rows, num_rows, num_rows, 2 * num_rows, num_rows, num_rows],
                [0, 0, 0, 0, 0, 0, 0, -1],
            ),
            num_rows,
        )

    def on_device(self, views: Sequence[Tensor]) -> StepColumns:
        """What kernels get of them, given where each lies."""
        kinds = iter(views)
        tokens, decodes, prefills, draws = (
            [next(kinds) for _ in columns] for columns in (self.tokens, self.decodes, self.prefills, self.draws)
        )
        rows, prefixes = decode_rows(decodes) if decodes else (None, None)
        return StepColumns(
            token_columns(tokens),
            rows,
            prefixes,
            PrefillRows(*prefills) if prefills else None,
            draws[0] if draws else None,
            draw_columns(draws[1:]) if draws else None,
        )


_EMPTY = np.zeros(0, dtype=np.int32)
NO_COLUMNS = MixedColumns([], [], [], [], 0)


def token_columns(views: Sequence[Tensor]) -> TokenColumns:
    """From the first NUM_TOKEN_COLUMNS columns."""
    return TokenColumns(*views)


def decode_rows(views: Sequence[Tensor]) -> tuple[DecodeRows, PrefixTiles | None]:
    """From the columns of decode rows."""
    prefixes = PrefixTiles(views[1], views[2].view(-1, TILE)) if len(views) > 1 else None
    return DecodeRows(views[0].view(-1, ITEM), prefixes is not None), prefixes


def draw_columns(views: Sequence[Tensor]) -> DrawColumns:
    """From the NUM_DRAW_COLUMNS columns of draws."""
    rows, temperatures, top_ps, top_ks, seeds, positions, fed_slots = views
    return DrawColumns(
        rows, temperatures.view(torch.float32), top_ps.view(torch.float32), top_ks, seeds, positions, fed_slots
    )


def padded(values: Sequence[int] | np.ndarray, length: int, filler: int) -> Int32Array:
    """A column of that length that begins with the values."""
    column = np.full(length, filler, dtype=np.int32)
    column[: len(values)] = values
    return column


def _filled(columns: Sequence[Int32Array], lengths: Sequence[int], fillers: Sequence[int]) -> list[Int32Array]:
    """All of the lengths; no columns at all count as empty ones."""
    return [
        padded(column, length, filler)
        for column, length, filler in zip(columns or [_EMPTY] * len(lengths), lengths, fillers, strict=True)
    ]
