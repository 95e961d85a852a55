"""Values that the manifests repeat agree with KVGate's settings, with Redis' settings, and with each other."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
import typer

from coordinator.keys import records_key
from gateway.ops.cli import app
from gateway.ops.replica import settings as replica_settings
from gateway.settings.discovery_settings import KubernetesSettings
from gateway.settings.gateway_settings import OVERRIDES, GatewaySettings
from tests.deploy.composition import as_written
from tests.deploy.manifests import (
    ALL,
    OVERLAYS,
    ROOT,
    WITH_VLLM,
    config_map,
    discovered,
    endpoint_slice,
    environment,
    expanded,
    gateway_settings,
    named,
    replicas,
    secret,
    workload,
    workloads,
)
from tests.redis_server import EACH_REDIS, running_redis, server_named

# By default, Kubernetes' cluster autoscaler waits this long for a pod to end.
AUTOSCALER_WAITS_S = 600
GOODBYE_S = 10
"""The time after the last stream that a gateway may take to leave Redis, or vLLM to leave its GPU."""

UNITS = {"mb": 2**20, "gb": 2**30, "Mi": 2**20, "Gi": 2**30}


def size_bytes(text: str) -> int:
    number, unit = text[:-2], text[-2:]
    return int(number) * UNITS[unit]


@pytest.fixture
def gateway(overlay: str, tmp_path: Path) -> GatewaySettings:
    return gateway_settings(overlay, tmp_path)


@pytest.mark.parametrize("overlay", OVERLAYS)
async def test_gateways_find_however_many_replicas_there_are_and_call_them_as_their_agents_do(
    overlay: str, gateway: GatewaySettings, tmp_path: Path
) -> None:
    replicas, followed = workload(overlay, "replica"), gateway.discovery.kubernetes
    assert followed is not None
    assert followed.service is not None
    assert gateway.replicas == []
    pods = {f"replica-{number}": f"10.0.0.{number}" for number in range(replicas.document["spec"]["replicas"] + 2)}
    slices = endpoint_slice(overlay, followed.service, pods)
    found = {replica.id: replica.url for replica in await discovered(gateway, tmp_path, slices)}
    assert found == {pod: f"http://{address}:{replicas.ports['http']}" for pod, address in pods.items()}
    for pod in pods:
        agent = expanded(replicas.container("agent"), POD_NAME=pod)
        assert agent[agent.index("--replica") + 1] == pod


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_gateways_ask_where_a_pod_finds_the_api_server_and_its_own_account(
    overlay: str, gateway: GatewaySettings
) -> None:
    followed = gateway.discovery.kubernetes
    assert followed is not None
    unsaid = KubernetesSettings(service="replica")
    assert (followed.api_url, followed.service_account) == (unsaid.api_url, unsaid.service_account)
    # None means the gateway's own namespace, which is also the replicas'.
    assert followed.namespace is None


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_gateway_listens_where_its_service_sends(overlay: str, gateway: GatewaySettings) -> None:
    assert (gateway.host, gateway.port) == ("0.0.0.0", workload(overlay, "gateway").ports["http"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_gateway_that_is_replaced_has_the_time_to_end_every_request(overlay: str, gateway: GatewaySettings) -> None:
    pod = workload(overlay, "gateway").pod
    (container,) = pod["containers"]
    leaves_the_service_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert leaves_the_service_s >= 10
    timeouts = gateway.timeouts
    assert timeouts.grace_s >= timeouts.request_s
    needed_s = leaves_the_service_s + timeouts.grace_s + GOODBYE_S
    assert needed_s <= pod["terminationGracePeriodSeconds"] < AUTOSCALER_WAITS_S


@pytest.mark.parametrize("overlay", ALL)
def test_the_drain_of_a_replica_then_its_engine_and_its_agent_have_the_time_to_end(
    overlay: str, gateway: GatewaySettings
) -> None:
    for each in replicas(overlay):
        # The kubelet sets no limit to the hook but this time, and subtracts the time that it took from the engine's.
        ends_s = each.pod["terminationGracePeriodSeconds"]
        assert gateway.timeouts.request_s + 2 * GOODBYE_S <= ends_s < AUTOSCALER_WAITS_S


@pytest.mark.parametrize("overlay", WITH_VLLM)
def test_a_replica_that_is_replaced_has_the_time_to_end_every_request(overlay: str, gateway: GatewaySettings) -> None:
    """Also where the hook could not drain: then the engine does."""
    replica = workload(overlay, "replica")
    argv = replica.container("engine")["args"]
    drains_s = int(argv[argv.index("--shutdown-timeout") + 1])
    assert drains_s >= gateway.timeouts.request_s
    assert drains_s + GOODBYE_S <= replica.pod["terminationGracePeriodSeconds"] < AUTOSCALER_WAITS_S
    # Sidecars stop after the engine, not with it.
    sidecars = [each for each in replica.containers if each["name"] != "engine"]
    assert sidecars == replica.pod["initContainers"]
    assert all(each["restartPolicy"] == "Always" for each in sidecars)


@pytest.mark.parametrize("overlay", ALL)
def test_upgrades_and_drained_nodes_take_one_at_a_time(overlay: str) -> None:
    rolling = named(overlay, "Deployment", "gateway")["spec"]["strategy"]["rollingUpdate"]
    assert rolling == {"maxSurge": 1, "maxUnavailable": 0}
    for name in ("gateway", *(each.name for each in replicas(overlay))):
        assert named(overlay, "PodDisruptionBudget", name)["spec"]["maxUnavailable"] == 1
    # A repeated `kubectl apply` must not undo the autoscaler's scaling.
    assert "replicas" not in named(overlay, "Deployment", "gateway")["spec"]
    assert named(overlay, "HorizontalPodAutoscaler", "gateway")["spec"]["minReplicas"] >= 2


def test_the_cpu_tier_fits_into_dev_shm_and_dev_shm_into_the_containers_memory() -> None:
    """vLLM does not start where /dev/shm is too small. What is in there counts as the container's memory."""
    replica = workload("cpu-offload", "replica")
    engine = replica.container("engine")
    tier_bytes = int(dict(itertools.pairwise(engine["args"]))["--kv-offloading-size"]) * 2**30
    mounted = next(each["name"] for each in engine["volumeMounts"] if each["mountPath"] == "/dev/shm")
    (shm,) = (each["emptyDir"] for each in replica.pod["volumes"] if each["name"] == mounted)
    resources = engine["resources"]
    assert tier_bytes + 4 * 2**30 <= size_bytes(shm["sizeLimit"])  # and what else vLLM's processes share
    for memory in (resources["requests"]["memory"], resources["limits"]["memory"]):
        assert size_bytes(shm["sizeLimit"]) + 32 * 2**30 <= size_bytes(memory)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_redis_has_the_settings_of_configs_and_a_quarter_of_its_memory_to_spare(overlay: str) -> None:
    conf = (ROOT / "configs" / "redis.conf").read_text()
    assert config_map(overlay, "redis-config") == {"redis.conf": conf}
    container = workload(overlay, "redis").container("redis")
    stated = re.findall(r"^maxmemory (\S+)$", conf, flags=re.MULTILINE)
    stated += [value for option, value in itertools.pairwise(container["args"]) if option == "--maxmemory"]
    assert size_bytes(stated[-1]) <= 0.75 * size_bytes(container["resources"]["limits"]["memory"])


