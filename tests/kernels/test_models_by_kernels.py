"""Models by our kernels against transformers: settings of each layer reach prefill, decode and rotation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.worker.attention_plan import cut_queries, decode_items
from octavo.worker.attention_triton import TritonAttention, TritonStep
from octavo.worker.gpu_loading import gpu_model
from octavo.worker.kernels.decode_rows import DecodeRows, make_scratch
from octavo.worker.kernels.paged_prefill import PrefillRows, queries_per_tile
from octavo.worker.models import linear, weights
from octavo.worker.models.errors import UnknownArchitectureError
from octavo.worker.models.model_folder import open_model
from octavo.worker.models.rotary import cos_sin_table
from support.tiny_models import prompt_of, save_tiny_model

BLOCK_SIZE, BLOCKS, NUM_PROMPT = 16, (3, 0, 2), 33


@pytest.mark.parametrize(
    "name",
    [
        "gemma2",
        "smollm3_window",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("gemma3", "phi3_longrope", "granite", "cohere2")),
    ],
)
@torch.inference_mode()
def test_logits_equal_those_of_transformers(
    name: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (linear, weights):  # the kernels read plain weights, also where they are interpreted on a CPU
        monkeypatch.setattr(module, "can_pack", lambda dtype, device: False)
    tiny = save_tiny_model(name, tmp_path)
    loaded = open_model(tiny.folder, 256).load(torch.float32, torch.device(device))
    model = gpu_model(loaded)
    config, token_ids = model.config, prompt_of(NUM_PROMPT + 1)
    pool_shape = (4, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    shared = TritonAttention(
        torch.full(pool_shape, torch.nan, device=device),
        torch.tensor([BLOCKS], dtype=torch.int32, device=device),
        [cos_sin_table(rope, config.head_dim, 256, model.device) for rope in config.ropes],
        make_scratch(16, 64, 1, config.num_heads, config.num_kv_heads, config.head_dim, model.device),
        config.num_heads,
        config.attention,
        config.norm_eps,
    )

    def int32(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def logits(
        first: int, decodes: DecodeRows | None, prefills: PrefillRows | None, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        positions = range(first, NUM_PROMPT if prefills else NUM_PROMPT + 1)
        slots = [BLOCKS[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE for position in positions]
        step = TritonStep(shared, int32(*positions), torch.tensor(slots, device=device), decodes, None, prefills)
        hidden = model.forward(int32(*token_ids[first : positions[-1] + 1]), step, wanted)
        return model.logits(hidden, torch.empty((len(hidden), config.vocab_size), device=device))

    tiles = cut_queries(
        np.array([NUM_PROMPT]),
        np.array([NUM_PROMPT]),
        queries_per_tile(config.num_heads // config.num_kv_heads, config.head_dim),
    )
    chunk = PrefillRows(int32(0), int32(0), int32(NUM_PROMPT), int32(NUM_PROMPT), *(int32(*of) for of in tiles))
    items = decode_items(np.array([0]), np.array([0]), np.array([NUM_PROMPT + 1]), 16)
    found = [logits(0, None, chunk), logits(NUM_PROMPT, DecodeRows(int32(*items[0].tolist()).view(1, -1)), None)]

    torch.testing.assert_close(torch.cat(found).cpu(), tiny.logits(token_ids), atol=1e-4, rtol=0)
    some = logits(0, None, chunk, wanted=int32(NUM_PROMPT - 1, 4))
    torch.testing.assert_close(some, found[0][[NUM_PROMPT - 1, 4]], atol=1e-4, rtol=0)
    assert logits(0, None, chunk, wanted=int32()).shape == (0, config.vocab_size)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"head_dim": 512}, "not 512 and 3"), ({"head_dim": 256, "num_heads": 130, "num_kv_heads": 2}, "not 256 and 65")],
)
def test_heads_that_the_kernels_do_not_serve_stop_the_start(
    changes: dict[str, int], message: str, tmp_path: Path
) -> None:
    loaded = open_model(save_tiny_model("llama", tmp_path).folder, 256).load(torch.float32, torch.device("cpu"))
    loaded.config = replace(loaded.config, **changes)  # type: ignore[arg-type]
    with pytest.raises(UnknownArchitectureError, match=message):
        gpu_model(loaded)
