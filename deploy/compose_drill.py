"""Runs docker-compose.yml for real: starts it, streams through it, scales it, and breaks one thing after another.

    python3 deploy/compose_drill.py            all checks, some minutes
    python3 deploy/compose_drill.py --quick    start, one streamed answer, graceful stop
    python3 deploy/compose_drill.py --secured  with deploy/compose.tls.yml and compose.keys.yml
    python3 deploy/compose_drill.py --no-build with the images that are there

Needs a Docker engine and Compose, and of Python the standard library alone. Without an engine, or without the images
that others make, it says that it did not run and ends with 0 (with 1 if --require is given); else the exit status is
the number of failed checks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from compose_project import PROJECT, Docker, Front, Load, Stream, why_unanswered
from drill_report import Report, expect, until
from drilled_prometheus import Prometheus
from secured_drill import SecuredDrill

SERVICES = ("gateway", "scheduler", "kvmanager", "worker")
STARTED_AFTER = {
    "kvmanager": ("redis",),
    "worker": ("model", "redis"),
    "scheduler": ("kvmanager", "worker"),
    "gateway": ("scheduler", "redis", "responses"),
    "front": ("gateway",),
}
"""Service |-> those that are to be healthy (the model: done) before it starts."""

WORKING, BEGUN = "octavo_worker_open_slots", "octavo_scheduler_requests_total"


@dataclass
class Drill:
    """The checks of the compose file."""

    docker: Docker
    builds: bool
    is_quick: bool
    report: Report = field(default_factory=Report)
    undisturbed: str = ""

    @property
    def front(self) -> Front:
        return Front(self.docker.port)

    def answers(self) -> bool:
        """One short request through the front is answered."""
        return not why_unanswered(self.front)

    def start(self) -> None:
        with self.report.check("starts in the order of health") as found:
            if self.builds:
                self.docker.compose("build", timeout_s=1800)
            built = time.monotonic()
            with self.docker.events() as events:
                self.docker.up()
                until(self.answers, 60, "an answer through the front")
            started, ready = self._first_times(events)
            for service, earlier in STARTED_AFTER.items():
                for one in earlier:
                    expect(one in ready, f"{one} was never healthy")
                    expect(ready[one] <= started[service], f"{service} started before {one} was healthy")
            found.append(" < ".join(sorted(started, key=started.__getitem__)))
            found.append(f"answering {time.monotonic() - built:.0f} s after up")

    @staticmethod
    def _first_times(events: list[dict[str, Any]]) -> tuple[dict[str, int], dict[str, int]]:
        """When each service was first started, and first healthy; a one-shot service is so when it ends with 0."""
        started: dict[str, int] = {}
        ready: dict[str, int] = {}
        for event in events:
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
            stream = Stream(self.front, 96).finish()
            self.undisturbed = stream.text
            expect(len(stream.times_s) > 48, f"only {len(stream.times_s)} pieces")
            found.append(f"{len(stream.times_s)} pieces, the first after {stream.times_s[0] - begin:.2f} s")
            found.append(f"longest pause {stream.longest_pause_s:.2f} s")

    def confinement(self) -> None:
        with self.report.check("runs confined") as found:
            for service in (*SERVICES, "front", "redis", "responses"):
                container = self.docker.only(service)
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
                torch = ["docker", "exec", self.docker.only(service), "python", "-c", "import torch"]
                expect(subprocess.run(torch, capture_output=True).returncode, f"{service} has torch")
            found.append("no torch outside the worker")
            probe = ["docker", "exec", self.docker.only("front"), "wget", "-q", "-T", "3", "-t", "1", "-O", "/dev/null"]
            reached = subprocess.run([*probe, "http://worker:9100/health/live"], capture_output=True)
            expect(reached.returncode, "the front reaches the worker")
            found.append("the front does not reach the worker")

    def scale(self) -> None:
        with self.report.check("two gateways share the load") as found:
            self.docker.up("--no-recreate", "--scale", "gateway=2", "--wait")
            both = self.docker.containers("gateway")
            expect(len(both) == 2, f"{len(both)} gateways")

            def served(container: str) -> int:
                return int(self.docker.sample(container, 'octavo_http_requests_total{route="/v1/completions"'))

            before = {container: served(container) for container in both}

            def both_served() -> bool:
                for stream in [Stream(self.front, 8) for _ in range(4)]:
                    stream.finish()
                return all(served(container) > before[container] for container in both)

            until(both_served, 60, "both gateways have answered")
            found.append("requests each: " + ", ".join(str(served(one) - before[one]) for one in both))

    def dies_during_a_stream(self, service: str) -> None:
        with self.report.check(f"{service} crashes during a stream") as found:
            container = self.docker.only(service)
            before = self.docker.inspect(container)["RestartCount"]
            stream = Stream(self.front, 96)
            stream.wait_for_pieces(10)
            self.docker.crash(container)
            stream.finish()
            expect(stream.text == self.undisturbed, f"the answer differs: {stream.text[-80:]!r}")
            found.append(f"the answer is the undisturbed one; longest pause {stream.longest_pause_s:.2f} s")
            until(lambda: self.docker.inspect(container)["RestartCount"] > before, 30, f"{service} is restarted")
            found.append("restarted by its policy")
            until(lambda: self.docker.is_healthy(container), 90, f"{service} is healthy again")

    def gateway_dies(self) -> None:
        with self.report.check("one of two gateways crashes") as found:
            one = self.docker.containers("gateway")[0]
            self.docker.crash(one)
            failures = [error for error in (why_unanswered(self.front) for _ in range(6)) if error]
            expect(not failures, f"{len(failures)} of 6 requests after it failed: {failures}")
            found.append("6 of 6 requests after it answered by the other")
            took = until(lambda: self.docker.is_healthy(one), 60, "the gateway is healthy again")
            found.append(f"healthy again after {took:.0f} s")

    def standby_takes_over(self) -> None:
        with self.report.check("of two workers the one that works crashes") as found:
            self.docker.up("--no-recreate", "--scale", "gateway=2", "--scale", "worker=2", "--wait")
            stream = Stream(self.front, 96)
            stream.wait_for_pieces(10)
            works = [one for one in self.docker.containers("worker") if self.docker.sample(one, WORKING) > 0]
            expect(len(works) == 1, f"{len(works)} workers have open slots")
            self.docker.crash(works[0])
            stream.finish()
            expect(stream.text == self.undisturbed, f"the answer differs: {stream.text[-80:]!r}")
            found.append(f"the other went on to the same answer; longest pause {stream.longest_pause_s:.2f} s")
            until(lambda: self.docker.is_healthy(works[0]), 90, "the worker is healthy again")

    def worker_is_scaled_in(self) -> None:
        with self.report.check("one of two workers is scaled in during a stream") as found:
            stream = Stream(self.front, 96)
            stream.wait_for_pieces(10)
            self.docker.up("--no-recreate", "--scale", "gateway=2", "--scale", "worker=1")
            stream.finish()
            expect(stream.text == self.undisturbed, f"the answer differs: {stream.text[-80:]!r}")
            expect(len(self.docker.containers("worker")) == 1, "not one worker is left")
            found.append(f"the answer is the undisturbed one; longest pause {stream.longest_pause_s:.2f} s")

    def second_group(self) -> None:
        with self.report.check("a second group joins, and the first one's scheduler crashes") as found:
            self.docker.overlays = ["groups"]
            self.docker.up("--no-recreate", "--scale", "gateway=2", "--wait")
            gateway = self.docker.containers("gateway")[0]

            def states() -> dict[str, str]:
                groups: dict[str, str] = json.loads(self.docker.get(gateway, "/health/ready", 8000)).get("groups", {})
                return groups

            until(lambda: states() == {"default": "ready", "second": "ready"}, 90, "two groups are ready")
            streams = [Stream(self.front, 96) for _ in range(4)]
            for stream in streams:
                stream.wait_for_pieces(4)
            begun = [int(self.docker.sample(self.docker.only(one), BEGUN)) for one in ("scheduler", "scheduler-2")]
            expect(begun[1], "the second group got no request")
            self.docker.crash(self.docker.only("scheduler"))
            for stream in streams:
                stream.finish()
                expect(stream.text == self.undisturbed, f"an answer differs: {stream.text[-80:]!r}")
            longest = max(stream.longest_pause_s for stream in streams)
            found.append(f"4 streams whole and the same; longest pause {longest:.2f} s")
            self.docker.overlays = []
            self.docker.up("--no-recreate", "--scale", "gateway=2", "--remove-orphans")
            until(self.answers, 60, "the first group answers alone")

    def worker_is_cut_off(self) -> None:
        with self.report.check("worker is cut off the network for 20 s") as found:
            worker, network = self.docker.only("worker"), f"{PROJECT}_cluster"
            stream = Stream(self.front, 96)
            stream.wait_for_pieces(10)
            self.docker.run("network", "disconnect", network, worker)
            time.sleep(20)
            self.docker.run("network", "connect", "--alias", "worker", network, worker)
            stream.finish()
            expect(stream.text == self.undisturbed, f"the answer differs: {stream.text[-80:]!r}")
            found.append(f"the stream paused for {stream.longest_pause_s:.1f} s and went on to the same answer")

    def kvmanager_hangs(self) -> None:
        with self.report.check("kvmanager hangs for 5 s") as found:
            container = self.docker.only("kvmanager")
            stream = Stream(self.front, 96)
            stream.wait_for_pieces(10)
            self.docker.run("pause", container)
            time.sleep(5)
            self.docker.run("unpause", container)
            stream.finish()
            expect(stream.text == self.undisturbed, f"the answer differs: {stream.text[-80:]!r}")
            found.append(f"the answer is the undisturbed one; longest pause {stream.longest_pause_s:.2f} s")
            until(lambda: self.docker.is_healthy(container), 60, "the KV manager is healthy again")

    def replaced_under_load(self) -> None:
        with self.report.check("worker, kvmanager and scheduler are replaced under load") as found:
            for service in ("worker", "kvmanager", "scheduler"):
                before = self.docker.only(service)
                load = Load(self.front, 3)
                self.docker.up("--no-deps", "--force-recreate", "--wait", service)
                found.append(f"{service}: {load.finish()}")
                expect(self.docker.only(service) != before, f"{service} is the container that it was")

    def gateways_replaced_under_load(self) -> None:
        with self.report.check("both gateways are replaced under load") as found:
            old = set(self.docker.containers("gateway"))
            self.docker.environment["OCTAVO_ADMIN_KEY"] = "makes the gateways' settings other ones"
            load = Load(self.front, 3)
            self.docker.up("--no-deps", "--no-recreate", "--scale", "gateway=4", "--wait", "gateway")
            self.docker.up("--no-deps", "--scale", "gateway=2", "gateway")
            found.append(load.finish())
            new = self.docker.containers("gateway")
            expect(len(new) == 2 and not old & set(new), "not two new gateways are left")

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
            container = self.docker.only("redis")
            self.docker.run("kill", container)
            expect(self.answers(), "a request failed without it")
            self.docker.run("start", container)
            until(lambda: self.docker.is_healthy(container), 60, "redis is healthy again")
            found.append("completions are answered without it")

    def prometheus_scrapes(self) -> None:
        with self.report.check("prometheus scrapes every service") as found:
            self.docker.compose("--profile", "monitoring", "up", "--detach", "--no-build", "--no-deps", "prometheus")
            prometheus = Prometheus(self.docker.prometheus_port)

            def silent_panels() -> set[str]:
                """Under load; without keys there are no tenants to show."""
                for stream in [Stream(self.front, 24) for _ in range(4)]:
                    stream.finish()
                return set(prometheus.silent_panels()) - {"Tokens by tenant"}

            wanted = sorted(["gateway", *SERVICES])
            until(lambda: prometheus.scraped_jobs() == wanted, 60, "two gateways and the others are up")
            found.append(f"up: {', '.join(wanted)}")
            until(prometheus.all_alerts_evaluate, 60, "every alert is evaluated without an error")
            files = "check config /etc/octavo/prometheus.yml", "test rules /etc/octavo/alerts_test.yml"
            for arguments in files:
                self.docker.run("exec", self.docker.only("prometheus"), "promtool", *arguments.split())
            expect(not (rowless := prometheus.undocumented_metrics()), f"not in docs/operations.md: {rowless}")
            until(lambda: not silent_panels(), 60, "every panel of the dashboard shows something")
            found.append("alerts are evaluated; every metric is documented, every panel of the dashboard has data")

    def scale_in(self) -> None:
        with self.report.check("a gateway is stopped while it streams") as found:
            streams = [Stream(self.front, 64) for _ in range(4)]
            for stream in streams:
                stream.wait_for_pieces(4)
            self.docker.run("stop", "--time", "35", self.docker.containers("gateway")[1])
            failures = [error for error in (why_unanswered(self.front) for _ in range(4)) if error]
            for stream in streams:
                stream.finish()
            expect(not failures, f"{len(failures)} of 4 requests after it failed: {failures}")
            found.append("4 streams on both gateways whole, 4 of 4 requests after it answered")

    def stop(self) -> None:
        with self.report.check("stops in order, and lets a stream end") as found:
            stream = Stream(self.front, 64)
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

    def run(self) -> int:
        """Number of failed checks."""
        try:
            self.start()
            if not self.report.num_failed:
                self.stream()
                if not self.is_quick:
                    self.confinement()
                    self.scale()
                    self.dies_during_a_stream("worker")
                    self.dies_during_a_stream("kvmanager")
                    self.dies_during_a_stream("scheduler")
                    self.standby_takes_over()
                    self.worker_is_scaled_in()
                    self.second_group()
                    self.gateway_dies()
                    self.worker_is_cut_off()
                    self.kvmanager_hangs()
                    self.replaced_under_load()
                    self.gateways_replaced_under_load()
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
    parser.add_argument("--secured", action="store_true", help="with TLS and API keys, instead of without")
    parser.add_argument("--no-build", action="store_true")
    parser.add_argument("--require", action="store_true", help="end with 1 if there is no engine")
    options = parser.parse_args()
    if reason := Docker.why_not_there():
        print(f"compose drill: not run: no engine ({reason})")
        return 1 if options.require else 0
    docker = Docker(["tls", "keys"] if options.secured else [])
    if reason := docker.why_not_possible(builds=not options.no_build):
        print(f"compose drill: not run: {reason}")
        return 1 if options.require else 0
    builds = not options.no_build
    drill = SecuredDrill(docker, builds) if options.secured else Drill(docker, builds, options.quick)
    failed = drill.run()
    print(f"\n{drill.report.table()}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
