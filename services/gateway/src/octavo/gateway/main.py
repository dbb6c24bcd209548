"""Starts the gateway: `octavo-gateway`, configured by flags, `OCTAVO_GATEWAY_*` and a YAML file."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable

# gRPC reads it when it is imported. What the gateway starts is another program, which has no use for gRPC's state, and
# for each one gRPC would write that it cannot hand it over.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from octavo.common.codecs import GENERATE
from octavo.common.links import Address, Link, connect
from octavo.common.messages.generation import GatewayMessage, SchedulerMessage
from octavo.common.operations_http import operations_http
from octavo.common.registry import Member
from octavo.common.runtime import Stop, run
from octavo.gateway import metrics
from octavo.gateway.app import create_app
from octavo.gateway.config import GatewayConfig
from octavo.gateway.detokenization import UnsupportedDecoderError
from octavo.gateway.garbage import collect_between_requests
from octavo.gateway.group_setup import registry_of, worker_groups
from octavo.gateway.http_server import listen_http, serve_http
from octavo.gateway.tokenization import load_tokenizer


def main() -> None:
    config = GatewayConfig.from_command_line()
    try:
        tokenizer = load_tokenizer(config.model, config.tokenizer_threads)
    except (FileNotFoundError, ValueError, UnsupportedDecoderError) as error:
        print(f"octavo-gateway: {error}", file=sys.stderr)
        raise SystemExit(1) from None

    metrics.forget_dead_processes()

    async def serve(stop: Stop) -> None:
        def connect_scheduler(member: Member) -> Awaitable[Link[GatewayMessage, SchedulerMessage]]:
            return connect(Address.parse(member.address), GENERATE, config.connect_timeout_s, config.link_tls)

        registry = registry_of(config)
        groups = worker_groups(config, registry, connect_scheduler)
        app = create_app(config, groups, tokenizer)
        collecting = asyncio.create_task(collect_between_requests(lambda: groups.num_open_requests))
        try:
            with operations_http(config.metrics_listen, lambda: groups.why_not_ready):
                await serve_http(app, config, groups, listen_http(config), stop)
        finally:
            collecting.cancel()
            await registry.close()

    run("gateway", config, serve)


if __name__ == "__main__":
    main()
