"""Compiles a kernel for Hopper, without a GPU, and prints its PTX.

Arguments: prefill or prefix, block size, group, type.
"""

from __future__ import annotations

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from octavo.worker.kernels.hopper_prefill import _hopper_prefill_kernel
from octavo.worker.kernels.hopper_prefix import _hopper_prefix_kernel

KERNELS = {"prefill": _hopper_prefill_kernel, "prefix": _hopper_prefix_kernel}
STATE = ("partial_ptr", "largest_ptr", "total_ptr")


def main(kernel: str, block_size: int, group: int, dtype: str) -> None:
    constants = {"NUM_HEADS": 8 * group, "GROUP": group, "BLOCK_SIZE": block_size}
    layout = gl.NVMMASharedLayout(128, 16, 2)
    types = dict.fromkeys(constants, "constexpr") | {
        "pool": f"tensordesc<{dtype}[{block_size}, 64],{layout!r}>",
        "query_ptr": f"*{dtype}",
        "out_ptr": f"*{dtype}",
        "scale": "fp32",
    }
    types |= dict.fromkeys(STATE, "*fp32")
    names = KERNELS[kernel].arg_names
    signature = {name: types.get(name, "*i32" if name.endswith("_ptr") else "i32") for name in names}
    source = GluonASTSource(KERNELS[kernel], signature, constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    print(compiled.metadata.shared)
    print(compiled.asm["ptx"])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
