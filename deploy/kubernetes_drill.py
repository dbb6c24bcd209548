"""Installs the chart on the cluster that kubectl points at, streams through it, and upsets it.

    python3 deploy/kubernetes_drill.py --values my-values.yaml

Needs kubectl, helm, a cluster that has the images, and of Python the standard library alone. It makes the namespace
octavo-drill and removes it. --autoscale checks the HorizontalPodAutoscaler too, for which the cluster needs a metrics
API. The exit status is the number of failed checks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from drill_report import Report, expect, until

CHART = Path(__file__).with_name("helm") / "octavo"
NAMESPACE, RELEASE = "octavo-drill", "octavo"
GATEWAY, GROUP = f"deployment/{RELEASE}-gateway", f"statefulset/{RELEASE}-group"

OLDER_APIS = {"autoscaling/v2": "autoscaling/v2beta2", "policy/v1": "policy/v1beta1"}
"""The same objects under the names of clusters before 1.25."""

CRASH = "import os, time; os.kill(1, 15); time.sleep(0.3); os.kill(1, 15)"
"""Ends a container from within at once: nothing there can kill its first process, which ends on a second SIGTERM."""

CLIENT = r"""
import http.client, json, sys, time
url, count, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
body = {"prompt": "Count: one, two, three, four, five,", "max_tokens": count, "temperature": 0, "ignore_eos": True,
        "stream": True}
end = time.monotonic() + seconds
while True:
    pieces, is_whole, error, text = 0, False, "", ""
    try:
        connection = http.client.HTTPConnection(url, timeout=120)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            error = f"HTTP {response.status}: {response.read(200).decode()}"
        while not error and (line := response.readline().decode().strip(" \n")) is not None:
            if line == "data: [DONE]":
                is_whole = True
                break
            if line.startswith("data:"):
                event = json.loads(line[5:])
                error = event.get("error", {}).get("message", "")
                choices = event.get("choices") or [{"text": ""}]
                pieces += bool(choices[0]["text"])
                text += choices[0]["text"]
            elif not line and response.isclosed():
                break
        connection.close()
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    print(json.dumps({"pieces": pieces, "is_whole": is_whole, "error": error, "text": text}), flush=True)
    if time.monotonic() > end:
        break
    if error:
        time.sleep(0.2)
