"""What is said when a GPU has not even the memory to load and measure a model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from octavo.worker.models.errors import ModelLoadError

GIB = 2**30

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def shortage(free: int, total: int, own: int) -> ModelLoadError:
    """Bytes of the GPU: free, in all, taken by this process."""
    others = max(0, total - free - own)
    return ModelLoadError(
        f"the GPU ran out of memory while the model was loaded: of {total / GIB:.1f} GiB this worker has "
        f"{own / GIB:.1f}, other processes and the driver {others / GIB:.1f}. End other processes, use a smaller "
        "model or dtype, or lower max_num_batched_tokens or max_num_seqs"
    )


def names_shortage(load: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """A load whose want of memory is a ModelLoadError."""

    @functools.wraps(load)
    def wrapped(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return load(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info()
            raise shortage(free, total, torch.cuda.memory_reserved()) from error

    return wrapped
