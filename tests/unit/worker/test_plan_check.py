"""Plans that break the contract are refused whole, by a worker that computes and by one that simulates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from octavo.common.errors import MessageGapError, ProtocolError, StaleBlockError
from octavo.common.messages.kv import BlockCopy
from octavo.common.messages.step import OpenSlot, RowFlag, SlotRules, StepPlan, TableDelta
from octavo.common.messages.token_rules import TokenRules
from octavo.worker.runner import Runner
from support.runner_driver import NUM_BLOCKS, make_runner
from support.simulated_workers import simulated_runner
from support.tiny_models import VOCAB_SIZE, TinyModel

GREEDY = OpenSlot(slot=0, sequence_id=1, seeds=(1,), temperature=0.0, top_p=1.0, top_k=0, num_logprobs=None)
BIASED, FOREIGN = TokenRules(logit_bias=((5, 1.0),)), TokenRules(logit_bias=((VOCAB_SIZE, 1.0),))
FED = RowFlag.SAMPLE | RowFlag.FED_BY_LAST_SAMPLE

PREFILL = StepPlan(
    step_id=1,
    opened_slots=[GREEDY],
    table_deltas=[TableDelta(0, 0, (5, 9), (3, 3))],
    slots=[0],
    starts=[0],
    lengths=[4],
    flags=[RowFlag.SAMPLE],
    token_ids=[10, 11, 12, 13],
)
DECODE = StepPlan(step_id=2, slots=[0], starts=[4], lengths=[1], flags=[FED])


@pytest.fixture(params=["computing", "simulated"])
def runner(request: pytest.FixtureRequest, tiny: Callable[[str], TinyModel]) -> Runner:
    if request.param == "computing":
        return make_runner(tiny("llama").folder, max_num_seqs=4, max_num_batched_tokens=64)
    return simulated_runner(max_num_seqs=4, max_num_batched_tokens=64, vocab_size=VOCAB_SIZE, num_blocks=NUM_BLOCKS)


@pytest.mark.parametrize(
    "broken",
    [
        replace(PREFILL, opened_slots=[replace(GREEDY, slot=4)]),
        replace(PREFILL, opened_slots=[replace(GREEDY, slot=-1)]),
        replace(PREFILL, opened_slots=[GREEDY, GREEDY]),
        replace(PREFILL, opened_slots=[]),
        replace(PREFILL, opened_slots=[replace(GREEDY, seeds=())]),
        replace(PREFILL, opened_slots=[replace(GREEDY, seeds=(2**64,))]),
        replace(PREFILL, opened_slots=[replace(GREEDY, temperature=float("nan"))]),
        replace(PREFILL, opened_slots=[replace(GREEDY, temperature=-0.1)]),
        replace(PREFILL, opened_slots=[replace(GREEDY, top_p=0.0)]),
        replace(PREFILL, opened_slots=[replace(GREEDY, top_k=-1)]),
        replace(PREFILL, opened_slots=[replace(GREEDY, num_logprobs=VOCAB_SIZE + 1)]),
        replace(
            PREFILL,
            opened_slots=[replace(GREEDY, rules=SlotRules(FOREIGN, (), (), ()))],
        ),
        replace(PREFILL, opened_slots=[replace(GREEDY, rules=SlotRules(TokenRules(min_p=float("nan")), (), (), ()))]),
        replace(PREFILL, opened_slots=[replace(GREEDY, rules=SlotRules(BIASED, (10, VOCAB_SIZE), (), ()))]),
        replace(PREFILL, opened_slots=[replace(GREEDY, rules=SlotRules(BIASED, (), (), (-1,)))]),
        replace(PREFILL, closed_slots=[0]),
        replace(PREFILL, table_deltas=[TableDelta(1, 0, (5,), (3,))]),
        replace(PREFILL, table_deltas=[TableDelta(4, 0, (5,), (3,))]),
        replace(PREFILL, table_deltas=[TableDelta(0, 0, (NUM_BLOCKS,), (3,))]),
        replace(PREFILL, table_deltas=[TableDelta(0, 0, (-1,), (3,))]),
        replace(PREFILL, table_deltas=[TableDelta(0, 0, (5,), (-1,))]),
        replace(PREFILL, table_deltas=[TableDelta(0, 0, (5, 6), (3,))]),
        replace(PREFILL, table_deltas=[TableDelta(0, 0, tuple(range(17)), (3,) * 17)]),
        replace(PREFILL, copies=[BlockCopy(0, NUM_BLOCKS)]),
        replace(PREFILL, copies=[BlockCopy(-1, 0)]),
        replace(PREFILL, slots=[1]),
        replace(PREFILL, slots=[-1]),
        replace(PREFILL, slots=[0, 0], starts=[0, 2], lengths=[2, 2], flags=[0, 0]),
        replace(PREFILL, starts=[-1]),
        replace(PREFILL, starts=[29]),
        replace(PREFILL, lengths=[0], token_ids=[]),
        replace(PREFILL, lengths=[33], token_ids=[1] * 33),
        replace(PREFILL, lengths=[3]),
        replace(PREFILL, flags=[8]),
        replace(PREFILL, flags=[0, 0]),
        replace(PREFILL, flags=[FED], lengths=[1], token_ids=[]),
        replace(PREFILL, token_ids=[10, 11, 12, VOCAB_SIZE]),
        replace(PREFILL, token_ids=[10, 11, 12, -1]),
        replace(PREFILL, token_ids=[10, 11, 12]),
    ],
)
def test_broken_plan_is_refused_and_leaves_no_trace(runner: Runner, broken: StepPlan) -> None:
    with pytest.raises(ProtocolError):
        runner.execute(broken)
    assert runner.slots.num_open == 0
    first = runner.execute(PREFILL).token_ids
    assert runner.execute(DECODE).token_ids != []
    assert len(first) == 1


def test_more_tokens_than_a_step_may_hold_are_refused(runner: Runner) -> None:
    blocks = tuple(range(5))
    plan = replace(PREFILL, table_deltas=[TableDelta(0, 0, blocks, (1,) * 5)], lengths=[65], token_ids=[1] * 65)
    with pytest.raises(ProtocolError, match="65 tokens in one step, at most 64"):
        runner.execute(plan)


def test_delta_that_does_not_start_at_the_end_of_the_table_is_a_gap(runner: Runner) -> None:
    runner.execute(PREFILL)
    for start in (1, 3):
        with pytest.raises(MessageGapError, match=f"starts at {start}, but its table has 2 entries"):
            runner.execute(replace(DECODE, table_deltas=[TableDelta(0, start, (7,), (1,))]))
    runner.execute(replace(DECODE, table_deltas=[TableDelta(0, 2, (7,), (1,))]))


def test_two_deltas_of_one_plan_join(runner: Runner) -> None:
    runner.execute(replace(PREFILL, table_deltas=[TableDelta(0, 0, (5,), (3,)), TableDelta(0, 1, (9,), (3,))]))
    assert len(runner.execute(DECODE).token_ids) == 1


def test_block_of_an_older_generation_is_stale(runner: Runner) -> None:
    """Block 5 was given to slot 0 at generation 3; a late delta names it at 2, while in use and after."""
    runner.execute(PREFILL)
    late = StepPlan(step_id=2, opened_slots=[replace(GREEDY, slot=1)], table_deltas=[TableDelta(1, 0, (5,), (2,))])
    with pytest.raises(StaleBlockError, match="block 5 comes at generation 2, after 3"):
        runner.execute(late)
    runner.execute(StepPlan(step_id=2, closed_slots=[0]))
    with pytest.raises(StaleBlockError):
        runner.execute(late)


def test_block_is_not_taken_from_a_live_table(runner: Runner) -> None:
    """Slot 0 lists block 5 at generation 3. Nobody gets it at 4 before slot 0 is closed."""
    runner.execute(PREFILL)
    taken = StepPlan(step_id=2, opened_slots=[replace(GREEDY, slot=1)], table_deltas=[TableDelta(1, 0, (5,), (4,))])
    with pytest.raises(StaleBlockError, match="while a live table lists it at 3"):
        runner.execute(taken)
    runner.execute(replace(taken, closed_slots=[0]))
    assert runner.slots.num_open == 1


def test_block_is_shared_at_one_generation(runner: Runner) -> None:
    runner.execute(PREFILL)
    share = StepPlan(step_id=2, opened_slots=[replace(GREEDY, slot=1)], table_deltas=[TableDelta(1, 0, (5, 7), (3, 1))])
    runner.execute(share)
    runner.execute(StepPlan(step_id=3, closed_slots=[0]))
    with pytest.raises(StaleBlockError):
        runner.execute(replace(PREFILL, table_deltas=[TableDelta(0, 0, (5, 9), (4, 4))]))


def test_sequence_that_left_does_not_run_again(runner: Runner) -> None:
    runner.execute(PREFILL)
    runner.execute(StepPlan(step_id=2, closed_slots=[0]))
    with pytest.raises(ProtocolError, match="slot 0, which is not open"):
        runner.execute(DECODE)


def test_new_sequence_of_a_slot_is_not_fed_by_the_last_one(runner: Runner) -> None:
    runner.execute(PREFILL)
    reopened = replace(DECODE, closed_slots=[0], opened_slots=[GREEDY], starts=[0])
    reopened = replace(reopened, table_deltas=[TableDelta(0, 0, (5,), (3,))])
    with pytest.raises(ProtocolError, match="fed by its last sample, but has none"):
        runner.execute(reopened)


def test_reset_forgets_generations(runner: Runner) -> None:
    runner.execute(PREFILL)
    runner.reset()
    runner.execute(replace(PREFILL, table_deltas=[TableDelta(0, 0, (5, 9), (0, 0))]))


@pytest.mark.parametrize(
    "copy",
    [
        BlockCopy(5, 6, source_generation=2, target_generation=1),
        BlockCopy(5, 9, source_generation=3, target_generation=2),
        BlockCopy(5, 9, source_generation=3, target_generation=4),
    ],
)
def test_copy_that_reads_or_writes_under_another_generation_is_refused(runner: Runner, copy: BlockCopy) -> None:
    """Slot 0 lists blocks 5 and 9 at generation 3: nothing may read or write them as of before, nor renew them."""
    runner.execute(PREFILL)
    with pytest.raises(StaleBlockError):
        runner.execute(StepPlan(step_id=2, copies=[copy]))
    runner.execute(StepPlan(step_id=2, copies=[BlockCopy(5, 6, source_generation=3, target_generation=1)]))


def test_copied_block_is_not_listed_under_an_older_generation(runner: Runner) -> None:
    runner.execute(PREFILL)
    runner.execute(StepPlan(step_id=2, copies=[BlockCopy(5, 6, source_generation=3, target_generation=4)]))
    child = replace(GREEDY, slot=1)
    with pytest.raises(StaleBlockError, match="block 6 comes at generation 3, after 4"):
        runner.execute(StepPlan(step_id=3, opened_slots=[child], table_deltas=[TableDelta(1, 0, (6,), (3,))]))
