"""Prometheus and Grafana ask for metrics that exist, at addresses where they are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from support.exported_metrics import exported_metrics, problems_of_query

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy/monitoring"
DASHBOARD: dict[str, Any] = json.loads((MONITORING / "grafana/dashboards/octavo.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ALERTS = [
    rule
    for group in yaml.safe_load((MONITORING / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
METRICS = exported_metrics()

_NEARER = "the gateways count the same nearer to clients"
_OWNED = "the KV manager, whose it is, counts the same"
UNSEEN = {
    "octavo_scheduler_requests_total": _NEARER,
    "octavo_scheduler_resumed_requests_total": _NEARER,
    "octavo_scheduler_prompt_tokens_total": _NEARER,
    "octavo_scheduler_output_tokens_total": _NEARER,
    "octavo_scheduler_kv_blocks": _OWNED,
    "octavo_scheduler_cached_prompt_tokens_total": _OWNED,
    "octavo_scheduler_host_prompt_tokens_total": _OWNED,
    "octavo_transferred_blocks_total": _OWNED,
    "octavo_prefix_lookup_blocks_total": "shown in tokens",
    "octavo_prefix_hit_blocks_total": "shown in tokens",
    "octavo_stalls_total": "shown in seconds",
    "octavo_time_per_output_token_seconds": "shown token by token",
    "octavo_request_prompt_tokens": "what clients ask for, not how it goes",
    "octavo_request_output_tokens": "what clients ask for, not how it goes",
    "octavo_flushed_blocks_total": "moves when somebody flushes",
    "octavo_foreseen_cached_tokens_total": "for a look at routing, beside octavo_prefix_hit_tokens_total",
}
"""What is neither on the dashboard nor in an alert, and why."""


def test_the_tables_of_metrics_are_read() -> None:
    assert METRICS["octavo_kv_blocks"].labels == {"pool", "state"}
    assert METRICS["octavo_ttft_seconds_bucket"].labels == {"le"}
    assert len(METRICS) > 50


def test_the_table_of_vllms_names_names_metrics_that_exist() -> None:
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`vllm:.*?) \| (.*) \|$", page, re.MULTILINE)
    named = {name for _, ours in rows for name in re.findall(r"octavo_\w+", ours)}
    assert len(rows) >= 15
    assert named <= METRICS.keys() | {name.removesuffix("_bucket") for name in METRICS}


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("sum(rate(octavo_request_total[1m]))", "no service exports octavo_request_total"),
        ("histogram_quantile(0.9, octavo_ttft_seconds)", "no service exports octavo_ttft_seconds"),
        ('octavo_queue_sequences{que="waiting"}', "octavo_queue_sequences has no label que"),
        ("sum by (status) (octavo_queue_sequences)", "has the label status"),
    ],
)
def test_a_query_for_what_nobody_exports_is_seen(query: str, problem: str) -> None:
    assert problem in "; ".join(problems_of_query(query, METRICS))


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_panel_asks_for_what_is_exported(panel: dict[str, Any]) -> None:
    assert panel["targets"]
    for target in panel["targets"]:
        assert "octavo_" in target["expr"]
        assert problems_of_query(target["expr"], METRICS) == []


def test_every_metric_is_on_the_dashboard_or_in_an_alert_or_there_is_a_reason() -> None:
    queries = [target["expr"] for panel in PANELS for target in panel["targets"]] + [rule["expr"] for rule in ALERTS]
    asked = set(re.findall(r"octavo_\w+", "\n".join(queries)))
    families = {name: re.sub(r"_(bucket|sum|count)$", "", name) for name in METRICS}
    shown = {family for name, family in families.items() if name in asked}
    assert set(families.values()) - shown == set(UNSEEN)


def lost(given: Any, kept: Any, path: str = "") -> list[str]:
    """Where one document has what the other has not, or not so."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [place for key in given for place in lost(given[key], kept.get(key), f"{path}.{key}")]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [place for i, (one, other) in enumerate(zip(given, kept, strict=True))
                for place in lost(one, other, f"{path}.{i}")]  # fmt: skip
    return [] if given == kept else [path]


@pytest.mark.parametrize(("field", "places"), [("unit", []), ("unlit", [".panels.1.fieldConfig.defaults.unlit"])])
def test_grafanas_own_types_know_every_field_of_the_dashboard(field: str, places: list[str]) -> None:
    register_default_plugins()
    dashboard = json.loads(json.dumps(DASHBOARD))
    dashboard["panels"][1]["fieldConfig"]["defaults"][field] = "reqps"
    kept = json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))
    assert lost(dashboard, kept) == places


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells, panel["title"]
        assert place["x"] + place["w"] <= 24
        cells |= own


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_every_alert_asks_for_what_is_exported_and_is_explained(alert: dict[str, Any]) -> None:
    assert problems_of_query(alert["expr"], METRICS) == []
    assert alert["annotations"]["summary"]
    assert f"`{alert['alert']}`" in (ROOT / "docs/operations.md").read_text(encoding="utf-8")


def test_every_alert_is_made_to_fire() -> None:
    """promtool runs the file, in the drill."""
    text = (MONITORING / "alerts_test.yml").read_text(encoding="utf-8")
    assert re.findall(r'alertname="(\w+)"', text) == [alert["alert"] for alert in ALERTS]


def test_prometheus_scrapes_each_service_of_the_compose_file_where_it_listens() -> None:
    scraped = yaml.safe_load((MONITORING / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    groups = yaml.safe_load((ROOT / "deploy/compose.groups.yml").read_text(encoding="utf-8"))["services"]
    assert {job["job_name"] for job in scraped} == {"gateway", "scheduler", "kvmanager", "worker"}
    for job in scraped:
        name = job["job_name"]
        listens = services[name]["environment"][f"OCTAVO_{name.upper()}_METRICS_LISTEN"]
        named = {service for service in {**services, **groups} if service.startswith(name)}
        asked = [(tuple(discovery["names"]), discovery["port"]) for discovery in job["dns_sd_configs"]]
        assert sorted(asked) == [((one,), int(listens.rpartition(":")[2])) for one in sorted(named)]
        assert set(services[name]["networks"]) & set(services["prometheus"]["networks"])


def test_the_dashboard_uses_the_provisioned_data_source_and_lies_where_grafana_looks() -> None:
    provisioning = MONITORING / "grafana/provisioning"
    source = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text(encoding="utf-8"))["datasources"][0]
    provider = yaml.safe_load((provisioning / "dashboards/octavo.yml").read_text(encoding="utf-8"))["providers"][0]
    grafana = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]["grafana"]
    mounts = dict(volume.split(":")[:2] for volume in grafana["volumes"])
    assert {panel["datasource"]["uid"] for panel in PANELS} == {source["uid"]}
    assert mounts["./deploy/monitoring/grafana/dashboards"] == provider["options"]["path"]
    assert mounts["./deploy/monitoring/grafana/provisioning"] == "/etc/grafana/provisioning"
    assert source["url"] == "http://prometheus:9090"
