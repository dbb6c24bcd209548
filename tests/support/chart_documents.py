"""Values that turn on all that the chart has, and what is found in the manifests it makes of them."""

from __future__ import annotations

from typing import Any

import jsonschema
import kubernetes_validate

from support.custom_resources import SCHEMAS

Documents = list[dict[str, Any]]

EVERYTHING: dict[str, Any] = {
    "model": {"claim": "models", "path": "llama-8b", "name": "llama-8b"},
    "secrets": {"existing": "octavo-secrets", "apiKeys": "octavo-keys"},
    "redis": {"secret": "octavo-redis", "responsesUrl": "redis://responses:6379/0"},
    "tls": {"enabled": True, "certManager": {"issuer": "octavo", "kind": "ClusterIssuer"}},
    "images": {"prefix": "registry.example/octavo", "tag": "1.2.3", "pullSecrets": [{"name": "registry"}]},
    "gateway": {
        "settings": {"queue_timeout_s": 60, "max_open_requests": 500},
        "autoscaling": {"enabled": True, "streamsPerReplica": 200},
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "host": "llm.example",
            "tlsSecret": "llm-example",
            "annotations": {"nginx.ingress.kubernetes.io/proxy-read-timeout": "660"},
        },
        "nodeSelector": {"pool": "cpu"},
        "tolerations": [{"key": "cpu", "operator": "Exists"}],
    },
    "group": {
        "replicas": 3,
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


def validate(document: dict[str, Any], version: str) -> None:
    """Raises if the schema of this version of Kubernetes does not take the manifest, or if it has none for it."""
    if document["kind"] in SCHEMAS:
        jsonschema.validate(document, SCHEMAS[document["kind"]])
    else:
        kubernetes_validate.validate(document, version, strict=True)


def one(documents: Documents, kind: str, name: str = "") -> dict[str, Any]:
    (found,) = (item for item in documents if item["kind"] == kind and item["metadata"]["name"].endswith(name))
    return found


def container(documents: Documents, kind: str, name: str) -> dict[str, Any]:
    pod = one(documents, kind)["spec"]["template"]["spec"]
    (found,) = (item for item in pod["containers"] if item["name"] == name)
    result: dict[str, Any] = found
    return result
