"""Compares what a benchmark was served with the torch backend on the same GPU: a fast wrong answer is void.

    python benchmarks/gpu_check.py ANSWERS.json MODEL_FOLDER

ANSWERS.json maps a workload to some of its requests, {"prompt": [...], "output": [...]}. Each output is gone through
with the model's plain layers and attention in torch: at every place the served token should have the largest logit.
Rounding lets others come close, so the gap to the largest is given in standard deviations of the logits there; a token
that has nothing to do with the context is about 4 of them away. Random weights in place of a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.worker.attention import AttentionMetadata
from octavo.worker.attention_torch import TorchAttention
from octavo.worker.models.dummy import make_dummy_decoder

BLOCK_SIZE = 16
CHUNK = 2048
NUM_CHECKED = 8
"""Requests of each workload."""
LARGEST_GAP = 0.5
"""Standard deviations of the logits beyond which the answer is void."""


def chosen(num_requests: int) -> list[int]:
    """Which requests of a workload are checked, evenly spread."""
    return sorted({int(index) for index in np.linspace(0, num_requests - 1, NUM_CHECKED)})


class PlainModel:
    """The torch backend, one sequence at a time."""

    def __init__(self, folder: Path, max_len: int, device: torch.device) -> None:
        self.model = make_dummy_decoder(folder, torch.bfloat16, device)
        config = self.model.config
        num_blocks = -(-max_len // BLOCK_SIZE)
        shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        pool = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self.attention = TorchAttention(pool, config.num_heads, config.attention)
        self.table = torch.arange(num_blocks, dtype=torch.int32, device=device)[None]
        self.device = device

    @torch.inference_mode()
    def gaps(self, prompt: list[int], output: list[int]) -> Tensor:
        """float32 [len(output)]: how far each token's logit lies below the largest of its place."""
        tokens = torch.tensor(prompt + output[:-1], device=self.device)
        found = []
        for start in range(0, len(tokens), CHUNK):
            part = tokens[start : start + CHUNK]
            hidden = self._forward(part, start)
            first = max(len(prompt) - 1, start)
            if first < start + len(part):
                logits = self.model.logits(hidden[first - start :])
                served = torch.tensor(output[first - len(prompt) + 1 :][: len(logits)], device=self.device)
                gap = logits.amax(-1) - logits.gather(1, served[:, None])[:, 0]
                found.append(gap / logits.std(-1))
        return torch.cat(found)

    def _forward(self, part: Tensor, start: int) -> Tensor:
        length, end = len(part), start + len(part)
        metadata = AttentionMetadata(
            slot_mapping=torch.arange(start, end, device=self.device),
            seq_lens=torch.tensor([end], dtype=torch.int32, device=self.device),
            block_tables=self.table,
            query_lens_on_host=np.array([length]),
            seq_lens_on_host=np.array([end]),
        )
        positions = torch.arange(start, end, device=self.device)
        hidden: Tensor = self.model.forward(part, positions, self.attention.prepare(metadata))
        return hidden


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    answers: dict[str, list[dict[str, Any]]] = json.loads(arguments.answers.read_text(encoding="utf-8"))
    max_len = max(len(one["prompt"]) + len(one["output"]) for some in answers.values() for one in some)
    plain = PlainModel(arguments.model, max_len, torch.device(arguments.device))
    is_void = False
    for name, requests in answers.items():
        began = time.perf_counter()
        gaps = torch.cat([plain.gaps(one["prompt"], one["output"]) for one in requests])
        largest = gaps.max().item()
        wrong = not largest < LARGEST_GAP
        is_void |= wrong
        print(
            f"check {name:6} {len(requests)} requests, {len(gaps)} tokens: "
            f"{100 * (gaps == 0).float().mean().item():.1f} % have torch's largest logit, the others are at most "
            f"{largest:.3f} standard deviations below it, {gaps.quantile(0.99).item():.3f} in 99 %"
            f"{' VOID' if wrong else ''}   ({time.perf_counter() - began:.1f} s)",
            flush=True,
        )
    sys.exit(is_void)


if __name__ == "__main__":
    main()
