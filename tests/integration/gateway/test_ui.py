"""The page's files, who may look, and the live stream as bytes."""

from __future__ import annotations

import asyncio
import json
import struct
import zlib
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from octavo.common.messages.generation import SchedulerLoad
from octavo.gateway.api_keys import KeyBook, Tenant
from octavo.gateway.live_frames import BLOCKS, HEADER, JSON
from octavo.gateway.live_hub import MAX_QUEUED_FRAMES, MAX_WATCHERS, _Watcher
from support.lively_services import LivelyPool, LivelyServices, lively_groups, lively_services
from support.running_gateway import RunningGateway, running_gateway, says
from support.waiting import eventually


@asynccontextmanager
async def lively_gateway(
    folder: Path, num_blocks: int = 200, tick_s: float = 3600, **settings: Any
) -> AsyncIterator[tuple[RunningGateway, LivelyServices]]:
    pool = LivelyPool(num_blocks=num_blocks, num_sequences=5, prompt_blocks=20, shared_blocks=6)
    async with (
        lively_services(folder, pool, tick_s) as services,
        running_gateway(says("hi"), **{**services.targets, **settings}) as gateway,
    ):
        yield gateway, services


class Viewer:
    """Reads a live stream as the page does, and keeps what it would draw."""

    def __init__(self, response: httpx.Response) -> None:
        self.messages: list[dict[str, Any]] = []
        self.blocks: dict[int, tuple[int, ...]] = {}
        """block |-> generation, parent, parent's generation, references, state"""
        self.tables: dict[int, list[int]] = {}
        self.num_bytes = 0
        self._chunks = response.aiter_raw()
        self._rest = b""

    def of_type(self, name: str) -> list[dict[str, Any]]:
        return [message for message in self.messages if message["type"] == name]

    async def read_until(self, is_enough: Callable[[], bool]) -> None:
        async with asyncio.timeout(8):
            while not is_enough():
                chunk = await anext(self._chunks)
                self.num_bytes += len(chunk)
                self._rest += chunk
                self._take_frames()

    def _take_frames(self) -> None:
        while len(self._rest) >= HEADER.size:
            length, kind, is_compressed = HEADER.unpack_from(self._rest)
            if len(self._rest) < HEADER.size + length:
                return
            payload, self._rest = self._rest[HEADER.size : HEADER.size + length], self._rest[HEADER.size + length :]
            payload = zlib.decompress(payload) if is_compressed else payload
            if kind == JSON:
                self._take_message(json.loads(payload))
            else:
                assert kind == BLOCKS
                self._take_blocks(payload)

    def _take_message(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        if message["type"] != "pool":
            return
        if message["is_first"]:
            self.blocks, self.tables = {}, {}
        for sequence_id, num_kept, blocks, *_ in message["tables"]:
            self.tables[sequence_id] = self.tables.get(sequence_id, [])[:num_kept] + blocks
        for sequence_id in message["gone"]:
            del self.tables[sequence_id]

    def _take_blocks(self, payload: bytes) -> None:
        length, first = struct.unpack_from("<ii", payload)
        numbers = array("i", payload[8 : len(payload) - length])
        columns = [list(numbers[at : at + length]) for at in range(0, len(numbers), length)]
        ids = columns.pop(0) if first < 0 else list(range(first, first + length))
        states = list(payload[len(payload) - length :])
        self.blocks.update(zip(ids, zip(*columns, states, strict=True), strict=True))


def assert_same(viewer: Viewer, services: LivelyServices) -> None:
    pool = services.pool.pool
    for block_id in range(pool.blocks.num_blocks):
        generation, _, _, ref_count, state = viewer.blocks.get(block_id, (0, -2, 0, 0, 0))
        truth = (pool.blocks.generations[block_id], pool.blocks.ref_counts[block_id], pool.blocks.states[block_id])
        assert (generation, ref_count, state) == truth
    assert viewer.tables == {sequence_id: table.block_ids for sequence_id, table in pool.tables}


async def test_a_viewer_sees_the_pool_and_what_changes_and_so_does_one_that_comes_later(tmp_path: Path) -> None:
    async with (
        lively_gateway(tmp_path, ui_update_interval_s=0.1) as (gateway, services),
        gateway.http.stream("GET", "/ui/api/stream") as response,
    ):
        assert response.headers["content-type"] == "application/octet-stream"
        viewer = Viewer(response)
        await viewer.read_until(lambda: bool(viewer.blocks))
        [message] = viewer.of_type("pool")
        assert (message["num_blocks"], message["block_size"]) == (200, 16)
        assert_same(viewer, services)
        for _ in range(3):
            services.pool.tick()
        num_seen = len(viewer.of_type("pool"))
        await viewer.read_until(lambda: len(viewer.of_type("pool")) >= num_seen + 3)
        assert_same(viewer, services)
        async with gateway.http.stream("GET", "/ui/api/stream") as later:
            newcomer = Viewer(later)
            await newcomer.read_until(lambda: bool(newcomer.blocks and newcomer.of_type("activity")))
        assert_same(newcomer, services)
        assert newcomer.of_type("pool")[0]["is_first"] and newcomer.of_type("activity")[0]["is_first"]
        assert newcomer.of_type("activity")[0]["queues"]["running"] == len(services.pool.lengths)
        assert len(viewer.of_type("hello")) == 1


async def test_a_pool_of_many_blocks_comes_compressed(tmp_path: Path) -> None:
    async with lively_gateway(tmp_path, num_blocks=20_000) as (gateway, services):
        services.pool.pool.blocks.generations[:] = array("i", [7]) * 20_000
        async with gateway.http.stream("GET", "/ui/api/stream") as response:
            viewer = Viewer(response)
            await viewer.read_until(lambda: len(viewer.blocks) == 20_000)
        assert viewer.num_bytes < 20_000 * 2
        assert {block[0] for block in viewer.blocks.values()} == {7}


async def test_who_may_look(tmp_path: Path) -> None:
    async with lively_gateway(tmp_path, admin_key="s3cret") as (gateway, _):
        for path in ("/ui/api/stream", "/ui/api/requests/x/why"):
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}):
                refused = await gateway.http.get(path, headers=headers)
                assert refused.status_code == 401
                assert refused.json()["error"]["code"] == "admin_key_required"
        assert (await gateway.http.get("/ui/")).status_code == 200
        right = {"authorization": "Bearer s3cret"}
        assert (await gateway.http.get("/ui/api/requests/x/why", headers=right)).status_code == 404
        async with gateway.http.stream("GET", "/ui/api/stream", headers=right) as response:
            assert response.status_code == 200


