"""Runs a program that gets SIGTERM when its parent dies: `python die_with_parent.py PARENT_PID PROGRAM ARGUMENT...`.

A program of its own, because asking the kernel for this between fork and exec would run Python there, which the threads
of a gRPC channel in the parent make unsafe. Imports nothing of Octavo's, to start in 20 ms.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before we asked
            sys.exit(1)
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
