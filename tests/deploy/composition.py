"""docker-compose.yml as written and as Docker Compose reads it."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
from dataclasses import dataclass
from typing import Any

import yaml

from tests.deploy.manifests import ROOT

Service = dict[str, Any]
_SECONDS = {"h": 3600, "m": 60, "s": 1}


@dataclass(frozen=True)
class Composition:
    """The services that a profile starts."""

    services: dict[str, Service]

    def command(self, name: str) -> list[str]:
        """The arguments that a service's entry point gives its process. A `printf` in its place prints them."""
        service = self.services[name]
        entry_point, command = (_unescaped(service.get(key, [])) for key in ("entrypoint", "command"))
        if not entry_point:
            return command
        environment = {"PATH": os.environ["PATH"], **_unset_left_out(service["environment"])}
        printed = [*entry_point, "printf", r"%s\0", *command]
        done = subprocess.run(printed, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.split("\0")[:-1]

    def devices(self, name: str) -> list[str]:
        """The ids of a service's GPUs."""
        resources = self.services[name].get("deploy", {}).get("resources", {})
        devices = resources.get("reservations", {}).get("devices", [])
        assert all(each["driver"] == "nvidia" and each["capabilities"] == ["gpu"] for each in devices)
        return [number for each in devices for number in each["device_ids"]]

    def mounted(self, name: str, target: str) -> str:
        """The source of a service's mount at `target`: a path in the repository, or a volume's name."""
        for volume in self.services[name]["volumes"]:
            source, where = volume.split(":")[:2] if isinstance(volume, str) else (volume["source"], volume["target"])
            if where == target:
                return str(source).removeprefix(f"{ROOT}/").removeprefix("./")
        raise LookupError(f"{name} has nothing at {target}")

    def published(self) -> dict[str, list[str]]:
        """The addresses of this host on which each service is published."""
        found = {}
        for name, service in self.services.items():
            ports = service.get("ports", [])
            if ports:
                found[name] = [port.split(":")[0] if isinstance(port, str) else port["host_ip"] for port in ports]
        return found

    def stop_s(self, name: str) -> int:
        """A service's grace period for stopping, in seconds."""
        parts = re.findall(r"(\d+)([hms])", self.services[name]["stop_grace_period"])
        return sum(int(number) * _SECONDS[unit] for number, unit in parts)


def as_written(profile: str) -> Composition:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    return Composition({name: each for name, each in services.items() if profile in each.get("profiles", [profile])})


@functools.cache
def as_read(profile: str | None) -> Composition:
    """The file as Docker Compose reads it. None: without a profile."""
    told = json.loads(docker_compose(*(("--profile", profile) if profile else ()), "config", "--format", "json"))
    return Composition(told["services"])


def docker_compose(*arguments: str) -> str:
    """The output of a `docker compose` command."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("COMPOSE_", "HF_"))}
    done = subprocess.run(
        ["docker", "compose", *arguments], cwd=ROOT, env=inherited, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _unescaped(words: list[str] | None) -> list[str]:
    return [word.replace("$$", "$") for word in words or []]


def _unset_left_out(environment: dict[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if value is not None}
