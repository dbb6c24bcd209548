"""Beam search by transformers, and the comparison of a server's answers with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import openai
import torch

from support.completions import SERVED_NAME


@dataclass(frozen=True)
class BeamCase:
    """One search."""

    prompt_ids: Sequence[int]
    max_tokens: int
    width: int
    length_penalty: float = 1.0
    early_stopping: bool = False


def transformers_answers(model: Any, case: BeamCase, eos_token_ids: list[int]) -> list[list[int]]:
    """Outputs of all beams, best first, each up to its end of sequence."""
    with torch.inference_mode():
        rows = model.generate(
            torch.tensor([list(case.prompt_ids)]),
            attention_mask=torch.ones((1, len(case.prompt_ids)), dtype=torch.long),
            max_new_tokens=case.max_tokens,
            num_beams=case.width,
            num_return_sequences=case.width,
            length_penalty=case.length_penalty,
            early_stopping=case.early_stopping,
            do_sample=False,
            eos_token_id=eos_token_ids,
            pad_token_id=eos_token_ids[0],
        )
    return [_up_to_end(row, eos_token_ids) for row in rows[:, len(case.prompt_ids) :].tolist()]


def _up_to_end(output: list[int], eos_token_ids: list[int]) -> list[int]:
    end = next((place for place, token in enumerate(output) if token in eos_token_ids), len(output) - 1)
    return output[: end + 1]


async def server_answers(client: openai.AsyncOpenAI, case: BeamCase, **options: Any) -> list[list[int]]:
    """The same from the server."""
    answer = await client.completions.create(
        model=SERVED_NAME,
        prompt=list(case.prompt_ids),
        max_tokens=case.max_tokens,
        n=case.width,
        extra_body={
            "use_beam_search": True,
            "length_penalty": case.length_penalty,
            "early_stopping": case.early_stopping,
            "return_token_ids": True,
            **options,
        },
    )
    return [choice.token_ids for choice in answer.choices]  # type: ignore[attr-defined]
