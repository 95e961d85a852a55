"""deploy/kubernetes/gateway-api leads to the gateways of the overlays, or by an endpoint picker to their replicas, and
waits as long as they do. tests/fit checks it against the schemas of the Gateway API and of GKE."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import yaml

from gateway.settings.gateway_settings import load_settings
from gateway.settings.limit_settings import TimeoutSettings
from tests.deploy.manifests import (
    KUBERNETES,
    OVERLAYS,
    Document,
    Workload,
    config_map,
    kustomized,
    named,
    secret,
    selected,
    selects,
    workload,
)
from tests.deploy.schemas import VERSIONS, problem

CLASSES = {
    "generic": "example",
    "gke": "gke-l7-regional-external-managed",
    "istio": "istio",
    "agentgateway": "agentgateway",
}
PICKERS = {f"picker/{name}": gateway_class for name, gateway_class in CLASSES.items()}
ALL = CLASSES | PICKERS
ELSEWHERE = ("gateway.networking.k8s.io/", "networking.gke.io/")
"""What tests/fit has the schemas of."""


@functools.cache
def objects(name: str) -> list[Document]:
    return kustomized(KUBERNETES / "gateway-api" / name)


def only(name: str, kind: str, its_name: str = "") -> Document:
    (found,) = [each for each in objects(name) if each["kind"] == kind and its_name in ("", each["metadata"]["name"])]
    return found


def test_there_is_a_class_for_each_folder() -> None:
    found = {file.parent.name for file in (KUBERNETES / "gateway-api").glob("*/kustomization.yaml")}
    with_picker = {file.parent.name for file in (KUBERNETES / "gateway-api").glob("picker/*/kustomization.yaml")}
    assert found == with_picker == {*CLASSES, "common"}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ALL)
def test_every_object_is_valid(name: str, version: str) -> None:
    here = [each for each in objects(name) if not each["apiVersion"].startswith(ELSEWHERE)]
    assert [found for each in here if (found := problem(each, version))] == []


@pytest.mark.parametrize("name", ALL)
def test_the_gateway_has_its_class_and_takes_the_route_of_the_overlays_namespace(name: str) -> None:
    gateway, route = only(name, "Gateway"), only(name, "HTTPRoute")
    assert gateway["spec"]["gatewayClassName"] == ALL[name]
    parent = {"name": gateway["metadata"]["name"], "namespace": gateway["metadata"]["namespace"]}
    assert route["spec"]["parentRefs"] == [parent]
    (allowed,) = [listener["allowedRoutes"]["namespaces"] for listener in gateway["spec"]["listeners"]]
    service = named("sim", "Service", "gateway")
    for namespace in (route["metadata"]["namespace"], service["metadata"]["namespace"]):
        assert allowed["selector"]["matchLabels"] == {"kubernetes.io/metadata.name": namespace}


@pytest.mark.parametrize("name", CLASSES)
def test_the_route_leads_to_the_service_of_the_overlays(name: str) -> None:
    route, service = only(name, "HTTPRoute"), named("sim", "Service", "gateway")
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert backend["name"] == "gateway"
    assert backend["port"] in [port["port"] for port in service["spec"]["ports"]]


@pytest.mark.parametrize("name", ALL)
def test_the_proxies_namespace_may_connect_to_gateways(name: str) -> None:
    policy = named("sim", "NetworkPolicy", "gateway")
    (source,) = policy["spec"]["ingress"][0]["from"]
    labels = only(name, "Namespace")["metadata"]["labels"]
    assert source["namespaceSelector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize("name", ALL)
def test_it_waits_longer_than_a_gateway(name: str) -> None:
    if name.endswith("gke"):
        waits_s = only(name, "GCPBackendPolicy")["spec"]["default"]["timeoutSec"]
        assert "timeouts" not in only(name, "HTTPRoute")["spec"]["rules"][0]
    else:
        (waits,) = set(only(name, "HTTPRoute")["spec"]["rules"][0]["timeouts"].values())
        waits_s = int(waits.removesuffix("s"))
    assert waits_s > TimeoutSettings().request_s


@pytest.mark.parametrize(("name", "service"), [("istio", "gateway"), ("picker/istio", "picker")])
def test_istios_rule_is_about_the_service(name: str, service: str) -> None:
    assert only(name, "DestinationRule")["spec"]["host"] == f"{service}.kvgate.svc.cluster.local"


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("name", PICKERS)
def test_with_a_picker_the_route_leads_to_the_replicas_of_the_overlays_and_the_pool_to_the_picker(
    name: str, overlay: str
) -> None:
    pool, service = only(name, "InferencePool"), only(name, "Service")
    (backend,) = only(name, "HTTPRoute")["spec"]["rules"][0]["backendRefs"]
    assert backend == {"group": "inference.networking.k8s.io", "kind": pool["kind"], "name": pool["metadata"]["name"]}
    (replica,) = selected(overlay, pool["spec"]["selector"])
    assert [port["number"] for port in pool["spec"]["targetPorts"]] == [replica.ports["http"]]
    asked = pool["spec"]["endpointPickerRef"]
    (port,) = service["spec"]["ports"]
    assert (asked["name"], asked["port"]["number"]) == (service["metadata"]["name"], port["port"])
    picker = Workload("picker", only(name, "Deployment"))
    assert selects({"matchLabels": service["spec"]["selector"]}, picker.labels)
    assert picker.ports[port["targetPort"]] == 9002


def test_the_picker_is_a_gateway_with_another_command_port_and_account() -> None:
    gateway, picker = workload("gpu", "gateway").pod, Workload("picker", only("picker/generic", "Deployment")).pod
    (container,), (its_container,) = gateway["containers"], picker["containers"]
    assert its_container == container | {
        "name": "picker",
        "args": ["picker", *container["args"][1:]],
        "ports": [*container["ports"], {"name": "grpc", "containerPort": 9002}],
    }
    particular = {"containers", "volumes", "topologySpreadConstraints"}
    both = {name: each for name, each in gateway.items() if name not in particular}
    assert {name: each for name, each in picker.items() if name not in particular} == both | {
        "serviceAccountName": "kvgate-picker"
    }


def test_all_that_a_picker_may_do_at_the_api_server_is_to_look_up_pools_objectives_and_pods() -> None:
    assert not [each for each in objects("picker/generic") if each["kind"].startswith("ClusterRole")]
    role, binding = only("picker/generic", "Role"), only("picker/generic", "RoleBinding")
    looked_up = {
        (group, name): r["verbs"] for r in role["rules"] for group in r["apiGroups"] for name in r["resources"]
    }
    assert looked_up.keys() == {
        ("inference.networking.k8s.io", "inferencepools"),
        ("llm-d.ai", "inferenceobjectives"),
        ("inference.networking.x-k8s.io", "inferenceobjectives"),
        ("", "pods"),
    }
    assert all(set(verbs) == {"list", "watch"} for verbs in looked_up.values())
    account = only("picker/generic", "Deployment")["spec"]["template"]["spec"]["serviceAccountName"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "kvgate"}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]


@pytest.mark.parametrize("name", PICKERS)
def test_proxies_reach_pickers_and_replicas_and_pickers_reach_replicas_and_redis(name: str) -> None:
    workloads = {
        "picker": Workload("picker", only(name, "Deployment")),
        **{its_name: workload("sim", its_name) for its_name in ("replica", "redis")},
    }
    proxies = {"35.191.0.0/16", "130.211.0.0/22", "10.129.0.0/23"} if name.endswith("gke") else set()
    reached: dict[tuple[str, int], set[str]] = {}
    for policy in (each["spec"] for each in objects(name) if each["kind"] == "NetworkPolicy"):
        for rule in policy.get("ingress", []):
            peers = {who for peer in rule["from"] for who in _who(peer, workloads)}
            for target, its in workloads.items():
                for port in rule["ports"]:
                    if selects(policy["podSelector"], its.labels) and port["port"] in its.ports.values():
                        reached.setdefault((target, port["port"]), set()).update(peers)
    assert reached == {
        ("picker", 9002): {"kvgate/client"} | proxies,
        ("picker", 8080): {"kvgate/prometheus"} | proxies,
        ("replica", 8000): {"kvgate/client", "picker"} | proxies,
        ("redis", 6379): {"picker"},
    }
    egress = only(name, "NetworkPolicy", "picker")["spec"]["egress"]
    assert {
        (who, port["port"])
        for rule in egress
        for port in rule["ports"]
        for peer in rule.get("to", [{}])
        for who in _who(peer, workloads)
    } == {("replica", 8000), ("redis", 6379), ("anywhere", 443), ("anywhere", 6443)}


def _who(peer: Document, workloads: dict[str, Workload]) -> set[str]:
    """The workloads, the labels of namespaces or the addresses that a NetworkPolicy's peer stands for."""
    if "namespaceSelector" in peer:
        return set(peer["namespaceSelector"]["matchLabels"])
    if "podSelector" in peer:
        return {name for name, each in workloads.items() if selects(peer["podSelector"], each.labels)}
    return {peer["ipBlock"]["cidr"]} if "ipBlock" in peer else {"anywhere"}


