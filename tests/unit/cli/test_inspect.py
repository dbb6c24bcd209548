"""`octavo inspect`, and how it finds a server."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo.cli.inspect import InspectSettings, run_inspect, run_why
from octavo.cli.main import app
from octavo.cli.run_files import RunningServer, registered, running_servers
from octavo.common.codecs.kv import KV_STEPS
from octavo.common.links import Address, Link, listen, local_pair
from octavo.common.messages.kv import (
    Admission,
    KvManagerReply,
    KvManagerRequest,
    KvRequest,
    OpenPool,
    Publication,
)
from octavo.kvmanager.config import KvManagerConfig
from octavo.kvmanager.server import KvManagerServer
from octavo.kvmanager.servicer import KvManagerServicer
from support.explanations import EXPLANATION
from support.lively_services import LivelyPool, LivelyServices, lively_services, request_id_of


@pytest.fixture(autouse=True)
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def kvmanager(tmp_path: Path) -> Iterator[str]:
    """A KV manager with two sequences that share two blocks; the address of its calls."""
    address = Address("grpc+unix", str(tmp_path / "kv.sock"))
    ready, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        server = KvManagerServer(KvManagerConfig().pool_settings, boot_epoch=7)
        listener = await listen([address], KV_STEPS, server.accept, [KvManagerServicer(server).add_to])
        scheduler: Link[KvManagerRequest, KvManagerReply]
        scheduler, manager = local_pair()
        server.accept(manager)
        scheduler.send(OpenPool("group-0", 1, 1, num_blocks=10, block_size=16))
        scheduler.send(KvRequest(1, 0, admissions=[Admission(3, tuple(range(40)))]))
        scheduler.send(KvRequest(2, 0, publications=[Publication(3, 40)]))
        scheduler.send(KvRequest(3, 0, admissions=[Admission(4, tuple(range(40)))]))
        await asyncio.sleep(0.05)
        ready.set()
        await asyncio.to_thread(stop.wait)
        await listener.close(0.1)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    ready.wait(10)
    yield str(address)
    stop.set()
    thread.join()


def test_a_pool_is_shown(kvmanager: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_inspect(InspectSettings(kvmanager=kvmanager)) == 0
    shown = capsys.readouterr().out
    for part in ("pool group-0: 10 blocks of 16 tokens", "active 4", "2 by 2", "2 tables", "the ledger adds up"):
        assert part in shown
    assert "2 blocks from 0, held by 2" in shown


def test_everything_is_in_the_json(kvmanager: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_inspect(InspectSettings(kvmanager=kvmanager, pool_id="group-0", as_json=True)) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["states"] == ["active"] * 4 + ["free"] * 6
    assert shown["ref_counts"] == [2, 2, 1, 1] + [0] * 6
    assert [table["sequence_id"] for table in shown["tables"]] == [3, 4]
    assert [(node["block_id"], node["parent_id"]) for node in shown["prefixes"]] == [(0, -1), (1, 0)]
    assert shown["violations"] == []


def test_the_running_server_is_found(kvmanager: str, capsys: pytest.CaptureFixture[str]) -> None:
    with registered(RunningServer(os.getpid(), "http://x", kvmanager, "grpc://y:1")):
        assert run_inspect(InspectSettings()) == 0
    assert running_servers() == []
    assert run_inspect(InspectSettings()) == 1
    assert "no running `octavo serve` was found" in capsys.readouterr().err


def test_of_several_servers_one_is_named_by_its_url(kvmanager: str, capsys: pytest.CaptureFixture[str]) -> None:
    away = RunningServer(os.getppid(), "http://x:2", "grpc://127.0.0.1:1", "grpc://127.0.0.1:1")
    with registered(RunningServer(os.getpid(), "http://x:1", kvmanager, "grpc://y:1")), registered(away):
        assert run_inspect(InspectSettings(url="http://x:1/")) == 0
        assert "pool group-0: " in capsys.readouterr().out
        assert run_inspect(InspectSettings(url="http://x:3")) == 1
        assert "http://x:3; there is http://x:2, http://x:1" in capsys.readouterr().err
        assert run_inspect(InspectSettings(url="http://x:2")) == 1
        assert "cannot be asked" in capsys.readouterr().err


def test_of_several_groups_one_is_shown(kvmanager: str, capsys: pytest.CaptureFixture[str]) -> None:
    away = "grpc://127.0.0.1:1"
    groups = {"group-1": [away, away], "group-0": [kvmanager, away]}
    with registered(RunningServer(os.getpid(), "http://x", away, away, groups)):
        assert run_inspect(InspectSettings(pool_id="group-0")) == 0
        assert "pool group-0: " in capsys.readouterr().out
        assert run_inspect(InspectSettings(pool_id="group-0", as_json=True)) == 0
        absent, present = json.loads(capsys.readouterr().out)["groups"]
        assert (absent["pool_id"], absent["figures"], absent["away"]) == ("group-1", None, ["KV manager", "scheduler"])
        assert (present["pool_id"], present["queues"], present["away"]) == ("group-0", None, ["scheduler"])
        assert present["figures"]["counts"]["active"] == 4
        assert (present["figures"]["num_hit_tokens"], present["figures"]["num_lookup_tokens"]) == (32, 80)
        assert run_inspect(InspectSettings(pool_id="group-2")) == 1
        assert "it has group-1, group-0" in capsys.readouterr().err
        assert run_inspect(InspectSettings()) == 1, "the first one is away"


def test_files_of_dead_servers_are_removed(tmp_path: Path) -> None:
    dead = RunningServer(2**22 + 1, "http://x", "grpc://y:1", "grpc://z:1")
    context = registered(dead)
    context.__enter__()
    assert len(list((tmp_path / "octavo").iterdir())) == 1
    assert running_servers() == []
    assert list((tmp_path / "octavo").iterdir()) == []


@pytest.mark.parametrize(("address", "pool"), [("grpc+unix:///nowhere/x", ""), ("http://x", "")])
def test_what_cannot_be_asked_is_said(address: str, pool: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_inspect(InspectSettings(kvmanager=address, pool_id=pool)) == 1
    assert capsys.readouterr().err


def test_groups_are_shown_side_by_side(lively: LivelyServices, capsys: pytest.CaptureFixture[str]) -> None:
    where = addresses(lively)
    pair, away = [where["kvmanager"], where["scheduler"]], "grpc://127.0.0.1:1"
    groups = {"default": pair, "other": [away, away]}
    with registered(RunningServer(os.getpid(), "http://x", *pair, groups)):
        assert run_inspect(InspectSettings()) == 0
    lines = capsys.readouterr().out.splitlines()
    [shown] = [line for line in lines if "▸ default" in line]
    stats = lively.pool.pool.stats
    for part in ("4 of 512", "9", f"{stats.num_prefix_hit_tokens / stats.num_prefix_lookup_tokens:.0%}"):
        assert part in shown
    assert any("other" in line and "KV manager" in line for line in lines)


@pytest.fixture
def lively(tmp_path: Path) -> Iterator[LivelyServices]:
    """A KV manager and a scheduler with four running sequences and nine that wait."""
    found: list[LivelyServices] = []
    ready, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        pool = LivelyPool(num_blocks=200, num_sequences=4, prompt_blocks=20, shared_blocks=6)
        async with lively_services(tmp_path, pool, tick_s=3600) as services:
            found.append(services)
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    ready.wait(10)
    yield found[0]
    stop.set()
    thread.join()


def addresses(services: LivelyServices) -> dict[str, str]:
    targets = {name.removesuffix("_admin"): target for name, target in services.targets.items()}
    return {name: target.replace("unix:", "grpc+unix://") for name, target in targets.items()}


def test_queues_sequences_and_steps_are_shown(lively: LivelyServices, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_inspect(InspectSettings(**addresses(lively))) == 0
    shown = capsys.readouterr().out
    for part in ("running 4 of 512 slots", "waiting 7", "waiting for a shared prefix 2", "steps", "worker busy"):
        assert part in shown
    pool = lively.pool.pool
    counts = pool.counts()
    assert f"{counts.active} active, {counts.cached} cached, of 200" in shown
    first_lines = shown.splitlines()[1:4]
    assert sum(line.count("·") for line in first_lines) == counts.free
    longest = max(pool.tables, key=lambda entry: len(entry[1].block_ids))[0]
    assert request_id_of(longest)[:12] in shown


def test_the_json_has_what_the_scheduler_tells(lively: LivelyServices, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_inspect(InspectSettings(**addresses(lively), as_json=True)) == 0
    activity = json.loads(capsys.readouterr().out)["activity"]
    assert activity["queues"]["running"] == 4
    waiting = [one for one in activity["sequences"] if one["state"] == "waiting"]
    assert [one["waits_for"] for one in waiting].count("in_flight_prefix") == 2
    running = {one["sequence_id"]: one["request_id"] for one in activity["sequences"] if one["state"] == "running"}
    assert running == {sequence_id: request_id_of(sequence_id) for sequence_id in lively.pool.lengths}


def test_a_scheduler_that_is_away_leaves_the_pool_to_be_seen(
    kvmanager: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with registered(RunningServer(os.getpid(), "http://x", kvmanager, f"grpc+unix://{tmp_path}/gone.sock")):
        assert run_inspect(InspectSettings()) == 0
    shown = capsys.readouterr().out
    assert "2 tables" in shown and "the scheduler does not answer" in shown


def test_why_is_said_in_words(lively: LivelyServices, capsys: pytest.CaptureFixture[str]) -> None:
    settings = InspectSettings(**addresses(lively))
    lively.scheduler.explanations["r-1"] = EXPLANATION
    assert run_why(settings, "r-1") == 0
    shown = capsys.readouterr().out
    for part in ("request r-1", "first token after 1.50 s", "no blocks", "1.25 s", "evicted", "which cost 12.0 ms"):
        assert part in shown
    assert run_why(replace(settings, as_json=True), "chatcmpl-r-1") == 0, "by the id of its answer"
    assert json.loads(capsys.readouterr().out) == EXPLANATION
    assert run_why(settings, "r-2") == 1
    assert "'r-2' is unknown" in capsys.readouterr().err


def test_why_is_asked_of_the_schedulers_of_all_groups(
    lively: LivelyServices, capsys: pytest.CaptureFixture[str]
) -> None:
    away, where = "grpc://127.0.0.1:1", addresses(lively)
    lively.scheduler.explanations["r-1"] = EXPLANATION
    groups = {"first": [away, away], "second": [where["kvmanager"], where["scheduler"]]}
    with registered(RunningServer(os.getpid(), "http://x", away, away, groups)):
        assert run_why(InspectSettings(), "r-1") == 0
        assert "request r-1" in capsys.readouterr().out
        assert run_why(InspectSettings(), "r-2") == 1
        assert "cannot be asked" in capsys.readouterr().err, "the first one may know it"
        assert run_why(InspectSettings(pool_id="second"), "r-2") == 1
        assert "'r-2' is unknown" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--watch", "1", "--json"], ["--watch", "1", "--why", "x"]])
def test_options_that_go_not_together_are_refused(options: list[str]) -> None:
    result = CliRunner().invoke(app, ["inspect", *options])
    assert result.exit_code == 2
    assert "--watch" in result.stderr
