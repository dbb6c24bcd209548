"""What a scheduler asks of a worker and of its KV manager when it takes them, and when it starts over."""

from __future__ import annotations

import itertools

import pytest

from octavo.common.errors import NotReadyError
from octavo.common.messages.generation import ModelInfo
from octavo.common.messages.kv import DeclarePool, PoolOpened
from octavo.common.messages.step import WorkerHello, WorkerReady
from octavo.scheduler.core import SchedulerCore
from octavo.scheduler.core_settings import CoreSettings
from octavo.scheduler.worker_group import WorkerGroup

LIFE = 77
MODEL = ModelInfo("m", 64, 97, (), 4, 16)
TAKEN = WorkerReady(LIFE, "m", 3, 16, 4, 32, 64, 97, (), generations=(4, -1, 2))


@pytest.fixture
def group() -> WorkerGroup:
    return WorkerGroup(SchedulerCore(CoreSettings()), "group-0", itertools.count(5), lambda ready: MODEL)


def test_pool_is_not_opened_before_the_worker_says_that_old_steps_have_ended(group: WorkerGroup) -> None:
    assert group.hello() == WorkerHello(5)
    with pytest.raises(NotReadyError):
        group.opening()
    group.on_worker_ready(TAKEN, now=0.0)
    opening = group.opening()
    assert (opening.epoch, opening.incarnation, opening.generations) == (5, LIFE, (4, -1, 2))
    group.worker_lost(can_resume=False)
    with pytest.raises(NotReadyError):
        group.opening()
    assert group.hello() == WorkerHello(6, begins_new_life=True)


def test_generations_are_told_until_the_scheduler_has_the_pool_and_then_declared(group: WorkerGroup) -> None:
    group.hello()
    group.on_worker_ready(TAKEN, now=0.0)
    group.on_pool_opened(PoolOpened("group-0", boot_epoch=9))
    group.kvmanager_lost(can_resume=True)
    assert group.opening().generations == ()
    group.on_pool_opened(PoolOpened("group-0", boot_epoch=10))
    declaration = group.advance(now=0.0).kv_messages[0]
    assert isinstance(declaration, DeclarePool)
    assert declaration.highest_generation == 4
