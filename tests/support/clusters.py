"""The whole system, running: the four services as child processes of `octavo serve`, or joined in one process."""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Literal

import grpc
import httpx
import structlog
from prometheus_client.parser import text_string_to_metric_families

from octavo.cli.local_cluster import LocalCluster
from octavo.cli.models import PreparedModel
from octavo.cli.serve_options import KvCacheDtype, Quantization, ServeOptions
from octavo.common.logs import LogLevel
from octavo.common.messages.kv import PoolCounts
from octavo.common.runtime import Stop
from octavo.kvmanager.ledger import violations
from octavo.v1 import kvmanager_service_pb2 as pb

Transport = Literal["frames", "grpc", "local"]
SERVICES = ("kvmanager", "worker", "scheduler", "gateway")

H200 = "h200-llama-8b"
"""A profile of simulated workers, which are ready much sooner than those with torch."""
READY_WITHIN_S = 120.0
STOPPED_WITHIN_S = 5.0


@dataclass(frozen=True)
class ServerSettings:
    """How to start it. None leaves a setting at its default."""

    transport: Transport = "frames"
    max_num_seqs: int | None = 32
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    num_host_blocks: int | None = None
    simulated: str | None = None
    simulated_gpus: int | None = None
    kv_cache_dtype: KvCacheDtype | None = None
    quantization: Quantization | None = None
    max_model_len: int | None = None
    pipeline_depth: int = 2
    prefix_cache: bool = True
    groups: int = 1
    gateways: int = 1
    redis: str | None = None
    log_level: LogLevel = "info"

    def options(self, port: int) -> ServeOptions:
        common = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "transport"}
        return ServeOptions(port=port, carrier="grpc" if self.transport == "grpc" else "frames", **common)

    def arguments(self, port: int) -> list[str]:
        """The same as arguments of `octavo serve`."""
        arguments = ["--port", str(port)]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "transport":
                arguments += ["--local"] if value == "local" else ["--carrier", value]
            elif field.name == "prefix_cache":
                arguments += [] if value else ["--no-prefix-cache"]
            elif value is not None:
                arguments += ["--" + field.name.replace("_", "-"), str(value)]
        return arguments


@dataclass(frozen=True)
class PoolState:
    """The block pool as its manager sees it."""

    counts: PoolCounts
    num_sequences: int
    violations: list[str]


