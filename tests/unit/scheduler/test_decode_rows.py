"""Sequences that only decode, planned and accepted in columns, against what each row by itself would give."""

from __future__ import annotations

import random

import pytest

from octavo.common.messages.kv import KvReply, PoolCounts
from octavo.common.messages.step import NOT_FINITE, RowFlag, StepPlan
from octavo.scheduler.block_account import BlockAccount
from octavo.scheduler.decode_rows import REQUEST, DecodeRows, LaunchedDecodes
from octavo.scheduler.sequence import Sequence, SequenceState
from support.sequences import make_running

BLOCK_SIZE = 4
FED = RowFlag.SAMPLE | RowFlag.FED_BY_LAST_SAMPLE


def account(num_credits: int) -> BlockAccount:
    made = BlockAccount(num_blocks=100, block_size=BLOCK_SIZE)
    made.take_request(1, 0, is_starving=False)
    credits = [(70 + number, 1) for number in range(num_credits)]
    made.on_reply(KvReply(1, [], [], credits, 0, PoolCounts(0, 0, 100, 0, 0)))
    return made


def decoding(rows: DecodeRows, slot: int, num_prompt_tokens: int = 10, **options: object) -> Sequence:
    """The last row of its prompt is launched, and its result is not here."""
    num_blocks = -(-num_prompt_tokens // BLOCK_SIZE)
    sequence = make_running(num_prompt_tokens, block_ids=tuple(range(num_blocks)), slot=slot, **options)  # type: ignore[arg-type]
    sequence.num_launched_tokens = num_prompt_tokens
    sequence.num_pending_samples = sequence.num_steps_in_flight = 1
    sequence.num_sent_blocks = num_blocks
    rows.add(sequence)
    rows.enter_if_steady(sequence)
    return sequence


def accept_prompt(sequence: Sequence, token_id: int = 900) -> None:
    """The result of its last row is here, which was planned by itself."""
    sequence.num_pending_samples -= 1
    sequence.num_steps_in_flight -= 1
    sequence.num_computed_tokens = len(sequence.token_ids)
    sequence.token_ids.append(token_id)


def launch(rows: DecodeRows, credits: BlockAccount) -> tuple[StepPlan, LaunchedDecodes]:
    rows.find_blocks(credits)
    plan = StepPlan(1)
    launched = rows.launch(plan)
    rows.end_launch()
    return plan, launched


def test_each_has_one_row_a_step_at_its_next_position() -> None:
    rows = DecodeRows(BLOCK_SIZE, 8)
    first, second = decoding(rows, slot=5), decoding(rows, slot=2, num_prompt_tokens=7)
    assert (len(rows), rows.others) == (2, {})
    credits = account(9)
    plan, _ = launch(rows, credits)
    assert (plan.slots, plan.starts, plan.lengths, plan.flags) == ([5, 2], [10, 7], [1, 1], [FED, FED])
    assert plan.token_ids == []
    assert launch(rows, credits)[0].starts == [11, 8]
    assert [len(one.block_table) for one in (first, second)] == [3, 3]
    assert rows.grown() == []
    rows.find_blocks(credits)
    assert [one.block_table for one in (first, second)] == [[0, 1, 2, 71], [0, 1, 70]]
    assert rows.grown() == [first]


@pytest.mark.parametrize(
    "options",
    [{"num_logprobs": 1}, {"n": 2}, {"max_tokens": 1}],
    ids=["log-probabilities", "not fanned out", "last row"],
)
def test_whose_next_row_does_not_follow_from_the_last_stays_out(options: dict[str, int]) -> None:
    rows = DecodeRows(BLOCK_SIZE, 8)
    sequence = decoding(rows, slot=0, **options)
    assert (len(rows), list(rows.others.values())) == (0, [sequence])


def test_part_of_a_prompt_that_leaves_one_token_stays_out() -> None:
    rows = DecodeRows(BLOCK_SIZE, 8)
    sequence = make_running(10, block_ids=(0, 1, 2), slot=0)
    sequence.num_launched_tokens = 9
    rows.add(sequence)
    rows.enter_if_steady(sequence)
    assert len(rows) == 0


def test_without_a_block_one_leaves_and_the_others_stay() -> None:
    rows = DecodeRows(BLOCK_SIZE, 8)
    starved, fine = decoding(rows, slot=0, num_prompt_tokens=8), decoding(rows, slot=1)
    plan, _ = launch(rows, account(0))
    assert plan.slots == [1]
    assert list(rows.others.values()) == [starved]
    assert (starved.num_launched_tokens, starved.num_pending_samples) == (8, 1)
    assert fine.decodes is rows


def test_the_last_row_that_max_tokens_allows_is_the_last() -> None:
    rows = DecodeRows(BLOCK_SIZE, 8)
    sequence = decoding(rows, slot=0, max_tokens=3)
    credits = account(9)
    launch(rows, credits)
    assert len(rows) == 1
    _, last = launch(rows, credits)
    assert len(rows) == 0
    assert (sequence.num_launched_tokens, sequence.num_pending_samples, sequence.num_steps_in_flight) == (12, 3, 3)
    assert last.gone == {0: sequence}


def test_tokens_are_there_whenever_somebody_looks() -> None:
    rows = DecodeRows(BLOCK_SIZE, 8)
    sequence = decoding(rows, slot=3)
    accept_prompt(sequence)
    credits = account(9)
    for token_id in (901, 902, 903):
        _, launched = launch(rows, credits)
        rows.take(launched, [token_id])
        assert (len(sequence.token_ids), sequence.token_ids[-1]) == (token_id - 889, token_id)
        assert sequence.num_computed_tokens == len(sequence.token_ids) - 1


def test_one_that_left_is_seen_to_by_itself_though_its_slot_is_taken_again() -> None:
    rows = DecodeRows(BLOCK_SIZE, 8)
    gone, stays = decoding(rows, slot=0), decoding(rows, slot=1)
    accept_prompt(gone)
    accept_prompt(stays)
    credits = account(9)
    _, first = launch(rows, credits)
    rows.remove(gone)
    assert (gone.num_launched_tokens, gone.num_pending_samples, gone.num_steps_in_flight) == (11, 1, 1)
    heir = decoding(rows, slot=0, num_prompt_tokens=5)
    _, second = launch(rows, credits)
    rows.remove(heir)
    assert (first.gone, second.gone) == ({0: gone}, {1: heir})
    assert first.end(0) == 11
    columns, token_ids = rows.take(first, [50, 60])
    assert (columns[REQUEST].tolist(), token_ids) == ([1], [60])
    assert (stays.token_ids[-1], gone.token_ids[-1], heir.token_ids[-1]) == (60, 900, 4)


def test_tokens_that_end_are_those_of_the_requests_in_here() -> None:
    rows = DecodeRows(BLOCK_SIZE, 8)
    one = decoding(rows, slot=0, stop_token_ids=(7, 8))
    other = decoding(rows, slot=1, stop_token_ids=(8,))
    assert rows.ending_ids == {7, 8}
    _, launched = launch(rows, account(9))
    columns, token_ids = rows.take(launched, [7, 7])
    assert rows.ended(columns, token_ids) == [one]
    rows.remove(one)
    assert rows.ending_ids == {8}
    rows.disband()
    assert (len(rows), rows.ending_ids, list(rows.others.values())) == (0, set(), [other])


def test_rows_whose_logits_were_not_finite_leave() -> None:
    rows = DecodeRows(BLOCK_SIZE, 8)
    bad, good = decoding(rows, slot=0), decoding(rows, slot=1)
    _, launched = launch(rows, account(9))
    rows.leave_where(launched, [NOT_FINITE, 5], NOT_FINITE)
    assert launched.gone == {0: bad}
    assert good.decodes is rows


def test_columns_give_what_rows_one_by_one_give() -> None:
    """Sequences come, end and are preempted at random, at depth 2: each has the tokens that were sampled for it."""
    chance = random.Random(7)
    rows, credits = DecodeRows(BLOCK_SIZE, 6), account(1000)
    expected: dict[Sequence, list[int]] = {}
    free, in_flight, num_full = list(range(6)), [], 0
    for step in range(400):
        while free and chance.random() < 0.4:
            sequence = decoding(rows, free.pop(), chance.randint(1, 9), max_tokens=chance.randint(4, 40))
            accept_prompt(sequence)
            expected[sequence] = list(sequence.token_ids)
        plan, launched = launch(rows, credits)
        by_slot = {one.slot: one for one in expected if one.state is SequenceState.RUNNING}
        in_flight.append((launched, [by_slot[slot] for slot in plan.slots]))
        if len(in_flight) < 2:
            continue
        launched, owners = in_flight.pop(0)
        token_ids = [1000 + step * 8 + row for row in range(len(owners))]
        for row, sequence in launched.gone.items():
            assert sequence is owners[row]
            sequence.num_pending_samples -= 1
            if sequence.state is SequenceState.RUNNING:
                sequence.take_tokens([token_ids[row]], 0)
        rows.take(launched, list(token_ids))
        for sequence, token_id in zip(owners, token_ids, strict=True):
            if sequence.state is SequenceState.RUNNING:
                expected[sequence].append(token_id)
        for sequence in rows.settle_full():
            assert sequence.num_computed_tokens % BLOCK_SIZE == 0
            num_full += 1
        for sequence in [one for one in expected if one.state is SequenceState.RUNNING]:
            if chance.random() < 0.1:
                assert sequence.token_ids == expected[sequence]
            is_done = len(expected[sequence]) == sequence.request.max_len
            if is_done or chance.random() < 0.02:
                rows.remove(sequence)
                sequence.state = SequenceState.FINISHED
                free.append(sequence.slot)
    assert num_full > 100
    assert sum(len(one.token_ids) == one.request.max_len for one in expected) > 10
    for sequence, token_ids in expected.items():
        assert sequence.token_ids == token_ids
