"""docker-compose.yml names what exists: settings, addresses, files, and services that are healthy in time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from octavo.common.links import Address
from support.service_settings import CONFIGS, settings_in

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OWN = {
    "gateway": "gateway",
    "scheduler": "scheduler",
    "kvmanager": "kvmanager",
    "worker": "worker",
    "worker-gpu": "worker",
}

ONE_SHOT = ("model", "octavo")
"""They run once, and end."""

_VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


def with_defaults(value: object) -> str:
    return _VARIABLE.sub(lambda found: found[2], str(value))


def settings_of(name: str) -> dict[str, str]:
    environment = {key: with_defaults(value) for key, value in SERVICES[name]["environment"].items()}
    return settings_in(environment, OWN[name])[0]


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


@pytest.mark.parametrize("name", OWN)
def test_every_setting_exists_and_has_a_value_that_the_service_takes(name: str) -> None:
    environment = {key: with_defaults(value) for key, value in SERVICES[name]["environment"].items()}
    settings, unknown = settings_in(environment, OWN[name])
    assert unknown == []
    CONFIGS[OWN[name]](**settings)


@pytest.mark.parametrize("name", OWN)
def test_every_service_is_in_the_registry_and_knows_soon_who_is_gone(name: str) -> None:
    settings = settings_of(name)
    assert settings["registry"] == "redis://redis:6379/0"
    assert float(settings["registry_ttl_s"]) == 3
    assert {"cluster"} <= set(SERVICES[name]["networks"])
    assert "redis" in all_that_must_be_up(name)


def all_that_must_be_up(name: str) -> set[str]:
    waited_for = set(SERVICES[name].get("depends_on", {}))
    return waited_for.union(*(all_that_must_be_up(other) for other in waited_for))


@pytest.mark.parametrize("service", ["scheduler", "kvmanager"])
def test_the_gateway_can_ask_what_it_finds_in_the_registry(service: str) -> None:
    assert any(address.startswith("grpc://0.0.0.0:") for address in settings_of(service)["listen"].split(","))


def test_scheduler_and_kv_manager_share_the_volume_of_the_socket() -> None:
    socket = Address.parse(settings_of("kvmanager")["listen"].split(",")[0])
    assert socket.scheme == "frames"
    for name in ("scheduler", "kvmanager"):
        assert any(socket.target.startswith(volume.split(":")[1] + "/") for volume in SERVICES[name]["volumes"])


def test_leases_and_limits_are_never_evicted_and_stored_responses_are() -> None:
    policies = {name: SERVICES[name]["command"][-1] for name in ("redis", "responses")}
    assert policies == {"redis": "noeviction", "responses": "allkeys-lru"}
    gateway = settings_of("gateway")
    assert gateway["limits_redis"] == gateway["registry"] == "redis://redis:6379/0"
    assert gateway["response_store_redis"] == "redis://responses:6379/0"


@pytest.mark.parametrize("name", [name for name in SERVICES if name not in ONE_SHOT])
def test_every_service_restarts_is_checked_and_has_limits(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"][0] == "CMD"
    assert {"memory", "pids"} <= set(service["deploy"]["resources"]["limits"])


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_confined(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service


@pytest.mark.parametrize("name", SERVICES)
def test_whoever_waits_for_health_waits_for_a_service_that_tells_it(name: str) -> None:
    for other, how in SERVICES[name].get("depends_on", {}).items():
        expected = "service_completed_successfully" if other == "model" else "service_healthy"
        assert how["condition"] == expected
        assert "healthcheck" in SERVICES[other] or other == "model"


@pytest.mark.parametrize("name", OWN)
def test_a_stop_gives_more_time_than_the_drain_takes(name: str) -> None:
    assert seconds(SERVICES[name]["stop_grace_period"]) >= float(settings_of(name)["drain_grace_s"]) + 5


def test_the_front_waits_for_as_long_as_a_request_may_wait() -> None:
    front = (ROOT / "deploy/compose/haproxy.cfg").read_text(encoding="utf-8")
    timeouts = {side: float(value) for side, value in re.findall(r"timeout (client|server) (\d+)s", front)}
    longest = CONFIGS["gateway"].model_fields["queue_timeout_s"].default
    assert min(timeouts.values()) > longest
    assert seconds(SERVICES["front"]["stop_grace_period"]) >= seconds(SERVICES["gateway"]["stop_grace_period"])
    assert f"gateway:{settings_of('gateway')['port']}" in front


def test_every_image_names_a_version() -> None:
    for name, service in SERVICES.items():
        tag = with_defaults(service["image"]).rpartition(":")[2]
        assert re.match(r"v?\d+\.\d+", tag), name


def test_what_is_mounted_exists() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (ROOT / source).exists() if source.startswith("./") else source in COMPOSE["volumes"]


def test_only_the_front_and_the_monitoring_are_reached_from_outside_and_by_this_machine_alone() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert set(published) == {"front", "prometheus", "grafana"}
    for ports in published.values():
        assert all(with_defaults(port).startswith("127.0.0.1:") for port in ports)
    assert COMPOSE["networks"]["cluster"]["internal"] is True


def test_the_default_profile_has_a_worker() -> None:
    profile = (ROOT / ".env").read_text(encoding="utf-8").strip().removeprefix("COMPOSE_PROFILES=")
    assert SERVICES["worker"]["profiles"] == [profile]


def test_every_variable_has_a_row_in_the_docs() -> None:
    files = [ROOT / "docker-compose.yml", *(ROOT / "deploy").glob("compose.*.yml")]
    used = {name for file in files for name, _ in _VARIABLE.findall(file.read_text(encoding="utf-8"))}
    rows = re.findall(r"^\| (`[A-Z].*?) \|", (ROOT / "docs/operations.md").read_text(encoding="utf-8"), re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(used) > 20
    assert used <= documented
