from __future__ import annotations

import asyncio

from octavo.gateway.intake import Turns


async def turns_of(turns: Turns, num_requests: int, given_up: tuple[int, ...] = ()) -> list[tuple[int, int]]:
    """(request, turn of the event loop in which it passed) of those that come in one turn, in the order of passing."""
    turn = 0
    passed: list[tuple[int, int]] = []

    async def take(request: int) -> None:
        await turns.take()
        passed.append((request, turn))

    tasks = [asyncio.create_task(take(request)) for request in range(num_requests)]
    await asyncio.sleep(0)
    for request in given_up:
        tasks[request].cancel()
    while not all(task.done() for task in tasks):
        turn += 1
        await asyncio.sleep(0)
    return passed


async def test_requests_that_come_at_once_pass_in_order_a_few_in_each_turn() -> None:
    passed = await turns_of(Turns(3), 11)

    assert [request for request, _ in passed] == list(range(11))
    turns = [turn for _, turn in passed]
    assert all(turns.count(turn) <= 3 for turn in turns)
    assert turns[:4] == [0, 0, 0, turns[3]]
    assert turns[3] > 0


async def test_who_has_given_up_takes_no_turn() -> None:
    passed = await turns_of(Turns(1), 4, given_up=(1, 2))

    assert [request for request, _ in passed] == [0, 3]


async def test_a_turn_that_has_passed_leaves_room_for_the_next() -> None:
    turns = Turns(2)
    for _ in range(3):
        assert [turn for _, turn in await turns_of(turns, 2)] == [0, 0]
        await asyncio.sleep(0)
