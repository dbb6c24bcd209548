"""Kernels compiled before their first launch, many at once; one after the other they take half a minute."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

import structlog
import torch
from triton import knobs
from triton.runtime.jit import JITFunction

log = structlog.get_logger()

Progress = Callable[[float], None]


@contextmanager
def compiling_ahead(progress: Progress = lambda share: None) -> Iterator[None]:
    """Within it, a kernel that is not compiled yet is not launched: threads compile it meanwhile.

    So nothing that launches leave there means anything. At the end all are compiled and loaded. One that cannot be is
    left to its next launch, which says why. `progress` is told the share that is done while the end waits. For the
    thread that enters it; no other may launch meanwhile.
    """
    if not torch.cuda.is_available():
        yield
        return
    launching, device = threading.get_ident(), torch.cuda.current_device()
    compiled: dict[tuple[int, str], Future[Any]] = {}
    with ThreadPoolExecutor(os.cpu_count(), "compile", torch.cuda.set_device, (device,)) as threads:

        def hand_over(*, key: str, fn: Any, compile: dict[str, Any], **_: object) -> bool:
            """Of Triton's: a kernel is missing. Returns whether to do without it."""
            if threading.get_ident() != launching:
                return False
            kernel: JITFunction[Any] = fn.jit_function
            if (id(kernel), key) not in compiled:
                compiled[id(kernel), key] = threads.submit(kernel.preload, compile["specialization_data"])
            return True

        before = knobs.runtime.jit_cache_hook
        knobs.runtime.jit_cache_hook = hand_over
        try:
            yield
        finally:
            knobs.runtime.jit_cache_hook = before
        for num_done, kernel in enumerate(as_completed(compiled.values()), 1):
            try:
                kernel.result().run  # noqa: B018  (loads it)
            except Exception as error:
                log.warning("a kernel was not compiled ahead", error=repr(error))
            progress(num_done / len(compiled))