async def test_without_a_key_only_this_machine_may_look(tmp_path: Path) -> None:
    async with lively_gateway(tmp_path) as (gateway, _):
        foreign = await gateway.http.get("/ui/api/requests/x/why", headers={"host": "rebound.example:8000"})
        assert foreign.status_code == 403
        assert "OCTAVO_GATEWAY_ADMIN_KEY" in foreign.json()["error"]["message"]
        for host in ("localhost:8000", "[::1]:8000", "127.0.0.1"):
            assert (await gateway.http.get("/ui/api/requests/x/why", headers={"host": host})).status_code == 404
    async with running_gateway(says("hi"), host="0.0.0.0", scheduler_admin="unused:1") as gateway:
        assert (await gateway.http.get("/ui/api/requests/x/why")).status_code == 403


async def test_where_api_keys_are_asked_for_operators_may_look(tmp_path: Path) -> None:
    book, operators = KeyBook().with_key("boss", Tenant(operator=True))
    book, tenants = book.with_key("acme", Tenant())
    async with lively_gateway(tmp_path, host="0.0.0.0", api_keys=book.text()) as (gateway, _):
        for key, status in (("", 401), (tenants, 403), (operators, 404)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            assert (await gateway.http.get("/ui/api/requests/x/why", headers=headers)).status_code == status
            assert (await gateway.http.get("/ui/", headers=headers)).status_code == 200
            assert (await gateway.http.get("/ui/js/main.js", headers=headers)).status_code == 200


async def test_files_of_the_page_and_no_others() -> None:
    async with running_gateway(says("hi")) as gateway:
        moved = await gateway.http.get("/ui")
        assert (moved.status_code, moved.headers["location"]) == (308, "/ui/")
        page = await gateway.http.get("/ui/")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert "http" not in page.text.replace("http-equiv", "")
        again = await gateway.http.get("/ui/", headers={"if-none-match": page.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        script = await gateway.http.get("/ui/js/main.js")
        assert script.headers["content-type"] == "text/javascript; charset=utf-8"
        for path in ("/ui/../config.py", "/ui/%2e%2e/config.py", "/ui/js", "/ui/js/../../app.py", "/ui/none.js"):
            assert (await gateway.http.get(path)).status_code == 404
    async with running_gateway(says("hi"), ui=False) as gateway:
        for path in ("/ui", "/ui/", "/ui/api/stream"):
            assert (await gateway.http.get(path)).status_code == 404


async def test_a_service_that_is_away_is_named_and_shown_once_it_is_there(tmp_path: Path) -> None:
    targets = {"scheduler_admin": f"unix:{tmp_path}/scheduler.sock", "kvmanager_admin": None}
    pool = LivelyPool(num_blocks=50, num_sequences=1, prompt_blocks=10, shared_blocks=2)
    async with (
        running_gateway(says("hi"), **targets) as gateway,
        gateway.http.stream("GET", "/ui/api/stream") as response,
    ):
        viewer = Viewer(response)
        await viewer.read_until(lambda: len(viewer.of_type("away")) == 2)
        reasons = {one["service"]: one["reason"] for one in viewer.of_type("away")}
        assert "OCTAVO_GATEWAY_KVMANAGER_ADMIN" in reasons["kvmanager"]
        assert reasons["scheduler"]
        async with lively_services(tmp_path, pool, 3600):
            await viewer.read_until(lambda: bool(viewer.of_type("activity")))
        assert viewer.of_type("activity")[0]["is_first"]


async def test_streams_are_bounded_and_end_with_the_gateway(tmp_path: Path) -> None:
    async with lively_gateway(tmp_path) as (gateway, _):
        streams = [gateway.http.stream("GET", "/ui/api/stream") for _ in range(MAX_WATCHERS)]
        opened = [await stream.__aenter__() for stream in streams]
        assert {response.status_code for response in opened} == {200}
        assert (await gateway.http.get("/ui/api/stream")).status_code == 429
        gateway.stop.request()
        async with asyncio.timeout(3):
            await gateway.serving
        for stream in streams:
            await stream.__aexit__(None, None, None)


async def test_a_viewer_that_reads_too_slowly_is_shown_everything_anew() -> None:
    watcher = _Watcher("default")
    assert watcher.is_behind
    watcher.restart([b"all"])
    assert await watcher.take(0.1) == [b"all"]
    for number in range(MAX_QUEUED_FRAMES + 1):
        assert not watcher.is_behind
        watcher.tell([b"%d" % number])
    assert watcher.is_behind
    watcher.tell([b"lost"])
    assert await watcher.take(0.1) == []
    watcher.restart([b"all again"])
    watcher.tell([b"next"])
    assert await watcher.take(0.1) == [b"all again", b"next"]


async def test_nothing_is_followed_while_nobody_looks(tmp_path: Path) -> None:
    async with lively_gateway(tmp_path, ui_update_interval_s=0.1) as (gateway, services):
        assert services.kvmanager._num_pool_watchers == 0
        async with gateway.http.stream("GET", "/ui/api/stream") as response:
            viewer = Viewer(response)
            await viewer.read_until(lambda: bool(viewer.of_type("pool")))
            assert services.kvmanager._num_pool_watchers == 1
        await eventually(lambda: services.kvmanager._num_pool_watchers == 0)


async def test_explanations_are_the_operators(tmp_path: Path) -> None:
    async with lively_gateway(tmp_path) as (gateway, services):
        services.scheduler.explanations["abc"] = {"id": "abc", "prompts": []}
        found = await gateway.http.get("/ui/api/requests/chatcmpl-abc/why")
        assert found.json() == {"id": "abc", "prompts": []}


async def test_each_group_is_shown_by_its_name_and_all_side_by_side(tmp_path: Path) -> None:
    pools = [LivelyPool(num_blocks, 3, 12, 4, pool_id=name) for name, num_blocks in (("left", 100), ("right", 200))]
    async with (
        lively_groups(tmp_path, pools, 3600) as (groups, registry),
        running_gateway(says("hi"), registry=registry) as gateway,
    ):
        load = SchedulerLoad(num_waiting=2, num_running=3, max_num_running=8, num_blocks=200, num_available_blocks=50)
        gateway.schedulers["right"].tell(load)
        viewers = {}
        for name, url in (("left", "/ui/api/stream"), ("right", "/ui/api/stream?pool=right")):
            async with gateway.http.stream("GET", url) as response:
                viewer = viewers[name] = Viewer(response)
                await viewer.read_until(lambda viewer=viewer: bool(viewer.blocks and viewer.of_type("groups")))  # type: ignore[misc]
            assert viewer.of_type("hello")[0]["pool_id"] == name
            assert viewer.of_type("pool")[0]["pool_id"] == name
            assert_same(viewer, groups[name])
        left, right = viewers["right"].of_type("groups")[0]["groups"]
        assert (left["pool_id"], right["pool_id"]) == ("left", "right")
        assert (right["waiting"], right["running"], right["max_running"]) == (2, 3, 8)
        assert (right["blocks"], right["available_blocks"], right["why_not_ready"]) == (200, 50, "")
        for figures, pool in ((left, pools[0]), (right, pools[1])):
            assert figures["lookup_tokens"] == pool.pool.stats.num_prefix_lookup_tokens > 0
            assert figures["hit_tokens"] == pool.pool.stats.num_prefix_hit_tokens > 0
        unknown = await gateway.http.get("/ui/api/stream?pool=middle")
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "pool")


async def test_a_request_is_explained_by_the_scheduler_that_knows_it(tmp_path: Path) -> None:
    pools = [LivelyPool(50, 1, 8, 2, pool_id=name) for name in ("left", "right")]
    async with (
        lively_groups(tmp_path, pools, 3600) as (groups, registry),
        running_gateway(says("hi"), registry=registry) as gateway,
    ):
        groups["right"].scheduler.explanations["abc"] = {"id": "abc", "prompts": []}
        assert (await gateway.http.get("/ui/api/requests/abc/why")).json() == {"id": "abc", "prompts": []}
        assert (await gateway.http.get("/ui/api/requests/none/why")).status_code == 404
