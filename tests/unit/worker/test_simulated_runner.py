"""Plans against a clock: when steps start and end, what they sample, and what waits for copies."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.common.messages.kv import Transfer, TransferDirection
from octavo.common.messages.step import GRAMMAR_FAILED, OpenSlot, RowFlag, SharingGroup, SlotRules, StepPlan, TableDelta
from octavo.common.messages.token_rules import TokenRules
from octavo.worker.config import WorkerConfig
from octavo.worker.models.errors import ModelLoadError
from octavo.worker.simulated.loading import load_simulated_core
from octavo.worker.simulated.profile import Profile
from octavo.worker.simulated.runner import SimulatedRunner
from octavo.worker.simulated.sampling import plain_token_ids
from octavo.worker.simulated.step_time import StepWork, step_seconds
from support.simulated_workers import H200, ManualClock, simulated_runner

FED = RowFlag.SAMPLE | RowFlag.FED_BY_LAST_SAMPLE
LINK_S = 2 * 2**20 / 5.2e10
"""One block between device and host."""


def opened(slot: int, seed: int = 7, temperature: float = 1.0, **options: object) -> OpenSlot:
    return replace(OpenSlot(slot, slot, (seed,), temperature, 1.0, 0, None), **options)  # type: ignore[arg-type]


def prefill(step_id: int, *openings: OpenSlot, length: int = 20, flags: int = RowFlag.SAMPLE) -> StepPlan:
    """Each slot takes the next two blocks of the pool."""
    return StepPlan(
        step_id=step_id,
        opened_slots=list(openings),
        table_deltas=[TableDelta(one.slot, 0, (2 * one.slot, 2 * one.slot + 1), (1, 1)) for one in openings],
        slots=[one.slot for one in openings],
        starts=[0] * len(openings),
        lengths=[length] * len(openings),
        flags=[flags] * len(openings),
        token_ids=[5] * (length * len(openings)),
    )


def decode(step_id: int, start: int, *slots: int) -> StepPlan:
    count = len(slots)
    return StepPlan(step_id, slots=list(slots), starts=[start] * count, lengths=[1] * count, flags=[FED] * count)


def seconds(**work: int) -> float:
    return step_seconds(Profile.load(H200), StepWork(**work))


def test_a_step_starts_when_it_has_arrived_and_the_last_has_ended() -> None:
    """The second plan comes while the first runs, the third 3 ms after the second has ended."""
    clock = ManualClock(time=1.0)
    runner = simulated_runner(clock)
    clock.time = 1.5
    first = runner.launch(prefill(1, opened(0)))
    second = runner.launch(decode(2, 20, 0))
    of_prefill = seconds(num_tokens=20, num_logits=1, prefill_context=20, prefill_pairs=210)
    of_decode = seconds(num_tokens=1, num_logits=1, decode_context=21)
    assert clock.time == 1.5
    first.wait()
    assert clock.time == pytest.approx(1.5 + of_prefill)
    second.wait()
    assert clock.time == pytest.approx(1.5 + of_prefill + of_decode)
    clock.time += 0.003
    third = runner.launch(decode(3, 21, 0))
    assert first.measured_s == pytest.approx((0.5, of_prefill))
    assert second.measured_s == pytest.approx((0.0, of_decode))
    assert third.measured_s[0] == pytest.approx(0.003)


def test_tokens_depend_on_seed_and_position_alone() -> None:
    alone, together = simulated_runner(), simulated_runner()
    first = [alone.execute(prefill(1, opened(3))).token_ids[0]]
    first += [alone.execute(decode(step, 18 + step, 3)).token_ids[0] for step in range(2, 12)]
    assert len(set(first)) > 5
    assert all(3 <= token_id < 512 for token_id in first)
    rows = [together.execute(prefill(1, opened(0, seed=8), opened(5))).token_ids]
    rows += [together.execute(decode(step, 18 + step, 5, 0)).token_ids[::-1] for step in range(2, 12)]
    assert [row[1] for row in rows] == first
    assert [row[0] for row in rows] != first


def test_greedy_answers_do_not_depend_on_the_seed() -> None:
    runner = simulated_runner()
    one, other = runner.execute(prefill(1, opened(0, 1, temperature=0.0), opened(1, 2, temperature=0.0))).token_ids
    assert one == other


def test_every_choice_of_a_prompt_draws_by_its_own_seed() -> None:
    runner = simulated_runner()
    fan = runner.execute(prefill(1, opened(0, seeds=(1, 2, 3)), flags=RowFlag.FAN_OUT)).token_ids
    single = [runner.execute(prefill(2 + seed, opened(seed, seed))).token_ids[0] for seed in (1, 2, 3)]
    assert fan == single


def test_log_probabilities_are_those_of_equal_chances() -> None:
    runner = simulated_runner()
    rules = SlotRules(TokenRules(), (5,) * 20, (), (), num_prompt_logprobs=2)
    flags = RowFlag.SAMPLE | RowFlag.PROMPT_LOGPROBS
    samples = runner.execute(prefill(1, opened(0, num_logprobs=2, rules=rules), flags=flags))
    told = samples.logprobs[0]
    assert told is not None
    assert told.sampled == pytest.approx(-math.log(512))
    assert told.top_token_ids[0] == samples.token_ids[0]
    assert len(told.top_token_ids) == len(told.top_logprobs) == 2
    row, of_prompt = samples.prompt_logprobs[0]
    assert (row, of_prompt.start, len(of_prompt.logprobs), len(of_prompt.top_token_ids)) == (0, 1, 19, 38)


def test_a_grammar_is_not_followed_and_says_so() -> None:
    """Only of the slot that has one; the next sequence of the slot is as any other."""
    runner = simulated_runner()
    rules = SlotRules(TokenRules(grammar="root ::= 'a'"), (), (), ())
    failed, other = runner.execute(prefill(1, opened(0, rules=rules), opened(1))).token_ids
    assert failed == GRAMMAR_FAILED
    assert other >= 0
    again = replace(prefill(2, opened(0)), closed_slots=[0])
    assert runner.execute(again).token_ids[0] >= 0


def test_rows_that_share_blocks_read_them_once() -> None:
    """Two rows of 33 tokens that begin with the same two blocks; the worker's own tables are asked."""
    alone = seconds(num_tokens=2, num_logits=2, decode_context=2 * 34)
    shared = seconds(num_tokens=2, num_logits=2, decode_context=2 * 34 - 32)
    for group, expected in (([SharingGroup((0, 1), 2)], shared), ([], alone), ([SharingGroup((0, 1), 3)], alone)):
        runner = simulated_runner()
        both = replace(
            prefill(1, opened(0), opened(1), length=33),
            table_deltas=[TableDelta(0, 0, (0, 1, 2), (1, 1, 1)), TableDelta(1, 0, (0, 1, 3), (1, 1, 1))],
        )
        runner.execute(both)
        step = runner.launch(replace(decode(2, 33, 0, 1), groups=group))
        assert step.measured_s[1] == pytest.approx(expected)