def test_on_gke_each_of_pool_and_picker_has_a_health_check_at_a_port_of_its_pods() -> None:
    checked = {}
    for policy in (each["spec"] for each in objects("picker/gke") if each["kind"] == "HealthCheckPolicy"):
        check = policy["default"]["config"]["httpHealthCheck"]
        checked[policy["targetRef"]["kind"], policy["targetRef"]["name"]] = (check["port"], check["requestPath"])
    picker = Workload("picker", only("picker/gke", "Deployment"))
    replica = workload("sim", "replica")
    assert checked == {
        ("InferencePool", "replica"): (
            replica.ports["http"],
            replica.container("engine")["readinessProbe"]["httpGet"]["path"],
        ),
        ("Service", "picker"): (picker.ports["http"], picker.container("picker")["readinessProbe"]["httpGet"]["path"]),
    }
    assert only("picker/gke", "GCPBackendPolicy")["spec"]["targetRef"]["kind"] == "InferencePool"


def test_the_pickers_configuration_is_that_of_gateways_but_for_the_picker_and_the_source_of_replicas() -> None:
    picker = yaml.safe_load(only("picker/generic", "ConfigMap")["data"]["gateway.yaml"])
    pool = only("picker/generic", "InferencePool")["metadata"]["name"]
    assert picker.pop("picker") == {"port": 9002}
    assert picker["discovery"] == {"kubernetes": {"inference_pool": pool}}
    gateway = yaml.safe_load(config_map("sim", "gateway-config")["gateway.yaml"])
    assert picker | {"discovery": gateway["discovery"]} == gateway


def test_a_picker_takes_its_configuration(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(only("picker/generic", "ConfigMap")["data"]["gateway.yaml"])
    load_settings(path, secret())
