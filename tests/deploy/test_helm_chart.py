"""The chart against the schemas of Kubernetes, itself, and the services; and planted mistakes, which are caught."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from support.cross_references import problems
from support.custom_resources import SCHEMAS
from support.helm_chart import CHART, ChartError, render, run_helm

Documents = list[dict[str, Any]]

KUBERNETES = ("1.25", "1.29", "1.33", "1.37")

EVERYTHING: dict[str, Any] = {
    "model": {"claim": "models", "path": "llama-8b", "name": "llama-8b"},
    "secrets.existing": "octavo-secrets",
    "images": {"prefix": "registry.example/octavo", "tag": "1.2.3", "pullSecrets": [{"name": "registry"}]},
    "gateway": {
        "settings": {"queue_timeout_s": 60, "max_open_requests": 500},
        "autoscaling": {"enabled": True, "streamsPerReplica": 200},
        "nodeSelector": {"pool": "cpu"},
        "tolerations": [{"key": "cpu", "operator": "Exists"}],
    },
    "group": {
        "scheduler": {"settings": {"max_num_seqs": 128, "preemption": "swap"}},
        "kvmanager": {"settings": {"watermark": 0.02}},
        "worker": {"gpus": 1, "settings": {"max_num_seqs": 256, "max_num_batched_tokens": 8192}},
        "autoscaling": {"enabled": True},
        "nodeSelector": {"nvidia.com/gpu.product": "H200"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    },
    "networkPolicy": {
        "clients": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress"}}}],
        "monitoring": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
    },
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
}
VARIANTS: dict[str, dict[str, Any]] = {"defaults": {}, "everything": EVERYTHING}


@pytest.fixture(scope="module")
def everything(helm: str) -> Documents:
    return render(helm, EVERYTHING)


def validate(document: dict[str, Any], version: str) -> None:
    """Raises if the schema of this version of Kubernetes does not take the manifest, or if it has none for it."""
    if document["kind"] in SCHEMAS:
        jsonschema.validate(document, SCHEMAS[document["kind"]])
    else:
        kubernetes_validate.validate(document, version, strict=True)


# The chart as it is.


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_manifest_fits_the_schemas(helm: str, variant: str, version: str) -> None:
    documents = render(helm, VARIANTS[variant], f"{version}.0")
    assert len(documents) >= 11
    for document in documents:
        validate(document, version)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_reference_leads_somewhere(helm: str, variant: str) -> None:
    assert problems(render(helm, VARIANTS[variant])) == []


def test_helm_finds_no_fault(helm: str) -> None:
    assert "0 chart(s) failed" in run_helm(helm, "lint", "--strict", str(CHART))


def test_everything_is_on(everything: Documents) -> None:
    kinds = {document["kind"] for document in everything}
    assert {"HorizontalPodAutoscaler", "ScaledObject", "PodMonitor", "NetworkPolicy", "PodDisruptionBudget"} <= kinds


def test_a_group_with_gpus_asks_for_them_and_runs_the_image_for_them(everything: Documents) -> None:
    worker = container(everything, "StatefulSet", "worker")
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert worker["image"] == "registry.example/octavo/worker:1.2.3-gpu"
    assert {"name": "OCTAVO_WORKER_DEVICE", "value": "cuda"} in worker["env"]


def test_without_gpus_none_is_asked_for(helm: str) -> None:
    worker = container(render(helm, {}), "StatefulSet", "worker")
    assert "nvidia.com/gpu" not in worker["resources"]["limits"]
    assert worker["image"] == "octavo/worker:0.1.0-cpu"


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_container_is_confined(helm: str, variant: str) -> None:
    pods = [
        one["spec"]["template"]["spec"] for one in render(helm, VARIANTS[variant]) if "template" in one.get("spec", {})
    ]
    assert len(pods) == 2
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        for one in [*pod["containers"], *pod.get("initContainers", [])]:
            assert one["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"gateway.replica": 3}, "additional properties 'replica' not allowed"),
        ({"gateway.replicas": "three"}, "want integer"),
        ({"gateway.service.type": "Ingress"}, "must be one of"),
        ({"group.worker.gpus": -1}, "minimum"),
        ({"gateway.settings": {"Queue-Timeout": 1}}, "does not match pattern"),
        ({"podMonitor.interval": "often"}, "does not match pattern"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(helm: str, values: dict[str, Any], said: str) -> None:
    with pytest.raises(ChartError, match=said):
        render(helm, values)


# Mistakes, planted one by one.


def one(documents: Documents, kind: str, name: str = "") -> dict[str, Any]:
    (found,) = (item for item in documents if item["kind"] == kind and item["metadata"]["name"].endswith(name))
    return found


def container(documents: Documents, kind: str, name: str) -> dict[str, Any]:
    pod = one(documents, kind)["spec"]["template"]["spec"]
    (found,) = (item for item in pod["containers"] if item["name"] == name)
    result: dict[str, Any] = found
    return result


def set_variable(container: dict[str, Any], name: str, value: str, new_name: str | None = None) -> None:
    (variable,) = (item for item in container["env"] if item["name"] == name)
    variable |= {"name": new_name or name, "value": value}


def gateway(documents: Documents) -> dict[str, Any]:
    return container(documents, "Deployment", "gateway")


def scheduler(documents: Documents) -> dict[str, Any]:
    return container(documents, "StatefulSet", "scheduler")


def pod_of(documents: Documents, kind: str) -> dict[str, Any]:
    pod: dict[str, Any] = one(documents, kind)["spec"]["template"]["spec"]
    return pod


MISTAKES: dict[str, tuple[Callable[[Documents], Any], str]] = {
    "a selector that misses its pods": (
        lambda d: one(d, "Deployment")["spec"]["selector"]["matchLabels"].update(
            {"app.kubernetes.io/component": "gate"}
        ),
        "Deployment/octavo-gateway: its selector does not match its pods",
    ),
    "a StatefulSet of no Service": (
        lambda d: one(d, "StatefulSet")["spec"].update(serviceName="octavo-groups"),
        "no Service octavo-groups",
    ),
    "a ServiceAccount that is not there": (
        lambda d: pod_of(d, "Deployment").update(serviceAccountName="other"),
        "no ServiceAccount other",
    ),
    "variables of Services": (
        lambda d: pod_of(d, "Deployment").pop("enableServiceLinks"),
        "would be read as settings",
    ),
    "one port twice in a pod": (
        lambda d: scheduler(d)["ports"][1].update(containerPort=9102),
        "listen at the same port",
    ),
    "a mount of no volume": (
        lambda d: gateway(d)["volumeMounts"][0].update(name="model"),
        "gateway: no volume model",
    ),
    "a volume of no ConfigMap": (
        lambda d: one(d, "ConfigMap")["metadata"].update(name="settings"),
        "no ConfigMap octavo-settings",
    ),
    "a probe of a port that is not there": (
        lambda d: gateway(d)["readinessProbe"]["httpGet"].update(port="web"),
        "readinessProbe asks port web",
    ),
    "a probe of a path that is not there": (
        lambda d: scheduler(d)["livenessProbe"]["httpGet"].update(path="/healthz"),
        "livenessProbe asks /healthz",
    ),
    "no probe": (lambda d: scheduler(d).pop("startupProbe"), "scheduler: no startupProbe"),
    "a setting that is none": (
        lambda d: set_variable(gateway(d), "OCTAVO_GATEWAY_PORT", "8000", "OCTAVO_GATEWAY_HTTP_PORT"),
        "OCTAVO_GATEWAY_HTTP_PORT is no setting of the gateway",
    ),
    "a setting of another service": (
        lambda d: set_variable(scheduler(d), "OCTAVO_SCHEDULER_LOG_FORMAT", "json", "OCTAVO_GATEWAY_LOG_FORMAT"),
        "OCTAVO_GATEWAY_LOG_FORMAT is no setting of the scheduler",
    ),
    "a setting that is none, in a file": (
        lambda d: one(d, "ConfigMap")["data"].update({"gateway.yaml": "queue_timeout: 60"}),
        "gateway.yaml: queue_timeout is no setting of the gateway",
    ),
    "a value that the service refuses": (
        lambda d: one(d, "ConfigMap")["data"].update({"worker.yaml": "block_size: 7"}),
        "the worker refuses its settings",
    ),
    "a file that no ConfigMap has": (
        lambda d: set_variable(scheduler(d), "OCTAVO_SCHEDULER_CONFIG", "/etc/octavo/sched.yaml"),
        "no ConfigMap has sched.yaml",
    ),
    "a file on no volume": (
        lambda d: set_variable(scheduler(d), "OCTAVO_SCHEDULER_CONFIG", "/etc/other/scheduler.yaml"),
        "config /etc/other/scheduler.yaml is on no volume",
    ),
    "a service that listens where the container has no port": (
        lambda d: set_variable(gateway(d), "OCTAVO_GATEWAY_PORT", "8080"),
        "port 8080 is no port of the container",
    ),
    "metrics where the container has no port": (
        lambda d: set_variable(scheduler(d), "OCTAVO_SCHEDULER_METRICS_LISTEN", "0.0.0.0:9200"),
        "metrics_listen 9200 is no port of the container",
    ),
    "an address of no Service": (
        lambda d: set_variable(gateway(d), "OCTAVO_GATEWAY_SCHEDULER", "grpc://scheduler:7101"),
        "no Service scheduler",
    ),
    "an address at a port that the Service has not": (
        lambda d: set_variable(gateway(d), "OCTAVO_GATEWAY_SCHEDULER", "grpc://octavo-scheduler:7102"),
        "the Service has no port 7102",
    ),
    "a socket where nobody listens": (
        lambda d: set_variable(scheduler(d), "OCTAVO_SCHEDULER_WORKER", "frames:///run/octavo/w.sock"),
        "scheduler dials /run/octavo/w.sock, where nobody listens",
    ),
    "a socket on a volume of its own": (
        lambda d: scheduler(d)["volumeMounts"][0].update(name="tmp"),
        "scheduler and kvmanager do not share the volume of /run/octavo/kvmanager.sock",
    ),
    "more asked for than the limit": (
        lambda d: gateway(d)["resources"]["limits"].update(memory="256Mi"),
        "requests more memory than its limit",
    ),
    "no limit": (lambda d: gateway(d)["resources"].pop("limits"), "a limit of memory, are to be named"),
    "a drain that the kubelet cuts short": (
        lambda d: pod_of(d, "Deployment").update(terminationGracePeriodSeconds=30),
        "terminationGracePeriodSeconds 30 ends a drain of 35 s",
    ),
    "a Service that selects nothing": (
        lambda d: one(d, "Service", "-scheduler")["spec"]["selector"].update({"app.kubernetes.io/component": "x"}),
        "Service/octavo-scheduler: selects the pods of 0 workloads",
    ),
    "a Service to a port that is not there": (
        lambda d: one(d, "Service", "-gateway")["spec"]["ports"][0].update(targetPort="web"),
        "Service/octavo-gateway: no pod has a port web",
    ),
    "a budget for nothing": (
        lambda d: one(d, "PodDisruptionBudget", "-group")["spec"]["selector"]["matchLabels"].update(app="x"),
        "PodDisruptionBudget/octavo-group: selects no pods",
    ),
    "a policy that forgets a port": (
        lambda d: one(d, "NetworkPolicy", "-group")["spec"]["ingress"][1]["ports"].pop(),
        "lets nobody reach port worker-metrics",
    ),
    "a policy that lets in nobody": (
        lambda d: one(d, "NetworkPolicy", "-group")["spec"]["ingress"][0]["from"][0]["podSelector"][
            "matchLabels"
        ].update({"app.kubernetes.io/component": "gateways"}),
        "lets in pods that there are none of",
    ),
    "an autoscaler of nothing": (
        lambda d: one(d, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"].update(name="gateway"),
        "HorizontalPodAutoscaler/octavo-gateway: no Deployment gateway",
    ),
    "an autoscaler whose bounds cross": (
        lambda d: one(d, "HorizontalPodAutoscaler")["spec"].update(minReplicas=20),
        "minReplicas is above maxReplicas",
    ),
    "an autoscaler of a metric that nobody exports": (
        lambda d: one(d, "HorizontalPodAutoscaler")["spec"]["metrics"][1]["pods"]["metric"].update(
            name="octavo_streams"
        ),
        "no service exports octavo_streams",
    ),
    "an autoscaler of the wrong kind": (
        lambda d: one(d, "ScaledObject")["spec"]["scaleTargetRef"].update(kind="Deployment"),
        "ScaledObject/octavo-group: no Deployment octavo-group",
    ),
    "a trigger of a label that the metric lacks": (
        lambda d: one(d, "ScaledObject")["spec"]["triggers"][0]["metadata"].update(
            query='sum(octavo_queue_sequences{state="waiting"})'
        ),
        "octavo_queue_sequences has no label state",
    ),
    "replicas beside an autoscaler": (
        lambda d: one(d, "StatefulSet")["spec"].update(replicas=1),
        "StatefulSet/octavo-group sets replicas too",
    ),
    "a scrape of a port that is not there": (
        lambda d: one(d, "PodMonitor")["spec"]["podMetricsEndpoints"][0].update(port="prometheus"),
        "PodMonitor/octavo: no pod has a port prometheus",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_caught(everything: Documents, mistake: str) -> None:
    plant, said = MISTAKES[mistake]
    documents = copy.deepcopy(everything)
    plant(documents)
    assert said in "\n".join(problems(documents))


SCHEMA_MISTAKES: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "an unknown field": ("Deployment", lambda d: d["spec"].update(replica=2)),
    "a wrong type": ("StatefulSet", lambda d: d["spec"].update(replicas="two")),
    "a selector that is missing": ("Deployment", lambda d: d["spec"].pop("selector")),
    "an autoscaler of no target": ("HorizontalPodAutoscaler", lambda d: d["spec"].pop("scaleTargetRef")),
    "an API version that is gone": ("HorizontalPodAutoscaler", lambda d: d.update(apiVersion="autoscaling/v2beta1")),
    "a kind that is none": ("ConfigMap", lambda d: d.update(kind="ConfigMaps")),
    "an unknown field of KEDA": ("ScaledObject", lambda d: d["spec"].update(minReplicas=1)),
    "a threshold that is no text": ("ScaledObject", lambda d: d["spec"]["triggers"][0]["metadata"].update(threshold=8)),
    "an unknown field of the Prometheus Operator": (
        "PodMonitor",
        lambda d: d["spec"]["podMetricsEndpoints"][0].update(targetport="metrics"),
    ),
}


@pytest.mark.parametrize("mistake", SCHEMA_MISTAKES)
def test_a_planted_mistake_does_not_fit_the_schema(everything: Documents, mistake: str) -> None:
    kind, plant = SCHEMA_MISTAKES[mistake]
    document = copy.deepcopy(one(everything, kind))
    plant(document)
    with pytest.raises(
        (jsonschema.ValidationError, kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError)
    ):
        validate(document, "1.33")
