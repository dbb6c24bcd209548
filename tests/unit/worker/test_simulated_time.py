"""The simulated H200 against steps measured on a real one: docs/performance.md and docs/kernels.md."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from octavo.worker.models.errors import ModelLoadError
from octavo.worker.simulated.profile import Profile, profile_names
from octavo.worker.simulated.step_time import StepWork, step_seconds

H200 = Profile.load("h200-llama-8b")
NUM_LAYERS = H200.model.num_layers
NEAR = 0.10


def decode(rows: int, context: float) -> StepWork:
    return StepWork(num_tokens=rows, num_logits=rows, decode_context=round(rows * context))


def chunk(start: int, length: int, samples: int = 0) -> StepWork:
    pairs = length * start + length * (length + 1) // 2
    return StepWork(length, samples, prefill_context=start + length, prefill_pairs=pairs)


@pytest.mark.parametrize(("rows", "context", "measured_us"), [(64, 200, 5581), (256, 400, 10_235), (1000, 400, 33_858)])
def test_decode_steps_take_what_the_profiler_saw(rows: int, context: int, measured_us: float) -> None:
    assert step_seconds(H200, decode(rows, context)) == pytest.approx(measured_us * 1e-6, rel=NEAR)


@pytest.mark.parametrize(("rows", "measured_ms"), [(1, 4.04), (64, 5.42), (256, 10.7)])
def test_time_per_token_of_equal_lengths(rows: int, measured_ms: float) -> None:
    """L1, L64 and S256: 128 tokens, or 400, after a prompt of 128."""
    last = 128 + (400 if rows == 256 else 128)
    steps = [step_seconds(H200, decode(rows, context)) for context in range(129, last)]
    assert sum(steps) / len(steps) == pytest.approx(measured_ms * 1e-3, rel=NEAR)


@pytest.mark.parametrize(
    ("rows", "context", "measured_us"),
    [(64, 1024, 70.2), (64, 4096, 252.9), (256, 1024, 255.0), (256, 4096, 970), (32, 16_384, 503)],
)
def test_decode_attention_of_a_layer(rows: int, context: int, measured_us: float) -> None:
    with_context = step_seconds(H200, decode(rows, context))
    without = step_seconds(H200, replace(decode(rows, context), decode_context=0))
    assert (with_context - without) / NUM_LAYERS == pytest.approx(measured_us * 1e-6, rel=NEAR)


@pytest.mark.parametrize(
    ("start", "length", "measured_tflops"), [(0, 8192, 452), (8192 - 512, 512, 433), (8192 - 2048, 2048, 456)]
)
def test_prefill_attention_rate(start: int, length: int, measured_tflops: float) -> None:
    work = chunk(start, length)
    seconds = step_seconds(H200, work) - step_seconds(H200, replace(work, prefill_pairs=0))
    flops = 4 * NUM_LAYERS * 4096 * work.prefill_pairs
    assert flops / seconds / 1e12 == pytest.approx(measured_tflops, rel=NEAR)


def test_large_products_run_at_the_rate_of_matmul() -> None:
    """At 1,000 rows products run at 766 TFLOP/s, at 8,192 between that and the 806 of a product alone."""
    seconds = step_seconds(H200, StepWork(num_tokens=8192)) - step_seconds(H200, StepWork(num_tokens=4096))
    flops = 2 * NUM_LAYERS * H200.model.layer_params * 4096
    activations_s = 4096 * NUM_LAYERS * 2 * (3 * 14336 + 9 * 4096) / 4.28e12
    assert 766 <= flops / (seconds - activations_s) / 1e12 <= 806


def test_long_prompts_prefilled_and_decoded() -> None:
    """W3: 32 prompts of 16,384 in chunks of 8,192, then 255 decode steps of all: measured 21.6 s."""
    prefill = sum(step_seconds(H200, chunk(start, 8192, samples=start // 8192)) for start in (0, 8192))
    decodes = sum(step_seconds(H200, decode(32, 16_384 + step)) for step in range(1, 256))
    assert 32 * prefill + decodes == pytest.approx(21.6, rel=NEAR)


def test_gpus_share_a_step_evenly() -> None:
    """Each reads all weights and its share of the rest: four times the work on four GPUs takes as long."""
    one = step_seconds(H200, decode(256, 1000))
    assert step_seconds(H200, decode(1024, 1000), num_gpus=4) == pytest.approx(one)
    assert step_seconds(H200, decode(256, 1000), num_gpus=4) < one
    assert step_seconds(H200, decode(1, 1000)) < 0.9 * step_seconds(H200, decode(2, 500))


def test_block_copies_read_and_write_memory() -> None:
    copied = step_seconds(H200, StepWork(num_copied_blocks=1000))
    assert copied == pytest.approx(2 * 1000 * 2 * 2**20 / 4.28e12)


def test_profiles_are_named_and_files_are_read(tmp_path: Path) -> None:
    assert "h200-llama-8b" in profile_names()
    copy = tmp_path / "mine.json"
    copy.write_text(H200.model_dump_json())
    assert Profile.load(str(copy)) == H200


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("model: [", "cannot be read"),
        ("{}", "model: Field required"),
        (
            H200.model_copy(update={"device": H200.device.model_copy(update={"bytes_per_s": 0})}).model_dump_json(),
            "dev",
        ),
    ],
)
def test_a_wrong_profile_says_what_is_wrong(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(ModelLoadError, match=problem):
        Profile.load(str(path))
    with pytest.raises(ModelLoadError, match="there is no profile b200; there are h200-llama-8b"):
        Profile.load("b200")
