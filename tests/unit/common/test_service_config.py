"""Where a setting's value comes from: a flag beats the environment, which beats the file, which beats the default."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from octavo.common.links import Address
from octavo.common.service_config import AddressSetting, ServiceConfig


class BakeryConfig(ServiceConfig):
    """Settings of a service that does not exist."""

    model_config = SettingsConfigDict(env_prefix="OCTAVO_BAKERY_")

    listen: list[AddressSetting] = Field(default=[Address("frames", "/run/default.sock")])
    """Where customers come in."""

    num_ovens: int = 1
    """Ovens."""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "bakery.yaml"
    path.write_text("num_ovens: 2\nlog_level: debug\nlisten: ['grpc://0.0.0.0:2']\n")
    return str(path)


def test_the_default_is_used_if_nothing_else_says() -> None:
    config = BakeryConfig.from_command_line([])
    assert config.num_ovens == 1
    assert config.listen == [Address("frames", "/run/default.sock")]


def test_the_file_beats_the_default(file: str) -> None:
    config = BakeryConfig.from_command_line(["--config", file])
    assert (config.num_ovens, config.log_level) == (2, "debug")
    assert config.listen == [Address("grpc", "0.0.0.0:2")]


def test_the_environment_names_the_file_too(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_BAKERY_CONFIG", file)
    assert BakeryConfig.from_command_line([]).num_ovens == 2


def test_the_environment_beats_the_file(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_BAKERY_NUM_OVENS", "3")
    config = BakeryConfig.from_command_line(["--config", file])
    assert (config.num_ovens, config.log_level) == (3, "debug")


def test_a_flag_beats_the_environment_and_the_file(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_BAKERY_NUM_OVENS", "3")
    monkeypatch.setenv("OCTAVO_BAKERY_LOG_LEVEL", "error")
    config = BakeryConfig.from_command_line(["--config", file, "--num-ovens", "4"])
    assert (config.num_ovens, config.log_level) == (4, "error")


def test_several_addresses_are_given_by_repeating_the_flag() -> None:
    config = BakeryConfig.from_command_line(["--listen", "frames:///run/a.sock", "--listen", "grpc://0.0.0.0:7"])
    assert config.listen == [Address("frames", "/run/a.sock"), Address("grpc", "0.0.0.0:7")]


def test_several_addresses_in_the_environment_are_a_json_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_BAKERY_LISTEN", '["frames:///run/a.sock", "grpc+unix:///run/b.sock"]')
    assert BakeryConfig.from_command_line([]).listen == [
        Address("frames", "/run/a.sock"),
        Address("grpc+unix", "/run/b.sock"),
    ]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--num-ovens", "many"], "num_ovens"),
        (["--listen", "tcp://x:1"], "tcp://x:1"),
        (["--listen", "grpc://host"], "has no port"),
        (["--drain-grace-s", "-1"], "drain_grace_s"),
        (["--num-oven", "1"], "num_oven"),
    ],
)
def test_a_wrong_setting_is_named(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        BakeryConfig.from_command_line(arguments)
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err.replace("-", "_").replace("__", "")


def test_a_setting_that_does_not_exist_is_refused_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bakery.yaml"
    path.write_text("num_oven: 2\n")
    with pytest.raises(SystemExit):
        BakeryConfig.from_command_line(["--config", str(path)])
    assert "num_oven" in capsys.readouterr().err


def test_a_setting_that_does_not_exist_is_refused_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OCTAVO_BAKERY_NUM_OVEN", "2")
    with pytest.raises(SystemExit):
        BakeryConfig.from_command_line([])
    assert "OCTAVO_BAKERY_NUM_OVEN is no setting; OCTAVO_BAKERY_NUM_OVENS is" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        BakeryConfig.from_command_line(["--config", "/nowhere/bakery.yaml"])
    assert "BakeryConfig: config: Path does not point to a file" in capsys.readouterr().err
