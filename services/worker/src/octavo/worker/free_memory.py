"""How much host memory is left for this process."""

from __future__ import annotations

from pathlib import Path

UNKNOWN_BYTES = 4 * 2**30
"""Assumed where neither the kernel nor a cgroup says."""


def free_host_bytes() -> int:
    """Memory that this process could still take: the machine's, or what its cgroup has left."""
    free = [_meminfo_available(), _cgroup_left()]
    return min((found for found in free if found is not None), default=UNKNOWN_BYTES)


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None


def _cgroup_left() -> int | None:
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text(encoding="ascii").strip()
        used = (root / "memory.current").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - int(used))