"""
"""Streams one completion after another for some seconds; a line of JSON for each."""


TOKENIZER_CLIENT = r"""
import http.client, json, sys, time
body = json.dumps({"prompt": "one two three four " * 1000})
end, count = time.monotonic() + float(sys.argv[2]), 0
while time.monotonic() < end:
    connection = http.client.HTTPConnection(sys.argv[1], timeout=60)
    connection.request("POST", "/tokenize", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    response.read()
    assert response.status == 200, response.status
    count += 1
print(count)
"""
"""Work for gateways alone, which on a small cluster a slow worker would keep from getting any; prints how many."""


def kubectl(*arguments: str, given: str | None = None, timeout_s: float = 60) -> str:
    """Output of kubectl in the namespace. Raises CalledProcessError, TimeoutExpired."""
    command = ["kubectl", "--namespace", NAMESPACE, *arguments]
    finished = subprocess.run(command, input=given, capture_output=True, text=True, timeout=timeout_s, check=True)
    return finished.stdout.strip()


def get(what: str, path: str) -> str:
    return kubectl("get", *what.split(), "--output", f"jsonpath={{{path}}}")


def service_address() -> str:
    """The virtual address of the gateways' Service: what is drilled is the chart, not the cluster's DNS."""
    return get(f"service/{RELEASE}-gateway", ".spec.clusterIP")


class Load(threading.Thread):
    """Clients in a pod of the cluster that stream through the Service."""

    def __init__(self, num_clients: int, seconds: float, num_tokens: int = 16) -> None:
        super().__init__(daemon=True)
        arguments = ["python", "-c", CLIENT, service_address(), str(num_tokens), str(seconds)]
        command = ["kubectl", "--namespace", NAMESPACE, "exec", "client", "--", *arguments]
        self._processes = [
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            for _ in range(num_clients)
        ]
        self.answers: list[dict[str, Any]] = []
        self.start()

    def run(self) -> None:
        for process in self._processes:
            output, _ = process.communicate()
            self.answers += [json.loads(line) for line in output.splitlines()]

    def finish(self, within_s: float = 300) -> list[dict[str, Any]]:
        """Every answer. Raises CheckFailedError if one was not whole."""
        self.join(within_s)
        bad = [answer for answer in self.answers if not answer["is_whole"]]
        expect(self.answers, "no request was answered")
        expect(not bad, f"{len(bad)} of {len(self.answers)} requests failed, one with {bad[:1]}")
        return self.answers


class Drill:
    """The checks of the chart."""

    def __init__(self, values: list[str], before: list[str]) -> None:
        self.report = Report()
        self._before = before
        self._values = [option for file in values for option in ("--values", file)]

    def apply(self, *settings: str) -> None:
        """Install or upgrade: the rendered chart, under the names of API versions that the cluster has."""
        options = [option for setting in settings for option in ("--set", setting)]
        command = ["helm", "template", RELEASE, str(CHART), "--namespace", NAMESPACE, *self._values, *options]
        manifests = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        served = kubectl("api-versions").split()
        for current, older in OLDER_APIS.items():
            if current not in served:
                manifests = manifests.replace(f"apiVersion: {current}\n", f"apiVersion: {older}\n")
        kubectl("apply", "--filename", "-", given=manifests)

    def install(self) -> None:
        with self.report.check("every pod gets ready through its probes") as found:
            kubectl("create", "namespace", NAMESPACE)
            for file in self._before:
                kubectl("apply", "--filename", file)
            self.apply()
            begin = time.monotonic()
            for workload in (GROUP, GATEWAY):
                kubectl("rollout", "status", workload, "--timeout=400s", timeout_s=420)
            pods = json.loads(kubectl("get", "pods", "--output", "json"))["items"]
            statuses = [status for pod in pods for status in pod["status"]["containerStatuses"]]
            expect(all(status["ready"] for status in statuses), "a container is not ready")
            expect(not any(status["restartCount"] for status in statuses), "a container was started more than once")
            found.append(f"{len(pods)} pods, {len(statuses)} containers, no restart, {time.monotonic() - begin:.0f} s")
            image = get(GATEWAY, ".spec.template.spec.containers[0].image")
            kubectl("run", "client", f"--image={image}", "--restart=Never", "--command", "--", "sleep", "86400")
            kubectl("wait", "pod/client", "--for=condition=Ready", "--timeout=60s", timeout_s=70)

    def stream(self) -> None:
        with self.report.check("an answer is streamed through the Service") as found:
            (answer,) = Load(1, 0, num_tokens=64).finish()
            expect(answer["pieces"] > 32, f"only {answer['pieces']} pieces")
            found.append(f"{answer['pieces']} pieces: {answer['text'][:40]!r}")

    def delete_a_pod(self) -> None:
        with self.report.check("a gateway's pod is deleted under load") as found:
            load = Load(4, 30)
            time.sleep(3)
            pod = get(f"pods --selector={self.selector('gateway')}", ".items[0].metadata.name")
            kubectl("delete", "pod", pod, "--wait=false")
            found.append(f"{len(load.finish())} requests, none failed")
            kubectl("rollout", "status", GATEWAY, "--timeout=240s", timeout_s=250)

    def crash_a_worker(self) -> None:
        with self.report.check("the worker's container dies under a stream") as found:
            restarts = f"pod/{RELEASE}-group-0", '.status.containerStatuses[?(@.name=="worker")].restartCount'
            before = int(get(*restarts))
            load = Load(1, 0, num_tokens=96)
            time.sleep(3)
            kill = ["exec", f"{RELEASE}-group-0", "--container", "worker", "--", "python", "-c", CRASH]
            subprocess.run(["kubectl", "--namespace", NAMESPACE, *kill], capture_output=True, timeout=30)
            begin = time.monotonic()
            (answer,) = load.finish()
            found.append(f"the stream was whole ({answer['pieces']} pieces) {time.monotonic() - begin:.0f} s later")
            until(lambda: int(get(*restarts)) == before + 1, 60, "the container is started again, and it alone")
            kubectl("rollout", "status", GROUP, "--timeout=120s", timeout_s=130)
            found.append("started again, the pod ready again")

    def roll_out(self) -> None:
        with self.report.check("gateways are rolled out under load") as found:
            old = self.gateway_pods()
            load = Load(4, 60)
            self.apply("gateway.settings.max_open_requests=500")
            kubectl("rollout", "status", GATEWAY, "--timeout=300s", timeout_s=310)
            answers = load.finish()
            until(lambda: not old & self.gateway_pods(), 60, "the old pods are gone")
            found.append(f"{len(answers)} requests, none failed; {len(self.gateway_pods())} new pods")

    def roll_out_groups(self) -> None:
        with self.report.check("groups are rolled out under load") as found:
            answers: list[dict[str, Any]] = []
            self.apply("group.scheduler.settings.max_num_waiting=2000")
            until(lambda: int(get(GROUP, ".status.updatedReplicas") or 0) == 0, 30, "the rollout begins")
            while get(GROUP, ".status.updateRevision") != get(GROUP, ".status.currentRevision"):
                answers += Load(2, 10).finish()
                expect(len(answers) < 5000, "the rollout does not end")
            kubectl("rollout", "status", GROUP, "--timeout=300s", timeout_s=310)
            found.append(f"{len(answers)} requests, none failed")

    def broken_roll_out(self) -> None:
        with self.report.check("a rollout that never gets ready takes nothing away") as found:
            self.apply("gateway.settings.max_open_request=500")
            time.sleep(20)
            answers = Load(2, 5).finish()
            reasons = get(
                f"pods --selector={self.selector('gateway')}", ".items[*].status.containerStatuses[0].state.*.reason"
            )
            self.apply()
            kubectl("rollout", "status", GATEWAY, "--timeout=240s", timeout_s=250)
            found.append(
                f"a setting that is none: {reasons or 'not ready'}; {len(answers)} requests meanwhile, none failed"
            )

    def autoscale(self) -> None:
        with self.report.check("the autoscaler scales gateways out, and in again") as found:
            self.apply("gateway.autoscaling.enabled=true", "gateway.autoscaling.minReplicas=1",
                       "gateway.autoscaling.maxReplicas=3", "gateway.autoscaling.cpuUtilization=50")  # fmt: skip
            until(lambda: self.replicas() == 1, 300, "one gateway without load")
            arguments = ["exec", "client", "--", "python", "-c", TOKENIZER_CLIENT, service_address(), "90"]
            command = ["kubectl", "--namespace", NAMESPACE, *arguments]
            clients = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
            took = until(lambda: self.replicas() > 1, 120, "more gateways under load")
            found.append(f"out to {self.replicas()} after {took:.0f} s of load")
            until(lambda: int(get(GATEWAY, ".status.readyReplicas") or 0) > 1, 180, "the new one is ready")
            counts = [client.communicate(timeout=180)[0].strip() for client in clients]
            expect(all(counts), f"a client's request failed: {counts}")
            found.append(f"{sum(map(int, counts))} requests, none failed")
            took = until(lambda: self.replicas() == 1, 400, "one gateway again")
            found.append(f"in to 1 after {took:.0f} s without")

    def gateway_pods(self) -> set[str]:
        return set(get(f"pods --selector={self.selector('gateway')}", ".items[*].metadata.name").split())

    @staticmethod
    def replicas() -> int:
        return int(get(GATEWAY, ".spec.replicas"))

    @staticmethod
    def selector(component: str) -> str:
        return f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/component={component}"

    def run(self, *, autoscales: bool) -> int:
        """Number of failed checks."""
        try:
            self.install()
            if not self.report.num_failed:
                self.stream()
                self.delete_a_pod()
                self.crash_a_worker()
                self.roll_out()
                if int(get(GROUP, ".spec.replicas")) > 1:
                    self.roll_out_groups()
                self.broken_roll_out()
                if autoscales:
                    self.autoscale()
            if self.report.num_failed:
                print(kubectl("get", "pods,events"), file=sys.stderr)
        finally:
            kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", timeout_s=180)
        return self.report.num_failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", action="append", default=[])
    parser.add_argument("--before", action="append", default=[], help="manifests to apply first, such as claims")
    parser.add_argument("--autoscale", action="store_true")
    options = parser.parse_args()
    try:
        kubectl("get", "--raw", "/readyz")
    except (OSError, subprocess.SubprocessError) as error:
        print(f"kubernetes drill: not run: no cluster answers ({error})")
        return 1
    drill = Drill(options.values, options.before)
    failed = drill.run(autoscales=options.autoscale)
    print(f"\n{drill.report.table()}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
