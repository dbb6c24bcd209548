"""What the drills of the compose file share: the engine with the project, and clients of its front."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drill_report import CheckFailedError, expect

ROOT = Path(__file__).parents[1]
PROJECT = "octavo-drill"

PROMPT = "Count: one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve,"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


class Docker:
    """The engine, and Compose for this project."""

    def __init__(self, overlays: Sequence[str] = ()) -> None:
        """`overlays`: names of deploy/compose.NAME.yml, which may change later."""
        self.port, self.tls_port, self.prometheus_port = free_port(), free_port(), free_port()
        self.environment = {
            **os.environ,
            "OCTAVO_PUBLISH": f"127.0.0.1:{self.port}",
            "OCTAVO_PUBLISH_TLS": f"127.0.0.1:{self.tls_port}",
            "OCTAVO_PROMETHEUS_PUBLISH": f"127.0.0.1:{self.prometheus_port}",
            "DOCKER_BUILDKIT": "1",
        }
        self.overlays = list(overlays)

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
        files = ["docker-compose.yml", *(f"deploy/compose.{name}.yml" for name in self.overlays)]
        named = [part for file in files for part in ("-f", file)]
        return self._run([*self._find_compose(), "-p", PROJECT, *named, *arguments], timeout_s)

    def up(self, *options: str) -> None:
        """Start what is not running, from images that are there."""
        self.compose("up", "--detach", "--no-build", *options, timeout_s=900)

    def _run(self, command: list[str], timeout_s: float) -> str:
        finished = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=timeout_s
        )
        if finished.returncode:
            raise subprocess.CalledProcessError(finished.returncode, command, finished.stdout, finished.stderr)
        return finished.stdout.strip()

    @contextmanager
    def events(self) -> Iterator[list[dict[str, Any]]]:
        """Which of the project's containers start, end or get healthy while this is open. It is there afterwards.

        It is listened to as it happens: the engine remembers only the last few hundred events, most of them of probes.
        """
        kinds = [f"--filter=event={kind}" for kind in ("start", "die", "health_status")]
        filters = [f"--filter=label=com.docker.compose.project={PROJECT}", "--filter=type=container", *kinds]
        command = ["docker", "events", "--format={{json .}}", *filters]
        happened: list[dict[str, Any]] = []
        listening = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            yield happened
        finally:
            listening.terminate()
            output, _ = listening.communicate()
            happened += [json.loads(line) for line in output.splitlines()]

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

    def only(self, service: str) -> str:
        """Its container. Raises CheckFailedError if there is not one."""
        found = self.containers(service)
        expect(len(found) == 1, f"{len(found)} containers of {service}")
        return found[0]

    def is_healthy(self, container: str) -> bool:
        return bool(self.inspect(container)["State"]["Health"]["Status"] == "healthy")

    def inspect(self, container: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(self.run("inspect", container))
        return found[0]

    def crash(self, container: str) -> None:
        """Kill the service's process from within, which unlike `docker kill` is no wish to stop the container."""
        subprocess.run(["docker", "exec", container, "sh", "-c", "kill -s KILL -- -1"], capture_output=True, timeout=30)

    def get(self, container: str, path: str, port: int = 9100) -> str:
        """A page of the service, by default at its port for probes and scrapers."""
        url = f"http://127.0.0.1:{port}{path}"
        code = f"import urllib.request as r; print(r.urlopen('{url}', timeout=5).read().decode())"
        return self.run("exec", container, "python", "-c", code)

    def sample(self, container: str, name: str) -> float:
        """Sum of the samples whose lines begin so."""
        lines = self.get(container, "/metrics").splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@dataclass(frozen=True)
class Front:
    """Where clients ask: with `ca_text` by HTTPS, with a key or without."""

    port: int
    ca_text: str = ""
    api_key: str = ""

    def post(self, path: str, body: dict[str, Any], within_s: float = 60) -> http.client.HTTPResponse:
        """Raises OSError, HTTPException."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=within_s)
        if self.ca_text:
            context = ssl.create_default_context(cadata=self.ca_text)
            connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=within_s, context=context)
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        connection.request("POST", path, json.dumps(body), headers)
        return connection.getresponse()


class Stream(threading.Thread):
    """One streamed greedy completion, read in the background."""

    def __init__(self, front: Front, max_tokens: int, within_s: float = 240) -> None:
        super().__init__(daemon=True)
        self._front, self._within_s = front, within_s
        self._body = {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "stream": True, "ignore_eos": True}
        self.text, self.error, self.is_whole = "", "", False
        self.times_s: list[float] = []
        """When each piece came."""
        self.start()

    def run(self) -> None:
        try:
            response = self._front.post("/v1/completions", self._body, self._within_s)
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


class Load:
    """Clients that ask one after another, until they are told to finish."""

    def __init__(self, front: Front, num_clients: int) -> None:
        self._front, self._is_over = front, threading.Event()
        self._streams: list[Stream] = []
        self._clients = [threading.Thread(target=self._ask, daemon=True) for _ in range(num_clients)]
        for client in self._clients:
            client.start()

    def _ask(self) -> None:
        while not self._is_over.is_set():
            stream = Stream(self._front, 16)
            self._streams.append(stream)
            stream.join()

    def finish(self) -> str:
        """What came of it. Raises CheckFailedError if a request failed."""
        self._is_over.set()
        for client in self._clients:
            client.join()
        failed = [stream.error or "silence" for stream in self._streams if not stream.is_whole]
        expect(not failed, f"{len(failed)} of {len(self._streams)} requests failed, one with {failed[:1]}")
        longest = max(stream.longest_pause_s for stream in self._streams)
        return f"{len(self._streams)} requests, none failed, longest pause {longest:.1f} s"


def why_unanswered(front: Front) -> str:
    """Empty if one short request is answered."""
    stream = Stream(front, 2, within_s=30)
    stream.join(30)
    return "" if stream.is_whole else stream.error or "silence for 30 s"
