"""deploy/helm/kvgate: what Helm makes of it is what the overlays have, whatever the values."""

from __future__ import annotations

import json
import re
import tomllib
from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import redis
import yaml

from bench.vllm import install
from gateway.ops.replica.commands import as_json, commands
from gateway.ops.replica.settings import load_replica
from gateway.settings.gateway_settings import GatewaySettings, load_settings
from tests.deploy.helm import CHART, NAMESPACE, RELEASE, ran, rendered
from tests.deploy.manifests import ROOT, Document, Workload, built, environment, expanded, gateway_settings, selects
from tests.deploy.schemas import VERSIONS, problem
from tests.deploy.test_gateway_api import objects
from tests.programs import needs
from tests.redis_server import running_redis

PICKER = "picker/generic"
MODEL = "Qwen/Qwen3-32B"
SIMULATED = {"count": 3, "engine": "sim"}
CASES: dict[str, Document] = {
    "nothing": {},
    "simulated": {"replicas": SIMULATED},
    "vllm": {"replicas": {"count": 3, "model": MODEL, "args": ["--max-model-len", "32768"]}},
    "picker": {"mode": "picker", "replicas": SIMULATED},
    "picker of your replicas": {"mode": "picker", "pool": {"selector": {"app": "vllm"}, "ports": [8000, 8001]}},
    "your Redis": {
        "redis": {"enabled": False, "url": "rediss://user:password@redis.example:6379/1"},
        "gateways": {"min": 3, "max": 3},
        "imagePullSecrets": [{"name": "registry"}],
        "config": {"limits": {"max_body_bytes": 1234567890}, "discovery": {"dns": {"names": ["vllm.models.svc"]}}},
    },
    "your Secret": {"secret": "mine", "replicas": SIMULATED},
}

pytestmark = needs("helm")
each_case = pytest.mark.parametrize("case", CASES)


def the(case: str, kind: str, name: str = "") -> Document:
    """The object of this kind. Names are without the release's."""
    found = [each for each in rendered(CASES[case]) if each["kind"] == kind]
    (one,) = (each for each in found if name in ("", each["metadata"]["name"].removeprefix(f"{RELEASE}-")))
    return one


def settings(case: str, folder: Path) -> GatewaySettings:
    path = folder / "gateway.yaml"
    path.write_text(the(case, "ConfigMap", CASES[case].get("mode", "gateway"))["data"]["gateway.yaml"])
    return load_settings(path, {"KVGATE_REDIS_URL": "redis://redis"})


def test_the_chart_has_the_number_of_the_project_and_helm_finds_nothing_in_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["version"] == project["version"]
    done = ran("lint", CHART, "--strict", "--quiet", values={})
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("version", VERSIONS)
@each_case
def test_every_object_is_valid(case: str, version: str) -> None:
    assert [found for each in rendered(CASES[case]) if (found := problem(each, version))] == []


NAMED = {"configMap": "ConfigMap", "secret": "Secret", "secretKeyRef": "Secret", "scaleTargetRef": "Deployment"}
NAMES = {"serviceAccountName": "ServiceAccount", "serviceName": "Service"}


def referred(part: Any) -> Iterator[tuple[str, str]]:
    """The kinds and names of objects that this part of an object names."""
    if isinstance(part, list):
        part = dict(enumerate(part))
    for key, each in part.items() if isinstance(part, dict) else ():
        if key in NAMED:
            yield NAMED[key], each["name"]
        if key in NAMES:
            yield NAMES[key], each
        yield from referred(each)


@each_case
def test_what_refers_to_another_object_or_to_pods_finds_them(case: str) -> None:
    documents = rendered(CASES[case])
    here = {(each["kind"], each["metadata"]["name"]) for each in documents} | {("Secret", "mine")}
    assert {each for document in documents for each in referred(document)} <= here
    pods = [Workload("", each).labels for each in documents if each["kind"] in ("Deployment", "StatefulSet")]
    for document in documents:
        selector: Document | None = None
        match document["kind"]:
            case "Service":
                selector = {"matchLabels": document["spec"]["selector"]}
            case "NetworkPolicy":
                selector = document["spec"]["podSelector"]
            case "PodDisruptionBudget" | "Deployment" | "StatefulSet":
                selector = document["spec"]["selector"]
        if selector is not None:
            assert [selects(selector, labels) for labels in pods].count(True) == 1, document["metadata"]["name"]


def of_overlay(name: str) -> list[Document]:
    return objects(name) if name == PICKER else built(name)


