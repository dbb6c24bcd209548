"""The octavo-simulator command."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from octavo.simulator.report import print_failure, print_summary
from octavo.simulator.seeds import SeedFailure, Summary, run_seeds, silence_logs, try_seed
from octavo.simulator.soak import run_soak

MAX_FAILURES = 20
"""A run ends after so many."""


app = typer.Typer(add_completion=False)


@app.command()
def simulate(
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds to run.")] = 2000,
    first: Annotated[int, typer.Option(help="The first of them; the others follow.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that run them.")] = 2,
    seed: Annotated[int | None, typer.Option(help="Run this one seed, in this process.")] = None,
    soak: Annotated[
        float | None, typer.Option(help="Run one cluster, drawn from --first, for so many seconds of virtual time.")
    ] = None,
    trace: Annotated[bool, typer.Option("--trace", help="With --seed: print every message as it arrives.")] = False,
) -> None:
    """Run scheduler and KV manager with scripted gateways and workers in virtual time, under faults drawn from a seed.

    Exit status 1 if a seed finds a fault.
    """
    if soak is not None:
        failed = _run_soak(first, soak)
    else:
        failed = _run_one(seed, trace=trace) if seed is not None else _run_many(range(first, first + seeds), jobs)
    raise typer.Exit(1 if failed else 0)


def _run_one(seed: int, *, trace: bool) -> bool:
    silence_logs()
    began = time.monotonic()
    outcome = try_seed(seed, print if trace else None)
    console = Console()
    if isinstance(outcome, SeedFailure):
        print_failure(console, outcome, with_traceback=True)
        return True
    summary = Summary()
    summary.add(outcome)
    print_summary(console, summary, time.monotonic() - began)
    return False


def _run_soak(seed: int, virtual_s: float) -> bool:
    silence_logs()
    console, began = Console(), time.monotonic()
    try:
        for part in run_soak(seed, virtual_s):
            console.print(
                f"{part.virtual_s:,.0f} s in {time.monotonic() - began:,.0f} s: {part.num_steps:,} steps,"
                f" {part.num_requests:,} requests, {part.num_faults:,} faults; nothing left,"
                f" {part.num_objects:,} objects",
                soft_wrap=True,
            )
    except Exception:
        console.print_exception()
        return True
    return False


def _run_many(seeds: range, num_jobs: int) -> bool:
    began = time.monotonic()
    summary = Summary()
    console = Console()
    columns = (
        TextColumn("seeds"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[failed]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(seeds), failed="")
        for outcome in run_seeds(seeds, num_jobs, MAX_FAILURES):
            summary.add(outcome)
            failed = f"{len(summary.failures)} failed" if summary.failures else ""
            progress.update(task, advance=1, failed=failed)
    print_summary(console, summary, time.monotonic() - began)
    return bool(summary.failures)


def main() -> None:
    app()
