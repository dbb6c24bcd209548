"""Decode throughput of our model runner against transformers' `generate`, on the CPU, in one process.

    python benchmarks/decode_vs_transformers.py --model FOLDER

Both decode the same prompts greedily in fp32 with the same threads; repeats alternate, and prefill is left out of both
times. Run it while nothing else does. transformers must be installed.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table

from octavo.common.messages.step import OpenSlot, RowFlag, StepPlan, TableDelta
from octavo.worker.attention_torch import TorchAttention
from octavo.worker.kv_cache import KvCache
from octavo.worker.model_runner import ModelRunner
from octavo.worker.models.weights import load_decoder

BLOCK_SIZE = 16


class Ours:
    """The worker's model runner, driven without links."""

    name = "octavo"

    def __init__(self, folder: Path, batch_size: int, max_len: int) -> None:
        model = load_decoder(folder, torch.float32, torch.device("cpu"))
        self._blocks_each = -(-max_len // BLOCK_SIZE)
        kv_cache = KvCache(model.config, batch_size * self._blocks_each, BLOCK_SIZE, model.dtype, model.device)
        self._runner = ModelRunner(
            model,
            kv_cache,
            TorchAttention(kv_cache.pool, model.config.num_heads, model.config.attention),
            max_num_seqs=batch_size,
            max_num_batched_tokens=batch_size * max_len,
            max_model_len=max_len,
        )
        self._runner.warm_up()

    def decode(self, prompts: list[list[int]], num_tokens: int) -> tuple[list[list[int]], float]:
        """Tokens of each prompt, and the seconds from the first to the last."""
        self._runner.reset()
        slots = list(range(len(prompts)))
        plan = StepPlan(
            step_id=1,
            opened_slots=[OpenSlot(slot, slot, (0,), 0.0, 1.0, 0, None) for slot in slots],
            table_deltas=[self._blocks_of(slot) for slot in slots],
            slots=slots,
            starts=[0] * len(slots),
            lengths=[len(prompt) for prompt in prompts],
            flags=[RowFlag.SAMPLE] * len(slots),
            token_ids=[token for prompt in prompts for token in prompt],
        )
        steps = [self._runner.execute(plan).token_ids]
        started = time.perf_counter()
        for index in range(num_tokens - 1):
            plan = StepPlan(
                step_id=index + 2,
                slots=slots,
                starts=[len(prompt) + index for prompt in prompts],
                lengths=[1] * len(slots),
                flags=[RowFlag.SAMPLE | RowFlag.FED_BY_LAST_SAMPLE] * len(slots),
            )
            steps.append(self._runner.execute(plan).token_ids)
        seconds = time.perf_counter() - started
        return [list(tokens) for tokens in zip(*steps, strict=True)], seconds

    def _blocks_of(self, slot: int) -> TableDelta:
        first = slot * self._blocks_each
        return TableDelta(slot, 0, tuple(range(first, first + self._blocks_each)), (0,) * self._blocks_each)


class Clock(transformers.StoppingCriteria):  # type: ignore[misc]
    """Never stops; notes the time at which each token is there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Transformers:
    """`generate` with its default attention and cache."""

    name = "transformers"

    def __init__(self, folder: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def decode(self, prompts: list[list[int]], num_tokens: int) -> tuple[list[list[int]], float]:
        """See Ours."""
        clock = Clock()
        with torch.inference_mode():
            out = self._model.generate(
                torch.tensor(prompts),
                attention_mask=torch.ones((len(prompts), len(prompts[0])), dtype=torch.long),
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=-1,
                pad_token_id=0,
                stopping_criteria=transformers.StoppingCriteriaList([clock]),
            )
        return out[:, len(prompts[0]) :].tolist(), clock.times[-1] - clock.times[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json and *.safetensors")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=33, help="tokens generated for each prompt")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    theirs = Transformers(options.model)
    vocab_size = theirs._model.config.vocab_size
    table = Table(title=f"decode, tokens/s, fp32, {options.threads} threads, median (least to most) of repeats")
    for column in ("batch", "octavo", "transformers", "ratio of medians", "same tokens"):
        table.add_column(column, justify="right")
    for batch_size in options.batch:
        ours = Ours(options.model, batch_size, options.prompt_tokens + options.tokens)
        generator = torch.Generator().manual_seed(batch_size)
        prompts = torch.randint(vocab_size, (batch_size, options.prompt_tokens), generator=generator).tolist()
        rates: dict[str, list[float]] = {ours.name: [], theirs.name: []}
        outputs: dict[str, list[list[int]]] = {}
        for repeat in track(range(options.repeats + 1), f"batch {batch_size}"):
            for engine in (ours, theirs):
                outputs[engine.name], seconds = engine.decode(prompts, options.tokens)
                if repeat:  # the first round warms both up
                    rates[engine.name].append(batch_size * (options.tokens - 1) / seconds)
        num_same = sum(a == b for a, b in zip(outputs[ours.name], outputs[theirs.name], strict=True))
        ratio = statistics.median(rates[ours.name]) / statistics.median(rates[theirs.name])
        table.add_row(
            str(batch_size),
            _spread(rates[ours.name]),
            _spread(rates[theirs.name]),
            f"{ratio:.2f}",
            f"{num_same} of {batch_size}",
        )
    Console().print(table)


def _spread(rates: list[float]) -> str:
    return f"{statistics.median(rates):.1f} ({min(rates):.1f} to {max(rates):.1f})"


if __name__ == "__main__":
    main()
