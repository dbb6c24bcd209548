"""The GPU's runner against the CPU's: the same plans, the same small random model, in float32."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import llguidance
import pytest
import torch

from octavo.common.messages.kv import BlockCopy
from octavo.common.messages.step import NOT_READY, OpenSlot, RowFlag, SlotRules, StepPlan, TableDelta
from octavo.common.messages.token_rules import TokenRules
from octavo.worker.grammars import Grammars
from octavo.worker.kv_cache import KvCache
from octavo.worker.kv_scales import calibrate
from octavo.worker.models.model_folder import open_model
from octavo.worker.runner import Runner
from octavo.worker.step_graphs import GraphKey, StepGraphs
from support.runner_driver import BLOCK_SIZE, NUM_BLOCKS, Generation, RunnerDriver, make_runner
from support.small_tokenizer import byte_level_json, byte_level_tokenizer
from support.tiny_models import ARCHITECTURES, OF_TRANSFORMERS, prompt_of, save_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SAMPLE, FED = RowFlag.SAMPLE, RowFlag.SAMPLE | RowFlag.FED_BY_LAST_SAMPLE


def make_gpu_runner(
    folder: Path, has_graphs: bool = True, fp8_kv: bool = False, num_blocks: int = NUM_BLOCKS, **limits: int
) -> Runner:
    from octavo.worker.gpu_loading import gpu_model
    from octavo.worker.gpu_runner import GpuRunner

    device = torch.device("cuda")
    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 256, **limits}
    loaded = open_model(folder, sizes["max_model_len"]).load(torch.float32, device)
    model = gpu_model(loaded)
    kv_dtype, scales = (torch.float8_e4m3fn, calibrate(loaded)) if fp8_kv else (torch.float32, None)
    kv_cache = KvCache(model.config, num_blocks, BLOCK_SIZE, kv_dtype, device, scales=scales)
    kv_cache.pool.fill_(torch.nan)
    runner = GpuRunner(model, kv_cache, **sizes)
    if has_graphs and model.can_capture:
        runner.compile_steps(lambda share: None)
        runner.capture_graphs(lambda share: None)
    return runner


class LogitlessDriver(RunnerDriver):
    """The driver for a runner that keeps no logits on the host."""

    def step(self, sequences: list[Generation], chunk: int = 512) -> object:  # type: ignore[override]
        self.runner.model.last_logits = [None] * 64  # type: ignore[attr-defined]
        return super().step(sequences, chunk)


PROMPT_LENS = (1, 15, 16, 17, 40, 100, 128)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return lambda name: save_tiny_model(name, tmp_path_factory.mktemp(name)).folder


@pytest.mark.parametrize(
    ("architecture", "has_graphs", "chunk"),
    [(name, True, 7) for name in ARCHITECTURES]  # prompts in many chunks among decodes, then graphs
    + [(name, *how) for name in ("llama", "mistral_window", "qwen3", "gemma2") for how in ((True, 512), (False, 512))]
    + [(name, False, 16) for name in OF_TRANSFORMERS],
)
def test_greedy_tokens_equal_those_of_the_cpu(
    architecture: str, has_graphs: bool, chunk: int, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(architecture)
    outputs = []
    for driver in (RunnerDriver(make_runner(folder)), LogitlessDriver(make_gpu_runner(folder, has_graphs))):
        sequences = [driver.open(prompt_of(length), 24) for length in PROMPT_LENS]
        driver.generate(sequences, 24, chunk)
        outputs.append([sequence.output for sequence in sequences])

    assert outputs[0] == outputs[1]


def test_steps_of_prompts_and_decodes_are_graphs_too(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few tokens, of more prompts than a size of that many tokens has room for; one is too large for any."""
    replayed: list[GraphKey] = []
    replay = StepGraphs.replay

    def note(graphs: StepGraphs, key: GraphKey) -> None:
        replayed.append(key)
        replay(graphs, key)

    monkeypatch.setattr(StepGraphs, "replay", note)
    folder, sizes = folder_of("llama"), {"max_num_seqs": 40, "max_num_batched_tokens": 2048, "num_blocks": 400}
    outputs, buckets = [], []
    for driver in (RunnerDriver(make_runner(folder, **sizes)), LogitlessDriver(make_gpu_runner(folder, **sizes))):
        few = [driver.open(prompt_of(length), 4) for length in (20, 3)]
        many = [driver.open(prompt_of(length), 4) for length in (*[2] * 30, 100, 200, 31)]
        large = [driver.open(prompt_of(240), 2) for _ in range(5)]
        for sequences in (few, [*few, *many], large):
            replayed.clear()
            driver.step(sequences)
            buckets.append([key.bucket for key in replayed])
        driver.generate([*few, *many], 4)
        driver.generate(large, 2)
        outputs.append([sequence.output for sequence in (*few, *many, *large)])

    assert outputs[0] == outputs[1]
    assert buckets[3] == [32]
    assert len(buckets[4]) == 1
    assert buckets[4][0] >= 512
    assert buckets[5] == []