def test_redis_conf_opens_redis_to_its_host_alone_and_each_deployment_to_its_network() -> None:
    conf = (ROOT / "configs" / "redis.conf").read_text().splitlines()
    assert {"bind 127.0.0.1", "protected-mode yes"} <= set(conf)
    compose = shlex.split(as_written("sim").services["redis"]["entrypoint"][-1])
    for command in (compose, *(workload(overlay, "redis").container("redis")["args"] for overlay in OVERLAYS)):
        given = dict(itertools.pairwise(command))
        assert (given["--bind"], given["--protected-mode"]) == ("0.0.0.0", "no")
        assert given["--aclfile"] == ("/tmp/users.acl" if command is compose else "/etc/kvgate/users.acl")


@pytest.mark.parametrize("name", EACH_REDIS)
def test_every_redis_takes_redis_conf_and_keeps_owners_records_compact(name: str) -> None:
    lines = (ROOT / "configs" / "redis.conf").read_text().splitlines()
    told = [shlex.split(f"--{line}") for line in lines if line and not line.startswith("#")]
    with (
        running_redis(server_named(name), options=tuple(word for words in told for word in words)) as server,
        redis.Redis.from_url(server.url, decode_responses=True) as client,
    ):
        assert set(client.config_get("hash-max-*-value").values()) == {"128"}
        assert set(client.config_get("hash-max-*-entries").values()) == {"64"}
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "volatile-lru"}


