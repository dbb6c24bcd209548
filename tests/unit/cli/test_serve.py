"""What `octavo serve` decides before and around the processes that it starts."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

import pytest
from pydantic_settings import BaseSettings
from typer.testing import CliRunner

from octavo.cli.main import app
from octavo.cli.models import PreparedModel
from octavo.cli.serve import CannotListenError, check_port, greeting_text
from octavo.cli.serve_options import ServeOptions
from octavo.cli.service_processes import ServiceProcess, members, service_processes
from octavo.common.roles import Role
from octavo.gateway.config import GatewayConfig
from octavo.kvmanager.config import KvManagerConfig
from octavo.scheduler.config import SchedulerConfig
from octavo.worker.config import WorkerConfig
from support.certificates import issue, make_ca

MODEL = PreparedModel(Path("/models/tiny"), "tiny")
RUN_DIR = Path("/run/octavo")


def config_of(process: ServiceProcess, config: type[BaseSettings], monkeypatch: pytest.MonkeyPatch) -> BaseSettings:
    for name, value in process.settings.items():
        monkeypatch.setenv(name, value)
    return config()


def test_a_port_in_use_is_told_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(CannotListenError, match=rf"cannot listen on 127\.0\.0\.1:{port}.*--port {port + 1}"):
            check_port("127.0.0.1", port)

        result = CliRunner().invoke(app, ["serve", "--port", str(port), "--model", "/not/looked/at"])
        assert result.exit_code == 1
        assert "cannot listen" in result.stderr
        assert "no file or folder" not in result.stderr
    check_port("127.0.0.1", port)


def test_an_unknown_host_is_told() -> None:
    with pytest.raises(CannotListenError, match=r"cannot listen on not-a-host\.invalid:8000.* --host 0\.0\.0\.0"):
        check_port("not-a-host.invalid", 8000)


def test_a_model_that_is_not_there_ends_with_status_1() -> None:
    result = CliRunner().invoke(app, ["model", "path", "/no/such/model"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "no file or folder /no/such/model" in result.stderr


def test_the_processes_start_from_the_bottom_up() -> None:
    processes = service_processes(ServeOptions(), MODEL, RUN_DIR)
    assert [process.name for process in processes] == ["kvmanager", "worker", "scheduler", "gateway"]
    assert [process.command[-1] for process in processes] == [
        "octavo.kvmanager.main",
        "octavo.worker.main",
        "octavo.scheduler.main",
        "octavo.gateway.main",
    ]
    assert sum(process.stop_within_s for process in processes) < 9


def test_every_service_takes_the_settings_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ServeOptions(
        host="0.0.0.0",
        port=8123,
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=32,
        num_blocks=100,
        prefix_cache=False,
        pipeline_depth=1,
    )
    kvmanager, worker, scheduler, gateway = service_processes(options, MODEL, RUN_DIR)

    config = config_of(kvmanager, KvManagerConfig, monkeypatch)
    assert isinstance(config, KvManagerConfig)
    listening = ["frames:///run/octavo/kvmanager.sock", "grpc+unix:///run/octavo/kvmanager.grpc.sock"]
    assert [str(address) for address in config.listen] == listening

    config = config_of(worker, WorkerConfig, monkeypatch)
    assert isinstance(config, WorkerConfig)
    assert (config.model, config.model_name) == (Path("/models/tiny"), "tiny")
    assert (config.block_size, config.num_blocks) == (32, 100)
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len) == (4, 64, 512)

    config = config_of(scheduler, SchedulerConfig, monkeypatch)
    assert isinstance(config, SchedulerConfig)
    assert str(config.worker) == "frames:///run/octavo/worker.sock"
    assert str(config.kvmanager) == "frames:///run/octavo/kvmanager.sock"
    assert (config.pipeline_depth, config.prefix_cache, config.max_num_seqs) == (1, False, 4)

    config = config_of(gateway, GatewayConfig, monkeypatch)
    assert isinstance(config, GatewayConfig)
    assert (config.host, config.port, config.model) == ("0.0.0.0", 8123, Path("/models/tiny"))
    assert str(config.scheduler) == "frames:///run/octavo/scheduler.sock"
    assert config.scheduler_admin == "unix:/run/octavo/scheduler.grpc.sock"


def test_the_grpc_carrier_joins_the_services_by_grpc() -> None:
    _, _, scheduler, gateway = service_processes(ServeOptions(carrier="grpc"), MODEL, RUN_DIR)
    assert scheduler.settings["OCTAVO_SCHEDULER_WORKER"] == "grpc+unix:///run/octavo/worker.grpc.sock"
    assert gateway.settings["OCTAVO_GATEWAY_SCHEDULER"] == "grpc+unix:///run/octavo/scheduler.grpc.sock"


def test_what_is_not_asked_for_is_left_to_the_services() -> None:
    _, worker, _, _ = service_processes(ServeOptions(), MODEL, RUN_DIR)
    assert "OCTAVO_WORKER_BLOCK_SIZE" not in worker.settings
    assert worker.settings["OCTAVO_WORKER_LOG_LEVEL"] == "warning"


def test_groups_have_services_of_their_own_and_the_gateway_a_list_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ServeOptions(groups=2)
    processes = {process.name: process for process in service_processes(options, MODEL, RUN_DIR)}
    services = [f"{service}-{group}" for service in ("kvmanager", "worker", "scheduler") for group in (1, 2)]
    assert list(processes) == [*services, "gateway"]
    config = config_of(processes["scheduler-2"], SchedulerConfig, monkeypatch)
    assert isinstance(config, SchedulerConfig)
    assert (str(config.worker), config.pool_id) == ("frames:///run/octavo/worker-2.sock", "group-2")
    config = config_of(processes["gateway"], GatewayConfig, monkeypatch)
    assert isinstance(config, GatewayConfig)
    assert (config.scheduler, config.registry) == (None, "file:///run/octavo/members.json")
    assert (config.scheduler_admin, config.kvmanager_admin) == (None, None), "members tell theirs"
    assert [(member.role, member.pool_id, member.address) for member in members(options, RUN_DIR)] == [
        (Role.KVMANAGER, "group-1", "frames:///run/octavo/kvmanager-1.sock"),
        (Role.SCHEDULER, "group-1", "frames:///run/octavo/scheduler-1.sock"),
        (Role.KVMANAGER, "group-2", "frames:///run/octavo/kvmanager-2.sock"),
        (Role.SCHEDULER, "group-2", "frames:///run/octavo/scheduler-2.sock"),
    ]


def test_several_gateways_share_a_port_their_metrics_and_redis(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tls = issue(make_ca(tmp_path), Role.GATEWAY)
    options = ServeOptions(gateways=3, redis="redis://r:1/0", tls_cert=tls.cert, tls_key=tls.key)
    gateways = service_processes(options, MODEL, RUN_DIR)[3:]
    assert [gateway.name for gateway in gateways] == ["gateway-1", "gateway-2", "gateway-3"]
    assert {gateway.settings["PROMETHEUS_MULTIPROC_DIR"] for gateway in gateways} == {"/run/octavo/metrics"}
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    config = config_of(gateways[2], GatewayConfig, monkeypatch)
    assert isinstance(config, GatewayConfig)
    assert config.reuse_port
    assert str(config.limits_redis) == str(config.response_store_redis) == "redis://r:1/0"
    assert (config.tls_cert, options.url) == (tls.cert, "https://127.0.0.1:8000")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--gateways", "2"], "--redis"),
        (["--gateways", "2", "--redis", "redis://r:1", "--local"], "--local"),
        (["--tls-cert", __file__], "--tls-key"),
    ],
)
def test_gateways_that_could_not_serve_as_one_are_refused(arguments: list[str], word: str) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2
    assert word in result.output


def test_limits_that_contradict_each_other_are_refused() -> None:
    result = CliRunner().invoke(app, ["serve", "--max-num-seqs", "64", "--max-num-batched-tokens", "16"])
    assert result.exit_code == 2
    assert "must be at least" in result.stderr


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("server.example", "http://server.example:8000"),
    ],
)
def test_the_url_is_one_that_can_be_opened(host: str, url: str) -> None:
    assert ServeOptions(host=host).url == url


def test_the_greeting_holds_a_command_to_try() -> None:
    text = greeting_text("http://127.0.0.1:8000", "it's tiny")
    command = re.search(r"curl .*", text)
    assert command is not None
    assert "http://127.0.0.1:8000/v1/chat/completions" in command[0]
    assert "it'\"'\"'s tiny" in command[0]
    assert "http://127.0.0.1:8000/metrics" in text


def test_the_greeting_names_a_command_that_the_shell_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "a folder" / "octavo"
    program.parent.mkdir()
    program.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(program)])
    assert f"'{program}' chat --url http://h:1" in greeting_text("http://h:1", "m")
    monkeypatch.setenv("PATH", str(program.parent))
    assert " octavo chat --url http://h:1" in greeting_text("http://h:1", "m")


@pytest.mark.parametrize("command", ["", "serve", "chat", "bench", "version", "model path"])
def test_every_command_explains_itself(command: str) -> None:
    result = CliRunner().invoke(app, [*command.split(), "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.stdout
