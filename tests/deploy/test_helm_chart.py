"""The chart against the schemas of Kubernetes, itself, and the services."""

from __future__ import annotations

from typing import Any

import pytest

from support.chart_documents import EVERYTHING, Documents, container, validate
from support.cross_references import problems
from support.helm_chart import CHART, ChartError, render, run_helm

KUBERNETES = ("1.25", "1.29", "1.33", "1.37")

SECURED: dict[str, Any] = {
    "redis.url": "rediss://redis:6379/0",
    "tls": {"enabled": True, "secrets": {"gateway": "cert-a", "scheduler": "cert-b", "kvmanager": "cert-c"}},
    "group.replicas": 2,
}
VARIANTS: dict[str, dict[str, Any]] = {"defaults": {}, "everything": EVERYTHING, "secured": SECURED}


@pytest.fixture(scope="module")
def everything(helm: str) -> Documents:
    return render(helm, EVERYTHING)


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
    assert {"Ingress", "Certificate"} <= kinds


def test_secrets_are_for_one_service_each(helm: str) -> None:
    documents = render(helm, SECURED)
    for name in ("gateway", "scheduler", "kvmanager", "worker"):
        kind = "Deployment" if name == "gateway" else "StatefulSet"
        mounts = [mount["name"] for mount in container(documents, kind, name)["volumeMounts"]]
        secrets = [mount for mount in mounts if mount.endswith("-tls")]
        assert secrets == ([] if name == "worker" else [f"{name}-tls"]), "the worker listens on a Unix socket alone"


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
        ({"group.replicas": 2}, "more than one group needs redis.url"),
        ({"group.autoscaling.enabled": True}, "more than one group needs redis.url"),
        ({"gateway.ingress": {"enabled": True, "tlsSecret": "x"}}, "gateway.ingress.host"),
        ({"redis.url": "http://redis"}, "does not match pattern"),
        ({"tls.certManager.kind": "Issuers"}, "must be one of"),
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
