"""K and V stored as e4m3: what the torch backend makes of them, and where the scales come from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.common.links import Address
from octavo.worker.attention_torch import to_e4m3
from octavo.worker.config import WorkerConfig
from octavo.worker.kv_cache import block_bytes, kv_dtype
from octavo.worker.kv_scales import calibrate, kv_format, scales_for
from octavo.worker.loading import load_core
from octavo.worker.models.config import read_model_config
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.weights import load_decoder
from support.runner_driver import RunnerDriver, make_runner
from support.tiny_models import TinyModel, prompt_of

MakeTiny = Callable[[str], TinyModel]
LENGTHS = (1, 16, 17, 40)


def worker_config(folder: Path, **settings: object) -> WorkerConfig:
    return WorkerConfig(
        listen=[Address("local", "worker")],
        model=folder,
        device="cpu",
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=128,
        **settings,  # type: ignore[arg-type]
    )


def load_tiny(folder: Path) -> Decoder:
    return load_decoder(folder, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("chunk", [512, 7])
@pytest.mark.parametrize("name", ["llama", "mistral_window", "qwen2"])
def test_logits_move_by_little(tiny: MakeTiny, name: str, chunk: int) -> None:
    """Against the same tokens with a pool of float32. Random models show errors larger than trained ones do."""
    exact, stored = (RunnerDriver(make_runner(tiny(name).folder, fp8_kv=fp8_kv)) for fp8_kv in (False, True))
    logits = []
    for driver in (exact, stored):
        generations = [driver.open(prompt_of(length), 1) for length in LENGTHS]
        driver.generate(generations, 1, chunk)
        logits.append(torch.stack([generation.logits[0] for generation in generations]))

    error = (logits[1] - logits[0]).norm() / logits[0].norm()
    assert 1e-4 < error < 0.08


def test_decodes_read_what_prefills_wrote(tiny: MakeTiny) -> None:
    """Chunks of any length, and decodes, write and read the same bytes: the tokens are the same."""
    outputs = []
    for chunk in (512, 16, 5, 1):
        driver = RunnerDriver(make_runner(tiny("llama").folder, fp8_kv=True))
        generations = [driver.open(prompt_of(length), 12) for length in LENGTHS]
        driver.generate(generations, 12, chunk)
        outputs.append([generation.output for generation in generations])

    assert all(output == outputs[0] for output in outputs)


def test_scales_leave_room_above_the_largest_value_and_none_is_lost_below() -> None:
    largest = torch.tensor([[224.0, 225.0], [0.01, 0.0]])
    scales = scales_for(largest)

    assert scales.tolist() == [[1.0, 2.0], [2.0**-14, 1.0]]
    stored = to_e4m3(torch.tensor([0.02, -1.0, 0.01 / 4096]), scales[1, 0])
    assert (stored.float() * scales[1, 0]).tolist() == pytest.approx([0.02, -448 * 2.0**-14, 0.01 / 4096], rel=1 / 16)


def test_calibration_sees_the_keys_and_values_of_a_real_prompt(tiny: MakeTiny) -> None:
    decoder = load_tiny(tiny("qwen3").folder)
    scales = calibrate(decoder)
    runner = make_runner(tiny("qwen3").folder)
    driver = RunnerDriver(runner)
    driver.generate([driver.open(prompt_of(100), 1)], 1)
    largest = runner._kv_cache.pool.nan_to_num(0.0).abs().amax((0, 4, 5))

    assert scales.shape == (decoder.config.num_layers, 2, decoder.config.num_kv_heads)
    assert torch.equal(calibrate(decoder), scales)
    assert (largest <= 448 * scales).all()
    assert (largest >= 448 * scales / 32).all()


def test_a_pool_of_e4m3_holds_four_times_the_blocks_of_float32(tiny: MakeTiny) -> None:
    folder = tiny("llama").folder
    config = read_model_config(folder)
    sizes, formats = {}, {}
    for name in ("auto", "fp8", "fp8_e4m3"):
        settings = worker_config(folder, kv_cache_dtype=name, kv_cache_bytes=100_000, num_host_blocks=2)
        core = load_core(settings, lambda progress: None)
        bytes_each = block_bytes(config, 16, kv_dtype(settings, torch.float32))
        sizes[name] = (bytes_each, core.runner.limits.num_blocks)
        formats[name] = core.model.kv_format

    shape_elements = int(np.prod([3, 2, 2, 16, 8]))
    assert sizes == {
        "auto": (4 * shape_elements, 100_000 // (4 * shape_elements)),
        "fp8": (shape_elements, 100_000 // shape_elements),
        "fp8_e4m3": (shape_elements, 100_000 // shape_elements),
    }
    assert formats["auto"] == "float32"
    assert formats["fp8"] == formats["fp8_e4m3"] == kv_format(torch.float8_e4m3fn, calibrate(load_tiny(folder)))
    assert kv_format(torch.float8_e4m3fn, torch.ones(3, 2, 2)) != formats["fp8"]
