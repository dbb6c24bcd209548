"""The four services as processes of their own, joined by gRPC over TCP with mutual TLS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from octavo.cli.models import PreparedModel
from octavo.common.links import TlsFiles
from octavo.common.roles import Role
from support.certificates import issue, make_ca
from support.clusters import READY_WITHIN_S, free_port, wait_until


class Services:
    """Processes by name, each with a log of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, service: str, tls: TlsFiles | None, *, name: str = "", **settings: object) -> None:
        files = {} if tls is None else {"link_ca": tls.ca, "link_cert": tls.cert, "link_key": tls.key}
        prefix = f"OCTAVO_{service.upper()}_"
        given = {f"{prefix}{key.upper()}": str(value) for key, value in {**settings, **files}.items()}
        with (self._folder / f"{name or service}.log").open("wb") as log:
            self._processes[name or service] = subprocess.Popen(
                [sys.executable, "-m", f"octavo.{service}.main"], env={**os.environ, **given}, stderr=log
            )

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def stop(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(10)
            finally:
                process.kill()


@contextmanager
def services(folder: Path) -> Iterator[Services]:
    started = Services(folder)
    try:
        yield started
    finally:
        started.stop()


def readiness(port: int) -> httpx.Response | None:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health/ready", trust_env=False, timeout=2.0)
    except httpx.TransportError:
        return None


def wait_for_status(port: int, status: int, reason: str, failure: Services) -> None:
    def is_so() -> bool:
        answer = readiness(port)
        return answer is not None and answer.status_code == status and reason in answer.text

    wait_until(is_so, READY_WITHIN_S, lambda: f"{readiness(port)} {failure.log('scheduler')}")


def test_services_with_certificates_serve_and_strangers_are_told_why_not(
    tmp_path: Path, tiny_model: PreparedModel
) -> None:
    ca = make_ca(tmp_path / "ca")
    kvmanager, worker, scheduler = (f"grpc://127.0.0.1:{free_port()}" for _ in range(3))
    gateway_port, plain_port, stranger_port = (free_port() for _ in range(3))
    model = {"model": tiny_model.folder}
    with services(tmp_path) as running:
        running.start("kvmanager", issue(ca, Role.KVMANAGER), listen=kvmanager)
        running.start("worker", issue(ca, Role.WORKER), listen=worker, num_blocks=64, max_num_seqs=4, **model)
        running.start("scheduler", issue(ca, Role.SCHEDULER), listen=scheduler, kvmanager=kvmanager, worker=worker)
        seen = {"scheduler": scheduler, "scheduler_admin": scheduler.removeprefix("grpc://"), **model}
        running.start("gateway", issue(ca, Role.GATEWAY), port=gateway_port, **seen)
        slow = {"connect_timeout_s": 0.5}
        running.start("gateway", None, name="plain", port=plain_port, **seen, **slow)
        stranger = issue(make_ca(tmp_path / "other"), Role.GATEWAY)
        pretender = TlsFiles(ca / "ca.pem", stranger.cert, stranger.key)
        running.start("gateway", pretender, name="stranger", port=stranger_port, **seen, **slow)

        wait_for_status(gateway_port, 200, "", running)
        url = f"http://127.0.0.1:{gateway_port}"
        body = {"prompt": list(range(1, 40)), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=30).raise_for_status().json()
        assert answer["usage"]["completion_tokens"] == 8
        assert "octavo_queue_sequences" in httpx.get(f"{url}/metrics", trust_env=False).text

        files = issue(ca, Role.OPERATOR)
        options = ["--link-ca", files.ca, "--link-cert", files.cert, "--link-key", files.key]
        command = [sys.executable, "-m", "octavo.cli.main", "inspect", "--json", "--address", kvmanager]
        shown = subprocess.run([*command, *map(str, options)], capture_output=True, text=True, timeout=60, check=True)
        assert json.loads(shown.stdout)["num_blocks"] == 64

        # A worker's certificate lets nobody look into the pool, nor pose as a gateway.
        files = issue(ca, Role.WORKER)
        options = ["--link-ca", files.ca, "--link-cert", files.cert, "--link-key", files.key]
        refused = subprocess.run([*command, *map(str, options)], capture_output=True, text=True, timeout=60)
        assert refused.returncode == 1 and "this is for gateway.octavo.internal or operator" in refused.stderr
        impostor_port = free_port()
        running.start("gateway", files, name="impostor", port=impostor_port, **seen, **slow)
        wait_for_status(impostor_port, 503, "the certificate is of worker.octavo.internal", running)

        wait_for_status(plain_port, 503, "it may want TLS", running)
        wait_for_status(stranger_port, 503, f"not the certificate in {stranger.cert}", running)
        assert "it may want TLS" in running.log("plain")
        assert f"not the certificate in {stranger.cert}" in running.log("stranger")
        refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert refused.returncode == 1 and "cannot be asked" in refused.stderr
        assert "WRONG_VERSION_NUMBER" in running.log("scheduler"), "the refusing end says so as well"
