"""Greedy tokens that transformers gives, and the comparison of a server's tokens with them.

tests/data/smollm2_greedy.json: SmolLM2-135M-Instruct (the Q4_1 GGUF file, dequantised) in fp32 by transformers, 64
tokens past any end of sequence for each of 14 prompts. `margins` are the distances between the two largest logits of
each place.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from support.tiny_models import TinyModel, prompt_of

FORGIVEN_MARGIN = 0.005
"""Below it the order of summation in fp32 may decide which token is the largest."""
FORGIVEN_MARGIN_BF16 = 0.3
"""The same for a server that computes in bfloat16; the reference stays in fp32."""

_SMOLLM2 = Path(__file__).parents[1] / "data" / "smollm2_greedy.json"

Continue = Callable[[list[int], int], Awaitable[list[list[int]]]]
"""(prompt ids, number of tokens) -> the output ids of each choice."""


@dataclass(frozen=True)
class Reference:
    """One prompt and its greedy continuation."""

    name: str
    prompt_ids: list[int]
    output_ids: list[int]
    margins: list[float]
    eos_at: int | None = None
    """Index of the first end of sequence in the output."""
    messages: list[dict[str, str]] | None = None
    """The chat that the prompt was made from."""


def smollm2_references() -> list[Reference]:
    entries: list[dict[str, Any]] = json.loads(_SMOLLM2.read_text(encoding="utf-8"))
    return [Reference(**entry) for entry in entries]


def tiny_references(model: TinyModel, num_tokens: int) -> list[Reference]:
    """Prompts around the borders of blocks and chunks, three of which share a long prefix."""
    shared = prompt_of(40)
    prompts = [prompt_of(length) for length in (1, 15, 16, 17, 31, 32, 33, 64, 65, 100, 150)]
    prompts += [shared + prompt_of(9), shared + prompt_of(24), shared[:20] + prompt_of(50)]
    return [tiny_reference(model, prompt, num_tokens) for prompt in prompts]


def tiny_reference(model: TinyModel, prompt: list[int], num_tokens: int) -> Reference:
    """What transformers makes of one prompt."""
    output = model.greedy(prompt, num_tokens)
    best = torch.topk(model.logits(prompt + output)[len(prompt) - 1 : -1], 2).values
    return Reference(f"{len(prompt)} tokens", prompt, output, (best[:, 0] - best[:, 1]).tolist())


async def assert_follows(
    reference: Reference,
    continue_from: Continue,
    num_tokens: int | None = None,
    forgiven_margin: float = FORGIVEN_MARGIN,
) -> None:
    """Every choice equals the reference; a forgiven mismatch is passed over by going on from the reference's prefix."""
    end = len(reference.output_ids) if num_tokens is None else num_tokens
    start = 0
    while start < end:
        expected = reference.output_ids[start:end]
        outputs = await continue_from(reference.prompt_ids + reference.output_ids[:start], end - start)
        mismatches = [_first_mismatch(output, expected) for output in outputs]
        found = [mismatch for mismatch in mismatches if mismatch is not None]
        if not found:
            return
        place = start + min(found)
        margin = reference.margins[place]
        assert margin < forgiven_margin, (
            f"{reference.name}: other tokens from place {place}, margin {margin:.4f}: {outputs} instead of {expected}"
        )
        start = place + 1


def _first_mismatch(output: list[int], expected: list[int]) -> int | None:
    assert len(output) == len(expected)
    return next((place for place, pair in enumerate(zip(output, expected, strict=True)) if pair[0] != pair[1]), None)
