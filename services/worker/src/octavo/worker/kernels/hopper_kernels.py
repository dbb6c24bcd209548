"""Kernels that are written in Gluon for Hopper, where there is one and Triton has Gluon as they know it."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import structlog
import torch
import triton

log = structlog.get_logger()


@functools.cache
def hopper_kernels(name: str) -> ModuleType | None:
    """The module of this package called `name`, or None; whoever asks has another way to compute the same."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return None
    try:
        return importlib.import_module(f"octavo.worker.kernels.{name}")
    except (ImportError, AttributeError) as error:  # Gluon is an experimental part of Triton, and changes
        log.warning("without Gluon", kernels=name, triton=triton.__version__, error=repr(error))
        return None
