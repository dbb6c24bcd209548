"""The settings of each service, for files that set them from outside."""

from __future__ import annotations

from octavo.common.service_config import ServiceConfig
from octavo.gateway.config import GatewayConfig
from octavo.kvmanager.config import KvManagerConfig
from octavo.scheduler.config import SchedulerConfig
from octavo.worker.config import WorkerConfig

CONFIGS: dict[str, type[ServiceConfig]] = {
    "gateway": GatewayConfig,
    "scheduler": SchedulerConfig,
    "kvmanager": KvManagerConfig,
    "worker": WorkerConfig,
}


def settings_in(environment: dict[str, str], service: str) -> tuple[dict[str, str], list[str]]:
    """The settings of a service that environment variables hold, and those variables that are none of its settings."""
    prefix = f"OCTAVO_{service.upper()}_"
    own = {name.removeprefix(prefix).lower(): value for name, value in environment.items() if name.startswith(prefix)}
    unknown = [f"{prefix}{name.upper()}" for name in own if name not in CONFIGS[service].model_fields]
    foreign = [name for name in environment if name.startswith("OCTAVO_") and not name.startswith(prefix)]
    return {name: value for name, value in own.items() if name in CONFIGS[service].model_fields}, unknown + foreign