def swap(transfer_id: int, direction: TransferDirection, *block_ids: int) -> Transfer:
    return Transfer(transfer_id, direction, block_ids, (1,) * len(block_ids), tuple(range(len(block_ids))))


def copying_runner(clock: ManualClock) -> SimulatedRunner:
    runner = simulated_runner(clock, num_blocks=400, num_host_blocks=300)
    runner.execute(prefill(1, opened(0)))
    return runner


def test_a_copy_takes_the_time_of_the_link_beside_the_steps() -> None:
    """150 blocks take 6 ms: the step beside them ends before, and does not tell of it; the next does."""
    clock = ManualClock()
    runner = copying_runner(clock)
    began = clock.time
    out = swap(1, TransferDirection.TO_HOST, *range(100, 250))
    assert runner.execute(replace(decode(2, 20, 0), transfers=[out])).transfers.transfer_ids == []
    assert runner.execute(decode(3, 21, 0)).transfers.transfer_ids == [1]
    assert clock.time - began > 150 * LINK_S


def test_a_plan_without_rows_ends_with_the_copies() -> None:
    clock = ManualClock()
    runner = copying_runner(clock)
    began = clock.time
    out, back = swap(1, TransferDirection.TO_HOST, *range(10, 40)), swap(2, TransferDirection.TO_DEVICE, *range(50, 80))
    finished = runner.execute(StepPlan(2, transfers=[out, back])).transfers
    assert finished.transfer_ids == [1, 2]
    assert clock.time - began == pytest.approx(60 * LINK_S), "both touch the same host blocks, so one waits"
    assert finished.copy_us == pytest.approx(60 * LINK_S * 1e6, abs=2)