def comparable(document: Document, part: str) -> Any:
    """An object's spec, with the overlays' names and without what only Helm adds."""

    def without(each: Any) -> Any:
        if isinstance(each, dict):
            added = ("app.kubernetes.io/instance", "annotations", "namespace")
            return {key: without(value) for key, value in each.items() if key not in added}
        return [without(one) for one in each] if isinstance(each, list) else each

    text = json.dumps(without(document["spec"]), sort_keys=True)
    for pattern, name in {
        rf'"{RELEASE}-(\w+)"': r'"\1"',
        rf'"{RELEASE}"': '"kvgate"',
        r'"\w+-config-\w{10}"': f'"{part}"',
        r'"kvgate-(gateway|picker)"': r'"\1"',
    }.items():
        text = re.sub(pattern, name, text)
    return json.loads(text)


@pytest.mark.parametrize(
    ("case", "part", "overlay"),
    [
        ("simulated", "gateway", "gpu"),
        ("simulated", "redis", "sim"),
        ("simulated", "replica", "sim"),
        ("picker", "picker", PICKER),
    ],
)
def test_each_part_is_as_in_an_overlay(case: str, part: str, overlay: str) -> None:
    kinds = {"Deployment", "StatefulSet", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget"}

    def parts(documents: list[Document], name: str) -> dict[str, Any]:
        return {
            each["kind"]: comparable(each, part)
            for each in documents
            if each["kind"] in kinds and each["metadata"]["name"] == name
        }

    theirs = parts(of_overlay(overlay), part)
    assert len(theirs) >= 2
    assert parts(rendered(CASES[case]), f"{RELEASE}-{part}") == theirs


@pytest.mark.parametrize(("case", "overlay"), [("simulated", "sim"), ("picker", PICKER)])
def test_the_rights_at_the_api_server_are_as_in_an_overlay(case: str, overlay: str) -> None:
    (role,) = (each for each in of_overlay(overlay) if each["kind"] == "Role")
    assert the(case, "Role")["rules"] == role["rules"]
    account = the(case, "ServiceAccount")["metadata"]["name"]
    binding = the(case, "RoleBinding")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}]
    assert binding["roleRef"]["name"] == the(case, "Role")["metadata"]["name"]


def test_vllm_gets_the_command_and_the_environment_that_replica_command_prints(tmp_path: Path) -> None:
    extra = ["--shutdown-timeout", "540"]
    config = {"vllm": {"model": MODEL, "max_model_len": 32768, "extra_args": extra}, "agent": {"control_port": 8001}}
    (tmp_path / "replica.yaml").write_text(yaml.safe_dump(config))
    env = {"KVGATE_REPLICA_ID": "replica-0", "KVGATE_REDIS_URL": "redis://redis"}
    printed = {each["name"]: each for each in as_json(commands(load_replica(tmp_path / "replica.yaml", env)))}
    replica = Workload("replica", the("vllm", "StatefulSet", "replica"))
    engine = replica.container("engine")
    argv = expanded(engine, POD_NAME="replica-0")
    assert argv[-2:] == ["--max-model-len", "32768"]
    assert sorted(argv) == sorted(printed["vllm"]["argv"])
    assert set(pairwise(argv[:-2])) >= {(option, value) for option, value in pairwise(extra)}
    assert ["kvgate", *expanded(replica.container("agent"), POD_NAME="replica-0")] == printed["agent"]["argv"]
    has = {name: each.get("value") for name, each in environment(engine).items()}
    assert printed["vllm"]["env"].items() <= has.items()
    assert set(printed["vllm"]["needs"]) <= has.keys()
    assert engine["image"] == f"vllm/vllm-openai:v{install.VERSION}"


def test_gateways_take_the_configuration_and_follow_the_charts_replicas(tmp_path: Path) -> None:
    found = settings("simulated", tmp_path)
    assert found.discovery.kubernetes is not None
    assert found.discovery.kubernetes.service == the("simulated", "Service", "replica")["metadata"]["name"]
    its_own = {"discovery", "id"}
    overlay = gateway_settings("sim", tmp_path).model_dump(exclude=its_own | {"redis", "security"})
    assert overlay.items() <= found.model_dump(exclude=its_own).items()


def test_gateways_take_a_configuration_of_ones_own(tmp_path: Path) -> None:
    found = settings("your Redis", tmp_path)
    assert found.discovery.kubernetes is None
    assert found.discovery.dns is not None
    assert found.limits.max_body_bytes == 1234567890


