"""Starts a benchmark's own Redis, and registers a pool of replicas there that only the map knows."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from coordinator.errors import StoreDown
from coordinator.pool.pool import Pool
from coordinator.redis.wire import Wire, load_scripts
from coordinator.registry import ReplicaRecord
from gateway.ops.local.embedded_redis import find_redis_server
from gateway.ops.local.ports import free_ports

INCARNATION = "199c82cc000"
"""As long as a real engine's incarnation: the length of a record decides how Redis stores it."""
CAPACITY_TOKENS = 10**9


@contextmanager
def embedded_redis() -> Iterator[str]:
    """Starts its own Redis on a free port. Yields its URL."""
    with tempfile.TemporaryDirectory(prefix="kvgate-bench-") as folder:
        (port,) = free_ports(1)
        command = find_redis_server().command(port, Path(folder))
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


async def connect(url: str) -> Wire:
    """Connects as soon as the server accepts connections."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return await Wire.open(url, 1.0, lambda _error: None)
        except StoreDown:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)


async def info(wire: Wire, section: str) -> dict[str, str]:
    """A section of INFO, by field name."""
    lines = (await wire.send("INFO", section)).decode().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


@dataclass(frozen=True)
class Load:
    """Redis' use of one core over a time: the share in which it ran, and the share in which it waited for a core."""

    cpu_share: float
    waiting_share: float


@dataclass(frozen=True)
class Usage:
    """The CPU time and the waiting time of Redis since its start."""

    at_s: float
    cpu_s: float
    waited_s: float

    def since(self, before: Usage) -> Load:
        took_s = self.at_s - before.at_s
        return Load((self.cpu_s - before.cpu_s) / took_s, (self.waited_s - before.waited_s) / took_s)


async def usage(wire: Wire) -> Usage:
    """The current usage of a Redis on this machine. The waiting time is 0 if the kernel does not tell it."""
    found = await info(wire, "cpu")
    waited_s = _waited_s((await info(wire, "server"))["process_id"])
    return Usage(time.monotonic(), float(found["used_cpu_user"]) + float(found["used_cpu_sys"]), waited_s)


def _waited_s(pid: str) -> float:
    schedstat = Path("/proc", pid, "schedstat")
    return int(schedstat.read_text().split()[1]) / 1e9 if schedstat.exists() else 0.0


async def redis_version(url: str) -> str:
    wire = await connect(url)
    try:
        return (await info(wire, "server")).get("redis_version", "unknown")
    finally:
        await wire.close()


async def open_pool(url: str, name: str, gateway: str, replicas: int) -> tuple[Wire, Pool]:
    """A gateway's client of a pool with registered replicas."""
    wire = await connect(url)
    await load_scripts(wire)
    pool = Pool(name, gateway, budget_s=10.0)
    pool.attach(wire)
    for i in range(replicas):
        record = ReplicaRecord(f"r{i}", INCARNATION, "ready", CAPACITY_TOKENS, 0, f"http://127.0.0.1:{i}")
        await pool.register(record, only_if_absent=True)
    return wire, pool
