"""The four services as processes of their own, each started with the addresses that a test gives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc

from octavo.v1 import admin_service_pb2 as pb
from octavo.v1 import admin_service_pb2_grpc as rpc
from support.clusters import wait_until

_STOPPED_WITHIN_S = 15.0


class SingleServices:
    """A context manager. Sockets and logs are in `folder`: `NAME.sock` for frames, `NAME.grpc.sock` for admin calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> SingleServices:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            try:
                process.wait(_STOPPED_WITHIN_S)
            finally:
                process.kill()

    def start(self, service: str, name: str = "", **settings: object) -> None:
        """`name` tells several of one kind apart."""
        name = name or service
        if service != "gateway":
            settings["listen"] = f"frames://{self.socket(name)},grpc+unix://{self.admin_socket(name)}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        for setting, value in settings.items():
            environment[f"OCTAVO_{service.upper()}_{setting.upper()}"] = str(value)
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", f"octavo.{service}.main"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def kill(self, name: str) -> None:
        with self._processes.pop(name) as process:
            process.kill()

    def suspend(self, name: str) -> None:
        """It does nothing any more, and its connections stay."""
        self._processes[name].send_signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        self._processes[name].send_signal(signal.SIGCONT)

    def socket(self, name: str) -> Path:
        return self.folder / f"{name}.sock"

    def admin_socket(self, name: str) -> Path:
        return self.folder / f"{name}.grpc.sock"

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def why_not_ready(self, name: str) -> str:
        """Empty when it is ready."""
        assert self._processes[name].poll() is None, self.log(name)
        try:
            with grpc.insecure_channel(f"unix:{self.admin_socket(name)}") as channel:
                health = rpc.AdminServiceStub(channel).GetHealth(pb.GetHealthRequest(), timeout=2.0)
        except grpc.RpcError as error:
            return str(error)
        return "" if health.ready else health.reason or "no reason"

    def wait_until_ready(self, name: str, within_s: float = 120.0) -> None:
        wait_until(lambda: not self.why_not_ready(name), within_s, lambda: f"{name} is not ready: {self.log(name)}")
