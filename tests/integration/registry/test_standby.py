"""Two real schedulers of one pool, with leases in a real Redis: one serves, the other takes over."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from octavo.common.registry.redis_registry import RedisRegistry
from support.clusters import free_port, wait_until
from support.redis_server import running_redis

TTL_S = 3.0
"""A holder that is starved for so long on a busy machine would lose its lease."""


@contextmanager
def scheduler(
    registry: str, folder: Path, name: str, listen: str = ""
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The process, and its health address."""
    port = free_port()
    command = [sys.executable, "-m", "octavo.scheduler.main", "--pool-id", "left", "--registry", registry]
    command += ["--listen", listen or f"frames://{folder}/{name}.sock", "--metrics-listen", f"127.0.0.1:{port}"]
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen([*command, "--registry-ttl-s", str(TTL_S)], stdout=log, stderr=log, env=os.environ)
    try:
        yield process, f"http://127.0.0.1:{port}/health/ready"
    finally:
        process.kill()
        process.wait()


def reason_of(health: str) -> str:
    try:
        return str(httpx.get(health, trust_env=False, timeout=2.0).json().get("reason", ""))
    except httpx.TransportError:
        return ""


def test_a_standby_waits_and_takes_over_when_the_holder_dies_or_is_frozen_for_too_long(tmp_path: Path) -> None:
    with running_redis(tmp_path) as redis, scheduler(redis.url, tmp_path, "first") as (first, first_health):
        wait_until(lambda: "no worker of pool 'left' is registered" in reason_of(first_health), 20.0, "no lease")
        with scheduler(redis.url, tmp_path, "second") as (second, second_health):
            wait_until(lambda: "waits for the lease" in reason_of(second_health), 20.0, "the second does not wait")
            first.kill()
            wait_until(lambda: "no worker" in reason_of(second_health), 10.0, "the second has not taken over")
            with scheduler(redis.url, tmp_path, "third") as (_, third_health):
                wait_until(lambda: "waits for the lease" in reason_of(third_health), 20.0, "the third does not wait")
                second.send_signal(signal.SIGSTOP)
                wait_until(lambda: "no worker" in reason_of(third_health), 10.0, "the third has not taken over")
                second.send_signal(signal.SIGCONT)
                assert second.wait(10.0) == 1, "whoever was replaced must not go on"
        log = (tmp_path / "second.log").read_text()
        assert "another scheduler has taken the lease" in log
        assert "not ended in time" not in log


async def test_who_listens_on_all_interfaces_is_found_by_the_name_of_its_host(tmp_path: Path) -> None:
    port = free_port()
    with running_redis(tmp_path) as redis, scheduler(redis.url, tmp_path, "only", f"grpc://0.0.0.0:{port}"):
        registry = RedisRegistry(redis.url)
        async with asyncio.timeout(20.0):
            while not (members := await registry.members()):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await registry.close()
    address = f"grpc://{socket.gethostname()}:{port}"
    assert [(member.address, member.admin) for member in members] == [(address, address)]
