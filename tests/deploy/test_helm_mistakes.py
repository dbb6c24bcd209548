"""Mistakes planted in the chart's manifests one by one: the checks bite."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from support.chart_documents import EVERYTHING, Documents, container, one, validate
from support.cross_references import problems
from support.helm_chart import render


@pytest.fixture(scope="module")
def everything(helm: str) -> Documents:
    return render(helm, EVERYTHING)


@pytest.fixture(scope="module")
def plain(helm: str) -> Documents:
    return render(helm, {})


def variable(container: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (item for item in container["env"] if item["name"] == name)
    result: dict[str, Any] = found
    return result


def set_variable(container: dict[str, Any], name: str, value: str, new_name: str | None = None) -> None:
    variable(container, name).update(name=new_name or name, value=value)


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
    "a gateway that does not look into the registry": (
        lambda d: gateway(d)["env"].remove(variable(gateway(d), "OCTAVO_GATEWAY_REGISTRY")),
        "gateway: not in the registry of the others",
    ),
    "one pool for all pods": (
        lambda d: variable(scheduler(d), "OCTAVO_SCHEDULER_POOL_ID").update(value="default", valueFrom={}),
        "scheduler: every pod would serve the same pool",
    ),
    "an address that is not the pod's": (
        lambda d: variable(scheduler(d), "POD_IP").update(name="POD_ADDRESS"),
        "advertises $(POD_IP), which is not that of its pod",
    ),
    "a port at which nobody listens, advertised": (
        lambda d: set_variable(scheduler(d), "OCTAVO_SCHEDULER_ADVERTISE", "grpc://$(POD_IP):7102"),
        "advertises port 7102, where it does not listen",
    ),
    "a certificate of another role": (
        lambda d: one(d, "Certificate", "-scheduler")["spec"].update(dnsNames=["worker.octavo.internal"]),
        "the certificate in octavo-scheduler-tls is not for the scheduler",
    ),
    "a Secret that no Certificate fills": (
        lambda d: one(d, "Certificate", "-gateway")["spec"].update(secretName="gateway-tls"),
        "no Certificate for the Secret octavo-gateway-tls",
    ),
    "a certificate on no volume": (
        lambda d: set_variable(gateway(d), "OCTAVO_GATEWAY_LINK_CERT", "/certs/tls.crt"),
        "link_cert /certs/tls.crt is on no volume",
    ),
    "keys on no volume": (
        lambda d: set_variable(gateway(d), "OCTAVO_GATEWAY_API_KEYS_FILE", "/keys/octavo-keys.yaml"),
        "api_keys_file /keys/octavo-keys.yaml is on no volume",
    ),
    "an Ingress to a port that the Service has not": (
        lambda d: one(d, "Ingress")["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"].update(
            port={"name": "web"}
        ),
        "no Service octavo-gateway with a port web",
    ),
    "a policy that forgets the KV manager": (
        lambda d: one(d, "NetworkPolicy", "-group")["spec"]["ingress"][0]["ports"].pop(),
        "lets nobody reach port kv-grpc",
    ),
    "a scrape of a port that is not there": (
        lambda d: one(d, "PodMonitor")["spec"]["podMetricsEndpoints"][0].update(port="prometheus"),
        "PodMonitor/octavo: no pod has a port prometheus",
    ),
}

PLAIN_MISTAKES: dict[str, tuple[Callable[[Documents], Any], str]] = {
    "an address of no Service": (
        lambda d: set_variable(gateway(d), "OCTAVO_GATEWAY_SCHEDULER", "grpc://scheduler:7101"),
        "no Service scheduler",
    ),
    "an address at a port that the Service has not": (
        lambda d: set_variable(gateway(d), "OCTAVO_GATEWAY_SCHEDULER", "grpc://octavo-scheduler:7104"),
        "the Service has no port 7104",
    ),
    "the KV manager at a port that the Service has not": (
        lambda d: set_variable(gateway(d), "OCTAVO_GATEWAY_KVMANAGER_ADMIN", "octavo-scheduler:7103"),
        "the Service has no port 7103",
    ),
}
"""Of a deployment without a registry."""


@pytest.mark.parametrize("mistake", [*MISTAKES, *PLAIN_MISTAKES])
def test_a_planted_mistake_is_caught(everything: Documents, plain: Documents, mistake: str) -> None:
    plant, said = (MISTAKES | PLAIN_MISTAKES)[mistake]
    documents = copy.deepcopy(everything if mistake in MISTAKES else plain)
    plant(documents)
    assert said in "\n".join(problems(documents))


SCHEMA_MISTAKES: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "an unknown field": ("Deployment", lambda d: d["spec"].update(replica=2)),
    "a wrong type": ("StatefulSet", lambda d: d["spec"].update(replicas="two")),
    "a selector that is missing": ("Deployment", lambda d: d["spec"].pop("selector")),
    "an autoscaler of no target": ("HorizontalPodAutoscaler", lambda d: d["spec"].pop("scaleTargetRef")),
    "an API version that is gone": ("HorizontalPodAutoscaler", lambda d: d.update(apiVersion="autoscaling/v2beta1")),
    "a kind that is none": ("ConfigMap", lambda d: d.update(kind="ConfigMaps")),
    "an Ingress without a kind of path": (
        "Ingress",
        lambda d: d["spec"]["rules"][0]["http"]["paths"][0].pop("pathType"),
    ),
    "an unknown field of cert-manager": ("Certificate", lambda d: d["spec"].update(hosts=["a"])),
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
    document = copy.deepcopy(one(everything, kind, "-scheduler" if kind == "Certificate" else ""))
    plant(document)
    with pytest.raises(
        (jsonschema.ValidationError, kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError)
    ):
        validate(document, "1.33")
