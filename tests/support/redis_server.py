"""A real Redis in a process of its own."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis


class RunningRedis:
    """Keeps nothing on disk: started anew, it is empty."""

    def __init__(self, executable: str, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self._command = [
            executable,
            "--port",
            str(self._port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--dir",
            str(folder),
        ]
        self._log = folder / "log"

    def start(self) -> None:
        """Return once it answers."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return
            assert self.process.poll() is None
            time.sleep(0.05)

    def pause(self) -> None:
        """It no longer answers."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def set_full(self, is_full: bool) -> None:
        """Its memory is used up: reads are answered, writes refused."""
        with self._client() as client:
            client.config_set("maxmemory", "1" if is_full else "0")

    def set_replica(self, is_replica: bool) -> None:
        """It follows a master that is away, as after a failover: reads are answered, writes refused."""
        with self._client() as client:
            client.replicaof(*(("127.0.0.1", "1") if is_replica else ("NO", "ONE")))

    def _client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


@contextmanager
def running_redis(folder: Path) -> Iterator[RunningRedis]:
    """Answers when entered; gone when left. Skips the test where Redis is not installed; CI installs it."""
    executable = shutil.which("redis-server")
    if executable is None:
        pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
    running = RunningRedis(executable, folder)
    running.start()
    try:
        yield running
    finally:
        running.kill()
