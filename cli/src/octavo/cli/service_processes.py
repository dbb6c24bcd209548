"""The four services as child processes: their commands, settings and addresses on this host."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from octavo.cli.models import PreparedModel
from octavo.cli.serve_options import ServeOptions
from octavo.common.links import Address
from octavo.common.registry import Member
from octavo.common.roles import Role

_PASSIVE_WAIT = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
"""OpenMP threads that spin while they wait slow a worker down many times over once a neighbour uses a core."""


_WORKER_LEAVES_S = 4.0
"""The system takes seconds to take a GPU's memory, and host memory locked for it, from a process that has ended."""


@dataclass(frozen=True, slots=True)
class ServiceProcess:
    """One child process as it is to be started, and started again."""

    name: str
    command: tuple[str, ...]
    settings: dict[str, str]
    """Environment variables on top of the supervisor's own."""
    defaults: dict[str, str] = field(default_factory=dict)
    """Environment variables where the supervisor's own has none."""
    stop_within_s: float = 1.0
    """Seconds from SIGTERM to SIGKILL."""


def admin_address(run_dir: Path, service: str) -> str:
    """Where a service answers health and metrics calls: `grpc+unix://PATH`."""
    return f"grpc+unix://{run_dir}/{service}.grpc.sock"


def pool_names(options: ServeOptions) -> list[str]:
    """Of the block pools, one for each worker group."""
    return ["default"] if options.groups == 1 else [f"group-{index + 1}" for index in range(options.groups)]


def service_name(service: str, pool: str) -> str:
    """What a service of a group is called, among several."""
    return service if pool == "default" else f"{service}-{pool.removeprefix('group-')}"


def members_file(run_dir: Path) -> Path:
    """Where several groups are written down for the gateways; it has to be there before they start."""
    return run_dir / "members.json"


def members(options: ServeOptions, run_dir: Path) -> list[Member]:
    """The schedulers and KV managers of all groups."""
    return [
        Member(
            member_id=(name := service_name(role.value, pool)),
            role=role,
            pool_id=pool,
            address=_stream_address(options, run_dir, name),
            admin=admin_address(run_dir, name),
        )
        for pool in pool_names(options)
        for role in (Role.KVMANAGER, Role.SCHEDULER)
    ]


def service_processes(options: ServeOptions, model: PreparedModel, run_dir: Path) -> list[ServiceProcess]:
    """The services in the order in which they start; they stop in the opposite order.

    Their sockets are in `run_dir`, which only this user should be able to enter.
    """
    groups = [_group(options, model, run_dir, pool) for pool in pool_names(options)]
    return [
        *(process for services in zip(*groups, strict=True) for process in services),
        *_copies(_gateway(options, model, run_dir), options.gateways, run_dir),
    ]


def _group(options: ServeOptions, model: PreparedModel, run_dir: Path, pool: str) -> list[ServiceProcess]:
    """KV manager, worker and scheduler of one pool."""

    def name(service: str) -> str:
        return service_name(service, pool)

    def listen(service: str) -> str:
        return f"frames://{run_dir}/{name(service)}.sock,{admin_address(run_dir, name(service))}"

    limits = {
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "max_model_len": options.max_model_len,
    }
    kvmanager = _process(
        "kvmanager",
        options,
        {"listen": listen("kvmanager"), "catalogue_dir": run_dir / f"blocks-{pool}"},
        drain_s=0.2,
    )
    worker = _process(
        "worker",
        options,
        {
            "listen": listen("worker"),
            "model": model.folder,
            "model_name": model.name,
            "block_size": options.block_size,
            "num_blocks": options.num_blocks,
            "kv_cache_dtype": options.kv_cache_dtype,
            "quantization": options.quantization,
            "num_host_blocks": options.num_host_blocks,
            "simulated": options.simulated,
            "simulated_gpus": options.simulated_gpus,
            **limits,
        },
        drain_s=0.5,
        defaults=_PASSIVE_WAIT,
        leave_s=_WORKER_LEAVES_S,
    )
    scheduler = _process(
        "scheduler",
        options,
        {
            "listen": listen("scheduler"),
            "kvmanager": _stream_address(options, run_dir, name("kvmanager")),
            "worker": _stream_address(options, run_dir, name("worker")),
            "pool_id": pool,
            "pipeline_depth": options.pipeline_depth,
            "prefix_cache": options.prefix_cache,
            **limits,
        },
        drain_s=0.5,
    )
    return [replace(process, name=name(process.name)) for process in (kvmanager, worker, scheduler)]


def _gateway(options: ServeOptions, model: PreparedModel, run_dir: Path) -> ServiceProcess:
    if options.groups == 1:
        services = {
            "scheduler": _stream_address(options, run_dir, "scheduler"),
            "scheduler_admin": Address.parse(admin_address(run_dir, "scheduler")).grpc_target,
            "kvmanager_admin": Address.parse(admin_address(run_dir, "kvmanager")).grpc_target,
        }
    else:
        services = {"registry": f"file://{members_file(run_dir)}"}
    return _process(
        "gateway",
        options,
        {
            "host": options.host,
            "port": options.port,
            **services,
            "model": model.folder,
            "response_store_redis": options.redis,
            "limits_redis": options.redis,
            "tls_cert": options.tls_cert,
            "tls_key": options.tls_key,
        },
        drain_s=1.5,
    )


def _stream_address(options: ServeOptions, run_dir: Path, name: str) -> str:
    return f"frames://{run_dir}/{name}.sock" if options.carrier == "frames" else admin_address(run_dir, name)


def metrics_dir(run_dir: Path) -> Path:
    """Where several gateways count together; it has to be there before they start."""
    return run_dir / "metrics"


def _copies(gateway: ServiceProcess, number: int, run_dir: Path) -> list[ServiceProcess]:
    """Gateways that serve as one."""
    if number == 1:
        return [gateway]
    shared = {"OCTAVO_GATEWAY_REUSE_PORT": "true", "PROMETHEUS_MULTIPROC_DIR": str(metrics_dir(run_dir))}
    settings = {**gateway.settings, **shared}
    return [replace(gateway, name=f"gateway-{index + 1}", settings=settings) for index in range(number)]


def _process(
    name: str,
    options: ServeOptions,
    settings: dict[str, object],
    drain_s: float,
    defaults: Mapping[str, str] = MappingProxyType({}),
    leave_s: float = 0.5,
) -> ServiceProcess:
    settings = {"log_level": options.log_level, "drain_grace_s": drain_s, **settings}
    return ServiceProcess(
        name=name,
        command=(sys.executable, "-m", f"octavo.{name}.main"),
        settings={
            f"OCTAVO_{name.upper()}_{setting.upper()}": str(value)
            for setting, value in settings.items()
            if value is not None
        },
        defaults=dict(defaults),
        stop_within_s=drain_s + leave_s,
    )
