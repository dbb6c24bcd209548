"""A real Redis in a process of its own."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass
class RunningRedis:
    url: str
    process: subprocess.Popen[bytes]

    def pause(self) -> None:
        """It no longer answers."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def running_redis(folder: Path) -> Iterator[RunningRedis]:
    """Answers when entered; gone when left. Skips the test where Redis is not installed; CI installs it."""
    server = shutil.which("redis-server")
    if server is None:
        pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    with Path(folder, "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    running = RunningRedis(f"redis://127.0.0.1:{port}/0", process)
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None
            time.sleep(0.05)
        yield running
    finally:
        running.resume()
        process.terminate()
        process.wait(10)
