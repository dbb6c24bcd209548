"""The device that the settings name, and what is said if it is not there."""

from __future__ import annotations

import pytest
import torch

from octavo.worker.loading import chosen_device
from octavo.worker.models.errors import ModelLoadError


def test_a_device_that_is_there_is_taken() -> None:
    assert chosen_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "said"), [("cuda:99", r"'cuda:99': torch .*, built .*CUDA.*, finds \d+ GPUs here"), ("gpu", "'gpu'")]
)
def test_a_device_that_is_not_there_is_refused_by_name(name: str, said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        chosen_device(name)
