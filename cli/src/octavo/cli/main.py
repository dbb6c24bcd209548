"""The `octavo` command line. Each command imports what it needs when it runs, so that --help is quick."""

from __future__ import annotations

import json
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from octavo.cli import certs, keys
from octavo.cli.console import Screen
from octavo.cli.model_errors import ModelError
from octavo.cli.models import PreparedModel, prepare_model
from octavo.cli.serve_options import (
    Carrier,
    KvCacheDtype,
    Quantization,
    ServeOptions,
    check_gateways,
    check_groups,
    check_limits,
    check_simulation,
)
from octavo.common.logs import LogLevel

DEFAULT_URL = "http://127.0.0.1:8000"

app = typer.Typer(
    name="octavo",
    help="Octavo serves large language models over an OpenAI-compatible API. Its KV cache is paged.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)
model_commands = typer.Typer(help="Prepare models without serving them.", no_args_is_help=True)
app.add_typer(model_commands, name="model")
app.add_typer(keys.app, name="keys")
app.add_typer(certs.app, name="certs")

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="FOLDER|FILE.gguf|OWNER/NAME",
        help="A Hugging Face folder with safetensors, a GGUF file, or a name on the Hugging Face hub. "
        "Left out: SmolLM2-135M-Instruct, fetched and converted once.",
        show_default=False,
    ),
]


@app.command()
def serve(
    model: ModelOption = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name that clients call the model by. Left out: after the folder or file.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of one sequence, prompt and output. Left out: the model's.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Sequences that run at once.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens computed in one step.")] = None,
    block_size: Annotated[int | None, typer.Option(min=8, max=128, help="Tokens per KV block.")] = None,
    num_blocks: Annotated[int | None, typer.Option(min=1, help="KV blocks in the pool. Left out: what fits.")] = None,
    kv_cache_dtype: Annotated[
        KvCacheDtype | None,
        typer.Option(help="Type of K and V; fp8 halves the memory of bfloat16. Left out: that of the model."),
    ] = None,
    quantization: Annotated[
        Quantization | None, typer.Option(help="Rounds the weights to fp8 when they are loaded.", show_default=False)
    ] = None,
    num_host_blocks: Annotated[
        int | None,
        typer.Option(min=0, help="KV blocks in host memory, for swap and evicted prefixes. Left out: what fits."),
    ] = None,
    simulated: Annotated[
        str | None,
        typer.Option(
            metavar="PROFILE",
            help="Compute nothing: steps take the time of a profile's GPU (h200-llama-8b, or a YAML file), tokens are "
            "made up. --model then needs a tokenizer only, and may be left out.",
            show_default=False,
        ),
    ] = None,
    simulated_gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs that the simulated worker stands for.", show_default=False)
    ] = None,
    no_prefix_cache: Annotated[bool, typer.Option("--no-prefix-cache", help="Compute every prompt anew.")] = False,
    pipeline_depth: Annotated[
        int | None, typer.Option(min=1, max=4, help="Steps on their way at once; 1 waits for each result.")
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="All four services in one process, joined by function calls.")
    ] = False,
    carrier: Annotated[
        Carrier, typer.Option(help="Between the processes: frames over Unix sockets, or gRPC streams over them.")
    ] = "frames",
    groups: Annotated[
        int, typer.Option(min=1, max=64, help="Worker groups: copies of the model, each with a pool of its own.")
    ] = 1,
    gateways: Annotated[int, typer.Option(min=1, max=64, help="Gateway processes that serve the port together.")] = 1,
    redis: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Where gateways share stored responses and limits. Several need it."),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Certificate (PEM), to serve HTTPS.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Its key (PEM).")] = None,
    log_level: Annotated[LogLevel, typer.Option(help="Least severe line of the services that is shown.")] = "warning",
) -> None:
    """Serve a model at http://HOST:PORT/v1. Ctrl-C stops, a second Ctrl-C kills.

    Settings of one service that have no option here can be given by its environment variables, such as
    OCTAVO_SCHEDULER_MAX_NUM_WAITING. Exit status: 0 stopped, 1 failed, 130 killed.
    """
    from octavo.cli.serve import EXIT_FAILED, CannotListenError, check_port, serve_processes

    try:
        check_limits(max_num_seqs, max_num_batched_tokens)
        check_groups(groups, is_local=local)
        check_gateways(gateways, redis, tls_cert, tls_key, is_local=local)
        check_simulation(simulated, simulated_gpus, kv_cache_dtype, quantization)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    options = ServeOptions(
        host=host,
        port=port,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_cache_dtype=kv_cache_dtype,
        quantization=quantization,
        num_host_blocks=num_host_blocks,
        simulated=simulated,
        simulated_gpus=simulated_gpus,
        prefix_cache=not no_prefix_cache,
        pipeline_depth=pipeline_depth,
        log_level=log_level,
        carrier=carrier,
        groups=groups,
        gateways=gateways,
        redis=redis,
        tls_cert=tls_cert,
        tls_key=tls_key,
    )
    screen = Screen(Console(stderr=True))
    try:
        check_port(host, port)
    except CannotListenError as error:
        screen.say(str(error), style="red")
        raise typer.Exit(EXIT_FAILED) from None
    prepared = _prepare(model, screen, simulated)
    if served_model_name is not None:
        prepared = PreparedModel(prepared.folder, served_model_name)
    if local:
        from octavo.cli.serve import serve_in_one_process

        raise typer.Exit(serve_in_one_process(options, prepared, screen))
    raise typer.Exit(serve_processes(options, prepared, screen))


