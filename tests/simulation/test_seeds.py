"""The seeded simulator: some seeds hold, a seed replays exactly, and a seed that fails says how to replay it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from typer.testing import CliRunner

from octavo.common.messages.kv import KvReply, KvRequest
from octavo.kvmanager.pool import Pool
from octavo.simulator import main
from octavo.simulator.seeds import SeedFailure, Summary, run_seeds, silence_logs, try_seed
from octavo.simulator.simulation import MIN_FAULTS, MIN_REQUESTS, MIN_STEPS, SeedReport, run_seed
from octavo.simulator.soak import run_soak
from octavo.simulator.tally import FAULTS, RULES

NUM_SEEDS = 80
"""CI runs thousands by `make simulate`."""


@pytest.fixture(autouse=True)
def silent_logs() -> Iterator[None]:
    silence_logs()
    yield
    structlog.reset_defaults()


def test_seeds_hold_and_between_them_put_every_fault_and_every_rule_to_use() -> None:
    summary = Summary()
    for outcome in run_seeds(range(1, NUM_SEEDS + 1), num_jobs=2):
        summary.add(outcome)
        if isinstance(outcome, SeedReport):
            assert outcome.num_steps >= MIN_STEPS == 300
            assert outcome.num_requests >= MIN_REQUESTS == 20
            assert outcome.num_faults >= MIN_FAULTS == 3
    assert [(failure.error, failure.replay_command) for failure in summary.failures] == []
    assert summary.num_seeds == NUM_SEEDS
    assert [name for name in (*FAULTS, *RULES) if not summary.counts[name]] == []


def test_a_seed_replays_exactly() -> None:
    runs: list[list[str]] = []
    for _ in range(2):
        lines: list[str] = []
        run_seed(5, lines.append)
        runs.append(lines)
    assert len(runs[0]) > 1000
    assert runs[0] == runs[1]


def test_a_failing_seed_prints_its_error_and_the_command_that_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A manager that forgets every second credit: no such manager exists, so one is made here."""
    apply = Pool.apply

    def apply_without_some_credits(pool: Pool, request: KvRequest) -> KvReply:
        reply = apply(pool, request)
        del reply.credits[1:]
        return reply

    monkeypatch.setattr(Pool, "apply", apply_without_some_credits)
    failures = [outcome for seed in range(1, 6) if isinstance(outcome := try_seed(seed), SeedFailure)]
    assert failures
    shown = CliRunner().invoke(main.app, ["--seed", str(failures[0].seed)])
    assert shown.exit_code == 1
    assert f"seed {failures[0].seed} failed" in shown.output
    assert f"octavo-simulator --seed {failures[0].seed} --trace" in shown.output


def test_a_seed_that_holds_is_traced_message_by_message() -> None:
    shown = CliRunner().invoke(main.app, ["--seed", "3", "--trace"])
    assert shown.exit_code == 0
    assert re.search(r"^ +\d+\.\d{6}  to worker +StepPlan\(step_id=1,", shown.output, re.MULTILINE)
    assert re.search(r"== fault: ", shown.output)


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_seed(1)
    assert list(tmp_path.iterdir()) == []


def test_nothing_grows_while_one_cluster_runs_for_long() -> None:
    """Five minutes of virtual time; `octavo-simulator --soak 3600` runs an hour."""
    parts = list(run_soak(seed=3, virtual_s=300))
    assert parts[-1].virtual_s >= 300
    assert parts[-1].num_steps > 3_000
    assert parts[-1].num_faults > 50
    sizes = [part.num_objects for part in parts[2:]]
    assert max(sizes[5:]) < 1.05 * max(sizes[:5]), sizes