@pytest.mark.parametrize(("fp8_kv", "tolerance"), [(False, 1e-4), (True, 0.02)])
def test_log_probabilities_equal_those_of_the_cpu(
    fp8_kv: bool, tolerance: float, folder_of: Callable[[str], Path]
) -> None:
    """With a pool of e4m3 a number that differs in its last bit may be rounded the other way."""
    folder = folder_of("llama")
    found = []
    drivers = (
        RunnerDriver(make_runner(folder, fp8_kv=fp8_kv)),
        LogitlessDriver(make_gpu_runner(folder, fp8_kv=fp8_kv)),
    )
    for driver in drivers:
        asking = driver.open(prompt_of(20), 3, num_logprobs=3)
        silent = driver.open(prompt_of(9), 3)
        found.append([driver.step([silent, asking], 19).logprobs for _ in range(3)][-1])

    for expected, got in zip(*found, strict=True):
        assert (expected is None) == (got is None)
        if expected is not None and got is not None:
            assert fp8_kv or got.top_token_ids == expected.top_token_ids
            assert got.sampled == pytest.approx(expected.sampled, abs=tolerance)
            assert got.top_logprobs == pytest.approx(expected.top_logprobs, abs=tolerance)


def test_rules_of_a_slot_hold_in_graphs_and_leave_other_rows_alone(folder_of: Callable[[str], Path]) -> None:
    """Penalties count tokens that are still on the device; rows without rules are drawn by the same graphs."""
    folder, prompt = folder_of("llama"), prompt_of(20)
    rules = TokenRules(
        bad_words=((5, 6), (7,)), min_tokens=6, logit_bias=((9, 2.0),), repetition_penalty=1.3, frequency_penalty=0.9
    )
    outputs = []
    for driver in (RunnerDriver(make_runner(folder)), LogitlessDriver(make_gpu_runner(folder))):
        ruled = driver.open(prompt, 16, rules=SlotRules(rules, tuple(prompt), (), (2, 3)))
        plain = [driver.open(prompt_of(length), 16) for length in (9, 33)]
        driver.generate([plain[0], ruled, plain[1]], 16)
        outputs.append([sequence.output for sequence in (ruled, *plain)])
    alone = LogitlessDriver(make_gpu_runner(folder))
    unruled = alone.open(prompt, 16)
    alone.generate([unruled], 16)

    assert outputs[0] == outputs[1]
    assert unruled.output != outputs[1][0]


def test_rules_hold_for_each_draw_of_a_prompt(folder_of: Callable[[str], Path]) -> None:
    prompt = prompt_of(20)
    rules = SlotRules(TokenRules(allowed_token_ids=(40, 41, 42)), tuple(prompt), (), ())
    drawn = (
        make_gpu_runner(folder_of("llama"))
        .execute(
            StepPlan(
                step_id=1,
                opened_slots=[opening(0, seeds=tuple(range(20)), temperature=2.0, rules=rules), opening(1)],
                table_deltas=[TableDelta(0, 0, (6, 2), (1, 1)), TableDelta(1, 0, (3, 4), (1, 1))],
                slots=[1, 0],
                starts=[0, 0],
                lengths=[20, 20],
                flags=[SAMPLE, RowFlag.FAN_OUT],
                token_ids=[*prompt, *prompt],
            )
        )
        .token_ids
    )

    assert drawn[0] not in (40, 41, 42)
    assert set(drawn[1:]) == {40, 41, 42}


@pytest.mark.parametrize("chunk", [512, 7])
def test_log_probabilities_of_a_prompt_equal_those_of_the_cpu(folder_of: Callable[[str], Path], chunk: int) -> None:
    prompt = prompt_of(40)
    found = []
    for runner in (make_runner(folder_of("llama")), make_gpu_runner(folder_of("llama"))):
        rules = SlotRules(TokenRules(), tuple(prompt), (), (), num_prompt_logprobs=2)
        told = []
        for step_id, start in enumerate(range(0, 40, chunk), 1):
            part = prompt[start : start + chunk]
            plan = StepPlan(
                step_id=step_id,
                opened_slots=[opening(0, rules=rules)] if start == 0 else [],
                table_deltas=[TableDelta(0, 0, (6, 2, 4), (1, 1, 1))] if start == 0 else [],
                slots=[0],
                starts=[start],
                lengths=[len(part)],
                flags=[RowFlag.PROMPT_LOGPROBS],
                token_ids=part,
            )
            told += [entry for _, entry in runner.execute(plan).prompt_logprobs]
        found.append(told)

    expected, got = ([value for entry in told for value in entry.logprobs] for told in found)
    assert len(got) == 39
    assert got == pytest.approx(expected, abs=1e-4)
    assert [entry.top_token_ids for entry in found[1]] == [entry.top_token_ids for entry in found[0]]
    assert [entry.ranks for entry in found[1]] == [entry.ranks for entry in found[0]]


