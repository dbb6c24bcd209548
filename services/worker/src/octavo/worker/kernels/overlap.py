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
def let_next_begin(OVERLAPS: tl.constexpr):
    """The next kernel may start once every program has called this or ended."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr):
    """To be called before the first load of what the kernel before wrote and before the first store.

    Returns once that kernel has ended, with all before it. Some program of every kernel that is launched with
    `launch_pdl` has to call it: then the end of one means the end of all before.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def begin_after_previous(OVERLAPS: tl.constexpr):
    """`wait_for_previous`, then `let_next_begin`."""
    wait_for_previous(OVERLAPS)
    let_next_begin(OVERLAPS)
