"""`octavo inspect`, and how it finds a server."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.cli.inspect import run_inspect
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
    assert run_inspect(kvmanager, "", as_json=False) == 0
    shown = capsys.readouterr().out
    for part in ("pool group-0: 10 blocks of 16 tokens", "active 4", "2 by 2", "2 tables", "the ledger adds up"):
        assert part in shown
    assert "2 blocks from 0, held by 2" in shown


def test_everything_is_in_the_json(kvmanager: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_inspect(kvmanager, "group-0", as_json=True) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["states"] == ["active"] * 4 + ["free"] * 6
    assert shown["ref_counts"] == [2, 2, 1, 1] + [0] * 6
    assert [table["sequence_id"] for table in shown["tables"]] == [3, 4]
    assert [(node["block_id"], node["parent_id"]) for node in shown["prefixes"]] == [(0, -1), (1, 0)]
    assert shown["violations"] == []


def test_the_running_server_is_found(kvmanager: str, capsys: pytest.CaptureFixture[str]) -> None:
    with registered(RunningServer(os.getpid(), "http://x", kvmanager, "grpc://y:1")):
        assert run_inspect(None, "", as_json=False) == 0
    assert running_servers() == []
    assert run_inspect(None, "", as_json=False) == 1
    assert "no running `octavo serve` was found" in capsys.readouterr().err


def test_files_of_dead_servers_are_removed(tmp_path: Path) -> None:
    dead = RunningServer(2**22 + 1, "http://x", "grpc://y:1", "grpc://z:1")
    context = registered(dead)
    context.__enter__()
    assert len(list((tmp_path / "octavo").iterdir())) == 1
    assert running_servers() == []
    assert list((tmp_path / "octavo").iterdir()) == []


@pytest.mark.parametrize(("address", "pool"), [("grpc+unix:///nowhere/x", ""), ("http://x", "")])
def test_what_cannot_be_asked_is_said(address: str, pool: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_inspect(address, pool, as_json=False) == 1
    assert capsys.readouterr().err
