from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from octavo.worker.attention_plan import Prefix, cut_prefixes, cut_queries, decode_items


def items_of(seq_lens: list[int], num_spare: int, prefixes: list[Prefix] | None = None) -> list[tuple[int, ...]]:
    """(row, begin, end, part, number of parts) of each item."""
    lens = np.array(seq_lens)
    rows = np.arange(len(lens))
    plan = cut_prefixes(prefixes or [], len(lens), 1, 32, 64, 4, 4)
    made = decode_items(rows, rows + 10, lens, num_spare, plan)
    return [(one[0], one[2], one[3], one[5], one[6]) for one in made.tolist()]


def test_short_contexts_stay_whole_and_the_longest_come_last() -> None:
    assert items_of([200, 1, 384, 200], num_spare=16) == [
        (1, 0, 1, 0, 1),
        (0, 0, 200, 0, 1),
        (3, 0, 200, 0, 1),
        (2, 0, 384, 0, 1),
    ]


def test_a_long_context_is_cut_into_parts_that_are_neighbours() -> None:
    assert items_of([600, 100], num_spare=16) == [
        (1, 0, 100, 0, 1),
        (0, 0, 256, 0, 3),
        (0, 256, 512, 1, 3),
        (0, 512, 600, 2, 3),
    ]


def test_parts_of_several_rows_are_smaller_while_all_fit_on_the_gpu_at_once() -> None:
    items = items_of([1, 385, 1, 1, 1], num_spare=16)
    assert items[4:] == [(1, 0, 128, 0, 4), (1, 128, 256, 1, 4), (1, 256, 384, 2, 4), (1, 384, 385, 3, 4)]

    items = items_of([1, 385] + 13 * [1], num_spare=16)
    assert items[14:] == [(1, 0, 256, 0, 2), (1, 256, 385, 1, 2)]


def test_there_are_never_more_items_than_rows_and_spares() -> None:
    for num_spare in (1, 16, 64):
        assert len(items_of([131_072, 1, 5_000, 300] * 5, num_spare)) <= 20 + num_spare


@given(lens=st.lists(st.integers(1, 5_000), min_size=1, max_size=80), num_spare=st.integers(1, 80))
def test_items_of_a_row_make_up_its_context_and_shorter_rows_come_first(lens: list[int], num_spare: int) -> None:
    items = items_of(lens, num_spare)

    rows = [row for row, *_ in items]
    assert [lens[row] for row in rows] == sorted(lens[row] for row in rows)
    for row, length in enumerate(lens):
        parts = [(begin, end, part, count) for one, begin, end, part, count in items if one == row]
        assert [(part, count) for *_, part, count in parts] == [(part, len(parts)) for part in range(len(parts))]
        assert parts[0][0] == 0 and parts[-1][1] == length
        assert all(earlier[1] == later[0] for earlier, later in pairwise(parts))
        assert all(begin < end for begin, end, *_ in parts)
    assert len(items) <= len(lens) + num_spare


def test_rows_that_share_a_prefix_keep_what_comes_after_it() -> None:
    items = items_of([700, 90, 650], num_spare=16, prefixes=[Prefix([0, 2], 640)])

    assert items == [(2, 640, 650, 0, 1), (0, 640, 700, 0, 1), (1, 0, 90, 0, 1)]


def test_prefixes_that_save_little_give_way_when_tiles_are_few() -> None:
    plan = cut_prefixes([Prefix([0, 1], 32), Prefix([2, 3, 4], 512)], 5, 8, 2, max_tiles=2, max_parts=4, code_shift=4)

    assert plan is not None
    assert plan.lens.tolist() == [0, 0, 512, 512, 512]
    assert plan.tiles[:, :6].tolist() == [[0, 2, 2, 0, 512, 0], [2, 1, 2, 0, 512, 0]]
    assert plan.codes.tolist() == [0, 0, 1, 17, 33]


def test_a_long_prefix_of_few_rows_is_split() -> None:
    plan = cut_prefixes([Prefix([0, 1], 1024)], 2, 8, 32, max_tiles=32, max_parts=4, code_shift=4)

    assert plan is not None
    assert plan.tiles[:, 3:6].tolist() == [[0, 256, 0], [256, 512, 1], [512, 768, 2], [768, 1024, 3]]
    assert plan.tiles[:, 6].tolist() == [4, 0, 0, 0]


def test_queries_with_the_most_keys_come_first() -> None:
    rows, parts = cut_queries(np.array([40, 10]), np.array([40, 500]), 32)

    assert list(zip(rows.tolist(), parts.tolist(), strict=True)) == [(1, 0), (0, 1), (0, 0)]
