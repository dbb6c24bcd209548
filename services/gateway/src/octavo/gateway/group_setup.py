"""Builds what the settings say of groups: the registry that names them, and how they are used."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from octavo.common.links import Address, Link
from octavo.common.messages.generation import GatewayMessage, SchedulerMessage
from octavo.common.registry import Member, Registry, Roster, StaticRegistry, open_registry
from octavo.common.roles import Role
from octavo.gateway.config import GatewayConfig
from octavo.gateway.scheduler_client import Connect, SchedulerClient
from octavo.gateway.worker_groups import GroupSettings, WorkerGroups

ONLY_POOL = "default"
"""What the group is called whose scheduler the settings name."""


def registry_of(config: GatewayConfig) -> Registry:
    """The one that `registry` names, or the scheduler of the settings. Raises OSError and ProtocolError."""
    if config.scheduler is None:
        assert config.registry is not None  # the settings are checked
        return open_registry(config.registry)
    members = [Member("scheduler", Role.SCHEDULER, ONLY_POOL, str(config.scheduler), _address(config.scheduler_admin))]
    if admin := _address(config.kvmanager_admin):
        members.append(Member("kvmanager", Role.KVMANAGER, ONLY_POOL, admin, admin))
    return StaticRegistry(members)


def _address(target: str | None) -> str:
    return str(Address.of_grpc_target(target)) if target else ""


def worker_groups(
    config: GatewayConfig,
    registry: Registry,
    connect: Callable[[Member], Awaitable[Link[GatewayMessage, SchedulerMessage]]],
) -> WorkerGroups:
    """Clients of all schedulers in the registry."""

    def make_client(connect: Connect) -> SchedulerClient:
        return SchedulerClient(
            connect,
            queue_timeout_s=config.queue_timeout_s,
            token_timeout_s=config.token_timeout_s,
            recovery_timeout_s=config.recovery_timeout_s,
            max_open_requests=config.max_open_requests,
        )

    settings = GroupSettings(
        config.routing, config.max_directory_blocks, config.reroute_after_s, config.max_open_requests
    )
    roster = Roster(registry, min(1.0, config.registry_ttl_s / 3), 2 * config.registry_ttl_s)
    return WorkerGroups(roster, connect, make_client, settings, config.link_tls)
