"""Reads the metrics of all schedulers, and tells them apart by pool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from octavo.common.links import TlsFiles
from octavo.gateway import metrics
from octavo.gateway.scheduler_admin import SchedulerAdmin


class GroupMetrics:
    """One channel to each scheduler's admin service, opened on first use."""

    def __init__(self, targets: Callable[[], Mapping[str, str]], tls: TlsFiles | None = None) -> None:
        """`targets`: pool |-> gRPC target, as of now."""
        self._targets, self._tls = targets, tls
        self._admins: dict[str, SchedulerAdmin] = {}

    async def with_schedulers(self, own: bytes) -> bytes:
        """An exposition, and those of the schedulers that answer in time."""
        targets = self._targets()
        for target in self._admins.keys() - set(targets.values()):
            await self._admins.pop(target).close()
        for target in targets.values():
            if target not in self._admins:
                self._admins[target] = SchedulerAdmin(target, self._tls)
        told = await asyncio.gather(*(self._admins[target].metrics() for target in targets.values()))
        if len(told) == 1:
            return metrics.merged(own, told[0])
        return metrics.merged(own, by_pool(dict(zip(targets, told, strict=True))))

    async def close(self) -> None:
        for admin in self._admins.values():
            await admin.close()


def by_pool(expositions: Mapping[str, bytes]) -> bytes:
    """One exposition of several: every sample gets the label `pool`, every family stands once."""
    families: dict[bytes, list[bytes]] = {}
    for pool_id, exposition in expositions.items():
        label = b'pool="' + pool_id.replace("\\", r"\\").replace('"', r"\"").encode() + b'"'
        family: list[bytes] = []
        is_new = False
        for line in exposition.splitlines():
            if line.startswith(b"# HELP "):
                name = line.split(b" ", 3)[2]
                is_new = name not in families
                family = families.setdefault(name, [])
            if line.startswith(b"#"):
                if is_new:
                    family.append(line)
            elif line:
                family.append(_labelled(line, label))
    return b"".join(line + b"\n" for family in families.values() for line in family)


def _labelled(sample: bytes, label: bytes) -> bytes:
    name, brace, rest = sample.partition(b"{")
    if brace and b" " not in name:
        return name + b"{" + label + b"," + rest
    name, _, value = sample.partition(b" ")
    return name + b"{" + label + b"} " + value
