"""The Prometheus of a drill, asked over its API: what it scrapes, its alerts, and what the dashboard asks it."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).with_name("monitoring") / "grafana/dashboards/octavo.json"


class Prometheus:
    def __init__(self, port: int) -> None:
        """`port`: of this machine."""
        self._address = f"http://127.0.0.1:{port}/api/v1"

    def _get(self, path: str, **parameters: str) -> dict[str, Any]:
        """Raises OSError if it does not answer, or does not take a query."""
        address = f"{self._address}/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(address, timeout=10) as answer:
            data: dict[str, Any] = json.load(answer)["data"]
            return data

    def scraped_jobs(self) -> list[str]:
        """The job of each replica that is up."""
        result = self._get("query", query="up")["result"]
        return sorted(series["metric"]["job"] for series in result if series["value"][1] == "1")

    def all_alerts_evaluate(self) -> bool:
        rules = [rule for group in self._get("rules")["groups"] for rule in group["rules"]]
        return bool(rules) and all(rule["health"] == "ok" for rule in rules)

    def dashboard_share(self) -> float:
        """Of the dashboard's queries, those that find something. Raises OSError if one is refused."""
        panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
        queries = [target["expr"] for panel in panels for target in panel.get("targets", [])]
        asked = [self._get("query", query=query.replace("$__rate_interval", "1m")) for query in queries]
        return sum(bool(one["result"]) for one in asked) / len(queries)