def test_redis_users_may_do_what_the_documentation_says() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    users = dict(re.findall(r"^user (\w+) on (.*)$", secret()["users.acl"], flags=re.MULTILINE))
    assert users.pop("default").split() == ["nopass", "-@all", "+ping"]
    urls = {"kvgate": "KVGATE_REDIS_URL", "kvagent": "KVGATE_AGENT_REDIS_URL", "kvchunk": "KVGATE_LMCACHE_URL"}
    assert users.keys() == urls.keys()
    for name, rules in users.items():
        documented = re.search(rf"^ACL SETUSER {name} on >PASSWORD (.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
        assert documented is not None
        password, *its_rules = rules.split()
        known = documented[1].split()
        if name != "kvchunk":
            # The manifests run Redis 7, for which the documentation asks for this rule too.
            assert "%R~kvchunk@*" in text
            its_rules.remove("%R~kvchunk@*")
        if name == "kvgate":
            watch = re.search(r"^ACL SETUSER kvgate (\+dbsize.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
            assert watch is not None
            known += watch[1].split()
        assert its_rules == known
        assert secret()[urls[name]] == f"redis://{name}:{password.removeprefix('>')}@redis:6379/0"


def test_redis_takes_the_users_and_whoever_has_no_password_may_only_ping(tmp_path: Path) -> None:
    users = tmp_path / "users.acl"
    users.write_text(secret()["users.acl"])
    with running_redis(options=("--aclfile", str(users))) as server, ExitStack() as stack:

        def client(url: str) -> redis.Redis:
            return stack.enter_context(redis.from_url(url.replace("redis:6379", f"127.0.0.1:{server.port}")))

        client(secret()["KVGATE_REDIS_URL"]).set("kvgate:x", "1")
        client(secret()["KVGATE_AGENT_REDIS_URL"]).set("kvgate:{m}:x", "1")
        chunks = client(secret()["KVGATE_LMCACHE_URL"])
        chunks.set("kvchunk@x", "1")
        nobody = client(server.url)
        assert nobody.ping()
        for one in (chunks, nobody):
            with pytest.raises(redis.exceptions.NoPermissionError):
                one.get("kvgate:x")


@pytest.mark.parametrize("profile", ["sim", "vllm"])
def test_in_docker_compose_gateways_and_agents_have_a_redis_user_each_and_all_others_reach_only_chunks(
    profile: str, tmp_path: Path
) -> None:
    services, users = as_written(profile).services, tmp_path / "users.acl"
    passwords = dict(re.findall(r"^(\w+_REDIS_PASSWORD)=(.*)$", (ROOT / ".env").read_text(), flags=re.MULTILINE))

    def given(text: str) -> str:
        return re.sub(r"\$\{(\w+):\?\}", lambda found: passwords[found[1]], text)

    variables = {name: given(text) for name, text in services["redis"]["environment"].items()}
    makes_users = services["redis"]["entrypoint"][-1].partition("exec")[0].replace("$$", "$")
    for name, path in (("/etc/kvgate/users.acl", ROOT / "deploy" / "redis" / "users.acl"), ("/tmp/users.acl", users)):
        makes_users = makes_users.replace(name, str(path))
    subprocess.run(["/bin/sh", "-euc", makes_users], env=variables | {"PATH": os.environ["PATH"]}, check=True)
    urls: dict[str, set[str]] = {"gateway": set(), "agent": set()}
    for name, service in services.items():
        kind = next((kind for kind in urls if kind in name), "")
        url = service.get("environment", {}).get("KVGATE_REDIS_URL", "")
        assert bool(url) == bool(kind), name
        if kind:
            urls[kind].add(given(url))
    [gateway], [agent] = urls["gateway"], urls["agent"]
    with running_redis(options=("--aclfile", str(users))) as server, ExitStack() as stack:
        by_kvgate, by_agent, by_nobody = (
            stack.enter_context(redis.from_url(url.replace("redis:6379", f"127.0.0.1:{server.port}")))
            for url in (gateway, agent, server.url)
        )
        by_kvgate.hset(records_key(), "#", "1")
        by_agent.set("kvgate:{m}:x", "1")
        by_nobody.set("kvchunk@x", "1")
        assert by_agent.exists("kvchunk@x")
        for one, key in ((by_agent, records_key()), (by_nobody, records_key()), (by_nobody, "kvgate:{m}:x")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                one.exists(key)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kvgate_knows_every_argument_and_variable_that_it_is_given(overlay: str) -> None:
    known = OVERRIDES.keys() | replica_settings.OVERRIDES.keys()
    commands = typer.main.get_command(app)
    for container in (container for each in workloads(overlay) for container in each.containers):
        assert {name for name in environment(container) if name.startswith("KVGATE_")} <= known
        if container["image"].startswith("kvgate:"):
            name, *arguments = expanded(container, POD_NAME="replica-0")
            # Raises a usage error for an unknown argument.
            commands.commands[name].make_context(name, arguments)
