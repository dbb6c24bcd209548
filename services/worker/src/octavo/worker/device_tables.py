"""The worker's mirror of the block tables, on the device as well: attention reads it there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.common.messages.step import TableDelta
from octavo.worker.block_tables import BlockTables


class DeviceTables(BlockTables):
    """The same tables twice; the host's are ahead by what the device has not run yet."""

    def __init__(self, num_slots: int, max_blocks_per_seq: int, num_blocks: int, device: torch.device) -> None:
        super().__init__(num_slots, max_blocks_per_seq, num_blocks)
        self.on_device = torch.zeros((num_slots, max_blocks_per_seq), dtype=torch.int32, device=device)

    def append(self, deltas: Sequence[TableDelta]) -> None:
        """Apply deltas that `check` has passed, on the host now and on the device in stream order."""
        places, block_ids = self.append_on_host(deltas)
        if places:
            device = self.on_device.device
            values = torch.tensor(block_ids, dtype=torch.int32).to(device)
            self.on_device.view(-1).index_copy_(0, torch.tensor(places).to(device), values)

    def of_rows(self, slots: Tensor, num_columns: int) -> Tensor:
        """int32 [num_rows, num_columns]: the first entries of the slots' tables."""
        return self.on_device[:, :num_columns].index_select(0, slots)
