"""What deploy/compose.*.yml add to docker-compose.yml: TLS, API keys, a second group."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from octavo.common.links import Address
from octavo.common.roles import Role
from support.service_settings import settings_in

ROOT = Path(__file__).parents[2]
OVERLAYS = {path.suffixes[0][1:]: path for path in sorted((ROOT / "deploy").glob("compose.*.yml"))}
CERTS = (ROOT / "deploy/compose/certs.sh").read_text(encoding="utf-8")
ROLES = {"gateway": "gateway", "scheduler": "scheduler", "kvmanager": "kvmanager", "worker": "worker",
         "worker-gpu": "worker"}  # fmt: skip


def load(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return loaded


BASE = load(ROOT / "docker-compose.yml")
TLS, KEYS, GROUPS = (load(OVERLAYS[name]) for name in ("tls", "keys", "groups"))


def service_of(name: str) -> str:
    return re.sub(r"-(2|gpu)$", "", name)


def settings_of(overlay: dict[str, Any], name: str) -> dict[str, str]:
    settings, unknown = settings_in(overlay["services"][name]["environment"], service_of(name))
    assert unknown == []
    return settings


def test_there_are_three() -> None:
    assert set(OVERLAYS) == {"tls", "keys", "groups"}


@pytest.mark.parametrize("name", OVERLAYS)
def test_what_they_mount_and_change_exists(name: str) -> None:
    overlay = load(OVERLAYS[name])
    for service, change in overlay["services"].items():
        assert service in BASE["services"] or "image" in change or change["extends"]["service"] in BASE["services"]
        for volume in change.get("volumes", []):
            source = volume.split(":")[0]
            assert (ROOT / source).exists() if source.startswith("./") else source in overlay["volumes"]
    mounted = {volume.split(":")[0] for change in overlay["services"].values() for volume in change.get("volumes", [])}
    assert set(overlay.get("volumes", {})) <= mounted


@pytest.mark.parametrize("name", ROLES)
def test_every_service_shows_the_certificate_of_its_role_and_no_other(name: str) -> None:
    settings = settings_of(TLS, name)
    files = {key: settings[f"link_{key}"] for key in ("ca", "cert", "key")}
    assert files == {"ca": "/certs/ca.pem", "cert": "/certs/cert.pem", "key": "/certs/key.pem"}
    assert TLS["services"][name]["volumes"] == [f"certs-{ROLES[name]}:/certs:ro"]
    assert TLS["services"][name]["depends_on"] == {"certs": {"condition": "service_completed_successfully"}}


@pytest.mark.parametrize("name", ROLES)
def test_every_way_to_redis_is_by_tls(name: str) -> None:
    plain = settings_in(BASE["services"][name]["environment"], service_of(name))[0]
    secured = settings_of(TLS, name)
    urls = {setting: value for setting, value in plain.items() if str(value).startswith("redis://")}
    assert urls
    for setting, value in urls.items():
        host = value.removeprefix("redis://").split(":")[0]
        assert secured[setting].startswith(
            f"rediss://{host}:6379/0?ssl_ca_certs=/certs/ca.pem&ssl_certfile=/certs/cert.pem"
        )
        assert f"--host {host}" in CERTS
    for name in ("redis", "responses"):
        started = TLS["services"][name]["entrypoint"][2]
        assert "--port 0" in started and "--tls-auth-clients" not in started, "clients need a certificate"


def test_certificates_are_made_for_every_volume_and_the_key_of_the_ca_stays_where_it_is() -> None:
    [roles] = re.findall(r"for role in (.*); do issue", CERTS)
    assert set(roles.split()) == set(Role)
    issued = {*roles.split(), *re.findall(r"^issue (\w+)", CERTS, re.MULTILINE)}
    volumes = {volume.split(":")[0]: volume.split(":")[1] for volume in TLS["services"]["certs"]["volumes"][1:]}
    assert volumes == {f"certs-{name}": f"/certs/{name}" for name in {"ca", *issued}}
    with_ca = [name for name, service in TLS["services"].items() if "certs-ca" in str(service.get("volumes"))]
    assert with_ca == ["certs"]
    image = (ROOT / "cli/Dockerfile").read_text(encoding="utf-8")
    [folders] = re.findall(r"for role in (.*); \\\n", image)
    assert set(folders.split()) == {"ca", *issued}


def test_keys_are_written_by_the_command_and_read_by_gateways() -> None:
    files = {
        name: KEYS["services"][name]["environment"]["OCTAVO_GATEWAY_API_KEYS_FILE"] for name in ("gateway", "octavo")
    }
    assert set(files.values()) == {"/keys/octavo-keys.yaml"}
    assert KEYS["services"]["gateway"]["volumes"] == ["keys:/keys:ro"]
    assert "-m 0700 /keys " in (ROOT / "cli/Dockerfile").read_text(encoding="utf-8")


def test_the_second_group_shares_neither_pool_nor_socket_with_the_first() -> None:
    for name, change in GROUPS["services"].items():
        assert change["extends"] == {"file": "docker-compose.yml", "service": service_of(name)}
        assert settings_of(GROUPS, name)["pool_id"] == "second"
    listens = [
        services["environment"]["OCTAVO_KVMANAGER_LISTEN"].split(",")
        for services in (BASE["services"]["kvmanager"], GROUPS["services"]["kvmanager-2"])
    ]
    (first, first_tcp), (second, second_tcp) = listens
    assert Address.parse(first).scheme == Address.parse(second).scheme == "frames"
    assert first != second and first_tcp == second_tcp
