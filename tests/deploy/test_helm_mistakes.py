"""Mistakes planted in the chart's manifests one by one: the checks bite."""

from __future__ import annotations

import copy
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from support.chart_documents import EVERYTHING, Documents, container, one, validate
from support.cross_references import problems
from support.helm_chart import render

REMOVED = object()

COMPONENT = "app.kubernetes.io/component"

MISTAKES: list[tuple[str, str, object, str]] = [
    ("a selector that misses its pods", f"Deployment spec selector matchLabels {COMPONENT}", "gate",
     "Deployment/octavo-gateway: its selector does not match its pods"),
    ("a StatefulSet of no Service", "StatefulSet spec serviceName", "octavo-groups", "no Service octavo-groups"),
    ("a ServiceAccount that is not there", "Deployment spec template spec serviceAccountName", "other",
     "no ServiceAccount other"),
    ("variables of Services", "Deployment spec template spec enableServiceLinks", REMOVED,
     "would be read as settings"),
    ("one port twice in a pod", "scheduler ports 1 containerPort", 9102, "listen at the same port"),
    ("a mount of no volume", "gateway volumeMounts 0 name", "model", "gateway: no volume model"),
    ("a volume of no ConfigMap", "ConfigMap metadata name", "settings", "no ConfigMap octavo-settings"),
    ("a probe of a port that is not there", "gateway readinessProbe httpGet port", "web",
     "readinessProbe asks port web"),
    ("a probe of a path that is not there", "scheduler livenessProbe httpGet path", "/healthz",
     "livenessProbe asks /healthz"),
    ("no probe", "scheduler startupProbe", REMOVED, "scheduler: no startupProbe"),
    ("a setting that is none", "gateway env OCTAVO_GATEWAY_PORT name", "OCTAVO_GATEWAY_HTTP_PORT",
     "OCTAVO_GATEWAY_HTTP_PORT is no setting of the gateway"),
    ("a setting of another service", "scheduler env OCTAVO_SCHEDULER_LOG_FORMAT name", "OCTAVO_GATEWAY_LOG_FORMAT",
     "OCTAVO_GATEWAY_LOG_FORMAT is no setting of the scheduler"),
    ("a setting that is none, in a file", "ConfigMap data gateway.yaml", "queue_timeout: 60",
     "gateway.yaml: queue_timeout is no setting of the gateway"),
    ("a value that the service refuses", "ConfigMap data worker.yaml", "block_size: 7",
     "the worker refuses its settings"),
    ("a file that no ConfigMap has", "scheduler env OCTAVO_SCHEDULER_CONFIG value", "/etc/octavo/sched.yaml",
     "no ConfigMap has sched.yaml"),
    ("a file on no volume", "scheduler env OCTAVO_SCHEDULER_CONFIG value", "/etc/other/scheduler.yaml",
     "config /etc/other/scheduler.yaml is on no volume"),
    ("a service that listens where the container has no port", "gateway env OCTAVO_GATEWAY_PORT value", "8080",
     "port 8080 is no port of the container"),
    ("metrics where the container has no port", "scheduler env OCTAVO_SCHEDULER_METRICS_LISTEN value", "0.0.0.0:9200",
     "metrics_listen 9200 is no port of the container"),
    ("a socket where nobody listens", "scheduler env OCTAVO_SCHEDULER_WORKER value", "frames:///run/octavo/w.sock",
     "scheduler dials /run/octavo/w.sock, where nobody listens"),
    ("a socket on a volume of its own", "scheduler volumeMounts 0 name", "tmp",
     "scheduler and kvmanager do not share the volume of /run/octavo/kvmanager.sock"),
    ("more asked for than the limit", "gateway resources limits memory", "256Mi",
     "requests more memory than its limit"),
    ("no limit", "gateway resources limits", REMOVED, "a limit of memory, are to be named"),
    ("a drain that the kubelet cuts short", "Deployment spec template spec terminationGracePeriodSeconds", 30,
     "terminationGracePeriodSeconds 30 ends a drain of 35 s"),
    ("a Service that selects nothing", f"Service/-scheduler spec selector {COMPONENT}", "x",
     "Service/octavo-scheduler: selects the pods of 0 workloads"),
    ("a Service to a port that is not there", "Service/-gateway spec ports 0 targetPort", "web",
     "Service/octavo-gateway: no pod has a port web"),
    ("a budget for nothing", "PodDisruptionBudget/-group spec selector matchLabels app", "x",
     "PodDisruptionBudget/octavo-group: selects no pods"),
    ("a policy that forgets a port", "NetworkPolicy/-group spec ingress 1 ports -1", REMOVED,
     "lets nobody reach port worker-metrics"),
    ("a policy that forgets the KV manager", "NetworkPolicy/-group spec ingress 0 ports -1", REMOVED,
     "lets nobody reach port kv-grpc"),
    ("a policy that lets in nobody",
     f"NetworkPolicy/-group spec ingress 0 from 0 podSelector matchLabels {COMPONENT}", "gateways",
     "lets in pods that there are none of"),
    ("an autoscaler of nothing", "HorizontalPodAutoscaler spec scaleTargetRef name", "gateway",
     "HorizontalPodAutoscaler/octavo-gateway: no Deployment gateway"),
    ("an autoscaler whose bounds cross", "HorizontalPodAutoscaler spec minReplicas", 20,
     "minReplicas is above maxReplicas"),
    ("an autoscaler of a metric that nobody exports", "HorizontalPodAutoscaler spec metrics 1 pods metric name",
     "octavo_streams", "no service exports octavo_streams"),
    ("an autoscaler of the wrong kind", "ScaledObject spec scaleTargetRef kind", "Deployment",
     "ScaledObject/octavo-group: no Deployment octavo-group"),
    ("a trigger of a label that the metric lacks", "ScaledObject spec triggers 0 metadata query",
     'sum(octavo_queue_sequences{state="waiting"})', "octavo_queue_sequences has no label state"),
    ("replicas beside an autoscaler", "StatefulSet spec replicas", 1, "StatefulSet/octavo-group sets replicas too"),
    ("a gateway that does not look into the registry", "gateway env OCTAVO_GATEWAY_REGISTRY", REMOVED,
     "gateway: not in the registry of the others"),
    ("one pool for all pods", "scheduler env OCTAVO_SCHEDULER_POOL_ID valueFrom", REMOVED,
     "scheduler: every pod would serve the same pool"),
    ("an address that is not the pod's", "scheduler env POD_IP name", "POD_ADDRESS",
     "advertises $(POD_IP), which is not that of its pod"),
    ("a port at which nobody listens, advertised", "scheduler env OCTAVO_SCHEDULER_ADVERTISE value",
     "grpc://$(POD_IP):7102", "advertises port 7102, where it does not listen"),
    ("a certificate of another role", "Certificate/-scheduler spec dnsNames 0", "worker.octavo.internal",
     "the certificate in octavo-scheduler-tls is not for the scheduler"),
    ("a Secret that no Certificate fills", "Certificate/-gateway spec secretName", "gateway-tls",
     "no Certificate for the Secret octavo-gateway-tls"),
    ("a certificate on no volume", "gateway env OCTAVO_GATEWAY_LINK_CERT value", "/certs/tls.crt",
     "link_cert /certs/tls.crt is on no volume"),
    ("keys on no volume", "gateway env OCTAVO_GATEWAY_API_KEYS_FILE value", "/keys/octavo-keys.yaml",
     "api_keys_file /keys/octavo-keys.yaml is on no volume"),
    ("an Ingress to a port that the Service has not", "Ingress spec rules 0 http paths 0 backend service port name",
     "web", "no Service octavo-gateway with a port web"),
    ("a scrape of a port that is not there", "PodMonitor spec podMetricsEndpoints 0 port", "prometheus",
     "PodMonitor/octavo: no pod has a port prometheus"),
]  # fmt: skip
"""What it is, where in the manifests, the wrong value, and what is said of it."""

