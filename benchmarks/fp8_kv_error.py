"""What storing K and V, or weights, as e4m3 does to a real model's output, on the CPU.

    python benchmarks/fp8_kv_error.py --model FOLDER [--text FILE] [--num-tokens N]

Everything is computed twice in float32, once over a pool of float32 and once over a pool of e4m3, with the same tokens
(teacher forcing). Rows are the ways to choose the scales: `calibrated` is what a worker does; the last two round the
weights as well, and the activations that they are multiplied with. Tokens agree where both
pools give the same most likely token; a flip is told with the largest margin, between the two most likely tokens of
the float32 pool, that was overturned.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from octavo.worker.attention import AttentionMetadata
from octavo.worker.attention_torch import TorchAttention
from octavo.worker.kv_cache import KvCache
from octavo.worker.kv_scales import calibrate, scales_for
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.weights import load_decoder

REPOSITORY = Path(__file__).parents[1]
CHUNK = 64
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Pass:
    """One pass over a text."""

    logits: Tensor  # float32 [num_tokens, vocab_size]
    largest: Tensor  # float32 [num_layers, 2, num_kv_heads]: magnitudes in the pool, scaled


@torch.inference_mode()
def run(model: Decoder, token_ids: list[int], scales: Tensor | None) -> Pass:
    """Chunk by chunk, so that later chunks read what earlier ones stored."""
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    dtype = model.dtype if scales is None else torch.float8_e4m3fn
    kv_cache = KvCache(model.config, num_blocks, BLOCK_SIZE, dtype, model.device, scales=scales)
    kv_cache.pool.zero_()
    attention = TorchAttention(kv_cache.pool, model.config.num_heads, model.config.attention, scales)
    logits = []
    for start in range(0, len(token_ids), CHUNK):
        chunk = torch.tensor(token_ids[start : start + CHUNK])
        query_lens, seq_lens = np.array([len(chunk)]), np.array([start + len(chunk)])
        positions = torch.arange(start, start + len(chunk))
        metadata = AttentionMetadata(
            slot_mapping=positions,
            seq_lens=torch.from_numpy(seq_lens).to(torch.int32),
            block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
            query_lens_on_host=query_lens,
            seq_lens_on_host=seq_lens,
        )
        logits.append(model.logits(model.forward(chunk, positions, attention.prepare(metadata))))
    largest = kv_cache.pool.float().abs().amax((0, 4, 5))
    return Pass(torch.cat(logits), largest if scales is None else largest * scales)


@dataclass
class Comparison:
    """Sums over passes."""

    num_tokens: int = 0
    num_agreeing: int = 0
    largest_margin: float = 0.0
    squared_error: float = 0.0
    squared_size: float = 0.0
    largest_error: float = 0.0
    divergence: float = 0.0

    def add(self, exact: Tensor, stored: Tensor) -> None:
        """Logits of the same places, [num_places, vocab_size]."""
        best = exact.topk(2, -1)
        agrees = stored.argmax(-1) == best.indices[:, 0]
        margins = (best.values[:, 0] - best.values[:, 1])[~agrees]
        error = stored - exact
        self.num_tokens += len(exact)
        self.num_agreeing += int(agrees.sum())
        self.largest_margin = max(self.largest_margin, *margins.tolist(), 0.0)
        self.squared_error += float(error.square().sum())
        self.squared_size += float((exact - exact.mean(-1, keepdim=True)).square().sum())
        self.largest_error = max(self.largest_error, float(error.abs().max()))
        self.divergence += float(
            functional.kl_div(stored.log_softmax(-1), exact.log_softmax(-1), reduction="sum", log_target=True)
        )

    def cells(self, exact_perplexity: float, perplexity: float) -> list[str]:
        return [
            f"{(self.squared_error / self.squared_size) ** 0.5:.4f}",
            f"{self.largest_error:.2f}",
            f"{self.divergence / self.num_tokens:.5f}",
            f"{self.num_agreeing} of {self.num_tokens}",
            f"{self.largest_margin:.2f}",
            f"{perplexity:.4f} ({100 * (perplexity / exact_perplexity - 1):+.2f} %)",
        ]


def perplexity(logits: Tensor, token_ids: list[int]) -> float:
    return float(functional.cross_entropy(logits[:-1], torch.tensor(token_ids[1:])).exp())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, default=REPOSITORY / "README.md")
    parser.add_argument("--num-tokens", type=int, default=1024, help="of the text")
    parser.add_argument(
        "--references",
        type=Path,
        default=REPOSITORY / "tests" / "data" / "smollm2_greedy.json",
        help="greedy continuations of the model: a list of objects with prompt_ids and output_ids",
    )
    arguments = parser.parse_args()
    model = load_decoder(arguments.model, torch.float32, torch.device("cpu"))
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    text = tokenizer.encode(arguments.text.read_text(encoding="utf-8")).ids[: arguments.num_tokens]
    continuations = json.loads(arguments.references.read_text(encoding="utf-8"))

    exact_text = run(model, text, None)
    exact = [run(model, one["prompt_ids"] + one["output_ids"], None).logits for one in continuations]
    expected = perplexity(exact_text.logits, text)
    calibrated = calibrate(model)
    rounded = load_decoder(arguments.model, torch.float32, torch.device("cpu"), quantize=True)
    ways = {
        "calibrated": (model, calibrated),
        "calibrated, one a layer": (model, calibrated.amax(-1, keepdim=True).expand_as(calibrated).contiguous()),
        "by the text itself": (model, scales_for(exact_text.largest)),
        "1": (model, torch.ones_like(calibrated)),
        "float32 K and V, e4m3 weights": (rounded, None),
        "calibrated, e4m3 weights": (rounded, calibrate(rounded)),
    }
    table = Table(title=f"e4m3 K and V of {arguments.model.name}: {len(text)} tokens of {arguments.text.name}")
    for heading in ("scales", "logit error", "largest", "KL, nats", "tokens agree", "largest margin", "perplexity"):
        table.add_column(heading)
    outputs = Table(title=f"{len(continuations)} greedy continuations")
    for heading in ("scales", "logit error", "largest", "KL, nats", "tokens agree", "largest margin"):
        outputs.add_column(heading)
    for name, (computed_by, scales) in ways.items():
        stored = run(computed_by, text, scales)
        over_text, over_outputs = Comparison(), Comparison()
        over_text.add(exact_text.logits, stored.logits)
        table.add_row(name, *over_text.cells(expected, perplexity(stored.logits, text)))
        for one, logits in zip(continuations, exact, strict=True):
            places = slice(len(one["prompt_ids"]) - 1, -1)
            found = run(computed_by, one["prompt_ids"] + one["output_ids"], scales).logits
            over_outputs.add(logits[places], found[places])
        outputs.add_row(name, *over_outputs.cells(expected, expected)[:-1])
    console = Console(width=130)
    console.print(f"perplexity over a pool of float32: {expected:.4f}")
    console.print(table, outputs)
    used = exact_text.largest / (448 * calibrated)
    console.print(f"share of what calibrated scales can hold: {float(used.min()):.3f} to {float(used.max()):.3f}")


if __name__ == "__main__":
    main()
