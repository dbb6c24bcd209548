"""The metrics that the services export, as the tables of docs/operations.md list them, and what queries ask for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

OPERATIONS = Path(__file__).parents[2] / "docs/operations.md"

_ROW = re.compile(r"^\| `(octavo_\w+)` \| (\w+) \| ([^|]*) \|", re.MULTILINE)
_ASKED = re.compile(r"(octavo_\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_BY = re.compile(r"\bby\s*\(([^)]*)\)")

_FROM_SCRAPING = {"job", "instance", "namespace", "pod"}
"""Labels that Prometheus adds to each series."""


@dataclass(frozen=True)
class ExportedMetric:
    """A metric and its labels."""

    kind: str
    labels: frozenset[str]


def exported_metrics() -> dict[str, ExportedMetric]:
    """Name |-> metric, with the three series of each histogram under their own names."""
    found: dict[str, ExportedMetric] = {}
    for name, kind, labels in _ROW.findall(OPERATIONS.read_text(encoding="utf-8")):
        own = frozenset(re.findall(r"`(\w+)`", labels))
        if kind == "histogram":
            found[f"{name}_bucket"] = ExportedMetric(kind, own | {"le"})
            found |= {f"{name}_{part}": ExportedMetric(kind, own) for part in ("sum", "count")}
        else:
            found[name] = ExportedMetric(kind, own)
    return found


def problems_of_query(query: str, metrics: dict[str, ExportedMetric]) -> list[str]:
    """What a PromQL query asks for that nobody exports: metrics, and labels that none of its metrics has."""
    problems, labels = [], set(_FROM_SCRAPING)
    asked = _ASKED.findall(query)
    for name, matchers in asked:
        if name not in metrics:
            problems.append(f"no service exports {name}")
            continue
        labels |= metrics[name].labels
        unknown = set(_MATCHER.findall(matchers)) - metrics[name].labels - _FROM_SCRAPING
        problems += [f"{name} has no label {label}" for label in sorted(unknown)]
    if asked and not problems:
        grouped = {label.strip() for group in _BY.findall(query) for label in group.split(",")}
        problems += [f"nothing in {query!r} has the label {label}" for label in sorted(grouped - labels)]
    return problems
