"""What bounds the workloads on a GPU: their products and reads at the rates measured in the same run, and nothing else.

The model is that of workloads.LLAMA_8B in bfloat16. All requests are there at time 0 and decode in lockstep; tokens
that all prompts begin with are computed and read once.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import gpu_timing
import numpy as np
from gpu_timing import Limits
from workloads import LLAMA_8B, Workload

_HEADS, _KV_HEADS, _HEAD_DIM = (LLAMA_8B[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
_HIDDEN, _INNER, _LAYERS = (LLAMA_8B[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers"))
LAYER_WEIGHTS = _LAYERS * _HIDDEN * ((2 * _HEADS + 2 * _KV_HEADS) * _HEAD_DIM + 3 * _INNER)
OUTPUT_WEIGHTS = _HIDDEN * LLAMA_8B["vocab_size"]
BYTES_PER_WEIGHT = 2
KV_BYTES_PER_TOKEN = _LAYERS * 2 * _KV_HEADS * _HEAD_DIM * 2
FLOP_PER_PAIR = _LAYERS * 4 * _HEADS * _HEAD_DIM
"""Of attention, for each query and key that it sees."""


@dataclass(frozen=True)
class Bound:
    """The least time of a workload."""

    prompts_s: float
    decodes_s: float
    num_tokens: int
    num_steps: int

    @property
    def tpot_ms(self) -> float:
        """Where all outputs are equally long."""
        return 1e3 * self.decodes_s / self.num_steps

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / (self.prompts_s + self.decodes_s)


@dataclass(frozen=True)
class Figure:
    """A line of the table that `gpu_figures.py` prints."""

    name: str
    value: float
    unit: str
    share: float
    """Of the limit; 1 is the limit."""

    def __str__(self) -> str:
        return f"{self.name}: {self.value:,.2f} {self.unit}, {self.share:.2f} of the limit"

    def append_to(self, path: Path | None) -> None:
        if path is not None:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(self)) + "\n")


def measure_elsewhere() -> Limits:
    """In a process of its own, which gives the GPU back."""
    found = subprocess.run([sys.executable, gpu_timing.__file__], check=True, stdout=subprocess.PIPE)
    return Limits(**json.loads(found.stdout))


def figure_of(name: str, tpot_ms: float, tokens_per_s: float, workload: Workload, limits: Limits) -> Figure:
    """TPOT where outputs are equally long and few, as L1's and L64's are, else output tokens a second."""
    bound = bound_of(workload, limits)
    if name.startswith(("L", "S")):
        return Figure(f"{name} TPOT", tpot_ms, "ms", bound.tpot_ms / tpot_ms)
    return Figure(f"{name} output", tokens_per_s, "tokens/s", tokens_per_s / bound.tokens_per_s)


def bound_of(workload: Workload, limits: Limits) -> Bound:
    """Prompts: products and attention at the rate of products. A decode step: its products at that rate or all weights
    at the copy rate, whichever takes longer, and K and V of all contexts at the copy rate."""
    shared = _num_shared([prompt for prompt, _ in workload])
    own_lens = np.array([len(prompt) - shared for prompt, _ in workload])
    output_lens = np.array([num_output for _, num_output in workload])
    num_prompt_tokens = shared + int(own_lens.sum())
    pairs = shared * (shared + 1) / 2 + float((own_lens * shared + own_lens * (own_lens + 1) / 2).sum())
    flop = 2.0 * (LAYER_WEIGHTS * num_prompt_tokens + OUTPUT_WEIGHTS * len(workload)) + FLOP_PER_PAIR * pairs
    weights = LAYER_WEIGHTS + OUTPUT_WEIGHTS
    decodes_s = 0.0
    num_steps = int(output_lens.max()) - 1
    for step in range(1, num_steps + 1):
        is_running = output_lens > step
        num_keys = shared + int((own_lens[is_running] + step).sum())
        products_s = 2.0 * weights * int(is_running.sum()) / limits.matmul_flops
        weights_s = BYTES_PER_WEIGHT * weights / limits.copy_bytes_per_s
        decodes_s += max(products_s, weights_s) + KV_BYTES_PER_TOKEN * num_keys / limits.copy_bytes_per_s
    return Bound(flop / limits.matmul_flops, decodes_s, int(output_lens.sum()), num_steps)


def _num_shared(prompts: list[list[int]]) -> int:
    """Tokens that all prompts begin with; 0 of a single one."""
    if len(prompts) == 1:
        return 0
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False)))
