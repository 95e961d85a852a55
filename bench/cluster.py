"""A cluster for experiments and tests: simulated replicas of any size behind `kvgate up`, all real processes.

The replicas are started here, so that each can be sized, killed and started again on its port; Redis and the
gateways are those of `kvgate up --detach`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from gateway.local.ports import free_ports

_KVGATE = (sys.executable, "-P", "-m", "gateway.cli")


@dataclass
class SimReplica:
    """A simulated replica's process; `start` after `stop` or `kill` brings it back on the same port."""

    id: str
    port: int
    arguments: tuple[str, ...]
    log: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = (*_KVGATE, "replica-sim", "--id", self.id, "--port", str(self.port), *self.arguments)
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def fail(self, mode: str, **details: Any) -> None:
        """Make it fail on demand; `fail("none")` ends it. See bench/simulator/faults.py."""
        httpx.post(f"{self.url}/sim/fail", json={"mode": mode, **details}).raise_for_status()

    def state(self) -> dict[str, Any]:
        """What the replica itself says: running, waiting, aborted, cached_tokens, recent requests."""
        answer: dict[str, Any] = httpx.get(f"{self.url}/sim/state").raise_for_status().json()
        return answer


@dataclass(frozen=True)
class Cluster:
    """A running cluster."""

    url: str
    redis_url: str
    state_dir: Path
    gateways: list[dict[str, Any]]
    replicas: list[SimReplica]
    pool: str = field(default="kvgate-sim-vlm-63845a77")
    """The pool of the simulator's default model."""

    @property
    def gateway_urls(self) -> list[str]:
        return [gateway["url"] for gateway in self.gateways]

    def signal_gateway(self, index: int, number: signal.Signals) -> None:
        os.kill(self.gateways[index]["pid"], number)


@contextmanager
def running_cluster(
    *,
    gateways: int = 2,
    replicas: int = 3,
    replica_arguments: Sequence[str] = ("--speed", "20"),
    config: dict[str, Any] | None = None,
    policy: str | None = None,
    redis_url: str | None = None,
) -> Iterator[Cluster]:
    """Start it, wait until every gateway is ready, and stop all of it at the end."""
    with tempfile.TemporaryDirectory(prefix="kvgate-") as folder:
        state_dir = Path(folder)
        sims = _start_replicas(state_dir, replicas, tuple(replica_arguments))
        try:
            _up(state_dir, gateways, sims, config, policy, redis_url)
            described = json.loads((state_dir / "cluster.json").read_text())
            yield Cluster(described["url"], described["redis_url"], state_dir, described["gateways"], sims)
        finally:
            subprocess.run([*_KVGATE, "down", "--state-dir", folder], capture_output=True, check=False)
            for sim in sims:
                sim.signal(signal.SIGCONT)
                sim.kill()


def _start_replicas(state_dir: Path, count: int, arguments: tuple[str, ...]) -> list[SimReplica]:
    ports = free_ports(count)
    sims = [SimReplica(f"r{i}", port, arguments, state_dir / f"r{i}.log") for i, port in enumerate(ports)]
    for sim in sims:
        sim.start()
    return sims


def _up(
    state_dir: Path,
    gateways: int,
    sims: list[SimReplica],
    config: dict[str, Any] | None,
    policy: str | None,
    redis_url: str | None,
) -> None:
    options = ["--detach", "--state-dir", str(state_dir), "--gateways", str(gateways), "--port", str(free_ports(1)[0])]
    for sim in sims:
        options += ["--replica", f"id={sim.id},url={sim.url}"]
    if config is not None:
        base = state_dir / "base.yaml"
        base.write_text(yaml.safe_dump(config))
        options += ["--config", str(base)]
    options += ["--policy", policy] if policy else []
    options += ["--redis-url", redis_url] if redis_url else []
    done = subprocess.run([*_KVGATE, "up", *options], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"kvgate up failed:\n{done.stdout}\n{done.stderr}")
