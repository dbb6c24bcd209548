"""Any order of admissions, steps, forks, preemptions and ends keeps every block's content its owner's."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import settings

from support.pool_machine import PoolMachine

TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=50)


@pytest.mark.parametrize("seed", range(20))
def test_a_long_busy_life(seed: int) -> None:
    """As above, with more load than a search for small examples puts on it: two steps in flight most of the time."""
    chance = Random(seed)
    machine = PoolMachine()
    machine.open(num_blocks=chance.randint(4, 40), watermark=0.0)
    prefix = [0] * chance.randint(4, 40)
    for _ in range(300):
        if len(machine.waiting) < 3 and chance.random() < 0.7:
            own = [chance.randint(0, 1) for _ in range(chance.randint(0, 6))]
            machine.submit(prompt=prefix[: chance.randint(1, len(prefix))] + own, salt=chance.choice([b"", b"", b"b"]))
        machine.exchange(seed=chance.getrandbits(32), credit_target=chance.randint(0, 6), returns=chance.random() < 0.1)
        machine.launch(seed=chance.getrandbits(32))
        while len(machine.queued) > chance.choice([0, 1, 1, 2]):
            machine.finish_step()
        if chance.random() < 0.02:
            machine.replace_scheduler(seed=chance.getrandbits(32))
        machine.the_ledger_holds()
    machine.teardown()
