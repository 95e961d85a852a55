"""A cluster of docker-compose.yml, in its own project and on its own ports, with the actions that tests need."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from gateway.ops.local.ports import free_ports

_ROOT = Path(__file__).parents[2]
_PROJECT = "kvgate-test"
_METRICS = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8080/metrics').read().decode())"


class ComposeCluster:
    """Parameters name a container by its id, and a service as in docker-compose.yml."""

    def __init__(self, profile: str, nginx_port: int, prometheus_port: int) -> None:
        self.url = f"http://127.0.0.1:{nginx_port}"
        self._prometheus_url = f"http://127.0.0.1:{prometheus_port}"
        self.environment = {
            **os.environ,
            "COMPOSE_PROJECT_NAME": f"{_PROJECT}-{profile}",
            "COMPOSE_PROFILES": profile,
            "KVGATE_PORT": str(nginx_port),
            "PROMETHEUS_PORT": str(prometheus_port),
        }

    async def docker(self, *arguments: str) -> str:
        """The output of a docker command. Fails with the command's stderr."""
        process = await asyncio.create_subprocess_exec(
            "docker",
            *arguments,
            cwd=_ROOT,
            env=self.environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate()
        assert process.returncode == 0, f"docker {' '.join(arguments)}: {errors.decode()[-2000:]}"
        return output.decode()

    async def up(self, gateways: int = 2) -> None:
        """Starts this many gateways, and all other services that do not run."""
        await self.docker("compose", "up", "--detach", "--wait", "--scale", f"gateway={gateways}")

    async def kill(self, service: str) -> None:
        """Kills a service. It stays dead: Docker does not restart a container that it killed itself."""
        await self.docker("compose", "kill", service)

    async def containers(self, *services: str) -> list[str]:
        return (await self.docker("compose", "ps", "--quiet", *services)).split()

    async def inspect(self, container: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(await self.docker("inspect", container))
        return found[0]

    async def crash(self, container: str) -> None:
        """Kills the container's process with kill -9 by its pid on the host. To Docker this is a crash."""
        pid = (await self.inspect(container))["State"]["Pid"]
        kill = f"import os; os.kill({pid}, 9)"
        await self.docker(
            *("run", "--rm", "--pid", "host", "--network", "none", "--user", "0", "--entrypoint", "python"),
            *("kvgate", "-c", kill),
        )

    async def metric(self, container: str, name: str, **labels: str) -> float:
        """A gateway's metric, summed over its series that have these labels."""
        text = await self.docker("exec", container, "python", "-c", _METRICS)
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def chats_answered(self) -> dict[str, float]:
        """The number of chats that each gateway has answered since its start."""
        containers = await self.containers("gateway")
        counts = [
            self.metric(container, "kvgate_requests_total", path="/v1/chat/completions", status="200")
            for container in containers
        ]
        return dict(zip(containers, await asyncio.gather(*counts), strict=True))

    async def ask_prometheus(self, http: httpx.AsyncClient, path: str, **parameters: str) -> Any:
        response = await http.get(f"{self._prometheus_url}/api/v1/{path}", params=parameters)
        assert response.status_code == 200, response.text
        return response.json()["data"]


@contextmanager
def running_cluster(profile: str = "sim") -> Iterator[ComposeCluster]:
    """Starts the cluster of a profile and always removes it afterwards. If it does not start, shows its logs."""
    cluster = ComposeCluster(profile, *free_ports(2))

    def compose(*arguments: str, check: bool = True) -> None:
        subprocess.run(["docker", "compose", *arguments], cwd=_ROOT, env=cluster.environment, check=check)

    try:
        try:
            compose("up", "--build", "--detach", "--wait")
        except subprocess.CalledProcessError:
            compose("logs", "--tail", "20", check=False)
            raise
        yield cluster
    finally:
        compose("down", "--volumes", "--timeout", "5")
