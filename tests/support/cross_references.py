"""What no schema sees in Kubernetes manifests: names, ports, paths and settings that point nowhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from octavo.common.roles import Role
from support.exported_metrics import exported_metrics, problems_of_query
from support.service_settings import CONFIGS, settings_in

Document = dict[str, Any]

_HEALTH_PATHS = {"/health/live", "/health/ready"}
_WORKLOADS = ("Deployment", "StatefulSet")
_LINK_FILES = ("link_ca", "link_cert", "link_key")
_PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def problems(documents: list[Document]) -> list[str]:
    """One line for each thing that points nowhere, or contradicts another one; none is the sound state."""
    manifests = _Manifests(documents)
    return [
        *(problem for workload in manifests.workloads for problem in manifests.problems_of_workload(workload)),
        *(problem for document in documents for problem in manifests.problems_of(document)),
    ]


def _name(document: Document) -> str:
    return f"{document['kind']}/{document['metadata']['name']}"


def _containers(workload: Document) -> list[Document]:
    pod = workload["spec"]["template"]["spec"]
    return [*pod["containers"], *pod.get("initContainers", [])]


def _ports(workload: Document) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for one in _containers(workload) for port in one.get("ports", [])}


def _labels(workload: Document) -> dict[str, str]:
    labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels


def _service_of(container: Document) -> str | None:
    name = container["image"].rpartition("/")[2].partition(":")[0]
    return name if name in CONFIGS else None


def _environment(container: Document) -> dict[str, str]:
    """Its variables, with stand-ins for what only the cluster knows."""
    return {
        variable["name"]: variable.get("value", "redis://secret:6379/0" if _is_redis(variable["name"]) else "secret")
        for variable in container.get("env", [])
    }


def _is_redis(variable: str) -> bool:
    return variable.endswith(("_REGISTRY", "_REDIS"))


class _Manifests:
    def __init__(self, documents: list[Document]) -> None:
        self._names = {(document["kind"], document["metadata"]["name"]) for document in documents}
        self._documents = documents
        self.workloads = [document for document in documents if document["kind"] in _WORKLOADS]

    def _selected(self, selector: dict[str, str]) -> list[Document]:
        return [workload for workload in self.workloads if selector.items() <= _labels(workload).items()]

    def _has(self, kind: str, name: str) -> list[str]:
        return [] if (kind, name) in self._names else [f"no {kind} {name}"]

    # Pods.

    def problems_of_workload(self, workload: Document) -> Iterator[str]:
        name, spec = _name(workload), workload["spec"]
        pod = spec["template"]["spec"]
        if not spec["selector"]["matchLabels"].items() <= _labels(workload).items():
            yield f"{name}: its selector does not match its pods"
        if workload["kind"] == "StatefulSet":
            yield from (f"{name}: {problem}" for problem in self._has("Service", spec["serviceName"]))
        yield from (f"{name}: {problem}" for problem in self._has("ServiceAccount", pod["serviceAccountName"]))
        if pod.get("enableServiceLinks", True):
            yield f"{name}: variables of Services, such as OCTAVO_GATEWAY_PORT, would be read as settings"
        numbers = [port["containerPort"] for one in _containers(workload) for port in one.get("ports", [])]
        if len(set(numbers)) < len(numbers):
            yield f"{name}: two containers of the pod listen at the same port"
        volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
        for volume in volumes.values():
            if "configMap" in volume:
                yield from (f"{name}: {problem}" for problem in self._has("ConfigMap", volume["configMap"]["name"]))
        for container in _containers(workload):
            where = f"{name} {container['name']}"
            mounts = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts", [])}
            yield from (f"{where}: no volume {volume}" for volume in mounts.values() if volume not in volumes)
            yield from (f"{where}: {problem}" for problem in self._problems_of_probes(container))
            yield from (f"{where}: {problem}" for problem in _problems_of_resources(container))
            if service := _service_of(container):
                yield from (f"{where}: {problem}" for problem in self._problems_of_settings(container, service, mounts))
                found = self._problems_of_membership(workload, container, service)
                yield from (f"{where}: {problem}" for problem in found)
                found = self._problems_of_certificate(container, service, mounts, volumes)
                yield from (f"{where}: {problem}" for problem in found)
        yield from (f"{name}: {problem}" for problem in self._problems_of_sockets(workload))
        yield from (f"{name}: {problem}" for problem in _problems_of_drain(pod))

    @staticmethod
    def _problems_of_probes(container: Document) -> Iterator[str]:
        ports = {port["name"] for port in container.get("ports", [])}
        for kind in _PROBES:
            if _service_of(container) and kind not in container:
                yield f"no {kind}"
            probe = container.get(kind, {}).get("httpGet")
            if probe and probe["port"] not in ports:
                yield f"{kind} asks port {probe['port']}, which it does not have"
            if probe and probe["path"] not in _HEALTH_PATHS:
                yield f"{kind} asks {probe['path']}, which no service answers"

    def _problems_of_settings(self, container: Document, service: str, mounts: dict[str, str]) -> Iterator[str]:
        settings, unknown = settings_in(_environment(container), service)
        yield from (f"{variable} is no setting of the {service}" for variable in unknown)
        ports = {port["containerPort"] for port in container.get("ports", [])}
        for setting in ("metrics_listen", "listen", "port"):
            wanted = {int(number) for number in re.findall(r"(?:^|:)(\d+)(?=,|$)", settings.get(setting, ""))}
            yield from (f"{setting} {number} is no port of the container" for number in sorted(wanted - ports))
        for setting in ("scheduler", "scheduler_admin", "kvmanager", "kvmanager_admin", "worker"):
            address = settings.get(setting, "").removeprefix("grpc://")
            if address and "://" not in address:
                yield from self._problems_of_address(setting, address)
        for setting in ("model", "catalogue_dir", "config", "api_keys_file", *_LINK_FILES):
            path = settings.get(setting)
            if path and not any(path.startswith(mount + "/") for mount in mounts):
                yield f"{setting} {path} is on no volume"
        if "config" in settings:
            yield from self._problems_of_file(settings, service)

    def _problems_of_membership(self, workload: Document, container: Document, service: str) -> Iterator[str]:
        """Whether others find it in the registry, if one of the deployment is in one."""
        settings, _ = settings_in(_environment(container), service)
        others = [_environment(one) for other in self.workloads for one in _containers(other)]
        urls = {value for one in others for name, value in one.items() if name.endswith("_REGISTRY")}
        if not urls or service == "worker":
            return
        if {settings.get("registry")} != urls:
            yield "not in the registry of the others"
        variables = {variable["name"]: variable for variable in container["env"]}
        if service == "gateway":
            return
        by_pod = variables.get(f"OCTAVO_{service.upper()}_POOL_ID", {}).get("valueFrom", {}).get("fieldRef", {})
        if by_pod.get("fieldPath") != "metadata.name":
            yield "every pod would serve the same pool"
        host, _, port = settings.get("advertise", "").removeprefix("grpc://").rpartition(":")
        source = variables.get(host.strip("$()"), {}).get("valueFrom", {}).get("fieldRef", {})
        if source.get("fieldPath") != "status.podIP":
            yield f"advertises {host or 'no address'}, which is not that of its pod"
        if port not in re.findall(r"grpc://[^,]*:(\d+)", settings["listen"]):
            yield f"advertises port {port}, where it does not listen"

    def _problems_of_certificate(
        self, container: Document, service: str, mounts: dict[str, str], volumes: dict[str, Document]
    ) -> Iterator[str]:
        """Whether what it shows as its certificate is one for its role, as far as the chart makes certificates."""
        settings, _ = settings_in(_environment(container), service)
        made = {one["spec"]["secretName"]: one["spec"] for one in self._documents if one["kind"] == "Certificate"}
        if "link_cert" not in settings or not made:
            return
        folder = settings["link_cert"].rpartition("/")[0]
        secret = volumes.get(mounts.get(folder, ""), {}).get("secret", {}).get("secretName", "")
        if secret not in made:
            yield f"no Certificate for the Secret {secret}"
        elif made[secret]["dnsNames"] != [Role(service).certificate_name]:
            yield f"the certificate in {secret} is not for the {service}"

    def _problems_of_address(self, setting: str, address: str) -> Iterator[str]:
        host, _, port = address.partition(":")
        found = [one for one in self._documents if one["kind"] == "Service" and one["metadata"]["name"] == host]
        if not found:
            yield f"{setting} {address}: no Service {host}"
        elif int(port) not in {one["port"] for one in found[0]["spec"]["ports"]}:
            yield f"{setting} {address}: the Service has no port {port}"

    def _problems_of_file(self, settings: dict[str, str], service: str) -> Iterator[str]:
        file = settings["config"].rpartition("/")[2]
        texts = [one["data"] for one in self._documents if one["kind"] == "ConfigMap" and file in one["data"]]
        if not texts:
            yield f"no ConfigMap has {file}"
            return
        in_file = yaml.safe_load(texts[0][file]) or {}
        known = CONFIGS[service].model_fields
        yield from (f"{file}: {name} is no setting of the {service}" for name in in_file if name not in known)
        elsewhere = {"config", *_LINK_FILES}
        given = {name: value for name, value in {**in_file, **settings}.items() if name in set(known) - elsewhere}
        try:
            CONFIGS[service](**given)
        except ValueError as error:
            yield f"{file}: the {service} refuses its settings: {error}"

    def _problems_of_sockets(self, workload: Document) -> Iterator[str]:
        """Paths of Unix sockets that one container of the pod dials and no other one listens at."""
        listened: dict[str, str] = {}
        dialled: list[tuple[str, str]] = []
        for container in _containers(workload):
            for name, value in _environment(container).items():
                paths = re.findall(r"(?:frames|grpc\+unix)://(/[^,]+)", value)
                if name.endswith("_LISTEN"):
                    listened |= dict.fromkeys(paths, container["name"])
                else:
                    dialled += [(container["name"], path) for path in paths]
        mounts = {
            container["name"]: [(one["mountPath"], one["name"]) for one in container.get("volumeMounts", [])]
            for container in _containers(workload)
        }
        for dialling, path in dialled:
            if path not in listened:
                yield f"{dialling} dials {path}, where nobody listens"
                continue
            volumes = [
                next((volume for mount, volume in mounts[one] if path.startswith(mount + "/")), None)
                for one in (dialling, listened[path])
            ]
            if volumes[0] is None or volumes[0] != volumes[1]:
                yield f"{dialling} and {listened[path]} do not share the volume of {path}"

    # Other objects.

    def problems_of(self, document: Document) -> Iterator[str]:
        name, spec = _name(document), document.get("spec", {})
        match document["kind"]:
            case "Service":
                yield from self._problems_of_service(name, spec)
            case "Ingress":
                backends = [path["backend"]["service"] for rule in spec["rules"] for path in rule["http"]["paths"]]
                for backend in backends:
                    ports = self._named_ports(backend["name"])
                    if backend["port"]["name"] not in ports:
                        yield f"{name}: no Service {backend['name']} with a port {backend['port']['name']}"
            case "PodDisruptionBudget":
                if not self._selected(spec["selector"]["matchLabels"]):
                    yield f"{name}: selects no pods"
            case "NetworkPolicy":
                yield from self._problems_of_policy(name, spec)
            case "HorizontalPodAutoscaler":
                yield from self._problems_of_target(name, spec)
                if spec["minReplicas"] > spec["maxReplicas"]:
                    yield f"{name}: minReplicas is above maxReplicas"
                for metric in spec["metrics"]:
                    if metric["type"] == "Pods" and metric["pods"]["metric"]["name"] not in exported_metrics():
                        yield f"{name}: no service exports {metric['pods']['metric']['name']}"
            case "ScaledObject":
                yield from self._problems_of_target(name, spec)
                if spec["minReplicaCount"] > spec["maxReplicaCount"]:
                    yield f"{name}: minReplicaCount is above maxReplicaCount"
                for trigger in spec["triggers"]:
                    found = problems_of_query(trigger["metadata"]["query"], exported_metrics())
                    yield from (f"{name}: {problem}" for problem in found)
            case "PodMonitor":
                ports = {port for one in self._selected(spec["selector"]["matchLabels"]) for port in _ports(one)}
                for endpoint in spec["podMetricsEndpoints"]:
                    if endpoint["port"] not in ports:
                        yield f"{name}: no pod has a port {endpoint['port']}"

    def _named_ports(self, service: str) -> set[str]:
        found = [one for one in self._documents if (one["kind"], one["metadata"]["name"]) == ("Service", service)]
        return {port["name"] for one in found for port in one["spec"]["ports"]}

    def _problems_of_service(self, name: str, spec: Document) -> Iterator[str]:
        selected = self._selected(spec["selector"])
        if len(selected) != 1:
            yield f"{name}: selects the pods of {len(selected)} workloads"
        for port in spec["ports"]:
            if not any(port["targetPort"] in _ports(workload) for workload in selected):
                yield f"{name}: no pod has a port {port['targetPort']}"

    def _problems_of_policy(self, name: str, spec: Document) -> Iterator[str]:
        selected = self._selected(spec["podSelector"]["matchLabels"])
        if not selected:
            yield f"{name}: selects no pods"
        allowed = {port["port"] for rule in spec["ingress"] for port in rule["ports"]}
        for workload in selected:
            yield from (f"{name}: no pod has a port {port}" for port in sorted(allowed - set(_ports(workload))))
            yield from (f"{name}: lets nobody reach port {port}" for port in sorted(set(_ports(workload)) - allowed))
        for rule in spec["ingress"]:
            for peer in rule.get("from", []):
                is_ours = "podSelector" in peer and "namespaceSelector" not in peer
                if is_ours and not self._selected(peer["podSelector"]["matchLabels"]):
                    yield f"{name}: lets in pods that there are none of"

    def _problems_of_target(self, name: str, spec: Document) -> Iterator[str]:
        target = spec["scaleTargetRef"]
        yield from (f"{name}: {problem}" for problem in self._has(target["kind"], target["name"]))
        for workload in self.workloads:
            is_target = (workload["kind"], workload["metadata"]["name"]) == (target["kind"], target["name"])
            if is_target and "replicas" in workload["spec"]:
                yield f"{name}: {_name(workload)} sets replicas too, so that each upgrade undoes the scaling"


def _problems_of_resources(container: Document) -> Iterator[str]:
    resources = container.get("resources", {})
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    if "memory" not in limits or not {"cpu", "memory"} <= set(requests):
        yield "requests cpu and memory, and a limit of memory, are to be named"
    for what in sorted(set(requests) & set(limits)):
        if _quantity(requests[what]) > _quantity(limits[what]):
            yield f"requests more {what} than its limit"


def _quantity(value: str | int) -> float:
    number, unit = re.fullmatch(r"([\d.]+)([a-zA-Z]*)", str(value)).groups()  # type: ignore[union-attr]
    factors = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
    return float(number) * factors[unit]


def _problems_of_drain(pod: Document) -> Iterator[str]:
    """The kubelet must not kill what still drains."""
    drains = [
        float(value)
        for container in pod["containers"]
        for name, value in _environment(container).items()
        if name.endswith("_DRAIN_GRACE_S")
    ]
    pauses = [
        float(hook["exec"]["command"][1])
        for container in pod["containers"]
        if (hook := container.get("lifecycle", {}).get("preStop")) and hook["exec"]["command"][0] == "sleep"
    ]
    needed = max(drains) + max(pauses, default=0.0)
    if pod["terminationGracePeriodSeconds"] <= needed:
        yield f"terminationGracePeriodSeconds {pod['terminationGracePeriodSeconds']} ends a drain of {needed:g} s"
