"""The clock chooses among the ways to launch layers, if they come out alike."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.worker.models import launch_ways, linear
from octavo.worker.models.gpu_decoder import FusedAttention, GpuDecoder
from octavo.worker.models.single_row import SingleRow
from octavo.worker.models.weights import load_decoder
from support.tiny_models import save_tiny_model


@pytest.mark.parametrize(
    ("times", "is_taken"), [({"usual": 4.0, "fused": 3.8}, True), ({"usual": 4.0, "fused": 3.99}, False)]
)
def test_the_clock_chooses_how_one_row_is_run(
    times: dict[str, float],
    is_taken: bool,
    device: str,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "can_pack", lambda dtype, device: False)
    monkeypatch.setattr(launch_ways, "can_overlap", lambda: False)
    clock = iter(times.values())
    monkeypatch.setattr(launch_ways, "graph_ms", lambda launch: next(clock))
    folder = save_tiny_model("llama", tmp_path_factory.mktemp("llama")).folder
    model = GpuDecoder(load_decoder(folder, torch.float16, torch.device(device)))

    assert launch_ways.choose_single_row(model) == times
    assert (model.single_row is not None) == is_taken


def test_a_way_that_comes_out_wrong_is_not_taken(
    device: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "can_pack", lambda dtype, device: False)
    monkeypatch.setattr(launch_ways, "can_overlap", lambda: False)
    monkeypatch.setattr(launch_ways, "graph_ms", lambda launch: 1.0)
    monkeypatch.setattr(SingleRow, "forward", lambda self, token_ids, attention: torch.randn(1, 48, device=device))
    folder = save_tiny_model("llama", tmp_path_factory.mktemp("llama")).folder
    model = GpuDecoder(load_decoder(folder, torch.float16, torch.device(device)))

    assert launch_ways.choose_single_row(model) == {"usual": 1.0}
    assert model.single_row is None


@pytest.mark.parametrize(
    ("times", "is_taken"), [({"usual": 4.0, "overlapping": 3.8}, True), ({"usual": 4.0, "overlapping": 4.1}, False)]
)
def test_the_clock_chooses_whether_several_rows_overlap(
    times: dict[str, float],
    is_taken: bool,
    device: str,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "can_pack", lambda dtype, device: False)
    monkeypatch.setattr(launch_ways, "can_overlap", lambda: True)
    clock = iter(times.values())
    monkeypatch.setattr(launch_ways, "graph_ms", lambda launch: next(clock))
    folder = save_tiny_model("llama", tmp_path_factory.mktemp("llama")).folder
    model = GpuDecoder(load_decoder(folder, torch.float32, torch.device(device)))
    seen: list[bool] = []

    def forward(token_ids: Tensor, attention: FusedAttention) -> Tensor:
        seen.append(model.overlaps)
        return torch.ones(len(token_ids), 48)

    monkeypatch.setattr(model, "forward", forward)

    assert launch_ways.choose_overlap(model) == times
    assert seen[-2:] == [False, True]
    assert model.overlaps is is_taken
