"""The overlay `sim` as processes: each container's own command, environment and files, in namespaces that have the
manifests' names and ports. At the end the replica is drained as by the kubelet, beside a second one. Policies, users
and restarts need a real cluster and are not tested."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.certificates import self_signed
from tests.deploy.manifests import (
    KUBERNETES,
    ROOT,
    Document,
    Workload,
    config_map,
    endpoint_slice,
    environment,
    expanded,
    named,
    secret,
    workload,
)
from tests.gateway.replicas.discovery.kubernetes_api import ports, service_account
from tests.programs import namespaces, needs

POD, ADDRESS = "replica-0", "127.0.0.2"
OTHER, OTHER_PORTS = "replica-1", {"8000": "18000", "5557": "15557", "5558": "15558"}
"""A second engine. There is one network, so it has other ports than the manifests say."""
API_SERVER = "kubernetes.default.svc"
KVGATE = [sys.executable, "-P", "-m", "gateway.ops.cli"]
AFTER = 4
"""Requests that come while the replica is drained."""
CHAT = {"model": "sim", "messages": [{"role": "user", "content": "word " * 400}], "max_tokens": 2}


pytestmark = needs("redis-server", "openssl", "namespaces")  # Redis' probes run redis-cli


def process(container: Document, folder: Path, pod: str = POD) -> dict[str, Any]:
    """A container as a process. `folder` has its files, in place of the mounts."""
    argv = expanded(container, POD_NAME=pod)
    argv = argv if "command" in container else KVGATE + argv
    variables = environment(container)
    from_secret = {
        name: secret()[key]
        for name, each in variables.items()
        if (key := each.get("valueFrom", {}).get("secretKeyRef", {}).get("key")) in secret()
    }
    return {"argv": [each.replace("/etc/kvgate", str(folder)) for each in argv], "env": from_secret}


def probed(each: Workload) -> list[dict[str, Any]]:
    """A workload's probes as questions for sandbox.py."""
    found = []
    for container in each.containers:
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            asks = container.get(probe, {})
            if http := asks.get("httpGet"):
                url = f"http://127.0.0.1:{ports[http['port']]}{http['path']}"
                found.append({"method": "GET", "url": url, "until": [200, ""]})
            if "exec" in asks:
                found.append({"run": asks["exec"]["command"], "until": [0, ""]})
    return found


def account(folder: Path) -> Path:
    """The service account's files that Kubernetes mounts into a gateway's pod. Writes the API server's certificate into
    `folder`."""
    certificate, _ = self_signed(folder, "tls", API_SERVER)
    namespace = named("sim", "Deployment", "gateway")["metadata"]["namespace"]
    mounted = service_account(folder / "account", namespace)
    shutil.copy(certificate, mounted / "ca.crt")
    return mounted


def slices() -> list[str]:
    """The arguments of api_server.py: a slice with the replica, and one with the other, at its own port."""
    first, second = (endpoint_slice("sim", "replica", {pod: ADDRESS}) for pod in (POD, OTHER))
    second |= {"name": "replica-other", "at": ports(http=int(OTHER_PORTS["8000"]))}
    return [json.dumps(first), json.dumps(second)]


def drained(chat: dict[str, Any], ready: str, replica: Workload) -> list[dict[str, Any]]:
    """The steps of a drain: the replica stands still in the middle of a stream while the kubelet calls the hook."""
    hook = replica.container("engine")["lifecycle"]["preStop"]["httpGet"]
    url = f"http://{ADDRESS}:{hook['port']}{hook['path']}"
    headers = {each["name"]: each["value"] for each in hook["httpHeaders"]}
    fails = {"method": "POST", "url": f"http://{ADDRESS}:{replica.ports['http']}/sim/fail"}
    return [
        {"start": "other"},
        {"method": "GET", "url": ready, "until": [200, f'"replicas":["{POD}","{OTHER}"]']},
        chat | {"json": CHAT | {"stream": True, "max_tokens": 50}, "name": "stream"},
        {"read": "stream", "text": "data: "},
        fails | {"json": {"mode": "stall"}},
        {"method": "GET", "url": url, "headers": headers, "name": "hook"},
        {"method": "GET", "url": ready, "until": [200, f'"replicas":["{OTHER}"]']},
        *(chat for _ in range(AFTER)),
        {"read": "hook", "text": ""},
        fails | {"json": {"mode": "none"}},
        {"end": "stream"},
        {"end": "hook"},
    ]


