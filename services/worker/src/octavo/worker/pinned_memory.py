"""Host memory that a GPU copies to and from by itself."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from octavo.worker.models.errors import ModelLoadError


def pinned_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A page-locked tensor of just this size, zero; torch's own allocator rounds up to a power of two.

    The memory is unlocked when the tensor is freed. Raises ModelLoadError, which names the setting, if the system
    locks no more.
    """
    tensor = torch.empty(shape, dtype=dtype)
    num_bytes = tensor.numel() * tensor.element_size()
    if not num_bytes:
        return tensor
    tensor.view(torch.uint8).zero_()  # by all threads: locking would fault page by page on one
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = tensor.data_ptr()
    status = runtime.cudaHostRegister(address, num_bytes, 0)
    if int(status) != 0:
        raise ModelLoadError(
            f"cannot lock {num_bytes / 2**30:.1f} GiB of host memory for swapped blocks (CUDA error {int(status)}): "
            "set host_cache_bytes lower, or to 0 for none"
        )
    weakref.finalize(tensor, runtime.cudaHostUnregister, address)
    return tensor
