"""Runs docker-compose.yml for real: starts it, streams through it, scales it, and breaks one thing after another.

    python3 deploy/compose_drill.py            all checks, some minutes
    python3 deploy/compose_drill.py --quick    start, one streamed answer, graceful stop
    python3 deploy/compose_drill.py --no-build with the images that are there

Needs a Docker engine and Compose, and of Python the standard library alone. Without an engine, or without the images
that others make, it says that it did not run and ends with 0 (with 1 if --require is given); else the exit status is
the number of failed checks.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drill_report import CheckFailedError, Report, expect, until

ROOT = Path(__file__).parents[1]
PROJECT = "octavo-drill"
SERVICES = ("gateway", "scheduler", "kvmanager", "worker")
STARTED_AFTER = {
    "worker": ("model",),
    "scheduler": ("kvmanager", "worker"),
    "gateway": ("scheduler", "redis"),
    "front": ("gateway",),
}
"""Service |-> those that are to be healthy (the model: done) before it starts."""

PROMPT = "Count: one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve,"


class Docker:
    """The engine, and Compose for this project."""

    def __init__(self, port: int) -> None:
        self._environment = {**os.environ, "OCTAVO_PUBLISH": f"127.0.0.1:{port}", "DOCKER_BUILDKIT": "1"}
        self._compose = self._find_compose()

    @staticmethod
    def why_not_there() -> str:
        """Empty if an engine and Compose can be used."""
        if shutil.which("docker") is None:
            return "no docker command"
        if subprocess.run(["docker", "info"], capture_output=True, timeout=30).returncode:
            return "no engine answers"
        return "" if Docker._find_compose() else "no docker compose"

    @staticmethod
    def _find_compose() -> list[str]:
        for command in (["docker", "compose"], ["docker-compose"]):
            if shutil.which(command[0]) and not subprocess.run([*command, "version"], capture_output=True).returncode:
                return command
        return []

    def run(self, *arguments: str, timeout_s: float = 60) -> str:
        """Output of `docker ARGUMENTS`. Raises CalledProcessError, TimeoutExpired."""
        return self._run(["docker", *arguments], timeout_s)

    def compose(self, *arguments: str, timeout_s: float = 600) -> str:
        """Output of `docker compose ARGUMENTS` for the project."""
        return self._run([*self._compose, "-p", PROJECT, *arguments], timeout_s)

    def _run(self, command: list[str], timeout_s: float) -> str:
        finished = subprocess.run(
            command, cwd=ROOT, env=self._environment, capture_output=True, text=True, timeout=timeout_s
        )
        if finished.returncode:
            raise subprocess.CalledProcessError(finished.returncode, command, finished.stdout, finished.stderr)
        return finished.stdout.strip()

    def why_not_possible(self, *, builds: bool) -> str:
        """Empty if every image that is not built here is there, or can be pulled."""
        images = set(self.compose("config", "--images").split())
        own = os.environ.get("OCTAVO_IMAGE_PREFIX", "octavo") + "/"
        foreign = {image for image in images if not image.startswith(own)}
        if builds:
            foreign.add(os.environ.get("OCTAVO_BASE_IMAGE", "python:3.12-slim-bookworm"))
        for image in sorted(foreign):
            if subprocess.run(["docker", "image", "inspect", image], capture_output=True).returncode:
                try:
                    self.run("pull", "--quiet", image, timeout_s=300)
                except subprocess.SubprocessError:
                    return f"no image {image}"
        return ""

    def containers(self, service: str) -> list[str]:
        """Ids of its containers, stopped ones too."""
        labels = {"project": PROJECT, "service": service}
        filters = [f"--filter=label=com.docker.compose.{name}={value}" for name, value in labels.items()]
        return self.run("ps", "--all", "--quiet", *filters).split()

    def inspect(self, container: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(self.run("inspect", container))
        return found[0]

    def crash(self, container: str) -> None:
        """Kill the service's process from within, which unlike `docker kill` is no wish to stop the container."""
        subprocess.run(["docker", "exec", container, "sh", "-c", "kill -s KILL -- -1"], capture_output=True, timeout=30)

    def get(self, container: str, path: str) -> str:
        """A page of the service's own port for probes and scrapers."""
        code = f"import urllib.request as r; print(r.urlopen('http://127.0.0.1:9100{path}', timeout=5).read().decode())"
        return self.run("exec", container, "python", "-c", code)


