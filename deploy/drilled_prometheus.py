"""The Prometheus of a drill, asked over its API: what it scrapes, its alerts, and what the dashboard asks it."""

from __future__ import annotations

import json
import re
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).with_name("monitoring") / "grafana/dashboards/octavo.json"
OPERATIONS = Path(__file__).parents[1] / "docs/operations.md"


class Prometheus:
    def __init__(self, port: int) -> None:
        """`port`: of this machine."""
        self._address = f"http://127.0.0.1:{port}/api/v1"

    def _get(self, path: str, **parameters: str) -> Any:
        """Raises OSError if it does not answer, or does not take a query."""
        address = f"{self._address}/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(address, timeout=10) as answer:
            return json.load(answer)["data"]

    def scraped_jobs(self) -> list[str]:
        """The job of each replica that is up."""
        result = self._get("query", query="up")["result"]
        return sorted(series["metric"]["job"] for series in result if series["value"][1] == "1")

    def all_alerts_evaluate(self) -> bool:
        rules = [rule for group in self._get("rules")["groups"] for rule in group["rules"]]
        return bool(rules) and all(rule["health"] == "ok" for rule in rules)

    def undocumented_metrics(self) -> list[str]:
        """Those of the services that have no row in docs/operations.md."""
        rows = set(re.findall(r"^\| `(octavo_\w+)` \|", OPERATIONS.read_text(encoding="utf-8"), re.MULTILINE))
        names = [name for name in self._get("label/__name__/values") if name.startswith("octavo_")]
        names = [re.sub(r"_(bucket|sum|count)$", "", name) for name in names if not name.endswith("_created")]
        return sorted(set(names) - rows)

    def silent_panels(self) -> list[str]:
        """Panels of the dashboard none of whose queries finds a number. Raises OSError if one is refused."""
        panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
        queries = {panel["title"]: [one["expr"] for one in panel["targets"]] for panel in panels if "targets" in panel}
        return [title for title, asked in queries.items() if not any(map(self._finds_a_number, asked))]

    def _finds_a_number(self, query: str) -> bool:
        result = self._get("query", query=query.replace("$__rate_interval", "1m"))["result"]
        return any(series["value"][1] != "NaN" for series in result)
