"""Compiles the prefill kernel for Hopper, without a GPU, and prints its PTX. Arguments: block size, group, type."""

from __future__ import annotations

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from octavo.worker.kernels.hopper_prefill import _hopper_prefill_kernel


def main(block_size: int, group: int, dtype: str) -> None:
    constants = {"NUM_HEADS": 8 * group, "GROUP": group, "BLOCK_SIZE": block_size}
    layout = gl.NVMMASharedLayout(128, 16, 2)
    types = dict.fromkeys(constants, "constexpr") | {
        "pool": f"tensordesc<{dtype}[{block_size}, 64],{layout!r}>",
        "query_ptr": f"*{dtype}",
        "out_ptr": f"*{dtype}",
        "scale": "fp32",
    }
    names = _hopper_prefill_kernel.arg_names
    signature = {name: types.get(name, "*i32" if name.endswith("_ptr") else "i32") for name in names}
    source = GluonASTSource(_hopper_prefill_kernel, signature, constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    print(compiled.metadata.shared)
    print(compiled.asm["ptx"])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
