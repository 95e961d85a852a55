"""The cluster of docker-compose.yml, in a project and on ports of its own, and what can be done to it."""

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
    """A container is named by its id, a service as in docker-compose.yml."""

    def __init__(self, nginx_port: int, prometheus_port: int) -> None:
        self.url = f"http://127.0.0.1:{nginx_port}"
        self._prometheus_url = f"http://127.0.0.1:{prometheus_port}"
        self.environment = {
            **os.environ,
            "COMPOSE_PROJECT_NAME": _PROJECT,
            "COMPOSE_PROFILES": "sim",
            "KVGATE_PORT": str(nginx_port),
            "PROMETHEUS_PORT": str(prometheus_port),
        }

    async def docker(self, *arguments: str) -> str:
        """What a docker command prints; fails with what it says on stderr."""
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
        """As many gateways as told, and everything else that does not run."""
        await self.docker("compose", "up", "--detach", "--wait", "--scale", f"gateway={gateways}")

    async def kill(self, service: str) -> None:
        """It stays dead: Docker does not restart what was killed through it."""
        await self.docker("compose", "kill", service)

    async def containers(self, *services: str) -> list[str]:
        return (await self.docker("compose", "ps", "--quiet", *services)).split()

    async def inspect(self, container: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(await self.docker("inspect", container))
        return found[0]

    async def crash(self, container: str) -> None:
        """kill -9 of its process by its pid on the host, which Docker takes for a crash."""
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
        """By each gateway since it started."""
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
def running_cluster() -> Iterator[ComposeCluster]:
    """Brings it up, and takes it down whatever happens; where it does not come up, its logs are shown."""
    cluster = ComposeCluster(*free_ports(2))

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