@pytest.mark.parametrize("case", ["picker", "picker of your replicas"])
def test_pickers_take_the_configuration(case: str, tmp_path: Path) -> None:
    settings(case, tmp_path)


@pytest.mark.parametrize("case", ["picker", "picker of your replicas"])
def test_the_pool_selects_the_replicas_and_names_the_picker(case: str) -> None:
    pool = the(case, "InferencePool")
    config = json.loads(the(case, "ConfigMap", "picker")["data"]["gateway.yaml"])
    assert config["discovery"]["kubernetes"] == {"inference_pool": pool["metadata"]["name"]}
    service = the(case, "Service", "picker")
    (port,) = service["spec"]["ports"]
    asked = pool["spec"]["endpointPickerRef"]
    assert (asked["name"], asked["port"]["number"]) == (service["metadata"]["name"], port["port"])
    assert config["picker"]["port"] == Workload("", the(case, "Deployment")).ports[port["targetPort"]]
    ports = [each["number"] for each in pool["spec"]["targetPorts"]]
    if case == "picker":
        replica = Workload("", the(case, "StatefulSet", "replica"))
        assert selects(pool["spec"]["selector"], replica.labels)
        assert ports == [replica.ports["http"]]
    else:
        assert pool["spec"]["selector"] == {"matchLabels": {"app": "vllm"}}
        assert ports == [8000, 8001]


@pytest.mark.parametrize(("case", "peers"), [("simulated", []), ("picker", ["kvgate/client"])])
def test_redis_and_replicas_are_reached_at_one_port_and_by_few(case: str, peers: list[str]) -> None:
    part = CASES[case].get("mode", "gateway")
    expected = {
        "redis": (6379, [part, "replica", "kvgate/agent"]),
        "replica": (8000, [part, "kvgate/prometheus", *peers]),
    }
    for name, (port, sources) in expected.items():
        (rule,) = the(case, "NetworkPolicy", name)["spec"]["ingress"]
        assert rule["ports"] == [{"port": port}]
        labels = [
            peer.get("podSelector", peer.get("namespaceSelector"))["matchLabels"].items() for peer in rule["from"]
        ]
        assert [next(value if value != "true" else key for key, value in each) for each in labels] == sources


def test_the_charts_redis_has_the_settings_of_configs_and_users_with_passwords_that_nobody_knows() -> None:
    assert the("simulated", "ConfigMap", "redis")["data"]["redis.conf"].strip() == (
        (ROOT / "configs" / "redis.conf").read_text().strip()
    )
    first, second = (the("simulated", "Secret")["stringData"] for _ in range(2))
    assert not first.items() & second.items()
    assert "_PASSWORD" not in first["users.acl"]


def test_redis_lets_gateways_and_agents_in_by_the_urls_of_the_secret(tmp_path: Path) -> None:
    secret = the("simulated", "Secret")["stringData"]
    (tmp_path / "users.acl").write_text(secret["users.acl"])
    host = the("simulated", "Service", "redis")["metadata"]["name"]
    with running_redis(options=("--aclfile", str(tmp_path / "users.acl"))) as server, ExitStack() as stack:
        for name, user in {"KVGATE_REDIS_URL": "kvgate", "KVGATE_AGENT_REDIS_URL": "kvagent"}.items():
            url = secret[name]
            assert url.startswith(f"redis://{user}:")
            client = redis.from_url(url.replace(f"{host}:6379", f"127.0.0.1:{server.port}"))
            stack.callback(client.close)
            assert client.set("kvgate:{m}:x", "1")


def test_with_a_redis_of_ones_own_the_chart_runs_none_and_takes_its_url() -> None:
    url = CASES["your Redis"]["redis"]["url"]
    secret = the("your Redis", "Secret")["stringData"]
    assert (secret["KVGATE_REDIS_URL"], secret["KVGATE_AGENT_REDIS_URL"]) == (url, url)
    assert "users.acl" not in secret
    assert not [each for each in rendered(CASES["your Redis"]) if each["kind"] == "StatefulSet"]


def test_with_a_secret_of_ones_own_the_chart_makes_none() -> None:
    assert not [each for each in rendered(CASES["your Secret"]) if each["kind"] == "Secret"]
    assert ("Secret", "mine") in {each for one in rendered(CASES["your Secret"]) for each in referred(one)}


