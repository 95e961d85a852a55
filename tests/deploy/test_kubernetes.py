"""Checks of deploy/kubernetes that need no cluster: the real kubectl builds it, the schemas of the Kubernetes API and
of the Prometheus Operator accept it, and its parts agree."""

from __future__ import annotations

import copy
import itertools
import re

import pytest

from gateway.ops.agent_control import HEADER
from tests.deploy.manifests import (
    ALL,
    Document,
    Workload,
    built,
    environment,
    named,
    of_kind,
    replicas,
    secret,
    selected,
    selects,
    workloads,
)
from tests.deploy.schemas import VERSIONS, problem

AS_ROOT = {("tpu", "engine"): "whether a TPU's devices open for another user was not tried"}
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")

pytestmark = pytest.mark.parametrize("overlay", ALL)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(overlay: str, version: str) -> None:
    problems = [found for document in built(overlay) if (found := problem(document, version))]
    assert problems == []


def test_a_misspelt_field_would_be_found(overlay: str) -> None:
    for document in built(overlay):
        if "spec" in document:
            wrong = copy.deepcopy(document)
            wrong["spec"]["selectr"] = {}
            assert problem(wrong, VERSIONS[-1]), document["kind"]


def test_all_of_it_is_in_one_namespace(overlay: str) -> None:
    outside = [d["kind"] for d in built(overlay) if d["metadata"].get("namespace") != "kvgate"]
    assert outside == ["Namespace"]


def test_every_selector_finds_what_it_is_for(overlay: str) -> None:
    for each in workloads(overlay):
        assert selects(each.document["spec"]["selector"], each.labels), each.name
        for spread in each.pod.get("topologySpreadConstraints", []):
            assert selects(spread["labelSelector"], each.labels), each.name
    for service in of_kind(overlay, "Service"):
        name = service["metadata"]["name"]
        assert [each.name for each in selected(overlay, {"matchLabels": service["spec"]["selector"]})] == [name]
    for budget in of_kind(overlay, "PodDisruptionBudget"):
        assert [each.name for each in selected(overlay, budget["spec"]["selector"])] == [budget["metadata"]["name"]]
    for policy in of_kind(overlay, "NetworkPolicy"):
        assert selected(overlay, policy["spec"]["podSelector"]), policy["metadata"]["name"]
        peers = [p for rule in rules(policy, "from") + rules(policy, "to") for p in rule["peers"] if "podSelector" in p]
        assert all(selected(overlay, peer["podSelector"]) for peer in peers)
    for monitor in of_kind(overlay, "ServiceMonitor"):
        assert services(overlay, monitor["spec"]["selector"]), monitor["metadata"]["name"]


def services(overlay: str, selector: Document) -> list[Document]:
    return [s for s in of_kind(overlay, "Service") if selects(selector, s["metadata"].get("labels", {}))]


def rules(policy: Document, direction: str) -> list[Document]:
    """The peers and ports of each of a NetworkPolicy's rules for a direction, and apart the ports of ranges."""
    side = policy["spec"].get("ingress" if direction == "from" else "egress", [])
    return [
        {
            "peers": rule.get(direction, []),
            "ports": [port["port"] for port in rule["ports"] if "endPort" not in port],
            "ranges": [range(port["port"], port["endPort"] + 1) for port in rule["ports"] if "endPort" in port],
        }
        for rule in side
    ]


