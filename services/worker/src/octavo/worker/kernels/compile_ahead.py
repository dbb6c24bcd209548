"""Kernels compiled before their first launch, many at once; one after the other they take half a minute."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from typing import Any

import structlog
import torch
from triton import AsyncCompileMode, FutureKernel
from triton.runtime.jit import JITFunction

log = structlog.get_logger()

MAX_THREADS = 16
"""More gain little: some fifty kernels are missing at most."""


@contextmanager
def compiling_ahead(progress: Callable[[float], None] = lambda share: None) -> Iterator[None]:
    """Within it kernels are not launched: threads compile those that are not compiled yet.

    So nothing that they would compute is there, and what torch computes of it means nothing. At the end all are
    compiled and loaded. One that cannot be is left to its next launch, which says why. `progress` is told the share
    that is done while the end waits. For one thread; no other may launch meanwhile.
    """
    if not torch.cuda.is_available():
        yield
        return
    run = JITFunction.run

    def compile_only(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled = run(kernel, *args, grid=grid, warmup=True, **options)
        if isinstance(compiled, FutureKernel) and compiled.future.done():
            compiled.result(ignore_errors=True)  # so that it is found at once from now on

    with (
        ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "compile") as threads,
        AsyncCompileMode(threads, ignore_errors=True) as mode,
    ):
        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = run
        for num_done, future in enumerate(as_completed(mode.raw_futures), 1):
            if error := future.exception():
                log.warning("a kernel was not compiled ahead", error=repr(error))
            progress(num_done / len(mode.raw_futures))
    for compiled in mode.future_kernels.values():
        if compiled.kernel is not None:
            with suppress(Exception):  # its next launch raises it again
                compiled.kernel.run  # noqa: B018  (loads it)
