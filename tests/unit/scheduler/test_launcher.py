"""Step plans, row by row."""

from __future__ import annotations

from octavo.common.messages.kv import BlockCopy, KvReply, PoolCounts
from octavo.common.messages.step import OpenSlot, RowFlag, StepPlan, TableDelta
from octavo.scheduler.block_account import BlockAccount
from octavo.scheduler.launcher import launch, select_rows
from octavo.scheduler.queues import Slots
from octavo.scheduler.sequence import Sequence, SequenceState
from octavo.scheduler.sharing_groups import SharingGroups
from support.sequences import make_running

SAMPLE, FAN_OUT, FED = RowFlag.SAMPLE, RowFlag.FAN_OUT, RowFlag.FED_BY_LAST_SAMPLE


def account(*credits: tuple[int, int]) -> BlockAccount:
    made = BlockAccount(num_blocks=100, block_size=4)
    made.take_request(1, 0, is_starving=False)
    made.on_reply(KvReply(1, [], [], list(credits), 0, PoolCounts(0, 0, 100, 0, 0)))
    return made


def decoding(slot: int = 0, block_ids: tuple[int, ...] = (10, 11, 12)) -> Sequence:
    """10 prompt tokens are computed and one output token is here."""
    sequence = make_running(block_ids=block_ids, slot=slot, num_computed=10)
    sequence.token_ids.append(77)
    sequence.is_open = True
    sequence.num_sent_blocks = len(block_ids)
    return sequence


def launch_one(sequence: Sequence, length: int, step_id: int = 1) -> StepPlan:
    plan, _ = launch(step_id, [(sequence, length)], Slots(8), [], SharingGroups(4), now=0.0)
    return plan


def test_first_chunk_opens_the_slot_and_fills_its_table() -> None:
    sequence = make_running(block_ids=(7, 8, 9), slot=3, seed=5, temperature=0.5, top_p=0.9, top_k=4, num_logprobs=2)
    plan = launch_one(sequence, 6)
    assert plan.opened_slots == [OpenSlot(3, sequence.sequence_id, (5,), 0.5, 0.9, 4, 2)]
    assert plan.table_deltas == [TableDelta(3, 0, (7, 8, 9), (7, 8, 9))]
    assert (plan.slots, plan.starts, plan.lengths, plan.flags) == ([3], [0], [6], [0])
    assert plan.token_ids == [0, 1, 2, 3, 4, 5]


def test_last_chunk_samples_and_the_decode_after_it_is_fed_by_that_sample() -> None:
    sequence = make_running(block_ids=(7, 8, 9), slot=3)
    launch_one(sequence, 6)
    last_chunk = launch_one(sequence, 4, step_id=2)
    assert (last_chunk.starts, last_chunk.lengths, last_chunk.flags) == ([6], [4], [SAMPLE])
    assert last_chunk.token_ids == [6, 7, 8, 9]
    decode = launch_one(sequence, 1, step_id=3)
    assert (decode.starts, decode.lengths, decode.flags) == ([10], [1], [SAMPLE | FED])
    assert (decode.opened_slots, decode.table_deltas, decode.token_ids) == ([], [], [])


def test_prefix_hit_starts_behind_what_is_cached() -> None:
    sequence = make_running(block_ids=(7, 8, 9), slot=0, num_computed=8)
    plan = launch_one(sequence, 2)
    assert (plan.starts, plan.lengths, plan.flags, plan.token_ids) == ([8], [2], [SAMPLE], [8, 9])


def test_last_row_of_a_prompt_with_choices_draws_for_all_of_them() -> None:
    sequence = make_running(block_ids=(7, 8, 9), slot=0, n=3, seed=1)
    plan, step = launch(1, [(sequence, 10)], Slots(8), [], SharingGroups(4), now=0.0)
    assert plan.flags == [FAN_OUT]
    assert len(plan.opened_slots[0].seeds) == len(set(plan.opened_slots[0].seeds)) == 3
    assert [num_samples for _, _, num_samples in step.rows] == [3]


def test_block_got_by_a_credit_is_told_as_a_delta() -> None:
    sequence = decoding(block_ids=(10, 11, 12))
    sequence.token_ids.extend([78, 79])
    sequence.num_computed_tokens = sequence.num_launched_tokens = 12
    selection = select_rows([sequence], account((70, 6)), 32)
    plan, _ = launch(1, selection.rows, Slots(8), [], SharingGroups(4), now=0.0)
    assert plan.table_deltas == [TableDelta(0, 3, (70,), (6,))]
    assert plan.token_ids == [79]


def test_copies_and_closed_slots_go_with_the_plan() -> None:
    slots = Slots(4)
    slots.give_back(slots.take(), is_open=True)
    plan, step = launch(9, [(decoding(slot=1), 1)], slots, [BlockCopy(3, 4)], SharingGroups(4), now=2.5)
    assert (plan.step_id, plan.closed_slots, plan.copies) == (9, [0], [BlockCopy(3, 4)])
    assert (step.step_id, step.launched_at) == (9, 2.5)


def test_decodes_come_first_and_prompts_share_what_is_left() -> None:
    prompt = make_running(100, block_ids=tuple(range(20, 45)), slot=0)
    first, second = decoding(slot=1), decoding(slot=2)
    selection = select_rows([prompt, first, second], account(), 32)
    assert selection.rows == [(first, 1), (second, 1), (prompt, 30)]
    assert selection.num_starved == 0


def test_decode_without_a_block_sits_out_and_the_others_run() -> None:
    starved, fine = decoding(slot=0, block_ids=(10, 11)), decoding(slot=1)
    starved.num_launched_tokens = starved.num_computed_tokens = 10
    starved.block_table = [10, 11]
    selection = select_rows([starved, fine], account(), 32)
    assert selection.rows == [(fine, 1)]
    assert selection.num_starved == 1


def test_no_row_runs_past_max_tokens() -> None:
    sequence = make_running(block_ids=(7, 8, 9), slot=0, max_tokens=1)
    launch_one(sequence, 10)
    assert select_rows([sequence], account(), 32).rows == []


def test_preempted_sequence_is_not_launched_any_more() -> None:
    leaving = decoding()
    leaving.state = SequenceState.LEAVING
    assert select_rows([leaving], account(), 32).rows == []
