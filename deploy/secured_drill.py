"""The checks of docker-compose.yml with TLS on all ways and API keys."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, field

from compose_project import Docker, Front, Stream, why_unanswered
from drill_report import Report, expect, until

PING_IN_PLAIN_TEXT = """
import socket
with socket.create_connection(("redis", 6379), 5) as stranger:
    stranger.sendall(b"PING\\r\\n")
    print(stranger.recv(100))
"""

STEPS_AS_A_GATEWAY = """
import asyncio
from pathlib import Path
from octavo.common.codecs import WORKER_STEPS
from octavo.common.links import Address, TlsFiles, connect

async def main():
    files = TlsFiles(*(Path("/certs") / name for name in ("ca.pem", "cert.pem", "key.pem")))
    link = await connect(Address.parse("grpc://worker:7103"), WORKER_STEPS, 10, files)
    ended = asyncio.get_running_loop().create_future()
    link.bind(lambda message: None, ended.set_result)
    print(await asyncio.wait_for(ended, 10))

asyncio.run(main())
"""


@dataclass
class SecuredDrill:
    """The checks, of a project of the overlays tls and keys."""

    docker: Docker
    builds: bool
    report: Report = field(default_factory=Report)
    front: Front = field(init=False)
    undisturbed: str = ""

    def __post_init__(self) -> None:
        self.front = Front(self.docker.tls_port)

    def start(self) -> None:
        with self.report.check("starts with TLS on all ways, and takes a new key") as found:
            if self.builds:
                self.docker.compose("build", timeout_s=1800)
            self.docker.up()
            ca = self.docker.run("exec", self.docker.only("front"), "cat", "/certs/ca.pem")
            self.front = Front(self.docker.tls_port, ca)
            hello = {"prompt": "Hello"}
            until(lambda: self.front.post("/v1/completions", hello).status == 503, 60, "503 before there is a key")
            self.front = Front(self.docker.tls_port, ca, self.new_key("acme", "--requests-per-minute", "600"))
            until(lambda: not why_unanswered(self.front), 60, "an answer by HTTPS")
            found.append("503 without any key; answered by HTTPS, by the project's CA and the key")

    def new_key(self, *options: str) -> str:
        return self.docker.compose("run", "--rm", "--no-deps", "--quiet-pull", "octavo", "keys", "create", *options)

    def keys_and_limits(self) -> None:
        with self.report.check("keys are asked for, limits are kept by both gateways together") as found:
            self.docker.up("--no-recreate", "--scale", "gateway=2", "--wait")
            body = {"prompt": "Hello", "max_tokens": 1}
            without = Front(self.front.port, self.front.ca_text)
            wrong = Front(self.front.port, self.front.ca_text, "sk-octavo-wrong")
            statuses = [front.post("/v1/completions", body).status for front in (without, wrong)]
            expect(statuses == [401, 401], f"{statuses} without a key, and with a wrong one")
            statuses, end = None, time.monotonic() + 180
            while statuses is None and time.monotonic() < end:
                statuses = self.statuses_at_three_a_minute()
            expect(statuses, "a gateway counted by itself again and again: Redis was slow")
            expect({200, 429} <= set(statuses) and statuses.count(200) <= 4, f"{statuses} at 3 requests a minute")
            found.append(f"401 without a key or with a wrong one; {statuses} at 3 requests a minute")

    def statuses_at_three_a_minute(self) -> list[int] | None:
        """Of nine requests of a new tenant; None if a gateway counted by itself meanwhile."""
        tenant = f"small-{time.monotonic_ns()}"
        small = Front(self.front.port, self.front.ca_text, self.new_key(tenant, "--requests-per-minute", "3"))
        time.sleep(3)  # gateways read the keys again every 2 s
        before = self.fallbacks()
        statuses = [small.post("/v1/completions", {"prompt": "Hello", "max_tokens": 1}).status for _ in range(9)]
        return statuses if self.fallbacks() == before else None

    def fallbacks(self) -> list[float]:
        gateways = self.docker.containers("gateway")
        return [self.docker.sample(one, "octavo_limiter_fallbacks_total") for one in gateways]

    def strangers(self) -> None:
        with self.report.check("strangers are turned away") as found:
            gateway = self.docker.containers("gateway")[0]
            ping = subprocess.run(
                ["docker", "exec", gateway, "python", "-c", PING_IN_PLAIN_TEXT], capture_output=True, text=True
            )
            expect("PONG" not in ping.stdout, "Redis answers in plain text")
            found.append("Redis answers nobody in plain text")
            told = self.docker.run("exec", gateway, "python", "-c", STEPS_AS_A_GATEWAY)
            expect("this is for scheduler.octavo.internal" in told, f"the worker let a gateway in: {told}")
            found.append("the worker takes no steps from a gateway")

    def operator(self) -> None:
        with self.report.check("the operator looks into the pool") as found:
            command = ["run", "--rm", "--no-deps", "octavo", "inspect", "--json", "--address", "grpc://kvmanager:7102"]
            told = self.docker.compose(*command)
            expect('"num_blocks"' in told, told[-200:])
            found.append("octavo inspect, by a certificate of its own")

    def renewal(self) -> None:
        with self.report.check("certificates are renewed, and the scheduler crashes during a stream") as found:
            self.undisturbed = Stream(self.front, 96).finish().text
            before = self.docker.run("exec", self.docker.only("scheduler"), "cat", "/certs/cert.pem")
            self.docker.compose("run", "--rm", "--no-deps", "certs")
            after = self.docker.run("exec", self.docker.only("scheduler"), "cat", "/certs/cert.pem")
            expect(before != after, "the scheduler sees no new certificate")
            stream = Stream(self.front, 96)
            stream.wait_for_pieces(10)
            self.docker.crash(self.docker.only("scheduler"))
            stream.finish()
            expect(stream.text == self.undisturbed, f"the answer differs: {stream.text[-80:]!r}")
            found.append(f"the answer is the undisturbed one; longest pause {stream.longest_pause_s:.2f} s")

    def run(self) -> int:
        """Number of failed checks."""
        try:
            self.start()
            if not self.report.num_failed:
                self.keys_and_limits()
                self.strangers()
                self.operator()
                self.renewal()
            if self.report.num_failed:
                print(self.docker.compose("logs", "--no-color", "--tail", "40"), file=sys.stderr)
        finally:
            self.docker.compose("--profile", "*", "down", "--volumes", "--timeout", "5")
        return self.report.num_failed
