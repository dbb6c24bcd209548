"""The local transport: the four services in one process, joined by function calls instead of sockets.

It serves the same cores as the four processes. What the boundary between the services costs is measured against it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any, TypeVar

import prometheus_client

from octavo.cli.models import PreparedModel
from octavo.cli.progress import Progress
from octavo.cli.serve_options import ServeOptions
from octavo.common.links import Address, Link, local_pair
from octavo.common.messages.generation import GatewayMessage, SchedulerMessage
from octavo.common.runtime import Stop
from octavo.gateway.app import create_app
from octavo.gateway.config import GatewayConfig
from octavo.gateway.group_setup import registry_of, worker_groups
from octavo.gateway.http_server import listen_http, serve_http
from octavo.gateway.tokenization import load_tokenizer
from octavo.kvmanager.config import KvManagerConfig
from octavo.kvmanager.metrics import KvMetrics
from octavo.kvmanager.server import KvManagerServer
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.metrics import SchedulerCollector
from octavo.scheduler.server import SchedulerServer
from octavo.worker.config import WorkerConfig
from octavo.worker.main import new_server as new_worker_server

Client = TypeVar("Client")
Server = TypeVar("Server")

_PROGRESS_INTERVAL_S = 0.25


class LocalCluster:
    """Gateway, scheduler, KV manager and worker of one model. Made and used inside a running event loop."""

    def __init__(self, options: ServeOptions, model: PreparedModel) -> None:
        settings = _Settings(options, model)
        self.kvmanager = KvManagerServer(
            settings.kvmanager.pool_settings, secrets.randbits(63), settings.kvmanager.check_ledger
        )
        self.worker = new_worker_server(settings.worker)
        self.scheduler = SchedulerServer(
            settings.scheduler,
            connect_kvmanager=lambda: _join(self.kvmanager.accept),
            connect_worker=lambda: _join(self.worker.accept),
        )
        self._gateway_config = settings.gateway
        self.gateway_client = worker_groups(
            settings.gateway, registry_of(settings.gateway), lambda member: self.connect_gateway()
        )

    async def connect_gateway(self) -> Link[GatewayMessage, SchedulerMessage]:
        """A gateway's stream to the scheduler."""
        return await _join(self.scheduler.accept)

    async def serve_cores(self, stop: Stop) -> None:
        """Run scheduler, KV manager and worker until the stop. Raises what kept the model from loading."""
        self.worker.start()
        scheduling = asyncio.create_task(self.scheduler.run(stop))
        try:
            await asyncio.wait({scheduling, self.worker.loaded}, return_when=asyncio.FIRST_COMPLETED)
            if self.worker.loaded.done():
                self.worker.loaded.result()
            await scheduling
        finally:
            scheduling.cancel()
            await self.worker.close(grace_s=1.0)

    async def serve(self, stop: Stop) -> None:
        """Run all four until the stop. Raises OSError if the gateway's port is taken."""
        config = self._gateway_config
        app = create_app(config, self.gateway_client, load_tokenizer(config.model, config.tokenizer_threads))
        listening = listen_http(config)
        collectors = [SchedulerCollector(self.scheduler.core), KvMetrics(self.kvmanager)]
        for collector in collectors:
            prometheus_client.REGISTRY.register(collector)
        cores_stop = Stop()
        cores = asyncio.create_task(self.serve_cores(cores_stop))
        cores.add_done_callback(lambda _: None if stop.is_requested else stop.request())
        try:
            await serve_http(app, config, self.gateway_client, listening, stop)
        finally:
            if not cores_stop.is_requested:
                cores_stop.request()
            for collector in collectors:
                prometheus_client.REGISTRY.unregister(collector)
            await cores

    async def tell_progress(self, progress: Progress) -> None:
        """Show what the worker is doing until it is ready."""
        while state := self.scheduler.not_ready_reason:
            progress(f"worker: {self.worker.health() or state}")
            await asyncio.sleep(_PROGRESS_INTERVAL_S)


class _Settings:
    """The services' own settings, from their environment variables, overridden by the options of the command."""

    def __init__(self, options: ServeOptions, model: PreparedModel) -> None:
        limits = {
            "max_num_seqs": options.max_num_seqs,
            "max_num_batched_tokens": options.max_num_batched_tokens,
            "max_model_len": options.max_model_len,
        }
        kvmanager, worker, scheduler = (Address("local", name) for name in ("kvmanager", "worker", "scheduler"))
        self.kvmanager = KvManagerConfig(**_given(listen=[kvmanager]))
        self.worker = WorkerConfig(
            **_given(
                listen=[worker],
                model=model.folder,
                model_name=model.name,
                block_size=options.block_size,
                num_blocks=options.num_blocks,
                kv_cache_dtype=options.kv_cache_dtype,
                quantization=options.quantization,
                num_host_blocks=options.num_host_blocks,
                simulated=options.simulated,
                simulated_gpus=options.simulated_gpus,
                **limits,
            )
        )
        self.scheduler = SchedulerConfig(
            **_given(
                listen=[scheduler],
                kvmanager=kvmanager,
                worker=worker,
                pipeline_depth=options.pipeline_depth,
                prefix_cache=options.prefix_cache,
                drain_grace_s=0.5,
                **limits,
            )
        )
        self.gateway = GatewayConfig(
            **_given(
                host=options.host,
                port=options.port,
                scheduler=scheduler,
                model=model.folder,
                response_store_redis=options.redis,
                limits_redis=options.redis,
                tls_cert=options.tls_cert,
                tls_key=options.tls_key,
                drain_grace_s=1.5,
            )
        )


def _given(**settings: Any) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


async def _join(accept: Callable[[Link[Server, Client]], None]) -> Link[Client, Server]:
    """The client's end of a stream whose other end `accept` gets."""
    client: Link[Client, Server]
    client, server = local_pair()
    accept(server)
    return client
