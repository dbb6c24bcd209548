"""Compiles kernels in Gluon for Hopper, without a GPU, in a process of its own: the tests' has Triton interpret.

Arguments: prefill or prefix, block size, group, type; or product, rows, and which of adds, gated and plain.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl


def compile_for_hopper(*arguments: str) -> tuple[int, str]:
    """Bytes of shared memory, and the PTX."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    shared_bytes, _, ptx = done.stdout.partition("\n")
    return int(shared_bytes), ptx


def _print_compiled(kernel: Any, constants: dict[str, object], types: dict[str, str]) -> None:
    from triton.experimental.gluon._runtime import GluonASTSource

    types = dict.fromkeys(constants, "constexpr") | types
    signature = {name: types.get(name, "*i32" if name.endswith("_ptr") else "i32") for name in kernel.arg_names}
    source = GluonASTSource(kernel, signature, constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    print(compiled.metadata.shared)
    print(compiled.asm["ptx"])


def _descriptor(dtype: str, lines: int) -> str:
    return f"tensordesc<{dtype}[{lines}, 64],{gl.NVMMASharedLayout(128, 16, 2)!r}>"


def _compile_attention(kernel: str, block_size: int, group: int, dtype: str) -> None:
    from octavo.worker.kernels.hopper_prefill import _hopper_prefill_kernel
    from octavo.worker.kernels.hopper_prefix import _hopper_prefix_kernel

    constants = {"NUM_HEADS": 8 * group, "GROUP": group, "BLOCK_SIZE": block_size}
    types = {"pool": _descriptor(dtype, block_size), "scale": "fp32"}
    types |= dict.fromkeys(("query_ptr", "out_ptr"), f"*{dtype}")
    types |= dict.fromkeys(("partial_ptr", "largest_ptr", "total_ptr"), "*fp32")
    _print_compiled({"prefill": _hopper_prefill_kernel, "prefix": _hopper_prefix_kernel}[kernel], constants, types)


def _compile_product(rows: int, kind: str) -> None:
    from octavo.worker.kernels.few_row_products import count_stages
    from octavo.worker.kernels.hopper_product import hopper_product_kernel

    constants = {
        "ROWS": rows,
        "STAGES": count_stages(rows, kind == "gated"),
        "SPLITS": 1 if kind == "gated" else 4,
        "NUM_SQUARES": 64,
        "IS_GATED": kind == "gated",
        "ADDS": kind == "adds",
        "HAS_BIAS": kind == "plain",
        "OVERLAPS": True,
    }
    types = {
        "weight": _descriptor("bf16", 64),
        "x": _descriptor("bf16", rows),
        "partials_ptr": "*fp32",
        "squares_ptr": "*fp32",
        "eps": "fp32",
    } | dict.fromkeys(("out_ptr", "norm_ptr", "normed_ptr", "bias_ptr"), "*bf16")
    _print_compiled(hopper_product_kernel, constants, types)


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "product":
        _compile_product(int(rest[0]), rest[1])
    else:
        _compile_attention(what, int(rest[0]), int(rest[1]), rest[2])
