"""Who computes the model of a folder: our decoder, or transformers with our attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import torch

from octavo.worker.models.causal_lm import CausalLm
from octavo.worker.models.config import read_model_config
from octavo.worker.models.dummy import make_dummy_decoder
from octavo.worker.models.errors import UnknownArchitectureError
from octavo.worker.models.weights import Progress, load_decoder


class ModelFolder(ABC):
    """A model whose configuration is read and served by someone, its weights not loaded yet."""

    dtype: str
    """Of the checkpoint, a name of torch."""
    max_position_embeddings: int

    @abstractmethod
    def load(
        self,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress = lambda share: None,
        *,
        is_dummy: bool = False,
        quantize: bool = False,
    ) -> CausalLm:
        """The model with its weights, or random ones if `is_dummy`, rounded to e4m3 if `quantize`.

        Raises ModelLoadError.
        """


class DecoderFolder(ModelFolder):
    """A model of the families that our decoder computes."""

    def __init__(self, folder: Path, max_model_len: int | None) -> None:
        """Raises ModelLoadError, and UnknownArchitectureError if the model is of no such family."""
        config = read_model_config(folder, max_model_len)
        self.dtype, self.max_position_embeddings = config.dtype, config.max_position_embeddings
        self._folder, self._max_model_len = folder, max_model_len

    def load(
        self,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress = lambda share: None,
        *,
        is_dummy: bool = False,
        quantize: bool = False,
    ) -> CausalLm:
        """See ModelFolder."""
        load = make_dummy_decoder if is_dummy else load_decoder
        return load(self._folder, dtype, device, progress, self._max_model_len, quantize)


def open_model(folder: Path, max_model_len: int | None) -> ModelFolder:
    """Read the configuration. `max_model_len` is the longest sequence that will be served; None: what it allows.

    Raises ModelLoadError, and UnknownArchitectureError if nobody computes the model.
    """
    try:
        return DecoderFolder(folder, max_model_len)
    except UnknownArchitectureError as unknown:
        try:
            from octavo.worker.models.transformers_loading import TransformersFolder  # seconds, and not always there
        except ImportError as error:
            raise UnknownArchitectureError(f"{unknown}; others need transformers, which is not installed") from error
        try:
            return TransformersFolder(folder, max_model_len)
        except UnknownArchitectureError as error:
            raise UnknownArchitectureError(f"{unknown}; by transformers: {error}") from error
