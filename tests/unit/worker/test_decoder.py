"""Our decoder over a paged pool against transformers, for every architecture and around block and chunk borders."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from support.runner_driver import Generation, RunnerDriver, make_runner
from support.tiny_models import ARCHITECTURES, TinyModel, prompt_of, save_tiny_model

PROMPT_LENGTHS = [1, 15, 16, 17, 31, 32, 33, 100]
NUM_NEW = 20

MakeTiny = Callable[[str], TinyModel]


def assert_equals_transformers(model: TinyModel, generation: Generation) -> None:
    """Logits, and the tokens that transformers would choose after each of ours, hence the same greedy tokens."""
    prompt = generation.prompt
    expected = model.logits(prompt + generation.output)[len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.stack(generation.logits), expected, atol=1e-4, rtol=0)
    assert generation.output == expected.argmax(-1).tolist(), f"prompt of {len(prompt)}"


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("chunk", [512, 16, 7], ids="chunk_{}".format)
def test_mixed_batch_equals_transformers(tiny: MakeTiny, name: str, chunk: int) -> None:
    """Eight prompts in one batch: with small chunks the short ones decode while the long ones prefill."""
    model = tiny(name)
    driver = RunnerDriver(make_runner(model.folder))
    generations = [driver.open(prompt_of(length), NUM_NEW) for length in PROMPT_LENGTHS]
    driver.generate(generations, NUM_NEW, chunk)

    for generation in generations:
        assert_equals_transformers(model, generation)


@pytest.mark.parametrize("length", PROMPT_LENGTHS)
def test_alone_equals_transformers(tiny: MakeTiny, length: int) -> None:
    model = tiny("llama")
    driver = RunnerDriver(make_runner(model.folder), seed=length)
    generation = driver.open(prompt_of(length), NUM_NEW)
    driver.generate([generation], NUM_NEW, chunk=16)
    assert generation.output == model.greedy(generation.prompt, NUM_NEW)


def test_prompt_goes_on_after_blocks_that_another_sequence_computed(tiny: MakeTiny) -> None:
    """A prefix hit: the first two blocks are shared, only the rest of the prompt is computed."""
    model = tiny("qwen3")
    driver = RunnerDriver(make_runner(model.folder))
    prompt = prompt_of(40)
    first = driver.open(prompt, NUM_NEW, block_ids=[9, 4, 30, 2])
    driver.generate([first], NUM_NEW)

    second = driver.open(prompt, NUM_NEW, block_ids=[9, 4, 17, 11])
    second.num_computed = 32
    driver.generate([second], NUM_NEW)

    assert second.output == first.output == model.greedy(prompt, NUM_NEW)


def test_other_head_shapes(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Head sizes that are no power of two, and one KV head for many query heads."""

    for heads, kv_heads, head_dim in [(3, 3, 12), (8, 1, 40), (12, 2, 6)]:
        model = save_tiny_model(
            "llama",
            tmp_path_factory.mktemp("heads"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
        )
        driver = RunnerDriver(make_runner(model.folder))
        generation = driver.open(prompt_of(33), NUM_NEW)
        driver.generate([generation], NUM_NEW, chunk=16)
        assert generation.output == model.greedy(generation.prompt, NUM_NEW)


def test_long_waves_serve_contexts_beyond_the_trained_one(tiny: MakeTiny) -> None:
    """LongRoPE: with a max_model_len beyond the trained 256 positions, all sequences use the long list."""
    model = tiny("phi3_longrope")
    driver = RunnerDriver(make_runner(model.folder, max_model_len=1024))
    generation = driver.open(prompt_of(300), 5)
    driver.generate([generation], 5, chunk=64)
    assert_equals_transformers(model, generation)
