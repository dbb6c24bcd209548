"""A step's inputs stay as they are until its own upload has read them (swp-7f4), on a model of a late stream."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.worker import step_buffer
from octavo.worker.step_buffer import StepBuffer

CAPACITY = 64


class LateStream:
    """Runs what it was given in order, and only when somebody waits for an event or lets it."""

    def __init__(self) -> None:
        self.given: list[Callable[[], object]] = []

    def run_one(self) -> None:
        self.given.pop(0)()


class Event:
    """Passed until it is recorded, as CUDA's are."""

    def __init__(self, stream: LateStream) -> None:
        self._stream = stream
        self._num_open = 0
        self.num_waits = 0

    def record(self) -> None:
        self._num_open += 1
        self._stream.given.append(self._pass)

    def _pass(self) -> None:
        self._num_open -= 1

    def synchronize(self) -> None:
        self.num_waits += self._num_open > 0
        while self._num_open:
            self._stream.run_one()


class DeviceTensor:
    """What is copied to it arrives in stream order, with the bytes that the source has then."""

    def __init__(self, tensor: Tensor, stream: LateStream) -> None:
        self.tensor = tensor
        self._stream = stream

    def __getitem__(self, where: slice) -> DeviceTensor:
        return DeviceTensor(self.tensor[where], self._stream)

    def copy_(self, source: Tensor, *, non_blocking: bool) -> None:
        assert non_blocking
        self._stream.given.append(lambda: self.tensor.copy_(source))


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateStream]:
    late = LateStream()

    def zeros(size: int, dtype: torch.dtype, pin_memory: bool = False, device: Any = None) -> Any:
        assert pin_memory == (device is None)
        tensor = torch.zeros(size, dtype=dtype)
        return tensor if pin_memory else DeviceTensor(tensor, late)

    cuda = SimpleNamespace(Event=lambda: Event(late))
    monkeypatch.setattr(step_buffer, "torch", SimpleNamespace(zeros=zeros, int32=torch.int32, cuda=cuda))
    yield late


@pytest.mark.parametrize("num_pinned", [1, 2, 3])
def test_each_of_200_steps_reads_its_own_tables_however_late_the_uploads_are(
    stream: LateStream, num_pinned: int
) -> None:
    """Two batches with disjoint tables take turns; a step's kernel runs in stream order, after its upload."""
    buffer = StepBuffer(CAPACITY, num_pinned, torch.device("cuda"))
    dice = random.Random(num_pinned)
    seen: list[list[list[int]]] = []
    sent: list[list[list[int]]] = []

    def read(views: list[Any]) -> None:
        seen.append([view.tensor.tolist() for view in views])

    for step in range(200):
        batch = range(1000, 1040) if step % 2 else range(40)
        columns = [np.array(dice.sample(batch, length), dtype=np.int32) for length in (7, 20)]
        views = buffer.send(columns)
        sent.append([column.tolist() for column in columns])
        columns[0][:] = columns[1][:] = -1  # the caller's own arrays are its own again
        stream.given.append(lambda views=views: read(views))
        for _ in range(dice.choice([0, 0, 0, 1, 9])):
            if stream.given:
                stream.run_one()
    while stream.given:
        stream.run_one()
    assert seen == sent


def test_the_host_waits_only_when_the_ring_has_gone_round(stream: LateStream) -> None:
    buffer = StepBuffer(CAPACITY, 2, torch.device("cuda"))
    for _ in range(2):
        buffer.send([np.arange(4, dtype=np.int32)])
    assert len(stream.given) == 4, "two copies and two events wait, and so does nobody"
    buffer.send([np.arange(4, dtype=np.int32)])
    assert len(stream.given) == 4, "the first copy had to end"
