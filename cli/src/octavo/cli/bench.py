"""`octavo bench`: a load, a progress bar, a table."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from octavo.cli.api_client import ServerError, served_model
from octavo.cli.bench_load import Load
from octavo.cli.bench_report import RequestRecord, Slo, make_report, render
from octavo.cli.bench_workload import BenchRequest, LengthSpread, WorkloadShape, make_workload

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

STDOUT = Path("-")

_DEFAULT_CONCURRENCY = 8


@dataclass(frozen=True, slots=True)
class BenchSettings:
    url: str
    model: str | None = None
    num_requests: int = 100
    rate: float | None = None
    """Requests per second; None sends the next one as soon as `concurrency` leaves room."""
    concurrency: int | None = None
    """Requests that run at once. None: no limit with a rate, 8 without."""
    input_len: int = 128
    output_len: int = 64
    lengths: LengthSpread = "fixed"
    shared_prefix: int = 0
    max_token_id: int = 400
    seed: int = 0
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    timeout_s: float = 600.0


def run_bench(settings: BenchSettings, json_file: Path | None) -> int:
    """Run the load and print the report; write it as JSON where that is asked for. Returns the exit status."""
    notices = Console(stderr=True)
    prints_json = json_file == STDOUT
    console = notices if prints_json else Console()
    if settings.concurrency is None and settings.rate is None:
        settings = replace(settings, concurrency=_DEFAULT_CONCURRENCY)
    try:
        model = settings.model or served_model(settings.url)
        records = asyncio.run(_measure(settings, model, notices))
    except ServerError as error:
        notices.print(f"octavo bench: {error}", style="red", markup=False, soft_wrap=True)
        return EXIT_FAILED
    except KeyboardInterrupt:
        notices.print("stopped")
        return EXIT_INTERRUPTED
    report = make_report(records, Slo(settings.slo_ttft_ms, settings.slo_tpot_ms))
    console.print(render(report))
    if json_file is not None:
        content = {"settings": {**asdict(settings), "model": model}, "report": report.to_json()}
        text = json.dumps(content, indent=2) + "\n"
        if prints_json:
            print(text, end="")
        else:
            try:
                json_file.write_text(text, encoding="utf-8")
            except OSError as error:
                message = f"octavo bench: the report cannot be written to {json_file}: {error.strerror}"
                notices.print(message, style="red", markup=False, soft_wrap=True)
                return EXIT_FAILED
    return EXIT_FAILED if report.errors else EXIT_OK


async def _measure(settings: BenchSettings, model: str, notices: Console) -> list[RequestRecord]:
    requests = make_workload(_shape(settings))
    load = Load(settings.url, model, settings.concurrency, settings.timeout_s)
    return await _run_with_bar(load, requests, notices)


async def _run_with_bar(load: Load, requests: list[BenchRequest], notices: Console) -> list[RequestRecord]:
    columns = (
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[tokens]} output tokens, {task.fields[failed]} failed"),
    )
    records: list[RequestRecord] = []
    with Progress(*columns, console=notices) as progress:
        bar = progress.add_task("", total=len(requests), tokens=0, failed=0)

        def on_done(record: RequestRecord) -> None:
            records.append(record)
            tokens = sum(done.num_output_tokens for done in records)
            progress.update(bar, advance=1, tokens=tokens, failed=sum(bool(done.error) for done in records))

        await load.run(requests, on_done)
    return records


def _shape(settings: BenchSettings) -> WorkloadShape:
    return WorkloadShape(
        num_requests=settings.num_requests,
        rate=settings.rate,
        input_len=settings.input_len,
        output_len=settings.output_len,
        lengths=settings.lengths,
        shared_prefix=settings.shared_prefix,
        max_token_id=settings.max_token_id,
        seed=settings.seed,
    )
