"""Random weights for a config.json without a checkpoint: for benchmarks, where only the shapes matter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from octavo.worker.models.config import read_model_config
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.model_json import read_json
from octavo.worker.models.quantization import Fp8Weights, read_quantization
from octavo.worker.models.weights import Progress, build_decoder, expected_tensors

STANDARD_DEVIATION = 0.02


def make_dummy_decoder(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress = lambda share: None,
    max_model_len: int | None = None,
    quantize: bool = False,
    seed: int = 0,
) -> Decoder:
    """A decoder of the shapes in `folder`/config.json, rounded to e4m3 with `quantize` or if the checkpoint would be.

    The same seed gives the same weights on the same device.
    """
    config = read_model_config(folder, max_model_len)
    config = replace(config, tied_embeddings=bool(config.tied_embeddings))
    shapes = expected_tensors(config)
    num_expected = sum(torch.Size(shape).numel() for shape in shapes.values())
    generator = torch.Generator(device).manual_seed(seed)
    num_made, model_dtype = 0, dtype
    quantization = read_quantization(read_json(folder / "config.json")) or (Fp8Weights(False) if quantize else None)
    if quantization is not None:
        quantization = replace(quantization, is_stored=False)

    class Dummy:
        dtype = model_dtype
        has_room_for_two = False
        num_readers = 1  # one after the other, so that a seed always means the same weights

        def load(self, *names: str, dtype: torch.dtype | None = model_dtype) -> Tensor:
            nonlocal num_made
            shape = (sum(shapes[name][0] for name in names), *shapes[names[0]][1:])
            if len(shape) == 1 and names[0].endswith("norm.weight"):
                neutral = 0.0 if config.norms_add_one else 1.0
                made = torch.full(shape, neutral, dtype=dtype, device=device)
            else:
                made = torch.empty(shape, dtype=dtype, device=device)
                made.normal_(std=STANDARD_DEVIATION, generator=generator)
            num_made += made.numel()
            progress(num_made / num_expected)
            return made

    return build_decoder(config, Dummy(), quantization)