class Stream(threading.Thread):
    """One streamed greedy completion, read in the background."""

    def __init__(self, port: int, max_tokens: int, within_s: float = 240) -> None:
        super().__init__(daemon=True)
        self._port, self._within_s = port, within_s
        self._body = {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "stream": True, "ignore_eos": True}
        self.text, self.error, self.is_whole = "", "", False
        self.times_s: list[float] = []
        """When each piece came."""
        self.start()

    def run(self) -> None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=self._within_s)
            connection.request("POST", "/v1/completions", json.dumps(self._body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise OSError(f"HTTP {response.status}: {response.read(300).decode(errors='replace')}")
            while line := response.readline():
                self._take(line.decode().strip())
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.error = self.error or f"{type(error).__name__}: {error}"

    def _take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.is_whole = True
        elif line.startswith("data:"):
            event = json.loads(line[5:])
            if "error" in event:
                self.error = str(event["error"]["message"])
            elif event.get("choices") and event["choices"][0]["text"]:
                self.text += event["choices"][0]["text"]
                self.times_s.append(time.monotonic())

    def wait_for_pieces(self, count: int, within_s: float = 60) -> None:
        end = time.monotonic() + within_s
        while len(self.times_s) < count and self.is_alive() and time.monotonic() < end:
            time.sleep(0.02)
        if len(self.times_s) < count:
            raise CheckFailedError(f"{len(self.times_s)} of {count} pieces came: {self.error or 'too slow'}")

    def finish(self) -> Stream:
        self.join(self._within_s)
        if not self.is_whole:
            raise CheckFailedError(f"the stream broke off after {len(self.times_s)} pieces: {self.error or 'silence'}")
        return self

    @property
    def longest_pause_s(self) -> float:
        return max((b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)), default=0.0)


@dataclass
class Drill:
    """The checks of the compose file."""

    docker: Docker
    port: int
    builds: bool
    report: Report = field(default_factory=Report)
    undisturbed: str = ""

    # Small parts.

    def only(self, service: str) -> str:
        found = self.docker.containers(service)
        expect(len(found) == 1, f"{len(found)} containers of {service}")
        return found[0]

    def answers(self) -> bool:
        """One short request through the front is answered."""
        return not self.why_unanswered()

    def why_unanswered(self) -> str:
        stream = Stream(self.port, 2, within_s=30)
        stream.join(30)
        return "" if stream.is_whole else stream.error or "silence for 30 s"

    def is_healthy(self, container: str) -> bool:
        return bool(self.docker.inspect(container)["State"]["Health"]["Status"] == "healthy")

    # Checks.

    def start(self) -> None:
        begin = time.time()
        with self.report.check("starts in the order of health") as found:
            if self.builds:
                self.docker.compose("build", timeout_s=1800)
            built = time.monotonic()
            self.docker.compose("up", "--detach", "--no-build", timeout_s=900)
            until(self.answers, 60, "an answer through the front")
            events = self.docker.run(
                "events", "--since", f"{begin:.3f}", "--until", f"{time.time():.3f}", "--format", "{{json .}}",
                "--filter", f"label=com.docker.compose.project={PROJECT}", "--filter", "type=container",
            )  # fmt: skip
            started, ready = self._first_times(events)
            for service, earlier in STARTED_AFTER.items():
                for one in earlier:
                    expect(one in ready, f"{one} was never healthy")
                    expect(ready[one] <= started[service], f"{service} started before {one} was healthy")
            found.append(" < ".join(sorted(started, key=started.__getitem__)))
            found.append(f"answering {time.monotonic() - built:.0f} s after up")

    @staticmethod
    def _first_times(events: str) -> tuple[dict[str, int], dict[str, int]]:
        """When each service was first started, and first healthy; a one-shot service is so when it ends with 0."""
        started: dict[str, int] = {}
        ready: dict[str, int] = {}
        for line in events.splitlines():
            event = json.loads(line)
            attributes = event["Actor"]["Attributes"]
            service, action = attributes["com.docker.compose.service"], event["Action"]
            if action == "start":
                started.setdefault(service, event["timeNano"])
            elif action.endswith("health_status: healthy") or (action == "die" and attributes.get("exitCode") == "0"):
                ready.setdefault(service, event["timeNano"])
        return started, ready

    def stream(self) -> None:
        with self.report.check("streams an answer through all of it") as found:
            begin = time.monotonic()
            stream = Stream(self.port, 96).finish()
            self.undisturbed = stream.text
            expect(len(stream.times_s) > 48, f"only {len(stream.times_s)} pieces")
            found.append(f"{len(stream.times_s)} pieces, the first after {stream.times_s[0] - begin:.2f} s")
            found.append(f"longest pause {stream.longest_pause_s:.2f} s")

    def confinement(self) -> None:
        with self.report.check("runs confined") as found:
            for service in (*SERVICES, "front", "redis"):
                container = self.only(service)
                told = self.docker.inspect(container)
                host, user = told["HostConfig"], told["Config"]["User"]
                expect(user.startswith("10001"), f"{service} runs as {user or 'root'}")
                expect(
                    host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"], f"{service} may write or has capabilities"
                )
                expect("no-new-privileges:true" in host["SecurityOpt"], f"{service} may gain privileges")
                expect(host["Memory"] > 0 and host["NanoCpus"] > 0, f"{service} has no limits")
                wrote = subprocess.run(["docker", "exec", container, "touch", "/written"], capture_output=True)
                expect(wrote.returncode, f"{service} wrote to its root file system")
            found.append("uid 10001, read-only root, no capabilities, limits")
            for service in ("gateway", "scheduler", "kvmanager"):
                torch = ["docker", "exec", self.only(service), "python", "-c", "import torch"]
                expect(subprocess.run(torch, capture_output=True).returncode, f"{service} has torch")
            found.append("no torch outside the worker")
            probe = ["docker", "exec", self.only("front"), "wget", "-q", "-T", "3", "-t", "1", "-O", "/dev/null"]
            reached = subprocess.run([*probe, "http://worker:9100/health/live"], capture_output=True)
            expect(reached.returncode, "the front reaches the worker")
            found.append("the front does not reach the worker")

    def scale(self) -> None:
        with self.report.check("two gateways share the load") as found:
            self.docker.compose("up", "--detach", "--no-build", "--no-recreate", "--scale", "gateway=2", "--wait")
            both = self.docker.containers("gateway")
            expect(len(both) == 2, f"{len(both)} gateways")

            def served(container: str) -> int:
                lines = self.docker.get(container, "/metrics").splitlines()
                counts = [
                    line for line in lines if line.startswith('octavo_http_requests_total{route="/v1/completions"')
                ]
                return sum(int(float(line.split()[-1])) for line in counts)

            before = {container: served(container) for container in both}

            def both_served() -> bool:
                for stream in [Stream(self.port, 8) for _ in range(4)]:
                    stream.finish()
                return all(served(container) > before[container] for container in both)

            until(both_served, 60, "both gateways have answered")
            found.append("requests each: " + ", ".join(str(served(one) - before[one]) for one in both))

    def dies_during_a_stream(self, service: str) -> None:
        with self.report.check(f"{service} crashes during a stream") as found:
            container = self.only(service)
            before = self.docker.inspect(container)["RestartCount"]
            stream = Stream(self.port, 96)
            stream.wait_for_pieces(10)
            self.docker.crash(container)
            stream.finish()
            expect(stream.text == self.undisturbed, f"the answer differs: {stream.text[-80:]!r}")
            found.append(f"the answer is the undisturbed one; longest pause {stream.longest_pause_s:.2f} s")
            until(lambda: self.docker.inspect(container)["RestartCount"] > before, 30, f"{service} is restarted")
            found.append("restarted by its policy")
            until(lambda: self.is_healthy(container), 90, f"{service} is healthy again")

    def gateway_dies(self) -> None:
        with self.report.check("one of two gateways crashes") as found:
            one = self.docker.containers("gateway")[0]
            self.docker.crash(one)
            failures = [error for error in (self.why_unanswered() for _ in range(6)) if error]
            expect(not failures, f"{len(failures)} of 6 requests after it failed: {failures}")
            found.append("6 of 6 requests after it answered by the other")
            took = until(lambda: self.is_healthy(one), 60, "the gateway is healthy again")
            found.append(f"healthy again after {took:.0f} s")

    def scheduler_dies(self) -> None:
        with self.report.check("scheduler crashes") as found:
            container = self.only("scheduler")
            self.docker.crash(container)
            took = until(self.answers, 60, "a new request is answered")
            found.append(f"a new request is answered {took:.1f} s later")
            until(lambda: self.is_healthy(container), 60, "the scheduler is healthy again")

    def worker_is_cut_off(self) -> None:
        with self.report.check("worker is cut off the network for 20 s") as found:
            worker, network = self.only("worker"), f"{PROJECT}_cluster"
            stream = Stream(self.port, 96)
            stream.wait_for_pieces(10)
            self.docker.run("network", "disconnect", network, worker)
            time.sleep(20)
            self.docker.run("network", "connect", "--alias", "worker", network, worker)
            stream.finish()
            expect(stream.text == self.undisturbed, f"the answer differs: {stream.text[-80:]!r}")
            found.append(f"the stream paused for {stream.longest_pause_s:.1f} s and went on to the same answer")

    def kvmanager_hangs(self) -> None:
        with self.report.check("kvmanager hangs for 5 s") as found:
            container = self.only("kvmanager")
            stream = Stream(self.port, 96)
            stream.wait_for_pieces(10)
            self.docker.run("pause", container)
            time.sleep(5)
            self.docker.run("unpause", container)
            stream.finish()
            expect(stream.text == self.undisturbed, f"the answer differs: {stream.text[-80:]!r}")
            found.append(f"the answer is the undisturbed one; longest pause {stream.longest_pause_s:.2f} s")
            until(lambda: self.is_healthy(container), 60, "the KV manager is healthy again")

    def responses_are_shared(self) -> None:
        with self.report.check("a stored response is found by both gateways") as found:
            both = self.docker.containers("gateway")
            ask = 'r.Request("http://127.0.0.1:8000/v1/responses", b\'{"input": "Hello", "max_output_tokens": 4}\', H)'
            show = "print(json.load(r.urlopen({}, timeout=30))['id'])"
            start = "import json, urllib.request as r; H = {'Content-Type': 'application/json'}; "
            made = self.docker.run("exec", both[0], "python", "-c", start + show.format(ask))
            for container in both:
                address = f"'http://127.0.0.1:8000/v1/responses/{made}'"
                again = self.docker.run("exec", container, "python", "-c", start + show.format(address))
                expect(again == made, f"{again} instead of {made}")
            found.append("made by one, given out by each")

    def redis_is_stopped(self) -> None:
        with self.report.check("redis is stopped") as found:
            container = self.only("redis")
            self.docker.run("kill", container)
            expect(self.answers(), "a request failed without it")
            self.docker.run("start", container)
            until(lambda: self.is_healthy(container), 60, "redis is healthy again")
            found.append("completions are answered without it")

    def prometheus_scrapes(self) -> None:
        with self.report.check("prometheus scrapes every service") as found:
            self.docker.compose("--profile", "monitoring", "up", "--detach", "--no-build", "--no-deps", "prometheus")
            container = self.only("prometheus")
            ask = ["exec", container, "wget", "-q", "-O", "-", "http://127.0.0.1:9090/api/v1/query?query=up"]

            def scraped() -> list[str]:
                result = json.loads(self.docker.run(*ask))["data"]["result"]
                return sorted(series["metric"]["job"] for series in result if series["value"][1] == "1")

            until(lambda: scraped() == sorted(["gateway", *SERVICES]), 60, "two gateways and the others are up")
            found.append(f"up: {', '.join(scraped())}")

    def scale_in(self) -> None:
        with self.report.check("a gateway is stopped while it streams") as found:
            streams = [Stream(self.port, 64) for _ in range(4)]
            for stream in streams:
                stream.wait_for_pieces(4)
            self.docker.run("stop", "--time", "35", self.docker.containers("gateway")[1])
            failures = [error for error in (self.why_unanswered() for _ in range(4)) if error]
            for stream in streams:
                stream.finish()
            expect(not failures, f"{len(failures)} of 4 requests after it failed: {failures}")
            found.append("4 streams on both gateways whole, 4 of 4 requests after it answered")

    def stop(self) -> None:
        with self.report.check("stops in order, and lets a stream end") as found:
            stream = Stream(self.port, 64)
            stream.wait_for_pieces(5)
            begin = time.monotonic()
            self.docker.compose("stop", timeout_s=120)
            took = time.monotonic() - begin
            stream.finish()
            statuses = {
                service: [self.docker.inspect(one)["State"]["ExitCode"] for one in self.docker.containers(service)]
                for service in (*SERVICES, "front", "redis")
            }
            bad = {service: codes for service, codes in statuses.items() if any(codes)}
            expect(not bad, f"exit statuses {bad}")
            found.append(f"the stream was whole, every exit status is 0, {took:.1f} s")

    def run(self, *, is_quick: bool) -> int:
        """Number of failed checks."""
        try:
            self.start()
            if not self.report.num_failed:
                self.stream()
                if not is_quick:
                    self.confinement()
                    self.scale()
                    self.dies_during_a_stream("worker")
                    self.dies_during_a_stream("kvmanager")
                    self.gateway_dies()
                    self.scheduler_dies()
                    self.worker_is_cut_off()
                    self.kvmanager_hangs()
                    self.responses_are_shared()
                    self.redis_is_stopped()
                    self.prometheus_scrapes()
                    self.scale_in()
                self.stop()
            if self.report.num_failed:
                print(self.docker.compose("logs", "--no-color", "--tail", "40"), file=sys.stderr)
        finally:
            self.docker.compose("--profile", "*", "down", "--volumes", "--timeout", "5")
        return self.report.num_failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--no-build", action="store_true")
    parser.add_argument("--require", action="store_true", help="end with 1 if there is no engine")
    options = parser.parse_args()
    if reason := Docker.why_not_there():
        print(f"compose drill: not run: no engine ({reason})")
        return 1 if options.require else 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    docker = Docker(port)
    if reason := docker.why_not_possible(builds=not options.no_build):
        print(f"compose drill: not run: {reason}")
        return 1 if options.require else 0
    drill = Drill(docker, port, builds=not options.no_build)
    failed = drill.run(is_quick=options.quick)
    print(f"\n{drill.report.table()}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
