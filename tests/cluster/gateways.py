"""Extra gateways for a running cluster: processes that a test can stop, kill and misconfigure."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from bench.cluster import Cluster
from gateway.ops.local.ports import free_ports
from gateway.settings.config_file import merged
from tests.polling import eventually

_KVGATE = (sys.executable, "-P", "-m", "gateway.ops.cli")


@dataclass
class GatewayProcess:
    """One `kvgate gateway`."""

    id: str
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def has_exited(self) -> bool:
        return self.process.poll() is not None


def configured_like(cluster: Cluster, gateway: str, **overrides: Any) -> dict[str, Any]:
    """The configuration of the cluster's gateways, for another gateway."""
    base, own = cluster.state_dir / "base.yaml", cluster.state_dir / "gw0.yaml"
    config: dict[str, Any] = merged(
        yaml.safe_load(base.read_text()) if base.exists() else {}, yaml.safe_load(own.read_text())
    )
    del config["shared_port"]
    return config | {"id": gateway, "port": free_ports(1)[0]} | overrides


async def kvgate(*words: str) -> tuple[int, str]:
    """Runs a command. Returns its exit code, and its output with its errors. It runs in a thread, because asyncio's own
    processes are not forked (tests/forked.py)."""
    done = await asyncio.to_thread(
        subprocess.run, [*_KVGATE, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.returncode, done.stdout


@asynccontextmanager
async def another_gateway(cluster: Cluster, gateway: str, **overrides: Any) -> AsyncIterator[GatewayProcess]:
    """Runs another gateway of the cluster, ready to serve, and stops it on exit. `overrides` are sections of its
    configuration."""
    async with started_gateway(cluster.state_dir, configured_like(cluster, gateway, **overrides)) as process:
        async with httpx.AsyncClient() as http:
            await eventually(lambda: _is_ready(http, process))
        yield process


@asynccontextmanager
async def started_gateway(folder: Path, config: dict[str, Any]) -> AsyncIterator[GatewayProcess]:
    """A gateway's process, which may not be ready."""
    gateway = _start(folder / f"{config['id']}-{config['port']}.yaml", config)
    try:
        yield gateway
    finally:
        await _stop(gateway)


def _start(file: Path, config: dict[str, Any]) -> GatewayProcess:
    file.write_text(yaml.safe_dump(config))
    log = file.with_suffix(".log")
    with log.open("wb") as output:
        command = [*_KVGATE, "gateway", "--config", str(file)]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    return GatewayProcess(config["id"], f"http://127.0.0.1:{config['port']}", process, log)


async def _stop(gateway: GatewayProcess) -> None:
    """Stops the gateway by SIGTERM, so that it gives its open requests back at once instead of the reaper."""
    try:
        gateway.signal(signal.SIGCONT)
        gateway.signal(signal.SIGTERM)
        await eventually(gateway.has_exited)
    except AssertionError as error:
        raise AssertionError(f"{gateway.id} does not end: {error}\n{gateway.log.read_text()[-4000:]}") from error
    finally:
        gateway.process.kill()
        gateway.process.wait()


async def _is_ready(http: httpx.AsyncClient, gateway: GatewayProcess) -> bool:
    assert not gateway.has_exited(), gateway.log.read_text()
    try:
        return (await http.get(f"{gateway.url}/ready")).status_code == 200
    except httpx.TransportError:
        return False
