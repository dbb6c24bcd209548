"""Schemas of the custom resources that the chart uses: those of their fields that it sets, and no others.

cert-manager: https://cert-manager.io/docs/reference/api-docs/
KEDA: https://keda.sh/docs/latest/reference/scaledobject-spec/ and .../scalers/prometheus/
Prometheus Operator: https://prometheus-operator.dev/docs/api-reference/api/
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string", "minLength": 1}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "string", "pattern": r"^\d+(\.\d+)?$"}


def _object(required: Schema, optional: Schema | None = None) -> Schema:
    return {
        "type": "object",
        "properties": required | (optional or {}),
        "required": list(required),
        "additionalProperties": False,
    }


def _resource(api_version: str, kind: str, spec: Schema) -> Schema:
    return _object(
        {"apiVersion": {"const": api_version}, "kind": {"const": kind}, "metadata": {"type": "object"}, "spec": spec}
    )


_TRIGGER = _object(
    {
        "type": {"const": "prometheus"},
        "metricType": {"enum": ["AverageValue", "Value"]},
        "metadata": _object({"serverAddress": _TEXT, "query": _TEXT, "threshold": _NUMBER}),
    },
    {"name": _TEXT},
)

SCHEMAS: dict[str, Schema] = {
    "Certificate": _resource(
        "cert-manager.io/v1",
        "Certificate",
        _object(
            {
                "secretName": _TEXT,
                "dnsNames": {"type": "array", "minItems": 1, "items": _TEXT},
                "usages": {"type": "array", "items": {"enum": ["server auth", "client auth"]}},
                "privateKey": _object(
                    {
                        "algorithm": {"enum": ["RSA", "ECDSA", "Ed25519"]},
                        "size": {"enum": [256, 384, 521]},
                        "rotationPolicy": {"enum": ["Always", "Never"]},
                    }
                ),
                "issuerRef": _object(
                    {
                        "name": _TEXT,
                        "kind": {"enum": ["Issuer", "ClusterIssuer"]},
                        "group": {"const": "cert-manager.io"},
                    }
                ),
            }
        ),
    ),
    "ScaledObject": _resource(
        "keda.sh/v1alpha1",
        "ScaledObject",
        _object(
            {
                "scaleTargetRef": _object({"name": _TEXT}, {"apiVersion": _TEXT, "kind": _TEXT}),
                "triggers": {"type": "array", "minItems": 1, "items": _TRIGGER},
            },
            {"minReplicaCount": _COUNT, "maxReplicaCount": _COUNT, "cooldownPeriod": _COUNT, "pollingInterval": _COUNT},
        ),
    ),
    "PodMonitor": _resource(
        "monitoring.coreos.com/v1",
        "PodMonitor",
        _object(
            {
                "selector": _object({"matchLabels": {"type": "object"}}),
                "podMetricsEndpoints": {
                    "type": "array",
                    "minItems": 1,
                    "items": _object({"port": _TEXT, "path": _TEXT, "interval": _TEXT}),
                },
            }
        ),
    ),
}
