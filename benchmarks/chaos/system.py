"""`octavo serve` as the drill sees it: processes to kill, counters to read, and a pool that must come out clean."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
from prometheus_client.parser import text_string_to_metric_families

from octavo.v1 import admin_service_pb2 as admin_pb
from octavo.v1 import admin_service_pb2_grpc as admin_rpc
from octavo.v1 import kvmanager_service_pb2 as kv_pb
from octavo.v1 import kvmanager_service_pb2_grpc as kv_rpc

SERVICES = ("kvmanager", "worker", "scheduler", "gateway")
MODEL_NAME = "drill"
READY_WITHIN_S = 180.0
CLEAN_WITHIN_S = 30.0
_STOP_WITHIN_S = 20.0


class DrillError(Exception):
    """The system is not what it should be."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one process holds."""

    resident_bytes: int
    num_files: int


class System:
    """A context manager: `octavo serve` runs inside it, and its log is kept until the end."""

    def __init__(self, model: Path, options: list[str], *, check_ledger: bool = True) -> None:
        """`check_ledger`: the KV manager checks its books after each message, which takes long for a large pool."""
        self._model, self._options, self._check_ledger = model, options, check_ledger
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> System:
        self._folder = tempfile.TemporaryDirectory(prefix="octavo-drill-")
        folder = Path(self._folder.name)
        self._log = folder / "log"
        command = [sys.executable, "-m", "octavo.cli.main", "serve", "--port", str(self._port)]
        command += ["--model", str(self._model), "--served-model-name", MODEL_NAME, "--log-level", "info"]
        environment = {**os.environ, "TMPDIR": str(folder), "OCTAVO_KVMANAGER_CHECK_LEDGER": str(self._check_ledger)}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *self._options], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(_STOP_WITHIN_S)
        finally:
            self._process.kill()
            self._folder.cleanup()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def pids(self) -> dict[str, int]:
        """Live services and their process ids."""
        found = {}
        for task in Path(f"/proc/{self._process.pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                command = _read(f"/proc/{child}/cmdline")
                for service in SERVICES:
                    if f"octavo.{service}.main" in command and "die_with_parent" not in command:
                        found[service] = int(child)
        return found

    def kill(self, service: str, signal_no: signal.Signals = signal.SIGKILL) -> bool:
        """False if it is dead already."""
        pid = self.pids().get(service)
        if pid is None:
            return False
        os.kill(pid, signal_no)
        return True

    def footprints(self) -> dict[str, Footprint]:
        """By service."""
        found = {}
        for service, pid in self.pids().items():
            status = dict(line.split(":\t", 1) for line in _read(f"/proc/{pid}/status").splitlines() if ":\t" in line)
            resident = int(status["VmRSS"].split()[0]) * 1024
            found[service] = Footprint(resident, len(os.listdir(f"/proc/{pid}/fd")))
        return found

    async def wait_until_ready(self, within_s: float = READY_WITHIN_S) -> float:
        """Seconds until all services work together."""
        began = time.monotonic()
        async with httpx.AsyncClient(base_url=self.url, timeout=2.0, trust_env=False) as http:
            while time.monotonic() - began < within_s:
                if self._process.poll() is not None:
                    raise DrillError(f"octavo serve has ended:\n{self.log[-4000:]}")
                try:
                    if (await http.get("/health/ready")).status_code == 200:
                        return time.monotonic() - began
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.05)
        raise DrillError(f"not ready within {within_s} s:\n{self.log[-4000:]}")

    async def wait_until_clean(self) -> None:
        """Return once nothing waits or runs, no block is held and the ledger adds up. Raises DrillError."""
        deadline = time.monotonic() + CLEAN_WITHIN_S
        while (left := await asyncio.to_thread(self._what_is_left)) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        if left:
            raise DrillError(f"left after the drill: {left}")

    def metric(self, service: str, name: str, **labels: str) -> float:
        """Sum of the samples of that name with these labels, as the service tells it; 0 if it does not answer."""
        try:
            with grpc.insecure_channel(f"unix:{self._socket(service)}") as channel:
                stub = admin_rpc.AdminServiceStub(channel)
                text = stub.GetMetrics(admin_pb.GetMetricsRequest(), timeout=2.0).exposition.decode()
        except (grpc.RpcError, DrillError):
            return 0.0
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    def _what_is_left(self) -> str:
        waiting = self.metric("scheduler", "octavo_queue_sequences")
        try:
            with grpc.insecure_channel(f"unix:{self._socket('kvmanager')}") as channel:
                pool = kv_rpc.KvManagerServiceStub(channel).InspectPool(kv_pb.InspectPoolRequest(), timeout=10.0)
        except (grpc.RpcError, DrillError) as error:
            return f"the KV manager does not answer: {error}"
        held = pool.counts.active + pool.counts.granted + pool.counts.quarantined
        if waiting or held or pool.num_sequences or pool.violations:
            return f"{waiting:.0f} sequences, {held} blocks, violations {list(pool.violations)}"
        return ""

    def _socket(self, service: str) -> Path:
        found = list(Path(self._folder.name).glob(f"octavo-*/{service}.grpc.sock"))
        if not found:
            raise DrillError(f"{service} has no socket")
        return found[0]


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