PLAIN_MISTAKES: list[tuple[str, str, object, str]] = [
    ("an address of no Service", "gateway env OCTAVO_GATEWAY_SCHEDULER value", "grpc://scheduler:7101",
     "no Service scheduler"),
    ("an address at a port that the Service has not", "gateway env OCTAVO_GATEWAY_SCHEDULER value",
     "grpc://octavo-scheduler:7104", "the Service has no port 7104"),
    ("the KV manager at a port that the Service has not", "gateway env OCTAVO_GATEWAY_KVMANAGER_ADMIN value",
     "octavo-scheduler:7103", "the Service has no port 7103"),
]  # fmt: skip
"""The same of a deployment without a registry."""

SCHEMA_MISTAKES: list[tuple[str, str, object]] = [
    ("an unknown field", "Deployment spec replica", 2),
    ("a wrong type", "StatefulSet spec replicas", "two"),
    ("a selector that is missing", "Deployment spec selector", REMOVED),
    ("an autoscaler of no target", "HorizontalPodAutoscaler spec scaleTargetRef", REMOVED),
    ("an API version that is gone", "HorizontalPodAutoscaler apiVersion", "autoscaling/v2beta1"),
    ("a kind that is none", "ConfigMap kind", "ConfigMaps"),
    ("an Ingress without a kind of path", "Ingress spec rules 0 http paths 0 pathType", REMOVED),
    ("an unknown field of cert-manager", "Certificate/-scheduler spec hosts", ["a"]),
    ("an unknown field of KEDA", "ScaledObject spec minReplicas", 1),
    ("a threshold that is no text", "ScaledObject spec triggers 0 metadata threshold", 8),
    ("an unknown field of the Prometheus Operator", "PodMonitor spec podMetricsEndpoints 0 targetport", "metrics"),
]


