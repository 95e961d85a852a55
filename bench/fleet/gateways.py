"""Starts gateways before servers that already run: `kvgate gateway`, once for each. `kvgate up` is not used, because it
would start an agent's process for each replica that is slow to answer."""

from __future__ import annotations

import select
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from bench.cluster import KVGATE
from bench.processes import running
from bench.streams import STREAMS
from gateway.ops.local.ports import free_ports
from gateway.settings.gateway_settings import OVERRIDES

_GATEWAY = ("env", *(f"--unset={name}" for name in OVERRIDES), *KVGATE, "gateway", "--config")
"""The file says everything."""
_AT_ONCE = 4
_CHECKED_AT_ONCE = 1000
"""So many gateways start at the same time, as long as they check no more replicas. More of them would keep running
gateways and agents from their Redis, which would then connect again and again."""
_READY_S = 60.0
_POLL_S = 0.1
_ANSWER_S = 10.0
_LAST_LINES_BYTES = 2000


class NotReady(Exception):
    """A gateway has ended, or is not ready in time."""


@dataclass(frozen=True)
class GatewayProcess:
    """One gateway."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait_until_ready(self, replicas: int) -> None:
        """Waits until it serves, and gets the events of this many replicas. Raises NotReady."""
        deadline_s = time.monotonic() + _READY_S
        while not self._is_ready(replicas):
            if time.monotonic() > deadline_s or self.process.poll() is not None:
                told = self.log.read_bytes()[-_LAST_LINES_BYTES:].decode(errors="replace")
                raise NotReady(f"the gateway at {self.url} is not ready:\n{told}")
            select.select([], [], [], _POLL_S)

    def _is_ready(self, replicas: int) -> bool:
        try:
            answer = httpx.get(f"{self.url}/ready", timeout=_ANSWER_S).json()
        except (httpx.HTTPError, ValueError):
            return False
        return bool(answer.get("ready")) and len(answer.get("exact", ())) >= replicas


@contextmanager
def running_gateways(
    count: int,
    listed: Mapping[str, str],
    replicas: int,
    redis_url: str,
    config: Mapping[str, Any],
) -> Iterator[list[GatewayProcess]]:
    """Starts gateways, and stops them at the end. `listed` are the URLs in their configuration by replica id, and
    `replicas` is the number of those that they must know, found ones included."""
    with tempfile.TemporaryDirectory(prefix="kvgate-bench-") as folder, ExitStack() as stack:
        started: list[GatewayProcess] = []
        at_once = min(_AT_ONCE, max(1, _CHECKED_AT_ONCE // max(1, replicas)))
        for number, port in enumerate(free_ports(count)):
            file, log = Path(folder, f"gw{number}.yaml"), Path(folder, f"gw{number}.log")
            file.write_text(yaml.safe_dump(_configuration(number, port, listed, redis_url, config)))
            process = stack.enter_context(running((*_GATEWAY, str(file)), stack.enter_context(log.open("wb"))))
            started.append(GatewayProcess(f"http://127.0.0.1:{port}", process, log))
            if (number + 1) % at_once == 0 or number + 1 == count:
                for gateway in started[-at_once:]:
                    gateway.wait_until_ready(replicas)
        yield started
        STREAMS.read(gateway.url for gateway in started)
        for gateway in started:
            gateway.process.terminate()  # all at once, before the stack waits for each


def _configuration(
    number: int, port: int, listed: Mapping[str, str], redis_url: str, config: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        **config,
        "host": "127.0.0.1",
        "id": f"gw{number}",
        "port": port,
        "redis": {**config.get("redis", {}), "url": redis_url},
        "replicas": [{"id": replica, "url": url} for replica, url in listed.items()],
    }
