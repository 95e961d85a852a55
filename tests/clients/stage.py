"""The cluster for the client libraries, and extra gateways that a test can configure and kill."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import yaml

from bench.cluster import Cluster, SimReplica
from bench.processes import running
from tests.clients.half import HalfReplica
from tests.cluster.gateways import configured_like
from tests.polling import wait_until

REPLICAS = 3
# A token takes 20 ms, so that an answer of 4 000 tokens lasts longer than every test.
REPLICA_ARGUMENTS = ("--speed", "5", "--decode-s-per-token", "0.1")
# The limits allow for a busy machine.
CONFIG: dict[str, Any] = {
    "redis": {"budget_ms": 500},
    "health": {"timeout_s": 5},
}
REQUEST_S = 2
"""The time limit of requests at the gateway `hurried_url`, in seconds."""


@dataclass(frozen=True)
class Gateway:
    url: str
    process: subprocess.Popen[bytes]


@dataclass
class Stage:
    """Two gateways in front of three simulated replicas and a half replica."""

    cluster: Cluster
    sims: list[SimReplica]
    half: HalfReplica
    hurried_url: str = ""
    """A gateway that allows requests REQUEST_S."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def urls(self) -> list[str]:
        return self.cluster.gateway_urls

    def new_prompt(self) -> str:
        """A text that no request has sent yet."""
        return f"{next(self._numbers)}: tell me a story"

    def carrier(self) -> SimReplica:
        """The replica of the only request in flight."""

        def found() -> SimReplica | None:
            running = [(replica, replica.state()["running"]) for replica in self.sims]
            busy = [replica for replica, requests in running if requests]
            return busy[0] if sum(requests for _, requests in running) == 1 else None

        carrier: SimReplica = wait_until(found)
        return carrier

    @contextmanager
    def failing(self, mode: str, **details: Any) -> Iterator[None]:
        """Inside the context, every simulated replica fails in this mode; see gateway/simulator/faults.py."""
        for replica in self.sims:
            replica.fail(mode, count=-1, **details)
        try:
            yield
        finally:
            for replica in self.sims:
                replica.fail("none")

    def revive(self) -> None:
        """Start the replicas that were killed, and wait until every gateway serves on all of them."""
        for replica in self.sims:
            if replica.process is None or replica.process.poll() is not None:
                replica.start()
                replica.wait_until_ready()
        for url in self.urls:
            _wait_until_ready(url)

    @contextmanager
    def another_gateway(self, **overrides: Any) -> Iterator[Gateway]:
        """Runs another gateway, ready to serve. `overrides` are sections of its configuration."""
        config = configured_like(self.cluster, f"beside-{next(self._numbers)}", **overrides)
        file = self.cluster.state_dir / f"{config['id']}.yaml"
        file.write_text(yaml.safe_dump(config))
        command = (sys.executable, "-P", "-m", "gateway.ops.cli", "gateway", "--config", str(file))
        with file.with_suffix(".log").open("wb") as log, running(command, log) as process:
            gateway = Gateway(f"http://127.0.0.1:{config['port']}", process)
            _wait_until_ready(gateway.url)
            yield gateway


def _wait_until_ready(url: str) -> None:
    """Wait until a gateway serves on all replicas."""

    def is_ready() -> bool:
        try:
            return len(httpx.get(f"{url}/ready").json()["replicas"]) == REPLICAS + 1
        except httpx.TransportError:
            return False

    wait_until(is_ready)
