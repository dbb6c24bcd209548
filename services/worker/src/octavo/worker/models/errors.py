"""Why a model folder cannot be served.

ModelLoadError
├── UnknownArchitectureError   no decoder here computes this architecture, or one of its settings
├── UnknownQuantizationError   the checkpoint is quantized in a way that is not computed here
├── MissingTensorError         the decoder needs tensors that the checkpoint lacks
├── UnexpectedTensorError      the checkpoint has tensors that the decoder would leave unused
└── TensorShapeError           a tensor's shape contradicts config.json
"""

from __future__ import annotations

from collections.abc import Iterable

MAX_NAMES_SHOWN = 5


class ModelLoadError(Exception):
    """The folder is not a model that the worker can run. The text is for people."""


class UnknownArchitectureError(ModelLoadError):
    pass


class UnknownQuantizationError(ModelLoadError):
    pass


class MissingTensorError(ModelLoadError):
    pass


class UnexpectedTensorError(ModelLoadError):
    pass


class TensorShapeError(ModelLoadError):
    pass


def name_some(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:MAX_NAMES_SHOWN])
    return shown if len(ordered) <= MAX_NAMES_SHOWN else f"{shown} and {len(ordered) - MAX_NAMES_SHOWN} more"
