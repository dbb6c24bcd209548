"""The service as a process sees it: settings, sockets, unary calls and metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from octavo.common.admin import AdminServicer
from octavo.common.codecs.arrays import unpack_int32, unpack_int64
from octavo.common.codecs.kv import KV_STEPS
from octavo.common.links import Address, Link, connect, listen, local_pair
from octavo.common.messages.kv import (
    Admission,
    KvManagerReply,
    KvManagerRequest,
    KvReply,
    KvRequest,
    OpenPool,
    Publication,
)
from octavo.kvmanager.config import KvManagerConfig
from octavo.kvmanager.metrics import KvMetrics
from octavo.kvmanager.server import KvManagerServer
from octavo.kvmanager.servicer import KvManagerServicer
from octavo.v1 import admin_service_pb2, admin_service_pb2_grpc, kvmanager_service_pb2, kvmanager_service_pb2_grpc


def test_settings_reach_the_pools() -> None:
    config = KvManagerConfig.from_command_line(
        ["--listen", "frames:///run/a.sock", "--watermark", "0.05", "--hash-secret", "s3cret", "--check-ledger", "true"]
    )
    assert config.listen == [Address("frames", "/run/a.sock")]
    assert (config.pool_settings.watermark, config.pool_settings.hash_secret) == (0.05, b"s3cret")
    assert config.check_ledger
    assert "s3cret" not in repr(config)


@pytest.mark.parametrize("arguments", [["--watermark", "1"], ["--listen", "http://x"], ["--block-size", "16"]])
def test_settings_that_do_not_fit_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        KvManagerConfig.from_command_line(arguments)
    assert capsys.readouterr().err


@pytest.mark.parametrize("scheme", ["frames", "grpc+unix"])
async def test_a_pool_is_driven_and_inspected_over_sockets(scheme: str, tmp_path: Path) -> None:
    server = KvManagerServer(KvManagerConfig().pool_settings, boot_epoch=7)
    steps, unary = Address(scheme, str(tmp_path / "steps")), Address("grpc+unix", str(tmp_path / "unary"))
    listener = await listen(
        [steps, unary],
        KV_STEPS,
        server.accept,
        [KvManagerServicer(server).add_to, AdminServicer(health=lambda: "").add_to],
    )
    link = await connect(steps, KV_STEPS, timeout_s=10)
    replies: asyncio.Queue[KvManagerReply] = asyncio.Queue()
    link.bind(replies.put_nowait, lambda error: None)
    link.send(OpenPool("group-0", 1, 1, num_blocks=8, block_size=16))
    link.send(KvRequest(1, 0, admissions=[Admission(1, tuple(range(40)))], credit_target=2))
    await replies.get()
    reply = await replies.get()
    assert isinstance(reply, KvReply)
    assert reply.admitted[0].block_ids == (0, 1, 2)
    assert reply.credits == [(3, 1), (4, 1)]

    async with grpc.aio.insecure_channel(unary.grpc_target) as channel:
        manager = kvmanager_service_pb2_grpc.KvManagerServiceStub(channel)
        found = await manager.InspectPool(kvmanager_service_pb2.InspectPoolRequest())
        assert (found.pool_id, found.num_sequences, found.counts.active) == ("group-0", 1, 3)
        assert not found.violations
        with pytest.raises(grpc.aio.AioRpcError, match="no pool 'group-7' is open") as missing:
            await manager.InspectPool(kvmanager_service_pb2.InspectPoolRequest(pool_id="group-7"))
        assert missing.value.code() is grpc.StatusCode.NOT_FOUND
        admin = admin_service_pb2_grpc.AdminServiceStub(channel)
        assert (await admin.GetHealth(admin_service_pb2.GetHealthRequest())).ready
    link.close()
    await listener.close(1)


def test_metrics_show_blocks_hits_evictions_and_verdicts() -> None:
    server = KvManagerServer(KvManagerConfig().pool_settings, boot_epoch=7)
    registry = CollectorRegistry()
    registry.register(KvMetrics(server))
    assert b"octavo_kv_blocks{" not in generate_latest(registry)
    server.stats.num_prefix_lookup_tokens, server.stats.num_prefix_hit_tokens = 100, 48
    server.stats.num_evictions = 3
    exposition = generate_latest(registry).decode()
    assert "octavo_prefix_lookup_tokens_total 100.0" in exposition
    assert "octavo_prefix_hit_tokens_total 48.0" in exposition
    assert "octavo_evictions_total 3.0" in exposition
    assert 'octavo_admissions_total{verdict="later"} 0.0' in exposition


async def test_metrics_count_blocks_by_state() -> None:
    server = KvManagerServer(KvManagerConfig().pool_settings, boot_epoch=7)
    registry = CollectorRegistry()
    registry.register(KvMetrics(server))
    scheduler: Link[KvManagerRequest, KvManagerReply]
    scheduler, manager = local_pair()
    server.accept(manager)
    scheduler.send(OpenPool("group-0", 1, 1, num_blocks=8, block_size=16))
    scheduler.send(KvRequest(1, 0, admissions=[Admission(1, tuple(range(40)))], credit_target=2))
    await asyncio.sleep(0.01)
    for state, count in {"free": 3, "granted": 2, "active": 3, "cached": 0, "quarantined": 0}.items():
        assert registry.get_sample_value("octavo_kv_blocks", {"pool": "group-0", "state": state}) == count


async def test_a_pool_is_looked_at_and_watched_by_calls(tmp_path: Path) -> None:
    server = KvManagerServer(KvManagerConfig().pool_settings, boot_epoch=7)
    unary = Address("grpc+unix", str(tmp_path / "unary"))
    listener = await listen([unary], KV_STEPS, server.accept, [KvManagerServicer(server).add_to])
    scheduler: Link[KvManagerRequest, KvManagerReply]
    scheduler, manager = local_pair()
    server.accept(manager)
    scheduler.send(OpenPool("group-0", 1, 1, num_blocks=8, block_size=16))
    scheduler.send(KvRequest(1, 0, admissions=[Admission(3, tuple(range(40)))], credit_target=2))
    await asyncio.sleep(0.01)
    async with grpc.aio.insecure_channel(unary.grpc_target) as channel:
        stub = kvmanager_service_pb2_grpc.KvManagerServiceStub(channel)
        events = stub.WatchEvents(kvmanager_service_pb2.WatchEventsRequest())
        snapshot = await events.read()
        assert (snapshot.is_snapshot, len(snapshot.events), snapshot.life) == (True, 0, (7 << 16) + 1)
        scheduler.send(KvRequest(2, 0, publications=[Publication(3, 40)]))
        batch = await events.read()
        assert [(event.block_id, len(event.digest)) for event in batch.events] == [(0, 32), (1, 32)]
        assert batch.events[1].parent_digest == batch.events[0].digest
        events.cancel()
        blocks = await stub.GetPoolMap(kvmanager_service_pb2.GetPoolMapRequest())
        assert blocks.states == bytes([2, 2, 2, 1, 1, 0, 0, 0])
        assert unpack_int64(blocks.owners) == [3, 3, 3, 0, 0, 0, 0, 0]
        tables = await stub.ListTables(kvmanager_service_pb2.ListTablesRequest())
        assert [(table.sequence_id, table.num_known_tokens) for table in tables.tables] == [(3, 40)]
        assert not tables.has_more
        prefixes = await stub.ListPrefixes(kvmanager_service_pb2.ListPrefixesRequest())
        assert (unpack_int32(prefixes.block_ids), unpack_int32(prefixes.parent_ids)) == ([0, 1], [-1, 0])
        assert prefixes.next_block == 0
        with pytest.raises(grpc.aio.AioRpcError, match="no pool 'group-7' is open"):
            await stub.GetPoolMap(kvmanager_service_pb2.GetPoolMapRequest(pool_id="group-7"))
    await listener.close(1)
