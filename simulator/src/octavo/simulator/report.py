"""What many seeds did, as tables for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from octavo.simulator.seeds import SeedFailure, Summary
from octavo.simulator.tally import EVENTS, FAULTS, RULES


def print_summary(console: Console, summary: Summary, elapsed_s: float) -> None:
    """How often each fault, event and rule was exercised, and in how many seeds."""
    table = Table(title="What the seeds went through")
    table.add_column("what")
    table.add_column("times", justify="right")
    table.add_column("seeds", justify="right")
    for title, names in [("faults", FAULTS), ("events", EVENTS), ("rules", RULES)]:
        table.add_section()
        table.add_row(f"[bold]{title}[/bold]")
        for name in names:
            table.add_row(f"  {name}", f"{summary.counts[name]:,}", f"{summary.num_seeds_with[name]:,}")
    console.print(table)
    console.print(
        f"{summary.num_seeds:,} seeds, {summary.num_steps:,} steps (at least {summary.min_steps or 0:,} a seed),"
        f" {summary.num_requests:,} requests, {summary.num_faults:,} faults, {summary.num_deliveries:,} messages,"
        f" {summary.virtual_s:,.0f} s of virtual time in {elapsed_s:,.0f} s"
    )
    for failure in sorted(summary.failures, key=lambda failure: failure.seed):
        print_failure(console, failure)


def print_failure(console: Console, failure: SeedFailure, *, with_traceback: bool = False) -> None:
    """The error, and the command that brings it again."""
    console.print(f"[bold red]seed {failure.seed} failed[/bold red]: ", end="")
    console.print(failure.traceback if with_traceback else failure.error, markup=False, highlight=False)
    console.print(f"  replay: {failure.replay_command}", markup=False, highlight=False)
