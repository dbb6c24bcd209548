"""Joins the metrics of all schedulers to the gateway's, and tells them apart by pool."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.gateway import metrics


def with_schedulers(own: bytes, schedulers: Mapping[str, bytes]) -> bytes:
    """An exposition, and those of the schedulers by pool."""
    if len(schedulers) == 1:
        return metrics.merged(own, *schedulers.values())
    return metrics.merged(own, by_pool(schedulers))


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