@contextmanager
def cluster(secret: Document) -> Iterator[str]:
    """The URL of an API server that knows the chart's kinds, and this Secret of the release."""
    groups: dict[str, list[Document]] = {}
    for document in rendered({}):
        kind, verbs = document["kind"], ["get"]
        resource = {"name": f"{kind.lower()}s", "namespaced": True, "kind": kind, "verbs": verbs}
        groups.setdefault(document["apiVersion"], []).append(resource)
    named = [tuple(version.split("/")) for version in groups if version != "v1"]
    group_list = [{"name": group, "versions": [{"groupVersion": f"{group}/{v}", "version": v}]} for group, v in named]
    answers: dict[str, Document] = {
        "/version": {"major": "1", "minor": "37", "gitVersion": "v1.37.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "groups": group_list},
        f"/api/v1/namespaces/{NAMESPACE}/secrets/{RELEASE}": {"kind": "Secret", "apiVersion": "v1"} | secret,
        **{
            f"/api/{version}" if version == "v1" else f"/apis/{version}": {
                "kind": "APIResourceList",
                "groupVersion": version,
                "resources": resources,
            }
            for version, resources in groups.items()
        },
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path.partition("?")[0])
            self.send_response(200 if answer else 404)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer or {}).encode())

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_upgrade_keeps_the_passwords_that_are_in_the_cluster() -> None:
    passwords = {"KVGATE_PASSWORD": "one", "KVAGENT_PASSWORD": "two", "KVGATE_CACHE_SALT_SECRET": "salt" * 4}
    installed = {"meta.helm.sh/release-name": RELEASE, "meta.helm.sh/release-namespace": NAMESPACE}
    there = {
        "metadata": {"labels": {"app.kubernetes.io/managed-by": "Helm"}, "annotations": installed},
        "data": {name: b64encode(each.encode()).decode() for name, each in passwords.items()},
    }
    with cluster(there) as url:
        online = ("--dry-run=server", "--disable-openapi-validation")
        documents = rendered({}, *online, HELM_KUBEAPISERVER=url)
    (secret,) = (each["stringData"] for each in documents if each["kind"] == "Secret")
    assert passwords.items() <= secret.items()
    assert secret["KVGATE_REDIS_URL"].startswith("redis://kvgate:one@")
    assert " >two " in secret["users.acl"]
    assert len(secret["KVCHUNK_PASSWORD"]) == 48  # which was not there


def test_the_time_to_end_of_pods_follows_the_longest_request() -> None:
    documents = rendered(CASES["vllm"] | {"config": {"timeouts": {"request_s": 900}}})
    pods = {each["metadata"]["name"]: Workload("", each) for each in documents if "template" in each.get("spec", {})}
    for name in (f"{RELEASE}-gateway", f"{RELEASE}-replica"):
        assert pods[name].pod["terminationGracePeriodSeconds"] == 930
    args = pods[f"{RELEASE}-replica"].container("engine")["args"]
    assert dict(pairwise(args))["--shutdown-timeout"] == "900"
    (config,) = (each for each in documents if each["metadata"]["name"] == f"{RELEASE}-gateway" and "data" in each)
    assert json.loads(config["data"]["gateway.yaml"])["timeouts"] == {"request_s": 900, "grace_s": 900}


def test_ids_of_replicas_are_not_too_long_whatever_the_releases_name() -> None:
    done = ran("template", "r" * 53, CHART, values=CASES["simulated"])
    names = [each["metadata"]["name"] for each in yaml.safe_load_all(done.stdout) if each["kind"] == "StatefulSet"]
    assert [name for name in names if len(f"{name}-999") <= 48] == names != []


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("/mode", {"mode": "proxy"}),
        ("/gateways/min", {"gateways": {"min": 0}}),
        ("/gateways", {"gateways": {"maximum": 3}}),
        ("/replicas/engine", {"replicas": {"engine": "sglang"}}),
        ("/replicas/model", {"replicas": {"count": 1}}),
        ("/replicas/args/0", {"replicas": {"args": [1]}}),
        ("/redis/url", {"redis": {"enabled": False}}),
        ("/redis/url", {"redis": {"url": "localhost:6379"}}),
        ("/pool/selector", {"mode": "picker"}),
        ("/pool/ports/0", {"pool": {"ports": ["http"]}}),
        ("/config/port", {"config": {"port": 80}}),
        ("/config/timeouts/request_s", {"config": {"timeouts": {"request_s": "9m"}}}),
    ],
)
def test_a_wrong_value_is_refused_with_the_name_of_its_field(field: str, values: Document) -> None:
    done = ran("template", RELEASE, CHART, values=values)
    assert done.returncode != 0
    older = field.removeprefix("/").replace("/", ".")  # Helm 3.17
    assert f"at '{field}'" in done.stderr or f"- {older}: " in done.stderr
