"""Steps beyond the plain path: copies, fan-out, idle plans, late rows, poisoned memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from octavo.common.messages.kv import BlockCopy
from octavo.common.messages.step import OpenSlot, RowFlag, StepPlan, TableDelta
from support.runner_driver import RunnerDriver, make_runner
from support.tiny_models import TinyModel, prompt_of

MakeTiny = Callable[[str], TinyModel]
FED = RowFlag.SAMPLE | RowFlag.FED_BY_LAST_SAMPLE
GREEDY = OpenSlot(slot=0, sequence_id=1, seeds=(1,), temperature=0.0, top_p=1.0, top_k=0, num_logprobs=None)


def prefill(prompt: list[int], block_ids: tuple[int, ...], opening: OpenSlot, flags: int) -> StepPlan:
    return StepPlan(
        step_id=1,
        opened_slots=[opening],
        table_deltas=[TableDelta(0, 0, block_ids, (1,) * len(block_ids))],
        slots=[0],
        starts=[0],
        lengths=[len(prompt)],
        flags=[flags],
        token_ids=prompt,
    )


def test_plan_without_rows_is_run(tiny: MakeTiny) -> None:
    runner = make_runner(tiny("llama").folder)
    samples = runner.execute(StepPlan(step_id=1))
    assert (samples.token_ids, samples.logprobs) == ([], [])


def test_copied_block_carries_on_a_fork(tiny: MakeTiny) -> None:
    """A child shares block 3 and gets a copy of the part-filled block 4 in block 8; both go on alike, then apart."""
    model = tiny("llama")
    runner = make_runner(model.folder)
    prompt = prompt_of(20)
    [first] = runner.execute(prefill(prompt, (3, 4), GREEDY, RowFlag.SAMPLE)).token_ids
    forked = StepPlan(
        step_id=2,
        opened_slots=[replace(GREEDY, slot=1)],
        table_deltas=[TableDelta(1, 0, (3, 8), (1, 1))],
        copies=[BlockCopy(4, 8, 1, 1)],
        slots=[0, 1],
        starts=[20, 20],
        lengths=[1, 1],
        flags=[FED, RowFlag.SAMPLE],
        token_ids=[77],
    )
    parent, child = runner.execute(forked).token_ids
    assert parent == model.greedy(prompt, 2)[1]
    assert child == model.greedy([*prompt, 77], 1)[0]
    later = StepPlan(step_id=3, slots=[1, 0], starts=[21, 21], lengths=[1, 1], flags=[FED, FED])
    assert runner.execute(later).token_ids == [model.greedy([*prompt, 77], 2)[1], model.greedy(prompt, 3)[2]]
    assert first == model.greedy(prompt, 1)[0]


def test_copies_of_one_plan_apply_in_order(tiny: MakeTiny) -> None:
    """Block 4 goes to 8, then 8 to 9: the child that reads 9 sees what 4 held."""
    model = tiny("llama")
    runner = make_runner(model.folder)
    prompt = prompt_of(10)
    runner.execute(prefill(prompt, (4,), GREEDY, RowFlag.SAMPLE))
    child = StepPlan(
        step_id=2,
        closed_slots=[0],
        opened_slots=[GREEDY],
        table_deltas=[TableDelta(0, 0, (9,), (1,))],
        copies=[BlockCopy(4, 8, 1, 1), BlockCopy(8, 9, 1, 1)],
        slots=[0],
        starts=[10],
        lengths=[1],
        flags=[RowFlag.SAMPLE],
        token_ids=[50],
    )
    assert runner.execute(child).token_ids == model.greedy([*prompt, 50], 1)


def test_fan_out_draws_for_every_choice_what_the_choice_would_draw_alone(tiny: MakeTiny) -> None:
    model = tiny("qwen2")
    prompt = prompt_of(17)
    choices = replace(GREEDY, temperature=1.0, seeds=(5, 6, 7, 5))
    fanned = make_runner(model.folder).execute(prefill(prompt, (1, 2), choices, RowFlag.FAN_OUT)).token_ids
    alone = [
        make_runner(model.folder)
        .execute(prefill(prompt, (1, 2), replace(choices, seeds=(seed,)), RowFlag.SAMPLE))
        .token_ids[0]
        for seed in (5, 6, 7, 5)
    ]
    assert fanned == alone
    assert len(set(fanned)) > 1


def test_parent_goes_on_from_the_first_token_of_its_fan_out(tiny: MakeTiny) -> None:
    model = tiny("llama")
    runner = make_runner(model.folder)
    prompt = prompt_of(5)
    greedy_choices = replace(GREEDY, seeds=(1, 2, 3))
    tokens = runner.execute(prefill(prompt, (1,), greedy_choices, RowFlag.FAN_OUT)).token_ids
    expected = model.greedy(prompt, 2)
    assert tokens == expected[:1] * 3
    later = StepPlan(step_id=2, slots=[0], starts=[5], lengths=[1], flags=[FED])
    assert runner.execute(later).token_ids == expected[1:]


def test_seeded_draws_do_not_depend_on_neighbours_or_chunks(tiny: MakeTiny) -> None:
    model = tiny("llama")
    prompt = prompt_of(33)
    settings: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seeds": (42,)}
    alone = RunnerDriver(make_runner(model.folder), seed=1)
    expected = alone.open(prompt, 12, **settings)
    alone.generate([expected], 12)

    crowded = RunnerDriver(make_runner(model.folder), seed=2)
    others = [crowded.open(prompt_of(length), 12, temperature=temperature) for length, temperature in [(3, 0), (50, 1)]]
    again = crowded.open(prompt, 12, **settings)
    crowded.generate([*others, again], 12, chunk=10)
    assert again.output == expected.output


def test_logprobs_come_with_the_tokens_that_asked_for_them(tiny: MakeTiny) -> None:
    model = tiny("llama")
    driver = RunnerDriver(make_runner(model.folder))
    prompt = prompt_of(6)
    silent, asking = driver.open(prompt, 2), driver.open(prompt, 2, num_logprobs=2)
    samples = driver.step([silent, asking])
    assert samples.logprobs[0] is None
    logprobs = model.logits(prompt)[-1].log_softmax(-1)
    found = samples.logprobs[1]
    assert found is not None
    assert abs(found.sampled - float(logprobs.max())) < 1e-4
    assert found.top_token_ids == tuple(logprobs.topk(2).indices.tolist())


def test_row_whose_kv_is_not_finite_harms_itself_only(tiny: MakeTiny) -> None:
    """The second sequence's only full block turns to NaN. It gets -1, its neighbours their tokens, and so does
    whoever uses the spoilt block next.
    """
    model = tiny("llama")
    runner = make_runner(model.folder)
    driver = RunnerDriver(runner)
    prompts = [prompt_of(length) for length in (18, 20, 40)]
    generations = [driver.open(prompts[0], 4), driver.open(prompts[1], 4, block_ids=[7, 8]), driver.open(prompts[2], 4)]
    driver.step(generations)
    runner._kv_cache.pool[7].fill_(torch.nan)
    driver.step(generations)
    driver.step(generations)
    assert generations[1].output[1:] == [-1, -1]
    for generation in (generations[0], generations[2]):
        assert generation.output == model.greedy(generation.prompt, 3)

    runner.reset()
    after = RunnerDriver(runner)
    fresh = after.open(prompt_of(9), 4, block_ids=[7])
    after.generate([fresh], 4)
    assert fresh.output == model.greedy(fresh.prompt, 4)
