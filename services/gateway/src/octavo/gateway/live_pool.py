"""Owns what the gateway knows of the KV manager's pool, so that whoever comes can be shown all of it at once."""

from __future__ import annotations

from array import array
from typing import Any

from octavo.common.codecs.arrays import pack_int32, unpack_int32, unpack_int64
from octavo.gateway.live_frames import blocks_frame, json_frame
from octavo.v1 import kvmanager_service_pb2 as pb

NOT_PUBLISHED = -2


class LivePool:
    """The pool as of the last frame. Nothing until the first one."""

    def __init__(self) -> None:
        self._info: dict[str, Any] | None = None
        self._states = bytearray()
        self._columns: dict[str, array[int]] = {}
        self._tables: dict[int, tuple[list[int], int, int]] = {}
        """sequence |-> blocks, tokens known, blocks published"""

    def take(self, frame: pb.PoolFrame) -> list[bytes]:
        """Remember a frame. Returns it as frames of the live view."""
        if frame.is_first:
            self._reset(frame.num_blocks)
        self._info = _info(frame)
        tables = []
        for table in frame.tables:
            block_ids = unpack_int32(table.block_ids)
            kept = self._tables[table.sequence_id][0] if table.num_kept_blocks else []
            known = (kept[: table.num_kept_blocks] + block_ids, table.num_known_tokens, table.num_published_blocks)
            self._tables[table.sequence_id] = known
            tables.append([table.sequence_id, table.num_kept_blocks, block_ids, *known[1:]])
        gone = unpack_int64(frame.gone_sequence_ids)
        for sequence_id in gone:
            self._tables.pop(sequence_id, None)
        told = [json_frame({**self._info, "is_first": frame.is_first, "tables": tables, "gone": gone})]
        if changed := frame.blocks.states:
            block_ids = unpack_int32(frame.blocks.block_ids)
            first = block_ids[0] if block_ids[-1] - block_ids[0] == len(changed) - 1 else -1
            self._remember_blocks(frame.blocks, block_ids, first)
            packed = [frame.blocks.block_ids, changed, *(getattr(frame.blocks, name) for name in self._columns)]
            told.append(blocks_frame(first, *packed))
        return told

    def everything(self) -> list[bytes]:
        """Frames of the live view for one that knows nothing."""
        if self._info is None:
            return []
        tables = [[sequence_id, 0, *table] for sequence_id, table in self._tables.items()]
        told = json_frame({**self._info, "is_first": True, "tables": tables, "gone": []})
        packed = [pack_int32(column) for column in self._columns.values()]
        return [told, blocks_frame(0, b"", bytes(self._states), *packed)]

    def forget(self) -> None:
        """It is not followed any more."""
        self._info = None

    def _reset(self, num_blocks: int) -> None:
        self._states = bytearray(num_blocks)
        zeros, unpublished = [0] * num_blocks, [NOT_PUBLISHED] * num_blocks
        filling = {"ref_counts": zeros, "generations": zeros, "parent_ids": unpublished, "parent_generations": zeros}
        self._columns = {name: array("i", values) for name, values in filling.items()}
        self._tables = {}

    def _remember_blocks(self, changed: pb.BlockChanges, block_ids: list[int], first: int) -> None:
        for name, column in self._columns.items():
            values = unpack_int32(getattr(changed, name))
            if first >= 0:
                column[first : first + len(values)] = array("i", values)
            else:
                for block_id, value in zip(block_ids, values, strict=True):
                    column[block_id] = value
        if first >= 0:
            self._states[first : first + len(changed.states)] = changed.states
        else:
            for block_id, state in zip(block_ids, changed.states, strict=True):
                self._states[block_id] = state


def _info(frame: pb.PoolFrame) -> dict[str, Any]:
    return {
        "type": "pool",
        "pool_id": frame.pool_id,
        "life": f"{frame.life:x}",
        "has_more": frame.has_more,
        "num_blocks": frame.num_blocks,
        "block_size": frame.block_size,
        "num_sequences": frame.num_sequences,
        "counts": {field.name: getattr(frame.counts, field.name) for field in frame.counts.DESCRIPTOR.fields},
        "totals": {field.name: getattr(frame.totals, field.name) for field in frame.totals.DESCRIPTOR.fields},
    }