def test_a_step_that_is_given_a_block_waits_for_its_copy() -> None:
    """300 blocks leave in 12 ms. The step beside the copy ends before, the next one takes block 2."""
    clock = ManualClock()
    runner = copying_runner(clock)
    end_of_copy = clock.time + 300 * LINK_S
    runner.execute(replace(decode(2, 20, 0), transfers=[swap(1, TransferDirection.TO_HOST, *range(2, 302))]))
    assert clock.time < end_of_copy
    taken = runner.launch(prefill(3, opened(1)))
    taken.wait()
    assert clock.time == pytest.approx(end_of_copy + taken.measured_s[1])


def test_words_of_the_tokenizer_are_drawn(tmp_path: Path) -> None:
    vocabulary = {"<s>": 0, "Ġthe": 1, "42": 2, "octavo": 3, "x": 4, "</s>": 5, "\u2581sheet": 6, "beyond": 99}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    assert plain_token_ids(tmp_path, 10, (5,)).tolist() == [1, 3, 6]
    assert plain_token_ids(None, 5, (2,)).tolist() == [0, 1, 3, 4]


def settings(**options: object) -> WorkerConfig:
    return WorkerConfig(listen=["frames:///tmp/unused.sock"], simulated=H200, **options)  # type: ignore[arg-type]


def test_limits_come_from_the_profile_and_grow_with_the_gpus() -> None:
    """One GPU has the pool that was measured, 55,571 blocks of 16."""
    one, four = (load_simulated_core(settings(max_model_len=4096, simulated_gpus=count)) for count in (1, 4))
    assert (one.runner.limits.num_blocks, one.runner.num_host_blocks) == (55_571, 4096)
    assert (one.runner.limits.max_num_seqs, one.runner.limits.max_num_batched_tokens) == (1024, 8192)
    assert (four.runner.limits.num_blocks, four.runner.num_host_blocks) == (4 * 55_571, 4 * 4096)
    assert (four.runner.limits.max_num_seqs, four.runner.limits.max_num_batched_tokens) == (4096, 32_768)
    assert one.model.name == H200
    assert load_simulated_core(settings(max_model_len=64, block_size=32)).runner.limits.num_blocks == 55_571 // 2


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_model_len": 200_000}, "exceeds the 131072 positions of the profile"),
        ({"kv_cache_bytes": 1000}, "does not hold one block"),
        ({"model": Path("/nowhere")}, "does not exist"),
    ],
)
def test_settings_that_cannot_be_say_so(options: dict[str, object], problem: str) -> None:
    with pytest.raises(ModelLoadError, match=problem):
        load_simulated_core(settings(**options))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"simulated": H200, "quantization": "fp8"}, "those of its profile"),
        ({}, "model is required"),
        ({"model": Path(), "simulated_gpus": 2}, "simulated_gpus needs simulated"),
    ],
)
def test_settings_that_contradict_each_other(options: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        WorkerConfig(listen=["frames:///tmp/unused.sock"], **options)  # type: ignore[arg-type]
