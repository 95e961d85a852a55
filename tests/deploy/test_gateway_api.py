"""deploy/kubernetes/gateway-api leads to the gateways of the overlays, and waits as long as they do. tests/fit checks
it against the Gateway API's schemas."""

from __future__ import annotations

import functools

import pytest

from gateway.settings.limit_settings import TimeoutSettings
from tests.deploy.manifests import KUBERNETES, Document, kustomized, named

CLASSES = {
    "generic": "example",
    "gke": "gke-l7-regional-external-managed",
    "istio": "istio",
    "agentgateway": "agentgateway",
}


@functools.cache
def objects(name: str) -> list[Document]:
    return kustomized(KUBERNETES / "gateway-api" / name)


def only(name: str, kind: str) -> Document:
    (found,) = [each for each in objects(name) if each["kind"] == kind]
    return found


def test_there_is_a_class_for_each_folder() -> None:
    folders = {folder.name for folder in (KUBERNETES / "gateway-api").iterdir()}
    assert folders == {*CLASSES, "common"}


@pytest.mark.parametrize("name", CLASSES)
def test_the_route_leads_from_the_gateway_to_the_service_of_the_overlays(name: str) -> None:
    gateway, route = only(name, "Gateway"), only(name, "HTTPRoute")
    assert gateway["spec"]["gatewayClassName"] == CLASSES[name]
    parent = {"name": gateway["metadata"]["name"], "namespace": gateway["metadata"]["namespace"]}
    assert route["spec"]["parentRefs"] == [parent]
    (allowed,) = [listener["allowedRoutes"]["namespaces"] for listener in gateway["spec"]["listeners"]]
    service = named("sim", "Service", "gateway")
    for namespace in (route["metadata"]["namespace"], service["metadata"]["namespace"]):
        assert allowed["selector"]["matchLabels"] == {"kubernetes.io/metadata.name": namespace}
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert backend["name"] == "gateway"
    assert backend["port"] in [port["port"] for port in service["spec"]["ports"]]


@pytest.mark.parametrize("name", CLASSES)
def test_the_proxies_namespace_may_connect_to_gateways(name: str) -> None:
    policy = named("sim", "NetworkPolicy", "gateway")
    (source,) = policy["spec"]["ingress"][0]["from"]
    labels = only(name, "Namespace")["metadata"]["labels"]
    assert source["namespaceSelector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize("name", CLASSES)
def test_it_waits_longer_than_a_gateway(name: str) -> None:
    if name == "gke":
        waits_s = only(name, "GCPBackendPolicy")["spec"]["default"]["timeoutSec"]
        assert "timeouts" not in only(name, "HTTPRoute")["spec"]["rules"][0]
    else:
        (waits,) = set(only(name, "HTTPRoute")["spec"]["rules"][0]["timeouts"].values())
        waits_s = int(waits.removesuffix("s"))
    assert waits_s > TimeoutSettings().request_s


def test_istios_rule_is_valid_and_is_about_the_service() -> None:
    from cloudcoil.models.istio.networking.v1 import DestinationRule  # here, because the import takes a second

    rule = only("istio", "DestinationRule")
    assert rule["spec"]["host"].startswith("gateway.kvgate.svc.")
    read = DestinationRule.model_validate(rule)
    assert read.model_dump(mode="json", by_alias=True, exclude_unset=True) == rule