@app.command()
def chat(
    url: Annotated[str, typer.Option(envvar="OCTAVO_URL", help="The server.")] = DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="Model to talk to. Left out: the server's first.")] = None,
    system: Annotated[str | None, typer.Option(help="System message that starts the conversation.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 always takes the likeliest token.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Sample from this share of probability.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    once: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Send one message, print the answer, and exit; for scripts.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each answer as one JSON object, with usage and times.")
    ] = False,
) -> None:
    """Chat with a served model. /reset starts anew, /exit or Ctrl-D ends, Ctrl-C stops the answer.

    A server that asks for keys gets the one in OCTAVO_API_KEY.

    Examples: [bold]octavo chat[/bold], [bold]octavo chat --once "What is paging?" --json[/bold]
    """
    from octavo.cli.chat import ChatSettings, run_chat

    settings = ChatSettings(
        url=url,
        model=model,
        system=system,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        as_json=as_json,
    )
    raise typer.Exit(run_chat(settings, once))


@app.command()
def bench(
    url: Annotated[str, typer.Option(envvar="OCTAVO_URL", help="The server.")] = DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="Model to load. Left out: the server's first.")] = None,
    num_requests: Annotated[int, typer.Option("--num-requests", "-n", min=1, help="Requests in all.")] = 100,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests per second, as a Poisson process.", show_default=False)
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests that run at once.", show_default="8 without --rate")
    ] = None,
    input_len: Annotated[int, typer.Option(min=1, help="Prompt tokens (the mean, if lognormal).")] = 128,
    output_len: Annotated[int, typer.Option(min=1, help="Output tokens (the mean, if lognormal).")] = 64,
    lengths: Annotated[
        Literal["fixed", "lognormal"], typer.Option(help="All requests alike, or spread with a long tail.")
    ] = "fixed",
    shared_prefix: Annotated[
        int, typer.Option(min=0, help="Tokens that begin every prompt, on top of the input length.")
    ] = 0,
    max_token_id: Annotated[int, typer.Option(min=1, help="Prompts are made of ids from 0 to this one.")] = 400,
    seed: Annotated[int, typer.Option(help="Same seed, same prompts, lengths and arrivals.")] = 0,
    slo_ttft_ms: Annotated[float | None, typer.Option(min=0, help="SLO: time to the first token.")] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(min=0, help="SLO: time per output token after it.")] = None,
    timeout_s: Annotated[float, typer.Option(min=1, help="For one request.")] = 600.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE|-", help="Write the report as JSON; - prints it.")
    ] = None,
) -> None:
    """Load a server and report throughput, latencies and goodput.

    Goodput counts the output tokens of the requests that met every --slo. Exit status 1 if a request failed. A server
    that asks for keys gets the one in OCTAVO_API_KEY.

    Examples: [bold]octavo bench -n 32[/bold], [bold]octavo bench --rate 4 --slo-ttft-ms 500 --json -[/bold]
    """
    from octavo.cli.bench import BenchSettings, run_bench

    settings = BenchSettings(
        url=url,
        model=model,
        num_requests=num_requests,
        rate=rate,
        concurrency=concurrency,
        input_len=input_len,
        output_len=output_len,
        lengths=lengths,
        shared_prefix=shared_prefix,
        max_token_id=max_token_id,
        seed=seed,
        slo_ttft_ms=slo_ttft_ms,
        slo_tpot_ms=slo_tpot_ms,
        timeout_s=timeout_s,
    )
    raise typer.Exit(run_bench(settings, json_file))


