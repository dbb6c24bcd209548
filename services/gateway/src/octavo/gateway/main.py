"""Starts the gateway: `octavo-gateway`, configured by flags, `OCTAVO_GATEWAY_*` and a YAML file."""

from __future__ import annotations

import gc
import sys

from octavo.common.codecs import GENERATE
from octavo.common.links import connect
from octavo.common.operations_http import operations_http
from octavo.common.runtime import Stop, run
from octavo.gateway import metrics
from octavo.gateway.app import create_app
from octavo.gateway.config import GatewayConfig
from octavo.gateway.detokenization import UnsupportedDecoderError
from octavo.gateway.http_server import listen_http, serve_http
from octavo.gateway.scheduler_client import SchedulerClient
from octavo.gateway.tokenization import load_tokenizer


def main() -> None:
    config = GatewayConfig.from_command_line()
    try:
        tokenizer = load_tokenizer(config.model, config.tokenizer_threads)
    except (FileNotFoundError, UnsupportedDecoderError) as error:
        print(f"octavo-gateway: {error}", file=sys.stderr)
        raise SystemExit(1) from None

    metrics.forget_dead_processes()

    async def serve(stop: Stop) -> None:
        client = SchedulerClient(
            lambda: connect(config.scheduler, GENERATE, config.connect_timeout_s, config.link_tls),
            queue_timeout_s=config.queue_timeout_s,
            token_timeout_s=config.token_timeout_s,
            recovery_timeout_s=config.recovery_timeout_s,
            max_open_requests=config.max_open_requests,
        )
        app = create_app(config, client, tokenizer)
        gc.freeze()  # what lives as long as the process need not be searched again and again
        with operations_http(config.metrics_listen, lambda: client.why_not_ready):
            await serve_http(app, config, client, listen_http(config), stop)

    run("gateway", config, serve)


if __name__ == "__main__":
    main()