class Cluster(ABC):
    """A running system. `stop` ends it and checks that nothing is left."""

    running: ClassVar[list[Cluster]] = []

    def __init__(self, model: PreparedModel, settings: ServerSettings) -> None:
        self.model = model
        self.settings = settings
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    @abstractmethod
    def start(self) -> None:
        """Return once requests are served."""

    @abstractmethod
    def stop(self) -> None: ...

    @abstractmethod
    def log(self) -> str:
        """What the services wrote."""

    @abstractmethod
    def pool(self) -> PoolState: ...

    @abstractmethod
    def _check_alive(self) -> None: ...

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of that name that have these labels."""
        exposition = httpx.get(f"{self.url}/metrics", trust_env=False).raise_for_status().text
        samples = [s for family in text_string_to_metric_families(exposition) for s in family.samples if s.name == name]
        assert samples, f"no metric {name}"
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def is_ready(self) -> bool:
        """Every gateway is: the kernel gives each connection to any of them."""
        num_asked = 1 + 16 * (self.settings.gateways - 1)
        try:
            return all(
                httpx.get(f"{self.url}/health/ready", trust_env=False, timeout=2.0).status_code == 200
                for _ in range(num_asked)
            )
        except httpx.TransportError:
            return False

    def wait_until_ready(self, within_s: float = READY_WITHIN_S) -> None:
        def is_ready() -> bool:
            self._check_alive()
            return self.is_ready()

        wait_until(is_ready, within_s, "the server is not ready")

    def assert_idle(self, within_s: float = 10.0) -> None:
        """Soon nothing waits or runs, no block is held, and the books of the pool add up."""

        def is_idle() -> bool:
            held = self.pool().counts
            return self.metric("octavo_queue_sequences") == 0 and held.active + held.granted + held.quarantined == 0

        wait_until(is_idle, within_s, lambda: f"requests or blocks are left: {self.pool()}")
        pool = self.pool()
        assert (pool.num_sequences, pool.violations) == (0, [])

    def assert_undisturbed(self) -> None:
        """Worker and KV manager were never given up: no plan or message broke the protocol."""
        assert self.metric("octavo_pool_losses_total") == 0


class ProcessCluster(Cluster):
    """`octavo serve` in a process of its own; with the transport `local` it has no children."""

    def start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="octavo-test-"))
        self._tmp = self._folder / "tmp"
        self._tmp.mkdir()
        self._log_path = self._folder / "log"
        command = [sys.executable, "-m", "octavo.cli.main", "serve", "--model", str(self.model.folder)]
        command += ["--served-model-name", self.model.name, *self.settings.arguments(self.port)]
        environment = {
            **os.environ,
            "TMPDIR": str(self._tmp),
            "OCTAVO_KVMANAGER_CHECK_LEDGER": "true",
            "COLUMNS": "400",
            "NO_COLOR": "1",
        }
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        Cluster.running.append(self)
        self.wait_until_ready()
        assert self.settings.transport == "local" or set(self.pids()) == self._expected_services()

    def stop(self) -> None:
        pids = [*self.pids().values(), self.process.pid]
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGINT)
            status = self.process.wait(STOPPED_WITHIN_S)
        finally:
            self._kill(pids)
            Cluster.running.remove(self)
        assert status == 0, self.log()
        assert "Traceback" not in self.log(), self.log()
        assert list(self._tmp.iterdir()) == [], "sockets are left"
        assert not [pid for pid in pids if _is_running(pid)], "processes are left"
        shutil.rmtree(self._folder)

    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def pids(self) -> dict[str, int]:
        """Live services and their process ids; those of several groups are called worker-1 and so on."""
        found = {}
        for child in _children(self.process.pid):
            command = _command(child)
            for service in SERVICES:
                if f"octavo.{service}.main" in command and "die_with_parent" not in command:
                    found[_name_of(child, service) if self.settings.groups > 1 else service] = child
        return found

    def _expected_services(self) -> set[str]:
        if self.settings.groups == 1:
            return set(SERVICES)
        services = itertools.product(SERVICES[:-1], range(1, self.settings.groups + 1))
        return {"gateway", *(f"{service}-{group}" for service, group in services)}

    def kill_service(self, service: str) -> None:
        """Die without a word, and be started again by the supervisor."""
        self.end_service(service, signal.SIGKILL)

    def end_service(self, service: str, signal_no: signal.Signals) -> None:
        """End by the signal, and be started again by the supervisor."""
        old = self.pids()[service]
        os.kill(old, signal_no)
        wait_until(lambda: self.pids().get(service, old) != old, 20.0, f"{service} was not started again")

    def memory_bytes(self) -> dict[str, int]:
        """Resident memory by service."""
        return {service: _resident_bytes(pid) for service, pid in self.pids().items()}

    def pool(self, group: int | None = None) -> PoolState:
        """Of one of several groups, or of the only one."""
        name = "kvmanager" if group is None else f"kvmanager-{group}"
        [socket_path] = self._tmp.glob(f"octavo-*/{name}.grpc.sock")
        with grpc.insecure_channel(f"unix:{socket_path}") as channel:
            inspect = channel.unary_unary(
                "/octavo.v1.KvManagerService/InspectPool",
                request_serializer=pb.InspectPoolRequest.SerializeToString,
                response_deserializer=pb.InspectPoolResponse.FromString,
            )
            answer = inspect(pb.InspectPoolRequest(), timeout=5.0)
        held = answer.counts
        counts = PoolCounts(held.free, held.granted, held.active, held.cached, held.quarantined)
        return PoolState(counts, answer.num_sequences, list(answer.violations))

    def _check_alive(self) -> None:
        assert self.process.poll() is None, f"octavo serve ended: {self.log()}"

    def _kill(self, pids: list[int]) -> None:
        """Leave nothing behind, whatever went wrong."""
        for pid in pids:
            if _is_running(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


class InProcessCluster(Cluster):
    """The local transport in a thread of this process."""

    def start(self) -> None:
        self._log = io.StringIO()
        structlog.configure(logger_factory=structlog.PrintLoggerFactory(self._log), cache_logger_on_first_use=False)
        self._error: BaseException | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="local cluster")
        self._thread.start()
        self._started.wait()
        Cluster.running.append(self)
        self.wait_until_ready()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.request)
        self._thread.join(STOPPED_WITHIN_S)
        Cluster.running.remove(self)
        structlog.reset_defaults()
        assert not self._thread.is_alive()
        assert self._error is None, self.log()

    def log(self) -> str:
        return self._log.getvalue()

    def pool(self) -> PoolState:
        async def look() -> PoolState:
            [pool] = self._local.kvmanager.pools
            return PoolState(pool.blocks.counts(), len(pool.tables), violations(pool))

        return asyncio.run_coroutine_threadsafe(look(), self._loop).result(5.0)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # told to the thread that waits for it
            self._error = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = Stop()
        self._local = LocalCluster(self.settings.options(self.port), self.model)
        self._local.kvmanager.check_ledger = True
        self._started.set()
        await self._local.serve(self._stop)

    def _check_alive(self) -> None:
        assert self._error is None, self._error
        assert self._thread.is_alive()


@contextmanager
def running_cluster(model: PreparedModel, settings: ServerSettings, *, in_process: bool = True) -> Iterator[Cluster]:
    """Ready when entered. `in_process`: the local transport runs in this process instead of one of its own."""
    is_inside = settings.transport == "local" and in_process
    cluster: Cluster = InProcessCluster(model, settings) if is_inside else ProcessCluster(model, settings)
    try:
        cluster.start()
        yield cluster
    finally:
        if cluster in Cluster.running:
            cluster.stop()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def wait_until(condition: Callable[[], bool], within_s: float, failure: str | Callable[[], str]) -> None:
    """Poll; fails with the given text if the condition does not hold in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(failure if isinstance(failure, str) else failure())
        time.sleep(0.05)


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _name_of(pid: int, service: str) -> str:
    """By where it listens."""
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    key = f"OCTAVO_{service.upper()}_LISTEN=".encode()
    listening = next((entry.decode() for entry in environment if entry.startswith(key)), service)
    return Path(listening.partition(",")[0]).stem


def _is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:"))