@pytest.fixture(scope="module")
def everything(helm: str) -> Documents:
    return render(helm, EVERYTHING)


@pytest.fixture(scope="module")
def plain(helm: str) -> Documents:
    return render(helm, {})


def found(documents: Documents, where: str) -> dict[str, Any]:
    """A container by its name, or a manifest as KIND or KIND/END OF ITS NAME."""
    if where in ("gateway", "scheduler"):
        return container(documents, "Deployment" if where == "gateway" else "StatefulSet", where)
    return one(documents, *where.split("/"))


def step(inside: Any, key: str) -> Any:
    """The key or index behind a word of a path; entries of a list are also told by their names."""
    if isinstance(inside, dict):
        return key
    names = [entry.get("name") for entry in inside if isinstance(entry, dict)]
    return names.index(key) if key in names else int(key)


def plant(documents: Documents, path: str, value: object) -> dict[str, Any]:
    """The manifest or container in which the value at the path was replaced, or removed."""
    where, *keys, last = path.split()
    root = inside = found(documents, where)
    for key in keys:
        inside = inside[step(inside, key)]
    if value is REMOVED:
        del inside[step(inside, last)]
    else:
        inside[step(inside, last)] = value
    return root


@pytest.mark.parametrize(("path", "value", "said"), [pytest.param(*mistake, id=name) for name, *mistake in MISTAKES])
def test_a_planted_mistake_is_caught(everything: Documents, path: str, value: object, said: str) -> None:
    documents = copy.deepcopy(everything)
    plant(documents, path, value)
    assert said in "\n".join(problems(documents))


@pytest.mark.parametrize(
    ("path", "value", "said"), [pytest.param(*mistake, id=name) for name, *mistake in PLAIN_MISTAKES]
)
def test_a_mistake_in_a_deployment_without_a_registry_is_caught(
    plain: Documents, path: str, value: object, said: str
) -> None:
    documents = copy.deepcopy(plain)
    plant(documents, path, value)
    assert said in "\n".join(problems(documents))


@pytest.mark.parametrize(("path", "value"), [pytest.param(*mistake, id=name) for name, *mistake in SCHEMA_MISTAKES])
def test_a_planted_mistake_does_not_fit_the_schema(everything: Documents, path: str, value: object) -> None:
    document = plant(copy.deepcopy(everything), path, value)
    with pytest.raises(
        (jsonschema.ValidationError, kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError)
    ):
        validate(document, "1.33")