def keda() -> dict[str, str]:
    """What KEDA asks a gateway for, about the model of this overlay: the path, and the place of the value."""
    scaled = yaml.safe_load((KUBERNETES / "autoscaling" / "keda" / "scaled-object.yaml").read_text())
    asks = scaled["spec"]["triggers"][0]["metadata"]
    url = asks["url"].replace(
        "MODEL", named("sim", "StatefulSet", "replica")["metadata"]["annotations"]["kvgate/model"]
    )
    return {"path": url.removeprefix("http://gateway.kvgate"), "value": asks["valueLocation"]}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("sim")
    (folder / "users.acl").write_text(secret()["users.acl"])
    for name in ("redis-config", "gateway-config"):
        for file, text in config_map("sim", name).items():
            (folder / file).write_text(text)
    settings = yaml.safe_load((folder / "gateway.yaml").read_text())
    settings.setdefault("redis", {})["budget_ms"] = 500  # the default is too short on a busy machine
    (folder / "gateway.yaml").write_text(yaml.safe_dump(settings))
    redis, replica, gateway = (workload("sim", name) for name in ("redis", "replica", "gateway"))
    containers = [container for each in (redis, replica, gateway) for container in each.containers]
    processes = {container["name"]: process(container, folder) for container in containers}
    other = process(replica.container("engine"), folder, OTHER)
    other["argv"] = [OTHER_PORTS.get(each, each) for each in other["argv"]]
    serves = [sys.executable, "-P", "-m", "tests.deploy.api_server", str(folder), *slices()]
    address = f"http://127.0.0.1:{gateway.ports['http']}"
    chat = {"method": "POST", "url": f"{address}/v1/chat/completions", "json": CHAT}
    plan = {
        "folder": str(folder),
        "names": ["redis", API_SERVER],
        "account": str(account(folder)),
        "processes": {"api-server": {"argv": serves, "env": {"PYTHONPATH": str(ROOT)}}, **processes, "other": other},
        "questions": [
            *(question for each in (redis, replica, gateway) for question in probed(each)),
            {"method": "GET", "url": f"{address}/ready", "until": [200, f'"exact":["{POD}"]']},
            {"method": "GET", "url": f"{address}/metrics"},
            {"method": "GET", "url": f"http://127.0.0.1:{replica.ports['http']}/metrics"},
            chat,
            chat,
            {"method": "GET", "url": f"{address}{keda()['path']}", "until": [200, f'"{keda()["value"]}":0']},
            *drained(chat, f"{address}/ready", replica),
        ],
    }
    done = subprocess.run(
        [*(namespaces() or ()), sys.executable, "-P", Path(__file__).with_name("sandbox.py")],
        input=json.dumps(plan),
        capture_output=True,
        text=True,
        check=False,
    )
    logs = "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in folder.glob("*.log"))
    assert done.returncode == 0, f"{done.stderr}\n{logs}"
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_the_containers_find_each_other_and_every_probe_is_answered(seen: dict[str, Any]) -> None:
    *probes, ready, gateway_metrics, replica_metrics, first, second, _ = seen["answers"][: -AFTER - 11]
    assert len(probes) == 8
    assert json.loads(ready["body"])["store"] == "up"
    assert "kvgate_store_up 1.0" in gateway_metrics["body"]
    assert "vllm:num_requests_running" in replica_metrics["body"]
    assert first["headers"]["x-kvgate-replica"] == second["headers"]["x-kvgate-replica"] == POD
    assert second["headers"]["x-kvgate-decision"].startswith("hit;")
    assert second["headers"]["x-kvgate-decision"].endswith("state=exact")


def test_a_gateway_answers_the_question_of_keda(seen: dict[str, Any]) -> None:
    demand = seen["answers"][-AFTER - 12]
    assert demand["status"] == 200, demand
    told = json.loads(demand["body"])
    assert told[keda()["value"]] == 0
    assert told["pool"] == named("sim", "StatefulSet", "replica")["metadata"]["annotations"]["kvgate/pool"]


def test_the_hook_of_the_engine_drains_its_replica_and_no_request_fails(seen: dict[str, Any]) -> None:
    _, _, _, begun, _, _, _, *after, meanwhile, _, stream, hook = seen["answers"][-AFTER - 11 :]
    assert begun["headers"]["x-kvgate-replica"] == POD
    assert [(answer["status"], answer["headers"]["x-kvgate-replica"]) for answer in after] == [(200, OTHER)] * AFTER
    assert not meanwhile["is_over"]
    assert stream["body"].endswith("data: [DONE]\n\n")
    assert '"error"' not in stream["body"]
    assert (hook["status"], hook["body"]) == (200, "drained\n")


def test_every_process_ends_well_when_it_is_told_to(seen: dict[str, Any]) -> None:
    assert seen["exits"] == dict.fromkeys(("gateway", "engine", "other", "agent", "redis", "api-server"), 0)