@app.command()
def inspect(
    url: Annotated[
        str | None,
        typer.Option(envvar="OCTAVO_URL", help="The server, of those started here. Left out: the last one started."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="grpc://HOST:PORT|grpc+unix://PATH", help="The KV manager. Left out: that of the server."),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="grpc://HOST:PORT|grpc+unix://PATH",
            help="The scheduler, for queues, sequences and steps. Left out: that of the server.",
        ),
    ] = None,
    why: Annotated[
        str | None, typer.Option(metavar="REQUEST", help="Say why this request took as long as it did, instead.")
    ] = None,
    watch: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.2, help="Show it again and again until Ctrl-C.")
    ] = None,
    pool: Annotated[str, typer.Option(help="Block pool to look at. Left out: the first.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
    link_ca: Annotated[
        Path | None,
        typer.Option(envvar="OCTAVO_LINK_CA", help="PEM file of the services' CA, for an address on TCP."),
    ] = None,
    link_cert: Annotated[
        Path | None, typer.Option(envvar="OCTAVO_LINK_CERT", help="PEM file of a certificate that it signed.")
    ] = None,
    link_key: Annotated[
        Path | None, typer.Option(envvar="OCTAVO_LINK_KEY", help="PEM file of its private key.")
    ] = None,
) -> None:
    """Show what a running server holds and does: block pool, tiers, queues, sequences, prefix tree, ledger.

    Exit status 1 if it cannot be read, or if its ledger does not add up. The same, live and to point at, is at /ui.

    Examples: [bold]octavo inspect --watch 1[/bold], [bold]octavo inspect --why chatcmpl-4f1c... --json[/bold]
    """
    from octavo.cli import inspect as inspection
    from octavo.common.links import TlsFiles

    files = [path for path in (link_ca, link_cert, link_key) if path is not None]
    if len(files) not in (0, 3):
        raise typer.BadParameter("TLS needs --link-ca, --link-cert and --link-key")
    if watch is not None and (as_json or why is not None):
        raise typer.BadParameter("--watch shows pages: it goes with neither --json nor --why")
    tls = TlsFiles(*files) if files else None
    settings = inspection.InspectSettings(url, address, scheduler, pool, tls, as_json)
    if why is not None:
        raise typer.Exit(inspection.run_why(settings, why))
    raise typer.Exit(inspection.run_inspect(settings) if watch is None else inspection.watch(settings, watch))


@app.command()
def version(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print the version."""
    number = distribution_version("octavo-cli")
    typer.echo(json.dumps({"version": number}) if as_json else f"octavo {number}")


@model_commands.command("path")
def model_path(
    model: Annotated[str | None, typer.Argument(metavar="[FOLDER|FILE.gguf|OWNER/NAME]", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prepare a model, as serve would, and print the folder it is in. Left out: the default model."""
    prepared = _prepare(model, Screen(Console(stderr=True)))
    typer.echo(json.dumps({"model": prepared.name, "folder": str(prepared.folder)}) if as_json else prepared.folder)


def _prepare(model: str | None, screen: Screen, simulated: str | None = None) -> PreparedModel:
    try:
        with screen.status_line():
            if simulated is not None:
                from octavo.cli.simulated_model import prepare_simulated_model

                return prepare_simulated_model(simulated, model, screen.progress)
            return prepare_model(model, screen.progress)
    except ModelError as error:
        screen.say(str(error), style="red")
        raise typer.Exit(1) from None


if __name__ == "__main__":
    app()