def test_what_refers_to_another_object_by_name_finds_it(overlay: str) -> None:
    names = {(document["kind"], document["metadata"]["name"]) for document in built(overlay)}
    for scaler in of_kind(overlay, "HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) in names
    for each in workloads(overlay):
        if each.document["kind"] == "StatefulSet":
            assert ("Service", each.document["spec"]["serviceName"]) in names
        claims = {claim["metadata"]["name"] for claim in each.document["spec"].get("volumeClaimTemplates", [])}
        volumes = {volume["name"]: volume for volume in each.pod.get("volumes", [])}
        for source in (source for volume in volumes.values() for source in sources(volume)):
            assert "configMap" not in source or ("ConfigMap", source["configMap"]["name"]) in names
            if "secret" in source:
                assert source["secret"]["name"] == "kvgate"
                assert {item["key"] for item in source["secret"]["items"]} <= secret().keys()
        mounted = {mount["name"] for container in each.containers for mount in container.get("volumeMounts", [])}
        assert mounted == volumes.keys() | claims


def sources(volume: Document) -> list[Document]:
    found: list[Document] = volume.get("projected", {}).get("sources", [volume])
    return found


def test_every_variable_from_the_secret_is_in_it_or_optional(overlay: str) -> None:
    for container in (container for each in workloads(overlay) for container in each.containers):
        for name, variable in environment(container).items():
            if key := variable.get("valueFrom", {}).get("secretKeyRef"):
                assert key["name"] == "kvgate", name
                assert key["key"] in secret() or key.get("optional"), name


def test_every_port_that_is_referred_to_is_a_containers(overlay: str) -> None:
    for each in workloads(overlay):
        for container in each.containers:
            its_own = {port["name"] for port in container.get("ports", [])}
            for probe in (container[probe] for probe in PROBES if probe in container):
                assert "exec" in probe or probe["httpGet"]["port"] in its_own, container["name"]
        if each in replicas(overlay):
            hook, agent = each.container("engine")["lifecycle"]["preStop"]["httpGet"], each.container("agent")["args"]
            assert [each["name"] for each in hook["httpHeaders"]] == [HEADER]
            assert str(hook["port"]) == agent[agent.index("--control-port") + 1]
    for service in of_kind(overlay, "Service"):
        (target,) = selected(overlay, {"matchLabels": service["spec"]["selector"]})
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= target.ports.keys()
    for monitor in of_kind(overlay, "ServiceMonitor"):
        for service in services(overlay, monitor["spec"]["selector"]):
            offered = {port["name"] for port in service["spec"]["ports"]}
            assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= offered


def test_every_pod_is_hardened(overlay: str) -> None:
    as_root = set()
    for each in workloads(overlay):
        assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & each.pod.keys()
        # A Service called `vllm` or `redis` would set variables that the programs read as their settings.
        assert each.pod["enableServiceLinks"] is False
        assert each.pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not any("hostPath" in volume for volume in each.pod.get("volumes", []))
        for container in each.containers:
            context = {**each.pod["securityContext"], **container["securityContext"]}
            assert context["readOnlyRootFilesystem"] is True, container["name"]
            assert context["allowPrivilegeEscalation"] is False, container["name"]
            assert context["capabilities"] == {"drop": ["ALL"]}, container["name"]
            assert not context.get("privileged"), container["name"]
            # Kubernetes does not start a pod that contradicts itself.
            assert context["runAsNonRoot"] == bool(context["runAsUser"]), container["name"]
            if not context["runAsUser"]:
                as_root.add((overlay, container["name"]))
    assert as_root == {exception for exception in AS_ROOT if exception[0] == overlay}


def test_only_gateways_have_a_token_and_all_it_allows_is_to_look_up_replicas(overlay: str) -> None:
    (gateway,) = (each for each in workloads(overlay) if each.pod["automountServiceAccountToken"] is not False)
    assert gateway.name == "gateway"
    account = named(overlay, "ServiceAccount", gateway.pod["serviceAccountName"])
    assert account["automountServiceAccountToken"] is False
    assert not list(of_kind(overlay, "ClusterRole", "ClusterRoleBinding"))
    (binding,) = of_kind(overlay, "RoleBinding")
    (subject,) = binding["subjects"]
    # The API server refuses a subject without a namespace, but the schemas allow it.
    assert subject == {"kind": "ServiceAccount", "name": account["metadata"]["name"], "namespace": "kvgate"}
    role = named(overlay, binding["roleRef"]["kind"], binding["roleRef"]["name"])
    looks_up = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    assert role["rules"] == [looks_up]


def test_every_container_says_what_it_needs_and_which_image(overlay: str) -> None:
    for container in (container for each in workloads(overlay) for container in each.containers):
        image, digest = re.fullmatch(
            r"([\w./-]+):(?!latest)[\w.-]+(@sha256:[0-9a-f]{64})?", container["image"]
        ).groups()  # type: ignore[union-attr]
        # Built here, or of the user's choice.
        assert digest or image in ("kvgate", "vllm-lmcache", "vllm/vllm-openai", "vllm/vllm-tpu")
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys(), container["name"]
        assert "memory" in container["resources"]["limits"], container["name"]


def private_ports(replica: Workload) -> set[int]:
    """The ports on which the processes of a replica's pod reach each other, without the pod's declared ports."""
    argv = [argument for container in replica.containers for argument in container["args"]]
    ports = {int(number) for argument in argv for number in re.findall(r"tcp://127\.0\.0\.1:(\d+)", argument)}
    ports |= {int(value) for option, value in itertools.pairwise(argv) if re.fullmatch(r"--[\w-]*port", option)}
    return ports - set(replica.ports.values())


def test_the_ports_of_events_of_lmcache_and_of_the_agent_are_open_to_nobody(overlay: str) -> None:
    (private,) = {frozenset(private_ports(each)) for each in replicas(overlay)}
    assert private == {5557, 5558, 8001} | ({5555, 5580, 5590} if overlay in ("gpu", "pairs") else set())
    for service in of_kind(overlay, "Service"):
        assert not private & {port["port"] for port in service["spec"]["ports"]}
    for policy in of_kind(overlay, "NetworkPolicy"):
        # A rule without ports would open all ports.
        for rule in rules(policy, "from"):
            assert rule["ports"]
            assert not private & {*rule["ports"], *itertools.chain(*rule["ranges"])}


def test_who_may_reach_whom_is_stated_and_all_else_is_refused(overlay: str) -> None:
    policies = list(of_kind(overlay, "NetworkPolicy"))
    deny = [p["spec"] for p in policies if p["metadata"]["name"] == "default-deny"]
    assert deny == [{"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}]
    reached: dict[tuple[str, int], set[str]] = {}
    for policy in policies:
        for rule in rules(policy, "from"):
            assert rule["peers"], f"{policy['metadata']['name']}: without peers, a rule lets everybody in"
            for target in selected(overlay, policy["spec"]["podSelector"]):
                for port in set(rule["ports"]) & set(target.ports.values()):
                    reached.setdefault((target.name, port), set()).update(*(who(overlay, p) for p in rule["peers"]))
    prometheus = set() if overlay == "sim" else {"kvgate/prometheus"}
    names = {each.name for each in replicas(overlay)}
    assert reached == {
        ("gateway", 8080): {"kvgate/client"} | prometheus,
        **{(name, 8000): {"gateway"} | prometheus for name in names},
        **{(name, 5600): names for name in names if overlay == "pairs"},
        ("redis", 6379): {"gateway", *names},
    }


def test_only_replicas_of_pairs_reach_a_range_of_ports_and_only_of_each_other(overlay: str) -> None:
    each_other = {each.name for each in replicas(overlay)}
    found = [
        (policy, rule)
        for policy in of_kind(overlay, "NetworkPolicy")
        for direction in ("from", "to")
        for rule in rules(policy, direction)
        if rule["ranges"]
    ]
    assert len(found) == (2 if overlay == "pairs" else 0)
    for policy, rule in found:
        assert {each.name for each in selected(overlay, policy["spec"]["podSelector"])} == each_other
        assert [who(overlay, peer) for peer in rule["peers"]] == [each_other]


def test_what_is_no_pod_of_the_cluster_may_be_reached_at_few_ports(overlay: str) -> None:
    reached: dict[str, set[int]] = {}
    for policy in of_kind(overlay, "NetworkPolicy"):
        for rule in rules(policy, "to"):
            if not any("podSelector" in peer for peer in rule["peers"]):
                for source in selected(overlay, policy["spec"]["podSelector"]):
                    reached.setdefault(source.name, set()).update(rule["ports"])
    # 53: DNS. 443 and 6443: the API server. 443: the models that vLLM downloads.
    of_replicas = {each.name: {53, 443} for each in replicas(overlay)}
    assert reached == {"gateway": {53, 443, 6443}, **of_replicas, "redis": {53}}


def who(overlay: str, peer: Document) -> set[str]:
    """The workloads that a NetworkPolicy's peer selects, or the label of the namespaces that it selects."""
    if "namespaceSelector" in peer:
        return set(peer["namespaceSelector"]["matchLabels"])
    return {each.name for each in selected(overlay, peer["podSelector"])}


def test_what_may_be_reached_is_what_lets_itself_be_reached(overlay: str) -> None:
    """Egress to a pod of this namespace is useless unless the pod has the port."""
    for policy in of_kind(overlay, "NetworkPolicy"):
        for rule in rules(policy, "to"):
            for peer in (peer for peer in rule["peers"] if "podSelector" in peer):
                for target in selected(overlay, peer["podSelector"]):
                    assert set(rule["ports"]) <= set(target.ports.values()), policy["metadata"]["name"]