def test_rows_with_a_grammar_follow_it_beside_rows_of_graphs(tmp_path: Path) -> None:
    """Each row brings its token; one whose mask is not ready yet is sent again."""
    save_tiny_model("llama", tmp_path, vocab_size=512, eos_token_id=1)
    (tmp_path / "tokenizer.json").write_text(byte_level_json(), encoding="utf-8")
    runner, prompt = make_gpu_runner(tmp_path), prompt_of(20)
    runner.use_grammars(Grammars(tmp_path / "tokenizer.json", 512, [1]))
    grammar = llguidance.LLMatcher.grammar_from_regex("[ab]{6}")
    rules = SlotRules(TokenRules(grammar=grammar), tuple(prompt), (), (1,))
    plan = StepPlan(
        step_id=1,
        opened_slots=[opening(0, rules=rules), opening(1)],
        table_deltas=[TableDelta(0, 0, (6, 2), (1, 1)), TableDelta(1, 0, (3, 4), (1, 1))],
        slots=[0, 1],
        starts=[0, 0],
        lengths=[20, 20],
        flags=[SAMPLE, SAMPLE],
        token_ids=[*prompt, *prompt],
    )
    output: list[int] = []
    for step_id in range(2, 200):
        drawn = runner.execute(plan).token_ids[0]
        if drawn != NOT_READY:
            output.append(drawn)
        if drawn == 1:
            break
        last = [*prompt, *output][-1]
        start = 19 + len(output)
        plan = StepPlan(step_id=step_id, slots=[0], starts=[start], lengths=[1], flags=[SAMPLE], token_ids=[last])

    assert re.fullmatch("[ab]{6}", byte_level_tokenizer().decode(output[:-1]))


def opening(slot: int, **settings: object) -> OpenSlot:
    return replace(OpenSlot(slot, slot, (slot,), 0.0, 1.0, 0, None), **settings)  # type: ignore[arg-type]


def test_steps_are_launched_ahead_of_the_device(folder_of: Callable[[str], Path]) -> None:
    runner, expected = make_gpu_runner(folder_of("llama")), make_runner(folder_of("llama"))
    prompt = prompt_of(20)
    prefill = StepPlan(
        step_id=1,
        opened_slots=[opening(0)],
        table_deltas=[TableDelta(0, 0, (6, 2, 4), (1, 1, 1))],
        slots=[0],
        starts=[0],
        lengths=[20],
        flags=[SAMPLE],
        token_ids=prompt,
    )
    decodes = [
        StepPlan(step_id=2 + index, slots=[0], starts=[20 + index], lengths=[1], flags=[FED]) for index in range(12)
    ]

    launched = [runner.launch(plan) for plan in (prefill, *decodes)]

    assert [step.wait().token_ids for step in launched] == [
        expected.execute(plan).token_ids for plan in (prefill, *decodes)
    ]
    assert all(busy_s > 0 for _, busy_s in (step.measured_s for step in launched))


def test_choices_of_one_prompt_go_on_from_copied_blocks(folder_of: Callable[[str], Path]) -> None:
    runner = make_gpu_runner(folder_of("llama"))
    drawn = runner.execute(
        StepPlan(
            step_id=1,
            opened_slots=[opening(0, seeds=(0, 1, 2))],
            table_deltas=[TableDelta(0, 0, (6, 2), (1, 1))],
            slots=[0],
            starts=[0],
            lengths=[20],
            flags=[RowFlag.FAN_OUT],
            token_ids=prompt_of(20),
        )
    ).token_ids
    parent = runner.execute(StepPlan(step_id=2, slots=[0], starts=[20], lengths=[1], flags=[FED])).token_ids
    child = runner.execute(
        StepPlan(
            step_id=3,
            opened_slots=[opening(5)],
            table_deltas=[TableDelta(5, 0, (6, 9), (1, 1))],
            copies=[BlockCopy(2, 9, 1, 1)],
            slots=[5],
            starts=[20],
            lengths=[1],
            flags=[SAMPLE],
            token_ids=drawn[1:2],
        )
    ).token_ids

    assert len(drawn) == 3
    assert len(set(drawn)) == 1
    assert child == parent
