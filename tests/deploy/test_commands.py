"""The containers run the commands that `kvgate replica-command` prints, so the manifests cannot drift from it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.vllm import install, lmcache
from gateway.ops.replica.commands import as_json, commands
from gateway.ops.replica.settings import load_replica
from tests.deploy.manifests import KUBERNETES, ROOT, WITH_VLLM, environment, expanded, secret, workload

POD = "replica-0"
CONTAINERS = {"vllm": "engine", "lmcache": "lmcache", "agent": "agent"}
"""The container of each process of replica-command."""
PROCESSES = [("gpu", "lmcache"), *((overlay, name) for overlay in WITH_VLLM for name in ("vllm", "agent"))]


def printed(overlay: str) -> dict[str, dict[str, Any]]:
    env = {**secret(), "KVGATE_REPLICA_ID": POD}
    found = as_json(commands(load_replica(KUBERNETES / "overlays" / overlay / "replica.yaml", env)))
    return {each["name"]: each for each in found}


@pytest.mark.parametrize("overlay", WITH_VLLM)
def test_a_replica_is_the_processes_that_replica_command_prints(overlay: str) -> None:
    containers = [container["name"] for container in workload(overlay, "replica").containers]
    assert sorted(containers) == sorted(CONTAINERS[name] for name in printed(overlay))
    assert set(printed(overlay)) == {name for its_overlay, name in PROCESSES if its_overlay == overlay}


@pytest.mark.parametrize(("overlay", "name"), PROCESSES)
def test_a_container_runs_what_replica_command_prints(overlay: str, name: str) -> None:
    command = printed(overlay)[name]
    container = workload(overlay, "replica").container(CONTAINERS[name])
    # The entry point of KVGate's image is `kvgate`.
    entry_point = [] if "command" in container else ["kvgate"]
    assert entry_point + expanded(container, POD_NAME=POD) == command["argv"]


@pytest.mark.parametrize(("overlay", "name"), PROCESSES)
def test_a_container_has_the_environment_that_replica_command_prints(overlay: str, name: str) -> None:
    command = printed(overlay)[name]
    has = environment(workload(overlay, "replica").container(CONTAINERS[name]))
    assert command["env"].items() <= {variable: each.get("value") for variable, each in has.items()}.items()
    for variable in command["needs"]:
        key = {"KVGATE_REDIS_URL": "KVGATE_AGENT_REDIS_URL"}.get(variable, variable)  # agents have a user of their own
        assert has[variable]["valueFrom"]["secretKeyRef"]["key"] == key


@pytest.mark.parametrize("overlay", WITH_VLLM)
def test_the_engines_events_are_bound_to_the_pods_loopback_address(overlay: str) -> None:
    argv = expanded(workload(overlay, "replica").container("engine"), POD_NAME=POD)
    events = json.loads(argv[argv.index("--kv-events-config") + 1])
    assert re.fullmatch(r"tcp://\[::ffff:127\.0\.0\.1\]:\d+", events["endpoint"])
    assert re.fullmatch(r"tcp://127\.0\.0\.1:\d+", events["replay_endpoint"])


def test_the_images_have_the_versions_of_vllm_and_lmcache_that_are_tested() -> None:
    offloads = workload("cpu-offload", "replica").container("engine")["image"]
    assert offloads == f"vllm/vllm-openai:v{install.VERSION}"
    image = (ROOT / "deploy" / "docker" / "Dockerfile.vllm-lmcache").read_text()
    assert f"FROM vllm/vllm-openai:v{install.VERSION}\n" in image
    tested = Path(lmcache.__file__).read_text()
    assert f"lmcache=={lmcache.VERSION}" in image
    for package in re.findall(r"valkey-glide-sync==[\d.]+", image):
        assert f'"{package}"' in tested
    assert "valkey-glide-sync==" in image
