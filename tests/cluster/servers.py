"""Extra simulated replicas for a running cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from bench.cluster import SimReplica
from gateway.ops.local.ports import free_ports
from tests.polling import eventually


async def answers(http: httpx.AsyncClient, url: str) -> bool:
    """Whether a GET succeeds."""
    try:
        return (await http.get(url)).is_success
    except httpx.TransportError:
        return False


@asynccontextmanager
async def another_server(http: httpx.AsyncClient, folder: Path, *arguments: str) -> AsyncIterator[SimReplica]:
    """Runs a simulated replica on its own port, ready to serve, and kills it on exit."""
    port = free_ports(1)[0]
    server = SimReplica("sim", port, ("--speed", "0", *arguments), folder / f"sim-{port}.log")
    server.start()
    try:
        await eventually(lambda: answers(http, f"{server.url}/health"))
        yield server
    finally:
        server.kill()
