"""Tiny models, made once for all tests of the worker."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from support.tiny_models import TinyModel, save_tiny_model

torch.set_num_threads(1)

MakeTiny = Callable[[str], TinyModel]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> MakeTiny:
    """`tiny(name)` is the model of that name, see support/tiny_models.py."""
    made: dict[str, TinyModel] = {}

    def make(name: str) -> TinyModel:
        if name not in made:
            made[name] = save_tiny_model(name, tmp_path_factory.mktemp(name))
        return made[name]

    return make
