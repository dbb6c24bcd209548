"""Programmatic dependent launch: a kernel starts while the one before it ends, and waits where it needs its results."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl


@functools.cache
def can_overlap() -> bool:
    """The GPU has it: Hopper and later."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


def launch_options(overlaps: bool) -> dict[str, bool]:
    """What a kernel's launch is given so that it overlaps."""
    return {"launch_pdl": True} if overlaps else {}


@triton.jit
def begin_after_previous(OVERLAPS: tl.constexpr):
    """To be called before the first load of what earlier kernels wrote and before the first store.

    Returns once the kernel before this one has ended, with all before it, and lets the next one start. Every program
    of a kernel that is launched with `launch_pdl` has to call it: then the end of one means the end of all before.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
