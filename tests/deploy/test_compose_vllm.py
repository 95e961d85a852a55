"""docker-compose.yml's replicas with vLLM: which commands would run, and who could reach them. Needs no GPU.

Each test reads the file as written, and again as Docker Compose reads it if that is installed."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from gateway.ops.replica.commands import as_json, commands
from gateway.ops.replica.settings import load_replica
from gateway.settings.gateway_settings import GatewaySettings, load_settings
from tests.deploy.composition import Composition, as_read, as_written, docker_compose
from tests.deploy.manifests import ROOT
from tests.programs import needs

REPLICA_FILE = ROOT / "deploy" / "compose" / "replica-vllm.yaml"
REPLICAS = {"r0": "vllm-0", "r1": "vllm-1"}
CONTAINERS = {"lmcache": "lmcache", "vllm": "engine", "agent": "agent"}
"""The container of each process of replica-command."""
GATEWAYS = {"sim": "gateway", "vllm": "gateway-vllm", "pairs": "gateway-pairs"}
OPEN = {"nginx", "prometheus"}

each_replica = pytest.mark.parametrize("replica", REPLICAS)
each_process = pytest.mark.parametrize("name", CONTAINERS)
each_mode = pytest.mark.parametrize("mode", GATEWAYS)


@pytest.fixture(
    params=[as_written, pytest.param(as_read, marks=needs("docker compose"))], ids=["as written", "as read"]
)
def view(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def vllm(view: Any) -> Composition:
    composition: Composition = view("vllm")
    return composition


def printed(replica: str) -> dict[str, dict[str, Any]]:
    env = {"KVGATE_REPLICA_ID": replica, "KVGATE_REDIS_URL": "redis://kvagent:password@redis:6379/0"}
    found = as_json(commands(load_replica(REPLICA_FILE, env)))
    return {each["name"]: each for each in found}


def container(replica: str, name: str) -> str:
    return f"{REPLICAS[replica]}-{CONTAINERS[name]}"


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def gateway_settings(composition: Composition, mode: str) -> GatewaySettings:
    return load_settings(ROOT / composition.mounted(GATEWAYS[mode], "/etc/kvgate/gateway.yaml"), {})


@needs("docker compose")
def test_without_a_profile_the_replicas_are_simulated() -> None:
    assert as_read(None).services == as_read("sim").services
    assert set(as_read(None).services) == set(as_written("sim").services)


@needs("docker compose")
def test_every_combination_of_profiles_can_be_read() -> None:
    profiles = docker_compose("config", "--profiles").split()
    assert {"sim", "vllm", "pairs"} <= set(profiles)
    for count in range(len(profiles) + 1):
        for chosen in itertools.combinations(profiles, count):
            docker_compose(*(f"--profile={each}" for each in chosen), "config", "--quiet")


def test_there_are_two_replicas_with_vllm_and_no_simulated_one(vllm: Composition) -> None:
    parts = {f"{host}-{part}" for host in REPLICAS.values() for part in CONTAINERS.values()}
    shared = {"redis", "gateway-vllm", "nginx", "prometheus"}
    assert set(vllm.services) == {*REPLICAS.values(), *parts, *shared}
    assert not any("replica-sim" in (service.get("command") or []) for service in vllm.services.values())
    assert all(set(printed(replica)) == set(CONTAINERS) for replica in REPLICAS)


@each_replica
@each_process
def test_a_container_runs_what_replica_command_prints(vllm: Composition, replica: str, name: str) -> None:
    assert vllm.command(container(replica, name)) == printed(replica)[name]["argv"]


@each_replica
@each_process
def test_a_container_has_the_environment_that_replica_command_prints(
    vllm: Composition, replica: str, name: str
) -> None:
    command, environment = printed(replica)[name], vllm.services[container(replica, name)]["environment"]
    assert command["env"].items() <= environment.items()
    assert set(command["needs"]) <= set(environment)


def test_each_replica_has_a_gpu_of_its_own_which_its_lmcache_server_sees(vllm: Composition) -> None:
    gpus = {name: ids for name in vllm.services if (ids := vllm.devices(name))}
    assert gpus == {
        "vllm-0-lmcache": ["0"],
        "vllm-0-engine": ["0"],
        "vllm-1-lmcache": ["1"],
        "vllm-1-engine": ["1"],
    }


@each_replica
def test_what_belongs_to_a_replica_shares_its_network_its_memory_and_its_processes(
    vllm: Composition, replica: str
) -> None:
    holder = REPLICAS[replica]
    for name in CONTAINERS:
        service = vllm.services[container(replica, name)]
        assert {service[kind] for kind in ("network_mode", "ipc", "pid")} == {f"service:{holder}"}
        assert "networks" not in service
    assert vllm.services[holder]["ipc"] == "shareable"
    users = {vllm.services[container(replica, name)].get("user") for name in ("lmcache", "vllm")}
    assert len(users) == 1, "files in /dev/shm are their owner's alone"


@each_replica
def test_nobody_but_the_agent_reaches_a_replicas_events_and_nobody_but_it_and_the_engine_lmcache(
    vllm: Composition, replica: str
) -> None:
    assert {name: set(hosts) for name, hosts in vllm.published().items()} == {each: {"127.0.0.1"} for each in OPEN}
    events = json.loads(option(vllm.command(container(replica, "vllm")), "--kv-events-config"))
    assert re.fullmatch(r"tcp://\[::ffff:127\.0\.0\.1\]:\d+", events["endpoint"])
    assert re.fullmatch(r"tcp://127\.0\.0\.1:\d+", events["replay_endpoint"])
    server = vllm.command(container(replica, "lmcache"))
    assert option(server, "--host") == option(server, "--http-host") == "127.0.0.1"


@each_replica
def test_an_agent_watches_the_engine_and_asks_the_server_beside_it(vllm: Composition, replica: str) -> None:
    engine, server, agent = (vllm.command(container(replica, name)) for name in ("vllm", "lmcache", "agent"))
    events = json.loads(option(engine, "--kv-events-config"))
    assert option(agent, "--replica") == replica
    assert option(agent, "--url") == f"http://127.0.0.1:{option(engine, '--port')}"
    assert option(agent, "--events") == events["endpoint"].replace("[::ffff:127.0.0.1]", "127.0.0.1")
    assert option(agent, "--replay") == events["replay_endpoint"]
    assert option(agent, "--lmcache") == f"http://127.0.0.1:{option(server, '--http-port')}"


@each_mode
def test_gateways_know_exactly_the_replicas_of_their_mode(view: Any, mode: str) -> None:
    composition: Composition = view(mode)
    known = {each.id: urlsplit(each.url).hostname for each in gateway_settings(composition, mode).replicas}
    if mode == "vllm":
        assert known == REPLICAS
    else:
        services = composition.services
        simulated = {name for name, each in services.items() if "replica-sim" in (each.get("command") or [])}
        assert set(known.values()) == simulated
    assert set(known.values()) <= set(composition.services)


@each_mode
def test_prometheus_asks_every_replica_and_nginx_and_it_find_the_gateways(view: Any, mode: str) -> None:
    composition: Composition = view(mode)
    jobs = {
        job["job_name"]: {name for sd in job["dns_sd_configs"] for name in sd["names"]}
        for job in yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    }
    assert {urlsplit(each.url).hostname for each in gateway_settings(composition, mode).replicas} <= jobs["vllm"]
    networks = composition.services[GATEWAYS[mode]].get("networks", {}).get("default") or {}
    assert jobs["kvgate"] <= {GATEWAYS[mode], *networks.get("aliases", [])}


@each_mode
def test_whoever_passes_an_answer_on_is_given_longer_to_stop_than_who_makes_it(view: Any, mode: str) -> None:
    composition: Composition = view(mode)
    grace_s = gateway_settings(composition, mode).timeouts.grace_s
    assert composition.stop_s("nginx") > composition.stop_s(GATEWAYS[mode]) > grace_s
    if mode == "vllm":
        for replica in REPLICAS:
            engine = container(replica, "vllm")
            shutdown_s = int(option(composition.command(engine), "--shutdown-timeout"))
            assert composition.stop_s(engine) > shutdown_s >= grace_s


@each_replica
def test_an_agent_is_there_before_its_engine_and_outlives_it(vllm: Composition, replica: str) -> None:
    needed = vllm.services[container(replica, "vllm")]["depends_on"]
    assert needed[container(replica, "agent")]["condition"] == "service_started"
    assert needed[container(replica, "lmcache")]["condition"] == "service_healthy"
    assert container(replica, "vllm") in vllm.services["gateway-vllm"]["depends_on"]


def test_no_container_is_root_writes_to_its_image_or_has_rights(vllm: Composition) -> None:
    assert "\nUSER 10001:10001\n" in (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    for name, service in vllm.services.items():
        user = service.get("user", "10001:10001" if service["image"] == "kvgate" else "0")
        assert int(user.split(":")[0]) > 0, name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert "cap_add" not in service, name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.get("privileged"), name


@each_replica
def test_the_model_is_kept_in_one_volume_and_what_is_compiled_in_one_of_each(vllm: Composition, replica: str) -> None:
    engine = container(replica, "vllm")
    environment = vllm.services[engine]["environment"]
    assert vllm.mounted(engine, environment["HF_HOME"]) == "models"
    assert vllm.mounted(engine, environment["HOME"]) == REPLICAS[replica]
    image = (ROOT / "deploy" / "docker" / "Dockerfile.vllm-lmcache").read_text()
    user, group = vllm.services[engine]["user"].split(":")
    assert f"install -d -o {user} -g {group} {environment['HF_HOME']} {environment['HOME']}\n" in image
